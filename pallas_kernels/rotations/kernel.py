"""Rotated keys and queries: forward kernel, backward kernel, `custom_vjp`.

    angle_t = keep_t angle_{t-1} + step_t pace_t          per head and pair of channels
    k_t = weight_t R(angle_t) (key_t + key_offset)        key_t is shared by G groups of heads
    q_t = R(angle_t) (query_t + query_offset)             so is query_t

There may be several keys of a token per head (rank). They are further heads with offsets of their
own; those of one head have the same angles, steps and weights. A CTA has heads of one key.

The angle before each chunk is given, so that a CTA has some chunks of some heads. Warps have heads
of their own and lanes a pair of channels: angles stay in registers from token to token, and no
angle, sine or cosine is written to memory. The backward kernel computes them again, keeps those of
a chunk in SMEM, and goes from its last token to its first. There it rotates the cotangents back, so
that keys and queries need no rotation:

    d angle_t = (what k_t and q_t give) + keep_{t+1} d angle_{t+1}
    d step_t = sum over pairs of pace_t d angle_t
    d pace_t = sum over heads of step_t d angle_t

  prologue   this CTA's offsets
  mainloop   chunk by chunk: angles of its tokens; gradients of its tokens in reverse. Sums over
             heads cross warps through SMEM, for four tokens at a time
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
from pallas_kernels.core.mma import Mma
from pallas_kernels.core.wgmma import WITHOUT_BARRIERS, store_unoptimized, traced_once
from pallas_kernels.rotations.config import LANES, WARPS, Config, KernelConfig, Shape

_TURN = 6.283185307179586


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  dtype: jnp.dtype  # of the results
  config: Config
  interpret: Any = None


class Inputs(NamedTuple):
  """R tokens in L chunks, H heads, N channels, of which A pairs (i, i + A) rotate.

  F are the heads of all keys of a token, (key, head).
  """

  keys: jax.Array  # [R, rank G, N] bfloat16 or float32, (key, group of heads)
  queries: jax.Array  # [R, rank G, N] likewise
  key_offset: jax.Array  # [F, N] float32
  query_offset: jax.Array  # [F, N] float32
  pace: jax.Array  # [R, A] float32
  step: jax.Array  # [R, H] float32
  weight: jax.Array  # [R, H] float32
  entering: jax.Array  # [L, H, A] float32, the angles before each chunk
  keep: jax.Array  # [R, WARPS] float32, four times 0 where a document begins, else 1

  @property
  def shape(self) -> Shape:
    """Sizes for which a configuration is chosen."""
    L, H, A = self.entering.shape
    R, shared, N = self.keys.shape
    rank = self.key_offset.shape[0] // H
    return Shape(L, R // L, H, N, A, rank, shared // rank)


class Results(NamedTuple):
  """Results of the operation."""

  keys: Any  # [R, F, N] in `Static.dtype`
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

  def of_groups(sums, like):  # [groups of F, R, N]
    R, number, N = like.shape
    sums = jnp.sum(sums.reshape(number, -1, R, N), axis=1)
    return jnp.moveaxis(sums, 0, 1).astype(like.dtype)

  def of_heads(x, like):  # of all keys of a head, axis 1
    F, H = x.shape[1], like.shape[1]
    return x if F == H else jnp.sum(x.reshape(len(x), F // H, *like.shape[1:]), axis=1)

  gradients = Inputs(
    keys=of_groups(found.keys, inputs.keys),
    queries=of_groups(found.queries, inputs.queries),
    key_offset=shared(found.key_offset, inputs.key_offset),
    query_offset=shared(found.query_offset, inputs.query_offset),
    pace=shared(found.pace, inputs.pace),
    step=of_heads(found.step, inputs.step),
    weight=of_heads(found.weight, inputs.weight),
    entering=of_heads(found.entering, inputs.entering),
    keep=jnp.zeros_like(inputs.keep),
  )
  return (gradients,)


rotate.defvjp(_forward_rule, _backward_rule)


# A vector or a tile of `WARPS` heads in parts of A channels, of which the first two rotate.
type _Parts = tuple[jax.Array, ...]


class _Token(NamedTuple):
  """The shared inputs of a token, and its numbers per head by tile."""

  key: _Parts
  query: _Parts
  pace: jax.Array
  keep: jax.Array
  step: list[jax.Array]
  weight: list[jax.Array]


class _Cta:
  """Coordinates, layouts and loads of one CTA."""

  def __init__(self, config: KernelConfig, shape: Shape):
    self.shape = shape
    self.chunks, self.tiles = config.chunks(shape), config.heads // WARPS
    self.cta, self.group = lax.axis_index("cta"), lax.axis_index("group")
    self.first = self.group * config.heads  # of F heads
    self.first_head = self.first if shape.rank == 1 else lax.rem(self.first, shape.heads)
    # The key of its heads: the next one begins after so many groups.
    number = shape.sharing // config.heads
    several = shape.rank * shape.groups > 1
    self.shared = lax.div(self.group, jnp.int32(number)) if several else 0
    v = 2 if shape.pairs % (2 * LANES) == 0 else 1
    tiling = plgpu.Tiling(((WARPS, LANES * v), (v,)))
    self.layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

  def parts(self, of) -> tuple[Any, ...]:
    """`of(slice of channels)` for each part."""
    N, A = self.shape.channels, self.shape.pairs
    return tuple(of(pl.ds(n, A)) for n in range(0, N, A))

  def heads(self, tile: int):
    """Those of one of the CTA's tiles, one per warp, of all keys of a token: of F."""
    return pl.ds(self.first + tile * WARPS, WARPS)

  def angle_heads(self, tile: int):
    """The same of H, what has angles."""
    return pl.ds(self.first_head + tile * WARPS, WARPS)

  def load(self, ref) -> jax.Array:
    """A tile."""
    return plgpu.load(ref, layout=self.layout, optimized=False)

  def per_channel(self, ref) -> jax.Array:
    """A vector with a number per channel, for every warp."""
    vector = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False)
    return self._cast(lax.broadcast_in_dim(vector, (WARPS, *ref.shape), [1]))

  def per_head(self, ref) -> jax.Array:
    """A vector with a number per warp, for every channel of a part."""
    vector = plgpu.load(ref, layout=self.layout.reduce(1), optimized=False)
    return self._cast(lax.broadcast_in_dim(vector, (WARPS, self.shape.pairs), [0]))

  def token(self, ins, token) -> "_Token":
    """Loads the inputs of a token."""
    return _Token(
      key=self.parts(lambda n: self.per_channel(ins.keys.at[token, self.shared, n])),
      query=self.parts(lambda n: self.per_channel(ins.queries.at[token, self.shared, n])),
      pace=self.per_channel(ins.pace.at[token]),
      keep=self.per_head(ins.keep.at[token]),
      step=[self.per_head(ins.step.at[token, self.angle_heads(t)]) for t in self._tiles()],
      weight=[self.per_head(ins.weight.at[token, self.angle_heads(t)]) for t in self._tiles()],
    )

  def of_tiles(self, ref, token) -> list[_Parts]:
    """A token's keys or queries, by tile."""
    part = lambda t, n: self.load(ref.at[token, self.heads(t), n])
    return [self.parts(functools.partial(part, t)) for t in self._tiles()]

  def zeros(self) -> jax.Array:
    """A part of zeros."""
    return self._cast(jnp.zeros((WARPS, self.shape.pairs), jnp.float32))

  def offsets(self, ref) -> list[_Parts]:
    """The offsets of the CTA's heads, by tile."""
    return [self.parts(lambda n, t=t: self.load(ref.at[self.heads(t), n])) for t in self._tiles()]

  def angles(self, token: "_Token", angles) -> list[jax.Array]:
    """Those of a token from those of the token before, [WARPS, A] by tile."""
    added = (step * token.pace for step in token.step)
    return [_within_a_turn(token.keep * x + y) for x, y in zip(angles, added, strict=True)]

  def entering(self, ins, chunk) -> list[jax.Array]:
    """The angles before a chunk, by tile."""
    return [self.load(ins.entering.at[chunk, self.angle_heads(t)]) for t in self._tiles()]

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


def _rotated(x: _Parts, cos, sin) -> _Parts:
  return x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos, *x[2:]


def _sum(x: _Parts, y: _Parts) -> _Parts:
  """x + y, y in float32."""
  return tuple(a.astype(jnp.float32) + b for a, b in zip(x, y, strict=True))


# Forward kernel


@traced_once("static")
def forward_kernel(inputs: Inputs, static: Static) -> Results:
  """k and q."""
  shape, config = inputs.shape, static.config.forward
  of = jax.ShapeDtypeStruct((len(inputs.keys), *inputs.key_offset.shape), static.dtype)

  def body(ins, outs):
    cta = _Cta(config, shape)
    offsets = list(zip(cta.offsets(ins.key_offset), cta.offsets(ins.query_offset), strict=True))

    def compute_token(n, token, angles):
      angles = cta.angles(token, angles)
      for t, (angle, (key_offset, query_offset)) in enumerate(zip(angles, offsets, strict=True)):
        heads, cos, sin = cta.heads(t), jnp.cos(angle), jnp.sin(angle)
        q = _rotated(_sum(token.query, query_offset), cos, sin)
        k = tuple(token.weight[t] * x for x in _rotated(_sum(token.key, key_offset), cos, sin))
        for c, of_k, of_q in zip(cta.parts(lambda c: c), k, q, strict=True):
          store_unoptimized(outs.keys.at[n, heads, c], of_k.astype(static.dtype))
          store_unoptimized(outs.queries.at[n, heads, c], of_q.astype(static.dtype))
      return angles

    def compute(chunk, carry):
      first = chunk * shape.tokens
      last = first + shape.tokens - 1

      def compute_next(n, carry):
        angles, token = carry
        ahead = cta.token(ins, jnp.minimum(first + n + 1, last))
        return compute_token(first + n, token, angles), ahead

      lax.fori_loop(
        0, shape.tokens, compute_next, (cta.entering(ins, chunk), cta.token(ins, first))
      )
      return carry

    cta.each_chunk(compute, jnp.int32(0))

  (results,) = _launch(body, "forward", (Results(of, of),), config, shape, static.interpret)(inputs)
  return results


# Backward kernel


class _BackwardInputs(NamedTuple):
  inputs: Inputs
  d_keys: Any  # [R, F, N], cotangents
  d_queries: Any


class BackwardResults(NamedTuple):
  """Gradients, float32; with an axis in front where XLA adds up what several CTAs computed."""

  keys: Any  # [groups of F heads, R, N]
  queries: Any  # likewise
  key_offset: Any  # [CTAs, F, N]
  query_offset: Any  # likewise
  pace: Any  # [groups of F heads, R, A]
  step: Any  # [R, F]
  weight: Any  # [R, F]
  entering: Any  # [L, F, A]


@traced_once("static")
def backward_kernel(inputs: Inputs, cotangents: Results, static: Static) -> BackwardResults:
  """Gradients of `inputs`, for cotangents of k and q."""
  shape, config = inputs.shape, static.config.backward
  (F, N), (L, _, A), R = inputs.key_offset.shape, inputs.entering.shape, len(inputs.keys)
  groups, ctas = shape.groups_of(config.heads), L // config.chunks(shape)
  floats = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  shared, offset = floats(groups, R, N), floats(ctas, F, N)
  out_type = BackwardResults(
    keys=shared,
    queries=shared,
    key_offset=offset,
    query_offset=offset,
    pace=floats(groups, R, A),
    step=floats(R, F),
    weight=floats(R, F),
    entering=floats(L, F, A),
  )

  def body(given, outs, angles_smem, sums_smem):
    cta, backend = _Cta(config, shape), Mma(static.interpret)
    ins = given.inputs
    offsets = list(zip(cta.offsets(ins.key_offset), cta.offsets(ins.query_offset), strict=True))
    zeros = lambda: cta.parts(lambda _: cta.zeros())
    place = lambda n, t: angles_smem.at[n, pl.ds(t * WARPS, WARPS)]

    def load_token(token):
      of_tiles = functools.partial(cta.of_tiles, token=token)
      return cta.token(ins, token), of_tiles(given.d_keys), of_tiles(given.d_queries)

    def keep_angles(chunk):
      def compute_some(i, angles):
        numbers = [i * WARPS + j for j in range(WARPS)]
        tokens = [cta.token(ins, chunk * shape.tokens + n) for n in numbers]  # one latency for all
        for n, token in zip(numbers, tokens, strict=True):
          angles = cta.angles(token, angles)
          for t, angle in enumerate(angles):
            store_unoptimized(place(n, t), angle)
        return angles

      lax.fori_loop(0, shape.tokens // WARPS, compute_some, cta.entering(ins, chunk))

    def compute_token(n, place_of, loaded, d_angles, d_offsets):
      token, d_keys, d_queries = loaded
      d_key, d_query, d_pace = zeros(), zeros(), cta.zeros()
      d_angles, d_offsets, found = list(d_angles), list(d_offsets), []
      for t, (key_offset, query_offset) in enumerate(offsets):
        angle = cta.load(place_of(t))
        back = functools.partial(_rotated, cos=jnp.cos(angle), sin=-jnp.sin(angle))
        wide = lambda parts: tuple(x.astype(jnp.float32) for x in parts)
        d_k, d_q = back(wide(d_keys[t])), back(wide(d_queries[t]))
        k, q = _sum(token.key, key_offset), _sum(token.query, query_offset)
        d_weight = jnp.sum(sum(map(jnp.multiply, d_k, k)), axis=1)
        d_k = tuple(token.weight[t] * x for x in d_k)
        d_angle = d_angles[t] + sum(d[1] * x[0] - d[0] * x[1] for d, x in ((d_k, k), (d_q, q)))
        d_pace = d_pace + token.step[t] * d_angle
        found.append((d_weight, jnp.sum(token.pace * d_angle, axis=1)))
        d_angles[t] = token.keep * d_angle
        d_key, d_query = _sum(d_key, d_k), _sum(d_query, d_q)
        of_keys, of_queries = d_offsets[t]
        d_offsets[t] = _sum(of_keys, d_k), _sum(of_queries, d_q)
      for t, (d_weight, d_step) in enumerate(found):
        store_unoptimized(outs.weight.at[n, cta.heads(t)], d_weight)
        store_unoptimized(outs.step.at[n, cta.heads(t)], d_step)
      return (*d_key, *d_query, d_pace), d_angles, d_offsets

    def store_sums(tokens):
      backend.commit()
      # What the CTA's heads have of `WARPS` tokens, a token per warp now.
      of_warps = lambda i: [cta.load(sums_smem.at[i, :, w]) for w in range(WARPS)]
      over_heads = lambda i: functools.reduce(jnp.add, of_warps(i))
      parts = cta.parts(lambda n: n)
      for i, n in enumerate(parts):
        store_unoptimized(outs.keys.at[cta.group, tokens, n], over_heads(i))
        store_unoptimized(outs.queries.at[cta.group, tokens, n], over_heads(len(parts) + i))
      store_unoptimized(outs.pace.at[cta.group, tokens], over_heads(2 * len(parts)))
      backend.commit()

    def compute(chunk, d_offsets):
      begin = chunk * shape.tokens
      loaded = load_token(begin + shape.tokens - 1)
      keep_angles(chunk)

      def from_last(i, carry):
        first = shape.tokens - WARPS * (1 + i)

        def of_token(i, carry):
          i = WARPS - 1 - i
          n = first + i
          ahead = load_token(begin + jnp.maximum(n - 1, 0))
          sums, *carry = compute_token(begin + n, functools.partial(place, n), *carry)
          for j, part in enumerate(sums):
            store_unoptimized(sums_smem.at[j, i], part)
          return ahead, *carry

        carry = lax.fori_loop(0, WARPS, of_token, carry)
        store_sums(pl.ds(begin + first, WARPS))
        return carry

      start = loaded, [cta.zeros() for _ in offsets], d_offsets
      _, d_angles, d_offsets = lax.fori_loop(0, shape.tokens // WARPS, from_last, start)
      for t, d_angle in enumerate(d_angles):
        store_unoptimized(outs.entering.at[chunk, cta.heads(t)], d_angle)
      return d_offsets

    d_offsets = cta.each_chunk(compute, [(zeros(), zeros()) for _ in offsets])
    for t, of_each in enumerate(d_offsets):
      for ref, parts in zip((outs.key_offset, outs.query_offset), of_each, strict=True):
        for n, x in zip(cta.parts(lambda n: n), parts, strict=True):
          store_unoptimized(ref.at[cta.cta, cta.heads(t), n], x)

  scratch = (
    plgpu.SMEM((shape.tokens, config.heads, A), jnp.float32),
    plgpu.SMEM((2 * N // A + 1, WARPS, WARPS, A), jnp.float32),
  )
  (results,) = _launch(body, "backward", (out_type,), config, shape, static.interpret, scratch)(
    _BackwardInputs(inputs, *cotangents)
  )
  return results


def _launch(body, name, out_type, config, shape, interpret, scratch=()):
  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=scratch,
    grid=(shape.chunks // config.chunks(shape), shape.groups_of(config.heads)),
    grid_names=("cta", "group"),
    interpret=interpret,
    compiler_params=WITHOUT_BARRIERS,  # a thread reads what it wrote, but for the sums
    kernel_name=f"rotations_{name}",
  )
