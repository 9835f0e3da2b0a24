"""The delta rule on the Mosaic-GPU kernels: which arguments they support, and how they run them.

A single token runs `decode`, which updates the state in place; more tokens run `op.delta_rule`,
which splits them into chunks. README.md has the limits. Import this module where it is needed only
(see `dispatch.Kernels`).
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import single_step
from lnssm_jax.ops.core.grouped_heads import head_counts
from lnssm_jax.ops.delta_rule.chunked import chunked
from lnssm_jax.ops.delta_rule.types import DeltaRuleState, Inputs, Options
from pallas_kernels.core import device
from pallas_kernels.core.decode import fits
from pallas_kernels.delta_rule import config, decode, op

_WIDEST_KEY = config.KEY_WIDTHS[-1]
_WIDEST_VALUE = config.VALUE_WIDTHS[-1]


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels cannot run these arguments on any device, or None."""
  if _decodes(inputs, options):
    return None
  if inputs.state.kv.dtype != jnp.float32:
    return f"initial_state has dtype {inputs.state.kv.dtype}, and the kernels compute in float32"
  arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "erase_key": inputs.erase}
  if inputs.write_key is not None:
    arrays["write_key"] = inputs.write_key
  for name, x in arrays.items():
    if x.dtype != jnp.bfloat16:
      return (
        f"{name} has dtype {x.dtype}, and the tensor cores multiply bfloat16 only (float32 would "
        "lose digits there)"
      )
    widest = config.WIDEST_WRITE_KEY if name == "write_key" else _WIDEST_KEY
    if name != "v" and x.shape[-1] > widest:
      return f"{name} is {x.shape[-1]} wide, and at most {widest} are supported"
  if inputs.beta.shape[-1] != 1:
    return "beta has a rate for each value column, and the kernels take one for each head"
  if options.chunk_size not in (None, config.CHUNK):
    return f"chunk_size={options.chunk_size}, and the kernels' chunks have {config.CHUNK} tokens"
  if options.scale == 0.0:
    return "scale=0 leaves nothing to compute"
  return None


def unsupported_ampere(inputs: Inputs, options: Options) -> str | None:
  """`unsupported`, by the kernels for all GPUs since Ampere on the current device."""
  reason = unsupported(inputs, options)
  if reason is not None or _decodes(inputs, options):
    return reason
  K, gpu = inputs.q.shape[-1], device.current()
  writes = inputs.write_key is not None
  separate = inputs.erase_key is not None or _has_channels(inputs, options)
  shape = config.Shape(1, _padded(K), _WIDEST_VALUE, separate, write_key=writes)
  needed = max(config.AmpereConfig().smem(shape).values())
  if needed > gpu.smem:
    return (
      f"q is {K} wide, for which the kernels need {needed} bytes of SMEM per CTA, and the "
      f"{gpu.kind} has {gpu.smem}"
    )
  return None


def _padded(K: int) -> int:
  """The width to which K key channels are padded."""
  return next(width for width in config.KEY_WIDTHS if width >= K)


def _decodes(inputs: Inputs, options: Options) -> bool:
  """Whether `decode` runs these arguments; its own limits are in its `unsupported`."""
  q, k, v, beta, log_decay, erase_key, write_key, state, _ = inputs
  if q.shape[1] > 1:
    return False
  return decode.unsupported(q, k, erase_key, v, beta, log_decay, state.kv, write_key) is None


def _has_channels(inputs: Inputs, options: Options) -> bool:
  """Whether these arguments need the kernels with a decay per key channel."""
  separate = options.erase_before_decay or inputs.write_key is not None
  return inputs.log_decay.shape[-1] != 1 or separate


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  K, V = inputs.q.shape[-1], inputs.v.shape[-1]
  if inputs.q.shape[1] > 1:
    return config.preferred(K, V)
  return _decodes(inputs, options) and fits(K, V)


def run(
  inputs: Inputs,
  options: Options,
  *,
  sizes=None,
  interpret=None,
  num_splits: int | None = None,
  architecture: str | None = None,
) -> tuple[jax.Array, DeltaRuleState]:
  """The output and the last state.

  Value columns are independent: more of them than the kernels take are further heads, which share
  all else. `num_splits`: into how many splits a sequence is cut; None leaves it to the kernels.
  `architecture`: whose kernels run; None takes those of the device.
  """
  if _decodes(inputs, options):
    return single_step.run(_step, chunked, inputs, options, interpret=interpret)
  architecture = device.running(architecture)
  q, k, v, beta, log_decay, erase_key, write_key, state, segments = inputs
  (B, T, _, K), (H, _), S, V = q.shape, head_counts(inputs), state.kv.shape[1], v.shape[-1]
  wide_k = _padded(K)
  wide_v = next((width for width in config.VALUE_WIDTHS if width >= V), _WIDEST_VALUE)
  groups = -(-V // wide_v)
  if architecture == device.AMPERE:
    num_splits = 1
  num_splits = num_splits or config.num_splits(B * H * groups, wide_v, T)
  more = -T % (config.CHUNK * num_splits)
  pad = lambda x, width: jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, width - x.shape[-1])])
  of_heads = lambda x, axis=2: x if x.shape[axis] == H else jnp.repeat(x, H // x.shape[axis], axis)
  v = of_heads(v) if groups > 1 or write_key is not None else v
  if write_key is not None:  # the kernels store what they get
    v = (of_heads(beta) * v).astype(v.dtype)
  # The kernels have a state per head of the queries, although groups may share it.
  kv = of_heads(state.kv, 1)
  kv = jnp.pad(kv, [(0, 0), (0, 0), (0, wide_k - K), (0, groups * wide_v - V)])
  kv = kv.reshape(B, H, wide_k, groups, wide_v)
  if _has_channels(inputs, options):
    log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:-1], K))
    if options.erase_before_decay:
      erase_key = inputs.erase  # not the key itself any more
    log_decay = pad(log_decay, wide_k)
  else:
    log_decay = of_heads(log_decay[..., 0])
  padded = op.Inputs(
    pad(q, wide_k),
    pad(k, wide_k),
    None if erase_key is None else pad(erase_key, wide_k),
    pad(v, groups * wide_v).reshape(B, T + more, v.shape[2] * groups, wide_v),
    of_heads(beta[..., 0]),
    log_decay,
    None if options.fresh else kv.swapaxes(2, 3).reshape(B, -1, wide_k, wide_v),
    None if write_key is None else pad(write_key, wide_k),
  )
  index = None
  if segments is not None:
    index = jnp.pad(segments.index, ((0, 0), (0, more)), mode="edge")
  out, kv = op.delta_rule(
    padded,
    index,
    scale=options.scale,
    length=T,
    num_splits=num_splits,
    erase_before_decay=options.erase_before_decay,
    config=sizes,
    architecture=architecture,
    interpret=interpret,
  )
  kv = kv.reshape(B, H, groups, wide_k, wide_v).swapaxes(2, 3).reshape(B, H, wide_k, -1)
  kv = kv[:, :: H // S] if S < H else kv
  return out.reshape(B, T + more, H, -1)[:, :T, :, :V], DeltaRuleState(kv[:, :, :K, :V])


def _step(inputs: Inputs, *, options: Options, interpret):
  """A single token by `decode`."""
  token = jax.tree.map(lambda x: x[:, 0], inputs[:7])
  q, k, v, beta, log_decay, erase_key, write_key = token
  log_decay = log_decay[..., 0] if log_decay.shape[-1] == 1 else log_decay
  out, kv = decode.decode(
    *(q, k, erase_key, v, beta, log_decay, inputs.state.kv, write_key),
    erase_before_decay=options.erase_before_decay,
    scale=options.scale,
    interpret=interpret,
  )
  return out[:, None], DeltaRuleState(kv)
