"""Scans whose channels do not mix, on a sequence whose steps are divided over devices.

As in `matrix_states.py`.
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.ops import dispatch
from lnssm_jax.ops.decays import decayed
from lnssm_jax.ops.diagonal_scan.state import DiagonalState
from lnssm_jax.ops.long_convolution.exponentials import exponentials
from lnssm_jax.ops.long_convolution.state import ExponentialKernel, ExponentialState
from lnssm_jax.ops.longhorn_scan.state import LonghornState
from lnssm_jax.ops.selective_scan.state import SelectiveState
from lnssm_jax.ops.sequence_parallel.exchange import initial_or_zeros, states
from lnssm_jax.ops.wkv4.state import WKV4State, empty_state


def diagonal_scan(
  decay: jax.Array,  # [B, T, D] or [D]
  x: jax.Array,  # [B, T, D]
  *,
  axis_name: str | None,
  reverse: bool = False,
  initial_state: DiagonalState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, DiagonalState]:
  """`ops.diagonal_scan` on a divided sequence. The exchange has 2 B D numbers.

  A part's summary is the product of its decays and the last state of a scan from zero.

  Raises:
    ValueError, NotImplementedError: as `ops.diagonal_scan`; ValueError: `axis_name` is not a
      mapped axis.
  """
  run = functools.partial(
    ops.diagonal_scan,
    decay,
    x,
    reverse=reverse,
    segment_ids=segment_ids,
    implementation=implementation,
    chunk_size=chunk_size,
  )
  if axis_name is None:
    return run(initial_state=initial_state)
  (decay, x, state, _), _ = dispatch.checked(
    ops.diagonal_scan, decay, x, initial_state=initial_state, segment_ids=segment_ids
  )
  wide = decay.astype(jnp.result_type(decay, jnp.finfo(state.h.dtype).dtype))
  kept = wide[:, 0] ** x.shape[1] if decay.shape[1] == 1 else jnp.prod(wide, axis=1)
  entering, final = states(
    axis_name,
    (kept, run()[1]),
    initial_or_zeros(initial_state, state),
    lambda summary, state: DiagonalState(summary[0] * state.h + summary[1].h),
    segment_ids,
    reverse=reverse,
  )
  return run(initial_state=entering)[0], final


def wkv4(
  k: jax.Array,  # [B, T, D]
  v: jax.Array,  # [B, T, D]
  decay_rate: jax.Array,  # [D], values > 0
  bonus: jax.Array,  # [D]
  *,
  axis_name: str | None,
  initial_state: WKV4State | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, WKV4State]:
  """`ops.wkv4` on a divided sequence. The exchange has 3 B D numbers.

  A part's summary is the state that a scan from nothing leaves; two states are added in log space.

  Raises:
    ValueError, NotImplementedError: as `ops.wkv4`; ValueError: `axis_name` is not a mapped axis.
  """
  run = functools.partial(
    ops.wkv4,
    k,
    v,
    decay_rate,
    bonus,
    segment_ids=segment_ids,
    implementation=implementation,
    chunk_size=chunk_size,
  )
  if axis_name is None:
    return run(initial_state=initial_state)
  added = run()[1]
  rate = jnp.shape(k)[1] * jnp.asarray(decay_rate, added.max.dtype)
  empty = empty_state(*added.max.shape, added.max.dtype)

  def advance(later, state):
    scale = jnp.maximum(jnp.maximum(state.max - rate, later.max), empty.max)
    scale = jax.lax.stop_gradient(scale)
    past, present = jnp.exp((state.max - scale) - rate), jnp.exp(later.max - scale)
    sums = (past * x + present * y for x, y in zip(state[1:], later[1:], strict=True))
    return WKV4State(scale, *sums)

  initial = empty if initial_state is None else initial_or_zeros(initial_state, added)
  entering, final = states(axis_name, added, initial, advance, segment_ids, empty=empty)
  return run(initial_state=entering)[0], final


def selective_scan(
  x: jax.Array,  # [B, T, D]
  dt: jax.Array,  # [B, T, D], values >= 0
  a: jax.Array,  # [D, N], finite values <= 0
  b: jax.Array,  # [B, T, N]
  c: jax.Array,  # [B, T, N]
  *,
  axis_name: str | None,
  skip: jax.Array | None = None,  # [D]
  initial_state: SelectiveState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, SelectiveState]:
  """`ops.selective_scan` on a divided sequence. The exchange has B D (N + 1) numbers.

  A part's summary is the last state of a scan from zero, and the sum of its step sizes.

  Raises:
    ValueError, NotImplementedError: as `ops.selective_scan`; ValueError: `axis_name` is not a
      mapped axis.
  """
  run = functools.partial(
    ops.selective_scan,
    x,
    dt,
    a,
    b,
    c,
    skip=skip,
    segment_ids=segment_ids,
    implementation=implementation,
    chunk_size=chunk_size,
  )
  if axis_name is None:
    return run(initial_state=initial_state)
  added = run()[1]
  acc = added.ssm.dtype
  elapsed, rate = jnp.sum(jnp.asarray(dt, acc), axis=1), jnp.asarray(a, acc)

  def advance(summary, state):
    added, elapsed = summary
    return SelectiveState(decayed(elapsed[..., None] * rate, state.ssm) + added.ssm)

  initial = initial_or_zeros(initial_state, added)
  entering, final = states(axis_name, (added, elapsed), initial, advance, segment_ids)
  return run(initial_state=entering)[0], final


def longhorn_scan(
  x: jax.Array,  # [B, T, D]
  beta: jax.Array,  # [B, T, D], values >= 0
  k: jax.Array,  # [B, T, N]
  q: jax.Array,  # [B, T, N]
  *,
  axis_name: str | None,
  skip: jax.Array | None = None,  # [D]
  initial_state: LonghornState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, LonghornState]:
  """`ops.longhorn_scan` on a divided sequence. The exchange has 2 B D N numbers.

  A part's summary is the last state of a scan from zero, and that of a scan of zeros from one: the
  product of its decays.

  Raises:
    ValueError, NotImplementedError: as `ops.longhorn_scan`; ValueError: `axis_name` is not a
      mapped axis.
  """
  options = {
    "segment_ids": segment_ids,
    "implementation": implementation,
    "chunk_size": chunk_size,
  }
  run = functools.partial(ops.longhorn_scan, x, beta, k, q, skip=skip, **options)
  if axis_name is None:
    return run(initial_state=initial_state)
  (x, beta, k, _, _, state, _), _ = dispatch.checked(
    ops.longhorn_scan, x, beta, k, q, skip=skip, initial_state=initial_state
  )
  both = lambda x, y: jnp.concatenate([x, y], axis=-1)
  ones = jnp.concatenate([jnp.zeros_like(state.memory), jnp.ones_like(state.memory)], axis=1)
  _, (memory,) = ops.longhorn_scan(
    both(x, jnp.zeros_like(x)),
    both(beta, beta),
    k,
    k,
    initial_state=LonghornState(ones),
    **options,
  )
  entering, final = states(
    axis_name,
    jnp.split(memory, 2, axis=1),
    initial_or_zeros(initial_state, state),
    lambda summary, state: LonghornState(summary[1] * state.memory + summary[0]),
    segment_ids,
  )
  return run(initial_state=entering)[0], final


def long_convolution(
  x: jax.Array,  # [B, T, D]
  kernel: ExponentialKernel,
  *,
  axis_name: str | None,
  initial_state: ExponentialState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, ExponentialState]:
  """`ops.long_convolution` with a sum of exponentials, on a divided sequence.

  The exchange has B D N numbers, complex where the poles are: the last state of a scan from zero.

  Raises:
    ValueError, NotImplementedError: as `ops.long_convolution`; ValueError: `axis_name` is not a
      mapped axis; NotImplementedError: `kernel` is an array of taps, whose every output may read
      all inputs.
  """
  if not isinstance(kernel, ExponentialKernel):
    raise NotImplementedError(
      "long_convolution: a kernel of taps cannot run on a divided sequence; use an "
      "ExponentialKernel, or leave the time axis whole."
    )

  def run(initial_state=None):
    out, state = ops.long_convolution(
      x,
      kernel,
      initial_state=initial_state,
      segment_ids=segment_ids,
      implementation=implementation,
      chunk_size=chunk_size,
    )
    return out, ExponentialState(*state)

  if axis_name is None:
    return run(initial_state)
  added = run()[1]
  kept = exponentials(jnp.asarray(kernel.log_pole, added.h.dtype), (x.shape[1],))[0]
  entering, final = states(
    axis_name,
    added,
    initial_or_zeros(initial_state, added),
    lambda added, state: ExponentialState(kept * state.h + added.h),
    segment_ids,
  )
  return run(entering)[0], final
