"""Adam with clipping, weight decay and a learning-rate schedule, from optax transformations."""

from typing import Any

import jax
import optax

from train import config

STACKED = "blocks"  # parameters below this key have a leading layer axis


def make_schedule(optimizer: config.Optimizer, steps: int) -> optax.Schedule:
  """Learning rate as a function of the number of finished steps, 0 .. steps - 1.

  exponential: lr = peak (final / peak)^(step / steps), as in the LNSSM paper (with a constant
  number of tokens per step, exponential in tokens). cosine: half a cosine from peak to final.
  Either spans the steps that remain after `warmup_steps` steps of linear warmup from 0.
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
  """Chains clipping, Adam, decoupled weight decay and the schedule; also returns the schedule."""
  schedule = make_schedule(optimizer, steps)
  clip, decay = optimizer.clip_norm, optimizer.weight_decay
  # Unused transformations become identities, which keeps the tree structure of checkpoints.
  transformation = optax.chain(
    optax.identity() if clip is None else optax.clip_by_global_norm(clip),
    optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps),
    optax.add_decayed_weights(decay, is_matrix) if decay else optax.identity(),
    optax.scale_by_learning_rate(schedule),
  )
  return transformation, schedule


def as_skipped(before: Any, after: Any) -> Any:
  """Optimizer state after a skipped step: `before`, except for the schedule's count.

  The learning rate remains a function of the step number.
  """
  return (*before[:-1], after[-1])


def is_matrix(params: Any) -> Any:
  """Weight-decay mask: True for parameters of rank >= 2 within their layer."""

  def decide(path, leaf):
    layer_axes = int(any(getattr(entry, "key", None) == STACKED for entry in path))
    return leaf.ndim - layer_axes >= 2

  return jax.tree_util.tree_map_with_path(decide, params)
