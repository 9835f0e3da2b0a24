"""The delta rule from the kernels of this folder: forward, and its own backward pass.

What the backward pass keeps: the arguments, the states between chunks, the corrections x and the
two matrices of each chunk, all in bfloat16.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.delta_rule import gradients, shapes
from pallas_kernels.delta_rule.systems import chunk_systems
from pallas_kernels.delta_rule.tables import AFTER, BEFORE, CUMULATIVE, DECAY, RATE, make_vectors
from pallas_kernels.delta_rule.walks import backward_walk, forward_walk
from pallas_kernels.linear_attention.tables import reaching
from pallas_kernels.tensor_core import CHUNK


class Inputs(NamedTuple):
  """What gradients flow to, padded: T to whole chunks, K and V to the widths of `shapes`."""

  q: jax.Array  # [B, T, H, K] bfloat16
  k: jax.Array  # [B, T, H, K] bfloat16
  erase_key: jax.Array | None  # [B, T, H, K] bfloat16; None for k
  v: jax.Array  # [B, T, H, V] bfloat16
  beta: jax.Array  # [B, length, H] float32
  log_decay: jax.Array  # [B, length, H] float32
  kv: jax.Array | None  # [B, H, K, V] float32; None for zeros


class Static(NamedTuple):
  """What the compiled program is specialised to."""

  scale: float
  length: int  # steps before padding
  interpret: object


class Kept(NamedTuple):
  """What the forward pass leaves to the backward pass, beside its arguments."""

  inverse: jax.Array  # [B, H, T, C] bfloat16
  scores: jax.Array  # [B, H, T, C] bfloat16
  x: jax.Array  # [B, T, H, V] bfloat16
  states: jax.Array  # [B, H, N, K, V] bfloat16


def delta_rule(inputs: Inputs, segments, static: Static):
  """Returns out [B, T, H, V] bfloat16 and the last state [B, H, K, V] float32.

  `segments`: [B, T] int32 counted from 0, padded with each row's last, or None.
  """
  return _delta_rule(static, inputs, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_rule(static, inputs, segments):
  return _forward(static, inputs, segments, for_gradient=False)[0]


def _vectors(static, segments, T, beta, log_decay):
  reach = None if segments is None else reaching(segments, T)
  return make_vectors(beta, log_decay, reach, static.length, T)


def _forward(static, inputs, segments, *, for_gradient):
  q, k, erase_key, v, beta, log_decay, kv = inputs
  T = q.shape[1]
  vectors = _vectors(static, segments, T, beta, log_decay)
  systems = chunk_systems(q, k, erase_key, vectors, segments, interpret=static.interpret)
  made = forward_walk(
    *(q, k, erase_key, v, systems["inverse"], systems["scores"], vectors, kv),
    scale=static.scale,
    for_gradient=for_gradient,
    interpret=static.interpret,
    **shapes.walk(erase_key is not None, backwards=False),
  )
  kept = Kept(**systems, x=made["x"], states=made["states"]) if for_gradient else None
  return (made["out"], made["last"]), kept


def _forward_rule(static, inputs, segments):
  decays = inputs.log_decay.perturbed
  is_leaf = lambda x: hasattr(x, "perturbed")
  inputs, segments = jax.tree.map(lambda x: x.value, (inputs, segments), is_leaf=is_leaf)
  result, kept = _forward(static, inputs, segments, for_gradient=True)
  return result, (inputs, segments, kept, () if decays else None)


def _backward_rule(static, residuals, cotangents):
  inputs, segments, kept, decays = residuals
  decays = decays is not None
  q, k, erase_key, v, beta, log_decay, kv = inputs
  d_out, d_last = cotangents
  B, T, H, _ = q.shape
  d_out = jnp.zeros(d_out.shape, d_out.dtype) if _is_zero(d_out) else d_out
  # `scale` multiplies the results.
  d_last = None if _is_zero(d_last) else d_last / static.scale
  vectors, vectors_vjp = jax.vjp(functools.partial(_vectors, static, segments, T), beta, log_decay)
  made = backward_walk(
    *(q, k, erase_key, d_out, kept.inverse, kept.scores, vectors, d_last),
    interpret=static.interpret,
    **shapes.walk(erase_key is not None, backwards=True),
  )
  options = {"scale": static.scale, "decays": decays, "interpret": static.interpret}
  by_q = gradients.query_gradient(
    *(q, k, erase_key, v, d_out, kept.x, made["y"], kept.states, vectors, segments),
    **options,
  )
  shared = erase_key is None
  by_k = gradients.key_value_gradient(
    *(q, k, erase_key, d_out, kept.x, made["y"], by_q["erase_key"] if shared else None),
    *(made["states"], vectors, segments),
    **options,
  )
  rows = {RATE: by_q["rate"]}
  if decays:
    rows |= {BEFORE: by_q["before"], AFTER: by_k["after"]}
    rows[CUMULATIVE] = by_q["later"] - by_q["earlier"]
  d_vectors = jnp.zeros_like(vectors)
  for row, d in rows.items():
    d_vectors = d_vectors.at[:, :, :, row].set(d.reshape(B, H, -1, CHUNK))
  if decays:
    overlap = jnp.einsum(
      "bhnkv,bhnkv->bhn", kept.states, made["states"], preferred_element_type=jnp.float32
    )
    d_vectors = d_vectors.at[:, :, :, DECAY, 0].set(overlap)
  d_beta, d_log_decay = vectors_vjp(static.scale * d_vectors)
  d_kv = None if kv is None else static.scale * made["last"]
  d_erase_key = None if shared else by_q["erase_key"]
  no_gradient = None if segments is None else np.zeros(segments.shape, jax.dtypes.float0)
  d_inputs = Inputs(by_q["q"], by_k["k"], d_erase_key, by_k["v"], d_beta, d_log_decay, d_kv)
  return d_inputs, no_gradient


_delta_rule.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _is_zero(x):
  return isinstance(x, jax.custom_derivatives.SymbolicZero)
