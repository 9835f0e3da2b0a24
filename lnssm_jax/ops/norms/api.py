"""`normalize`: public API, argument checks and dispatch."""

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_floating, check_shape, is_number
from lnssm_jax.ops.core.explicit_axes import under_auto_axes
from lnssm_jax.ops.norms.reference import reference
from lnssm_jax.ops.norms.types import ROW_AXES, Inputs, Options

_NAME = "normalize"
_BY_RANK = {
  rank: dispatch.Kernels(f"{__package__}.pallas", (axes, axes)).with_forms(reference=reference)
  for rank, axes in ROW_AXES.items()
}
IMPLEMENTATIONS = _BY_RANK[4]


@under_auto_axes()
def normalize(
  x: jax.Array,  # [..., D]
  scale: jax.Array | None = None,  # [D], or [H, D] with x [..., H, D]
  bias: jax.Array | None = None,  # likewise
  *,
  added: jax.Array | None = None,  # [..., D]
  gate: jax.Array | None = None,  # [..., D]
  gate_first: bool = False,
  center: bool = False,
  eps: float = 1e-5,
  floor: float | None = None,
  factor: float = 1.0,
  dtype=None,
  implementation: ty.Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
  """RMSNorm or LayerNorm over the last axis, with what stands before and after it in a model.

      s = x + added
      z = s - mean(s) if center, else s
      n = factor * scale * z / sqrt(mean(z^2) + eps) + bias
      y = n * silu(gate);  with `gate_first`, y = n, and z is made from s * silu(gate) instead of s

  Absent arrays are left out. Computed in float32 (float64 for float64 inputs) from s as it is
  returned, and rounded once, to `dtype`. Gradients flow to all arrays, and from s: a residual
  stream that continues from the s returned gets its gradient in the same pass over memory.

  Args:
    scale: [D]; or, for x [..., H, D], one per head, [H, D]: a group norm.
    bias: the same.
    added: what a layer adds to the residual stream x.
    gate_first: whether the gate stands before the norm, as in Mamba-2.
    center: subtract the mean (LayerNorm).
    floor: divides by max(sqrt(mean(z^2)), floor) + eps instead: gradients are at most 1 / floor.
    factor: a Python number; sqrt(1 / D), with eps / D, gives an l2 norm of at most 1.
    dtype: of y; None means that in which it is computed.
    implementation: "pallas", "reference", "pallas_interpret", as README.md describes them. None
      takes "pallas" where it is supported and preferred, otherwise "reference".

  Returns:
    y [..., D] and s [..., D].

  Raises:
    ValueError: shapes or dtypes do not agree, or a number is out of range; the message names it.
    NotImplementedError: the named implementation does not support these arguments.

  Sources: RMSNorm (Zhang and Sennrich 2019), eq. 4; LayerNorm (Ba et al. 2016), eq. 3. `floor`: the
  LNSSM's published code divides by rms(x) + 1e-8, whose gradient is unbounded.
  """
  arrays = {"x": x, "scale": scale, "bias": bias, "added": added, "gate": gate}
  for name, array in arrays.items():
    if array is not None:
      check_floating(_NAME, name, array)
  x = jnp.asarray(x)
  scale, bias, added, gate = (
    None if z is None else jnp.asarray(z) for z in (scale, bias, added, gate)
  )
  if x.ndim < 1 or 0 in x.shape:
    raise ValueError(f"{_NAME}: x has shape {x.shape}; it needs an axis, and none may be empty.")
  for name, array in (("scale", scale), ("bias", bias)):
    if array is not None:
      per_head = array.ndim == 2 and x.ndim > 2
      shape, axes = (x.shape[-2:], "[H, D]") if per_head else (x.shape[-1:], "[D]")
      check_shape(_NAME, name, array, shape, axes)
  for name, array in (("added", added), ("gate", gate)):
    if array is not None:
      check_shape(_NAME, name, array, x.shape, "the shape of x")
  for name, number in (("eps", eps), ("floor", floor), ("factor", factor)):
    if number is None and name == "floor":
      continue
    if not is_number(number) or not 0 <= number < 1e30:
      raise ValueError(f"{_NAME}: {name}={number!r} must be a Python number, 0 or more.")
  inputs = Inputs(x, added, scale, bias, gate)
  if dtype is None:
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(inputs))
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f"{_NAME}: dtype={dtype} must be floating point, as jnp.bfloat16 is.")
  return dispatch.run(
    _NAME,
    _BY_RANK.get(x.ndim, IMPLEMENTATIONS),
    inputs,
    Options(center, float(eps), floor, float(factor), gate_first, jnp.dtype(dtype)),
    implementation=implementation,
  )
