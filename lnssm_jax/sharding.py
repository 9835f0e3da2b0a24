"""Sharding of parameters over a mesh: rules by parameter path, no annotations inside the modules.

    shapes = jax.eval_shape(init, key)                       # a nested dictionary of parameters
    shardings = sharding.shardings(shapes, mesh)             # the same tree of NamedShardings
    params = jax.jit(init, out_shardings=shardings)(key)     # never whole on one device

A parameter's path is its keys joined by "/", such as "blocks/mixer/q_proj/kernel". The first rule
whose regular expression matches the end of the path gives the layout of the last axes; a leading
axis L of stacked layers is never sharded. Because only the end counts, the same rules serve the
moments of an optimizer, whose paths end like those of the parameters.

The rules shard every matrix along the model's width over the mesh axis "fsdp": each device holds a
shard of each layer, and gathers a layer when it runs. The other axis, heads or the channels of
channel mixers, is sharded over "tensor": each device computes with its shard, and the products that
reduce over it are summed. Experts are sharded over "expert" (`lnssm_jax.models.experts`), and over
"fsdp" as matrices are. Vectors are replicated.

`RULES` is by the names that all mixers share. A mixer states rules for others in its class
(`Mixer.sharding`); a name then means the same in every mixer.
"""

import functools
import math
import re
from collections.abc import Sequence

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.base import Layout

Rules = Sequence[tuple[str, Layout]]

_BOTH = ("tensor", "fsdp")
RULES: Rules = (
  (r"positions", (None, _BOTH)),  # [length, D]
  (r"embedding", (None, _BOTH)),  # [vocab, D]; a vocabulary seldom divides evenly, D does
  (r"head/kernel", (_BOTH, None)),  # [D, vocab]
  (r"lora_[ab]", (None, None)),  # factors of low rank
  (r"channel_mixer/(up|gate)/kernel", ("fsdp", "tensor")),  # [D, hidden]
  (r"channel_mixer/down/kernel", ("tensor", "fsdp")),  # [hidden, D]
  (r"channel_mixer/experts/(up|gate)/kernel", ("expert", "fsdp", None)),  # [E, D, hidden]
  (r"channel_mixer/experts/down/kernel", ("expert", None, "fsdp")),  # [E, hidden, D]
  (r"channel_mixer/shared/(up|gate)/kernel", ("fsdp", "tensor")),  # [D, hidden]
  (r"channel_mixer/shared/down/kernel", ("tensor", "fsdp")),  # [hidden, D]
  (r"channel_mixer/(router|shared_gate|latent_down)/kernel", ("fsdp", None)),  # [D, any]
  (r"channel_mixer/latent_up/kernel", (None, "fsdp")),  # [any, D]
  (r"mixer/o_proj/kernel", ("tensor", "fsdp")),  # [heads, D]
  (r"mixer/(dt|beta|\w+_up)_proj/kernel", (None, _BOTH)),  # [any, D]
  (r"mixer/router_proj/kernel", ("fsdp", None)),  # [D, any]
  (r"mixer/x_proj/kernel", (_BOTH, None)),  # [channels, any]; SSD's are 1 + 2 N, which is odd
  (r"mixer/\w+_gates/up_kernel", (None, None, _BOTH)),  # [memories, rank, D]
  (r"mixer/\w+_gates/down_proj/kernel", ("fsdp", None)),  # [D, any]
  (r"mixer/\w+_gates/\w+_proj/kernel", ("fsdp", "tensor")),  # [D, heads]
  (r"mixer/\w+_proj/kernel", ("fsdp", "tensor")),  # [D, heads]
  (r"mixer/\w*conv/kernel", (None, "fsdp")),  # [W, D]
  (r"mixer/filter/layer\d+/kernel", (None, "fsdp")),  # [any, D]
  (r"mixer/a_log", ("fsdp", None)),  # [D, N]
  (r"channel_mixer/(mu_[a-z]|(up|gate|down)/bias)", (None,)),
  (r"\w*norm/(scale|bias)", (None,)),
  (r"mixer/(\w+_gates/)?((\w*conv|\w+_gate|\w+_proj)/bias|up_bias|log_rate)", (None,)),
  (r"mixer/filter/layer\d+/bias", (None,)),
  (r"mixer/(theta|alpha|log_dt|pole_log|pole_imag|p_real|p_imag|b_real|b_imag)", (None,)),
  (
    r"mixer/(mu_[a-z]|gamma|w|u|skip|(fixed_)?log_rate|decay_(rate|logit)|bound|\w+_(bias|gain))",
    (None,),
  ),
)

# Paths of matrices that do not decay: of the recurrence, where a decay would move poles and output
# maps, and positions. The published codes leave them out too (S4, S4D, DSS, Mamba).
WITHOUT_WEIGHT_DECAY = (
  r"mixer/((forward|backward)/)?(a_log|a_imag|c_real|c_imag|log_dt|decay_weight)",
  r"positions",
)


def has_weight_decay(params, *, stacked: str = "blocks"):
  """Whether weight decay acts on each leaf of `params`: the same tree of bools.

  It does on matrices, of rank 2 or more in their layer, but for those of `WITHOUT_WEIGHT_DECAY` and
  of `Mixer.without_weight_decay`; not on vectors: biases, norms, decays, step sizes, skips.

  Args:
    params: a nested dictionary of arrays or of their shapes.
    stacked: the key below which all leaves have a leading axis of layers.
  """

  own = [rf"mixer/({rule})" for mixer in MIXERS.values() for rule in mixer.without_weight_decay]
  without = (*WITHOUT_WEIGHT_DECAY, *own)

  def decide(path, leaf):
    keys = [_key(entry) for entry in path]
    rank = len(leaf.shape) - (stacked in keys)
    name = "/".join(keys)
    return rank >= 2 and not any(re.search(rf"(^|/)({r})$", name) for r in without)

  return jax.tree_util.tree_map_with_path(decide, params)


def param_specs(params, axes: Sequence[str] = ("fsdp",), rules: Rules = RULES):
  """A `PartitionSpec` for each leaf of `params`, a nested dictionary of arrays or of their shapes.

  A mesh axis that a rule names but `axes` does not hold is left out, so that one table serves every
  mesh. Rules that mixers state come after the others. Leaves without a rule are replicated if they
  have rank 0 or 1, without the axis of layers below "blocks".

  Raises:
    ValueError: a leaf of rank 2 or more has no rule (replicating it in silence could cost the
      memory that sharding was to save), or fewer axes than its rule; the message gives its path.
  """

  own = [(rf"mixer/({rule})", x) for mixer in MIXERS.values() for rule, x in mixer.sharding]
  rules = (*rules, *own)

  def spec(path, leaf):
    keys = [_key(entry) for entry in path]
    name, rank = "/".join(keys), len(leaf.shape)
    layout = next((layout for rule, layout in rules if re.search(rf"(^|/)({rule})$", name)), None)
    if layout is None:
      if rank - ("blocks" in keys) >= 2:
        raise ValueError(
          f"no sharding rule for parameter {name!r} of shape {leaf.shape}; state one in its mixer's"
          f" class, Mixer.sharding, or add it to the rules: ((r'{re.escape(name)}', ('fsdp', "
          "None)), *sharding.RULES)."
        )
      return PartitionSpec()
    if rank < len(layout):
      raise ValueError(
        f"parameter {name!r} has shape {leaf.shape}, but its sharding rule {layout} is for at "
        f"least {len(layout)} axes."
      )
    kept = [_kept(entry, axes) for entry in layout]
    return PartitionSpec(*[None] * (rank - len(kept)), *kept)

  return jax.tree_util.tree_map_with_path(spec, params)


def shardings(params, mesh: Mesh, rules: Rules = RULES):
  """A `NamedSharding` on `mesh` for each leaf of `params`, by the same rules.

  Raises:
    ValueError: as `param_specs`, or an axis of a leaf does not divide evenly over its mesh axis.
  """
  specs = param_specs(params, axes=mesh.axis_names, rules=rules)

  def place(path, leaf, spec):
    for size, entry in zip(leaf.shape, spec, strict=False):
      axes = (entry,) if isinstance(entry, str) else entry or ()
      count = math.prod(mesh.shape[axis] for axis in axes)
      if size % count:
        name = "/".join(_key(entry) for entry in path)
        raise ValueError(
          f"parameter {name!r} has shape {leaf.shape}, whose axis of {size} does not divide evenly "
          f"over the {count} devices of mesh axis {' x '.join(map(repr, axes))}; choose another "
          "mesh."
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(
    place, params, specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
  )


def gather(params, axis_name: str, rules: Rules = RULES):
  """Gathers parameters that are sharded over a mesh axis.

      def loss(params, tokens):  # inside jax.shard_map, with in_specs=param_specs(params)
        ends = gather({name: params[name] for name in params if name != "blocks"}, "fsdp")
        model = nnx.merge(graph, params | ends)
        hidden, _ = model.hidden(tokens, gather=functools.partial(gather, axis_name="fsdp"))

  Its transpose sums the gradients over the devices and leaves each its own shard, which is then
  summed over the other mapped axes. A module's `nnx.Linear` kernels are gathered in the dtype of
  their products, to which the layer would round them anyway.

  Args:
    params: the shards, as a nested dictionary or a module, such as a `Block`.

  Raises:
    ValueError: as `param_specs`.
  """
  if isinstance(params, nnx.Module):
    graph, parts = _parts_in_dtype(params)
    return nnx.merge(graph, gather(parts, axis_name, rules))

  mesh = jax.sharding.get_abstract_mesh()
  mapped = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1]

  def whole(part, spec):
    if axis_name not in spec:
      return part
    # Before the gather, so that the sum over the other axes is one of shards.
    other = tuple(axis for axis in mapped if axis not in jax.typeof(part).manual_axis_type.varying)
    part = jax.lax.pcast(part, other, to="varying") if other else part
    return jax.lax.all_gather(part, axis_name, axis=tuple(spec).index(axis_name), tiled=True)

  return jax.tree.map(whole, params, param_specs(params, (axis_name,), rules))


# Sharding of parameters where they are used in a program that the compiler partitions.
RULES_IN_USE: Rules = (
  (r"embedding", (None, None)),  # else every layer's input would be sharded, and gathered
  (r"head/kernel", (None, "tensor")),  # each device has some of the logits
  *RULES,
)


def constrain(params, mesh: Mesh, axes: Sequence[str] = ("tensor",), rules: Rules = RULES_IN_USE):
  """Constrains parameters to their sharding in use, in a program that the compiler partitions.

  The counterpart of `gather` outside `jax.shard_map`: passed to `LanguageModel.hidden`, it has the
  compiler gather each layer over all mesh axes but `axes` when it runs.

  Args:
    params: a nested dictionary or a module.

  Raises:
    ValueError: as `param_specs`.
  """
  if isinstance(params, nnx.Module):
    graph, parts = _parts_in_dtype(params)
    return nnx.merge(graph, constrain(parts, mesh, axes, rules))
  # Inside shard_map over some of the axes, the mesh is the one that knows of it.
  surrounding = jax.sharding.get_abstract_mesh()
  where = mesh if surrounding.empty else surrounding
  place = lambda x, spec: jax.lax.with_sharding_constraint(x, NamedSharding(where, spec))
  # First gathered, then resharded: the compiler cannot do both at once.
  gathered = jax.tree.map(place, params, param_specs(params, axes))
  return jax.tree.map(place, gathered, param_specs(params, axes, rules))


def _parts_in_dtype(module):
  """The graph and the parameters of a module, kernels of `nnx.Linear` in the dtype of products."""
  graph, state = nnx.split(module)
  parts = nnx.to_pure_dict(state)
  for path, part in nnx.iter_modules(module):
    if isinstance(part, nnx.Linear) and part.dtype is not None:
      holder = functools.reduce(lambda tree, key: tree[key], path, parts)
      holder["kernel"] = holder["kernel"].astype(part.dtype)
  return graph, parts


def _kept(entry, axes):
  """One entry of a rule, with the mesh axes that there are."""
  if isinstance(entry, tuple):
    left = tuple(axis for axis in entry if axis in axes)
    return left if len(left) > 1 else (left[0] if left else None)
  return entry if entry in axes else None


def _key(entry) -> str:
  """One step of a path as text: a dictionary's key, an attribute's name, or an index."""
  for attribute in ("key", "name", "idx"):
    if hasattr(entry, attribute):
      return str(getattr(entry, attribute))
  return str(entry)
