"""One step of linear attention in one kernel: the state is read once and written once, in place.

S' = diag(a) S + k v^T       z' = a z + k                     a = exp(log_decay)
out = scale q^T S'           D  = q^T z'                      without `bonus`
out = scale q^T (S + diag(bonus) k v^T)   D = q^T (z + bonus k)   with `bonus`
with `normalize`: out / D
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import steps
from pallas_kernels.tensor_core import store_anywhere


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
  for name, x in (("log_decay", log_decay), ("key_sum", key_sum if normalize else None)):
    if x is not None and x.dtype != jnp.float32:
      return f"{name} is {x.dtype}; the kernel takes float32"
  return steps.dtype_obstacle(q=q, k=k, v=v) or steps.matrix_obstacle(kv)


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
    tile: columns of the state in a block: 16, 32 or 64, a divisor of V; None takes
      `steps.value_tile`.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: `obstacle` has something to say, or `tile` does not fit.
  """
  reason = obstacle(q, k, v, log_decay, bonus, kv, key_sum, normalize=normalize, scale=scale)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  K, V = kv.shape[2:]
  options = {"normalize": normalize, "scale": scale, "tile": tile, "interpret": interpret}
  pad_k, pad_v = -K % steps.WIDTH, -V % steps.WIDTH
  if tile is not None and (tile not in steps.TILES or (V + pad_v) % tile):
    raise ValueError(f"decode: tile={tile} must be 16, 32 or 64 and divide V={V + pad_v}.")
  if steps.fits(K, V):
    return _decode(q, k, v, log_decay, bonus, kv, key_sum, **options)
  if log_decay is not None and log_decay.shape[-1] > 1:
    log_decay = steps.padded(log_decay, pad_k)
  out, padded_kv, padded_sum = _decode(
    steps.padded(q, pad_k),
    steps.padded(k, pad_k),
    steps.padded(v, pad_v),
    log_decay,
    None if bonus is None else steps.padded(bonus, pad_k),
    steps.padded(kv, pad_k, pad_v),
    steps.padded(key_sum, pad_k) if normalize else None,
    **options,
  )
  return out[..., :V], padded_kv[..., :K, :V], padded_sum[..., :K] if normalize else key_sum


# Under `jit`, so that a program with many steps of one shape, as a stack of layers has, holds one
# kernel and not as many.
@functools.partial(jax.jit, static_argnames=("normalize", "scale", "tile", "interpret"))
def _decode(q, k, v, log_decay, bonus, kv, key_sum, *, normalize, scale, tile, interpret):
  """`decode` for K and V that need no padding."""
  (B, H, K), V = q.shape, v.shape[-1]

  # None is an empty tree: inputs that are not there make no references.
  def body(tile, inputs, place, kv_ref, out_ref, *key_sum_out):
    q_ref, k_ref, v_ref, decay_ref, bonus_ref, key_sum_ref = inputs
    b, h, here, number = place
    # All loads first: they travel together.
    state = tile.load(kv_ref)
    query, key = tile.keys(q_ref.at[b, h]), tile.keys(k_ref.at[b, h])
    value = tile.values(v_ref.at[b, h, here])
    if normalize:
      sums = tile.keys(key_sum_ref.at[b, h])
    if bonus_ref is not None:
      own = tile.keys(bonus_ref.at[h]) * key
      # Read before the update: q^T diag(u) k v^T = (q . u k) v^T.
      out = tile.read(query, state) + value * jnp.sum(query * own)
      if normalize:
        denominator = jnp.sum(query * (sums + own))

    if decay_ref is not None:
      where = (b if decay_ref.shape[0] > 1 else 0, h if decay_ref.shape[1] > 1 else 0)
      if decay_ref.shape[2] > 1:
        decay = jnp.exp(tile.keys(decay_ref.at[where]))
        state = tile.across(decay) * state
      else:
        decay = jnp.exp(decay_ref[(*where, 0)])
        state = decay * state
      sums = decay * sums if normalize else None
    state = state + tile.across(key) * tile.down(value)
    store_anywhere(kv_ref, state)
    if normalize:
      sums = sums + key

      # Every block of the head has computed the same; one of them stores it.
      @pl.when(number == 0)
      def _():
        store_anywhere(key_sum_out[0].at[b, h], sums)

    if bonus_ref is None:
      out = tile.read(query, state)
      if normalize:
        denominator = jnp.sum(query * sums)
    out = out / denominator if normalize else out
    out = (out * scale if scale != 1 else out).astype(out_ref.dtype)
    store_anywhere(out_ref.at[b, h, here], out)

  out_type = [jax.ShapeDtypeStruct((B, H, V), v.dtype)]
  if normalize:
    out_type.append(jax.ShapeDtypeStruct((B, H, K), jnp.float32))
  (out, *sums), kv = steps.run(
    body,
    (q, k, v, log_decay, bonus, key_sum if normalize else None),
    kv,
    out_type,
    columns=tile or steps.value_tile(B, H, V),
    name="linear_attention_decode",
    interpret=interpret,
  )
  return out, kv, sums[0] if normalize else key_sum
