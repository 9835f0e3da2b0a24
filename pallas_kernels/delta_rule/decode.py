"""One token of the delta rule in one kernel: the state is read once and written once, in place.

    S  <- a S                       a = exp(log_decay)
    S' =  S + k (beta (v - e^T S))^T
    out = scale q^T S'

The three readings of the state, of e, of the update and of q, are one: it stays in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core import decode as single_token
from pallas_kernels.core.chunk_grid import shared_head
from pallas_kernels.core.wgmma import store_unoptimized


def unsupported(
  q: jax.Array,
  k: jax.Array,
  erase_key: jax.Array | None,
  v: jax.Array,
  beta: jax.Array,
  log_decay: jax.Array,
  kv: jax.Array,
) -> str | None:
  """The reason why `decode` cannot run these arguments, or None. Shapes are taken to agree."""
  arrays = {"q": q, "k": k, "v": v} | ({} if erase_key is None else {"erase_key": erase_key})
  for name, x in (("beta", beta), ("log_decay", log_decay)):
    if x.dtype != jnp.float32:
      return f"{name} is {x.dtype}; the kernel takes float32"
  return single_token.unsupported_dtype(**arrays) or single_token.unsupported_matrix_state(kv)


def decode(
  q: jax.Array,
  k: jax.Array,
  erase_key: jax.Array | None,
  v: jax.Array,
  beta: jax.Array,
  log_decay: jax.Array,
  kv: jax.Array,
  *,
  scale: float = 1.0,
  tile: int | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs one token: (out [B, H, V] in the dtype of v, kv).

  The returned kv uses the buffer of the argument, as in `linear_attention.decode`, if K and V are
  multiples of 16; otherwise all is padded with zeros outside the kernel and cut afterwards.

  Args:
    q, k: [B, H, K], v: [B, H, V]; bfloat16 or float32, computed in float32. Groups of heads may
      share one; several heads of q one state, if they share all else.
    erase_key: [B, H, K], or None for that of `k`.
    beta: float32 [B, H, 1], or [B, H, V] for a rate of each value column.
    log_decay: float32 [B, H], values <= 0.
    kv: float32 [B, H, K, V].
    tile: columns of the state per CTA: 16, 32 or 64, a divisor of V; None takes
      `single_token.value_tile`.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: the arguments are unsupported, or `tile` does not fit.
  """
  reason = unsupported(q, k, erase_key, v, beta, log_decay, kv)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  K, V = kv.shape[2:]
  pad_k, pad_v = -K % single_token.WIDTH, -V % single_token.WIDTH
  if tile is not None and (tile not in single_token.TILES or (V + pad_v) % tile):
    raise ValueError(f"decode: tile={tile} must be 16, 32 or 64 and divide V={V + pad_v}.")
  options = {"scale": scale, "tile": tile, "interpret": interpret}
  if single_token.fits(K, V):
    return _decode(q, k, erase_key, v, beta, log_decay, kv, **options)
  out, kv = _decode(
    single_token.pad_last(q, pad_k),
    single_token.pad_last(k, pad_k),
    None if erase_key is None else single_token.pad_last(erase_key, pad_k),
    single_token.pad_last(v, pad_v),
    beta if beta.shape[-1] == 1 else single_token.pad_last(beta, pad_v),
    log_decay,
    single_token.pad_last(kv, pad_k, pad_v),
    **options,
  )
  return out[..., :V], kv[..., :K, :V]


# Under `jit`, so that a stack of layers has one kernel.
@functools.partial(jax.jit, static_argnames=("scale", "tile", "interpret"))
def _decode(q, k, erase_key, v, beta, log_decay, kv, *, scale, tile, interpret):
  """`decode` for K and V that need no padding."""
  B, S, _, V = kv.shape
  H = max(q.shape[1], S)

  def body(tile, inputs, place, kv_ref, out_ref):
    q_ref, k_ref, erase_ref, v_ref, beta_ref, decay_ref = inputs
    b, h, here, _ = place
    readers = [h] if H == S else [h * (H // S) + n for n in range(H // S)]  # heads of this state
    of_state = lambda ref: shared_head(h, S, ref, 1)
    # All loads first: they travel together.
    state = tile.load(kv_ref)
    queries = [tile.load_keys(q_ref.at[b, shared_head(x, H, q_ref, 1)]) for x in readers]
    key = tile.load_keys(k_ref.at[b, of_state(k_ref)])
    erase = key if erase_ref is None else tile.load_keys(erase_ref.at[b, of_state(erase_ref)])
    value = tile.load_values(v_ref.at[b, of_state(v_ref), here])
    place = b, of_state(beta_ref)
    rate = (
      beta_ref[(*place, 0)]
      if beta_ref.shape[2] == 1
      else tile.load_values(beta_ref.at[(*place, here)])
    )
    state = jnp.exp(decay_ref[b, of_state(decay_ref)]) * state
    correction = rate * (value - tile.read(erase, state))
    state = state + tile.broadcast_keys(key) * tile.broadcast_values(correction)
    store_unoptimized(kv_ref, state)
    for head, query in zip(readers, queries, strict=True):
      out = scale * tile.read(query, state)
      store_unoptimized(out_ref.at[b, head, here], out.astype(out_ref.dtype))

  (out,), kv = single_token.run(
    body,
    (q, k, erase_key, v, beta, log_decay),
    kv,
    [jax.ShapeDtypeStruct((B, H, V), v.dtype)],
    columns=tile or single_token.value_tile(B, S, V),
    name="delta_rule_decode",
    interpret=interpret,
  )
  return out, kv
