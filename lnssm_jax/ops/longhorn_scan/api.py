"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch, per_device
from lnssm_jax.ops.checks import (
  accumulation_dtype,
  check_chunk_size,
  check_floating,
  check_shape,
  checked_state,
  segment_index,
  vary_alike,
)
from lnssm_jax.ops.longhorn_scan import reference, xla
from lnssm_jax.ops.longhorn_scan.state import LonghornState

_NAME = "longhorn_scan"


def longhorn_scan(
  x: jax.Array,  # [B, T, D]
  beta: jax.Array,  # [B, T, D], values >= 0
  k: jax.Array,  # [B, T, N]
  q: jax.Array,  # [B, T, N]
  *,
  skip: jax.Array | None = None,  # [D]
  initial_state: LonghornState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, LonghornState]:
  r"""Online regression of inputs on keys, with the diagonal of Longhorn's closed-form update.

      ε_t = β_t / (1 + β_t ||k_t||^2)                                  [D]
      S_t = (1 - ε_t k_t^2) ⊙ S_{t-1} + (ε_t ⊙ x_t) k_t^T              ε_t scales the rows of [D, N]
      out_t = S_t q_t + skip ⊙ x_t

  Every decay lies in (0, 1], for keys of any size: they need no normalisation. It is computed
  without cancellation where it is near 0, and so are its derivatives. There is no exponential in
  the scan. The update with the whole matrix I - ε k k^T in place of its diagonal is `delta_rule`
  with one β per value column.

  The chunked form holds a few chunks of size `[B, C, D, N]` and the states between chunks, in the
  backward pass too, and never an array of `T D N` entries. States, decays and sums are float32
  (float64 if an input is) whatever the dtype of the inputs; `out` has the dtype of `x`. Cutting a
  sequence anywhere and passing the state on gives the same result as one call; so does packing
  several sequences with `segment_ids` (the state is reset where the id changes; `initial_state`
  belongs to the first segment, the returned state to the last). Gradients flow to every array
  argument, to `initial_state` and from the returned state. Reverse mode only: of
  any order, but by the kernels first derivatives only.

  Args:
    beta: how strongly a step is to be remembered; in (0, 1) in Longhorn, a sigmoid.
    skip: a factor per channel for the input's direct way to the output; None means none.
    initial_state: the state before the first step; None means zeros.
    implementation: "pallas" (kernels; a Hopper GPU, no float64 or float16, N <= 256), "chunked"
      (any device and arguments), "associative" (one scan of depth log T over all steps, which holds
      [B, T, D, N]), "reference" (one step at a time, the decay as it is written above), or
      "pallas_interpret" (the kernels on a CPU, slowly, to test them). None takes "pallas" where it
      can run and is known to be faster (T = 1: N <= 64, a multiple of 16, and D of 32, or N = 4 or
      8 and D of 128 or 64; T > 1: D >= 64; with several devices inside `shard_map`, or with a mesh
      that `per_device` knows), otherwise "chunked".
    chunk_size: steps in a chunk of the chunked form, a power of two; None means the default. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `LonghornState` after the last step.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.

  Source: Longhorn (Liu et al. 2024), Algorithm 1; the skip is that of its code.
  """
  args, kwargs = _checked(
    x,
    beta,
    k,
    q,
    skip=skip,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(x, beta, k, q, *, skip=None, initial_state=None, segment_ids=None, chunk_size=None):
  """Checks the arguments and gives them the implementations' form."""
  arrays = {"x": x, "beta": beta, "k": k, "q": q}
  if skip is not None:
    arrays["skip"] = skip
  for name, array in arrays.items():
    check_floating(_NAME, name, array)
  x, beta, k, q = (jnp.asarray(array) for array in (x, beta, k, q))
  check_shape(_NAME, "x", x, (None,) * 3, "[B, T, D]")
  B, T, D = x.shape
  check_shape(_NAME, "beta", beta, (B, T, D), "the shape of x, [B, T, D]")
  check_shape(_NAME, "k", k, (B, T, None), "[B, T] of x, then N")
  N = k.shape[-1]
  check_shape(_NAME, "q", q, (B, T, N), "the shape of k, [B, T, N]")
  if 0 in (T, D, N):
    raise ValueError(f"{_NAME}: x {x.shape} and k {k.shape} have an empty axis; T >= 1 is needed.")
  check_chunk_size(_NAME, chunk_size)
  acc = accumulation_dtype(*arrays.values())
  if skip is None:
    skip = jnp.zeros(D, acc)
  check_shape(_NAME, "skip", skip, (D,), "[D]")
  state = checked_state(_NAME, LonghornState, initial_state, (B, D, N), "[B, D, N]", acc)
  segments = segment_index(_NAME, segment_ids, B, T)
  args = vary_alike((x, beta, k, q, jnp.asarray(skip, acc), state, segments))
  return args, {"chunk_size": chunk_size}


_LAYOUT = per_device.Layout(("BTD", "BTD", "BTN", "BTN", "D", "BDN", "BT"), ("BTD", "BDN"))
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
