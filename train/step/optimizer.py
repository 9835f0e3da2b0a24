"""Optimizers with clipping, weight decay and a learning-rate schedule, from optax's."""

import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lnssm_jax.pretrained.exports import flat, name_of
from lnssm_jax.sharding import has_weight_decay
from train import config
from train.config import functions
from train.step.lora import lora

STACKED = "blocks"  # parameters below this key have a leading layer axis


def make_schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
  """Learning rate as a function of the number of finished steps, 0 .. steps - 1.

  `config.Optimizer` has the formulas: linear warmup from 0, then the schedule over what remains.
  The exponential one is the LNSSM paper's (with a constant number of tokens per step, exponential
  in tokens), the inverse square root that of the Transformer (Vaswani et al. 2017), section 5.3.
  """
  peak, final, warmup = optimizer.peak_lr, optimizer.final_lr, optimizer.warmup_steps
  remaining = steps - warmup
  match optimizer.schedule:
    case "exponential":
      after = optax.exponential_decay(peak, remaining, final / peak, end_value=final)
    case "cosine":
      after = optax.cosine_decay_schedule(peak, remaining, alpha=final / peak)
    case "linear":
      after = optax.linear_schedule(peak, final, remaining)
    case "wsd":
      last = optimizer.decay_steps or max(1, remaining // 10)
      line = optax.linear_schedule(peak, final, last)
      after = optax.join_schedules([optax.constant_schedule(peak), line], [remaining - last])
    case "constant":
      after = optax.constant_schedule(peak)
    case "inverse_sqrt":
      after = lambda step: peak * jnp.sqrt(warmup / (warmup + step))
  if not warmup:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(
  optimizer: config.Optimizer, steps: int, seed: int = 0
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Chains clipping, Adam or what takes its place, decoupled weight decay, factors, the schedule.

  Also returns the schedule. `seed` is that of LoRA's factors.

  Raises:
    ConfigError: `optimizer.name` or `optimizer.options` are not of such a function; on `init`: a
      pattern of `optimizer.lr_factors` or `optimizer.lora_names` matches no parameter.
  """
  schedule = make_schedule(optimizer, steps)
  clip, decay, factors = optimizer.clip_norm, optimizer.weight_decay, optimizer.lr_factors
  # Unused transformations become identities, which keeps the tree structure of checkpoints.
  transformation = optax.chain(
    optax.identity() if clip is None else optax.clip_by_global_norm(clip),
    _direction(optimizer),
    optax.add_decayed_weights(decay, weight_decay_mask) if decay else optax.identity(),
    *([_scale_by_name(factors)] if factors else []),
    optax.scale_by_learning_rate(schedule),
  )
  transformation = _balancing(transformation, optimizer.router_bias_rate)
  if (rank := optimizer.lora_rank) is not None:
    scale = (optimizer.lora_alpha or rank) / rank
    key = jax.random.key(seed)
    transformation = lora(transformation, rank, scale, optimizer.lora_names, key)
  return transformation, schedule


def update_ema(ema: Any, params: Any, decay: float) -> Any:
  """decay * ema + (1 - decay) * params in float32, leaf by leaf."""
  return jax.tree.map(lambda old, new: decay * old + (1 - decay) * jnp.float32(new), ema, params)


def penalties_of(optimizer: config.Optimizer) -> dict[str, float]:
  """The arguments of `train.step.loss.next_token_loss` for the penalties of the logits."""
  return {"logit_penalty": optimizer.logit_penalty, "z_loss": optimizer.z_loss}


def _direction(optimizer: config.Optimizer) -> optax.GradientTransformation:
  """Builds the transformation of clipped gradients, before weight decay and learning rate."""
  adam = optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps)
  if optimizer.name == "adamw":
    return adam
  name, options = optimizer.name, dict(optimizer.options)
  try:
    if name == "muon":
      rms = options.pop("consistent_rms", 0.2)
      # The values of an orthogonal matrix have a mean square of 1 / max(in, out).
      scale = lambda x: rms * max(x.shape[-2:]) ** 0.5 * x
      shape = optax.stateless(lambda updates, _: jax.tree.map(scale, updates))
      muon = optax.contrib.scale_by_muon(weight_dimension_numbers=_matrices, **options)
      labels = lambda params: jax.tree.map(
        lambda at: "adam" if isinstance(at, optax.MaskedNode) else "muon",
        _matrices(params),
        is_leaf=lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers | optax.MaskedNode),
      )
      return optax.partition({"muon": optax.chain(muon, shape), "adam": adam}, labels)
    made = functions.found(name)(**options)
    if not isinstance(made, optax.GradientTransformation):
      raise TypeError(f"it returned {type(made).__name__}, not an optax.GradientTransformation")
    return made
  except (Exception, SystemExit) as error:
    raise config.ConfigError(
      f"optimizer.name={name!r} with optimizer.options={options} cannot be used:"
      f" {functions.explained(error)}."
    ) from error


def _matrices(params: Any) -> Any:
  """Axes of the matrices inside the layers, [layers, in, out]; a MaskedNode for other leaves."""

  def axes(path, leaf):
    if isinstance(leaf, optax.MaskedNode):
      return leaf
    keys = [entry.key for entry in path]
    is_matrix = STACKED in keys and keys[-1] == "kernel" and leaf.ndim == 3
    if not is_matrix or "conv" in keys[-2]:
      return optax.MaskedNode()
    return optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)

  is_leaf = lambda x: isinstance(x, optax.MaskedNode)
  return jax.tree_util.tree_map_with_path(axes, params, is_leaf=is_leaf)


def _balancing(inner: optax.GradientTransformation, rate: float) -> optax.GradientTransformation:
  """Moves the biases of routers by `rate` against their gradient's sign; `inner` sees it as 0.

  The gradient is the share of the tokens that select an expert, minus the mean over experts.
  """
  is_bias = lambda path: path[-1].key == "router_bias"
  mapped = jax.tree_util.tree_map_with_path

  def update(updates, state, params=None):
    hidden = mapped(lambda path, x: jnp.zeros_like(x) if is_bias(path) else x, updates)
    found, state = inner.update(hidden, state, params)
    own = lambda path, x, new: -rate * jnp.sign(x) if is_bias(path) else new
    return mapped(own, updates, found), state

  return optax.GradientTransformation(inner.init, update)


def _scale_by_name(factors: Mapping[str, float]) -> optax.GradientTransformation:
  """Multiplies each update by the factor of the first pattern that its name matches."""

  def init(params):
    names = list(flat(params))
    for pattern in factors:
      if not fnmatch.filter(names, pattern):
        raise config.ConfigError(
          f"optimizer.lr_factors: no parameter matches {pattern!r}; there are {', '.join(names)}."
        )
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params

    def scale(path, x):
      matches = (factor for p, factor in factors.items() if fnmatch.fnmatchcase(name_of(path), p))
      factor = next(matches, 1.0)
      # Not 0 * x: the gradient of a frozen parameter may overflow.
      return x * factor if factor else jnp.zeros_like(x)

    return jax.tree_util.tree_map_with_path(scale, updates), state

  return optax.GradientTransformation(init, update)


def as_skipped(before: Any, after: Any) -> Any:
  """Optimizer state after a skipped step: `before`, except for the schedule's count.

  The learning rate remains a function of the step number.
  """
  return (*before[:-1], after[-1])


def weight_decay_mask(params: Any) -> Any:
  """Which parameters of a model decay: `lnssm_jax.sharding.has_weight_decay` within their layer."""
  return has_weight_decay(params, stacked=STACKED)
