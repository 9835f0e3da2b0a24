"""Mixtures of experts: which experts a token selects, and their products, without dropped tokens.

Axis letters: N tokens, D channels, E experts, k experts of a token, F hidden channels of an expert.

Tokens are sorted by expert, and a grouped product (`jax.lax.ragged_dot`) multiplies each group by
the kernel of its expert: no token is dropped, however the groups are. With experts sharded over the
mesh axis `AXIS`, whose devices hold other tokens each, a device gathers the tokens of all of them,
computes its own experts, and the sums are scattered back. Per layer and pass each device sends and
receives D numbers per token of the others twice, and sorts and pads the k rows of all their tokens:
memory grows with the number of shards, while the products that count are those of its experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.common.routing import Aux, balance, is_selected
from lnssm_jax.ops.core.precision import wide

AXIS = "expert"
NUM_EXPERTS = 8  # of a mixture whose options do not say


class Router(NamedTuple):
  """How scores become a selection; `MixtureOfExperts` has the meaning of its options."""

  kind: str
  experts_per_token: int
  normalize_weights: bool
  weight_scale: float
  num_groups: int
  groups_per_token: int
  balance: float

  def __call__(self, logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array, Aux]:
    """(weights [N, k], indices [N, k] int32, `Aux`) of logits [N, E], float32 or wider."""
    E, k = logits.shape[-1], self.experts_per_token
    sigmoid = self.kind == "sigmoid"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    # Of the logits: rounding makes more probabilities equal.
    order = jax.lax.stop_gradient(logits if bias is None and not sigmoid else scores)
    if bias is not None:
      order = order + jax.lax.stop_gradient(bias)
    if self.num_groups > 1:
      groups = order.reshape(-1, self.num_groups, E // self.num_groups)
      best = jax.lax.top_k(groups, min(2, groups.shape[-1]))[0].sum(-1)
      kept = is_selected(jax.lax.top_k(best, self.groups_per_token)[1], self.num_groups)
      order = jnp.where(kept[..., None], groups, -jnp.inf).reshape(-1, E)
    indices = jax.lax.top_k(order, k)[1].astype(jnp.int32)
    weights = jnp.take_along_axis(scores, indices, axis=-1)
    if self.normalize_weights:
      weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    mass = scores / scores.sum(-1, keepdims=True) if sigmoid else scores
    aux = balance(mass, is_selected(indices, E), coefficient=self.balance)
    if bias is not None:  # adds 0, with the gradient that the optimizer takes the sign of
      excess = jnp.sum(wide(bias) * jax.lax.stop_gradient(aux.share - k / E))
      aux = aux._replace(loss=aux.loss + excess - jax.lax.stop_gradient(excess))
    return self.weight_scale * weights, indices, aux


def mixture(
  kernels: tuple[jax.Array, jax.Array, jax.Array],
  activation: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  weights: jax.Array,
  indices: jax.Array,
  num_experts: int,
) -> jax.Array:
  """sum_j weights_j W_down (activation(W_gate x) * W_up x) over a token's experts, float32 [N, D].

  Args:
    kernels: W_gate, W_up [E, D, F] and W_down [E, F, D]; inside `jax.shard_map` over `AXIS`, those
      of this device's experts. Products are in their dtype, with float32 sums.
    x: [N, D].
    weights, indices: [N, k], of all E = `num_experts`.
  """
  here = len(kernels[0])
  if here == num_experts:
    return _of_these(kernels, activation, x, weights, indices)
  gathered = (jax.lax.all_gather(a, AXIS, tiled=True) for a in (x, weights, indices))
  x, weights, indices = gathered
  y = _of_these(kernels, activation, x, weights, indices - here * jax.lax.axis_index(AXIS))
  return jax.lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)


def _of_these(kernels, activation, x, weights, indices):
  """`mixture` of the experts 0, 1, .. of `kernels`; other indices, of other devices, add 0."""
  (N, k), count = indices.shape, len(kernels[0])
  expert = jnp.where((indices >= 0) & (indices < count), indices, count).reshape(-1)
  order = jnp.argsort(expert, stable=True)
  back = jnp.argsort(order)
  is_of = expert[:, None] == jnp.arange(count)
  sizes = is_of.sum(0, dtype=jnp.int32)
  counts = (jnp.arange(N * k) < sizes.sum())[:, None]  # the rows of these experts

  def product(rows, kernel):
    """Of rows of no group 0, whatever the grouped product has there."""
    return jnp.where(counts, jax.lax.ragged_dot(rows, kernel, sizes), 0)

  # Permutations, whose transposes are no sums: a GPU adds up scattered rows in any order.
  permuted = lambda rows, places: rows.at[places].get(unique_indices=True, mode="promise_in_bounds")
  gate_kernel, up_kernel, down_kernel = kernels
  copies = jnp.broadcast_to(x[:, None], (N, k, x.shape[-1])).reshape(N * k, -1)
  rows = jnp.where(counts, permuted(copies.astype(gate_kernel.dtype), order), 0)
  hidden = activation(product(rows, gate_kernel)) * product(rows, up_kernel)
  y = permuted(product(hidden.astype(down_kernel.dtype), down_kernel), back)
  return jnp.sum(weights[..., None] * y.reshape(N, k, -1), axis=1)
