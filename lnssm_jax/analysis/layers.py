"""The layers of a model one by one, each with the input that it gets."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.mixers import Mixer
from lnssm_jax.models import Block, LanguageModel, layers
from lnssm_jax.models.embedding import check_ids, check_tokens
from lnssm_jax.models.options import NONE, pattern_of
from lnssm_jax.ops.core.checks import check_shape
from lnssm_jax.ops.core.halo import step_positions

_NAME = "analysis"


def each_layer(
  function: Callable[..., Any],
  model: LanguageModel | Mixer,
  inputs: jax.Array | None,
  segment_ids: jax.Array | None = None,
  *,
  options: tuple[Any, ...] = (),
  only: int | None = None,
) -> list[Any]:
  """[function(mixer, x [B, T, D], segment_ids, *options) of each layer], from an empty state.

  Layers of one kind share a compiled program. Of one mixer it is a list of one.

  Args:
    function: of the module's top level, so that its program is found again.
    inputs: tokens [B, T] of a language model; x [B, T, D] of a mixer. None gives x = None.
    options: hashable.
    only: the one layer that is wanted.

  Raises:
    ValueError: `model` is neither, `inputs` do not fit it or are longer than its `max_length`, or
      there is no layer `only`.
  """
  static: dict[str, Any] = {"function": function, "options": options}
  if inputs is not None:
    inputs = checked_inputs(model, inputs, segment_ids)
  check_model(model)
  if isinstance(model, Mixer):
    if only not in (None, 0):
      raise ValueError(f"{_NAME}: layer={only!r} does not exist; a mixer is one layer, 0.")
    return [_of_mixer(model, inputs, segment_ids, **static)]
  blocks = layers.tied(model.blocks)
  if only is not None:
    layers.place(blocks, only)  # raises if it does not exist
  x = None if inputs is None else _embedded(model, inputs, segment_ids)
  results, gifts = [], layers.Gifts(None, None, None)
  if x is not None:
    gifts = _gifts(*layers.place(blocks, 0), x, segment_ids, model.shared)
  for number in range(model.num_layers if only is None else only + 1):
    wanted = static if only in (None, number) else {"function": _nothing, "options": ()}
    result, x = _of_block(*layers.place(blocks, number), x, gifts, segment_ids, **wanted)
    results.append(result)
  return results if only is None else results[-1:]


def names_of_mixers(model: LanguageModel | Mixer) -> str:
  """The classes of the mixers of all layers, for messages."""
  if isinstance(model, Mixer):
    return type(model).__name__
  stacks = [layers.place(model.blocks, number)[0] for number in range(model.num_layers)]
  return ", ".join(sorted({type(stack.mixer).__name__ for stack in stacks}))


def check_model(model: Any) -> None:
  """Raises `ValueError` unless `model` is a language model or a mixer."""
  if not isinstance(model, LanguageModel | Mixer):
    raise ValueError(
      f"{_NAME}: model is a {type(model).__name__}; give a LanguageModel (such as the `model` of "
      "what `load_model` returns) with tokens [B, T], or a mixer with x [B, T, D]."
    )
  if isinstance(model, LanguageModel) and NONE in pattern_of(model.config.mixer):
    raise ValueError(
      f"{_NAME}: model has layers without a mixer, mixer='none', which remember nothing; give the"
      " mixer of one layer, model.layer(number).mixer."
    )


def checked_inputs(model: Any, inputs: Any, segment_ids: Any = None) -> jax.Array:
  """The inputs as an array.

  Raises:
    ValueError: they do not fit the model, or a document, where its length is known, is longer than
      its `max_length`.
  """
  check_model(model)
  if isinstance(inputs, str):
    raise ValueError(
      f"{_NAME}: inputs={inputs!r:.50} is text; give tokens, such as"
      " jnp.array([loaded.tokenizer.encode(text)])."
    )
  inputs = jnp.asarray(inputs)
  rank, axes = (3, "[B, T, D]") if isinstance(model, Mixer) else (2, "[B, T]")
  check_shape(_NAME, "inputs", inputs, (None,) * rank, f"{axes} of a {type(model).__name__}")
  if isinstance(model, LanguageModel):
    check_tokens(_NAME, inputs, model.dim)
    check_ids(_NAME, inputs, model.vocab_size)  # compiled programs cannot look at them
  limit = getattr(model, "max_length", None)
  if limit is None or isinstance(segment_ids, jax.core.Tracer):
    return inputs
  B, T = np.shape(inputs)[:2]
  longest = T
  if segment_ids is not None:
    positions, _ = step_positions(B, T, jnp.asarray(segment_ids), None, axis_name=None)
    longest = int(jnp.max(positions)) + 1
  if longest > limit:
    raise ValueError(
      f"{_NAME}: a text of {longest} tokens is longer than the cache of the {type(model).__name__},"
      f" max_length={limit}; cut it, or build the model with a longer one."
    )
  return inputs


def mixer_states(model: Any, state: Any) -> list[Any]:
  """The state of each layer's mixer out of that of a model, or of a mixer."""
  if isinstance(model, Mixer):
    return [state]
  state = state.layers if isinstance(state, layers.PositionedStates) else state
  return [of_block.mixer for of_block in layers.apart(state, model.num_layers)]


@functools.partial(jax.jit, static_argnames=("function", "options"))
def _of_mixer(mixer, x, segment_ids, *, function, options):
  return function(mixer, x, segment_ids, *options)


@functools.partial(jax.jit, static_argnames=("function", "options"))
def _of_block(stack: Block, turn, x, gifts, segment_ids, *, function, options):
  block = layers.given(jax.tree.map(lambda leaf: leaf[turn], stack), gifts)
  if x is None:
    return function(block.mixer, None, segment_ids, *options), None
  after, _ = block(x, None, segment_ids)
  return function(block.mixer, block.of_mixer(x), segment_ids, *options), after


@jax.jit
def _gifts(stack: Block, turn, x, segment_ids, shared):
  block = jax.tree.map(lambda leaf: leaf[turn], stack)
  return layers.gifts_of(block, x, None, segment_ids, shared)


@jax.jit
def _embedded(model, tokens, segment_ids):
  B, T = tokens.shape
  positions, _ = step_positions(B, T, segment_ids, None, axis_name=None)
  return model.embed(tokens, positions)


def _nothing(mixer, x, segment_ids):
  del mixer, x, segment_ids
