"""The compiled functions that train and evaluate a model; modules exist only inside them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.models import aux_loss, layers
from lnssm_jax.ops.core.dropout import row_keys
from train import config
from train.cluster import compile_cache, device_mesh
from train.step import step_guard
from train.step.loss import LossSums, next_token_loss
from train.step.model import model_graph
from train.step.optimizer import as_skipped, make_schedule, penalties_of, update_ema
from train.step.state import abstract_state

# tokens, targets, segment_ids int32 [B, T]; weights float32 [B, T]; dropout uint32 [B, 2] keys.
Batch = dict[str, jax.Array]

_DROPOUT = 1 << 31  # the keys of parameters have small numbers


def make_train_step(
  cfg: config.Train,
  graph: Any,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  kernels: Path | None = None,
) -> jax.stages.Wrapped:
  """Builds the jitted step `(state, batch) -> (state, metrics)`, which donates the old state.

  Metrics are float32 scalars: `loss` (nats per predicted token, before the step), `grad_norm`
  (before clipping), `param_norm` (after the step), `learning_rate`, `tokens` (sum of weights), and
  `skipped` (1 if the update was rejected by `train.step.step_guard`, also where no target of the
  batch counts). If the batch has `votes`
  (`distributed.ballot`), the metrics hold their maximum over all devices. If a mixer has an
  auxiliary output, `aux` is a list of them by layer (None for a mixer without). Their losses are
  added to what is differentiated, not to `loss`; each counts for the tokens of its microbatch.

  With `cfg.accumulate` microbatches the gradient is the sum over all predicted tokens divided by
  their number, exactly as for one large batch, even if the microbatches have unequal weights.

  With dropout, the keys of a row are functions of `cfg.seed`, the step and the number of the row in
  the global batch: a run has the same masks however it is resumed, sharded or split into
  microbatches.

  Args:
    kernels: folder that caches a GPU's autotuning results; processes that share it compute the
      same bits.
  """
  schedule = make_schedule(cfg.optimizer, cfg.steps)
  loss_sums = _make_loss_sums(cfg, graph, mesh, with_aux=True)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))

  penalties = penalties_of(cfg.optimizer)

  def loss(params, batch):
    sums, aux = loss_sums(params, batch, penalties)
    return sums.nats + aux_loss(aux), (sums, aux)

  def gradient_sums(params, batch):
    (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return optax.tree.cast(gradients, jnp.float32), sums

  def step(state, batch):
    params, votes = state["params"], batch.get("votes")
    batch = {name: array for name, array in batch.items() if name != "votes"}
    if nnx.merge(graph, params).has_dropout:
      of_step = jax.random.fold_in(dropout_key(cfg.seed), state["step"])
      batch["dropout"] = row_keys("make_train_step", of_step, len(batch["tokens"]))
    gradients, (sums, aux) = _accumulate(
      functools.partial(gradient_sums, params), batch, cfg.accumulate
    )
    tokens = jnp.where(sums.weight > 0, sums.weight, 1.0)
    gradients, aux = jax.tree.map(lambda g: g / tokens, (gradients, aux))
    gradients = jax.lax.with_sharding_constraint(gradients, shardings["params"])
    # Fused with the sums of squares, the stacking of the layers' gradients and the update of Adam
    # run at a fraction of the memory's speed on a GPU.
    gradients = jax.lax.optimization_barrier(gradients)
    mean_loss, grad_norm = sums.nats / tokens, optax.tree.norm(gradients)
    good = step_guard.is_finite(mean_loss, grad_norm) & (sums.weight != 0)
    if cfg.skip_spikes is not None:
      good &= ~step_guard.is_spike(state["spikes"], mean_loss, grad_norm, cfg.skip_spikes)
    choose = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    with jax.named_scope("optimizer"):
      updates, opt_state = tx.update(
        gradients, state["opt_state"], optax.tree.cast(params, jnp.float32)
      )
      opt_state = choose(opt_state, as_skipped(state["opt_state"], opt_state))
      params = choose(optax.apply_updates(params, updates), params)
    metrics = {
      "loss": mean_loss,
      "grad_norm": grad_norm,
      "param_norm": optax.tree.norm(jax.lax.optimization_barrier(params)),
      "learning_rate": jnp.asarray(schedule(state["step"]), jnp.float32),
      "tokens": sums.weight,
      "skipped": 1 - good.astype(jnp.float32),
    }
    if jax.tree.leaves(aux):
      metrics["aux"] = layers.apart(aux, cfg.model.num_layers)
    if votes is not None:
      metrics["votes"] = votes.max(0)
    state = state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
    if cfg.optimizer.ema_decay is not None:
      averaged = update_ema(state["ema"], params, cfg.optimizer.ema_decay)
      state["ema"] = choose(averaged, state["ema"])
    if cfg.skip_spikes is not None:
      seen = state["spikes"]
      state["spikes"] = choose(step_guard.update_statistics(seen, mean_loss, grad_norm), seen)
    return state, metrics

  # Fixed output shardings: the returned state is sharded as the argument, so one program suffices.
  return jax.jit(
    step,
    donate_argnums=0,
    out_shardings=(shardings, device_mesh.replicated(mesh)),
    compiler_options=compile_cache.options(mesh, kernels),
  )


def make_eval_step(
  cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None = None
) -> jax.stages.Wrapped:
  """Builds the jitted `(params, batch) -> LossSums`; `kernels` as in `make_train_step`."""
  loss_sums = _make_loss_sums(cfg, graph, mesh, with_aux=False)

  def step(params, batch):
    return loss_sums(params, batch, {})[0]

  options = compile_cache.options(mesh, kernels)
  return jax.jit(step, out_shardings=device_mesh.replicated(mesh), compiler_options=options)


def _make_loss_sums(
  cfg: config.Train, graph: Any, mesh: Mesh, *, with_aux: bool
) -> Callable[..., tuple[LossSums, Any]]:
  """Builds `(params, batch, penalties) -> (LossSums, aux)` over a global batch on `mesh`.

  `aux` is the auxiliary output of the layers times the sum of weights, so that it adds up over
  devices and microbatches as the loss does; None without `with_aux`.
  """
  axes = device_mesh.mapped_axes(mesh)
  if mesh.shape["sequence"] > 1:
    graph = model_graph(cfg.model, "sequence")
  gather = None
  if mesh.shape["tensor"] > 1:
    gather = functools.partial(sharding.constrain, mesh=mesh)
  elif mesh.shape["fsdp"] > 1:
    gather = functools.partial(sharding.gather, axis_name="fsdp")

  def sums(params, batch, penalties):
    if gather is not None:  # layers gather their parameters when they run
      params = params | gather({name: params[name] for name in params if name != "blocks"})
    model = nnx.merge(graph, params)
    hidden_of = model.hidden_and_aux if with_aux else model.hidden
    options = {"segment_ids": batch["segment_ids"], "dropout_key": batch.get("dropout")}
    hidden, rest = hidden_of(batch["tokens"], **options, gather=gather)
    sums = next_token_loss(
      hidden,
      model.head_kernel(),
      batch["targets"],
      batch["weights"],
      chunk=cfg.loss_chunk,
      **penalties,
      vocab_axis="tensor" if mesh.shape["tensor"] > 1 else None,
    )
    return sums, jax.tree.map(lambda x: x * sums.weight, rest if with_aux else None)

  if not axes:

    def partitioned(params, batch, penalties):
      # The scans wrap their kernels in shard_map over the ambient mesh.
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return sums(params, batch, penalties)

    return partitioned

  rows = tuple(axis for axis in device_mesh.ROWS if axis in axes) or None
  batch_axes = tuple(axis for axis in axes if axis != "tensor")

  def mapped(params, batch, penalties):
    def of_shard(params, batch):
      return jax.tree.map(lambda x: jax.lax.psum(x, batch_axes), sums(params, batch, penalties))

    of_batch = {name: PartitionSpec(rows, "sequence") for name in batch}
    if "dropout" in batch:
      of_batch["dropout"] = PartitionSpec(rows)
    inputs = sharding.param_specs(params, batch_axes), of_batch
    specs = {"mesh": mesh, "in_specs": inputs, "out_specs": PartitionSpec()}
    return jax.shard_map(of_shard, **specs, axis_names=set(axes))(params, batch)

  return mapped


def dropout_key(seed: int) -> jax.Array:
  """The key of a run's dropout; those of its parameters are made from the seed in another way."""
  return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _DROPOUT)


def _accumulate(sums_of: Callable[[Batch], Any], batch: Batch, count: int) -> Any:
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
