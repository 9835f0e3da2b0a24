"""Direct preference optimization (DPO; Rafailov et al. 2023): a loss of pairs of answers.

    r(y) = sum_t log p(y_t) - log p_ref(y_t),    u = beta (r(chosen) - r(rejected))
    loss = -(1 - s) log sigmoid(u) - s log sigmoid(-u)

The sums are over the tokens of an answer, p_ref is the model before the first step, and s is the
label smoothing: the probability that a pair is labeled the wrong way round (Mitchell 2023).

The reference model is neither kept nor run again: its log-probabilities of all windows are computed
once (`train.runs.reference`) and are part of the batch. With LoRA they are those of the weights
without corrections, whose factors B begin with zeros. A frozen copy would take as much memory as
the parameters, and a third more time per step.

Axis letters: B batch, T time, P pairs of a window.
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.spmd import vary_alike
from train.step.loss import LossSums


def preference_loss(
  nats: jax.Array,  # [B, T] float32
  reference: jax.Array,  # [B, T] float32
  segment_ids: jax.Array,  # [B, T] int32
  weights: jax.Array,  # [B, T] float32
  *,
  beta: float,
  label_smoothing: float = 0.0,
  axis_name: str | None = None,
) -> LossSums:
  """Sums of the loss over the pairs of windows; `weight` is the number of pairs.

  Documents 2 p and 2 p + 1 of a window are the chosen and the rejected answer of its pair p, each
  after its prompt. A pair without a token of positive weight, as padding is, does not count.

  Args:
    nats: weighted negative log-likelihoods of the targets (`next_token_nats`).
    reference: the same of the reference model, a constant under differentiation.
    axis_name: mapped mesh axis that shards time; each shard returns an equal part of the sums.

  `measures` are `reward_margin`, the sum of u, and `reward_accuracy`, the number of pairs whose
  u is positive.
  """
  T = nats.shape[1]
  if axis_name is not None:
    T *= jax.lax.axis_size(axis_name)
  pairs = -(-T // 2)  # an answer has at least one token

  def by_answer(x):
    # Not a scatter: its order of additions differs from run to run on a GPU.
    is_of = segment_ids[:, None] == jnp.arange(2 * pairs, dtype=segment_ids.dtype)[:, None]
    sums = jnp.where(is_of, x[:, None], 0).sum(-1)
    return sums if axis_name is None else jax.lax.psum(sums, axis_name)

  ratios = by_answer(jax.lax.stop_gradient(reference) - nats).reshape(-1, pairs, 2)
  targets = by_answer(jax.lax.stop_gradient(weights)).reshape(-1, pairs, 2)
  counts = (targets > 0).any(-1)
  margins = beta * (ratios[..., 0] - ratios[..., 1])
  losses = -(1 - label_smoothing) * jax.nn.log_sigmoid(margins)
  losses -= label_smoothing * jax.nn.log_sigmoid(-margins)
  zeros, shards = jnp.zeros_like(margins), 1 if axis_name is None else jax.lax.axis_size(axis_name)
  terms = losses, 1 + zeros, zeros, *map(jax.lax.stop_gradient, (margins, zeros + (margins > 0)))
  sums = [jnp.where(counts, x, 0).sum() / shards for x in terms]
  _, loss, weight, penalty, margin, accuracy = vary_alike((nats, *sums))
  return LossSums(loss, weight, penalty, {"reward_margin": margin, "reward_accuracy": accuracy})
