"""The delta rule on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Two paths: a single step runs `decode`, which updates the state in place; more steps run `op`, which
cuts them into chunks. Import this module where it is needed only (see `dispatch.kernels`).
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops import steps
from lnssm_jax.ops.delta_rule import xla
from lnssm_jax.ops.delta_rule.state import DeltaRuleState
from pallas_kernels.delta_rule import decode, op, shapes
from pallas_kernels.steps import fits

_WIDEST_KEY = shapes.KEY_WIDTHS[-1]
_WIDEST_VALUE = shapes.VALUE_WIDTHS[-1]


def obstacle(q, k, v, beta, log_decay, erase_key, state, segments, *, scale, chunk_size=None):
  """Why the kernels cannot run these arguments on any device, or None."""
  del segments
  if _takes_a_step(q, k, v, beta, log_decay, erase_key, state):
    return None
  if state.kv.dtype != jnp.float32:
    return f"initial_state has dtype {state.kv.dtype}, and the kernels compute in float32"
  for name, x in (("q", q), ("k", k), ("v", v), ("erase_key", erase_key)):
    if x.dtype != jnp.bfloat16:
      return (
        f"{name} has dtype {x.dtype}, and the tensor cores multiply bfloat16 only (float32 would "
        "lose digits there)"
      )
    if name != "v" and x.shape[-1] > _WIDEST_KEY:
      return f"{name} is {x.shape[-1]} wide, and at most {_WIDEST_KEY} are supported"
  if beta.shape[-1] != 1:
    return "beta has a rate for each value column, and the kernels take one for each head"
  if chunk_size not in (None, op.CHUNK):
    return f"chunk_size={chunk_size}, and the kernels' chunks have {op.CHUNK} steps"
  if scale == 0.0:
    return "scale=0 leaves nothing to compute"
  return None


def _takes_a_step(q, k, v, beta, log_decay, erase_key, state):
  """Whether `decode` runs these arguments."""
  arrays = q, k, erase_key, v, beta, log_decay
  return q.shape[1] == 1 and decode.obstacle(*arrays, state.kv) is None


def worthwhile(q, k, v, beta, log_decay, erase_key, state, segments, **options):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del segments, options
  K, V = q.shape[-1], v.shape[-1]
  if q.shape[1] > 1:
    return shapes.worthwhile(K, V)
  takes = _takes_a_step(q, k, v, beta, log_decay, erase_key, state)
  return takes and fits(K, V)


def run(
  q,
  k,
  v,
  beta,
  log_decay,
  erase_key,
  state,
  segments,
  *,
  scale,
  chunk_size=None,
  interpret=None,
):
  """Arguments as in `reference.py`.

  Columns of values do not see one another: more of them than the kernels take are further heads.
  """
  del chunk_size
  if _takes_a_step(q, k, v, beta, log_decay, erase_key, state):
    # A single step lies in one segment, that of the initial state.
    step = functools.partial(_step, scale=scale, interpret=interpret)
    form = functools.partial(_form, scale=scale)
    erase_key = None if erase_key is k else erase_key
    return steps.with_gradient_of(form, step)(q, k, v, beta, log_decay, erase_key, state)
  B, T, H, K = q.shape
  V = v.shape[-1]
  wide_k = next(width for width in shapes.KEY_WIDTHS if width >= K)
  wide_v = next((width for width in shapes.VALUE_WIDTHS if width >= V), _WIDEST_VALUE)
  groups = -(-V // wide_v)
  more = -T % op.CHUNK
  pad = lambda x, width: jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, width - x.shape[-1])])
  heads = lambda x: jnp.repeat(x, groups, axis=2)
  kv = jnp.pad(state.kv, [(0, 0), (0, 0), (0, wide_k - K), (0, groups * wide_v - V)])
  inputs = op.Inputs(
    heads(pad(q, wide_k)),
    heads(pad(k, wide_k)),
    None if erase_key is k else heads(pad(erase_key, wide_k)),
    pad(v, groups * wide_v).reshape(B, T + more, H * groups, wide_v),
    heads(beta[..., 0]),
    heads(log_decay),
    kv.reshape(B, H, wide_k, groups, wide_v).swapaxes(2, 3).reshape(B, -1, wide_k, wide_v),
  )
  if segments is not None:
    segments = jnp.pad(segments, ((0, 0), (0, more)), mode="edge")
  out, kv = op.delta_rule(inputs, segments, op.Static(float(scale), T, interpret))
  kv = kv.reshape(B, H, groups, wide_k, wide_v).swapaxes(2, 3).reshape(B, H, wide_k, -1)
  return out.reshape(B, T + more, H, -1)[:, :T, :, :V], DeltaRuleState(kv[:, :, :K, :V])


def _step(q, k, v, beta, log_decay, erase_key, state, *, scale, interpret):
  """A single step by `decode`."""
  erase_key = None if erase_key is None else erase_key[:, 0]
  arrays = q[:, 0], k[:, 0], erase_key, v[:, 0], beta[:, 0], log_decay[:, 0], state.kv
  out, kv = decode.decode(*arrays, scale=scale, interpret=interpret)
  return out[:, None], DeltaRuleState(kv)


def _form(q, k, v, beta, log_decay, erase_key, state, *, scale):
  """The same by XLA."""
  erase_key = k if erase_key is None else erase_key
  return xla.chunked(q, k, v, beta, log_decay, erase_key, state, None, scale=scale)


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))
