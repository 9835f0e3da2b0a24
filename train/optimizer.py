"""Adam, its learning-rate schedule and what surrounds them, from optax parts."""

from typing import Any

import jax
import optax

from train import config

STACKED = "blocks"  # the parameters below this key carry a leading layer axis


def make_schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
  """The learning rate as a function of the number of finished steps, 0 .. steps - 1.

  exponential: lr = peak (final / peak)^(step / steps), the LNSSM paper's (with constant tokens a
  step, exponential in tokens). cosine: half a cosine from peak to final. Either one starts after
  `warmup_steps` linear steps from 0 and spends the remaining ones.
  """
  decay_steps = steps - optimizer.warmup_steps
  ratio = optimizer.final_lr / optimizer.peak_lr
  if optimizer.schedule == "cosine":
    decay = optax.cosine_decay_schedule(optimizer.peak_lr, decay_steps, alpha=ratio)
  else:
    decay = optax.exponential_decay(
      optimizer.peak_lr, decay_steps, ratio, end_value=optimizer.final_lr
    )
  if not optimizer.warmup_steps:
    return decay
  warmup = optax.linear_schedule(0.0, optimizer.peak_lr, optimizer.warmup_steps)
  return optax.join_schedules([warmup, decay], [optimizer.warmup_steps])


def make_optimizer(
  optimizer: config.Optimizer, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Clipping, Adam, decoupled weight decay and the schedule, as one transformation."""
  schedule = make_schedule(optimizer, steps)
  clip, decay = optimizer.clip_norm, optimizer.weight_decay
  # Unused parts become identities, which keeps the layout of the state in checkpoints.
  transformation = optax.chain(
    optax.identity() if clip is None else optax.clip_by_global_norm(clip),
    optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps),
    optax.add_decayed_weights(decay, is_matrix) if decay else optax.identity(),
    optax.scale_by_learning_rate(schedule),
  )
  return transformation, schedule


def as_skipped(before: Any, after: Any) -> Any:
  """The optimizer state after a step that is left out: `before`, but for the schedule's count.

  So the learning rate stays a function of the step number.
  """
  return (*before[:-1], after[-1])


def is_matrix(params: Any) -> Any:
  """True for the parameters that weight decay shrinks: those of rank >= 2 within their layer."""

  def decide(path, leaf):
    layer_axes = int(any(getattr(entry, "key", None) == STACKED for entry in path))
    return leaf.ndim - layer_axes >= 2

  return jax.tree_util.tree_map_with_path(decide, params)
