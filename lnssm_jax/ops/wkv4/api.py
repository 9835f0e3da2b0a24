"""`wkv4`: public API, argument checks and dispatch."""

import functools

import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_floating, check_sequence, check_shape
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.wkv4 import facts
from lnssm_jax.ops.wkv4.chunked import associative, chunked
from lnssm_jax.ops.wkv4.reference import reference
from lnssm_jax.ops.wkv4.sharded import sharded
from lnssm_jax.ops.wkv4.types import RESULT_AXES, Inputs, Options, WKV4State, init_state

_NAME = "wkv4"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", RESULT_AXES, apart=True)
IMPLEMENTATIONS = _KERNELS.with_forms(chunked=chunked, reference=reference, associative=associative)
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=None,
  recurrence=facts.recurrence,
  decodes=True,
)
def wkv4(
  k: ty.BTD,
  v: ty.BTD,
  decay_rate: ty.D,
  bonus: ty.D,
  *,
  initial_state: WKV4State | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTD, WKV4State]:
  r"""RWKV-4's mean of the values so far, weighted by exp(k), which decays per token.

      out_t = (sum_{j<t} e_j v_j + exp(bonus + k_t) v_t) / (sum_{j<t} e_j + exp(bonus + k_t)),
      e_j = exp(k_j - (t - 1 - j) decay_rate)

  Computed in log space: the sums are divided by exp of a running maximum, so that keys of any size
  neither overflow nor vanish. Every output lies between the smallest and the largest value so far.
  k = -inf leaves a token out of the mean; an output whose every weight is 0 is NaN.

  States and sums are float32 (float64 if an input is) whatever the dtype of k and v; `out` has the
  dtype of `v`. Gradients flow from the returned state, whose `max` is a scale that is held fixed: a
  function of exp(max) numerator and exp(max) denominator has the right gradient through the latter
  two alone. Reverse mode only: the chunked form has its own backward pass. What every op promises
  is in `lnssm_jax.ops`.

  Args:
    decay_rate: in nats per token, `[D]`, values > 0; inf forgets all but the last token.
    bonus: added to the key of the token's own value in its output, `[D]`.
    initial_state: the state before the first token, with `denominator` >= 0; None means empty.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has 3 B D numbers.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "chunked".
    chunk_size: tokens per chunk of the chunked form; None means 8 on CPUs, 512 elsewhere. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `WKV4State` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation does not support these arguments.

  Source: RWKV, Peng et al. 2023, eqs. 16 and 19-25 (appendix D: the numerically safe recursion).
  """
  k, v, decay_rate, bonus = (jnp.asarray(x) for x in (k, v, decay_rate, bonus))
  for name, x in (("k", k), ("v", v), ("decay_rate", decay_rate), ("bonus", bonus)):
    check_floating(_NAME, name, x)
  B, T, D = check_sequence(_NAME, "k", k)
  check_shape(_NAME, "v", v, (B, T, D), "the shape of k, [B, T, D]")
  check_shape(_NAME, "decay_rate", decay_rate, (D,), "[D]")
  check_shape(_NAME, "bonus", bonus, (D,), "[D]")
  if chunk_size is not None and chunk_size < 1:
    raise ValueError(f"{_NAME}: chunk_size={chunk_size} must be at least 1.")
  acc = accumulation_dtype(k, v, decay_rate, bonus)
  state = init_state(batch=B, dim=D, dtype=acc)
  if initial_state is not None:
    for name, x in initial_state._asdict().items():
      check_shape(_NAME, f"initial_state.{name}", x, (B, D), "[B, D]")
    state = WKV4State(*(jnp.asarray(x, acc) for x in initial_state))
  inputs = Inputs(k, v, decay_rate, bonus, state, segments_of(_NAME, segment_ids, B, T))
  return _run(inputs, Options(chunk_size), implementation=implementation, axis_name=axis_name)
