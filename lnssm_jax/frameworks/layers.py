r"""The recurrences inside a layer, all of them in one form, per head.

    S_t = psi(o_t, S_{t-1}) + e_t (rate_t * u_t)^T,      out_t = S_t^T s_t / eta_t + direct_t * u_t

S is [K, V] and zero before the first token; psi is the product of entries, o_t [K, V], or of
matrices, o_t [K, K]. `recurrences` runs a layer and returns those that its ops compute; `mix_with`
runs it with their outputs computed by a function of yours. What surrounds them, projections, short
convolutions, norms and gates, acts as in the layer. Ops that a layer calls inside `jax.jit` or
`jax.checkpoint` may not be seen.

The frameworks are readings of this form: `dsf.system`, `lcsm.streams`, `online_learning.examples`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers import LLN, S4
from lnssm_jax.ops import ExponentialKernel
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.core.grouped_heads import with_all_heads
from lnssm_jax.ops.core.recording import observing
from lnssm_jax.ops.longhorn_scan.gains import gain_and_decay

_NAME = "frameworks"


class Recurrence(NamedTuple):
  """One recurrence of a layer over T tokens, of one sequence."""

  op: str  # the op that computes it
  o: jax.Array  # [T, H, K, V], or with matrix products [T, H, K, K]
  e: jax.Array  # [T, H, K]
  s: jax.Array  # [T, H, K]
  u: jax.Array  # [T, H, V], the op's values
  rate: jax.Array  # [T, H, V]
  eta: jax.Array  # [T, H]
  direct: jax.Array  # [T, H, V]
  product: str = "elementwise"  # psi, or "matrix"
  copies: int = 1  # the outputs of so many groups of heads are added: partitions of one state

  def outputs(self) -> jax.Array:
    """The output of the op, [T, H / copies, V], token by token."""

    def step(S, token):
      o, e, s, u, rate, eta, direct = token
      S = o * S if self.product == "elementwise" else o @ S
      S = S + e[..., None] * (rate * u)[:, None]
      return S, jnp.einsum("hk,hkv->hv", s, S) / eta[:, None] + direct * u

    shape = (*self.e.shape[1:], self.u.shape[2])
    start = jnp.zeros(shape, jnp.result_type(*self.streams))
    return self.add_copies(jax.lax.scan(step, start, self.streams)[1])

  @property
  def streams(self) -> tuple[jax.Array, ...]:
    """(o, e, s, u, rate, eta, direct)."""
    return self[1:8]

  def add_copies(self, out: jax.Array) -> jax.Array:
    """[T, H, V] -> [T, H / copies, V]."""
    return out.reshape(len(out), self.copies, -1, out.shape[2]).sum(1)


def recurrences(mixer: Any, x: jax.Array) -> list[Recurrence]:
  """The recurrences of a layer for its input x [T, D], in the order in which it runs them.

  Raises:
    ValueError: x is not [T, D]; or the layer has none, or an op that is none (attention, a
      convolution with free taps): the message says why.
  """
  found: list[Recurrence] = []

  def keep(recurrence):
    found.append(recurrence)
    return recurrence.outputs()

  def run(x):
    found.clear()
    mix_with(mixer, x, keep)
    return [recurrence.streams for recurrence in found]

  streams = jax.jit(run)(jnp.asarray(x))  # one program, which costs less than its steps one by one
  return [
    Recurrence(r.op, *arrays, product=r.product, copies=r.copies)
    for r, arrays in zip(found, streams, strict=True)
  ]


def mix_with(mixer: Any, x: jax.Array, compute: Callable[[Recurrence], jax.Array]) -> jax.Array:
  """The layer's output [T, D] for its input x [T, D], with `compute(recurrence)` for its ops.

  Args:
    compute: gives what `Recurrence.outputs` gives, in this shape or as [T, d]. The states that ops
      return besides are NaN.

  Raises:
    ValueError: as `recurrences`.
  """
  check_shape(_NAME, "x", x, (None, None), "[T, D]")
  seen = []

  def observer(call, run):
    if call.op in OUTSIDE:
      raise ValueError(_reason(mixer, call.op, OUTSIDE[call.op]))
    if call.op not in READERS:  # short convolutions and norms
      return run()
    checked = dispatch.check(call.op, **call.arguments)
    streams = READERS[call.op](checked.inputs, checked.options)
    if isinstance(streams, str):
      raise ValueError(_reason(mixer, call.op, streams))
    seen.append(call.op)
    recurrence = _complete(call.op, **streams)
    out, state = jax.eval_shape(run)
    new = compute(recurrence)
    if not jnp.issubdtype(out.dtype, jnp.complexfloating):
      new = jnp.real(new)  # of states in pairs of conjugates, whose sums are real
    nothing = jax.tree.map(lambda z: jnp.full(z.shape, jnp.nan, z.dtype), state)
    return new.reshape(out.shape).astype(out.dtype), nothing

  with observing(observer):
    y = mixer(jnp.asarray(x)[None])[0][0]
  if not seen:
    raise ValueError(
      f"{_NAME}: {type(mixer).__name__} calls no recurrence of lnssm_jax.ops: it has none, as a "
      "convolution with free taps, or it runs it inside jax.jit or jax.checkpoint."
    )
  return y


def _reason(mixer, op, why):
  why = _OF_LAYERS.get(type(mixer), why)
  return f"{_NAME}: {type(mixer).__name__} has no recurrence of this form: its {op} {why}."


_TAPS = "has free taps: its state is the window of past inputs itself, not sums that decay"
OUTSIDE = {
  "attention": (
    "is softmax, whose state is all keys and values; `dsf.taylor_features` gives the recurrence "
    "that it is the limit of"
  ),
}

# Layers of which more can be said than their op says.
_OF_LAYERS: Mapping[type, str] = {
  LLN: "is softmax within blocks of tokens, averaged with its linear attention",
  S4: "has the taps of a recurrence whose matrix is not diagonal; those of S4D and DSS are",
}


def _complete(op, *, o, e, s, u, rate=1.0, eta=1.0, direct=0.0, **more) -> Recurrence:
  """The streams at their full shapes, of one dtype."""
  dtype = jnp.result_type(o, e, s, u, rate, eta, direct)
  T, H, V = u.shape
  K = e.shape[-1]
  full = lambda z, *shape: jnp.broadcast_to(z, shape).astype(dtype)
  columns = K if more.get("product") == "matrix" else V
  return Recurrence(
    op,
    full(o, T, H, K, columns),
    full(e, T, H, K),
    full(s, T, H, K),
    u.astype(dtype),
    full(rate, T, H, V),
    full(eta, T, H),
    full(direct, T, H, V),
    **more,
  )


def _before_the_update(a, e, s, bonus):
  """(s, direct [T, H, 1]) of an output that reads S_{t-1} + diag(bonus) e_t u_t^T; a [T, H, K] > 0.

  S_{t-1} = (S_t - e_t u_t^T) / a_t.
  """
  return s / a, jnp.sum(s * (bonus - 1 / a) * e, axis=-1, keepdims=True)


def _normalized(streams):
  """The streams of an output that is divided by what it is for values of 1."""
  ones = jnp.ones_like(streams["u"][..., :1])
  eta = _complete("", **streams | {"u": ones}).outputs()[..., 0]
  return streams | {"eta": eta, "direct": streams["direct"] / eta[..., None]}


def _linear_attention(inputs, options):
  q, k, v, log_decay, by_value, bonus, *_ = with_all_heads(inputs)
  o, e, s, direct = jnp.exp(log_decay[0]), k[0], options.scale * q[0], jnp.zeros((1, 1, 1))
  if bonus is not None:
    if by_value is not None:
      return "reads before the update, with a decay of values"
    s, direct = _before_the_update(o, e, s, bonus)
  o = o[..., None] if by_value is None else o[..., None] * jnp.exp(by_value[0])[:, :, None]
  streams = {"o": o, "e": e, "s": s, "u": v[0], "direct": direct}
  return _normalized(streams) if options.normalize else streams


def _wkv4(inputs, _):
  k, v = inputs.k[0], inputs.v[0]
  e = jnp.exp(k - jnp.max(k, axis=0))[..., None]  # a factor per channel cancels in the mean
  o = jnp.exp(-inputs.decay_rate)[None, :, None]
  s, direct = _before_the_update(o, e, jnp.ones_like(e), jnp.exp(inputs.bonus)[:, None])
  return _normalized({"o": o[..., None], "e": e, "s": s, "u": v[..., None], "direct": direct})


def _delta_rule(inputs, options):
  inputs = with_all_heads(inputs)
  by_column = lambda z: jnp.repeat(z, width, axis=1)  # a head for each column of a rate of its own
  v, beta, k = inputs.v[0], inputs.beta[0], inputs.k[0]
  width = beta.shape[-1]
  T, H, V = v.shape
  beta = beta.reshape(T, H * width, 1)
  k, erase, q = (by_column(z) for z in (k, inputs.erase[0], inputs.q[0]))
  erased = (beta * k)[..., None] * erase[..., None, :]
  decay = by_column(jnp.exp(inputs.log_decay[0]))[..., None, None]
  return {
    "o": decay * (jnp.eye(k.shape[-1]) - erased),
    "e": k,
    "s": options.scale * q,
    "u": v.reshape(T, H * width, V // width),
    "rate": beta,
    "product": "matrix",
  }


def _diagonal_scan(inputs, options):
  if options.reverse:
    return "runs from the last token to the first"
  one = jnp.ones((1, 1, 1))
  return {"o": inputs.decay[0][:, None, None], "e": one, "s": one, "u": inputs.x[0][:, None]}


def _elementwise_decay_scan(inputs, _):
  q, k, v, log_decay, weight, *_ = inputs
  T, H, V = v.shape[1:]
  o = jnp.exp(log_decay.make(log_decay.steps, log_decay.parameters)[0])
  o = jnp.broadcast_to(o, (T, *o.shape[1:]))
  if weight is None:
    return {"o": o, "e": k[0], "s": q[0], "u": v[0]}
  # What reads a column is its own, so each is a head.
  read = q[0][..., None] * weight
  columns = lambda z: jnp.moveaxis(z, 3, 2).reshape(T, H * V, -1)
  return {
    "o": columns(o)[..., None],
    "e": jnp.repeat(k[0], V, axis=1),
    "s": columns(read),
    "u": v[0].reshape(T, H * V, 1),
  }


def _selective_scan(inputs, _):
  dt, x = inputs.dt[0], inputs.x[0]
  o = jnp.exp(dt[..., None] * inputs.a)  # [T, D, N]
  e, s = inputs.b[0][:, None], inputs.c[0][:, None]
  streams = {"o": jnp.swapaxes(o, 1, 2)[:, None], "e": e, "s": s, "u": x[:, None]}
  return streams | {"rate": dt[:, None], "direct": inputs.skip}


def _longhorn_scan(inputs, _):
  rate, decay = gain_and_decay(inputs.beta[0], inputs.k[0])
  e, s = inputs.k[0][:, None], inputs.q[0][:, None]
  streams = {"o": jnp.swapaxes(decay, 1, 2)[:, None], "e": e, "s": s, "u": inputs.x[0][:, None]}
  return streams | {"rate": rate[:, None], "direct": inputs.skip}


def _long_convolution(inputs, _):
  kernel = inputs.kernel
  if not isinstance(kernel, ExponentialKernel):
    return _TAPS
  o, s = jnp.exp(kernel.log_pole), kernel.coefficient  # [D, N]
  if jnp.iscomplexobj(o) or jnp.iscomplexobj(s):  # the real part, as the mean of the conjugates
    o, s = (jnp.concatenate([z, jnp.conj(z)], axis=1) for z in (o, s / 2))
  streams = {"o": o[None, ..., None], "e": jnp.ones_like(s)[None], "s": s[None]}
  direct = 0.0 if kernel.direct is None else kernel.direct[:, None]
  return streams | {"u": inputs.x[0][..., None], "direct": direct}


def _sparse_state_attention(inputs, options):
  """Each partition as H heads; a token that does not select it leaves them as they are."""
  if inputs.beta is not None:
    return "has the delta rule inside, with a selection"
  N, H = inputs.state.kv.shape[1:3]
  chosen = jax.nn.one_hot(inputs.indices[0], N, dtype=inputs.write.dtype)  # [T, S, N]
  T, S, _ = chosen.shape

  def scattered(z, weight):  # [T, S or 1, H, ...], [T, S] -> [T, N H, ...]
    z = jnp.broadcast_to(z, (T, S, *z.shape[2:]))
    return jnp.einsum("ts,tsn,ts...->tn...", weight, chosen, z).reshape(T, N * H, *z.shape[3:])

  one = jnp.ones((T, S), chosen.dtype)
  log_decay = inputs.log_decay
  log_decay = jnp.zeros((1, 1, H, 1)) if log_decay is None else log_decay[0]
  return {
    "o": jnp.exp(scattered(log_decay, one))[..., None],
    "e": scattered(inputs.k[0], inputs.write[0]),
    "s": options.scale * scattered(inputs.q[0][:, None], inputs.read[0]),
    "u": scattered(inputs.v[0], one),
    "copies": N,
  }


# An op's checked arguments -> the streams of its recurrence, or why it has none.
READERS: Mapping[str, Callable[[Any, Any], dict[str, Any] | str]] = {
  "linear_attention": _linear_attention,
  "wkv4": _wkv4,
  "delta_rule": _delta_rule,
  "diagonal_scan": _diagonal_scan,
  "elementwise_decay_scan": _elementwise_decay_scan,
  "selective_scan": _selective_scan,
  "longhorn_scan": _longhorn_scan,
  "long_convolution": _long_convolution,
  "sparse_state_attention": _sparse_state_attention,
}
