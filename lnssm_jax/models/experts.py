"""Mixtures of experts: which experts a token selects, and their products, without dropped tokens.

Axis letters: N tokens, D channels, E experts, k experts of a token, F hidden channels of an expert.

Rows are ordered by expert, and each is multiplied with the kernels of its expert: no token is
dropped, however many select an expert. On a Hopper GPU, in bfloat16, JAX's own kernels multiply
them (`pallas_kernels.grouped_products`). Elsewhere rows are padded to blocks of one expert each,
whose products are one batched product. `jax.lax.ragged_dot` is not used: for a GPU XLA masks all
rows for each expert, with E times the memory. With experts sharded over the mesh axis `AXIS`, whose
devices hold other tokens each, a device gathers the tokens of all of them, computes its own
experts, and the sums are scattered back: per layer and pass each device sends and receives D
numbers per token of the others twice. A device has room for `_ROOM` times its even share of the
rows; if more select its experts, it computes in room for all rows of all devices, which takes
longer and is as exact. To send each row to its expert alone (`jax.lax.ragged_all_to_all`) would be
less only with more devices than experts of a token.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lnssm_jax.mixers.common.routing import Aux, balance, is_selected
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.recording import chose_xla
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core import device
from pallas_kernels.core.gradients import custom_vjp, no_gradient

AXIS = "expert"
NUM_EXPERTS = 8  # of a mixture whose options do not say
# Kept for the backward pass; rows and copies of kernels are made again.
_PRODUCT = "product of experts"
_PRODUCTS = jax.checkpoint_policies.save_only_these_names(_PRODUCT)
_LARGEST_BLOCK = 512  # rows; each block reads its expert's kernel
_ROOM = 1.25  # of a device for rows, in even shares of all rows
_ROWS = 8  # a multiple of them is what JAX's kernels read


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


def product_of(
  activation: Callable[[jax.Array], jax.Array], gate: jax.Array, up: jax.Array, limit: float | None
) -> jax.Array:
  """activation(gate) * up, with a limit min(activation(gate), limit) * clip(up, -limit, limit)."""
  hidden = activation(gate)
  if limit is not None:
    hidden, up = jnp.minimum(hidden, limit), jnp.clip(up, -limit, limit)
  return hidden * up


def mixture(
  kernels: tuple[jax.Array, ...],
  activation: Callable[[jax.Array], jax.Array],
  x: jax.Array,
  weights: jax.Array,
  indices: jax.Array,
  num_experts: int,
  limit: float | None = None,
) -> jax.Array:
  """sum_j W_down (weights_j activation(W_gate x) * W_up x) over a token's experts, [N, D].

  Args:
    kernels: W_gate, W_up [E, D, F] and W_down [E, F, D], or no W_gate for W_down activation(W_up
      x); inside `jax.shard_map` over `AXIS`, those of this device's experts. Products and the
      result are in their dtype, sums in float32.
    x: [N, D].
    weights, indices: [N, k], of all E = `num_experts`.
    limit: of the two factors, as of `product_of`.
  """
  shards = num_experts // len(kernels[0])
  if shards == 1:
    return _of_these(kernels, activation, limit, x, weights, indices)
  gathered = (jax.lax.all_gather(a, AXIS, tiled=True) for a in (x, weights, indices))
  x, weights, indices = gathered
  indices = indices - len(kernels[0]) * jax.lax.axis_index(AXIS)
  y = _of_these(kernels, activation, limit, x, weights, indices, shards)
  y = jax.lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)
  return y.astype(kernels[0].dtype)


def _of_these(kernels, activation, limit, x, weights, indices, shards=1):
  """`mixture` of the experts 0, 1, .. of `kernels`; other indices, of other devices, add 0.

  Of several shards in the dtype of `weights`, as these are terms of a sum.
  """
  rows, count, dtype = indices.size, len(kernels[0]), kernels[0].dtype
  room = min(rows, math.ceil(_ROOM * rows / shards))
  # Counted, not sorted: XLA compiles each sort of a program by itself, for a second.
  is_of = indices.reshape(-1, 1) == jnp.arange(count)
  seen = jnp.cumsum(is_of, axis=0, dtype=jnp.int32)
  sizes = seen[-1]
  grouped_product = _grouped_product(room, count, kernels[0].shape[1:], dtype)
  if grouped_product is not None:
    first, groups = jnp.cumsum(sizes) - sizes, sizes
    places_of = lambda rows: -(-rows // _ROWS) * _ROWS

    def multiply(x, kernel, sizes):
      # The last expert multiplies the rows of other devices and of padding, too: zeros.
      all_rows = sizes.at[-1].add(len(x) - sizes.sum())
      return grouped_product(*vary_alike((x, kernel, all_rows)))
  else:
    first, groups, places_of, multiply = _blocks(sizes, rows, room, dtype)
  places = places_of(rows)

  row = jnp.arange(rows)
  target = jnp.sum(jnp.where(is_of, first + seen - 1, 0), axis=1)
  # Out of bounds, each row and each place another number: those are 0, without a gradient.
  target = jnp.where(is_of.any(1), target, places + row)
  source = (rows + jnp.arange(places)).at[target].set(row, mode="drop", unique_indices=True)

  result_dtype = dtype if shards == 1 else weights.dtype
  products = _Products(activation, limit, len(kernels) == 3, result_dtype, multiply)
  arrays = jnp.concatenate(kernels[:-1], axis=-1), kernels[-1], x, weights
  order = source, target, groups
  if room == rows:
    return products(order, *arrays)
  fits = sizes.sum() <= room
  return _in_room(products, places_of(room))(*vary_alike((fits, order, *arrays)))


class _Products(NamedTuple):
  """The products of experts, and rows moved to the places of an order and back.

  An order is (the row of each place, the place of each row, the groups of `multiply`).
  """

  activation: Callable[[jax.Array], jax.Array]
  limit: float | None
  is_gated: bool
  dtype: jax.typing.DTypeLike  # of the outputs' sums over experts
  multiply: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

  def into(self, order, kernel, x):
    """Gates and hidden channels [places, 2 F] of tokens."""
    source, target, groups = order
    k = len(target) // len(x)
    copies = jnp.broadcast_to(x[:, None], (len(x), k, x.shape[-1])).reshape(len(target), -1)
    return self.multiply(_moved(copies.astype(kernel.dtype), source, target), kernel, groups)

  def out(self, order, into, kernel, weights):
    """Outputs [N, D] of those."""
    source, target, groups = order
    if self.is_gated:
      gate, up = jnp.split(into, 2, axis=-1)
      hidden = product_of(self.activation, gate, up, self.limit)
    else:
      hidden = self.activation(into)
    # Weighted here, where rows are narrow; then no gradient needs the last products.
    hidden = _moved(weights.reshape(-1, 1), source, target) * hidden
    y = _moved(self.multiply(hidden.astype(kernel.dtype), kernel, groups), target, source)
    y = jnp.sum(y.reshape(*weights.shape, -1).astype(weights.dtype), axis=1)
    return y.astype(self.dtype)

  def __call__(self, order, into_kernel, down_kernel, x, weights):
    """`out` of `into`, which is kept for the backward pass."""

    @functools.partial(jax.checkpoint, policy=_PRODUCTS)
    def outputs(into_kernel, down_kernel, x, weights):
      into = checkpoint_name(self.into(order, into_kernel, x), _PRODUCT)
      return self.out(order, into, down_kernel, weights)

    return outputs(into_kernel, down_kernel, x, weights)


def _in_room(products, places):
  """`products` in the first `places`, where all rows fit, and in all places elsewhere.

  Of both nothing is kept for the backward pass but the inputs, and gates and hidden channels in the
  first `places`. Derived by JAX the branches would return copies of their inputs, too.
  """

  def of_room(order):
    return order[0][:places], *order[1:]

  def forward(fits, order, *arrays):
    def in_room(order, into_kernel, down_kernel, x, weights):
      order = of_room(order)
      into = products.into(order, into_kernel, x)
      return products.out(order, into, down_kernel, weights), into

    def in_all(order, *arrays):
      into_kernel = arrays[0]
      none = jnp.zeros((places, into_kernel.shape[-1]), into_kernel.dtype)
      return vary_alike((products(order, *arrays), none))

    y, into = jax.lax.cond(fits, in_room, in_all, order, *arrays)
    return y, (fits, order, into, arrays)

  def backward(residuals, cotangent):
    fits, order, into, arrays = residuals
    cotangent = cotangent.astype(into.dtype)  # that of every expert's output

    def in_room(cotangent, into, order, into_kernel, down_kernel, x, weights):
      order = of_room(order)
      of_out = jax.vjp(functools.partial(products.out, order), into, down_kernel, weights)[1]
      into_bar, down_bar, weights_bar = of_out(cotangent.astype(products.dtype))
      of_into = jax.vjp(functools.partial(products.into, order), into_kernel, x)[1]
      into_kernel_bar, x_bar = of_into(into_bar)
      return into_kernel_bar, down_bar, x_bar, weights_bar

    def in_all(cotangent, into, order, *arrays):
      of_all = jax.vjp(functools.partial(products, order), *arrays)[1]
      return of_all(cotangent.astype(products.dtype))

    gradients = jax.lax.cond(fits, in_room, in_all, cotangent, into, order, *arrays)
    return *no_gradient((fits, order)), *gradients

  outputs = custom_vjp(lambda *given: forward(*given)[0])
  outputs.defvjp(forward, backward)
  return outputs


def _grouped_product(rows, count, widths, dtype):
  """JAX's kernels for groups of rows, imported where a GPU has them; None if they do not fit."""
  reason = device.unsupported()
  if reason is None:
    from pallas_kernels.grouped_products import kernel

    reason = kernel.unsupported(rows, count, widths, dtype)
    if reason is None:
      return kernel.grouped_product
  chose_xla("mixture of experts", reason)
  return None


def _blocks(sizes, rows, room, dtype):
  """(place of each expert's first row, groups, places of rows, product) in blocks of one expert."""
  count = len(sizes)
  # Blocks that are half full on average have few rows of padding, and few blocks read a kernel.
  size = min(_LARGEST_BLOCK, 1 << max(0, room // count - 1).bit_length())
  num_blocks = lambda rows: min(rows, rows // size + count)
  of_expert = -(-sizes // size)  # blocks
  last = jnp.cumsum(of_expert)
  owner = jnp.searchsorted(last, jnp.arange(num_blocks(rows)), side="right")  # count: unused

  def product(x, kernel, owner):
    """With copies of the kernel of each block's expert; their gradients are summed in order."""
    blocks = x.reshape(-1, size, x.shape[-1])
    is_of = (owner[: len(blocks), None] == jnp.arange(count)).astype(dtype)
    result = jnp.einsum("brd,bdf->brf", blocks, jnp.einsum("be,edf->bdf", is_of, kernel))
    return result.reshape(len(x), -1)

  return size * (last - of_expert), owner, lambda rows: size * num_blocks(rows), product


@custom_vjp
def _moved(x, source, target):
  """x[source], 0 where that is out of bounds; the row x[i] is at target[i], or nowhere.

  The gradient is a gather, too: a GPU adds up scattered rows in any order.
  """
  return x.at[source].get(unique_indices=True, mode="fill", fill_value=0)


def _moved_back(residuals, cotangent):
  source, target = residuals
  return _moved(cotangent, target, source), *no_gradient((source, target))


_moved.defvjp(lambda x, *places: (_moved(x, *places), places), _moved_back)
