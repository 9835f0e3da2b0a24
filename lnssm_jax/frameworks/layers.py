r"""The recurrences inside a layer, all of them in one form, per head.

    S_t = psi(o_t, S_{t-1}) + e_t (rate_t * u_t)^T,      out_t = S_t^T s_t / eta_t + direct_t * u_t

S is [K, V] and zero before the first token; psi is the product of entries, o_t [K, V], or of
matrices, o_t [K, K]. `recurrences` runs a layer and returns those that its ops compute; `mix_with`
runs it with their outputs computed by a function of yours. What surrounds them, projections, short
convolutions, norms and gates, acts as in the layer. Ops that a layer calls inside `jax.jit` or
`jax.checkpoint` may not be seen.

The frameworks are readings of this form: `dsf.system`, `lcsm.streams`, `online_learning.examples`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.core.recording import observing
from lnssm_jax.ops.core.recurrence import Recurrence, complete

_NAME = "frameworks"


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
    streams = dispatch.fact(call.op, "recurrence")
    if streams is None:  # short convolutions
      return run()
    if not isinstance(streams, str):
      checked = dispatch.check(call.op, **call.arguments)
      streams = streams(checked.inputs, checked.options)
    if isinstance(streams, str):
      why = mixer.no_recurrence or streams
      name = type(mixer).__name__
      raise ValueError(f"{_NAME}: {name} has no recurrence of this form: its {call.op} {why}.")
    seen.append(call.op)
    recurrence = complete(call.op, **streams)
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
