"""`longhorn_scan`: public API, argument checks and dispatch."""

import functools

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import channel_states, dispatch
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.longhorn_scan import facts
from lnssm_jax.ops.longhorn_scan.chunked import associative, chunked
from lnssm_jax.ops.longhorn_scan.reference import reference
from lnssm_jax.ops.longhorn_scan.sharded import sharded
from lnssm_jax.ops.longhorn_scan.types import Inputs, LonghornState, init_state, strengths

_NAME = "longhorn_scan"
_KERNELS = dispatch.Kernels(f"{__package__}.pallas", channel_states.RESULT_AXES, apart=True)
IMPLEMENTATIONS = _KERNELS.with_forms(chunked=chunked, associative=associative, reference=reference)
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=("q", "k"),
  recurrence=facts.recurrence,
  decodes=True,
)
def longhorn_scan(
  x: ty.BTD,
  beta: ty.BTD,
  k: ty.BTN,
  q: ty.BTN,
  *,
  skip: ty.D | None = None,
  beta_sigmoid: bool = False,
  beta_bias: ty.D | None = None,
  initial_state: LonghornState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTD, LonghornState]:
  r"""Online regression of inputs on keys, with the diagonal of Longhorn's closed-form update.

      ε_t = β_t / (1 + β_t ||k_t||^2)                                  [D]
      S_t = (1 - ε_t k_t^2) ⊙ S_{t-1} + (ε_t ⊙ x_t) k_t^T              ε_t scales the rows of [D, N]
      out_t = S_t q_t + skip ⊙ x_t

  Every decay is in (0, 1], for keys of any size: they need no normalization. It is computed without
  cancellation where it is near 0, and so are its derivatives. There is no exponential in the scan.
  The update with the whole matrix I - ε k k^T in place of its diagonal is `delta_rule` with one β
  per value column.

  The chunked form holds a few chunks of size `[B, C, D, N]` and the states between chunks, in the
  backward pass too, and never an array of `T D N` entries. States, decays and sums are float32
  (float64 if an input is) whatever the dtype of the inputs; `out` has the dtype of `x`. Gradients
  flow to every array argument, to `initial_state` and from the returned state. Reverse mode only:
  of any order, but by the kernels first derivatives only.

  Args:
    beta: values >= 0, how strongly a token is to be remembered; in Longhorn a sigmoid, in (0, 1).
    skip: a factor per channel for the direct path from input to output; None means none.
    beta_sigmoid: whether β is sigmoid(beta + beta_bias), in float32, instead of `beta` as it is. In
      bfloat16 the kernels then write the gradient of `beta`, and none of the float32 β.
    beta_bias: per channel, added before the sigmoid; None means none.
    initial_state: the state before the first token; None means zeros.
    segment_ids: `[B, T]` integers; the state is reset where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      The exchange has 2 B D N numbers.
    implementation: one of `IMPLEMENTATIONS`; README.md has their limits. None takes "pallas" where
      it is supported and preferred, otherwise "chunked". "reference" computes the decay as it is
      written above, without the protection against cancellation.
    chunk_size: tokens per chunk of the chunked form, a power of two; None means the default. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `LonghornState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree, or there is a `beta_bias` without `beta_sigmoid`; the
      message names the argument.
    NotImplementedError: the named implementation does not support these arguments.

  Source: Longhorn (Liu et al. 2024), Algorithm 1; skip, sigmoid and bias are those of its code.
  """
  x, beta, k, q = channel_states.as_floating(_NAME, x=x, beta=beta, k=k, q=q)
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  check_shape(_NAME, "beta", beta, (B, T, D), "the shape of x, [B, T, D]")
  check_shape(_NAME, "k", k, (B, T, None), "[B, T] of x, then N")
  N = k.shape[-1]
  check_shape(_NAME, "q", q, (B, T, N), "the shape of k, [B, T, N]")
  rate = strengths(beta, beta_bias, beta_sigmoid)
  skip, state, segments, options = channel_states.checked(
    _NAME,
    LonghornState,
    [x, rate.values, k, q],
    N,
    skip=skip,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  inputs = Inputs(x, rate.values, k, q, skip, state, segments, *rate[1:])
  return _run(inputs, options, implementation=implementation, axis_name=axis_name)
