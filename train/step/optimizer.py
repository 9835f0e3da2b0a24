"""Adam with clipping, weight decay and a learning-rate schedule, from optax transformations."""

from typing import Any

import jax.numpy as jnp
import optax

from lnssm_jax.sharding import has_weight_decay
from train import config

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
  optimizer: config.Optimizer, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Chains clipping, Adam, decoupled weight decay and the schedule; also returns the schedule."""
  schedule = make_schedule(optimizer, steps)
  clip, decay = optimizer.clip_norm, optimizer.weight_decay
  # Unused transformations become identities, which keeps the tree structure of checkpoints.
  transformation = optax.chain(
    optax.identity() if clip is None else optax.clip_by_global_norm(clip),
    optax.scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps),
    optax.add_decayed_weights(decay, weight_decay_mask) if decay else optax.identity(),
    optax.scale_by_learning_rate(schedule),
  )
  return transformation, schedule


def as_skipped(before: Any, after: Any) -> Any:
  """Optimizer state after a skipped step: `before`, except for the schedule's count.

  The learning rate remains a function of the step number.
  """
  return (*before[:-1], after[-1])


def weight_decay_mask(params: Any) -> Any:
  """Which parameters of a model decay: `lnssm_jax.sharding.has_weight_decay` within their layer."""
  return has_weight_decay(params, stacked=STACKED)
