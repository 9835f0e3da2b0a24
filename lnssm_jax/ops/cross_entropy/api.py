"""`cross_entropy`: argument checks and dispatch."""

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import check_shape, checked_integers
from lnssm_jax.ops.cross_entropy.reference import reference
from lnssm_jax.ops.cross_entropy.types import CrossEntropy, Inputs, Options

_NAME = "cross_entropy"
IMPLEMENTATIONS, _WITHOUT_GRADIENT = (
  dispatch.Kernels(f"{__package__}.pallas", results, apart=True).with_forms(reference=reference)
  for results in (("BT", "BT", "BTV"), ("BT", "BT"))
)


def cross_entropy(
  logits: jax.Array,  # [B, T, V] float32
  targets: jax.Array,  # [B, T] integer
  weights: jax.Array,  # [B, T] float32
  *,
  vocab_size: int | None = None,
  logit_penalty: float = 0.0,
  z_loss: float = 0.0,
  gradient_dtype=None,
  vocab_axis: str | None = None,
  implementation: ty.Implementation | None = None,
) -> CrossEntropy:
  """Weighted negative log-likelihood of each target, and its gradient by the logits.

      nats = w (logsumexp(z) - z[target])
      penalty = w (logit_penalty / 2 max(z)^2 + z_loss logsumexp(z)^2)
      d_logits = d sum(nats + penalty) / dz

  Not differentiable: the gradient is a result. Computed in float32, and `d_logits` rounded once.
  A target outside the vocabulary has NaN nats. A position of weight 0 has none, and no gradient;
  its target may be any integer, its logits must be finite.

  Args:
    vocab_size: columns of logits that are not padding; None: all.
    gradient_dtype: of `d_logits`; None: it is not computed.
    vocab_axis: mesh axis over which the compiler shards the vocabulary, or None.
    implementation: "pallas", "reference", "pallas_ampere", "pallas_interpret",
      "pallas_ampere_interpret", as README.md describes them. None takes "pallas" where it is
      supported and preferred, otherwise "reference".

  Raises:
    ValueError: shapes do not agree, or targets are no integers.
    NotImplementedError: the named implementation does not support these arguments.
  """
  if logits.ndim != 3:
    raise ValueError(f"{_NAME}: logits has shape {logits.shape}, and must be [B, T, V].")
  for name, array in (("targets", targets), ("weights", weights)):
    check_shape(_NAME, name, array, logits.shape[:2], "[B, T] of logits")
  targets = jnp.asarray(checked_integers(_NAME, "targets", targets))
  size = logits.shape[-1] if vocab_size is None else vocab_size
  if not 0 < size <= logits.shape[-1]:
    raise ValueError(
      f"{_NAME}: vocab_size={vocab_size} must be 1 to {logits.shape[-1]}, the columns of logits."
    )
  dtype = None if gradient_dtype is None else jnp.dtype(gradient_dtype)
  results = dispatch.run(
    _NAME,
    _WITHOUT_GRADIENT if dtype is None else IMPLEMENTATIONS,
    Inputs(logits, targets, weights),
    Options(size, float(logit_penalty), float(z_loss), dtype, vocab_axis),
    implementation=implementation,
  )
  return CrossEntropy(*results)
