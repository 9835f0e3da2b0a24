"""Mixtures of experts: which experts a token selects, and their products, without dropped tokens.

Axis letters: N tokens, D channels, E experts, k experts of a token, F hidden channels of an expert.

Rows are sorted by expert and padded to blocks of one expert each, whose products are one batched
product: no token is dropped, however many select an expert. `jax.lax.ragged_dot` is not used: for a
GPU XLA masks all rows for each expert, with E times the memory. With experts sharded over the mesh
axis `AXIS`, whose devices hold other tokens each, a device gathers the tokens of all of them,
computes its own experts, and the sums are scattered back. Per layer and pass each device sends and
receives D numbers per token of the others twice, and has room and products for the k rows of all
their tokens: memory and products do not fall with the number of shards.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lnssm_jax.mixers.common.routing import Aux, balance, is_selected
from lnssm_jax.ops.core.precision import wide

AXIS = "expert"
NUM_EXPERTS = 8  # of a mixture whose options do not say
# Kept for the backward pass; rows and copies of kernels are made again.
_PRODUCT = "product of experts"
_PRODUCTS = jax.checkpoint_policies.save_only_these_names(_PRODUCT)
_LARGEST_BLOCK = 512  # rows; each block reads its expert's kernel


class Router(NamedTuple):
  """How scores become a selection; `MixtureOfExperts` has the meaning of its options."""

  kind: str
  experts_per_token: int
  weight_eps: float | None  # None: weights are the scores
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
    if self.weight_eps is not None:
      weights = weights / (weights.sum(-1, keepdims=True) + self.weight_eps)
    mass = scores / scores.sum(-1, keepdims=True) if sigmoid else scores
    aux = balance(mass, is_selected(indices, E), coefficient=self.balance)
    if bias is not None:  # adds 0, with the gradient that the optimizer takes the sign of
      excess = jnp.sum(wide(bias) * jax.lax.stop_gradient(aux.share - k / E))
      aux = aux._replace(loss=aux.loss + excess - jax.lax.stop_gradient(excess))
    return self.weight_scale * weights, indices, aux


def mixture(
  kernels: tuple[jax.Array, ...],
  activation: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  weights: jax.Array,
  indices: jax.Array,
  num_experts: int,
) -> jax.Array:
  """sum_j weights_j W_down (activation(W_gate x) * W_up x) over a token's experts, float32 [N, D].

  Args:
    kernels: W_gate, W_up [E, D, F] and W_down [E, F, D], or no W_gate for W_down activation(W_up
      x); inside `jax.shard_map` over `AXIS`, those of this device's experts. Products are in their
      dtype, with float32 sums.
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
  rows = N * k
  expert = jnp.where((indices >= 0) & (indices < count), indices, count).reshape(-1)
  order = jnp.argsort(expert, stable=True)
  sizes = (expert[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)

  # Blocks that are half full on average have few rows of padding, and few blocks read a kernel.
  size = min(_LARGEST_BLOCK, 1 << max(0, rows // count - 1).bit_length())
  num_blocks = min(rows, rows // size + count)
  of_expert = -(-sizes // size)  # blocks
  last = jnp.cumsum(of_expert)
  owner = jnp.searchsorted(last, jnp.arange(num_blocks), side="right")  # count: an unused block
  start, first = jnp.cumsum(sizes) - sizes, size * (last - of_expert)  # rows, in order and in place
  place = jnp.arange(num_blocks * size)
  of_place = jnp.broadcast_to(owner[:, None], (num_blocks, size)).reshape(-1)
  used, of_place = of_place < count, jnp.minimum(of_place, count - 1)
  rank = place - first[of_place]
  filled = used & (rank < sizes[of_place])
  # Out of bounds, each place another number: those are 0, and their gradients go nowhere.
  source = jnp.where(filled, order[jnp.minimum(start[of_place] + rank, rows - 1)], rows + place)
  here = jnp.minimum(expert, count - 1)
  target = jnp.argsort(order) - start[here] + first[here]
  target = jnp.where(expert < count, target, len(place) + jnp.arange(rows))

  # Permutations, whose transposes are no sums: a GPU adds up scattered rows in any order.
  take = lambda x, at: x.at[at].get(unique_indices=True, mode="fill", fill_value=0)
  is_of = (owner[:, None] == jnp.arange(count)).astype(kernels[0].dtype)

  def product(blocks, kernel):
    """[blocks, rows, D] with the kernel of each block's expert; the sums over blocks in order."""
    result = jnp.einsum("brd,bdf->brf", blocks, jnp.einsum("be,edf->bdf", is_of, kernel))
    return checkpoint_name(result, _PRODUCT)

  @functools.partial(jax.checkpoint, policy=_PRODUCTS)
  def outputs(kernels, x):
    *into, down_kernel = kernels
    copies = jnp.broadcast_to(x[:, None], (N, k, x.shape[-1])).reshape(rows, -1)
    blocks = take(copies.astype(down_kernel.dtype), source).reshape(num_blocks, size, -1)
    hidden, *up = (product(blocks, kernel) for kernel in into)
    hidden = activation(hidden) * up[0] if up else activation(hidden)
    y = product(hidden.astype(down_kernel.dtype), down_kernel)
    return take(y.reshape(len(place), -1), target).reshape(N, k, -1)

  return jnp.sum(weights[..., None] * outputs(kernels, x), axis=1)
