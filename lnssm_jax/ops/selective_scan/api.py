"""`selective_scan`: public API, argument checks and dispatch."""

import functools

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import channel_states, dispatch
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.selective_scan import facts
from lnssm_jax.ops.selective_scan.chunked import associative, chunked
from lnssm_jax.ops.selective_scan.reference import reference
from lnssm_jax.ops.selective_scan.sharded import sharded
from lnssm_jax.ops.selective_scan.types import Inputs, SelectiveState, init_state, step_sizes

_NAME = "selective_scan"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", channel_states.RESULT_AXES, apart=True)
IMPLEMENTATIONS = _KERNELS.with_forms(chunked=chunked, associative=associative, reference=reference)
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=("c", "b"),
  recurrence=facts.recurrence,
  decodes=True,
)
def selective_scan(
  x: ty.BTD,
  dt: ty.BTD,
  a: ty.DN | ty.D1,
  b: ty.BTN,
  c: ty.BTN,
  *,
  skip: ty.D | None = None,
  dt_softplus: bool = False,
  dt_bias: ty.D | None = None,
  initial_state: SelectiveState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTD, SelectiveState]:
  r"""The selective state-space scan: N decaying sums per channel, with data-dependent step sizes.

      S_t = exp(dt_t a) ⊙ S_{t-1} + (dt_t x_t) b_t^T        S: [D, N], dt_t scales the rows
      out_t = S_t c_t + skip ⊙ x_t

  `dt` >= 0 is used as it is; with `dt_softplus` it is softplus(dt + dt_bias), in float32. A token
  with dt = 0 leaves the state as it is. Any dt a from 0 down is exact to the dtype, whether it
  decays by 1e-7 or to nothing in one token. The chunked form holds a few chunks of size
  `[B, C, D, N]` and the states between chunks, in the backward pass too, and never an array of
  `T D N` entries.

  States, decays and sums are float32 (float64 if an input is) whatever the dtype of the inputs;
  `out` has the dtype of `x`. Gradients flow to every array argument, to `initial_state` and from
  the returned state. Reverse mode only: of any order, but by the kernels first derivatives only.

  Args:
    a: finite values <= 0; `[D, 1]` is one rate for the N numbers of a channel, with which the
      chunked form is matrix products.
    skip: a factor per channel for the direct path from input to output; None means none.
    dt_softplus: whether `dt` is what softplus is applied to. In bfloat16 the kernels then write the
      gradient of that, and none of the float32 step sizes.
    dt_bias: per channel, added before the softplus; None means none.
    initial_state: the state before the first token; None means zeros.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has B D (N + 1) numbers.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "chunked".
    chunk_size: tokens per chunk of the chunked form, a power of two; None means the default. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `SelectiveState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree, or there is a `dt_bias` without `dt_softplus`; the
      message names the argument.
    NotImplementedError: the named implementation does not support these arguments.

  Source: Mamba (Gu and Dao 2023), Algorithm 2 with the discretization of its code: exp(dt a) for
  the decay, dt b for the input; softplus and bias as `delta_softplus` and `delta_bias` there.
  """
  x, dt, a, b, c = channel_states.as_floating(_NAME, x=x, dt=dt, a=a, b=b, c=c)
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  check_shape(_NAME, "dt", dt, (B, T, D), "the shape of x, [B, T, D]")
  check_shape(_NAME, "a", a, (D, None), "[D] of x, then N")
  check_shape(_NAME, "b", b, (B, T, None), "[B, T] of x, then N")
  N = b.shape[2]
  if a.shape[1] != 1:
    check_shape(_NAME, "b", b, (B, T, a.shape[1]), "[B, T] of x, then N of a")
  check_shape(_NAME, "c", c, (B, T, N), "the shape of b, [B, T, N]")
  rate = step_sizes(dt, dt_bias, dt_softplus)
  skip, state, segments, options = channel_states.checked(
    _NAME,
    SelectiveState,
    [x, rate.values, a, b, c],
    N,
    skip=skip,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  inputs = Inputs(x, rate.values, a.astype(state.h.dtype), b, c, skip, state, segments, *rate[1:])
  return _run(inputs, options, implementation=implementation, axis_name=axis_name)
