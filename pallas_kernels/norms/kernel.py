"""Norms over the last axis: forward kernel, backward kernel, `custom_vjp`.

    forward    s = x + added        n = (s - mean(s)) / sigma * scale + bias        y = n silu(gate)
    backward   g = dn * scale       ds = (g - mean(g)) / sigma + (s - mean(s)) * (...) + ds'
               dscale = sum dn * (s - mean(s)) / sigma      dbias = sum dn

What is not given is left out. ds' is the cotangent of s itself, from which a residual stream
continues. A warp has whole rows in registers, or all warps share one, so every array is read once
and written once. The backward kernel computes mean and sigma again: its residuals are s, scale,
bias and gate. Of a norm alone in bfloat16, y = factor x / sigma, they are y, which what follows
keeps as its argument, and sigma:

    backward   dx = (factor dy - y mean(dy * y) / factor) / sigma

  mainloop   load a group of rows; compute and store them
  epilogue   (backward) store this CTA's sums of dscale and dbias, which XLA adds up
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.gradients import custom_vjp
from pallas_kernels.core.sigmoid import sigmoid
from pallas_kernels.core.wgmma import COMPILER_PARAMS, store_unoptimized, traced_once
from pallas_kernels.norms import config as tuning
from pallas_kernels.norms.config import Config, KernelConfig


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  center: bool  # whether the mean is subtracted
  eps: float  # sigma = sqrt(mean square + eps), without a floor
  floor: float | None  # sigma = max(root mean square, floor) + eps
  factor: float  # of n, next to scale
  gate_first: bool  # whether the gate is a factor of s instead of n
  dtype: jnp.dtype  # of y
  config: Config
  interpret: Any = None


class Inputs(NamedTuple):
  """R is a multiple of `group_rows` of both configurations, `config.takes` D."""

  x: jax.Array  # [R, D] bfloat16 or float32
  added: jax.Array | None  # [R, D] likewise
  # [D] float32, or [P, D] for rows that repeat with a period of P, a divisor of R and a multiple of
  # `tile_rows`.
  scale: jax.Array | None
  bias: jax.Array | None  # [D] or [P, D] float32
  gate: jax.Array | None  # [R, D] bfloat16 or float32

  @property
  def period(self) -> int:
    """P, or 1 for the same scale and bias in all rows."""
    return max([1, *(z.shape[0] for z in (self.scale, self.bias) if z is not None and z.ndim == 2)])


class Results(NamedTuple):
  """Results of the operation."""

  y: Any  # [R, D] in `Static.dtype`
  sum: Any  # [R, D], x + added


class ForwardResults(NamedTuple):
  """Results of the forward kernel."""

  y: Any  # [R, D] in `Static.dtype`
  sum: Any  # [R, D], x + added; None without `added`
  inverse: Any  # [R] float32, 1 / sigma; None where it is not wanted


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def normalize(static: Static, inputs: Inputs) -> Results:
  """y and s."""
  return _forward(static, inputs)[0]


def _ctas(config: KernelConfig, inputs: Inputs) -> int:
  return tuning.grid_size(config, inputs.x.shape[0], inputs.period)


def _forward(static: Static, inputs: Inputs, for_gradient: bool = False):
  """The results, and 1 / sigma where the backward kernel takes it."""
  wants_inverse = for_gradient and _keeps_output(static, inputs)
  y, total, inverse = forward_kernel(
    inputs, static, _ctas(static.config.forward, inputs), wants_inverse
  )
  return Results(y, inputs.x if total is None else total), inverse


def _keeps_output(static: Static, inputs: Inputs) -> bool:
  """Whether the residual is y: of a norm alone, in 16 bits.

  The rounding of y then adds to dx what that of dy adds already. In float32 x has no such error.
  """
  x, *others = inputs
  alone = all(z is None for z in others)
  rounded = x.dtype == static.dtype == jnp.bfloat16
  plain = not static.center and static.floor is None and static.factor > 0
  return alone and rounded and plain


def _forward_rule(static, inputs):
  inputs = jax.tree.map(lambda primal: primal.value, inputs)
  results, inverse = _forward(static, inputs, for_gradient=True)
  added = None if inputs.added is None else jnp.zeros((), inputs.added.dtype)
  dtypes = jnp.zeros((), inputs.x.dtype), added
  kept = results.sum if inverse is None else results.y
  return results, (inputs._replace(x=kept, added=None), inverse, dtypes)


def _backward_rule(static, residuals, cotangents):
  inputs, inverse, (x, added) = residuals
  d_out, d_sum = (None if isinstance(z, SymbolicZero) else z for z in cotangents)
  if d_out is None:
    d_out = jnp.zeros(inputs.x.shape, static.dtype)
  ctas = _ctas(static.config.backward, inputs)
  results = backward_kernel(inputs, inverse, d_out, d_sum, static, ctas)
  gradients = Inputs(
    x=results.x.astype(x.dtype),
    added=None if added is None else results.x.astype(added.dtype),
    scale=_sum_over_ctas(results.scale, inputs.scale),
    bias=_sum_over_ctas(results.bias, inputs.bias),
    gate=results.gate,
  )
  return (gradients,)


def _sum_over_ctas(sums, parameter):
  """The gradient of a scale or bias from the sums [ctas, rows, D], whose rows it repeats along."""
  if sums is None:
    return None
  return sums.reshape(-1, *parameter.shape).sum(0)


# Without zeros for s where nothing reads it: the kernel would load them.
normalize.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


class _Cta:
  """Coordinates, layouts, loads and sums of one CTA."""

  def __init__(self, config: KernelConfig, rows: int, channels: int, ctas: int):
    self.config, self.rows, self.D, self.ctas = config, rows, channels, ctas
    v = config.vector
    columns = tuning.LANES * v * config.warps_per_row
    warps = () if config.warps_per_row == 1 else ((tuning.LANES * v,),)
    tiling = plgpu.Tiling(((config.tile_rows, columns), *warps, (v,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    self.shape = (config.tile_rows, channels)

  def load(self, ref_gmem, row) -> jax.Array:
    """A tile from this row on, as it is."""
    tile = ref_gmem.at[pl.ds(row, self.config.tile_rows), :]
    return plgpu.load(tile, layout=self.layout, optimized=False)

  def load_channels(self, ref_gmem) -> list[jax.Array | None]:
    """Numbers per channel [D], or per row and channel [P, D], for each tile of all groups.

    The grid steps by whole periods, so a CTA's groups begin at the same row of [P, D].
    """
    tiles = self.config.tiles
    if ref_gmem is None:
      return [None] * tiles
    if len(ref_gmem.shape) == 1:
      vector = plgpu.load(ref_gmem, layout=self.layout.reduce(0), optimized=False)
      vector = plgpu.layout_cast(lax.broadcast_in_dim(vector, self.shape, [1]), self.layout)
      return [vector] * tiles
    first = lax.axis_index("cta") * self.config.group_rows
    starts = [first + n * self.config.tile_rows for n in range(tiles)]
    return [self.load(ref_gmem, lax.rem(start, ref_gmem.shape[0])) for start in starts]

  def store(self, ref_gmem, row, value) -> None:
    """Stores a tile from this row on, rounded to the dtype of the reference."""
    tile = ref_gmem.at[pl.ds(row, self.config.tile_rows), :]
    store_unoptimized(tile, value.astype(ref_gmem.dtype))

  def zeros(self) -> jax.Array:
    """A tile of float32 zeros."""
    return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

  def mean(self, tile) -> jax.Array:
    """The mean of each row: a vector, one number per row."""
    return jnp.sum(tile, axis=1) * (1.0 / self.D)

  def spread(self, vector) -> jax.Array:
    """A number per row as a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, self.shape, [0]), self.layout)

  def groups(self, compute, carry):
    """Calls `compute(rows, carry) -> carry`: the first rows of the tiles of each group in turn."""
    c, ctas = self.config, self.ctas
    cta = lax.axis_index("cta")
    number = self.rows // c.group_rows
    own = number // ctas + (cta < number % ctas).astype(jnp.int32)

    def step(n, carry):
      first = (n * ctas + cta) * c.group_rows
      return compute([first + i * c.tile_rows for i in range(c.tiles)], carry)

    return lax.fori_loop(0, own, step, carry)


class _Statistics(NamedTuple):
  """Of the rows of a tile."""

  centered: jax.Array  # s - mean(s), or s
  inverse: jax.Array  # 1 / sigma, per row
  slope: jax.Array  # the derivative of 1 / sigma by the mean square, per row


def _statistics(cta: _Cta, x: jax.Array, static: Static) -> _Statistics:
  if static.center:
    x = x - cta.spread(cta.mean(x))
  square = cta.mean(x * x)
  if static.floor is None:
    inverse = lax.rsqrt(square + static.eps)
    return _Statistics(x, inverse, -0.5 * inverse * inverse * inverse)
  least = jnp.float32(static.floor**2)
  bounded = jnp.maximum(square, least)
  root = lax.rsqrt(bounded)
  inverse = 1.0 / (bounded * root + static.eps)
  slope = jnp.where(square > least, -0.5 * inverse * inverse * root, 0.0)
  return _Statistics(x, inverse, slope)


def _affine(x, inverse, scale, bias, factor):
  """x / sigma * scale + bias; also with `inverse` as a tile."""
  y = x * (inverse if factor == 1 else inverse * jnp.float32(factor))
  y = y if scale is None else y * scale
  return y if bias is None else y + bias


# Forward kernel


@traced_once("static", "ctas", "wants_inverse")
def forward_kernel(
  inputs: Inputs, static: Static, ctas: int, wants_inverse: bool = False
) -> ForwardResults:
  """y, s where something is added to x, and 1 / sigma where it is wanted."""
  (R, D), config = inputs.x.shape, static.config.forward
  total = None
  if inputs.added is not None:
    total = jax.ShapeDtypeStruct((R, D), jnp.result_type(inputs.x, inputs.added))

  def body(ins, outs):
    cta = _Cta(config, R, D, ctas)
    parameters = list(zip(cta.load_channels(ins.scale), cta.load_channels(ins.bias), strict=True))

    def compute(rows, carry):
      streams = [ref for ref in (ins.x, ins.added, ins.gate) if ref is not None]
      tiles = [[cta.load(ref, row) for ref in streams] for row in rows]
      for row, (x, *others), (scale, bias) in zip(rows, tiles, parameters, strict=True):
        x = x.astype(jnp.float32)
        if total is not None:
          x = (x + others[0].astype(jnp.float32)).astype(total.dtype)
          cta.store(outs.sum, row, x)
          x = x.astype(jnp.float32)
        silu = None
        if ins.gate is not None:
          gate = others[-1].astype(jnp.float32)
          silu = gate * sigmoid(gate)
        if silu is not None and static.gate_first:
          x = x * silu
        x, inverse, _ = _statistics(cta, x, static)
        if wants_inverse:
          store_unoptimized(outs.inverse.at[pl.ds(row, config.tile_rows)], inverse)
        y = _affine(x, cta.spread(inverse), scale, bias, static.factor)
        if silu is not None and not static.gate_first:
          y = y * silu
        cta.store(outs.y, row, y)
      return carry

    cta.groups(compute, jnp.int32(0))

  inverse = jax.ShapeDtypeStruct((R,), jnp.float32) if wants_inverse else None
  out_type = ForwardResults(jax.ShapeDtypeStruct((R, D), static.dtype), total, inverse)
  (results,) = _launch(body, "forward", (out_type,), ctas, static.interpret)(inputs)
  return results


# Backward kernel


class _BackwardInputs(NamedTuple):
  x: Any  # s, or y with `inverse`
  inverse: Any
  scale: Any
  bias: Any
  gate: Any
  d_out: Any
  d_sum: Any


class BackwardResults(NamedTuple):
  """Gradients; None of what is None."""

  x: Any  # [R, D] in the dtype of s
  # [ctas, rows of a tile, or with a period of a group, D] float32, summed over what a CTA computes
  scale: Any
  bias: Any  # likewise
  gate: Any  # [R, D] in its dtype


@traced_once("static", "ctas")
def backward_kernel(
  inputs: Inputs,
  inverse: jax.Array | None,
  d_out: jax.Array,
  d_sum: jax.Array | None,
  static: Static,
  ctas: int,
) -> BackwardResults:
  """Gradients of `inputs`, whose x is the sum s or, with `inverse`, y.

  Args:
    inverse: [R], 1 / sigma of a norm alone; or None.
    d_out, d_sum: cotangents of y and of s, [R, D].
  """
  (R, D), config = inputs.x.shape, static.config.backward
  scale, bias, gate = inputs.scale, inputs.bias, inputs.gate
  period = inputs.period
  sums_of = lambda z: jax.ShapeDtypeStruct(
    (ctas, config.tile_rows if z.ndim == 1 else config.group_rows, D), jnp.float32
  )
  out_type = BackwardResults(
    x=jax.ShapeDtypeStruct((R, D), inputs.x.dtype),
    scale=None if scale is None else sums_of(scale),
    bias=None if bias is None else sums_of(bias),
    gate=None if gate is None else jax.ShapeDtypeStruct((R, D), gate.dtype),
  )

  def body(ins, outs):
    cta = _Cta(config, R, D, ctas)
    parameters = list(zip(cta.load_channels(ins.scale), cta.load_channels(ins.bias), strict=True))
    factor = jnp.float32(static.factor)
    streams = _present(ins.x, ins.d_out, ins.gate, ins.d_sum)

    def compute(rows, carry):
      tiles = [[cta.load(ref, row) for ref in streams] for row in rows]
      carry = list(carry)
      for n, (row, (x, d_out, *others)) in enumerate(zip(rows, tiles, strict=True)):
        sums = n % len(carry)  # one of all tiles, or one of each
        arguments = row, x.astype(jnp.float32), d_out.astype(jnp.float32), others, *parameters[n]
        carry[sums] = compute_tile(*arguments, carry[sums])
      return tuple(carry)

    def store_gradient(row, d_x, others):
      if ins.d_sum is not None:
        d_x = d_x + others[-1].astype(jnp.float32)
      cta.store(outs.x, row, d_x)

    def of_output(row, y, g, others):
      """From y: mean(g x) / sigma^2 = mean(g y) / (factor sigma), and x / sigma = y / factor."""
      row_of = ins.inverse.at[pl.ds(row, config.tile_rows)]
      inverse = plgpu.load(row_of, layout=cta.layout.reduce(1), optimized=False)
      along = cta.spread(cta.mean(g * y) * jnp.float32(1 / static.factor))
      store_gradient(row, (g * factor - y * along) * cta.spread(inverse), others)
      return None, None

    def compute_tile(row, total, g, others, scale, bias, carry):
      if ins.inverse is not None:
        return of_output(row, total, g, others)
      x, silu, d_silu = total, None, None  # d_silu: the derivative of silu by the gate
      if ins.gate is not None:
        gate = others[0].astype(jnp.float32)
        s = sigmoid(gate)
        silu = gate * s
        d_silu = s + silu * (1.0 - s)
        x = x * silu if static.gate_first else x
      x, inverse, slope = _statistics(cta, x, static)
      normal = x * cta.spread(inverse * factor)
      if silu is not None and not static.gate_first:
        n = _affine(normal, jnp.float32(1.0), scale, bias, 1)
        cta.store(outs.gate, row, g * n * d_silu)
        g = g * silu
      d_scale, d_bias = carry
      d_scale = None if d_scale is None else d_scale + g * normal
      d_bias = None if d_bias is None else d_bias + g
      g = g if scale is None else g * scale
      g = g if static.factor == 1 else g * factor
      along = cta.mean(g * x)
      if static.center:
        g = g - cta.spread(cta.mean(g))
      d_x = g * cta.spread(inverse) + x * cta.spread(2.0 * slope * along)
      if silu is not None and static.gate_first:
        cta.store(outs.gate, row, d_x * total * d_silu)
        d_x = d_x * silu
      store_gradient(row, d_x, others)
      return d_scale, d_bias

    zeros = lambda ref: None if ref is None else cta.zeros()
    sums = config.tiles if period > 1 else 1
    totals = cta.groups(compute, ((zeros(ins.scale), zeros(ins.bias)),) * sums)
    for n, values in enumerate(totals):
      for ref, value in zip((outs.scale, outs.bias), values, strict=True):
        if ref is not None:
          rows = pl.ds(n * config.tile_rows, config.tile_rows)
          store_unoptimized(ref.at[lax.axis_index("cta"), rows], value)

  (results,) = _launch(body, "backward", (out_type,), ctas, static.interpret)(
    _BackwardInputs(inputs.x, inverse, scale, bias, gate, d_out, d_sum)
  )
  return results


def _present(*refs) -> Sequence[Any]:
  return [ref for ref in refs if ref is not None]


def _launch(body, name, out_type, ctas, interpret):
  return plgpu.kernel(
    body,
    out_type=out_type,
    grid=(ctas,),
    grid_names=("cta",),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=f"norm_{name}",
  )
