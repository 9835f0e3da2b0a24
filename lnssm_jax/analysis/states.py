r"""Contents of the recurrent states: by document, over a long text, across document boundaries.

For a state S [R, C] with singular values s_1 >= ... >= s_n, n = min(R, C):

    p_i = s_i^2 / sum_j s_j^2,      H = -(1 / log n) sum_i p_i log p_i         in [0, 1]
    q_i = s_i / sum_j s_j,          effective rank = exp(-sum_i q_i log q_i)   in [1, n]
    cosine_ij = S^i . S^j / (||S^i|| ||S^j||)                                  of its rows

Sources: SSE (Pan et al. 2025), the analysis of states; effective rank, Roy and Vetterli 2007.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.analysis.layers import check_model, checked_inputs, each_layer, mixer_states
from lnssm_jax.mixers import ComplexState, Mixer
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.models import LanguageModel
from lnssm_jax.ops.core.checks import check_shape

_NAME = "analysis"

# The recurrent states of a layer: by the name of the field, [B, H, R, C].
type Matrices = dict[str, jax.Array]


def matrices(state: Any) -> Matrices:
  """The recurrent states in a mixer's state, each as matrices [B, H, R, C], by its field's name.

  R counts the rows that keys write, those of all partitions side by side (`SSE`, `MoM`). States of
  N numbers per channel (Mamba, Longhorn, S4) are one matrix [D, N], of one number per channel one
  row; H is then 1. Of RWKV-4 it is the mean of values that it holds. Complex states are complex.
  Caches of attention, convolutions, token shifts and counters are left out.
  """
  return dict(_named(state))


def document_states(
  model: LanguageModel | Mixer, documents: Sequence[jax.typing.ArrayLike]
) -> list[Matrices]:
  """The recurrent states of each layer after the last token of each document.

  Args:
    documents: token ids [T_i] of a language model, x [T_i, D] of a mixer; of any lengths.

  Returns:
    One `matrices` per layer, whose B counts documents.

  Raises:
    ValueError: there is no document, or one is empty or does not fit the model.
  """
  check_model(model)
  rows = [np.asarray(document) for document in documents]
  rank = 2 if isinstance(model, Mixer) else 1
  if not rows or any(row.ndim != rank or not len(row) for row in rows):
    shapes = [row.shape for row in rows]
    raise ValueError(
      f"{_NAME}: documents have shapes {shapes}; give at least one, each "
      f"{'x [T, D]' if rank == 2 else 'tokens [T]'} with T >= 1."
    )
  longest = max(map(len, rows))
  before = lambda row: [(longest - len(row), 0), *[(0, 0)] * (rank - 1)]
  # Padding comes first, as a document of its own, which leaves nothing behind.
  inputs = jnp.asarray(np.stack([np.pad(row, before(row)) for row in rows]))
  ids = jnp.asarray([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
  return _after(model, checked_inputs(model, inputs, ids), ids)


def state_norms(
  model: LanguageModel | Mixer, inputs: jax.Array, *, every: int = 64
) -> list[Matrices]:
  """The Frobenius norm of each recurrent state after every `every` tokens of a text.

  Args:
    inputs: tokens [B, T] of a language model, x [B, T, D] of a mixer; one document per row.
    every: tokens per call; a divisor of T. Memory is that of a call.

  Returns:
    For each layer its norms by the state's name, float32 [T / every, B, H].

  Raises:
    ValueError: `every` does not divide T, or the text is longer than a cache of the model.
  """
  inputs = checked_inputs(model, inputs)
  T = inputs.shape[1]
  if T % check_positive("every", every):
    raise ValueError(f"{_NAME}: every={every} does not divide the text's T={T} tokens.")
  return _norms(model, inputs, every=every)


@jax.jit
def singular_value_entropy(state: jax.Array) -> jax.Array:
  """H of each matrix [..., R, C], float32 [...]: 0 for rank 1 (and for 0), 1 for equal values."""
  s = jnp.linalg.svd(state, compute_uv=False)
  return _entropy(jnp.square(s)) / max(np.log(s.shape[-1]), 1e-9)


@jax.jit
def effective_rank(state: jax.Array) -> jax.Array:
  """exp of the entropy of the singular values of each matrix [..., R, C], float32 [...]."""
  return jnp.exp(_entropy(jnp.linalg.svd(state, compute_uv=False)))


@jax.jit
def row_cosine(state: jax.Array) -> jax.Array:
  """The cosine of each two rows of each matrix [..., R, C], [..., R, R]; 0 for a row of zeros."""
  norm = jnp.linalg.norm(state, axis=-1, keepdims=True)
  unit = state / jnp.where(norm > 0, norm, 1)
  return jnp.real(jnp.einsum("...ic,...jc->...ij", unit, unit.conj(), precision="highest"))


class Influence(NamedTuple):
  """Influence of one document on the next, relative: 0 for none, about 1 for all."""

  output: jax.Array  # [L, B, T2], on the mixer's output for each token of the second
  state: jax.Array  # [L, B], on its recurrent states after the last; NaN for a layer without


def boundary_influence(
  model: LanguageModel | Mixer, first: jax.Array, second: jax.Array, *, reset: bool
) -> Influence:
  r"""The influence of a document on the layers while they read the next one.

      influence = ||y - y'|| / ||y'||

  y after the first document, y' after a reset. With `reset` both reset, and y' follows the first
  document's tokens in reverse order: 0 unless something crosses the boundary.

  Args:
    first, second: tokens [B, T1] and [B, T2] of a language model, x [B, T, D] of a mixer.
    reset: whether the state is reset between them, by `segment_ids`, as for packed documents.

  Raises:
    ValueError: the two do not fit together or the model, or are longer than one of its caches.
  """
  first, second = (checked_inputs(model, tokens) for tokens in (first, second))
  (B, T1), T2 = first.shape[:2], second.shape[1]
  if second.shape[0] != B:
    raise ValueError(f"{_NAME}: second has {second.shape[0]} rows, but first has {B}.")
  ids = jnp.broadcast_to((jnp.arange(T1 + T2) >= T1).astype(jnp.int32), (B, T1 + T2))
  other = first[:, ::-1] if reset else first
  follow = lambda document: jnp.concatenate([document, second], axis=1)
  pairs = zip(
    each_layer(_output_and_state, model, follow(first), ids if reset else None),
    each_layer(_output_and_state, model, follow(other), ids),
    strict=True,
  )
  outputs, states = [], []
  for (y, state), (y_alone, state_alone) in pairs:
    outputs.append(_difference(y[:, T1:], y_alone[:, T1:]))
    flat = lambda parts: jnp.concatenate([p.reshape(B, -1) for p in parts.values()], axis=1)
    nothing = jnp.full(B, jnp.nan, jnp.float32)
    states.append(_difference(flat(state), flat(state_alone)) if state else nothing)
  return Influence(jnp.stack(outputs), jnp.stack(states))


def state_size(model: LanguageModel | Mixer) -> int:
  """The numbers in the recurrent states of one sequence, all layers together; complex ones are 2.

  Caches of attention, convolutions and token shifts are left out.
  """
  check_model(model)
  found = jax.eval_shape(
    lambda: [matrices(state) for state in mixer_states(model, model.init_state(1))]
  )
  size = lambda part: part.size * (2 if jnp.issubdtype(part.dtype, jnp.complexfloating) else 1)
  return sum(map(size, jax.tree.leaves(found)))


def recall(model: LanguageModel, tokens: jax.Array, labels: jax.Array) -> jax.Array:
  """The share of labeled tokens whose label has the largest logit, float32 [].

      points = [(analysis.state_size(m), analysis.recall(m, tokens, labels)) for m in models]

  gives recall against the size of the state, for models trained on the same task.

  Args:
    tokens: [B, T] integer.
    labels: [B, T] integer, of the next token; below 0 where there is none.

  Raises:
    ValueError: `tokens` do not fit the model, or `labels` not `tokens`.
  """
  tokens, labels = checked_inputs(model, tokens), jnp.asarray(labels)
  check_shape(_NAME, "labels", labels, tokens.shape, "the shape of inputs, [B, T]")
  return _recall(model, tokens, labels)


def _named(state: Any, name: str = "") -> Iterator[tuple[str, jax.Array]]:
  if isinstance(state, _RECURRENT):
    yield name or "recurrent", _matrix(state)
  elif isinstance(state, tuple):
    fields = getattr(state, "_fields", range(len(state)))
    for field, part in zip(fields, state, strict=True):
      yield from _named(part, f"{name}.{field}" if name else str(field))


def _matrix(part: Any) -> jax.Array:
  if isinstance(part, ops.SparseState):
    kv = jnp.moveaxis(part.kv, 1, 2)  # [B, H, N, K, V]
    return kv.reshape(*kv.shape[:2], -1, kv.shape[-1])
  if isinstance(part, ops.WKV4State):
    h = part.numerator / jnp.where(part.denominator > 0, part.denominator, 1)
  else:
    h = jax.lax.complex(*part) if isinstance(part, ComplexState) else part[0]
  return h.reshape(len(h), *[1] * (4 - h.ndim), *h.shape[1:])


_RECURRENT = (
  ComplexState,
  ops.DeltaRuleState,
  ops.DiagonalState,
  ops.ElementwiseDecayState,
  ops.ExponentialState,
  ops.LinearAttentionState,
  ops.LonghornState,
  ops.SelectiveState,
  ops.SparseState,
  ops.WKV4State,
)


@jax.jit
def _recall(model, tokens, labels):
  given = labels >= 0
  right = (jnp.argmax(model(tokens)[0], axis=-1) == labels) & given
  return jnp.sum(right) / jnp.sum(given)


@jax.jit
def _after(model, inputs, segment_ids):
  call = model if isinstance(model, Mixer) else model.hidden
  state = call(inputs, None, segment_ids)[1]
  return [matrices(of_mixer) for of_mixer in mixer_states(model, state)]


@functools.partial(jax.jit, static_argnames="every")
def _norms(model, inputs, *, every):
  B, T = inputs.shape[:2]
  call = model if isinstance(model, Mixer) else model.hidden
  norm = lambda state: jnp.linalg.norm(state, axis=(-2, -1))

  def step(state, chunk):
    _, state = call(chunk, state)
    return state, [jax.tree.map(norm, matrices(s)) for s in mixer_states(model, state)]

  chunks = jnp.moveaxis(inputs.reshape(B, T // every, every, *inputs.shape[2:]), 1, 0)
  return jax.lax.scan(step, model.init_state(B), chunks)[1]


def _output_and_state(mixer, x, segment_ids):
  y, state = mixer(x, None, segment_ids)
  return y, matrices(state)


def _difference(x, alone):
  """||x - alone|| / ||alone|| over the last axis; 0 where they are equal."""
  norm = lambda z: jnp.linalg.norm(z.astype(jnp.promote_types(z.dtype, jnp.float32)), axis=-1)
  apart = norm(x - alone)
  return jnp.where(apart == 0, 0, apart / norm(alone))


def _entropy(weights):
  total = jnp.sum(weights, axis=-1, keepdims=True)
  p = weights / jnp.where(total > 0, total, 1)
  return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=-1)
