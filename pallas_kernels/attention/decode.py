"""One token of softmax attention against a cache of keys and values: read once, in splits.

A CTA has a split of one key head's cache and the queries of the heads that read it, so that keys
and values travel once, or, where the registers do not hold all of these, a few times. No tile is
in SMEM: 16 lanes of a warp have a token, whose score is a sum over them, and each of the CTA's 8
tokens at a time has a running softmax of its own (Milakov and Gimelshein 2018), which are merged at
the end. Everything is float32 on CUDA cores: with one query per head a byte is used a few times,
which leaves tensor cores nothing to gain. Splits are of the slots that are filled, not of all, and
are merged in XLA, together with the token's own key.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.types import LOG2_E, LOWEST, Logits
from pallas_kernels.core import device
from pallas_kernels.core.wgmma import store_unoptimized, traced_once

_TOKENS = 8  # of a step: 2 for each of 4 warps
_LANES = 16  # of a token
_STEPS = 4  # whose copies travel together
LEAST_SLOTS = _TOKENS * _STEPS
_WIDEST = 256
_CHANNELS = 2304  # of queries and sums of a CTA: 16 of them are a register of a thread
_SLOTS_OF_SPLIT = 128  # at least: in fewer, the start of a CTA takes longer than its copies
_CTAS_PER_SM = 4
_SCRATCH = 64  # bytes of SMEM per column of values, for a sum that crosses warps


class _Layout:
  """Registers of a tile [8, X] of 8 tokens, shared by the 128 threads of a CTA."""

  def __init__(self, width: int):
    self.shape = _TOKENS, width
    vector = next(n for n in (4, 2) if width % (n * _LANES) == 0)
    columns = vector * _LANES
    tiling = plgpu.Tiling(((_TOKENS, columns), (_TOKENS // 4, columns), (vector,)))
    self.tile = plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    self.tokens, self.columns = self.tile.reduce(1), self.tile.reduce(0)

  def load(self, ref_gmem):
    """A tile, as float32."""
    return plgpu.load(ref_gmem, layout=self.tile, optimized=False).astype(jnp.float32)

  def load_row(self, ref_gmem):
    """A vector [X], repeated for all tokens, as float32."""
    row = plgpu.load(ref_gmem, layout=self.columns, optimized=False).astype(jnp.float32)
    return plgpu.layout_cast(lax.broadcast_in_dim(row, self.shape, [1]), self.tile)

  def of_tokens(self, vector):
    """A vector [8], repeated along the columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, self.shape, [0]), self.tile)


class _Splits(NamedTuple):
  """Softmax over splits of the slots, each with a maximum of its own; logits x in base 2."""

  value: Any  # [B, H, N, V] float32: sum_j 2^(x_j - top) v_j
  top: Any  # [B, H, N] float32: max_j x_j, or `LOWEST`
  total: Any  # [B, H, N] float32: sum_j 2^(x_j - top)


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
  """Why `decode` cannot run a token's queries [B, H, K] and a cache [B, M, G, X], or None."""
  (B, H, K), M, V = q.shape, v.shape[1], v.shape[3]
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{name} has dtype {x.dtype}, and the kernel takes bfloat16 and float32"
  for name, width in (("k", K), ("v", V)):
    if width % (2 * _LANES) or width > _WIDEST:
      return f"{name} is {width} wide, and a cache must have a multiple of 32, at most {_WIDEST}"
  if M < LEAST_SLOTS:
    return f"the cache has {M} slots, and at least {LEAST_SLOTS} are needed"
  if max(B, H) > device.MAX_GRID_SIZE:
    return f"q {q.shape} is too large: a grid has at most {device.MAX_GRID_SIZE} CTAs per axis"
  return None


def decode(
  q: jax.Array,  # [B, H, K]
  k: jax.Array,  # [B, G, K]: of the token itself
  v: jax.Array,  # [B, G, V]
  cache_k: jax.Array,  # [B, M, G, K]
  cache_v: jax.Array,  # [B, M, G, V]
  held: jax.Array,  # [B] int32: the first slots of the cache, which the token sees
  *,
  logits: Logits,
  sinks: jax.Array | None = None,  # [H] float32
  num_splits: int | None = None,
  interpret: Any = None,
) -> jax.Array:
  """Attention of one token to itself and to the tokens in a cache, [B, H, V] in the dtype of v.

  Args:
    sinks: logits of further keys, whose values are 0; or None.
    num_splits: of a head's slots; None: so many as give every SM work. Results differ by rounding.
  """
  (B, H, K), (M, G) = q.shape, cache_k.shape[1:3]
  heads = _heads_of_cta(H // G, K + v.shape[-1])
  ctas = B * (H // heads)
  number = num_splits or device.current().num_splits(ctas, M, _SLOTS_OF_SPLIT, _CTAS_PER_SM)
  static = {"logits": logits, "heads": heads, "num_splits": number, "interpret": interpret}
  value, top, total = _splits(q, cache_k, cache_v, held, **static)
  wide = lambda x: x.astype(jnp.float32)
  by_group = wide(q).reshape(B, G, H // G, K)
  x, factor = logits.of((by_group * wide(k)[:, :, None]).sum(-1).reshape(B, H))
  own = x * factor
  highest = jnp.maximum(own, top.max(-1))
  if sinks is not None:
    highest = jnp.maximum(highest, sinks * LOG2_E)
  share, own = jnp.exp2(top - highest[..., None]), jnp.exp2(own - highest)
  values = jnp.repeat(wide(v), H // G, axis=1)
  out = (share[..., None] * value).sum(2) + own[..., None] * values
  total = (share * total).sum(-1) + own
  if sinks is not None:
    total = total + jnp.exp2(sinks * LOG2_E - highest)
  return (out / total[..., None]).astype(v.dtype)


def _heads_of_cta(sharing: int, channels: int) -> int:
  """How many of the heads that share a key head are in one CTA."""
  most = max(1, _CHANNELS // channels)
  return max(n for n in range(1, sharing + 1) if sharing % n == 0 and n <= most)


@traced_once("logits", "heads", "num_splits", "interpret")
def _splits(
  q, k, v, held, *, logits: Logits, heads: int, num_splits: int, interpret: Any
) -> _Splits:
  """The results of each split of the slots [0, held) of k and v [B, M, G, X], `heads` per CTA."""
  (B, H, K), (M, G, V) = q.shape, v.shape[1:]
  of_k, of_v, readers = _Layout(K), _Layout(V), H // G // heads  # CTAs of a key head

  def body(q_gmem, k_gmem, v_gmem, held_gmem, value_gmem, top_gmem, total_gmem):
    b, part, n = (lax.axis_index(name) for name in ("batch", "heads", "split"))
    g, first_head = lax.div(part, readers), part * heads
    held = held_gmem[b]
    span = lax.div(held + (num_splits - 1), num_splits)
    begin = jnp.minimum(n * span, held)
    end = jnp.minimum(begin + span, held)
    queries = [of_k.load_row(q_gmem.at[b, first_head + h]) for h in range(heads)]
    token = plgpu.broadcasted_iota(jnp.int32, (_TOKENS,), 0, layout=of_k.tokens)

    def advance(step, carry):
      first = begin + step * LEAST_SLOTS
      # The last tokens may be loaded together with earlier ones, which are then masked.
      start = jnp.minimum(first, M - LEAST_SLOTS)
      tiles = [(pl.ds(start + n * _TOKENS, _TOKENS), start + n * _TOKENS) for n in range(_STEPS)]
      keys = [of_k.load(k_gmem.at[b, slots, g]) for slots, _ in tiles]
      values = [of_v.load(v_gmem.at[b, slots, g]) for slots, _ in tiles]
      for key, value, (_, at) in zip(keys, values, tiles, strict=True):
        mine = (token + at >= first) & (token + at < end)
        new = []
        for query, (acc, top, total) in zip(queries, carry, strict=True):
          x, factor = logits.of(jnp.sum(query * key, axis=1))
          x = jnp.where(mine, x * factor, LOWEST)
          higher = jnp.maximum(top, x)
          shrink = jnp.exp2(top - higher)
          weight = jnp.where(mine, jnp.exp2(x - higher), 0.0)
          acc = acc * of_v.of_tokens(shrink) + of_v.of_tokens(weight) * value
          new.append((acc, higher, total * shrink + weight))
        carry = tuple(new)
      return carry

    zeros = plgpu.layout_cast(jnp.zeros(of_v.shape, jnp.float32), of_v.tile)
    constant = lambda x: plgpu.layout_cast(jnp.full((_TOKENS,), x, jnp.float32), of_k.tokens)
    start = tuple((zeros, constant(LOWEST), constant(0.0)) for _ in range(heads))
    steps = lax.div(end - begin + (LEAST_SLOTS - 1), LEAST_SLOTS)
    for h, (acc, top, total) in enumerate(lax.fori_loop(0, steps, advance, start)):
      highest = jnp.max(top)
      share = jnp.exp2(top - highest)
      place = b, first_head + h, n
      store_unoptimized(value_gmem.at[place], jnp.sum(acc * of_v.of_tokens(share), axis=0))
      top_gmem[place] = highest
      total_gmem[place] = jnp.sum(total * share)

  scalars = jax.ShapeDtypeStruct((B, H, num_splits), jnp.float32)
  return _Splits(
    *plgpu.kernel(
      body,
      out_type=(jax.ShapeDtypeStruct((B, H, num_splits, V), jnp.float32), scalars, scalars),
      grid=(num_splits, H // heads, B),
      grid_names=("split", "heads", "batch"),
      compiler_params=plgpu.CompilerParams(
        approx_math=q.dtype == jnp.bfloat16,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
        reduction_scratch_bytes=_SCRATCH * V,
      ),
      interpret=interpret,
      kernel_name="attention_decode",
    )(q, k, v, held)
  )
