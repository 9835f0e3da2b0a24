"""Conversion of a language model into one with other mixers, layer by layer."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import GLA, SSE
from lnssm_jax.models import layers
from lnssm_jax.models.language_model import LanguageModel

# Of two different mixers these mean the same: W_q, W_k, W_v, W_o, heads next to each other.
SHARED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# {(class before, class after): {parameter: the one before that means the same}}. Partitions of an
# SSE decay as a GLA does.
FURTHER = {
  (GLA, SSE): {
    f"{gates}/{name}": before
    for gates in ("always_gates", "sparse_gates")
    for name, before in (
      ("down_proj/kernel", "decay_down_proj/kernel"),
      ("up_kernel", "decay_up_proj/kernel"),
      ("up_bias", "decay_up_proj/bias"),
    )
  }
  | {name: name for name in ("g_proj/kernel", "norm/scale")}
}


def replace_mixers(
  source: LanguageModel, target: LanguageModel
) -> tuple[LanguageModel, list[list[str]]]:
  """Continues a model with other mixers in some layers, such as a Transformer as a hybrid.

      target = LanguageModel(mixer=("sse",) * 5 + ("softmax_attention",), ...)  # newly initialized
      model, new = replace_mixers(transformer, target)

  A parameter of `source` is kept where `target` has one of the same name and shape: those outside
  the layers, norms, channel mixers, and in a layer whose mixer is of the same class all of the
  mixer's. In a layer whose mixer is replaced, the projections q_proj, k_proj, v_proj and o_proj are
  kept if their shapes are equal; those of grouped heads of keys and values are repeated for each
  head of queries where the target has as many. Of a GLA that becomes an SSE also the gates of the
  decays, of which both kinds of partitions get a copy, the norm's scale, and with
  output_gate="full" W_g. All other parameters are those of `target`.

  Returns:
    (`target` with the kept parameters, for each layer the names of those that are `target`'s own).

  Raises:
    ValueError: the models differ in depth, or in a parameter outside the mixers; the message names
      the first.

  Source: the conversions of SSE (Pan et al. 2025), section 5, which replace the softmax attention
  of a trained Transformer; what is kept there is not said.
  """
  if source.num_layers != target.num_layers:
    raise ValueError(
      f"source has num_layers={source.num_layers} and target num_layers={target.num_layers}; a "
      "layer is continued by the layer in its place, so give the target as many."
    )
  L, (graph, state) = target.num_layers, nnx.split(target, nnx.Param)
  new = nnx.to_pure_dict(state)
  old = nnx.to_pure_dict(nnx.state(source, nnx.Param))
  for name in new.keys() - {"blocks"}:
    new[name] = _kept(old.get(name), new[name], name)
  by_layer, own = [], []
  pairs = zip(layers.apart(source.blocks, L), layers.apart(target.blocks, L), strict=True)
  for layer, (before, after) in enumerate(pairs):
    given, block = (nnx.to_pure_dict(nnx.state(b, nnx.Param)) for b in (before, after))
    names: list[str] = []
    for name in block.keys() - {"mixer"}:
      block[name] = _kept(given.get(name), block[name], f"{name} of layer {layer}")
    block["mixer"] = _kept_of_mixer(
      given["mixer"], block["mixer"], before.mixer, type(after.mixer), names
    )
    by_layer.append(block)
    own.append(sorted(names))
  new["blocks"] = _stacked(new["blocks"], by_layer)
  return nnx.merge(graph, new), own


def _kept(old: Any, new: Any, name: str) -> Any:
  """`old`, which must have the structure and the shapes of `new`; in its dtypes."""
  shapes = [jax.tree.map(jnp.shape, tree) for tree in (old, new)]
  if shapes[0] != shapes[1]:
    raise ValueError(
      f"{name} has shapes {shapes[0]} in source and {shapes[1]} in target; only mixers can be "
      "replaced, so give the target the other settings of the source."
    )
  return jax.tree.map(lambda a, b: a.astype(b.dtype), old, new)


def _kept_of_mixer(old: Any, new: Any, before: Any, after: type, own: list[str]) -> Any:
  """The parameters of a mixer; adds the names of those that are new to `own`."""
  further, same_class = FURTHER.get((type(before), after), {}), type(before) is after
  groups = getattr(before, "num_kv_heads", None)

  def choose(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    shared = same_class or name.split("/")[0] in SHARED_PROJECTIONS
    found: Any = old
    for key in further.get(name, name).split("/") if shared or name in further else ():
      found = found.get(key) if isinstance(found, dict) else None
    if found is None or isinstance(found, dict):
      own.append(name)
      return leaf
    if groups and not same_class and name.split("/")[0] in ("k_proj", "v_proj"):
      heads = found.reshape(*found.shape[:-1], groups, -1)
      repeated = jnp.repeat(heads, before.num_heads // groups, axis=-2)
      repeated = repeated.reshape(*found.shape[:-1], -1)
      found = repeated if repeated.shape == leaf.shape else found
    # A single set of gates has an axis of memories.
    shape = leaf.shape[1:] if name in further and leaf.shape[0] == 1 else leaf.shape
    if jnp.shape(found) != shape:
      own.append(name)
      return leaf
    return found.astype(leaf.dtype).reshape(leaf.shape)

  return jax.tree_util.tree_map_with_path(choose, new)


def _stacked(like: Any, by_layer: list[Any]) -> Any:
  """The layers' parameters stacked as in `like`: all, or those of each place of a pattern."""
  stack = lambda *leaves: jnp.stack(leaves)
  places = [str(place) for place in range(len(like))]
  if set(like) != set(places):
    return jax.tree.map(stack, *by_layer)
  count = len(places)
  return {place: jax.tree.map(stack, *by_layer[int(place) :: count]) for place in places}
