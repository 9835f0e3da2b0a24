"""One token of linear attention in one kernel: the state is read once and written once, in place.

S' = diag(a) S + k v^T       z' = a z + k                     a = exp(log_decay)
out = scale q^T S'           D  = q^T z'                      without `bonus`
out = scale q^T (S + diag(bonus) k v^T)   D = q^T (z + bonus k)   with `bonus`
with `normalize`: out / D
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.core import decode as single_token
from pallas_kernels.core.chunk_grid import shared_head
from pallas_kernels.core.wgmma import store_unoptimized


def unsupported(
  q: Any,
  k: Any,
  v: Any,
  log_decay: Any,
  bonus: Any,
  kv: Any,
  key_sum: Any,
  *,
  normalize: bool,
  scale: float = 1.0,
) -> str | None:
  """The reason why `decode` cannot run these arguments, or None."""
  del scale
  if q.ndim != 3 or v.ndim != 3:
    return (
      f"q {q.shape} and v {v.shape} must be [B, H, K] and [B, H, V]: one token without a T axis"
    )
  (B, _, K), V = q.shape, v.shape[-1]
  S = kv.shape[1] if kv.ndim == 4 else 0
  H = max(q.shape[1], S)
  # None: a number of heads, of which groups may share one.
  wanted: dict[str, tuple] = {
    "k": (k, (B, None, K)),
    "v": (v, (B, None, V)),
    "kv": (kv, (B, S, K, V)),
  }
  if bonus is not None:
    wanted["bonus"] = bonus, (None, K)
  if normalize:
    if key_sum is None:
      return "key_sum is None, but normalize=True needs it, [B, H, K]"
    wanted["key_sum"] = key_sum, (B, S, K)
  for name, (x, shape) in wanted.items():
    if x.ndim != len(shape) or any(m not in (None, n) for n, m in zip(x.shape, shape, strict=True)):
      sizes = tuple("heads" if m is None else m for m in shape)
      return f"{name} has shape {x.shape}, but {sizes} goes with q {q.shape} and v {v.shape}"
  heads = [(q, H, 1), (kv, H, 1), (k, S, 1), (v, S, 1)] + ([] if bonus is None else [(bonus, H, 0)])
  if any(not x.shape[axis] or most % x.shape[axis] for x, most, axis in heads):
    return (
      f"the heads of q {q.shape}, k {k.shape} and v {v.shape} do not share those of kv {kv.shape}"
    )
  if log_decay is not None and (
    log_decay.ndim != 3
    or log_decay.shape[0] not in (1, B)
    or S % max(log_decay.shape[1], 1)
    or log_decay.shape[2] not in (1, K)
  ):
    return f"log_decay has shape {log_decay.shape}, which does not broadcast to {(B, S, K)}"
  for name, x in (("log_decay", log_decay), ("key_sum", key_sum if normalize else None)):
    if x is not None and x.dtype != jnp.float32:
      return f"{name} is {x.dtype}; the kernel takes float32"
  return single_token.unsupported_dtype(q=q, k=k, v=v) or single_token.unsupported_matrix_state(kv)


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array | None,
  bonus: jax.Array | None,
  kv: jax.Array,
  key_sum: jax.Array | None,
  *,
  normalize: bool,
  scale: float = 1.0,
  tile: int | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Runs one token: (out [B, H, V] in the dtype of v, kv, key_sum).

  The returned kv uses the buffer of the argument (`input_output_aliases` of the compiled call): of
  a donated state, or of one carried by a loop, nothing is copied. If K or V is no multiple of 16
  this does not hold: q, k, v and the state are padded with zeros outside the kernel and cut
  afterwards. `key_sum`, 1 / V of the state's size, has a new buffer, because every CTA of a
  head reads it. exp(0) is 1: without decay an entry that k v^T does not touch keeps its bits.

  Args:
    q, k: [B, H, K], v: [B, H, V]; bfloat16 or float32, computed in float32. Groups of heads may
      share one; several heads of q one state, if they share k, v and log_decay.
    log_decay: float32, [B or 1, H or 1, K or 1], values <= 0; None means no decay.
    bonus: [H, K] or None.
    kv: float32 [B, H, K, V].
    key_sum: float32 [B, H, K], of the heads of kv; without `normalize` it is returned as it is,
      and may be None.
    tile: columns of the state per CTA: 16, 32 or 64, a divisor of V; None takes
      `single_token.value_tile`.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: the arguments are unsupported, or `tile` does not fit.
  """
  reason = unsupported(q, k, v, log_decay, bonus, kv, key_sum, normalize=normalize, scale=scale)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  K, V = kv.shape[2:]
  options = {"normalize": normalize, "scale": scale, "tile": tile, "interpret": interpret}
  pad_k, pad_v = -K % single_token.WIDTH, -V % single_token.WIDTH
  if tile is not None and (tile not in single_token.TILES or (V + pad_v) % tile):
    raise ValueError(f"decode: tile={tile} must be 16, 32 or 64 and divide V={V + pad_v}.")
  if single_token.fits(K, V):
    return _decode(q, k, v, log_decay, bonus, kv, key_sum, **options)
  if log_decay is not None and log_decay.shape[-1] > 1:
    log_decay = single_token.pad_last(log_decay, pad_k)
  out, padded_kv, padded_sum = _decode(
    single_token.pad_last(q, pad_k),
    single_token.pad_last(k, pad_k),
    single_token.pad_last(v, pad_v),
    log_decay,
    None if bonus is None else single_token.pad_last(bonus, pad_k),
    single_token.pad_last(kv, pad_k, pad_v),
    None if key_sum is None or not normalize else single_token.pad_last(key_sum, pad_k),
    **options,
  )
  return out[..., :V], padded_kv[..., :K, :V], padded_sum[..., :K] if normalize else key_sum


# Under `jit`, so that a program with many calls of one shape, as a stack of layers has, holds one
# kernel and not as many.
@functools.partial(jax.jit, static_argnames=("normalize", "scale", "tile", "interpret"))
def _decode(q, k, v, log_decay, bonus, kv, key_sum, *, normalize, scale, tile, interpret):
  """`decode` for K and V that need no padding."""
  B, S, K, V = kv.shape
  H = max(q.shape[1], S)

  # None is an empty tree: inputs that are not there make no references.
  def body(tile, inputs, place, kv_ref, out_ref, *key_sum_out):
    q_ref, k_ref, v_ref, decay_ref, bonus_ref, key_sum_ref = inputs
    b, h, here, number = place
    readers = [h] if H == S else [h * (H // S) + n for n in range(H // S)]  # heads of this state
    # All loads first: they travel together.
    state = tile.load(kv_ref)
    queries = [tile.load_keys(q_ref.at[b, shared_head(x, H, q_ref, 1)]) for x in readers]
    key = tile.load_keys(k_ref.at[b, shared_head(h, S, k_ref, 1)])
    value = tile.load_values(v_ref.at[b, shared_head(h, S, v_ref, 1), here])
    outs: Any = None
    sums: Any = None
    denominators: Any = None
    if normalize:
      sums = tile.load_keys(key_sum_ref.at[b, h])
    if bonus_ref is not None:
      weights = [tile.load_keys(bonus_ref.at[shared_head(x, H, bonus_ref, 0)]) for x in readers]
      own = [weight * key for weight in weights]
      pairs = list(zip(queries, own, strict=True))
      # Read before the update: q^T diag(u) k v^T = (q . u k) v^T.
      outs = [tile.read(query, state) + value * jnp.sum(query * x) for query, x in pairs]
      if normalize:
        denominators = [jnp.sum(query * (sums + x)) for query, x in pairs]

    if decay_ref is not None:
      head = shared_head(h, S, decay_ref, 1) if decay_ref.shape[1] > 1 else 0
      where = (b if decay_ref.shape[0] > 1 else 0, head)
      if decay_ref.shape[2] > 1:
        decay = jnp.exp(tile.load_keys(decay_ref.at[where]))
        state = tile.broadcast_keys(decay) * state
      else:
        decay = jnp.exp(decay_ref[(*where, 0)])
        state = decay * state
      sums = decay * sums if normalize else None
    state = state + tile.broadcast_keys(key) * tile.broadcast_values(value)
    store_unoptimized(kv_ref, state)
    if normalize:
      sums = sums + key

      # Every CTA of the head has computed the same; one of them stores it.
      @pl.when(number == 0)
      def _():
        store_unoptimized(key_sum_out[0].at[b, h], sums)

    if bonus_ref is None:
      outs = [tile.read(query, state) for query in queries]
      if normalize:
        denominators = [jnp.sum(query * sums) for query in queries]
    for n, (head, out) in enumerate(zip(readers, outs, strict=True)):
      out = out / denominators[n] if normalize else out
      out = (out * scale if scale != 1 else out).astype(out_ref.dtype)
      store_unoptimized(out_ref.at[b, head, here], out)

  out_type = [jax.ShapeDtypeStruct((B, H, V), v.dtype)]
  if normalize:
    out_type.append(jax.ShapeDtypeStruct((B, S, K), jnp.float32))
  (out, *sums), kv = single_token.run(
    body,
    (q, k, v, log_decay, bonus, key_sum if normalize else None),
    kv,
    out_type,
    columns=tile or single_token.value_tile(B, S, V),
    name="linear_attention_decode",
    interpret=interpret,
  )
  return out, kv, sums[0] if normalize else key_sum
