"""Softmax attention in which each query sees one range of keys: the entry point.

Documents, windows, blocks and causality are ranges: the keys that a query sees follow one another,
and neither end of the range decreases from query to query. So a kernel knows which tiles of keys it
needs, and which of them need a mask, from two numbers per token.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.attention.sm90.backward import backward
from pallas_kernels.attention.sm90.forward import forward
from pallas_kernels.attention.types import Options, Ranges
from pallas_kernels.core import device
from pallas_kernels.core.gradients import custom_vjp, no_gradient

_KERNELS = {"sm90": device.Kernels(forward, backward)}


def attention(
  q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges, options: Options
) -> jax.Array:
  """Runs attention on padded arguments.

  Args:
    q: [B, T, H, K] bfloat16, T a multiple of 128, K one of `config.WIDTHS`.
    k: [B, S, G, K] bfloat16, S a multiple of 128; query head h reads head h // (H / G).
    v: [B, S, G, V] bfloat16, V one of `config.WIDTHS`.

  Returns:
    out [B, T, H, V] bfloat16, 0 for a query that sees no key.
  """
  return _attention(options, q, k, v, ranges)


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _attention(options, q, k, v, ranges):
  return device.choose(_KERNELS).forward(options, q, k, v, ranges).out


def _forward_rule(options, q, k, v, ranges):
  made = device.choose(_KERNELS).forward(options, q, k, v, ranges)
  made = jax.tree.map(lambda x: checkpoint_name(x, name=MADE_BY_KERNELS), made)
  return made.out, (q, k, v, ranges, made)


def _backward_rule(options, residuals, d_out):
  gradients = device.choose(_KERNELS).backward(options, *residuals, d_out)
  return *gradients, no_gradient(residuals[3])


_attention.defvjp(_forward_rule, _backward_rule)
