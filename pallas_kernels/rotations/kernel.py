"""Rotated keys and queries: forward kernel, backward kernel, `custom_vjp`.

    angle_t = keep_t angle_{t-1} + step_t pace_t          per head and pair of channels
    k_t = weight_t R(angle_t) (key_t + key_offset)        key_t is shared by all heads
    q_t = R(angle_t) (query_t + query_offset)             so is query_t

The angle before each chunk is given, so that a CTA has some chunks of some heads. Warps have a head
each and lanes a pair of channels: angles stay in registers from token to token, and no angle, sine
or cosine is written to memory. The backward kernel computes them again, keeps those of a chunk in
SMEM, and goes from its last token to its first:

    d angle_t = (what k_t and q_t give) + keep_{t+1} d angle_{t+1}
    d step_t = sum over pairs of pace_t d angle_t
    d pace_t = sum over heads of step_t d angle_t

  prologue   this CTA's offsets
  mainloop   chunk by chunk: angles of its tokens; gradients of its tokens in reverse
  epilogue   (backward) store this CTA's sums for the offsets, which XLA adds up, as it adds up what
             the CTAs of other heads have of the shared arrays
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.gradients import custom_vjp
from pallas_kernels.core.wgmma import COMPILER_PARAMS, store_unoptimized, traced_once
from pallas_kernels.rotations.config import LANES, WARPS, Config, KernelConfig, Shape

_TURN = 6.283185307179586


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  dtype: jnp.dtype  # of the results
  config: Config
  interpret: Any = None


class Inputs(NamedTuple):
  """R tokens in L chunks, H heads, N channels, of which A pairs (i, i + A) rotate."""

  keys: jax.Array  # [R, N] bfloat16 or float32
  queries: jax.Array  # [R, N] likewise
  key_offset: jax.Array  # [H, N] float32
  query_offset: jax.Array  # [H, N] float32
  pace: jax.Array  # [R, A] float32
  step: jax.Array  # [R, H] float32
  weight: jax.Array  # [R, H] float32
  entering: jax.Array  # [L, H, A] float32, the angles before each chunk
  keep: jax.Array  # [R, WARPS] float32, four times 0 where a document begins, else 1

  @property
  def shape(self) -> Shape:
    """Sizes for which a configuration is chosen."""
    L, H, A = self.entering.shape
    R, N = self.keys.shape
    return Shape(L, R // L, H, N, A)


class Results(NamedTuple):
  """Results of the operation."""

  keys: Any  # [R, H, N] in `Static.dtype`
  queries: Any  # likewise


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def rotate(static: Static, inputs: Inputs) -> Results:
  """k and q."""
  return forward_kernel(inputs, static)


def _forward_rule(static, inputs):
  return forward_kernel(inputs, static), inputs


def _backward_rule(static, inputs, cotangents):
  found = backward_kernel(inputs, cotangents, static)
  shared = lambda sums, like: jnp.sum(sums, axis=0).astype(like.dtype)
  gradients = Inputs(
    keys=shared(found.keys, inputs.keys),
    queries=shared(found.queries, inputs.queries),
    key_offset=shared(found.key_offset, inputs.key_offset),
    query_offset=shared(found.query_offset, inputs.query_offset),
    pace=shared(found.pace, inputs.pace),
    step=found.step,
    weight=found.weight,
    entering=found.entering,
    keep=jnp.zeros_like(inputs.keep),
  )
  return (gradients,)


rotate.defvjp(_forward_rule, _backward_rule)


class _Vectors(NamedTuple):
  """The channels of a vector or of a tile of `WARPS` heads: both of each pair, and the rest."""

  first: Any
  second: Any
  rest: Any  # None where all channels rotate

  def map(self, function, *others: "_Vectors") -> "_Vectors":
    """`function` of each part."""
    parts = zip(self, *others, strict=True)
    return _Vectors(*(None if part[0] is None else function(*part) for part in parts))


class _Cta:
  """Coordinates, layouts and loads of one CTA."""

  def __init__(self, config: KernelConfig, shape: Shape):
    self.shape = shape
    self.chunks, self.tiles = config.chunks(shape), config.heads // WARPS
    self.cta, self.group = lax.axis_index("cta"), lax.axis_index("group")
    self.first_head = self.group * config.heads
    v = 2 if shape.pairs % (2 * LANES) == 0 and shape.channels % (2 * LANES) == 0 else 1
    tiling = plgpu.Tiling(((WARPS, LANES * v), (v,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

  def parts(self, of) -> _Vectors:
    """`of(slice of channels)` for each part."""
    N, A = self.shape.channels, self.shape.pairs
    rest = of(pl.ds(2 * A, N - 2 * A)) if N > 2 * A else None
    return _Vectors(of(pl.ds(0, A)), of(pl.ds(A, A)), rest)

  def each(self, *parts: _Vectors) -> list[tuple[Any, ...]]:
    """(Slice of channels, that part of each of `parts`), for the parts that there are."""
    return [x for x in zip(self.parts(lambda n: n), *parts, strict=True) if x[0] is not None]

  def heads(self, tile: int):
    """The heads of one of the CTA's tiles, one per warp."""
    return pl.ds(self.first_head + tile * WARPS, WARPS)

  def load(self, ref) -> jax.Array:
    """A tile, in float32."""
    return plgpu.load(ref, layout=self.layout, optimized=False).astype(jnp.float32)

  def per_channel(self, ref) -> jax.Array:
    """A vector with a number per channel, for every warp."""
    vector = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(jnp.float32)
    return self._cast(lax.broadcast_in_dim(vector, (WARPS, *ref.shape), [1]))

  def per_head(self, ref, channels: int) -> jax.Array:
    """A vector with a number per warp, for every channel."""
    vector = plgpu.load(ref, layout=self.layout.reduce(1), optimized=False)
    return self._cast(lax.broadcast_in_dim(vector, (WARPS, channels), [0]))

  def zeros(self, channels: int) -> jax.Array:
    """A tile of zeros."""
    return self._cast(jnp.zeros((WARPS, channels), jnp.float32))

  def offsets(self, ref) -> list[_Vectors]:
    """The offsets of the CTA's heads, by tile."""
    return [self.parts(lambda n, t=t: self.load(ref.at[self.heads(t), n])) for t in self._tiles()]

  def angles(self, ins, token, angles) -> list[jax.Array]:
    """Those of a token from those of the token before, [WARPS, A] by tile."""
    A = self.shape.pairs
    pace, keep = self.per_channel(ins.pace.at[token]), self.per_head(ins.keep.at[token], A)
    step = (self.per_head(ins.step.at[token, self.heads(t)], A) for t in self._tiles())
    return [_within_a_turn(keep * x + s * pace) for x, s in zip(angles, step, strict=True)]

  def entering(self, ins, chunk) -> list[jax.Array]:
    """The angles before a chunk, by tile."""
    return [self.load(ins.entering.at[chunk, self.heads(t)]) for t in self._tiles()]

  def each_chunk(self, compute, carry):
    """Calls `compute(chunk, carry) -> carry` for each of the CTA's chunks."""
    step = lambda n, carry: compute(self.cta * self.chunks + n, carry)
    return lax.fori_loop(0, self.chunks, step, carry)

  def _tiles(self):
    return range(self.tiles)

  def _cast(self, tile):
    return plgpu.layout_cast(tile, self.layout)


def _within_a_turn(angle):
  """The angle modulo whole turns: sines are approximate, and sums of large numbers lose digits."""
  turns = angle * (1 / _TURN)
  whole = (turns + jnp.where(turns > 0, jnp.float32(0.5), jnp.float32(-0.5))).astype(jnp.int32)
  return angle - whole.astype(jnp.float32) * _TURN


def _rotated(x: _Vectors, cos, sin) -> _Vectors:
  return _Vectors(x.first * cos - x.second * sin, x.first * sin + x.second * cos, x.rest)


# Forward kernel


@traced_once("static")
def forward_kernel(inputs: Inputs, static: Static) -> Results:
  """k and q."""
  shape, config = inputs.shape, static.config.forward
  of = jax.ShapeDtypeStruct((inputs.keys.shape[0], shape.heads, shape.channels), static.dtype)

  def body(ins, outs):
    cta = _Cta(config, shape)
    offsets = list(zip(cta.offsets(ins.key_offset), cta.offsets(ins.query_offset), strict=True))

    def compute_token(token, angles):
      angles = cta.angles(ins, token, angles)
      key = cta.parts(lambda n: cta.per_channel(ins.keys.at[token, n]))
      query = cta.parts(lambda n: cta.per_channel(ins.queries.at[token, n]))
      for t, (angle, (key_offset, query_offset)) in enumerate(zip(angles, offsets, strict=True)):
        heads, cos, sin = cta.heads(t), jnp.cos(angle), jnp.sin(angle)
        q = _rotated(query.map(jnp.add, query_offset), cos, sin)
        k = _rotated(key.map(jnp.add, key_offset), cos, sin)
        for n, of_k, of_q in cta.each(k, q):
          weighted = of_k * cta.per_head(ins.weight.at[token, heads], of_k.shape[1])
          store_unoptimized(outs.keys.at[token, heads, n], weighted.astype(static.dtype))
          store_unoptimized(outs.queries.at[token, heads, n], of_q.astype(static.dtype))
      return tuple(angles)

    def compute(chunk, carry):
      tokens = lambda n, angles: compute_token(chunk * shape.tokens + n, angles)
      lax.fori_loop(0, shape.tokens, tokens, tuple(cta.entering(ins, chunk)))
      return carry

    cta.each_chunk(compute, jnp.int32(0))

  (results,) = _launch(body, "forward", (Results(of, of),), config, shape, static.interpret)(inputs)
  return results


# Backward kernel


class _BackwardInputs(NamedTuple):
  inputs: Inputs
  d_keys: Any  # [R, H, N], cotangents
  d_queries: Any


class BackwardResults(NamedTuple):
  """Gradients, float32; with an axis in front where XLA adds up what several CTAs computed."""

  keys: Any  # [groups of heads, R, N]
  queries: Any  # likewise
  key_offset: Any  # [CTAs, H, N]
  query_offset: Any  # likewise
  pace: Any  # [groups of heads, R, A]
  step: Any  # [R, H]
  weight: Any  # [R, H]
  entering: Any  # [L, H, A]


@traced_once("static")
def backward_kernel(inputs: Inputs, cotangents: Results, static: Static) -> BackwardResults:
  """Gradients of `inputs`, for cotangents of k and q."""
  shape, config = inputs.shape, static.config.backward
  (R, N), (L, H, A) = inputs.keys.shape, inputs.entering.shape
  groups, ctas = H // config.heads, L // config.chunks(shape)
  floats = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  shared, offset = floats(groups, R, N), floats(ctas, H, N)
  out_type = BackwardResults(
    keys=shared,
    queries=shared,
    key_offset=offset,
    query_offset=offset,
    pace=floats(groups, R, A),
    step=floats(R, H),
    weight=floats(R, H),
    entering=floats(L, H, A),
  )

  def body(given, outs, angles_smem):
    cta = _Cta(config, shape)
    ins = given.inputs
    offsets = list(zip(cta.offsets(ins.key_offset), cta.offsets(ins.query_offset), strict=True))
    zeros = lambda: cta.parts(lambda n: cta.zeros(n.size))
    place = lambda n, t: angles_smem.at[n, pl.ds(t * WARPS, WARPS)]

    def keep_angles(chunk):
      def compute_token(n, angles):
        angles = cta.angles(ins, chunk * shape.tokens + n, angles)
        for t, angle in enumerate(angles):
          store_unoptimized(place(n, t), angle)
        return tuple(angles)

      lax.fori_loop(0, shape.tokens, compute_token, tuple(cta.entering(ins, chunk)))

    def compute_token(n, token, d_angles, d_offsets):
      key = cta.parts(lambda n: cta.per_channel(ins.keys.at[token, n]))
      query = cta.parts(lambda n: cta.per_channel(ins.queries.at[token, n]))
      pace, keep = cta.per_channel(ins.pace.at[token]), cta.per_head(ins.keep.at[token], A)
      d_key, d_query, d_pace = zeros(), zeros(), cta.zeros(A)
      d_angles, d_offsets = list(d_angles), list(d_offsets)
      for t, (key_offset, query_offset) in enumerate(offsets):
        heads, angle = cta.heads(t), cta.load(place(n, t))
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        d_k = cta.parts(lambda n: cta.load(given.d_keys.at[token, heads, n]))  # noqa: B023
        d_q = cta.parts(lambda n: cta.load(given.d_queries.at[token, heads, n]))  # noqa: B023
        k = _rotated(key.map(jnp.add, key_offset), cos, sin)
        q = _rotated(query.map(jnp.add, query_offset), cos, sin)
        d_weight = jnp.sum(d_k.first * k.first + d_k.second * k.second, axis=1)
        if k.rest is not None:
          d_weight = d_weight + jnp.sum(d_k.rest * k.rest, axis=1)
        store_unoptimized(outs.weight.at[token, heads], d_weight)
        weigh = lambda x: x * cta.per_head(ins.weight.at[token, heads], x.shape[1])  # noqa: B023
        d_k = d_k.map(weigh)
        of_both = ((d_k, k), (d_q, q))
        d_angle = d_angles[t] + sum(d.second * x.first - d.first * x.second for d, x in of_both)
        step = cta.per_head(ins.step.at[token, heads], A)
        d_pace = d_pace + step * d_angle
        store_unoptimized(outs.step.at[token, heads], jnp.sum(pace * d_angle, axis=1))
        d_angles[t] = keep * d_angle
        d_k, d_q = _rotated(d_k, cos, -sin), _rotated(d_q, cos, -sin)
        d_key, d_query = d_key.map(jnp.add, d_k), d_query.map(jnp.add, d_q)
        of_keys, of_queries = d_offsets[t]
        d_offsets[t] = of_keys.map(jnp.add, d_k), of_queries.map(jnp.add, d_q)

      over_heads = lambda ref, x: store_unoptimized(ref, jnp.sum(x, axis=0))
      for ref, parts in ((outs.keys, d_key), (outs.queries, d_query)):
        for n, x in cta.each(parts):
          over_heads(ref.at[cta.group, token, n], x)
      over_heads(outs.pace.at[cta.group, token], d_pace)
      return tuple(d_angles), tuple(d_offsets)

    def compute(chunk, d_offsets):
      keep_angles(chunk)

      def from_last(n, carry):
        n = shape.tokens - 1 - n
        return compute_token(n, chunk * shape.tokens + n, *carry)

      start = tuple(cta.zeros(A) for _ in offsets), d_offsets
      d_angles, d_offsets = lax.fori_loop(0, shape.tokens, from_last, start)
      for t, d_angle in enumerate(d_angles):
        store_unoptimized(outs.entering.at[chunk, cta.heads(t)], d_angle)
      return d_offsets

    d_offsets = cta.each_chunk(compute, tuple((zeros(), zeros()) for _ in offsets))
    for t, of_each in enumerate(d_offsets):
      for ref, parts in zip((outs.key_offset, outs.query_offset), of_each, strict=True):
        for n, x in cta.each(parts):
          store_unoptimized(ref.at[cta.cta, cta.heads(t), n], x)

  scratch = (plgpu.SMEM((shape.tokens, config.heads, A), jnp.float32),)
  (results,) = _launch(body, "backward", (out_type,), config, shape, static.interpret, scratch)(
    _BackwardInputs(inputs, *cotangents)
  )
  return results


def _launch(body, name, out_type, config, shape, interpret, scratch=()):
  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=scratch,
    grid=(shape.chunks // config.chunks(shape), shape.heads // config.heads),
    grid_names=("cta", "group"),
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
    kernel_name=f"rotations_{name}",
  )
