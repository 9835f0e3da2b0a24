"""One token of the delta rule in one kernel: the state is read once and written once, in place.

    S' = a S + beta (w v^T - k old^T)         a = exp(log_decay), old = (a S)^T e
    out = scale q^T S'

w is the write key, k without one; old is S^T e where the erase key reads before the decay. The
three readings of the state, of e, of the update and of q, are one: it stays in registers.
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
  write_key: jax.Array | None = None,
) -> str | None:
  """The reason why `decode` cannot run these arguments, or None. Shapes are taken to agree."""
  keys = {"erase_key": erase_key, "write_key": write_key}
  arrays = {"q": q, "k": k, "v": v} | {n: x for n, x in keys.items() if x is not None}
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
  write_key: jax.Array | None = None,
  *,
  erase_before_decay: bool = False,
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
    log_decay: float32 [B, H], or [B, H, K] per key channel; values <= 0.
    kv: float32 [B, H, K, V].
    write_key: [B, H, K], or None for that of `k`.
    erase_before_decay: whether `erase_key` reads the state before it decays.
    tile: columns of the state per CTA: 16, 32 or 64, a divisor of V; None takes
      `single_token.value_tile`.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Raises:
    ValueError: the arguments are unsupported, or `tile` does not fit.
  """
  reason = unsupported(q, k, erase_key, v, beta, log_decay, kv, write_key)
  if reason is not None:
    raise ValueError(f"decode: {reason}.")
  K, V = kv.shape[2:]
  pad_k, pad_v = -K % single_token.WIDTH, -V % single_token.WIDTH
  if tile is not None and (tile not in single_token.TILES or (V + pad_v) % tile):
    raise ValueError(f"decode: tile={tile} must be 16, 32 or 64 and divide V={V + pad_v}.")
  options = {"scale": scale, "tile": tile, "interpret": interpret}
  options["erase_before_decay"] = erase_before_decay
  if single_token.fits(K, V):
    return _decode(q, k, erase_key, v, beta, log_decay, kv, write_key, **options)
  pad_keys = lambda x: None if x is None else single_token.pad_last(x, pad_k)
  out, kv = _decode(
    pad_keys(q),
    pad_keys(k),
    pad_keys(erase_key),
    single_token.pad_last(v, pad_v),
    beta if beta.shape[-1] == 1 else single_token.pad_last(beta, pad_v),
    log_decay if log_decay.ndim == 2 else pad_keys(log_decay),
    single_token.pad_last(kv, pad_k, pad_v),
    pad_keys(write_key),
    **options,
  )
  return out[..., :V], kv[..., :K, :V]


# Under `jit`, so that a stack of layers has one kernel.
@functools.partial(jax.jit, static_argnames=("erase_before_decay", "scale", "tile", "interpret"))
def _decode(
  q, k, erase_key, v, beta, log_decay, kv, write_key, *, erase_before_decay, scale, tile, interpret
):
  """`decode` for K and V that need no padding."""
  B, S, _, V = kv.shape
  H = max(q.shape[1], S)

  def body(tile, inputs, place, kv_ref, out_ref):
    q_ref, k_ref, erase_ref, v_ref, beta_ref, decay_ref, write_ref = inputs
    b, h, here, _ = place
    readers = [h] if H == S else [h * (H // S) + n for n in range(H // S)]  # heads of this state
    of_state = lambda ref: shared_head(h, S, ref, 1)
    # All loads first: they travel together.
    state = tile.load(kv_ref)
    queries = [tile.load_keys(q_ref.at[b, shared_head(x, H, q_ref, 1)]) for x in readers]
    load_key = lambda ref: tile.load_keys(ref.at[b, of_state(ref)])
    key = load_key(k_ref)
    erase = key if erase_ref is None else load_key(erase_ref)
    write = None if write_ref is None else load_key(write_ref)
    value = tile.load_values(v_ref.at[b, of_state(v_ref), here])
    place = b, of_state(beta_ref)
    rate = (
      beta_ref[(*place, 0)]
      if beta_ref.shape[2] == 1
      else tile.load_values(beta_ref.at[(*place, here)])
    )
    if len(decay_ref.shape) == 2:
      decayed = jnp.exp(decay_ref[b, of_state(decay_ref)]) * state
    else:
      decayed = tile.broadcast_keys(jnp.exp(load_key(decay_ref))) * state
    old = tile.read(erase, state if erase_before_decay else decayed)
    stored = lambda keys, values: tile.broadcast_keys(keys) * tile.broadcast_values(rate * values)
    if write is None:
      state = decayed + stored(key, value - old)
    else:
      state = decayed + stored(write, value) - stored(key, old)
    store_unoptimized(kv_ref, state)
    for head, query in zip(readers, queries, strict=True):
      out = scale * tile.read(query, state)
      store_unoptimized(out_ref.at[b, head, here], out.astype(out_ref.dtype))

  (out,), kv = single_token.run(
    body,
    (q, k, erase_key, v, beta, log_decay, write_key),
    kv,
    [jax.ShapeDtypeStruct((B, H, V), v.dtype)],
    columns=tile or single_token.value_tile(B, S, V),
    name="delta_rule_decode",
    interpret=interpret,
  )
  return out, kv
