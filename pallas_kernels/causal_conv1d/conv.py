"""The causal convolution over W steps and its adjoint, one pass over memory each.

    z_t = bias + sum_j kernel_j x_{t - (W - 1) + j}      y_t = z_t, or z_t sigmoid(z_t)
    adjoint:  g_t = dy_t y'(z_t)     dkernel_j = sum_t g_t x_{t - (W - 1) + j}     dbias = sum_t g_t
              dx_s = sum_j kernel_j g_{s + (W - 1) - j}

A thread has a few neighbouring channels, which are one load, and walks along the steps of its part
with the last W - 1 inputs in registers; while it computes a few steps the next ones travel. The
adjoint walks the same way: it computes z again, and the gradient of an input is complete W - 1
steps later.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.causal_conv1d.shapes import Sizes
from pallas_kernels.tensor_core import COMPILER_PARAMS, in_32_bits, store_anywhere

_LEAST = -80.0  # below it x sigmoid(x) is 0 to 1e-33, and exp(-x) would overflow


def packed(first, rows: int):
  """[B, T] flags, a bit each: int32 [B, T / rows, rounded up]."""
  B, T = first.shape
  first = jnp.pad(first, ((0, 0), (0, -T % rows))).reshape(B, -1, rows)
  bits = first.astype(jnp.int32) << jnp.arange(rows, dtype=jnp.int32)
  return jnp.sum(bits, axis=2, dtype=jnp.int32)


class _Block:
  """What a block does, and where: the walk along the steps of its part."""

  def __init__(self, sizes: Sizes, part: int, length: int, width: int, flags):
    C, vector = sizes.channels, sizes.vector
    tiling = plgpu.Tiling(((C,), (32 * vector,), (vector,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    self.channels = C
    self.rows, self.length, self.width, self.flags = sizes.rows, length, width, flags
    self.b, self.part = lax.axis_index("row"), lax.axis_index("part")
    self.here = pl.ds(lax.axis_index("channels") * C, C)
    self.start = self.part * part
    self.steps = jnp.minimum(length - self.start, part)

  def load(self, ref):
    """Neighbouring channels, as they are."""
    return plgpu.load(ref, layout=self.layout, optimized=False)

  def wide(self, ref):
    """The same in float32."""
    return self.load(ref).astype(jnp.float32)

  def full(self, value):
    """The same float32 number for every channel."""
    return plgpu.layout_cast(jnp.full((self.channels,), value, jnp.float32), self.layout)

  def step(self, ref, t):
    """The channels of a step; beyond the last one, those of the last."""
    return self.load(ref.at[self.b, jnp.minimum(t, self.length - 1), self.here])

  def word(self, t):
    """The flags of the group of steps that t lies in."""
    if self.flags is None:
      return None
    return self.flags[self.b, jnp.minimum(t, self.length - 1) // self.rows]

  def before(self, x, initial):
    """The W - 1 inputs before the part, float32, oldest first."""
    nothing = self.full(0.0)
    begins = self.part == 0
    at = jnp.maximum(self.start, self.rows) - self.rows  # the group before
    word = self.word(at)
    window = []
    for n in range(1 - self.width, 0):
      earlier = nothing
      if initial is not None:
        earlier = self.wide(initial.at[self.b, self.width - 1 + n, self.here])
      inside = self.step(x, at + self.rows + n).astype(jnp.float32)
      if word is not None:
        flag = _bit(word, self.rows + n)
        window = [jnp.where(flag & ~begins, nothing, y) for y in window]
      window.append(jnp.where(begins, earlier, inside))
    return window

  def walk(self, refs, advance, carry, *, cut):
    """`advance(t, r, numbers of the step, flag, carry) -> carry` for the steps t of the part.

    r is the place of a step in its group, or None where that is not known.

    Args:
      refs: [B, T, D] each, what a step has numbers of.
      cut: whether the steps may not be whole groups.
    """
    read = lambda t: [self.step(ref, t) for ref in refs]
    groups = self.steps // self.rows

    def fetch(t):
      return [read(t + r) for r in range(self.rows)], self.word(t)

    def group(n, arrived):
      steps, word, carry = arrived
      first = self.start + n * self.rows
      ahead = fetch(first + self.rows)  # before any of this group's results is written
      for r, step in enumerate(steps):
        carry = advance(first + r, r, step, _bit(word, r), carry)
      return *ahead, carry

    *_, carry = lax.fori_loop(0, groups, group, (*fetch(self.start), carry))
    if not cut:
      return carry

    def single(n, carry):
      t = self.start + groups * self.rows + n
      word = self.word(t)
      return advance(t, None, read(t), _bit(word, n), carry)

    return lax.fori_loop(0, self.steps - groups * self.rows, single, carry)


def _bit(word, n):
  return None if word is None else (word >> n) & 1 != 0


def _sigmoid(x):
  """1 / (1 + exp(-x)), without a branch, which a division would be."""
  root = lax.rsqrt(1.0 + jnp.exp(-jnp.maximum(x, _LEAST)))
  return root * root


def _unless(flag, arrays, nothing):
  """Zeros where `flag`, by selection: what is not finite does not pass."""
  return arrays if flag is None else [jnp.where(flag, nothing, x) for x in arrays]


def _weighted(kernel, inputs, bias):
  total = bias
  for weight, x in zip(kernel, inputs, strict=True):
    total = weight * x if total is None else total + weight * x
  return total


@in_32_bits
def forward(x, kernel, bias, initial, flags, *, sizes, part, silu, dtype, interpret=None):
  """y [B, T, D] in `dtype`.

  Args:
    x: [B, T, D] bfloat16 or float32; D a multiple of `sizes.channels`.
    kernel, bias: float32 [W, D], and [D] or None.
    initial: the W - 1 inputs before the first step, [B, W - 1, D] float32, or None for zeros.
    flags: `packed` flags of the steps that begin a segment, in groups of `sizes.rows`; or None.
    part: steps of a part, a multiple of `sizes.rows` that is at least W - 1.
    silu: whether y = z sigmoid(z).
  """
  B, T, D = x.shape
  W = kernel.shape[0]

  def body(ins, out):
    x, kernel, bias, initial, flags = ins
    block = _Block(sizes, part, T, W, flags)
    weights = [block.wide(kernel.at[j, block.here]) for j in range(W)]
    constant = None if bias is None else block.wide(bias.at[block.here])
    nothing = block.full(0.0)

    def advance(t, r, step, flag, window):
      del r
      inputs = [*_unless(flag, window, nothing), step[0].astype(jnp.float32)]
      z = _weighted(weights, inputs, constant)
      y = z * _sigmoid(z) if silu else z
      store_anywhere(out.at[block.b, t, block.here], y.astype(dtype))
      return inputs[1:]

    block.walk([x], advance, block.before(x, initial), cut=T % sizes.rows != 0)

  return _run(body, jax.ShapeDtypeStruct((B, T, D), dtype), sizes, part, x, interpret)(
    (x, kernel, bias, initial, flags)
  )


@in_32_bits
def backward(x, d_out, kernel, bias, initial, flags, *, sizes, part, silu, interpret=None):
  """Gradients by name: "x" [B, T, D] in its dtype, "kernel" [B, P, W, D] and "bias" [B, P, D]
  float32, summed over each of the P parts, and "initial" [B, W - 1, D] float32; of what is None,
  none.

  Arguments as for `forward`; d_out [B, T, D] is the cotangent of y.
  """
  B, T, D = x.shape
  W = kernel.shape[0]
  P = -(-T // part)
  out_type = {
    "x": jax.ShapeDtypeStruct(x.shape, x.dtype),
    "kernel": jax.ShapeDtypeStruct((B, P, W, D), jnp.float32),
  }
  if initial is not None:
    out_type["initial"] = jax.ShapeDtypeStruct(initial.shape, jnp.float32)
  if bias is not None:
    out_type["bias"] = jax.ShapeDtypeStruct((B, P, D), jnp.float32)

  def body(ins, outs):
    x, d_out, kernel, bias, initial, flags = ins
    block = _Block(sizes, part, T, W, flags)
    weights = [block.wide(kernel.at[j, block.here]) for j in range(W)]
    constant = None if bias is None else block.wide(bias.at[block.here])
    nothing = block.full(0.0)

    def put(s, r, value):
      """Stores the gradient of the input of step s, if that is one of the part's."""
      store = lambda: store_anywhere(outs["x"].at[block.b, s, block.here], value.astype(x.dtype))
      if r is not None and r >= W - 1:
        store()
        return
      pl.when(s >= block.start)(store)
      if initial is not None:

        @pl.when(s < 0)
        def _():
          store_anywhere(outs["initial"].at[block.b, s + W - 1, block.here], value)

    def advance(t, r, step, flag, carry, *, own=True):
      window, pending, since, sums = carry
      inputs = [*_unless(flag, window, nothing), step[0].astype(jnp.float32)]
      g = step[1].astype(jnp.float32)
      if silu:
        z = _weighted(weights, inputs, constant)
        s = _sigmoid(z)
        g = g * (s + z * s * (1.0 - s))
      if not own:
        g = jnp.where(t < T, g, nothing)
      if own:
        products = [g * y for y in inputs]
        if bias is not None:
          products.append(g)
        sums = [y + z for y, z in zip(sums, products, strict=True)]
      if flag is not None:
        since = jnp.where(flag, 0, since + 1)
      hidden = [None if flag is None else since < W - 1 - n for n in range(W - 1)]
      seen = [_unless(flag, [g], nothing)[0] for flag in hidden]
      pending = [y + w * z for y, w, z in zip(pending, weights[:-1], seen, strict=True)]
      pending.append(weights[-1] * g)
      put(t - (W - 1), r, pending[0])
      return inputs[1:], pending[1:], since, sums

    # (the inputs before, their gradients so far, steps since a segment began, sums over the part)
    since = None if flags is None else jnp.int32(W)
    sums = [nothing] * (W + (bias is not None))
    start = block.before(x, initial), [nothing] * (W - 1), since, sums
    carry = block.walk([x, d_out], advance, start, cut=T % sizes.rows != 0)
    end = block.start + block.steps
    for n in range(W - 1):  # the steps behind the part, which see its last inputs
      t = end + n
      word = block.word(t)
      flag = None
      if word is not None:
        flag = _bit(word, lax.rem(jnp.minimum(t, T - 1), sizes.rows))
      step = block.step(x, t), block.step(d_out, t)
      carry = advance(t, None, step, flag, carry, own=False)
    *_, sums = carry
    for j in range(W):
      store_anywhere(outs["kernel"].at[block.b, block.part, j, block.here], sums[j])
    if bias is not None:
      store_anywhere(outs["bias"].at[block.b, block.part, block.here], sums[W])

  return _run(body, out_type, sizes, part, x, interpret)((x, d_out, kernel, bias, initial, flags))


def _run(body, out_type, sizes, part, x, interpret):
  B, T, D = x.shape
  return plgpu.kernel(
    body,
    out_type=out_type,
    grid=(D // sizes.channels, -(-T // part), B),
    grid_names=("channels", "part", "row"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name="causal_conv1d",
  )
