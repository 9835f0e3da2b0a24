"""One step of linear attention in one kernel: the state is read once and written once, in place.

    S' = diag(a) S + k v^T       z' = a z + k                     a = exp(log_decay)
    out = scale q^T S'           D  = q^T z'                      without `bonus`
    out = scale q^T (S + diag(bonus) k v^T)   D = q^T (z + bonus k)   with `bonus`
    with `normalize`: out / D

A block takes all K rows and a few columns of one head's state, so the sum over K stays inside it.
The tile lives in registers between the load and the store. Everything is float32 on CUDA cores: the
step moves 8 bytes for about 6 operations, so tensor cores would gain nothing and cost exactness.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chip
from pallas_kernels.linear_attention import shapes
from pallas_kernels.tensor_core import store_anywhere

# K and V are padded to a multiple: 4 warps of at least 4 rows, 8 threads of 2 columns.
_WIDTH = shapes.STEP_WIDTH


def obstacle(q, k, v, log_decay, bonus, kv, key_sum, *, normalize, scale=1.0) -> str | None:
  """Why `decode` cannot run these arguments, or None."""
  del scale
  if q.ndim != 3 or v.ndim != 3:
    return f"q {q.shape} and v {v.shape} must be [B, H, K] and [B, H, V]: one step without a T axis"
  (B, H, K), V = q.shape, v.shape[-1]
  wanted = {"k": (k, (B, H, K)), "v": (v, (B, H, V)), "kv": (kv, (B, H, K, V))}
  if bonus is not None:
    wanted["bonus"] = bonus, (H, K)
  if normalize:
    if key_sum is None:
      return "key_sum is None, but normalize=True needs it, [B, H, K]"
    wanted["key_sum"] = key_sum, (B, H, K)
  for name, (x, shape) in wanted.items():
    if x.shape != shape:
      return f"{name} has shape {x.shape}, but {shape} goes with q {q.shape} and v {v.shape}"
  if log_decay is not None and (
    log_decay.ndim != 3
    or any(n not in (1, m) for n, m in zip(log_decay.shape, (B, H, K), strict=True))
  ):
    return f"log_decay has shape {log_decay.shape}, which does not broadcast to {(B, H, K)}"
  if 0 in kv.shape:
    return f"kv {kv.shape} has an empty axis"
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.dtype not in (jnp.bfloat16, jnp.float32):
      return f"{name} is {x.dtype}; the kernel takes bfloat16 and float32"
  for name, x in (
    ("log_decay", log_decay),
    ("kv", kv),
    ("key_sum", key_sum if normalize else None),
  ):
    if x is not None and x.dtype != jnp.float32:
      return f"{name} is {x.dtype}; the kernel takes float32"
  if not jax.typeof(kv).manual_axis_type.empty:
    return (
      "kv varies along a mesh axis of `shard_map`, which JAX refuses for in-place kernels; use "
      "check_vma=False"
    )
  if K > 256:
    return f"q has K={K}; a block keeps all K rows in registers, which ends at K=256"
  if max(B, H) > 65535:
    return f"q has B={B} and H={H}; a grid of blocks has at most 65535 along each"
  return None


def value_tile(B: int, H: int, V: int) -> int:
  """Columns of the state in a block, for V a multiple of 16.

  32 float32 are the 128 bytes that memory likes to move. 16 halve the work of a block, which pays
  when there are fewer blocks than multiprocessors.
  """
  return 16 if V % 32 or B * H * (V // 32) < chip.MULTIPROCESSORS else 32


def decode(
  q, k, v, log_decay, bonus, kv, key_sum, *, normalize, scale=1.0, tile=None, interpret=None
):
  """(out [B, H, V] in the dtype of v, kv, key_sum) after one step.

  The returned kv uses the buffer of the argument (`input_output_aliases` of the compiled call): of
  a donated state, or of one carried by a loop, nothing is copied. If K or V is no multiple of 16
  this does not hold: q, k, v and the state are padded with zeros outside the kernel and cut
  afterwards. `key_sum`, a V-th of the state's size, has a new buffer, because every block of a
  head reads it. exp(0) is 1: without decay an entry that k v^T does not touch keeps its bits.

  Args:
    q, k: [B, H, K], v: [B, H, V]; bfloat16 or float32, computed in float32.
    log_decay: float32, [B or 1, H or 1, K or 1], values <= 0; None means no decay.
    bonus: [H, K] or None.
    kv: float32 [B, H, K, V].
    key_sum: float32 [B, H, K]; without `normalize` it is returned as it is, and may be None.
    tile: columns of the state in a block: 16, 32 or 64, a divisor of V; None takes `value_tile`.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: `obstacle` has something to say, or `tile` does not fit.
  """
  reason = obstacle(q, k, v, log_decay, bonus, kv, key_sum, normalize=normalize, scale=scale)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  K, V = kv.shape[2:]
  options = {"normalize": normalize, "scale": scale, "tile": tile, "interpret": interpret}
  pad_k, pad_v = -K % _WIDTH, -V % _WIDTH
  if tile is not None and (tile not in (16, 32, 64) or (V + pad_v) % tile):
    raise ValueError(f"decode: tile={tile} must be 16, 32 or 64 and divide V={V + pad_v}.")
  if not pad_k and not pad_v:
    return _decode(q, k, v, log_decay, bonus, kv, key_sum, **options)
  pad = lambda x, *last: jnp.pad(x, [(0, 0)] * (x.ndim - len(last)) + [(0, n) for n in last])
  if log_decay is not None and log_decay.shape[-1] > 1:
    log_decay = pad(log_decay, pad_k)
  out, padded_kv, padded_sum = _decode(
    pad(q, pad_k),
    pad(k, pad_k),
    pad(v, pad_v),
    log_decay,
    None if bonus is None else pad(bonus, pad_k),
    pad(kv, pad_k, pad_v),
    pad(key_sum, pad_k) if normalize else None,
    **options,
  )
  return out[..., :V], padded_kv[..., :K, :V], padded_sum[..., :K] if normalize else key_sum


# Under `jit`, so that a program with many steps of one shape, as a stack of layers has, holds one
# kernel and not as many.
@functools.partial(jax.jit, static_argnames=("normalize", "scale", "tile", "interpret"))
def _decode(q, k, v, log_decay, bonus, kv, key_sum, *, normalize, scale, tile, interpret):
  """`decode` for K and V that need no padding."""
  (B, H, K), V = q.shape, v.shape[-1]
  columns = tile or value_tile(B, H, V)
  layout = _layout(K, columns)
  by_key, by_value = layout.reduce(1), layout.reduce(0)

  # None is an empty tree: inputs that are not there make no references.
  def body(inputs, kv_ref, out_ref, *key_sum_out):
    q_ref, k_ref, v_ref, decay_ref, bonus_ref, key_sum_ref = inputs
    b, h, t = (lax.axis_index(name) for name in ("batch", "head", "tile"))
    here = pl.ds(t * columns, columns)

    def load(ref, layout):
      # `optimized` is about bank conflicts of shared memory; these are loads from global memory.
      return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def over(vector, axis):
      """A vector along `axis` of the tile, repeated along the other."""
      return plgpu.layout_cast(lax.broadcast_in_dim(vector, (K, columns), [axis]), layout)

    # All loads first: they travel together.
    state = load(kv_ref.at[b, h, :, here], layout)
    query, key = load(q_ref.at[b, h], by_key), load(k_ref.at[b, h], by_key)
    value = load(v_ref.at[b, h, here], by_value)
    if normalize:
      sums = load(key_sum_ref.at[b, h], by_key)
    if bonus_ref is not None:
      own = load(bonus_ref.at[h], by_key) * key
      # Read before the update: q^T diag(u) k v^T = (q . u k) v^T.
      out = jnp.sum(over(query, 0) * state, axis=0) + value * jnp.sum(query * own)
      if normalize:
        denominator = jnp.sum(query * (sums + own))

    if decay_ref is not None:
      where = (b if decay_ref.shape[0] > 1 else 0, h if decay_ref.shape[1] > 1 else 0)
      if decay_ref.shape[2] > 1:
        decay = jnp.exp(load(decay_ref.at[where], by_key))
        state = over(decay, 0) * state
      else:
        decay = jnp.exp(decay_ref[(*where, 0)])
        state = decay * state
      sums = decay * sums if normalize else None
    state = state + over(key, 0) * over(value, 1)
    store_anywhere(kv_ref.at[b, h, :, here], state)
    if normalize:
      sums = sums + key

      # Every block of the head has computed the same; one of them stores it.
      @pl.when(t == 0)
      def _():
        store_anywhere(key_sum_out[0].at[b, h], sums)

    if bonus_ref is None:
      out = jnp.sum(over(query, 0) * state, axis=0)
      if normalize:
        denominator = jnp.sum(query * sums)
    out = out / denominator if normalize else out
    out = (out * scale if scale != 1 else out).astype(out_ref.dtype)
    store_anywhere(out_ref.at[b, h, here], out)

  out_type = [jax.ShapeDtypeStruct((B, H, V), v.dtype)]
  if normalize:
    out_type.append(jax.ShapeDtypeStruct((B, H, K), jnp.float32))
  # `plgpu.kernel` has no way to name aliases; a mutable reference becomes one.
  kv_ref = jax.new_ref(kv)
  step = plgpu.kernel(
    body,
    out_type=tuple(out_type),
    grid=(V // columns, H, B),
    grid_names=("tile", "head", "batch"),
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    interpret=interpret,
    kernel_name="linear_attention_decode",
  )
  out, *sums = step((q, k, v, log_decay, bonus, key_sum if normalize else None), kv_ref)
  return out, jax.freeze(kv_ref), sums[0] if normalize else key_sum


def _layout(K: int, columns: int):
  """How 128 threads share a tile [K, columns]: 4 columns (16 bytes) each, warps one above another.

  A warp covers 32 * 4 / columns whole rows. Two columns each if four warps then exceed K.
  """
  vector = 4 if K % (4 * 32 * 4 // columns) == 0 else 2
  rows = 32 * vector // columns  # of one warp
  tiling = plgpu.Tiling(((4 * rows, columns), (rows, columns), (vector,)))
  return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
