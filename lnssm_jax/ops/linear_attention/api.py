"""`linear_attention`: public API, argument checks and dispatch."""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import (
  check_chunk_size,
  check_floating,
  check_heads,
  check_log_decay,
  check_shape,
  checked_scale,
)
from lnssm_jax.ops.core.grouped_heads import form_over_groups, state_heads
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.linear_attention import facts
from lnssm_jax.ops.linear_attention.chunked import chunked
from lnssm_jax.ops.linear_attention.ranks import (
  form_over_ranks,
  rows_of,
  rows_of_tokens,
  rows_to_tokens,
)
from lnssm_jax.ops.linear_attention.reference import associative, reference
from lnssm_jax.ops.linear_attention.sharded import sharded
from lnssm_jax.ops.linear_attention.types import (
  RESULT_AXES,
  Inputs,
  LinearAttentionState,
  Options,
  init_state,
)

_NAME = "linear_attention"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", RESULT_AXES, apart=True)

IMPLEMENTATIONS = _KERNELS.with_forms(
  chunked=chunked,
  reference=form_over_groups(form_over_ranks(reference)),
  associative=form_over_groups(form_over_ranks(associative)),
)
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=("q", "k"),
  recurrence=facts.recurrence,
  decodes=True,
)
def linear_attention(
  q: ty.BTSK | ty.BTRSK,
  k: ty.BTSK | ty.BTRSK,
  v: ty.BTSV | ty.BTRSV,
  *,
  log_decay: ty.S | ty.SK | ty.BTS | ty.BTSK | None = None,
  value_log_decay: ty.SV | ty.BTSV | None = None,
  bonus: ty.SK | None = None,
  own_weight: ty.BTS | None = None,
  normalize: bool = False,
  scale: float | None = None,
  initial_state: LinearAttentionState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTHV | ty.BTRHV, LinearAttentionState]:
  r"""Attention without softmax, in time linear in T, with decay of keys, values or both.

      S_t = diag(a_t) S_{t-1} diag(c_t) + k_t v_t^T            a = exp(log_decay)
                                                               c = exp(value_log_decay)
      out_t = scale * S_t^T q_t                                without `bonus`
      out_t = scale * (S_{t-1} + diag(bonus) k_t v_t^T)^T q_t  with `bonus`: read before the update
      out_t = scale * (S_t + (own_weight - 1) k_t v_t^T)^T q_t with `own_weight`

  With `normalize`, out_t is divided by q_t^T z_t, where z is the same recurrence for v = 1 and is
  read the same way.

  States, decays, sums and denominators are float32 (float64 if an input is) whatever the dtype of
  q, k, v; `out` has the dtype of `v`. Reverse mode only: the chunked form has its own backward
  pass. What every op promises is in `lnssm_jax.ops`.

  Args:
    q, k, v: of H heads, or some of G, a divisor of H: then head h has the head h // (H / G) of
      those. All heads of Mamba-2 share q and k; several query heads share k, v and the decays in
      GLA with grouped keys. So may decays and the bonus. Nothing is copied to all heads. With an
      axis of R before that of heads, `[B, T, R, H, K]`, a token has R queries, keys and values: S_t
      adds the R products, and each query reads all of them (Mamba-3's MIMO).
    log_decay: values <= 0, down to -inf, each exact to the dtype. Its rank says what it means:
      `[H]` one constant per head (RetNet), `[H, K]` one constant per key channel (LNSSM, RWKV-5),
      `[B, T, H]` one per token and head (Mamba-2), `[B, T, H, K]` one per token and key channel
      (GLA, RWKV-6). None means no decay.
    value_log_decay: the same for value channels, `[H, V]` or `[B, T, H, V]`.
    bonus: weight of the token's own key and value in its output, `[H, K]`.
    own_weight: `[B, T, H]`, by which the output of a token weights the token's own key and value;
      in the state they have the weight 1. Exact for the weight 0, too. Not with `bonus`.
      Of R queries, keys and values: the weight of all R in each output.
    normalize: divide by q_t^T z_t. The caller's features must keep that sum away from 0: nothing is
      added to it.
    scale: multiplies the output; a Python number. None means K**-0.5, or with `normalize` 1 (a
      common factor of the queries cancels there).
    initial_state: the state before the first token; None means zeros. It has the most heads of k,
      v and the decays: G if only the queries have H.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has B H (K V + K) numbers and the sums of the decays.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "chunked".
    chunk_size: tokens per chunk, a power of two; None means the default. The kernels have 64.

  Returns:
    `out` [B, T, H, V], or [B, T, R, H, V], and the `LinearAttentionState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree, `normalize` together with `value_log_decay`, for
      which no denominator is defined, `bonus` together with `own_weight`, or R > 1 with decays per
      channel, `bonus` or `normalize`; the message names the argument.
    NotImplementedError: the named implementation does not support these arguments.

  Sources: linear attention, Katharopoulos et al. 2020; per-channel decay, GLA (Yang et al. 2024),
  eq. 3; normalized constant decay, LNSSM, eqs. 14 and 19; read before update, RWKV-5/6 (Peng et al.
  2024), eqs. 16-19; a weight of the own token and R keys per token, Mamba-3 (Lahoti et al. 2026).
  """
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  tokens, rank = q.shape[:-2], 1  # [B, T] or [B, T, R]
  if q.ndim == 5:
    q, k, v, rank = rows_of(_NAME, q, k, v)
  B, T, H, K, V = check_heads(_NAME, q, k, v, grouped=True)
  T //= rank
  acc = accumulation_dtype(q, k, v)
  heads = dict.fromkeys((H, *(x.shape[2] for x in (q, k, v))))
  log_decay = _with_four_axes("log_decay", log_decay, (B, T, heads, K), acc, per_head=True)
  if normalize and value_log_decay is not None:
    raise ValueError(
      f"{_NAME}: normalize=True has no meaning together with value_log_decay, because the "
      "denominator would differ from one value column to the next. Divide the output yourself, "
      "or leave one of the two out."
    )
  if value_log_decay is not None:
    value_log_decay = _with_four_axes(
      "value_log_decay", value_log_decay, (B, T, heads, V), acc, per_head=False
    )
  if bonus is not None:
    check_floating(_NAME, "bonus", bonus)
    bonus = jnp.asarray(bonus)
    if bonus.shape not in [(n, K) for n in heads]:
      check_shape(_NAME, "bonus", bonus, (H, K), "[H, K]")
  if own_weight is not None:
    if bonus is not None:
      raise ValueError(
        f"{_NAME}: bonus and own_weight both weight a token's own key and value; leave one out."
      )
    check_floating(_NAME, "own_weight", own_weight)
    own_weight = jnp.asarray(own_weight, acc)
    if own_weight.shape not in [(B, T, n) for n in heads]:
      check_shape(_NAME, "own_weight", own_weight, (B, T, H), "[B, T, H]")
  scale = checked_scale(_NAME, scale, 1.0 if normalize else K**-0.5)
  check_chunk_size(_NAME, chunk_size)

  S = state_heads(k, v, log_decay, value_log_decay)
  state = init_state(batch=B, heads=S, key_dim=K, value_dim=V, normalize=True, dtype=acc)
  if initial_state is not None:
    check_shape(_NAME, "initial_state.kv", initial_state.kv, (B, S, K, V), "[B, H, K, V]")
    state = state._replace(kv=jnp.asarray(initial_state.kv, acc))
    if normalize:
      if initial_state.key_sum is None:
        raise ValueError(
          f"{_NAME}: normalize=True needs initial_state.key_sum [B, H, K], but it is None; "
          "pass on the state that a call with normalize=True returned."
        )
      check_shape(_NAME, "initial_state.key_sum", initial_state.key_sum, (B, S, K), "[B, H, K]")
      state = state._replace(key_sum=jnp.asarray(initial_state.key_sum, acc))
  segments = segments_of(_NAME, segment_ids, B, T)
  inputs = Inputs(q, k, v, log_decay, value_log_decay, bonus, state, segments, own_weight)
  options = Options(bool(normalize), scale, chunk_size, fresh=initial_state is None, rank=rank)
  if rank > 1:
    if normalize or bonus is not None or value_log_decay is not None or log_decay.shape[-1] > 1:
      raise ValueError(
        f"{_NAME}: q {tokens} has {tokens[2]} queries per token, which needs one decay per head or "
        "none, and neither normalize nor bonus nor value_log_decay."
      )
    inputs = rows_of_tokens(inputs, rank)
  by_token = lambda result: (rows_to_tokens(result[0], tokens), result[1])
  how = {"implementation": implementation, "axis_name": axis_name}
  return _run(inputs, options, **how, finish=by_token)


def _with_four_axes(name, decay, shape, dtype, *, per_head) -> jax.Array:
  """A decay [B or 1, T or 1, one of the numbers of heads, X or 1]; None becomes a zero."""
  if decay is None:
    return jnp.zeros((1, 1, 1, 1), dtype)
  check_log_decay(_NAME, name, decay)
  decay = jnp.asarray(decay, dtype)
  B, T, heads, X = shape
  layouts: dict[tuple[int, ...], tuple[int, ...]] = {}
  for H in heads:
    layouts |= {(H, X): (1, 1, H, X), (B, T, H, X): (B, T, H, X)}
    if per_head:
      layouts |= {(H,): (1, 1, H, 1), (B, T, H): (B, T, H, 1)}
  if decay.shape not in layouts:
    allowed = ", ".join(str(list(layout)) for layout in sorted(layouts, key=len))
    raise ValueError(f"{_NAME}: {name} has shape {decay.shape}, but one of {allowed} is needed.")
  return decay.reshape(layouts[decay.shape])
