"""S causal convolutions of one x over W tokens: forward kernel, backward kernel, `custom_vjp`.

    forward    z_t = bias + sum_j kernel_j x_{t - (W - 1) + j}      y_t = z_t, or z_t sigmoid(z_t)
    backward   g_t = dy_t y'(z_t)    dkernel_j = sum_t g_t x_{t - (W - 1) + j}    dbias = sum_t g_t
               dx_s = sum_j kernel_j g_{s + (W - 1) - j}, and over all S convolutions

The two taps of a token shift may have an offset m [B, T, S, D] for each token: kernel_0 + m_t and
kernel_1 - m_t are its taps, and dm_t = g_t (x_{t - 1} - x_t).

Each kernel reads and writes every array once. A thread has a few adjacent channels, which are one
load, and scans the tokens of its split with the last W - 1 inputs in registers. Nothing is shared
between threads, so tokens go from GMEM to registers without SMEM or barriers: `_Cta.scan` is a
software pipeline of registers.

  prologue   load the first group of tokens
  mainloop   load the next group; compute this one and store its results
  epilogue   the tokens after the last whole group, one by one

The backward kernel scans in the same direction: it recomputes z, and the gradient of an input is
complete W - 1 tokens later. Residuals are the arguments alone.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.causal_conv1d import config as tuning
from pallas_kernels.causal_conv1d.config import Config, KernelConfig
from pallas_kernels.core import boundaries
from pallas_kernels.core.gradients import custom_vjp
from pallas_kernels.core.sigmoid import sigmoid
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  WITHOUT_BARRIERS,
  store_unoptimized,
  traced_once,
)


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  silu: bool  # whether y = z sigmoid(z)
  dtype: jnp.dtype  # of y
  config: Config
  interpret: Any = None


class Inputs(NamedTuple):
  """D is a multiple of 128, W at most `config.MAX_WIDTH`."""

  x: jax.Array  # [B, T, D] bfloat16 or float32
  kernel: jax.Array  # [S, W, D] float32
  bias: jax.Array | None  # [D] float32
  offsets: jax.Array | None  # [B, T, S, D] bfloat16 or float32, for W = 2 without SiLU; None: zeros
  initial: jax.Array | None  # [B, W - 1, D] float32, the inputs before the first; None: zeros


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def causal_conv1d(static: Static, inputs: Inputs, first: jax.Array | None) -> tuple[jax.Array, ...]:
  """y of each convolution, [B, T, D] in `static.dtype`.

  Args:
    first: [B, T], set at the first tokens of documents, across which nothing is read; or None.
  """
  return forward_kernel(inputs, first, static, _split_length(static.config.forward, inputs))


def _split_length(config: KernelConfig, inputs: Inputs) -> int:
  B, T, D = inputs.x.shape
  return tuning.split_length(config, B, D, T)


def _forward_rule(static, inputs, first):
  return causal_conv1d(static, inputs, first), (inputs, first)


def _backward_rule(static, residuals, d_out):
  inputs, first = residuals
  split_length = _split_length(static.config.backward, inputs)
  results = backward_kernel(inputs, d_out, first, static, split_length)
  d_bias = None if results.bias is None else results.bias.sum((0, 1))
  d_kernel = results.kernel.sum((0, 1))
  d_inputs = Inputs(results.x, d_kernel, d_bias, results.offsets, results.initial)
  d_first = None if first is None else np.zeros(first.shape, jax.dtypes.float0)
  return d_inputs, d_first


causal_conv1d.defvjp(_forward_rule, _backward_rule)


class _Cta:
  """Coordinates, loads and the scan of one CTA."""

  def __init__(self, config: KernelConfig, split_length: int, length: int, width: int, words_gmem):
    C, vector = config.channels, config.vector
    tiling = plgpu.Tiling(((C,), (32 * vector,), (vector,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    self.num_channels = C
    self.group, self.length, self.width, self.words = config.group, length, width, words_gmem
    self.b, self.split = lax.axis_index("row"), lax.axis_index("split")
    self.channels = pl.ds(lax.axis_index("channels") * C, C)
    self.start = self.split * split_length
    self.tokens = jnp.minimum(length - self.start, split_length)

  def load(self, ref_gmem):
    """Adjacent channels, as they are."""
    return plgpu.load(ref_gmem, layout=self.layout, optimized=False)

  def load_wide(self, ref_gmem):
    """The same in float32."""
    return self.load(ref_gmem).astype(jnp.float32)

  def load_taps(self, kernel_gmem) -> list[list[jax.Array]]:
    """The W taps of each convolution, float32."""
    S, W, _ = kernel_gmem.shape
    return [
      [self.load_wide(kernel_gmem.at[s, j, self.channels]) for j in range(W)] for s in range(S)
    ]

  def full(self, value: float):
    """The same float32 number for every channel."""
    return plgpu.layout_cast(jnp.full((self.num_channels,), value, jnp.float32), self.layout)

  def load_token(self, ref_gmem, t):
    """The channels of token t; beyond the last one, those of the last."""
    return self.load(ref_gmem.at[self.b, jnp.minimum(t, self.length - 1), self.channels])

  def load_word(self, t):
    """The flags of the group that token t belongs to; None without boundaries."""
    if self.words is None:
      return None
    return self.words[self.b, jnp.minimum(t, self.length - 1) // self.group]

  def load_window(self, x_gmem, initial_gmem):
    """The W - 1 inputs before the split, float32, oldest first."""
    zero = self.full(0.0)
    is_first_split = self.split == 0
    at = jnp.maximum(self.start, self.group) - self.group  # the group before
    word = self.load_word(at)
    window = []
    for n in range(1 - self.width, 0):
      earlier = zero
      if initial_gmem is not None:
        earlier = self.load_wide(initial_gmem.at[self.b, self.width - 1 + n, self.channels])
      inside = self.load_token(x_gmem, at + self.group + n).astype(jnp.float32)
      if word is not None:
        is_first = boundaries.bit(word, self.group + n) & ~is_first_split
        window = boundaries.reset(is_first, window, [zero] * len(window))
      window.append(jnp.where(is_first_split, earlier, inside))
    return window

  def scan(self, advance: Callable[..., Any], carry: Any, streams_gmem, *, has_tail: bool) -> Any:
    """Calls `advance(t, r, token, is_first, carry) -> carry` for the tokens t of the split.

    r is the place of a token in its group, or None in the tail.

    Args:
      streams_gmem: references [B, T, D]; `token` has the channels of each.
      has_tail: whether the tokens may not be whole groups.
    """
    load = lambda t: [self.load_token(ref, t) for ref in streams_gmem]
    num_groups = self.tokens // self.group

    def fetch(t):
      return [load(t + r) for r in range(self.group)], self.load_word(t)

    def compute_group(n, arrived):
      tokens, word, carry = arrived
      first_token = self.start + n * self.group
      ahead = fetch(first_token + self.group)  # loads do not move across the stores of this group
      for r, token in enumerate(tokens):
        carry = advance(first_token + r, r, token, boundaries.bit(word, r), carry)
      return *ahead, carry

    *_, carry = lax.fori_loop(0, num_groups, compute_group, (*fetch(self.start), carry))
    if not has_tail:
      return carry

    def compute_single(n, carry):
      t = self.start + num_groups * self.group + n
      word = self.load_word(t)
      return advance(t, None, load(t), boundaries.bit(word, n), carry)

    return lax.fori_loop(0, self.tokens - num_groups * self.group, compute_single, carry)


# Forward kernel


class _ForwardInputs(NamedTuple):
  x: Any
  kernel: Any
  bias: Any
  offsets: Any
  initial: Any
  words: Any  # `boundaries.pack_bits`


@traced_once("static", "split_length")
def forward_kernel(
  inputs: Inputs, first: jax.Array | None, static: Static, split_length: int
) -> tuple[jax.Array, ...]:
  """y [B, T, D] of each convolution."""
  (B, T, D), (S, W, _) = inputs.x.shape, inputs.kernel.shape
  config = static.config.forward

  def body(ins, outs):
    cta = _Cta(config, split_length, T, W, ins.words)
    all_taps = cta.load_taps(ins.kernel)
    bias = None if ins.bias is None else cta.load_wide(ins.bias.at[cta.channels])
    zero = cta.full(0.0)

    def advance(t, r, token, is_first, window):
      del r
      x, *offsets = token
      window = boundaries.reset(is_first, window, [zero] * (W - 1))
      window = [*window, x.astype(jnp.float32)]
      for taps, offset, out_gmem in zip(all_taps, offsets or [None] * S, outs, strict=True):
        z = _weighted(_shifted(taps, offset), window, bias)
        y = z * sigmoid(z) if static.silu else z
        store_unoptimized(out_gmem.at[cta.b, t, cta.channels], y.astype(static.dtype))
      return window[1:]

    window = cta.load_window(ins.x, ins.initial)
    streams = [ins.x, *_by_convolution(ins.offsets)]
    cta.scan(advance, window, streams, has_tail=T % config.group != 0)

  out_type = (jax.ShapeDtypeStruct((B, T, D), static.dtype),) * S
  (results,) = _launch(
    body, "forward", (out_type,), config, split_length, inputs.x, static.interpret
  )(_ForwardInputs(*inputs, words=boundaries.pack_bits(first, config.group)))
  return results


# Backward kernel


class _BackwardInputs(NamedTuple):
  x: Any
  d_out: Any
  kernel: Any
  bias: Any
  offsets: Any
  initial: Any
  words: Any


class BackwardResults(NamedTuple):
  """Gradients; None of what is None."""

  x: Any  # [B, T, D] in its dtype
  kernel: Any  # [B, P, S, W, D] float32, summed over each of P splits
  bias: Any  # [B, P, D] float32, summed over each of P splits
  offsets: Any  # [B, T, S, D] in their dtype
  initial: Any  # [B, W - 1, D] float32


class _Carry(NamedTuple):
  window: Any  # the last W - 1 inputs
  pending: Any  # their gradients so far
  since: Any  # tokens since a document began, or None without boundaries
  tap_sums: Any  # of the gradients of the taps over the split, for each convolution
  bias_sum: Any  # None without a bias


@traced_once("static", "split_length")
def backward_kernel(
  inputs: Inputs,
  d_out: tuple[jax.Array, ...],
  first: jax.Array | None,
  static: Static,
  split_length: int,
) -> BackwardResults:
  """Gradients of `inputs`, from the cotangents d_out [B, T, D] of each y."""
  (B, T, D), (S, W, _) = inputs.x.shape, inputs.kernel.shape
  config = static.config.backward
  P = -(-T // split_length)
  has_bias, has_initial = inputs.bias is not None, inputs.initial is not None
  offsets = inputs.offsets
  out_type = BackwardResults(
    x=jax.ShapeDtypeStruct((B, T, D), inputs.x.dtype),
    kernel=jax.ShapeDtypeStruct((B, P, S, W, D), jnp.float32),
    bias=jax.ShapeDtypeStruct((B, P, D), jnp.float32) if has_bias else None,
    offsets=None if offsets is None else jax.ShapeDtypeStruct(offsets.shape, offsets.dtype),
    initial=jax.ShapeDtypeStruct((B, W - 1, D), jnp.float32) if has_initial else None,
  )

  def body(ins, outs):
    cta = _Cta(config, split_length, T, W, ins.words)
    all_taps = cta.load_taps(ins.kernel)
    bias = None if ins.bias is None else cta.load_wide(ins.bias.at[cta.channels])
    zero = cta.full(0.0)

    def store_gradient(s, r, value):
      """Stores the gradient of the input of token s, if that is one of the split's."""
      d_x = outs.x.at[cta.b, s, cta.channels]
      store = lambda: store_unoptimized(d_x, value.astype(outs.x.dtype))
      if r is not None and r >= W - 1:
        store()
        return
      pl.when(s >= cta.start)(store)
      if outs.initial is not None:

        @pl.when(s < 0)
        def _():
          store_unoptimized(outs.initial.at[cta.b, s + W - 1, cta.channels], value)

    def advance(t, r, token, is_first, carry, *, own=True):
      """`own`: whether token t is one of the split's, so that this CTA sums its tap gradients."""
      x, *others = token
      d_outs, offsets = others[:S], others[S:] or [None] * S
      window = boundaries.reset(is_first, carry.window, [zero] * (W - 1))
      window = [*window, x.astype(jnp.float32)]
      since, tap_sums, bias_sum = carry.since, [], carry.bias_sum
      if is_first is not None:
        since = jnp.where(is_first, 0, since + 1)
      # An earlier document's inputs get nothing from this token.
      hidden = [None if is_first is None else since < W - 1 - n for n in range(W - 1)]
      pending = [*carry.pending, None]
      for s, (taps, d_out, offset, sums) in enumerate(
        zip(all_taps, d_outs, offsets, carry.tap_sums, strict=True)
      ):
        g = d_out.astype(jnp.float32)
        if static.silu:
          z = _weighted(taps, window, bias)
          gate = sigmoid(z)
          g = g * (gate + z * gate * (1.0 - gate))
        if own and offset is not None:
          d_offset = (g * (window[0] - window[1])).astype(offset.dtype)
          store_unoptimized(outs.offsets.at[cta.b, t, s, cta.channels], d_offset)
        if own:
          sums = [y + g * z for y, z in zip(sums, window, strict=True)]
          bias_sum = None if bias_sum is None else bias_sum + g
        else:
          g = jnp.where(t < T, g, zero)
        tap_sums.append(sums)
        seen = [boundaries.reset(flag, g, zero) for flag in hidden]
        # The offset too: its NaN times a gradient of 0 would reach the earlier document.
        taps = _shifted(taps, offset, hidden, zero)
        parts = [w * z for w, z in zip(taps, [*seen, g], strict=True)]
        pending = [z if y is None else y + z for y, z in zip(pending, parts, strict=True)]
      store_gradient(t - (W - 1), r, pending[0])
      return _Carry(window[1:], pending[1:], since, tap_sums, bias_sum)

    carry = _Carry(
      window=cta.load_window(ins.x, ins.initial),
      pending=[zero] * (W - 1),
      since=None if ins.words is None else jnp.int32(W),
      tap_sums=[[zero] * W for _ in range(S)],
      bias_sum=zero if has_bias else None,
    )
    streams = [ins.x, *ins.d_out, *_by_convolution(ins.offsets)]
    carry = cta.scan(advance, carry, streams, has_tail=T % config.group != 0)
    end = cta.start + cta.tokens
    for n in range(W - 1):  # the tokens after the split, which read its last inputs
      t = end + n
      word = cta.load_word(t)
      is_first = None
      if word is not None:
        is_first = boundaries.bit(word, lax.rem(jnp.minimum(t, T - 1), config.group))
      token = [cta.load_token(ref, t) for ref in streams]
      carry = advance(t, None, token, is_first, carry, own=False)
    for s, sums in enumerate(carry.tap_sums):
      for j, value in enumerate(sums):
        store_unoptimized(outs.kernel.at[cta.b, cta.split, s, j, cta.channels], value)
    if has_bias:
      store_unoptimized(outs.bias.at[cta.b, cta.split, cta.channels], carry.bias_sum)

  (results,) = _launch(
    body, "backward", (out_type,), config, split_length, inputs.x, static.interpret
  )(_BackwardInputs(inputs.x, d_out, *inputs[1:], words=boundaries.pack_bits(first, config.group)))
  return results


def _launch(body, name, out_type, config, split_length, x, interpret):
  B, T, D = x.shape
  return plgpu.kernel(
    body,
    out_type=out_type,
    grid=(D // config.channels, -(-T // split_length), B),
    grid_names=("channels", "split", "row"),
    interpret=interpret,
    # Nothing needs the barriers that JAX adds to each store. On an H200 the backward kernel is
    # faster without, and the forward kernel, with documents, with them.
    compiler_params=COMPILER_PARAMS if name == "forward" else WITHOUT_BARRIERS,
    kernel_name=f"causal_conv1d_{name}",
  )


def _by_convolution(offsets_gmem):
  """References [B, T, D], none for None."""
  S = 0 if offsets_gmem is None else offsets_gmem.shape[2]
  return [offsets_gmem.at[:, :, s] for s in range(S)]


def _shifted(taps, offset, hidden=(None,), zero=None):
  """The taps of one token, whose offset moves weight from the present token to the one before.

  Where `hidden[0]`, the one before is of another document, and its tap has no offset.
  """
  if offset is None:
    return taps
  previous, present = taps
  offset = offset.astype(jnp.float32)
  return [previous + boundaries.reset(hidden[0], offset, zero), present - offset]


def _weighted(taps, window, bias):
  total = bias
  for weight, x in zip(taps, window, strict=True):
    total = weight * x if total is None else total + weight * x
  return total
