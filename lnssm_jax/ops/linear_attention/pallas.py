"""Linear attention on the Mosaic-GPU kernels: which arguments they support, and how they run them.

A single token runs `decode`, which updates the state in place; more tokens run
`op.linear_attention`, which splits them into chunks. README.md has the limits. Import this module
where it is needed only (see `dispatch.Kernels`).
"""

import functools

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import single_step
from lnssm_jax.ops.core.grouped_heads import head_counts
from lnssm_jax.ops.linear_attention.chunked import chunked
from lnssm_jax.ops.linear_attention.types import Inputs, LinearAttentionState, Options
from pallas_kernels.core.decode import fits
from pallas_kernels.linear_attention import config, decode, op

_WIDEST_KEY = 256


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  if inputs.value_log_decay is not None:
    return "value_log_decay is given, and the kernels decay keys only"
  if inputs.own_weight is not None and inputs.log_decay.shape[-1] > 1:
    return "own_weight is given, and the kernels weight the own token with one decay per head only"
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
    if name != "v" and x.shape[-1] > _WIDEST_KEY:
      return f"{name} is {x.shape[-1]} wide, and keys of at most {_WIDEST_KEY} are supported"
  if options.chunk_size not in (None, config.CHUNK):
    return f"chunk_size={options.chunk_size}, and the kernels' chunks have {config.CHUNK} tokens"
  if options.rank > config.CHUNK:
    return f"tokens have {options.rank} rows, and the kernels' chunks have {config.CHUNK}"
  if options.scale == 0.0:
    return "scale=0 leaves nothing to compute"
  return None


def _decodes(inputs: Inputs, options: Options) -> bool:
  """Whether `decode` runs these arguments; its own limits are in its `unsupported`."""
  q, k, v, log_decay, _, bonus, state, _, own_weight = inputs
  if q.shape[1] != 1 or (own_weight is not None and options.normalize):
    return False
  one = lambda x: jax.ShapeDtypeStruct((x.shape[0], *x.shape[2:]), x.dtype)
  arrays = one(q), one(k), one(v), one(log_decay), bonus, *state
  return decode.unsupported(*arrays, normalize=options.normalize) is None


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  K, V = inputs.q.shape[-1], inputs.v.shape[-1]
  if inputs.q.shape[1] > options.rank:
    return config.preferred(K, V)
  return _decodes(inputs, options) and fits(K, V)  # not a token of several rows


def run(
  inputs: Inputs,
  options: Options,
  *,
  sizes=None,
  interpret=None,
  num_splits: int | None = None,
  architecture: str | None = None,
) -> tuple[jax.Array, LinearAttentionState]:
  """The output and the last state.

  Args:
    sizes: the configuration of the kernels for many tokens; None takes that of the table.
    num_splits: into how many splits the sequence is cut for the passes over time; None leaves it to
      `config`.
    architecture: whose kernels run; None takes those of the device.
  """
  if _decodes(inputs, options):
    return single_step.run(_step, chunked, inputs, options, interpret=interpret)
  (H, _), S = head_counts(inputs), inputs.state.kv.shape[1]
  # The kernels have a state per head of the queries, although groups may share it.
  repeat = lambda x: jnp.repeat(x, H // S, axis=1) if S < H else x
  inputs = inputs._replace(state=jax.tree.map(repeat, inputs.state))
  how = {"sizes": sizes, "interpret": interpret, "num_splits": num_splits}
  out, state = _chunks(inputs, options, **how, architecture=architecture)
  return out, jax.tree.map(lambda x: x[:, :: H // S] if S < H else x, state)


def _chunks(inputs: Inputs, options: Options, *, sizes, interpret, num_splits, architecture):
  """`run` in chunks, from and to a state for each of H heads.

  Value columns are independent: more of them than the kernels take are further heads, which share
  queries, keys and decays.
  """
  H, _ = head_counts(inputs)
  q, k, v, log_decay, _, bonus, state, segments, own_weight = inputs
  normalize, fresh = options.normalize, options.fresh
  (B, T, _, V), K = v.shape, q.shape[-1]
  if config.KEY_WIDTHS[-1] < K:
    how = {"sizes": sizes, "interpret": interpret, "num_splits": num_splits}
    how |= {"architecture": architecture}
    wide = functools.partial(_by_key_groups, inputs, how=how)
    out, kv = wide(v, state.kv, options=options._replace(normalize=False))
    if not normalize:
      return out, LinearAttentionState(kv)
    # The normalizer is the same sum for values of 1.
    ones, key_sum = jnp.ones((B, T, H, 1), v.dtype), state.key_sum[..., None]
    total, key_sum = wide(ones, key_sum, options=options._replace(normalize=False, scale=1.0))
    out = (out.astype(jnp.float32) / total.astype(jnp.float32)).astype(v.dtype)
    return out, LinearAttentionState(kv, key_sum[..., 0])
  whole = V // config.VALUE_WIDTHS[-1] * config.VALUE_WIDTHS[-1]
  if 0 < whole < V:  # the rest of the columns, padded to less than others
    parts = [
      _chunks(
        inputs._replace(v=v[..., columns], state=state._replace(kv=state.kv[..., columns])),
        options,
        sizes=sizes,
        interpret=interpret,
        num_splits=num_splits,
        architecture=architecture,
      )
      for columns in (slice(whole), slice(whole, V))
    ]
    out, kv = (jnp.concatenate(x, -1) for x in zip(*((o, s.kv) for o, s in parts), strict=True))
    return out, parts[0][1]._replace(kv=kv)
  wide_k = config.padded_width(K, config.KEY_WIDTHS)
  wide_v = config.padded_width(min(V, config.VALUE_WIDTHS[-1]), config.VALUE_WIDTHS)
  groups = -(-V // wide_v)
  heads = H * groups
  num_splits = num_splits or config.num_splits(B, heads, wide_v, T)
  length = config.padded_length(T, num_splits)
  pad = lambda x, *ends: jnp.pad(x, [(0, end) for end in ends])
  with_tokens = lambda x, width: pad(x, 0, length - T, 0, width - x.shape[3])
  extra = wide_k - K
  of_heads = lambda x, axis, count=heads: (
    x if x.shape[axis] in (1, count) else jnp.repeat(x, count // x.shape[axis], axis)
  )
  if log_decay.shape[-1] == 1 and bonus is None:
    log_decay = jnp.broadcast_to(of_heads(log_decay[..., 0], 2), (*log_decay.shape[:2], heads))
  elif log_decay.shape[1] == 1:
    log_decay = pad(jnp.broadcast_to(of_heads(log_decay[0, 0], 0), (heads, K)), 0, extra)
  else:
    log_decay = with_tokens(jnp.broadcast_to(log_decay, (B, T, log_decay.shape[2], K)), wide_k)
  v = with_tokens(v if groups == 1 else of_heads(v, 2, H), groups * wide_v)
  kv = pad(state.kv, 0, 0, extra, groups * wide_v - V).reshape(B, H, wide_k, groups, wide_v)
  key_sum = jnp.repeat(pad(state.key_sum, 0, 0, extra), groups, axis=1) if normalize else None
  padded = op.Inputs(
    with_tokens(q, wide_k),
    with_tokens(k, wide_k),
    v.reshape(B, length, -1, wide_v),
    log_decay,
    None
    if bonus is None
    else pad(jnp.broadcast_to(of_heads(bonus.astype(jnp.float32), 0), (heads, K)), 0, extra),
    None if fresh else kv.swapaxes(2, 3).reshape(B, heads, wide_k, wide_v),
    None if fresh else key_sum,
    None
    if own_weight is None
    else pad(jnp.broadcast_to(of_heads(own_weight, 2), (B, T, heads)), 0, length - T, 0),
  )
  index = None
  if segments is not None:
    index = jnp.pad(segments.index, ((0, 0), (0, length - T)), mode="edge")
  out, kv, key_sum = op.linear_attention(
    padded,
    index,
    scale=options.scale,
    length=T,
    num_splits=num_splits,
    normalize=normalize,
    rank=options.rank,
    config=sizes,
    architecture=architecture,
    interpret=interpret,
  )
  out = out.reshape(B, length, H, groups * wide_v)[:, :T, :, :V]
  kv = kv.reshape(B, H, groups, wide_k, wide_v).swapaxes(2, 3).reshape(B, H, wide_k, -1)
  if normalize:
    key_sum = key_sum[:, ::groups, :K]
  return out, LinearAttentionState(kv[:, :, :K, :V], key_sum)


def _step(inputs: Inputs, *, options: Options, interpret):
  """A single token by `decode`."""
  q, k, v, log_decay, _, bonus, state, _, own_weight = inputs
  if own_weight is not None:
    # a S_{t-1} is read with a bonus of 0, the own term added.
    H, _ = head_counts(inputs)
    bonus = jnp.zeros((H, q.shape[-1]), jnp.float32)
    of_heads = lambda x: jnp.repeat(x, H // x.shape[2], axis=2).astype(jnp.float32)
    own = options.scale * of_heads(own_weight) * jnp.sum(of_heads(q) * of_heads(k), axis=-1)
    before = inputs._replace(
      q=(jnp.exp(of_heads(log_decay)) * of_heads(q)).astype(q.dtype), own_weight=None, bonus=bonus
    )
    out, state = _step(before, options=options, interpret=interpret)
    return (out.astype(jnp.float32) + own[..., None] * of_heads(v)).astype(v.dtype), state
  arrays = q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], bonus, state.kv
  key_sum = state.key_sum if options.normalize else None
  static = {"normalize": options.normalize, "scale": options.scale, "interpret": interpret}
  out, kv, key_sum = decode.decode(*arrays, key_sum, **static)
  return out[:, None], LinearAttentionState(kv, key_sum)


def _by_key_groups(inputs: Inputs, v, kv, *, options: Options, how: dict):
  """`_chunks` for wide keys, (out, kv): before division the output is a sum over their channels."""
  width, K = config.KEY_WIDTHS[-1], inputs.q.shape[-1]
  outs, states = [], []
  for start in range(0, K, width):

    def part(x: jax.Array, axis: int = -1, start=start) -> jax.Array:
      if x.shape[axis] == 1:  # the same for all channels
        return x
      return jax.lax.slice_in_dim(x, start, min(start + width, K), axis=axis)

    some = inputs._replace(
      q=part(inputs.q),
      k=part(inputs.k),
      v=v,
      log_decay=part(inputs.log_decay),
      bonus=None if inputs.bonus is None else part(inputs.bonus),
      state=LinearAttentionState(part(kv, 2)),
    )
    out, last = _chunks(some, options, **how)
    outs.append(out.astype(jnp.float32))
    states.append(last.kv)
  return functools.reduce(jnp.add, outs).astype(v.dtype), jnp.concatenate(states, axis=2)
