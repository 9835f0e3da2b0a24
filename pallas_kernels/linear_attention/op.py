"""Linear attention from the kernels of this folder: forward, and its own backward pass.

Two ways through, by the decay: one for all key channels of a head (`scalar`: scores are made on the
way), or one per key channel (`gated`: scores first, for all chunks at once). What the backward pass
keeps: the arguments, the states between chunks in bfloat16, with a normaliser the output and the
denominator, and for `gated` the scores and, with decays a step, the decayed queries and keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.linear_attention import gated_gradient, scalar_gradient, shapes
from pallas_kernels.linear_attention.division import through_division
from pallas_kernels.linear_attention.gates import SMALLEST_LOG_DECAY
from pallas_kernels.linear_attention.outputs import gated_outputs, scalar_outputs
from pallas_kernels.linear_attention.scores import chunk_scores
from pallas_kernels.linear_attention.states import chunk_states
from pallas_kernels.linear_attention.tables import chunk_tables, passing, reaching
from pallas_kernels.linear_attention.walk import Decays, Sums, Undecayed
from pallas_kernels.tensor_core import CHUNK


class Inputs(NamedTuple):
  """What gradients flow to, padded: T to `shapes.padded_length`, K and V to its widths."""

  q: jax.Array  # [B, T, H, K] bfloat16
  k: jax.Array  # [B, T, H, K] bfloat16
  v: jax.Array  # [B, T, H, V] bfloat16
  log_decay: jax.Array  # float32; scalar: [1, 1, H], [B, length, H]; gated: [H, K], [B, T, H, K]
  bonus: jax.Array | None  # [H, K] float32
  kv: jax.Array | None  # [B, H, K, V] float32; None for zeros
  key_sum: jax.Array | None  # [B, H, K] float32; None for zeros or without the normaliser


class Static(NamedTuple):
  """What the compiled program is specialised to."""

  scale: float
  length: int  # steps before padding
  parts: int
  normalize: bool
  interpret: object


def linear_attention(inputs: Inputs, segments, static: Static):
  """Returns out [B, T, H, V], the last state [B, H, K, V] and the last key sum [B, H, K] or None.

  `segments`: [B, T] int32 counted from 0, padded with each row's last, or None.
  """
  return _linear_attention(static, inputs, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_attention(static, inputs, segments):
  return _forward(static, inputs, segments, for_gradient=False)[0]


def _forward_rule(static, inputs, segments):
  wanted = inputs.log_decay.perturbed
  value = lambda tree: jax.tree.map(
    lambda x: x.value, tree, is_leaf=lambda x: hasattr(x, "perturbed")
  )
  result, kept = _forward(static, value(inputs), value(segments), for_gradient=True)
  return result, (*kept, () if wanted else None)


class Kept(NamedTuple):
  """What the forward pass leaves to the backward pass, beside its arguments."""

  borders: jax.Array  # [B, H, N, K, V] bfloat16
  decay: jax.Array | None  # of `Decays`; None where decays are constant per channel
  entering_sum: jax.Array | None  # [B, H, N, K] float32
  out: jax.Array | None
  denominator: jax.Array | None  # [B, H, T] float32
  scores: jax.Array | None  # gated: [B, H, T, C] bfloat16
  q: jax.Array | None  # decays a step: [B, T, H, K] bfloat16, decayed from the chunk's start
  k: jax.Array | None  # gated, where dv is made apart: [B, T, H, K], decayed to the chunk's end


def _forward(static, inputs, segments, *, for_gradient):
  q, k, v, log_decay, bonus, kv, key_sum = inputs
  T, normalize = q.shape[1], static.normalize
  reach = None if segments is None else reaching(segments, T)
  options = {"interpret": static.interpret}
  gated, weight = _is_gated(log_decay), None
  if gated:
    undecayed = _undecayed(static, inputs, reach)
    with_values = gated_gradient.joins_values(log_decay, v.shape[-1])
    made = chunk_scores(
      *(q, k, log_decay, bonus, segments, reach),
      decayed_q=undecayed is None,
      decayed_k=undecayed is None or (for_gradient and not with_values),
      length=static.length,
      sums=normalize,
      **options,
    )
    decay = _passed(made["decay"], reach) if undecayed is None else None
    q_state, k_state = (made["q"], made["k"]) if undecayed is None else (q, k)
    decays = undecayed or Decays(decay, q.shape[-1])
    outputs = functools.partial(
      gated_outputs, q_state, k_state, v, made["scores"], made.get("score_sum")
    )
  else:
    cumulative, before, weight, decay = chunk_tables(log_decay, reach, static.length, T)
    k_state, decays = k, Decays(decay, q.shape[-1])
    outputs = functools.partial(scalar_outputs, q, k, v, cumulative, before, weight, segments)
  sums = _sums(static, inputs, key_sum, weight)
  initial, sums = _part_starts(k_state, v, weight, decays, kv, sums, static, reverse=False)
  run = outputs(
    *(decays, initial, None if sums is None else sums._replace(weights=None)),
    scale=static.scale,
    parts=static.parts,
    borders=for_gradient,
    **options,
    **shapes.walk(v.shape[-1]),
  )
  last_sum = run["last_sum"][:, :, -1] if normalize else None
  result = run["out"], run["last"][:, :, -1], last_sum
  if not for_gradient:
    return result, None
  kept = Kept(
    run["borders"],
    decay,
    run.get("sums"),
    run["out"] if normalize else None,
    run.get("denominator"),
    *((made["scores"], made.get("q"), made.get("k")) if gated else (None, None, None)),
  )
  name = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
  result, kept = jax.tree.map(name, (result, kept))
  return result, (inputs, segments, kept)


class Adjoint(NamedTuple):
  """What both ways through need on the way back. Without `scale`, which comes last."""

  d_out: jax.Array  # [B, T, H, V] bfloat16, the cotangent of S^T q
  d_sum: jax.Array | None  # [B, H, T] float32, that of the normaliser's sum
  d_last_sum: jax.Array | None  # [B, H, K] float32; None for zeros
  scale: float
  decays: bool  # whether the decay wants a gradient


def _backward_rule(static, residuals, cotangents):
  inputs, segments, kept, wanted = residuals
  d_out, d_last, d_last_sum = cotangents
  d_out = jnp.zeros(d_out.shape, d_out.dtype) if _is_zero(d_out) else d_out
  d_last_sum = None if _is_zero(d_last_sum) else d_last_sum
  scale, d_sum = static.scale, None
  if static.normalize:
    d_out, d_sum = through_division(
      *(d_out, kept.out, kept.denominator),
      length=static.length,
      scale=scale,
      interpret=static.interpret,
    )
    scale = 1.0
  adjoint = Adjoint(d_out, d_sum, d_last_sum, scale, decays=wanted is not None)
  d_last = None if _is_zero(d_last) else d_last / scale
  backward = _gated_backward if _is_gated(inputs.log_decay) else _scalar_backward
  d_inputs = backward(static, inputs, segments, kept, adjoint, d_last)
  rescaled = {
    name: scale * x
    for name, x in d_inputs._asdict().items()
    if name not in ("q", "k", "v") and x is not None
  }
  d_inputs = d_inputs._replace(**rescaled)
  if d_inputs.log_decay is None:
    d_inputs = d_inputs._replace(log_decay=jnp.zeros_like(inputs.log_decay))
  no_gradient = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
  return d_inputs, no_gradient


def _scalar_backward(static, inputs, segments, kept, adjoint, d_last):
  q, k, v, log_decay, _, kv, key_sum = inputs
  T = q.shape[1]
  reach = None if segments is None else reaching(segments, T)
  tables, tables_vjp = jax.vjp(lambda x: chunk_tables(x, reach, static.length, T), log_decay)
  cumulative, before, after, _ = tables
  states = _adjoint_states(static, q, before, inputs, kept, adjoint, d_last)
  leaving_sum, d_key_sum = _of_sums(states, key_sum)
  options = {"scale": adjoint.scale, "decays": adjoint.decays, "interpret": static.interpret}
  by_q = scalar_gradient.query_gradient(
    *(q, k, v, adjoint.d_out, adjoint.d_sum, kept.borders, kept.entering_sum),
    *(cumulative, before, segments),
    **options,
  )
  by_k = scalar_gradient.key_value_gradient(
    *(q, k, v, adjoint.d_out, adjoint.d_sum, states["borders"], leaving_sum),
    *(cumulative, after, segments),
    **options,
  )
  d_log_decay = None
  if adjoint.decays:
    d_decay = _decay_gradient(states, leaving_sum, kept).sum(-1)
    d_tables = by_q["later"] - by_q["earlier"], by_q["before"], by_k["after"], d_decay
    d_tables = (_sum_to(d, x) for d, x in zip(d_tables, tables, strict=True))
    (d_log_decay,) = tables_vjp(tuple(d_tables))
  d_kv = None if kv is None else states["last"][:, :, 0]
  return Inputs(by_q["q"], by_k["k"], by_k["v"], d_log_decay, None, d_kv, d_key_sum)


def _gated_backward(static, inputs, segments, kept, adjoint, d_last):
  q, k, v, log_decay, bonus, kv, key_sum = inputs
  T = q.shape[1]
  reach = None if segments is None else reaching(segments, T)
  states = _adjoint_states(
    *(static, q if kept.q is None else kept.q, None, inputs, kept, adjoint, d_last),
    _undecayed(static, inputs, reach),
  )
  options = {"scale": adjoint.scale, "interpret": static.interpret}
  d_v, joined = None, gated_gradient.joins_values(log_decay, v.shape[-1])
  if not joined:
    d_v = gated_gradient.value_gradient(
      kept.k, adjoint.d_out, kept.scores, states["borders"], **options
    )
  options |= {"decays": adjoint.decays, "length": static.length}
  by_q = gated_gradient.query_gradient(
    *(q, k, v, adjoint.d_out, adjoint.d_sum, kept.borders, kept.entering_sum),
    *(log_decay, bonus, segments, reach),
    **options,
  )
  (leaving_sum, d_key_sum), d_total = _of_sums(states, key_sum), None
  if adjoint.decays:
    decay = kept.decay
    if decay is None:
      decay = _constant_decay(log_decay, reach, static.length, T)
    d_total = decay * _decay_gradient(states, leaving_sum, kept)
  by_k = gated_gradient.key_gradient(
    *(q, k, v, adjoint.d_out, adjoint.d_sum, kept.scores if joined else None),
    *(states["borders"], leaving_sum),
    *(log_decay, bonus, segments, reach, d_total, by_q.get("log_decay")),
    **options,
  )
  d_log_decay = by_k.get("log_decay")
  if adjoint.decays and log_decay.ndim == 2:
    steps = _steps_in_chunks(static.length, T)
    d_log_decay = by_q["log_decay"] + d_log_decay + steps[:, None] * d_total
    d_log_decay = d_log_decay.sum((0, 2))
  d_bonus = None if bonus is None else by_q["bonus"].sum((0, 2))
  d_kv = None if kv is None else states["last"][:, :, 0]
  d_v = by_k["v"] if joined else d_v
  return Inputs(by_q["q"], by_k["k"], d_v, d_log_decay, d_bonus, d_kv, d_key_sum)


def _adjoint_states(static, q, weight, inputs, kept, adjoint, d_last, undecayed=None):
  """The adjoints of the states between chunks, from the end to the start, and those of the
  normaliser's sums."""
  decays = undecayed or Decays(kept.decay, q.shape[-1])
  sums = _sums(static, inputs, adjoint.d_last_sum, weight, adjoint.d_sum)
  initial, sums = _part_starts(q, adjoint.d_out, weight, decays, d_last, sums, static, reverse=True)
  return chunk_states(
    *(q, adjoint.d_out, weight, decays, initial, sums),
    kept.borders if adjoint.decays else None,
    parts=static.parts,
    reverse=True,
    interpret=static.interpret,
    **shapes.walk(inputs.v.shape[-1]),
  )


def _of_sums(states, key_sum):
  """The adjoints of the sums that leave the chunks, and the gradient of `key_sum` or None."""
  if "sums" not in states:
    return None, None
  return states["sums"], None if key_sum is None else states["last_sum"][:, :, 0]


def _decay_gradient(states, leaving_sum, kept):
  """[B, H, N, K]: what the decay of each whole chunk is due, from the state and from the sum."""
  due = states["overlap"]
  return due if leaving_sum is None else due + leaving_sum * kept.entering_sum


_linear_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _is_zero(x):
  return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _is_gated(log_decay):
  return log_decay.ndim != 3


def _undecayed(static, inputs, reach):
  """Constant decays per key channel are put to queries and keys wherever these are read."""
  if inputs.log_decay.ndim == 4:
    return None
  return Undecayed(inputs.log_decay, reach, inputs.bonus is not None, static.length)


def _sums(static, inputs, initial, weight, d_sum=None):
  """What a walk carries for the normaliser, before the sequence is cut into parts; or None.

  `weight`: [B|1, H, T|C], what is left of each step, or None for 1; `d_sum`: [B, H, T] or None.
  """
  if not static.normalize:
    return None
  B, T, H, K = inputs.q.shape
  weights = d_sum
  if weight is not None:
    left = jnp.broadcast_to(jnp.tile(weight, (1, 1, T // weight.shape[2])), (B, H, T))
    weights = left if d_sum is None else d_sum * left
  return Sums((B, H, 1, K), None if initial is None else initial[:, :, None], weights)


def _constant_decay(log_decay, reach, length, padded):
  """[B|1, H, N|1, K]: what each chunk leaves of the state, of log_decay [H, K]."""
  steps = _steps_in_chunks(length, padded)
  if length == padded and reach is None:
    steps = steps[:1]
  log_decay = jnp.maximum(log_decay, SMALLEST_LOG_DECAY)
  decay = jnp.exp(steps[:, None] * log_decay[:, None])[None]
  return _passed(decay, reach)


def _passed(decay, reach):
  """The decay [B|1, H, N|1, K] of each chunk, 0 where no state passes the chunk."""
  return decay if reach is None else decay * passing(reach)[:, None, :, None]


def _steps_in_chunks(length, padded):
  """[N]: how many steps before padding each chunk has."""
  return jnp.clip(length - CHUNK * jnp.arange(padded // CHUNK), 0, CHUNK)


def _sum_to(x, like):
  """Sums [B, H, T or N] over what `like` [B|1, H, ...] shares."""
  x = x.reshape(*x.shape[:2], -1, like.shape[2]).sum(2)
  return x.sum(0, keepdims=True) if like.shape[0] == 1 else x


def _recur(decay, added, initial, *, reverse=False):
  """x_{n+1} = decay_n x_n + added_n over axis 2. Returns the x that enters each n, and the last."""
  decay = jnp.broadcast_to(decay, added.shape)
  combine = lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1])
  decays, sums = lax.associative_scan(combine, (decay, added), axis=2, reverse=reverse)
  after = decays * initial[:, :, None] + sums
  first = initial[:, :, None]
  if reverse:
    return jnp.concatenate([after[:, :, 1:], first], axis=2), after[:, :, 0]
  return jnp.concatenate([first, after[:, :, :-1]], axis=2), after[:, :, -1]


def _part_starts(a, b, weight, decays, initial, sums, static, *, reverse):
  """[B, H, P, K, V]: what enters each part, None for zeros; and `sums` with theirs."""
  P = static.parts
  if P == 1:
    return None if initial is None else initial[:, :, None], sums
  shape = (a.shape[0], a.shape[2], P, a.shape[3])
  added = chunk_states(
    *(a, b, weight, decays, None),
    None if sums is None else Sums(shape, None, sums.weights),
    parts=P,
    reverse=reverse,
    borders=False,
    interpret=static.interpret,
    **shapes.walk(b.shape[-1]),
  )
  if isinstance(decays, Undecayed):
    decay = _constant_decay(decays.log_decay, decays.reach, static.length, a.shape[1])
  else:
    decay = decays.decay if decays.decay.ndim == 4 else decays.decay[..., None]
  chunks = a.shape[1] // CHUNK
  decay = jnp.broadcast_to(decay, (*decay.shape[:2], chunks, decay.shape[3]))
  decay = decay.reshape(*decay.shape[:2], P, -1, decay.shape[3]).prod(3)
  if initial is None:
    initial = jnp.zeros_like(added["last"][:, :, 0])
  if sums is not None:
    first = jnp.zeros_like(added["last_sum"][:, :, 0])
    first = first if sums.initial is None else sums.initial[:, :, 0]
    entering = _recur(decay, added["last_sum"], first, reverse=reverse)[0]
    sums = Sums(shape, entering, sums.weights)
  return _recur(decay[..., None], added["last"], initial, reverse=reverse)[0], sums
