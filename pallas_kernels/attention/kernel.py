"""Softmax attention in which each query sees one range of keys: the entry point.

Documents, windows, blocks and causality are ranges: the keys that a query sees follow one another,
and neither end of the range decreases from query to query. So a kernel knows which tiles of keys it
needs, and which of them need a mask, from two numbers per token.
"""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.attention import backward, forward
from pallas_kernels.attention.backward import KeyGradients
from pallas_kernels.attention.config import AttentionConfig
from pallas_kernels.attention.tiles import Logits, Range
from pallas_kernels.core.gradients import custom_vjp
from pallas_kernels.core.wgmma import Backend


class Ranges(NamedTuple):
  """Who sees whom. Neither number of a range decreases from token to token."""

  seen: Range  # [B, T] int32: the keys that each query sees
  seen_by: Range  # [B, S] int32: the queries that see each key


class Options(NamedTuple):
  """Static arguments."""

  logits: Logits
  config: AttentionConfig
  interpret: Any = None

  @property
  def backend(self) -> Backend:
    """Compiled or interpreted."""
    return Backend(self.interpret)


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
  return _outputs(options, q, k, v, ranges).out


def _outputs(options: Options, q, k, v, ranges: Ranges):
  static = {"logits": options.logits, "backend": options.backend}
  return forward.outputs(q, k, v, ranges.seen, config=options.config.forward, **static)


def _forward_rule(options, q, k, v, ranges):
  made = _outputs(options, q, k, v, ranges)
  made = jax.tree.map(lambda x: checkpoint_name(x, name=MADE_BY_KERNELS), made)
  return made.out, (q, k, v, ranges, made)


def _backward_rule(options: Options, residuals, d_out):
  q, k, v, ranges, made = residuals
  static = {"logits": options.logits, "backend": options.backend}
  config = options.config
  by_q = backward.query_gradient(
    q, k, v, d_out, *made, ranges.seen, config=config.query_gradient, **static
  )
  of_keys = functools.partial(
    backward.key_gradient,
    *(q, k, v, d_out, made.log_sum, by_q.d_sum, ranges.seen_by),
    config=config.key_gradient,
    **static,
  )
  if config.separate_keys:
    d_k = of_keys(wanted=KeyGradients(k=True, v=False)).k
    d_v = of_keys(wanted=KeyGradients(k=False, v=True)).v
  else:
    d_k, d_v = of_keys(wanted=KeyGradients(k=True, v=True))
  none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), ranges)
  return by_q.q, d_k, d_v, none


_attention.defvjp(_forward_rule, _backward_rule)
