r"""The scores of queries and keys: maps, histograms, and how near they are to a log-normal law.

    a_ts = Phi(q_t) . Phi(k_s),  s <= t            without decay and without normalizer
    w_ts = a_ts / (sum_{s <= t} a_ts + 1e-8)

Source: LNSSM, section 5 (figures 7 and 8), which finds log a close to normal for softmax attention
and LNSSM, and r . k of RWKV-5 far from log-normal.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.analysis.layers import each_layer
from lnssm_jax.mixers import LLN, LNSSM, Mixer
from lnssm_jax.models import LanguageModel
from lnssm_jax.ops.attention.cache import tokens_of
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of

_NAME = "analysis"
_EPSILON = 1e-8  # of the rows' sums


class Scores(NamedTuple):
  """Scores of one layer. float32; H is 1 for a mixer without heads."""

  value: jax.Array  # [B, H, T, T], a_ts; 0 where the token t does not see s
  log: jax.Array  # log a_ts; NaN where a_ts < 0, -inf where t does not see s
  visible: jax.Array  # [B, 1, T, T] bool: s <= t, in the same document, and in attention's window

  def weights(self) -> jax.Array:
    """Each row divided by its sum, w_ts [B, H, T, T]."""
    return self.value / (jnp.sum(self.value, axis=-1, keepdims=True) + _EPSILON)


class Law(NamedTuple):
  """Moments of a sample and its distance from the normal law of the same mean and deviation."""

  mean: jax.Array
  deviation: jax.Array
  skewness: jax.Array  # 0 of a normal law
  kurtosis: jax.Array  # in excess of a normal law's 3
  distance: jax.Array  # max |F - F_normal|, the statistic of Kolmogorov, Smirnov and Lilliefors


def scores(
  model: LanguageModel | Mixer,
  inputs: jax.Array,
  segment_ids: jax.Array | None = None,
  *,
  layer: int = 0,
) -> Scores:
  """The scores of all pairs of tokens in one layer, T^2 numbers per head.

  Phi(q) and Phi(k) are what the layer's op is given: features, c and b of Mamba; of softmax
  attention a_ts is exp(K^(-1/2) q_t . k_s), with its own scale, soft cap, and window. LNSSM
  computes exp(q) divided by its largest entry, which cancels in its output; here it is exp(q).

  Args:
    inputs: tokens [B, T] of a language model, x [B, T, D] of a mixer.
    layer: counted from 0.

  Raises:
    ValueError: there is no such layer, or `inputs` do not fit the model.
    NotImplementedError: the layer's mixer has no queries and keys, or it is an LLN, whose keys are
      given relative to a running maximum.
  """
  (found,) = each_layer(_scores, model, inputs, segment_ids, only=layer)
  return found


def law(values: jax.Array, where: jax.Array | None = None) -> Law:
  """The moments of samples [..., n], each [...] float32, and how near they are to a normal law.

      analysis.law(jnp.moveaxis(s.log, 1, 0).reshape(H, -1), ...)         # or `score_laws(s)`

  Neighboring scores depend on each other, so no probability is given: compare distances.

  Args:
    where: bool [..., n], which values belong to the sample.
  """
  where = jnp.ones(values.shape, bool) if where is None else jnp.broadcast_to(where, values.shape)
  return _law(values, where)


def score_laws(scores: Scores) -> tuple[Law, Law]:
  """(the law of a_ts, that of log a_ts) of each head [H], over all visible pairs.

  Near log-normal scores have a small distance in the second. It is NaN for a head with a score
  below 0.
  """
  B, H, T, _ = scores.value.shape
  by_head = lambda z: jnp.moveaxis(jnp.broadcast_to(z, (B, H, T, T)), 1, 0).reshape(H, -1)
  visible = by_head(scores.visible)
  return law(by_head(scores.value), visible), law(by_head(scores.log), visible)


@jax.jit
def histogram(values: jax.Array, edges: jax.Array, where: jax.Array | None = None) -> jax.Array:
  """How many values [..., n] are in each bin, int32 [..., m]: edges[i] <= value < edges[i + 1].

  The last bin has its upper edge too. Values outside are not counted.

  Args:
    edges: [m + 1], ascending, such as jnp.logspace(-7, 0, 71).
    where: bool [..., n], which values count.
  """
  bins = len(edges) - 1
  index = jnp.searchsorted(edges, values, side="right") - 1
  index = jnp.where(values == edges[-1], bins - 1, index)
  inside = (index >= 0) & (index < bins) & ~jnp.isnan(values)
  inside &= True if where is None else where
  counts = jnp.zeros((*values.shape[:-1], bins + 1), jnp.int32)
  rows = jnp.indices(values.shape, sparse=True)[:-1]
  return counts.at[(*rows, jnp.where(inside, index, bins))].add(1)[..., :bins]


def _scores(mixer, x, segment_ids) -> Scores:
  q, k, exponents = _queries_and_keys(mixer, x, segment_ids)
  B, T, H, _ = q.shape
  k = jnp.repeat(k, H // k.shape[2], axis=2)  # heads that share their keys
  t = jnp.arange(T)
  visible = jnp.broadcast_to(t[:, None] >= t, (B, 1, T, T))
  if (segments := segments_of(_NAME, segment_ids, B, T)) is not None:
    visible &= (segments.index[:, :, None] == segments.index[:, None])[:, None]
  if isinstance(exponents, _Softmax):
    visible &= exponents.visible[:, None]
    log = exponents.capped(jnp.einsum("bthk,bshk->bhts", q, k, precision="highest"))
    value = jnp.exp(log)
  elif exponents == "sum":  # of exp(q_i) exp(k_i)
    top = lambda z: jnp.max(z, axis=-1, keepdims=True)
    product = jnp.einsum(
      "bthk,bshk->bhts", jnp.exp(q - top(q)), jnp.exp(k - top(k)), precision="highest"
    )
    rows, columns = (jnp.moveaxis(top(z)[..., 0], 1, 2) for z in (q, k))
    log = jnp.log(product) + rows[..., :, None] + columns[..., None, :]
    value = jnp.exp(log)
  else:
    value = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest")
    log = jnp.log(value)
  return Scores(jnp.where(visible, value, 0), jnp.where(visible, log, -jnp.inf), visible)


class _Softmax(NamedTuple):
  """Rules by which attention turns products of queries and keys into logarithms of weights."""

  visible: jax.Array  # [B, T, T]
  capped: Callable[[jax.Array], jax.Array]


def _queries_and_keys(mixer, x, segment_ids):
  """(q, k [B, T, H, K], of which kind: `_Softmax`, "sum" of exponentials, or None)."""
  if isinstance(mixer, LNSSM) and (exponents := mixer.exponents(x, segment_ids)) is not None:
    return *exponents, "sum"
  with ops.recording() as calls:
    mixer(x, None, segment_ids)
  named = lambda op: dispatch.fact(op, "query_key")
  calls = [call for call in calls if named(call.op)]
  if not calls or isinstance(mixer, LLN):
    raise NotImplementedError(
      f"{_NAME}: {type(mixer).__name__} has no scores of queries and keys that could be read off; "
      f"ops with them are {', '.join(filter(named, dispatch.names()))}."
    )
  call = calls[-1]
  q, k = (wide(call.arguments[name]) for name in named(call.op))
  q, k = (z[:, :, None] if z.ndim == 3 else z for z in (q, k))
  if q.ndim == 5:  # R queries and keys of a token: each query with each key, as heads
    B, T, R, _, K = q.shape
    q, k = jnp.repeat(q, R, axis=2), jnp.tile(k, (1, 1, R, 1, 1))
    q, k = (z.reshape(B, T, -1, K) for z in (q, k))
  if call.op != "attention":
    return q, k, None
  checked = dispatch.check(call.op, **call.arguments)
  tokens = tokens_of(checked.inputs)
  return q, k, _Softmax(checked.options.mask.visible(tokens, tokens), checked.options.capped)


@functools.partial(jax.jit)
def _law(values, where):
  count = jnp.sum(where, axis=-1, dtype=jnp.float32)
  mean_of = lambda z: jnp.sum(jnp.where(where, z, 0), axis=-1) / count
  mean = mean_of(values)
  centered = jnp.where(where, values - mean[..., None], 0)
  deviation = jnp.sqrt(mean_of(jnp.square(centered)))
  z = centered / deviation[..., None]
  ordered = jnp.sort(jnp.where(where, z, jnp.inf), axis=-1)
  rank = jnp.arange(values.shape[-1])
  normal = 0.5 * (1 + jax.lax.erf(ordered / math.sqrt(2)))
  n = count[..., None]
  gap = jnp.maximum(jnp.abs((rank + 1) / n - normal), jnp.abs(rank / n - normal))
  distance = jnp.max(jnp.where(rank < n, gap, 0), axis=-1)
  distance = jnp.where(jnp.isnan(deviation), jnp.nan, distance)
  return Law(mean, deviation, mean_of(z**3), mean_of(z**4) - 3, distance)
