"""Linear attention on the Mosaic-GPU kernels: which arguments they support, and how they run them.

Two kernels: a single token runs `decode`, which updates the state in place; more tokens run `op`,
which splits them into chunks. README.md has the limits. Import this module where it is needed only
(see `dispatch.Kernels`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops.core import single_step
from lnssm_jax.ops.core.grouped_heads import form_over_groups, head_counts, with_all_heads
from lnssm_jax.ops.linear_attention.chunked import chunked
from lnssm_jax.ops.linear_attention.types import Inputs, LinearAttentionState, Options
from pallas_kernels.core.decode import fits
from pallas_kernels.linear_attention import config, decode, forward

_WIDEST = 256


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  if inputs.value_log_decay is not None:
    return "value_log_decay is given, and the kernels decay keys only"
  if inputs.state.kv.dtype != jnp.float32:
    return f"initial_state has dtype {inputs.state.kv.dtype}, and the kernels compute in float32"
  if _decodes(inputs, options):
    return None
  for name, x in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
    if x.dtype != jnp.bfloat16:
      return (
        f"{name} has dtype {x.dtype}, and the tensor cores multiply bfloat16 only (float32 would "
        "lose digits there)"
      )
    if x.shape[-1] > _WIDEST:
      return f"{name} is {x.shape[-1]} wide, and heads of at most {_WIDEST} are supported"
  if options.chunk_size not in (None, forward.CHUNK):
    return f"chunk_size={options.chunk_size}, and the kernels' chunks have {forward.CHUNK} tokens"
  if options.scale == 0.0:
    return "scale=0 leaves nothing to compute"
  return None


def _decodes(inputs: Inputs, options: Options) -> bool:
  """Whether `decode` runs these arguments; its own limits are in its `unsupported`."""
  q, k, v, log_decay, _, bonus, state, _ = inputs
  if q.shape[1] != 1:
    return False
  one = lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
  arrays = one(q), one(k), one(v), one(log_decay), bonus, *state
  return decode.unsupported(*arrays, normalize=options.normalize) is None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  K, V = inputs.q.shape[-1], inputs.v.shape[-1]
  if inputs.q.shape[1] > 1:
    return config.preferred(K, V)
  return _decodes(inputs, options) and fits(K, V)


def run(
  inputs: Inputs, options: Options, *, interpret=None, num_splits: int | None = None
) -> tuple[jax.Array, LinearAttentionState]:
  """The output and the last state.

  Args:
    num_splits: into how many splits the sequence is cut for the passes over time; None leaves it to
      `config`.
  """
  if _decodes(inputs, options):
    # One token is of one document, that of the initial state.
    step = functools.partial(_step, options=options, interpret=interpret)
    form = functools.partial(
      form_over_groups(chunked, reads_groups=True), options=options._replace(chunk_size=None)
    )
    return single_step.with_gradient_of(form, step)(inputs._replace(segments=None))
  (H, _), S = head_counts(inputs), inputs.state.kv.shape[1]
  if inputs.q.shape[-1] > config.KEY_WIDTHS[-1]:
    inputs = with_all_heads(inputs)
  # The kernels have a state per head of the queries, although groups may share it.
  repeat = lambda x: jnp.repeat(x, H // S, axis=1) if S < H else x
  inputs = inputs._replace(state=jax.tree.map(repeat, inputs.state))
  out, state = _chunks(inputs, options, interpret=interpret, num_splits=num_splits)
  return out, jax.tree.map(lambda x: x[:, :: H // S] if S < H else x, state)


def _chunks(inputs: Inputs, options: Options, *, interpret, num_splits):
  """`run` in chunks, from and to a state for each of H heads."""
  H, _ = head_counts(inputs)
  q, k, v, log_decay, _, bonus, state, segments = inputs
  normalize, fresh = options.normalize, options.fresh
  (B, T, _, V), K = v.shape, q.shape[-1]
  if config.KEY_WIDTHS[-1] < K:
    wide = functools.partial(_by_key_groups, inputs, interpret=interpret, num_splits=num_splits)
    out, kv = wide(v, state.kv, options=options._replace(normalize=False))
    if not normalize:
      return out, LinearAttentionState(kv)
    # The normalizer is the same sum for values of 1.
    ones, key_sum = jnp.ones((B, T, H, 1), v.dtype), state.key_sum[..., None]
    total, key_sum = wide(ones, key_sum, options=options._replace(normalize=False, scale=1.0))
    out = (out.astype(jnp.float32) / total.astype(jnp.float32)).astype(v.dtype)
    return out, LinearAttentionState(kv, key_sum[..., 0])
  wide_k = config.padded_width(K, config.KEY_WIDTHS)
  wide_v = config.padded_width(V, config.VALUE_WIDTHS)
  num_splits = num_splits or config.num_splits(B, H, T)
  length = config.padded_length(T, num_splits)
  pad = lambda x, *ends: jnp.pad(x, [(0, end) for end in ends])
  with_tokens = lambda x, width: pad(x, 0, length - T, 0, width - x.shape[3])
  extra = wide_k - K
  of_heads = lambda x, axis: (
    x if x.shape[axis] in (1, H) else jnp.repeat(x, H // x.shape[axis], axis)
  )
  if log_decay.shape[-1] == 1 and bonus is None:
    log_decay = jnp.broadcast_to(of_heads(log_decay[..., 0], 2), (*log_decay.shape[:2], H))
  elif log_decay.shape[1] == 1:
    log_decay = pad(jnp.broadcast_to(of_heads(log_decay[0, 0], 0), (H, K)), 0, extra)
  else:
    log_decay = with_tokens(jnp.broadcast_to(log_decay, (B, T, log_decay.shape[2], K)), wide_k)
  padded = forward.Inputs(
    with_tokens(q, wide_k),
    with_tokens(k, wide_k),
    with_tokens(v, wide_v),
    log_decay,
    None
    if bonus is None
    else pad(jnp.broadcast_to(of_heads(bonus.astype(jnp.float32), 0), (H, K)), 0, extra),
    None if fresh else pad(state.kv, 0, 0, extra, wide_v - V),
    pad(state.key_sum, 0, 0, extra) if normalize and not fresh else None,
  )
  index = None
  if segments is not None:
    index = jnp.pad(segments.index, ((0, 0), (0, length - T)), mode="edge")
  static = forward.Options(options.scale, T, num_splits, normalize, interpret)
  out, kv, key_sum = forward.linear_attention(padded, index, static)
  if normalize:
    key_sum = key_sum[..., :K]
  return out[:, :T, :, :V], LinearAttentionState(kv[:, :, :K, :V], key_sum)


def _step(inputs: Inputs, *, options: Options, interpret):
  """A single token by `decode`."""
  q, k, v, log_decay, _, bonus, state, _ = inputs
  arrays = q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], bonus, state.kv
  key_sum = state.key_sum if options.normalize else None
  static = {"normalize": options.normalize, "scale": options.scale, "interpret": interpret}
  out, kv, key_sum = decode.decode(*arrays, key_sum, **static)
  return out[:, None], LinearAttentionState(kv, key_sum)


def _by_key_groups(inputs: Inputs, v, kv, *, options: Options, interpret, num_splits):
  """`run` for wide keys, (out, kv): before division the output is a sum over groups of channels."""
  q, k, _, log_decay, _, bonus, _, segments = inputs
  (B, T, H, K), V, width = q.shape, v.shape[-1], config.KEY_WIDTHS[-1]
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
  by_group = Inputs(
    *(join(grouped(q)), join(grouped(k)), join(v), join(grouped(log_decay)), None),
    None if bonus is None else grouped(bonus).reshape(H * groups, width),
    *(LinearAttentionState(kv), segments),
  )
  out, last = run(by_group, options, interpret=interpret, num_splits=num_splits)
  out = out.reshape(B, T, H, groups, V).astype(jnp.float32).sum(3).astype(v.dtype)
  return out, last.kv.reshape(B, H, groups * width, V)[:, :, :K]


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))
