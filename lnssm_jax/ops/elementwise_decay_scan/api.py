"""`elementwise_decay_scan`: public API, argument checks and dispatch."""

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
  checked_state,
)
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.elementwise_decay_scan import facts
from lnssm_jax.ops.elementwise_decay_scan.chunked import associative, chunked
from lnssm_jax.ops.elementwise_decay_scan.reference import reference
from lnssm_jax.ops.elementwise_decay_scan.sharded import sharded
from lnssm_jax.ops.elementwise_decay_scan.types import (
  DecayFunction,
  ElementwiseDecayState,
  Inputs,
  Options,
  init_state,
)

_NAME = "elementwise_decay_scan"
IMPLEMENTATIONS = {
  "chunked": dispatch.Form(chunked),
  "associative": dispatch.Form(associative),
  "reference": dispatch.Form(reference),
}
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=("q", "k"),
  recurrence=facts.recurrence,
  decodes=False,
)
def elementwise_decay_scan(
  q: ty.BTHK,
  k: ty.BTHK,
  v: ty.BTHV,
  log_decay: ty.BTHKV | ty.HKV | DecayFunction,
  *,
  read_weight: ty.HKV | None = None,
  initial_state: ElementwiseDecayState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTHV, ElementwiseDecayState]:
  r"""Linear attention in which every entry of the state decays by its own factor.

      S_t = A_t ⊙ S_{t-1} + k_t v_t^T        A = exp(log_decay)
      out_t = (W ⊙ S_t)^T q_t                W = read_weight, or 1

  For decays that are not a product of a key and a value factor; `linear_attention` is much faster
  for those that are. `log_decay` is an array `[H, K, V]` (constant), an array `[B, T, H, K, V]`, or
  a `DecayFunction` that computes `[B, C, H, K, V]` for some of the tokens. The chunked form then
  holds a few chunks of that size and the states between chunks, in the backward pass too, and never
  an array of `T K V` entries per head.

  States, decays and sums are float32 (float64 if an input is) whatever the dtype of q, k, v; `out`
  has the dtype of `v`. Reverse mode only, of any order. What every op promises is in
  `lnssm_jax.ops`.

  Args:
    log_decay: values <= 0, each exact to the dtype, down to -inf.
    read_weight: `[H, K, V]`, constant; it has its use where queries or keys are a constant matrix,
      one vector per value column, which goes in here, with q or k = 1. None means ones.
    initial_state: the state before the first token; None means zeros.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has 2 B H K V numbers.
    implementation: "chunked" (which None takes), "associative" (one scan of depth log T over all
      tokens, which holds [B, T, H, K, V]), "reference" (one token at a time).
    chunk_size: tokens per chunk of the chunked form, a power of two; None means the default.

  Returns:
    `out` [B, T, H, V] and the `ElementwiseDecayState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.

  Sources: recomputation from chunk to chunk, Mamba (Gu and Dao 2023), section 3.3; systems with
  such decays and constant keys and queries, LCSM (Qin et al. 2024).
  """
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  B, T, H, K, V = check_heads(_NAME, q, k, v)
  check_chunk_size(_NAME, chunk_size)
  if read_weight is not None:
    check_floating(_NAME, "read_weight", read_weight)
    check_shape(_NAME, "read_weight", read_weight, (H, K, V), "[H, K, V]")
    read_weight = jnp.asarray(read_weight)
  log_decay, made = _as_function(log_decay, (B, T, H, K, V))
  acc = accumulation_dtype(q, k, v, made)
  state = checked_state(
    _NAME, ElementwiseDecayState, initial_state, (B, H, K, V), "[B, H, K, V]", acc
  )
  inputs = Inputs(q, k, v, log_decay, read_weight, state, segments_of(_NAME, segment_ids, B, T))
  return _run(inputs, Options(chunk_size), implementation=implementation, axis_name=axis_name)


def _as_function(log_decay, shape):
  """Every kind of decay as a `DecayFunction`, and an array of the dtype that it returns."""
  B, T, H, K, V = shape
  if not isinstance(log_decay, DecayFunction):
    check_log_decay(_NAME, "log_decay", log_decay)
    log_decay = jnp.asarray(log_decay)
    if log_decay.shape == (H, K, V):
      return DecayFunction(_constant, (), log_decay[None, None]), log_decay
    elif log_decay.shape == shape:
      return DecayFunction(_given, log_decay), log_decay
    raise ValueError(
      f"{_NAME}: log_decay has shape {log_decay.shape}, but one of {[H, K, V]} (constant), "
      f"{list(shape)} (per token) is needed, or a DecayFunction."
    )
  steps = jax.tree.map(jnp.asarray, log_decay.steps)
  parameters = jax.tree.map(jnp.asarray, log_decay.parameters)
  for path, x in jax.tree_util.tree_leaves_with_path(steps):
    if x.shape[:2] != (B, T):
      name = "log_decay.steps" + jax.tree_util.keystr(path)
      raise ValueError(
        f"{_NAME}: {name} has shape {x.shape}; it must begin with [B, T] = {[B, T]}."
      )
  made = jax.eval_shape(log_decay.make, jax.tree.map(lambda x: x[:, :1], steps), parameters)
  check_shape(_NAME, "log_decay.make of one token", made, (B, 1, H, K, V), "[B, 1, H, K, V]")
  check_floating(_NAME, "log_decay.make of one token", made)
  return DecayFunction(log_decay.make, steps, parameters), made


def _given(steps, parameters):
  del parameters
  return steps


def _constant(steps, parameters):
  del steps
  return parameters
