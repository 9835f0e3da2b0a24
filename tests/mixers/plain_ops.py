"""The ops of `lnssm_jax.ops` in NumPy, one token at a time: tests of what a mixer gives to them.

They compile nothing, so that a test can afford every code of a family of mixers, in float64. That
the ops themselves equal these recurrences is tested in tests/ops.

    with plain_ops.in_place_of(lcsm_module):
      y, state = mixer(x)
"""

import contextlib
from unittest import mock

import numpy as np

from lnssm_jax import ops

wide = lambda x: np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def _rows(T, segment_ids, axis_name):
  """For each row b and token t: whether the state is reset before it."""
  assert axis_name is None

  def is_first(b, t):
    return segment_ids is not None and t > 0 and segment_ids[b, t] != segment_ids[b, t - 1]

  return is_first


def _run(x, state, segment_ids, axis_name, step):
  """`step(S, b, t)` -> (S, out) over all rows; stacks outputs [B, T, ...] and last states."""
  B, T = x.shape[:2]
  first, outputs, last = _rows(T, segment_ids, axis_name), [], []
  for b in range(B):
    S, row = wide(state[b]), []
    for t in range(T):
      S = np.zeros_like(S) if first(b, t) else S
      S, out = step(S, b, t)
      row.append(out)
    outputs.append(np.stack(row))
    last.append(S)
  return np.stack(outputs), np.stack(last)


def _per_token(decay, shape):
  """A log decay [H, X], [B, T, H, X] or None as an array of `shape`."""
  return np.broadcast_to(0.0 if decay is None else wide(decay), shape)


def linear_attention(
  q, k, v, *, log_decay=None, value_log_decay=None, normalize=False, scale=None,
  initial_state=None, segment_ids=None, axis_name=None,
):  # fmt: skip
  q, k, v = map(wide, (q, k, v))
  B, T, H, K = q.shape
  V = v.shape[-1]
  if log_decay is not None and log_decay.shape in ((H,), (B, T, H)):
    log_decay = log_decay[..., None]
  a = np.exp(_per_token(log_decay, (B, T, H, K)))
  c = np.exp(_per_token(value_log_decay, (B, T, H, V)))
  scale = (1.0 if normalize else K**-0.5) if scale is None else scale
  kv = np.zeros((B, H, K, V)) if initial_state is None else wide(initial_state.kv)
  z = np.zeros((B, H, K)) if initial_state is None or not normalize else initial_state.key_sum
  state = np.concatenate([kv, wide(z)[..., None]], axis=-1)

  def step(S, b, t):
    kv = a[b, t][..., None] * S[..., :-1] * c[b, t][:, None] + k[b, t][..., None] * v[b, t][:, None]
    z = a[b, t] * S[..., -1] + k[b, t]
    out = scale * np.einsum("hk,hkv->hv", q[b, t], kv)
    out = out / np.einsum("hk,hk->h", q[b, t], z)[:, None] if normalize else out
    return np.concatenate([kv, z[..., None]], axis=-1), out

  out, S = _run(q, state, segment_ids, axis_name, step)
  return out, ops.LinearAttentionState(S[..., :-1], S[..., -1] if normalize else None)


def delta_rule(
  q, k, v, beta, *, log_decay=None, erase_key=None, scale=None,
  initial_state=None, segment_ids=None, axis_name=None,
):  # fmt: skip
  q, k, v, beta = map(wide, (q, k, v, beta))
  B, T, H, K = q.shape
  erase = k if erase_key is None else wide(erase_key)
  a = np.exp(_per_token(log_decay, (B, T, H)))
  state = np.zeros((B, H, K, v.shape[-1])) if initial_state is None else initial_state.kv

  def step(S, b, t):
    rate = beta[b, t][:, None, None]
    old = np.einsum("hk,hkv->hv", erase[b, t], S)
    S = a[b, t][:, None, None] * (S - rate * k[b, t][..., None] * old[:, None])
    S = S + rate * k[b, t][..., None] * v[b, t][:, None]
    return S, (K**-0.5 if scale is None else scale) * np.einsum("hk,hkv->hv", q[b, t], S)

  out, S = _run(q, state, segment_ids, axis_name, step)
  return out, ops.DeltaRuleState(S)


def diagonal_scan(decay, x, *, initial_state=None, segment_ids=None, axis_name=None):
  x = wide(x)
  decay = np.broadcast_to(wide(decay), x.shape)
  state = np.zeros_like(decay[:, 0] * x[:, 0]) if initial_state is None else initial_state.h

  def step(h, b, t):
    h = decay[b, t] * h + x[b, t]
    return h, h

  out, h = _run(x, state, segment_ids, axis_name, step)
  return out, ops.DiagonalState(h)


def step_sizes(dt, dt_bias=None, dt_softplus=False):
  """dt as the op uses it."""
  dt = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)
  return np.logaddexp(0, dt) if dt_softplus else dt


def selective_scan(
  x, dt, a, b, c, *, skip=None, dt_softplus=False, dt_bias=None,
  initial_state=None, segment_ids=None, axis_name=None,
):  # fmt: skip
  x, dt, a, keys, c = map(wide, (x, step_sizes(dt, dt_bias, dt_softplus), a, b, c))
  shape = (x.shape[0], a.shape[0], keys.shape[2])
  state = np.zeros(shape) if initial_state is None else initial_state.h

  def step(h, b, t):
    h = np.exp(dt[b, t][:, None] * a) * h + np.outer(dt[b, t] * x[b, t], keys[b, t])
    return h, h @ c[b, t] + (0 if skip is None else wide(skip) * x[b, t])

  out, h = _run(x, state, segment_ids, axis_name, step)
  return out, ops.SelectiveState(h)


def long_convolution(x, kernel, *, initial_state=None, segment_ids=None, axis_name=None):
  x, pole, coefficient = wide(x), np.exp(wide(kernel.log_pole)), wide(kernel.coefficient)
  state = np.zeros((x.shape[0], *pole.shape), pole.dtype)
  state = state if initial_state is None else initial_state.h
  direct = 0 if kernel.direct is None else wide(kernel.direct)

  def step(h, b, t):
    h = pole * h + x[b, t][:, None]
    return h, (coefficient * h).real.sum(1) + direct * x[b, t]

  out, h = _run(x, state, segment_ids, axis_name, step)
  return out, ops.ExponentialState(h)


def elementwise_decay_scan(
  q, k, v, log_decay, *, read_weight=None,
  initial_state=None, segment_ids=None, axis_name=None,
):  # fmt: skip
  if isinstance(log_decay, ops.DecayFunction):
    log_decay = log_decay.make(log_decay.steps, log_decay.parameters)
  q, k, v = map(wide, (q, k, v))
  shape = (*k.shape, v.shape[-1])
  decay = np.exp(_per_token(log_decay, shape))
  weight = 1 if read_weight is None else wide(read_weight)
  state = np.zeros((shape[0], *shape[2:])) if initial_state is None else initial_state.kv

  def step(S, b, t):
    S = decay[b, t] * S + k[b, t][..., None] * v[b, t][:, None]
    return S, np.einsum("hk,hkv->hv", q[b, t], weight * S)

  out, S = _run(q, state, segment_ids, axis_name, step)
  return out, ops.ElementwiseDecayState(S)


PLAIN = {
  f.__name__: f
  for f in (
    linear_attention, delta_rule, diagonal_scan, selective_scan, long_convolution,
    elementwise_decay_scan,
  )
}  # fmt: skip
for _name, _function in PLAIN.items():
  _function.init_state = getattr(ops, _name).init_state


class _Ops:
  """`lnssm_jax.ops` with other functions."""

  def __init__(self, functions):
    self.functions = functions

  def __getattr__(self, name):
    return self.functions.get(name, getattr(ops, name))


@contextlib.contextmanager
def in_place_of(*modules, functions=PLAIN):
  """Inside, `modules` call these functions where they would call the ops of the same names."""
  with contextlib.ExitStack() as stack:
    for module in modules:
      for name, function in {"ops": _Ops(functions), **functions}.items():
        if hasattr(module, name):
          stack.enter_context(mock.patch.object(module, name, function))
    yield
