"""One step of training, whatever is trained: gradients, guard, optimizer, average.

    state, metrics = step(loss, state, batch, rules)

The loss is a function of parameters and batch. `train_step.py` has that of a language model on a
mesh, `copies.py` maps the step over the copies of a run.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lnssm_jax.models import aux_loss, layers
from train.step import step_guard
from train.step.loss import LossSums
from train.step.optimizer import as_skipped, update_ema
from train.step.state import State

# (parameters, batch) -> sums of the loss over the batch, and the auxiliary outputs of the layers,
# whose losses are added to what is differentiated; both add up over microbatches and devices.
Loss = Callable[[Any, Any], tuple[LossSums, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """How a step changes the state.

  Attributes:
    tx: the optimizer, whose last transformation counts steps for the schedule.
    schedule: the learning rate by the number of finished steps, which is only reported.
    accumulate: microbatches of a batch, which the rows of all its arrays are divided into.
    skip_spikes: `train.step.step_guard`.
    ema_decay: of the average of the parameters, if any.
    shardings: of the parameters, on a mesh.
    num_layers: of a model with auxiliary outputs, which are a metric by layer.
    of_mean: whether the loss is a mean, of a batch that is not accumulated, instead of a sum.
  """

  tx: optax.GradientTransformation
  schedule: optax.Schedule
  accumulate: int = 1
  skip_spikes: float | None = None
  ema_decay: float | None = None
  shardings: Any = None
  num_layers: int = 0
  of_mean: bool = False


def step(
  loss: Loss, state: State, batch: Any, rules: Rules, scale: jax.Array | None = None
) -> tuple[State, dict[str, Any]]:
  """The state after a step on `batch`, and its metrics.

  The gradient is the sum over all microbatches divided by their weight, in float32, exactly as for
  one large batch, even if the microbatches have unequal weights. A step whose loss or gradient is
  not finite, of whose batch no target counts, or that is a spike, changes nothing but the count of
  steps (`train.step.step_guard`).

  Metrics are float32 scalars: `loss` (per weight, before the step), `grad_norm` (before clipping),
  `param_norm` (after the step), `learning_rate`, `tokens` (the weight), and `skipped` (1 if the
  update was rejected). `aux` is a list of the auxiliary outputs by layer, divided by the weight, if
  there are any (None for a layer without); `measures` are those of the loss, if there are any, also
  divided by the weight.

  Args:
    scale: multiplies the updates of the parameters.
  """

  def differentiated(params, batch):
    sums, aux = loss(params, batch)
    return sums.nats + aux_loss(aux), (sums, aux)

  def gradient_sums(params, batch):
    (_, sums), gradients = jax.value_and_grad(differentiated, has_aux=True)(params, batch)
    return optax.tree.cast(gradients, jnp.float32), sums

  params = state["params"]
  gradients, (sums, aux) = _accumulate(
    functools.partial(gradient_sums, params), batch, rules.accumulate
  )
  mean_loss, measures = sums.nats, sums.measures
  if not rules.of_mean:
    weight = jnp.where(sums.weight > 0, sums.weight, 1.0)
    gradients, aux, measures = jax.tree.map(lambda g: g / weight, (gradients, aux, sums.measures))
    if rules.shardings is not None:
      gradients = jax.lax.with_sharding_constraint(gradients, rules.shardings)
    # Fused with the sums of squares, the stacking of the layers' gradients and the update of Adam
    # run at a fraction of the memory's speed on a GPU.
    gradients = jax.lax.optimization_barrier(gradients)
    mean_loss = mean_loss / weight
  grad_norm = optax.tree.norm(gradients)
  good = step_guard.is_finite(mean_loss, grad_norm) & (sums.weight != 0)
  if rules.skip_spikes is not None:
    good &= ~step_guard.is_spike(state["spikes"], mean_loss, grad_norm, rules.skip_spikes)
  choose = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
  with jax.named_scope("optimizer"):
    updates, opt_state = rules.tx.update(
      gradients, state["opt_state"], optax.tree.cast(params, jnp.float32)
    )
    if scale is not None:
      updates = jax.tree.map(lambda u: scale * u, updates)
    opt_state = choose(opt_state, as_skipped(state["opt_state"], opt_state))
    params = choose(optax.apply_updates(params, updates), params)
  metrics = {
    "loss": mean_loss,
    "grad_norm": grad_norm,
    "param_norm": optax.tree.norm(jax.lax.optimization_barrier(params)),
    "learning_rate": jnp.asarray(rules.schedule(state["step"]), jnp.float32),
    "tokens": sums.weight,
    "skipped": 1 - good.astype(jnp.float32),
  }
  if jax.tree.leaves(aux):
    metrics["aux"] = layers.apart(aux, rules.num_layers)
  if measures:
    metrics["measures"] = measures
  state = state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
  if rules.ema_decay is not None:
    averaged = update_ema(state["ema"], params, rules.ema_decay)
    state["ema"] = choose(averaged, state["ema"])
  if rules.skip_spikes is not None:
    seen = state["spikes"]
    state["spikes"] = choose(step_guard.update_statistics(seen, mean_loss, grad_norm), seen)
  return state, metrics


def _accumulate(sums_of: Callable[[Any], Any], batch: Any, count: int) -> Any:
  """Sum of `sums_of` over `count` microbatches, in a scan."""
  if count == 1:
    return sums_of(batch)

  # Row r belongs to microbatch r % count: no row moves to another device.
  split = lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
  microbatches = jax.tree.map(split, batch)

  def body(total, microbatch):
    return jax.tree.map(jnp.add, total, sums_of(microbatch)), None

  shapes = jax.eval_shape(sums_of, jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(body, zeros, microbatches)[0]
