"""The layers of a model: blocks stacked for one scan, of one mixer or of a pattern of mixers.

Layer l has the mixer `pattern[l % len(pattern)]`. The blocks of one place in the pattern are one
`Block` whose leaves have a leading axis; with a pattern of one, that is the whole stack. The scan
runs whole patterns; the remaining layers of the last one follow it.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.routing import Aux
from lnssm_jax.models.block import Block, BlockState
from lnssm_jax.models.dropout import LayerDropout
from lnssm_jax.models.shared import AfterShared
from lnssm_jax.ops.core.dispatch import MADE_BY_KERNELS
from lnssm_jax.ops.core.states import register_state

# Residuals of a layer: everything that the backward pass uses; the layer's input only; or also the
# outputs of its projections (the matrix products without a batch axis) and of GPU kernels.
REMAT_POLICIES = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(MADE_BY_KERNELS),
  ),
}

# States of all layers: one with a leading axis L; of a pattern, one for each of its places, whose
# leading axis counts the layers there; of a model with learned positions, those and a counter.
type LayerStates = BlockState | list[BlockState] | PositionedStates
# Likewise auxiliary outputs; None for a mixer without.
type LayerAux = Aux | list[Aux | None] | None


@register_state
class PositionedStates(NamedTuple):
  """State of a model with learned positions."""

  layers: Any  # those of a model without positions
  position: jax.Array  # [1, B] int32, the number of tokens of the document so far


def make_blocks(
  build: Callable[[Any, jax.Array, jax.Array], Block],
  pattern: Sequence[Any],
  num_layers: int,
  key: jax.Array,
) -> Any:
  """A stacked `Block`, or for a longer pattern a dictionary of them by place, "0", "1", ...

  Args:
    build: makes the block of (element of the pattern, key, layer); it runs under `vmap`.
  """
  keys, numbers = jax.random.split(key, num_layers), jnp.arange(num_layers)
  period = len(pattern)
  stacks = [
    jax.vmap(lambda key, layer, mixer=mixer: build(mixer, key, layer))(
      keys[place::period], numbers[place::period]
    )
    for place, mixer in enumerate(pattern)
  ]
  if period == 1:
    return stacks[0]
  return nnx.Dict({str(place): stack for place, stack in enumerate(stacks)})


def init_state(blocks: Any, batch_size: int) -> LayerStates:
  """The state before the first token: a stacked one for each place of the pattern."""

  def stacked(stack):
    state = stack.init_state(batch_size)
    return jax.tree.map(lambda s: jnp.broadcast_to(s, (_count(stack), *s.shape)), state)

  return _like(blocks, [stacked(stack) for stack in _stacks(blocks)])


def run(
  blocks: Any,
  x: jax.Array,  # [B, T, D]
  state: LayerStates | None,
  segment_ids: jax.Array | None,
  *,
  dropout: LayerDropout | None = None,
  policy: Callable[..., bool] | None,
  unroll: int,
  shared: Any = None,
  gather: Callable[[Block], Block] | None = None,
  with_aux: bool = False,
  with_state: bool = True,
  with_streams: bool = False,
) -> tuple[jax.Array, LayerStates, LayerAux]:
  """Returns (x [B, T, D] after all layers, their states and auxiliary outputs, structured alike).

  Args:
    dropout: of all layers, with a leading axis L; None drops nothing.
    policy: of rematerialization; None keeps everything.
    unroll: layers per iteration of the loop.
    shared: the blocks that layers share (`shared_blocks`).
    gather: gathers the parameters of a layer that are sharded over devices. The backward pass
      gathers them again: gathered parameters are never residuals.
    with_aux, with_state: whether auxiliary outputs and states are returned; else they are None.
    with_streams: whether x is [L + 1, B, T, D], before the first layer and after each.
  """
  stacks = _stacks(blocks)
  states = [None] * len(stacks) if state is None else _stacks(state)
  # Of each place, the layers there.
  drops = [
    jax.tree.map(lambda leaf, n=n: leaf[n :: len(stacks)], dropout) for n in range(len(stacks))
  ]

  def some_layers(x, inputs):
    new = []
    for block, block_state, drop in inputs:
      block = given(block if gather is None else gather(block), gifts)
      if with_aux:
        x, block_state, aux = block.with_aux(x, block_state, segment_ids, dropout=drop)
      else:
        (x, block_state), aux = block(x, block_state, segment_ids, dropout=drop), None
      new.append((block_state if with_state else None, aux, x if with_streams else None))
    return x, new

  front, front_state = stacks[0], states[0]
  if hasattr(front.mixer, "first_values"):
    front, front_state = jax.tree.map(lambda leaf: leaf[0], (front, front_state))
    front = front if gather is None else gather(front)
  gifts = gifts_of(front, x, front_state, segment_ids, shared)
  inputs = list(zip(stacks, states, drops, strict=True))
  whole = _count(stacks[-1])
  rest = [place for place in inputs if _count(place[0]) > whole]
  turns = max(1, min(whole, unroll // len(stacks)))
  if gather is not None and policy is None:
    policy = _all_but_gathers
  if policy is not None:
    # The scan itself keeps forward and backward pass apart; prevent_cse would only cost time.
    # Outside of a loop, the two gathers of a layer would become one whose result is kept.
    alone = gather is not None and (turns == whole or bool(rest))
    some_layers = jax.checkpoint(some_layers, policy=policy, prevent_cse=alone)
  first = x
  x, new = jax.lax.scan(
    some_layers,
    x,
    jax.tree.map(lambda leaf: leaf[:whole], inputs) if rest else inputs,
    unroll=turns,
  )
  if rest:
    x, last = some_layers(x, jax.tree.map(lambda leaf: leaf[whole], rest))
    joined = lambda stack, one: jnp.concatenate([stack, one[None]])
    new[: len(rest)] = [jax.tree.map(joined, *pair) for pair in zip(new, last, strict=False)]
  new_states, aux, streams = zip(*new, strict=True)
  if with_streams:
    x = jnp.concatenate([first[None], _in_order(streams, whole)])
  return x, _like(blocks, list(new_states)), _like(blocks, list(aux))


class Gifts(NamedTuple):
  """Values that a model gives its layers besides the stream."""

  first_values: jax.Array | None  # of the first block, if its mixer mixes its values with them
  embedding: jax.Array | None  # the input of the first layer, with `shared`
  shared: Any  # the blocks that layers share, or None


def gifts_of(
  block: Block,
  x: jax.Array,
  state: BlockState | None,
  segment_ids: jax.Array | None,
  shared: Any = None,
) -> Gifts:
  """The gifts of layers of which `block` is the first, of one direction, and x its input.

  Its values are computed once more than needed: a scan over all layers could only carry them along,
  and would keep a copy per layer for the backward pass.
  """
  values = None
  if hasattr(block.mixer, "first_values"):
    of_mixer = None if state is None else state.mixer
    values = block.mixer.values(block.of_mixer(x), of_mixer, segment_ids)
  return Gifts(values, None if shared is None else x, shared)


def given(block: Block, gifts: Gifts) -> Block:
  """A block whose mixer has what its kind is given; the one passed in stays as it is."""
  mixes = gifts.first_values is not None and hasattr(block.mixer, "first_values")
  shares = gifts.shared is not None and isinstance(block.mixer, AfterShared)
  if mixes or shares:
    block = jax.tree.map(lambda leaf: leaf, block)
  if mixes:
    block.mixer.first_values = gifts.first_values
  if shares:
    block.mixer.shared = gifts.shared[str(block.mixer.block)]
    block.mixer.embedding = gifts.embedding
  return block


def aux_loss(aux: LayerAux) -> jax.Array | float:
  """The sum of the auxiliary losses of all layers; 0 if no mixer has one."""
  return sum(jnp.sum(stack.loss) for stack in _stacks(aux) if stack is not None)


def _all_but_gathers(primitive, *args, **params) -> bool:
  """A policy of rematerialization that keeps everything but gathered parameters.

  They are gathered by an all-gather, whose result may then be typed as varying along further axes,
  or, under GSPMD, by a sharding constraint. Complex numbers are not kept either: JAX 0.11 cannot
  keep them under a policy (it rounds residuals with `reduce_precision`).
  """
  if primitive.name in ("all_gather", "pvary", "sharding_constraint", "complex", "fft"):
    return False
  dtypes = [getattr(x, "dtype", None) for x in args] + [params.get("new_dtype")]
  return not any(x is not None and jnp.issubdtype(x, jnp.complexfloating) for x in dtypes)


def max_length(blocks: Any) -> int | None:
  """The longest sequence: the least `max_length` of the mixers that have one."""
  lengths = [getattr(stack.mixer, "max_length", None) for stack in _stacks(blocks)]
  return min((length for length in lengths if length is not None), default=None)


def have_dropout(blocks: Any) -> bool:
  """Whether a block drops values of branches, or its mixer attention probabilities."""
  mixers = lambda stack: getattr(stack.mixer, "attention_dropout", 0)  # None: no mixer
  return any(stack.residual_dropout or mixers(stack) for stack in _stacks(blocks))


def check_both_ways(blocks: Any) -> None:
  """Raises ValueError for mixers whose layers share a table: `tied` knows one direction."""
  for stack in _stacks(blocks):
    if stack.mixer.forward.tied is not None:
      raise ValueError(
        f"direction='both': layers of {type(stack.mixer.forward).__name__} share"
        f" {stack.mixer.forward.tied}, in one direction only; use another option of it."
      )


def tied(blocks: Any) -> Any:
  """The blocks to run: where mixers share a table over layers (`Mixer.tied`), their rows of it."""
  if all(getattr(stack.mixer, "tied", None) is None for stack in _stacks(blocks)):
    return blocks
  blocks = jax.tree.map(lambda x: x, blocks)  # the model keeps its table
  stacks = _stacks(blocks)
  places: dict[type[Mixer], list[int]] = {}
  for place, stack in enumerate(stacks):
    if getattr(stack.mixer, "tied", None) is not None:
      places.setdefault(type(stack.mixer), []).append(place)
  for kind, where in places.items():
    mixers = [stacks[place].mixer for place in where]
    parameters = [getattr(mixer, mixer.tied) for mixer in mixers]
    layers = [place + len(stacks) * np.arange(_count(stacks[place])) for place in where]
    order = np.argsort(np.concatenate(layers))
    rows = kind.tie(jnp.concatenate([x[...] for x in parameters])[order])[np.argsort(order)]
    ends = np.cumsum([len(numbers) for numbers in layers])[:-1]
    for mixer, parameter, own in zip(mixers, parameters, jnp.split(rows, ends), strict=True):
      parameter[...] = own
      mixer.tied = None
  return blocks


def apart(tree: Any, num_layers: int) -> list[Any]:
  """Splits stacked blocks, states or auxiliary outputs into a list with one tree per layer."""
  parts = [_stack_and_turn(tree, layer) for layer in range(num_layers)]
  return [jax.tree.map(lambda leaf, turn=turn: leaf[turn], stack) for stack, turn in parts]


def one(tree: Any, layer: int) -> Any:
  """The block, or the state, of one layer out of stacked ones, copied.

  Raises:
    ValueError: there is no such layer.
  """
  stack, turn = place(tree, layer)
  return jax.tree.map(lambda leaf: leaf[turn], stack)


def place(tree: Any, layer: int) -> tuple[Any, int]:
  """(the stack that has a layer, its index there); raises as `one`."""
  layers = sum(map(_count, _stacks(tree)))
  if not isinstance(layer, numbers.Integral) or not 0 <= layer < layers:
    last = f" Of the last one the number is {layers - 1}." if layer == -1 else ""
    raise ValueError(
      f"layer={layer!r} does not exist; there are {layers}, from 0 to {layers - 1}.{last}"
    )
  return _stack_and_turn(tree, int(layer))


def _stack_and_turn(tree: Any, layer: int) -> tuple[Any, int]:
  stacks = _stacks(tree)
  turn, number = divmod(layer, len(stacks))
  return stacks[number], turn


def _stacks(tree: Any) -> list[Any]:
  """The stacks by place: of blocks (a `Block` or a dictionary) or of states (or a list)."""
  if isinstance(tree, nnx.Dict):
    # `nnx.tabulate` adds an attribute of its own, which the length of the dictionary counts.
    return [tree[str(place)] for place in range(len(tree)) if str(place) in tree]
  return tree if isinstance(tree, list) else [tree]


def _count(stack: Any) -> int:
  """The number of layers in a stack of blocks, or of their states."""
  return jax.tree.leaves(stack)[0].shape[0]


def _in_order(stacks: Sequence[jax.Array], whole: int) -> jax.Array:
  """Arrays of all layers [L, ...] in order, from those of each place of the pattern [N, ...].

  There are `whole` repetitions of the pattern, and of the first places one layer more.
  """
  turns = jnp.stack([stack[:whole] for stack in stacks], axis=1)
  return jnp.concatenate([turns.reshape(-1, *turns.shape[2:]), *(s[whole:] for s in stacks)])


def _like(blocks: Any, stacks: list[Any]) -> Any:
  """Returns a single stack as it is, several as the list of them."""
  return stacks if isinstance(blocks, nnx.Dict) else stacks[0]
