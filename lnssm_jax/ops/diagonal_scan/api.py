"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch, per_device
from lnssm_jax.ops.checks import check_shape, first_of_segment, segment_index, vary_alike
from lnssm_jax.ops.diagonal_scan import reference, xla
from lnssm_jax.ops.diagonal_scan.state import DiagonalState

_NAME = "diagonal_scan"


def diagonal_scan(
  decay: jax.Array,  # [B, T, D] or [D]
  x: jax.Array,  # [B, T, D]
  *,
  reverse: bool = False,
  initial_state: DiagonalState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, DiagonalState]:
  r"""One number per channel that decays and is added to, in time linear in T.

      h_t = decay_t * h_{t-1} + x_t          out = h

  `decay` is the factor itself, not its logarithm. It may be real or complex, as may `x`; the result
  is complex if either is. `[D]` is one constant per channel. With `reverse` the recurrence runs
  from the last step to the first, h_t = decay_t * h_{t+1} + x_t; `initial_state` is then the state
  after the last step, and the returned state that at the first.

  A modulus of at most 1 is usual but not needed; 0 forgets exactly. The associative form, and
  chunks of more than 32 steps, multiply decays with each other, so the product of a chunk's decays
  must not overflow.

  Sums are float32 (complex64; 64 bit if an input is) whatever the dtype of the inputs. `out` has
  the dtype of `x` where the result is real, and is complex otherwise. Cutting a sequence anywhere
  and passing the state on gives the same result as one call; so does packing several sequences with
  `segment_ids` (the state is forgotten where the id changes; `initial_state` belongs to the segment
  that the scan meets first, the returned state to the one it meets last). Gradients flow to
  `decay`, `x`, `initial_state` and from the returned state; those of complex arguments follow JAX's
  convention, and a real argument of a complex scan gets a real gradient. Reverse mode only.

  Args:
    initial_state: the state before the first step in the direction of the scan; None means zeros.
    implementation: "pallas" (kernels; a Hopper GPU, no 64-bit and no float16 inputs), "chunked" (a
      scan over chunks; any device and arguments), "associative" (`lax.associative_scan`),
      "reference" (one step at a time), or "pallas_interpret" (the kernels on a CPU, slowly, to test
      them). None takes "pallas" where it can run and is known to be faster (T > 1 and D >= 128;
      with several devices inside `shard_map`, or with a mesh that `per_device` knows), otherwise
      "chunked".
    chunk_size: steps in a chunk of the chunked form; None means 16 on CPUs, 512 elsewhere. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `DiagonalState` after the last step in the direction of the scan.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation cannot run these arguments.

  Sources: parallel linear recurrences, Martin and Cundy 2018; as associative scan, S5 (Smith et al.
  2023), appendix H; RG-LRU, Griffin (De et al. 2024), eq. 4.
  """
  args, kwargs = _checked(
    decay,
    x,
    reverse=reverse,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(decay, x, *, reverse=False, initial_state=None, segment_ids=None, chunk_size=None):
  """Checks the arguments of `diagonal_scan` and gives them the implementations' form."""
  decay, x = jnp.asarray(decay), jnp.asarray(x)
  for name, array in (("decay", decay), ("x", x)):
    if not jnp.issubdtype(array.dtype, jnp.inexact):
      raise ValueError(
        f"{_NAME}: {name} has dtype {array.dtype}; it must be floating point or complex "
        f"(cast it, e.g. {name}.astype(jnp.float32))."
      )
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  if 0 in (T, D):
    raise ValueError(f"{_NAME}: x {x.shape} has an empty axis; T >= 1 and D >= 1 are needed.")
  if decay.shape not in ((D,), x.shape):
    raise ValueError(
      f"{_NAME}: decay has shape {decay.shape}, but [B, T, D] = {list(x.shape)} or [D] = {[D]} "
      "is needed."
    )
  if decay.ndim == 1:
    decay = decay.reshape(1, 1, D)
  if chunk_size is not None and chunk_size < 1:
    raise ValueError(f"{_NAME}: chunk_size={chunk_size} must be at least 1.")

  sums = jnp.result_type(jnp.float32, decay.dtype, x.dtype)
  state = DiagonalState(jnp.zeros((B, D), sums))
  if initial_state is not None:
    h = jnp.asarray(initial_state.h)
    check_shape(_NAME, "initial_state.h", h, (B, D), "[B, D]")
    complex_state = jnp.issubdtype(h.dtype, jnp.complexfloating)
    if complex_state and not jnp.issubdtype(sums, jnp.complexfloating):
      raise ValueError(
        f"{_NAME}: initial_state.h is complex, but decay and x are real; make x complex "
        "(x.astype(jnp.complex64)) or pass the real part."
      )
    state = DiagonalState(h.astype(sums))
  segments = segment_index(_NAME, segment_ids, B, T)
  keep = None
  if segments is not None:
    # The step of each segment that the scan meets first forgets; that of the first segment does
    # not.
    keep = ~first_of_segment(segments, reverse=reverse)[..., None]
  args = vary_alike((decay, x, state, keep))
  out_dtype = sums if jnp.issubdtype(sums, jnp.complexfloating) else x.dtype
  return args, {"reverse": bool(reverse), "out_dtype": out_dtype, "chunk_size": chunk_size}


_LAYOUT = per_device.Layout(("BTD", "BTD", "BD", "BT"), ("BTD", "BD"))
_COMPILED, _INTERPRETED = dispatch.kernels(f"{__package__}.pallas", _LAYOUT)

dispatch.register(
  _NAME,
  _checked,
  _COMPILED,
  dispatch.Implementation("chunked", xla.chunked),
  dispatch.Implementation("associative", xla.associative),
  dispatch.Implementation("reference", reference.reference),
  _INTERPRETED,
)
