"""Next-token cross-entropy in chunks, without materializing the logits of a whole batch.

Axis letters: B batch, T time, D channels, C time steps of one chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core.checks import checked_integers
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.cross_entropy.api import cross_entropy
from pallas_kernels.core.gradients import custom_vjp

_MOST_LOGITS, _MOST_POSITIONS = 2**27, 8192  # of a chunk by default: 512 MiB; more is not faster


class LossSums(NamedTuple):
  """Sums over positions, which add up over chunks, microbatches and devices."""

  nats: jax.Array  # float32 scalar: sum of weight * negative log-likelihood
  weight: jax.Array  # float32 scalar: sum of weights; nats / weight is the mean loss
  penalty: jax.Array  # float32 scalar: sum of weight * penalties of the logits
  measures: dict[str, jax.Array] | None = None  # sums of weight * value, reported by name


class _Static(NamedTuple):
  steps: int  # time steps per chunk
  soft_cap: float | None
  vocab_axis: str | None
  implementation: ty.Implementation | None
  logit_penalty: float = 0.0
  z_loss: float = 0.0


def next_token_loss(
  hidden: jax.Array,  # [B, T, D]
  head: jax.Array,  # [D, vocab]
  targets: jax.Array,  # [B, T] integer
  weights: jax.Array,  # [B, T] float32
  *,
  chunk: int | None = None,
  logit_penalty: float = 0.0,
  z_loss: float = 0.0,
  soft_cap: float | None = None,
  vocab_axis: str | None = None,
  implementation: ty.Implementation | None = None,
) -> LossSums:
  r"""Weighted sum of the negative log-likelihoods of `targets` under `softmax(hidden @ head)`.

      nats = sum_i w_i (logsumexp(z_i) - z_i[target_i]),   z_i = hidden_i @ head

  With `soft_cap` c it is c tanh(z / c) in place of z, as of a model with `logit_soft_cap`.

  At most about `chunk` positions of logits (float32 `[B, C, vocab]`, all B rows of C time steps)
  are in memory at once; None: a power of two, within 512 MiB and 8192. Matrix products run in
  `hidden.dtype` with float32 accumulation, everything else in float32.

  Differentiate `nats`, once: JAX rejects a second derivative. Its gradient includes that of

      penalty = sum_i w_i (logit_penalty / 2 max(z_i)^2 + z_loss logsumexp(z_i)^2),

  which is not part of the reported loss (the first as in the training of LNSSM, after RWKV; the
  second from PaLM, section 5). `weight`, `penalty`, `targets` and `weights` are constants under
  differentiation. The forward pass then also computes the gradients of `hidden` and `head`,
  so that each logit is computed once.

  Positions of weight 0 are ignored: their hidden state may be NaN and their target any integer.

  Args:
    vocab_axis: mesh axis over which the compiler shards the vocabulary, or None.
    implementation: of `lnssm_jax.ops.cross_entropy`, which computes the softmax and its gradient.

  Raises:
    ValueError: if the shapes do not agree, targets are no integers, or `chunk < 1`.
    NotImplementedError: the named implementation does not support these arguments.
  """
  with jax.named_scope("next_token_loss"):
    static, arrays = _checked(
      hidden,
      head,
      targets,
      weights,
      chunk=chunk,
      logit_penalty=float(logit_penalty),
      z_loss=float(z_loss),
      soft_cap=soft_cap,
      vocab_axis=vocab_axis,
      implementation=implementation,
    )
    nats, penalty = _chunked_sums(static, *arrays)
    return LossSums(nats, arrays[-1].sum(), jax.lax.stop_gradient(penalty))


def next_token_nats(
  hidden: jax.Array,  # [B, T, D]
  head: jax.Array,  # [D, vocab]
  targets: jax.Array,  # [B, T] integer
  weights: jax.Array,  # [B, T] float32
  *,
  chunk: int | None = None,
  soft_cap: float | None = None,
  vocab_axis: str | None = None,
  implementation: ty.Implementation | None = None,
) -> jax.Array:
  """Weighted negative log-likelihood of each target, float32 [B, T], for losses of sequences.

  As `next_token_loss`, which sums them, but the backward pass computes the logits again, because
  the cotangent of each token may depend on all of them.

  Raises:
    ValueError, NotImplementedError: as `next_token_loss`.
  """
  with jax.named_scope("next_token_loss"):
    static, arrays = _checked(
      hidden,
      head,
      targets,
      weights,
      chunk=chunk,
      soft_cap=soft_cap,
      vocab_axis=vocab_axis,
      implementation=implementation,
    )
    return _chunked_nats(static, *arrays)


def _checked(hidden, head, targets, weights, *, chunk, **options):
  """The static arguments of the chunked functions, and their arrays."""
  if hidden.ndim != 3 or head.ndim != 2 or hidden.shape[2] != head.shape[0]:
    raise ValueError(
      f"hidden has shape {hidden.shape} and head {head.shape}; they must be [B, T, D] and "
      "[D, vocab]."
    )
  for name, array in (("targets", targets), ("weights", weights)):
    if array.shape != hidden.shape[:2]:
      raise ValueError(f"{name} has shape {array.shape}, but hidden needs {hidden.shape[:2]}.")
  targets = jnp.asarray(checked_integers("next_token_loss", "targets", targets))
  if chunk is None:
    fit = max(1, _MOST_LOGITS // head.shape[1])
    chunk = min(_MOST_POSITIONS, 1 << (fit.bit_length() - 1))
  if chunk < 1:
    raise ValueError(
      f"chunk={chunk} must be at least 1 (positions whose logits are in memory at once)."
    )
  weights = jax.lax.stop_gradient(weights.astype(jnp.float32))
  static = _Static(max(1, chunk // hidden.shape[0]), **options)
  return static, vary_alike((hidden, head, targets, weights))


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _chunked_sums(static, hidden, head, targets, weights):
  matrix = _aligned(head.astype(hidden.dtype))

  def body(sums, xs):
    _, terms = _terms(static, head.shape[1], matrix, *xs, gradient=False)
    return (sums[0] + terms.nats.sum(), sums[1] + terms.penalty.sum()), None

  zero = jnp.zeros((), jnp.float32)
  chunks = [_split_time(x, static.steps) for x in (hidden, targets, weights)]
  _, *start = vary_alike((matrix, zero, zero))
  return jax.lax.scan(body, tuple(start), chunks)[0]


def _forward(static, hidden, head, targets, weights):
  matrix = _aligned(head.astype(hidden.dtype))
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def body(carry, xs):
    nats, penalty, d_head = carry
    h, terms = _terms(static, head.shape[1], matrix, *xs, gradient=True)
    d_hidden = product("bcv,dv->bcd", terms.d_logits, matrix).astype(h.dtype)
    d_head = d_head + _head_gradient(h, terms.d_logits)
    return (nats + terms.nats.sum(), penalty + terms.penalty.sum(), d_head), d_hidden

  zero = jnp.zeros((), jnp.float32)
  chunks = [_split_time(x, static.steps) for x in (hidden, targets, weights)]
  _, *start = vary_alike((matrix, zero, zero, jnp.zeros(matrix.shape, jnp.float32)))
  (nats, penalty, d_head), d_hidden = jax.lax.scan(body, tuple(start), chunks)
  d_head = d_head[:, : head.shape[1]].astype(head.dtype)
  return (nats, penalty), (_joined_time(d_hidden, hidden.shape[1]), d_head)


def _head_gradient(hidden, d_logits):
  """[D, vocab] float32. XLA's CPU rejects its transpose, of a tied head, for bfloat16 operands."""
  product = functools.partial(jnp.einsum, "bcd,bcv->dv", preferred_element_type=jnp.float32)
  wide = lambda *xs: product(*(x.astype(jnp.float32) for x in xs))
  return jax.lax.platform_dependent(hidden, d_logits, cpu=wide, default=product)


def _backward(static, gradients, cotangents):
  del static
  scale = cotangents[0]  # a scalar loss: the chain rule is one multiplication
  d_hidden, d_head = (g * scale.astype(g.dtype) for g in gradients)
  return d_hidden, d_head, None, None


_chunked_sums.defvjp(_forward, _backward)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _chunked_nats(static, hidden, head, targets, weights):
  matrix = _aligned(head.astype(hidden.dtype))

  def body(_, xs):
    return None, _terms(static, head.shape[1], matrix, *xs, gradient=False)[1].nats

  chunks = [_split_time(x, static.steps) for x in (hidden, targets, weights)]
  return _joined_time(jax.lax.scan(body, None, chunks)[1], hidden.shape[1])


def _nats_forward(static, *arrays):
  return _chunked_nats(static, *arrays), arrays


def _nats_backward(static, arrays, cotangent):
  hidden, head, targets, weights = arrays
  return *_forward(static, hidden, head, targets, weights * cotangent)[1], None, None


_chunked_nats.defvjp(_nats_forward, _nats_backward)


def _aligned(head):
  """Pads a large `head` with zero columns to a multiple of 128.

  With a vocabulary such as 50,277 a GPU could not use its fast matrix products, which require rows
  of a multiple of 16 bytes, nor the kernel of the cross-entropy.
  """
  size = head.shape[1]
  return jnp.pad(head, ((0, 0), (0, -size % 128))) if size >= 4096 else head


def _terms(static, vocab_size, matrix, hidden, targets, weights, *, gradient):
  """One chunk [B, C, ...]: hidden states, of weight 0 as zeros, and terms of its cross-entropy."""
  # 0 * NaN is NaN: rows of weight 0 must be zeroed before the product, not after.
  hidden = jnp.where((weights != 0)[..., None], hidden, 0)
  logits = jnp.einsum("bcd,dv->bcv", hidden, matrix, preferred_element_type=jnp.float32)
  cap, dtype, slope = static.soft_cap, hidden.dtype, None
  if cap is not None:
    bounded = jnp.tanh(logits / cap)
    # The gradient is rounded once, after its last factor.
    logits, dtype, slope = cap * bounded, jnp.float32, 1 - bounded**2
  terms = cross_entropy(
    logits,
    targets,
    weights,
    vocab_size=vocab_size,
    logit_penalty=static.logit_penalty,
    z_loss=static.z_loss,
    gradient_dtype=dtype if gradient else None,
    vocab_axis=static.vocab_axis,
    implementation=static.implementation,
  )
  if slope is not None and terms.d_logits is not None:
    terms = terms._replace(d_logits=(terms.d_logits * slope).astype(hidden.dtype))
  return hidden, terms


def _split_time(x, steps):
  """[B, T, ...] -> [chunks, B, C, ...], C <= steps, zero-padded; the batch axis is not split."""
  B, T = x.shape[:2]
  chunks = -(-T // steps)
  C = -(-T // chunks)  # chunks of equal length need the least padding
  x = jnp.pad(x, ((0, 0), (0, chunks * C - T)) + ((0, 0),) * (x.ndim - 2))
  return jnp.moveaxis(x.reshape(B, chunks, C, *x.shape[2:]), 1, 0)


def _joined_time(chunks, T):
  """[chunks, B, C, ...] -> [B, T, ...], without the padding of `_split_time`."""
  joined = jnp.moveaxis(chunks, 0, 1)
  return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :T]
