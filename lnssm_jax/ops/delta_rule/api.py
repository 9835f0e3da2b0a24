"""`delta_rule`: public API, argument checks and dispatch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

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
from lnssm_jax.ops.delta_rule import facts
from lnssm_jax.ops.delta_rule.chunked import chunked
from lnssm_jax.ops.delta_rule.reference import associative, reference
from lnssm_jax.ops.delta_rule.sharded import sharded
from lnssm_jax.ops.delta_rule.types import RESULT_AXES, DeltaRuleState, Inputs, Options, init_state

_NAME = "delta_rule"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", RESULT_AXES, apart=True)
IMPLEMENTATIONS = _KERNELS.with_forms(
  chunked=chunked,
  reference=form_over_groups(reference),
  associative=form_over_groups(associative),
)
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=("q", "k"),
  recurrence=facts.recurrence,
  decodes=True,
)
def delta_rule(
  q: ty.BTSK,
  k: ty.BTSK,
  v: ty.BTSV,
  beta: ty.BTS | ty.BTSV,
  *,
  log_decay: ty.BTS | ty.BTSK | None = None,
  erase_key: ty.BTSK | None = None,
  write_key: ty.BTSK | None = None,
  erase_before_decay: bool = False,
  scale: float | None = None,
  initial_state: DeltaRuleState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTHV, DeltaRuleState]:
  r"""A linear memory that moves the value of each key towards a new one, in time linear in T.

      S_t   = (I - beta_t k_t e_t^T) diag(a_t) S_{t-1} + beta_t w_t v_t^T     a = exp(log_decay)
      out_t = scale * S_t^T q_t

  e and w are `erase_key` and `write_key`, each k if it is None. So e reads the old value, which is
  removed along k, and the new value is stored under w. Kimi Delta Attention has a decay per key
  channel; gated DeltaNet-2 beta = 1, e = b * k and values w * v; RWKV-7 all three keys and
  `erase_before_decay`:

      S_t   = (diag(a_t) - beta_t k_t e_t^T) S_{t-1} + beta_t w_t v_t^T

  With unit keys, beta = 0 changes nothing and beta = 1 replaces the old value. The exact Longhorn
  update is beta = b / (1 + b ||k||^2) per column, for keys of any length.

  Where I - beta k e^T makes vectors longer the state grows exponentially until it overflows, in
  every form: with e = k keep 0 <= beta ||k||^2 <= 2 (normalize k, or take Longhorn's rate). Up to 1
  the chunked form is within a few roundings of float64; near 2, with many more tokens per chunk
  than key channels, it loses up to a digit more: take chunk_size=16 (README.md has the numbers).

  States, decays, sums and the triangular systems are float32 (float64 if an input is) whatever the
  dtype of q, k, v; `out` has the dtype of `v`. Reverse mode only: the chunked form has its own
  backward pass. What every op promises is in `lnssm_jax.ops`.

  Every argument has H heads or G, a divisor of H: then head h has the head h // (H / G) of those.
  Heads of v share q and k in Gated DeltaNet. Nothing is copied to all heads.

  Args:
    beta: the rate, `[B, T, H]` per token and head (DeltaNet, Gated DeltaNet) or `[B, T, H, V]` per
      value column.
    log_decay: `[B, T, H]`, or `[B, T, H, K]` per key channel; values <= 0, exact down to -inf. None
      means no decay.
    erase_key: e, the vector that reads the old value, of the shape of k; None means k.
    write_key: w, the vector under which v is stored, of the shape of k; None means k.
    erase_before_decay: whether e reads the state before its decay. Then a decay may be 0, which
      an erase key e / a could not express.
    scale: multiplies the output; a Python number. None means K**-0.5.
    initial_state: the state before the first token; None means zeros. It has the most heads of k,
      v, beta and log_decay: G if only the queries have H.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has B H K (K + V) numbers, with a rate per column B H K (K + 1) V.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "chunked".
    chunk_size: tokens per chunk, a power of two; None means the default. The kernels have 64.

  Returns:
    `out` [B, T, H, V] and the `DeltaRuleState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation does not support these arguments.

  Sources: fast weight programmers, Schlag et al. 2021, eq. 24; chunks, DeltaNet (Yang et al. 2024),
  eqs. 8-11; decay, Gated DeltaNet (Yang et al. 2025), eq. 10; one rate per column, Longhorn (Liu et
  al. 2024), theorem 3.1; decay per key channel, Kimi Linear (Kimi Team 2025, arXiv 2510.26692),
  eq. 1; an erase key of its own, gated DeltaNet-2 (arXiv 2605.22791); erasing before the decay,
  RWKV-7 (Peng et al. 2025, arXiv 2503.14456), eq. 17.
  """
  q, k, v, beta = (jnp.asarray(x) for x in (q, k, v, beta))
  B, T, H, K, V = check_heads(_NAME, q, k, v, grouped=True)
  heads = list(dict.fromkeys((H, *(x.shape[2] for x in (q, k, v)))))
  check_floating(_NAME, "beta", beta)
  if beta.shape not in [(B, T, n, *columns) for n in heads for columns in ((), (V,))]:
    raise ValueError(
      f"{_NAME}: beta has shape {beta.shape}, but {[B, T, H]} (one rate per token and head) or "
      f"{[B, T, H, V]} (one per value column) is needed."
    )
  acc = accumulation_dtype(q, k, v)
  beta = beta.reshape(*beta.shape[:3], -1).astype(acc)
  if log_decay is None:
    # Hidden from the compiler, which would sum the zeros itself: seconds for each program.
    log_decay = lax.optimization_barrier(jnp.zeros((*beta.shape[:3], 1), acc))
  else:
    check_log_decay(_NAME, "log_decay", log_decay)
    log_decay = jnp.asarray(log_decay, acc)
    if log_decay.shape not in [(B, T, n, *channels) for n in heads for channels in ((), (K,))]:
      raise ValueError(
        f"{_NAME}: log_decay has shape {log_decay.shape}, but {[B, T, H]} (one decay per token and "
        f"head) or {[B, T, H, K]} (one per key channel) is needed."
      )
    log_decay = log_decay.reshape(*log_decay.shape[:3], -1)
  for name, key in (("erase_key", erase_key), ("write_key", write_key)):
    if key is not None:
      check_floating(_NAME, name, key)
      check_shape(_NAME, name, key, k.shape, "the shape of k")
  erase_key, write_key = jax.tree.map(jnp.asarray, (erase_key, write_key))
  scale = checked_scale(_NAME, scale, K**-0.5)
  check_chunk_size(_NAME, chunk_size)
  S = state_heads(k, v, beta, log_decay)
  state = init_state(batch=B, heads=S, key_dim=K, value_dim=V, dtype=acc)
  if initial_state is not None:
    check_shape(_NAME, "initial_state.kv", initial_state.kv, (B, S, K, V), "[B, H, K, V]")
    state = DeltaRuleState(jnp.asarray(initial_state.kv, acc))
  segments = segments_of(_NAME, segment_ids, B, T)
  inputs = Inputs(q, k, v, beta, log_decay, erase_key, write_key, state, segments)
  options = Options(scale, chunk_size, erase_before_decay, fresh=initial_state is None)
  return _run(inputs, options, implementation=implementation, axis_name=axis_name)
