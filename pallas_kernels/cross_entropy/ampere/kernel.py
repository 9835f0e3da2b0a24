"""Cross-entropy of float32 logits and its gradient on every GPU since Ampere.

What it computes is in `sums.py`. A CTA of one warpgroup has one position. Its logits pass through
registers in chunks [chunk, 128], the next on its way while one is summed; several CTAs share an SM:

    pass 1      sums over all chunks | exchange of the warps' sums
    pass 2      gradients, from the last chunk to the first: what was read last is still in L2

The last chunk ends with the position's last row, so that no load is beyond it. It may begin with
rows of the chunk before: pass 1 masks them, pass 2 stores the same numbers again.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.mma import Mma
from pallas_kernels.core.wgmma import WITHOUT_BARRIERS, store_unoptimized, with_int32_indices
from pallas_kernels.cross_entropy.config import LANES
from pallas_kernels.cross_entropy.sums import (
  LAYOUT,
  LOWEST,
  WARPS,
  Sums,
  add,
  gradient,
  no_sums,
  of_all,
  of_warps,
  places,
  statistics,
)
from pallas_kernels.cross_entropy.types import NUM_STATISTICS, Inputs, Results, Static


@with_int32_indices
def cross_entropy(inputs: Inputs, static: Static) -> Results:
  """Statistics and gradients of all positions."""
  R = inputs.logits.shape[0]
  has_gradient = static.dtype is not None
  out_type = Results(
    jax.ShapeDtypeStruct((R, NUM_STATISTICS), jnp.float32),
    jax.ShapeDtypeStruct(inputs.logits.shape, static.dtype) if has_gradient else None,
  )

  def body(gmem: Inputs, outs: Results, sums_smem: Any):
    _Cta(static, gmem, lax.axis_index("position")).compute(outs, sums_smem)

  (results,) = plgpu.kernel(
    body,
    out_type=[out_type],
    scratch_types=[plgpu.SMEM((len(Sums._fields), WARPS), jnp.float32)],
    grid=(R,),
    grid_names=("position",),
    interpret=static.interpret,
    kernel_name="cross_entropy" + ("_gradient" if has_gradient else ""),
    compiler_params=WITHOUT_BARRIERS,  # threads share the sums alone
  )(inputs)
  return results


class _Cta:
  """The logits of one position."""

  def __init__(self, static: Static, gmem: Inputs, position: Any):
    self.static, self.gmem, self.position = static, gmem, position
    self.rows = gmem.logits.shape[1]
    self.chunk = static.config.rows(self.rows)
    self.N = -(-self.rows // self.chunk)
    self.places = places(self.chunk)

  def compute(self, outs: Results, sums_smem: Any) -> None:
    """Both passes."""
    target, weight = self.gmem.targets[self.position], self.gmem.weights[self.position]
    target_logit = self.target_logit(target)
    sums, last = self.reduce(sums_smem)
    store_unoptimized(outs.statistics.at[self.position], statistics(sums, target_logit))
    if outs.d_logits is not None:
      self.store_gradients(outs.d_logits, last, sums, target, weight)

  def target_logit(self, target: Any) -> Any:
    """The logit of the target, 0 if that is no column."""
    inside = (target >= 0) & (target < self.rows * LANES)
    place = jnp.where(inside, target, 0)
    z = self.gmem.logits[self.position, lax.div(place, LANES), lax.rem(place, LANES)]
    return jnp.where(inside, z, 0.0)

  def first_row(self, c: Any) -> Any:
    """The first row of chunk c."""
    return jnp.minimum(c * self.chunk, self.rows - self.chunk)

  def rows_of(self, c: Any) -> Any:
    """The rows of chunk c."""
    return pl.ds(self.first_row(c), self.chunk)

  def load(self, c: Any) -> Any:
    """The logits of chunk c."""
    logits_gmem: Any = self.gmem.logits
    source_gmem = logits_gmem.at[self.position, self.rows_of(c)]
    return plgpu.load(source_gmem, layout=LAYOUT, optimized=False)

  def in_vocabulary(self, z: Any) -> Any:
    """The last chunk's logits, lowest where the columns are padding."""
    size = self.static.vocab_size - (self.rows - self.chunk) * LANES
    return jnp.where(self.places < size, z, LOWEST)

  def reduce(self, sums_smem: Any) -> tuple[Sums, Any]:
    """Pass 1: sums over all logits, and the logits of the last chunk."""

    def step(c, carry):
      sums, z = carry
      ahead = self.load(c + 1)
      return add(sums, z), ahead

    start = no_sums(self.static), self.load(0)
    sums, last = lax.fori_loop(0, self.N - 1, step, start)
    last = self.in_vocabulary(last)
    before = (self.N * self.chunk - self.rows) * LANES  # of chunk N - 2
    sums = add(sums, jnp.where(self.places >= before, last, LOWEST))

    for field, value in enumerate(of_warps(sums)):
      if value is not None:
        store_unoptimized(sums_smem.at[field], value)
    Mma(self.static.interpret).commit()
    return of_all(sums_smem, range(WARPS), self.static), last

  def store_gradients(self, d_logits_gmem, last, sums: Sums, target, weight) -> None:
    """Pass 2: the gradients by all logits."""
    gradient_by = gradient(self.static, sums, weight)

    def store(c, z):
      is_target = lambda: self.places == target - self.first_row(c) * LANES
      target_gmem = d_logits_gmem.at[self.position, self.rows_of(c)]
      store_unoptimized(target_gmem, gradient_by(z, is_target).astype(self.static.dtype))

    def step(n, z):
      c = self.N - 2 - n
      ahead = self.load(jnp.maximum(c - 1, 0))
      store(c, z)
      return ahead

    ahead = self.load(max(self.N - 2, 0))
    store(self.N - 1, last)
    lax.fori_loop(0, self.N - 1, step, ahead)
