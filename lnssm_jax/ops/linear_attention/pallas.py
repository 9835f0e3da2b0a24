"""Linear attention on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Two paths: a single step runs `decode`, which updates the state in place; more steps run `op`, which
cuts them into chunks. Both promise what README.md says beside this file. Import this module where
it is needed only (see `dispatch.kernels`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops import steps
from lnssm_jax.ops.linear_attention import xla
from lnssm_jax.ops.linear_attention.state import LinearAttentionState
from pallas_kernels.linear_attention import decode, op, shapes
from pallas_kernels.steps import fits

_WIDEST = 256


def obstacle(
  q,
  k,
  v,
  log_decay,
  value_log_decay,
  bonus,
  state,
  segments,
  *,
  normalize,
  scale,
  chunk_size=None,
  fresh=False,
):
  """Why the kernels cannot run these arguments on any device, or None."""
  del segments, fresh
  if value_log_decay is not None:
    return "value_log_decay is given, and the kernels decay keys only"
  if state.kv.dtype != jnp.float32:
    return f"initial_state has dtype {state.kv.dtype}, and the kernels compute in float32"
  if _takes_a_step(q, k, v, log_decay, bonus, state, normalize=normalize):
    return None
  for name, x in (("q", q), ("k", k), ("v", v)):
    if x.dtype != jnp.bfloat16:
      return (
        f"{name} has dtype {x.dtype}, and the tensor cores multiply bfloat16 only (float32 would "
        "lose digits there)"
      )
    if x.shape[-1] > _WIDEST:
      return f"{name} is {x.shape[-1]} wide, and heads of at most {_WIDEST} are supported"
  if chunk_size not in (None, op.CHUNK):
    return f"chunk_size={chunk_size}, and the kernels' chunks have {op.CHUNK} steps"
  if scale == 0.0:
    return "scale=0 leaves nothing to compute"
  return None


def _takes_a_step(q, k, v, log_decay, bonus, state, *, normalize):
  """Whether `decode` runs these arguments; its own limits are in its `obstacle`."""
  if q.shape[1] != 1:
    return False
  one = lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
  arrays = one(q), one(k), one(v), one(log_decay), bonus, *state
  return decode.obstacle(*arrays, normalize=normalize) is None


def worthwhile(
  q, k, v, log_decay, value_log_decay, bonus, state, segments, *, normalize, **options
):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del value_log_decay, segments, options
  K, V = q.shape[-1], v.shape[-1]
  if q.shape[1] > 1:
    return shapes.worthwhile(K, V)
  takes = _takes_a_step(q, k, v, log_decay, bonus, state, normalize=normalize)
  return takes and fits(K, V)


def run(
  q,
  k,
  v,
  log_decay,
  value_log_decay,
  bonus,
  state,
  segments,
  *,
  normalize,
  scale,
  chunk_size=None,
  fresh=False,
  interpret=None,
  parts=None,
):
  """Arguments as in `reference.py`. `fresh`: the state is zero and needs no reading."""
  del value_log_decay, chunk_size
  if _takes_a_step(q, k, v, log_decay, bonus, state, normalize=normalize):
    # A single step lies in one segment, that of the initial state.
    options = {"normalize": normalize, "scale": scale}
    step = functools.partial(_step, interpret=interpret, **options)
    form = functools.partial(_form, **options)
    return steps.with_gradient_of(form, step)(q, k, v, log_decay, bonus, state)
  B, T, H, K = q.shape
  V = v.shape[-1]
  if shapes.KEY_WIDTHS[-1] < K:
    options = {"fresh": fresh, "interpret": interpret, "parts": parts}
    wide = functools.partial(_by_key_groups, q, k, options=options)
    out, kv = wide(v, log_decay, bonus, state.kv, segments, scale=scale)
    if not normalize:
      return out, LinearAttentionState(kv)
    # The normaliser is the same sum for values of 1.
    ones, key_sum = jnp.ones((B, T, H, 1), v.dtype), state.key_sum[..., None]
    total, key_sum = wide(ones, log_decay, bonus, key_sum, segments, scale=1.0)
    out = (out.astype(jnp.float32) / total.astype(jnp.float32)).astype(v.dtype)
    return out, LinearAttentionState(kv, key_sum[..., 0])
  wide_k = shapes.padded_width(K, shapes.KEY_WIDTHS)
  wide_v = shapes.padded_width(V, shapes.VALUE_WIDTHS)
  parts = parts or shapes.parts(B, H, T)
  length = shapes.padded_length(T, parts)
  pad = lambda x, *ends: jnp.pad(x, [(0, end) for end in ends])
  with_steps = lambda x, width: pad(x, 0, length - T, 0, width - x.shape[3])
  extra = wide_k - K
  if log_decay.shape[-1] == 1 and bonus is None:
    log_decay = jnp.broadcast_to(log_decay[..., 0], (*log_decay.shape[:2], H))
  elif log_decay.shape[1] == 1:
    log_decay = pad(jnp.broadcast_to(log_decay[0, 0], (H, K)), 0, extra)
  else:
    log_decay = with_steps(jnp.broadcast_to(log_decay, (B, T, H, K)), wide_k)
  inputs = op.Inputs(
    with_steps(q, wide_k),
    with_steps(k, wide_k),
    with_steps(v, wide_v),
    log_decay,
    None if bonus is None else pad(bonus.astype(jnp.float32), 0, extra),
    None if fresh else pad(state.kv, 0, 0, extra, wide_v - V),
    pad(state.key_sum, 0, 0, extra) if normalize and not fresh else None,
  )
  if segments is not None:
    segments = jnp.pad(segments, ((0, 0), (0, length - T)), mode="edge")
  static = op.Static(float(scale), T, parts, normalize, interpret)
  out, kv, key_sum = op.linear_attention(inputs, segments, static)
  if normalize:
    key_sum = key_sum[..., :K]
  return out[:, :T, :, :V], LinearAttentionState(kv[:, :, :K, :V], key_sum)


def _step(q, k, v, log_decay, bonus, state, *, normalize, scale, interpret):
  """A single step by `decode`."""
  arrays = q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], bonus, state.kv
  key_sum = state.key_sum if normalize else None
  options = {"normalize": normalize, "scale": scale, "interpret": interpret}
  out, kv, key_sum = decode.decode(*arrays, key_sum, **options)
  return out[:, None], LinearAttentionState(kv, key_sum)


def _form(q, k, v, log_decay, bonus, state, **options):
  """The same by XLA."""
  return xla.chunked(q, k, v, log_decay, None, bonus, state, None, **options)


def _by_key_groups(q, k, v, log_decay, bonus, kv, segments, *, scale, options):
  """`run` for wide keys, (out, kv): before division the output is a sum over groups of channels."""
  (B, T, H, K), V, width = q.shape, v.shape[-1], shapes.KEY_WIDTHS[-1]
  groups = -(-K // width)

  def grouped(x, axis=-1):
    """Axis K becomes groups, which join the heads; a size of 1 is shared by the groups."""
    x = jnp.moveaxis(x, axis, -1)
    if x.shape[-1] == 1:
      x = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], groups, 1))
    else:
      x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * width - K)])
      x = x.reshape(*x.shape[:-1], groups, width)
    return x

  join = lambda x: x.reshape(*x.shape[:2], -1, x.shape[-1])  # [B, T, H, G, X]
  if log_decay.shape[2] == 1:
    log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:2], H, log_decay.shape[3]))
  v = jnp.broadcast_to(v[:, :, :, None], (B, T, H, groups, V))
  kv = jnp.moveaxis(grouped(kv, axis=2), 2, -1).reshape(B, H * groups, width, V)
  out, last = run(
    *(join(grouped(q)), join(grouped(k)), join(v), join(grouped(log_decay)), None),
    None if bonus is None else grouped(bonus).reshape(H * groups, width),
    *(LinearAttentionState(kv), segments),
    normalize=False,
    scale=scale,
    **options,
  )
  out = out.reshape(B, T, H, groups, V).astype(jnp.float32).sum(3).astype(v.dtype)
  return out, last.kv.reshape(B, H, groups * width, V)[:, :, :K]


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))
