"""Softmax attention in which each query sees one range of keys: the entry point.

Documents, windows, blocks and causality are ranges: the keys that a query sees follow one another,
and neither end of the range decreases from query to query. So a kernel knows which tiles of keys it
needs, and which of them need a mask, from two numbers per token.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.attention.ampere import kernels as ampere
from pallas_kernels.attention.sm90.backward import backward
from pallas_kernels.attention.sm90.forward import forward
from pallas_kernels.attention.types import LOG2_E, Options, Ranges
from pallas_kernels.core import device
from pallas_kernels.core.gradients import custom_vjp, no_gradient

_KERNELS = {
  device.SM90: device.Kernels(forward, backward),
  device.AMPERE: device.Kernels(ampere.forward, ampere.backward),
}


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  ranges: Ranges,
  options: Options,
  sinks: jax.Array | None = None,
) -> jax.Array:
  """Runs attention on padded arguments.

  Args:
    q: [B, T, H, K] bfloat16, T a multiple of 128, K one of `config.WIDTHS` (on Ampere's kernels at
      most `config.WIDEST_AMPERE`, as V).
    k: [B, S, G, K] bfloat16, S a multiple of 128; query head h reads head h // (H / G).
    v: [B, S, G, V] bfloat16, V one of `config.WIDTHS`.
    sinks: [H] float32, logits of keys that every query sees, whose values are 0; or None.

  Returns:
    out [B, T, H, V] bfloat16, 0 for a query that sees no key.
  """
  return _attention(options, q, k, v, ranges, sinks)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, ranges, sinks):
  return _with_sinks(_chosen(options).forward(options, q, k, v, ranges), sinks).out


def _forward_rule(options, q, k, v, ranges, sinks):
  made = _with_sinks(_chosen(options).forward(options, q, k, v, ranges), sinks)
  made = jax.tree.map(lambda x: checkpoint_name(x, name=MADE_BY_KERNELS), made)
  return made.out, (q, k, v, ranges, made, sinks)


def _backward_rule(options, residuals, d_out):
  *arrays, ranges, made, sinks = residuals
  *gradients, d_sum = _chosen(options).backward(options, *arrays, ranges, made, d_out)
  if sinks is not None:
    # The gradient of a key's logit, with the value 0: p (0 - d_out . out).
    share = jnp.exp2(sinks[:, None] * LOG2_E - made.log_sum)
    sinks = -(share * d_sum).sum((0, 2))
  return *gradients, no_gradient(ranges), sinks


def _chosen(options: Options) -> device.Kernels:
  return device.choose(_KERNELS, options.architecture)


def _with_sinks(made, sinks):
  """Outputs whose denominators have the sinks, too."""
  if sinks is None:
    return made
  log_sum = jnp.logaddexp2(made.log_sum, sinks[:, None] * LOG2_E)
  share = jnp.exp2(made.log_sum - log_sum).swapaxes(1, 2)[..., None]
  return made._replace(out=(made.out * share).astype(made.out.dtype), log_sum=log_sum)


_attention.defvjp(_forward_rule, _backward_rule)
