"""Sharding rules: every parameter of the model has one, and a sharded model is the same model."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax import sharding
from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import CHANNEL_MIXERS, LanguageModel
from tests import devices
from tests.mixers.helpers import split
from tests.mixers.tiny import initial

PROGRAM = """
import json
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from lnssm_jax import sharding
from lnssm_jax.models import CHANNEL_MIXERS, LanguageModel

def build(key):
  return LanguageModel(vocab_size=37, dim=8, num_layers=2, num_heads=2, rngs=nnx.Rngs(key))

def init(key):
  return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

key = jax.random.key(0)
mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
placed = sharding.shardings(jax.eval_shape(init, key), mesh)
whole, sharded = jax.jit(init)(key), jax.jit(init, out_shardings=placed)(key)
distance = lambda a, b: float(abs(np.asarray(a) - np.asarray(b)).max())
kernel = sharded["blocks"]["mixer"]["v_proj"]["kernel"]
graphdef = nnx.graphdef(jax.eval_shape(build, key))
apply = jax.jit(lambda p: nnx.merge(graphdef, p)(jnp.arange(12).reshape(2, 6))[0])
print(json.dumps({
  "parameters": max(jax.tree.leaves(jax.tree.map(distance, whole, sharded))),
  "logits": distance(apply(whole), apply(sharded)),
  "shard": [s.data.shape for s in kernel.addressable_shards],
}))
"""


@functools.cache
def params(**sizes):
  sizes = {"vocab_size": 37, "dim": 8, "num_layers": 2, "num_heads": 2} | sizes
  return jax.eval_shape(lambda: split(LanguageModel(**sizes, rngs=nnx.Rngs(0)))[1])


def blocks_of_every_mixer():
  """{mixer: {"blocks": its parameters}}, from the mixers alone: rules match the ends of paths."""
  stacked = lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype)
  layers = {name: split(jax.eval_shape(lambda name=name: initial(name)))[1] for name in MIXERS}
  latent = {"kv_rank": 6, "q_rank": 6, "rotary_width": 2, "use_bias": True}
  build = lambda: initial("softmax_attention", **latent)
  layers["latent attention"] = split(jax.eval_shape(build))[1]
  return {name: {"blocks": {"mixer": jax.tree.map(stacked, p)}} for name, p in layers.items()}


def _axes_of_width(shape) -> tuple[int, int]:
  """The axis, as a range, of the model's width or a multiple, which 8 is; all axes if several."""
  axes = [axis for axis, size in enumerate(shape) if size % 8 == 0]
  return (axes[0], axes[0] + 1) if len(axes) == 1 else (0, len(shape))


def test_every_matrix_is_sharded_once_and_every_vector_is_replicated():
  trees = blocks_of_every_mixer() | {"model": params()}
  for name in ("gpt2", "swiglu"):
    mlp = CHANNEL_MIXERS[name]
    layer = jax.eval_shape(lambda mlp=mlp: mlp(8, hidden=24, use_bias=True, rngs=nnx.Rngs(0)))
    trees[name] = {"channel_mixer": split(layer)[1]}
  wrong = []
  for mixer, tree in trees.items():
    specs = jax.tree.leaves(sharding.param_specs(tree), is_leaf=lambda x: isinstance(x, P))
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    for (path, leaf), spec in zip(leaves, specs, strict=True):
      name = jax.tree_util.keystr(path)
      rank = len(leaf.shape) - ("blocks" in name)
      right = len(spec) == len(leaf.shape) and spec.count("fsdp") == int(rank >= 2)
      right = right and (rank < 2 or "fsdp" in spec[slice(*_axes_of_width(leaf.shape))])
      if not right or ("blocks" in name and spec[0] is not None):
        wrong.append((mixer, name, spec))
  assert wrong == []


def test_specs_of_a_model_over_fsdp():
  specs = sharding.param_specs(params())
  assert specs["embedding"] == P(None, "fsdp")
  assert specs["head"]["kernel"] == P("fsdp", None)
  assert specs["blocks"]["mixer"]["q_proj"]["kernel"] == P(None, "fsdp", None)
  assert specs["blocks"]["mixer"]["o_proj"]["kernel"] == P(None, None, "fsdp")
  assert specs["blocks"]["mixer"]["w"] == P(None, None)


def test_specs_of_a_model_over_fsdp_and_tensor():
  specs = sharding.param_specs(params(), axes=("fsdp", "tensor"))
  layer = specs["blocks"]
  assert specs["head"]["kernel"] == P(("tensor", "fsdp"), None)
  assert layer["mixer"]["q_proj"]["kernel"] == P(None, "fsdp", "tensor")
  assert layer["mixer"]["o_proj"]["kernel"] == P(None, "tensor", "fsdp")
  assert layer["channel_mixer"]["up"]["kernel"] == P(None, "fsdp", "tensor")
  assert layer["channel_mixer"]["down"]["kernel"] == P(None, "tensor", "fsdp")
  mesh = AbstractMesh((4, 4), ("fsdp", "tensor"))
  with pytest.raises(ValueError, match=r"axis of 8 .* 16 devices of mesh axis 'tensor' x 'fsdp'"):
    sharding.shardings(params(), mesh)


def test_gather_rounds_kernels_to_the_dtype_of_their_products():
  """Which it would round its kernels to anyway; what it reads in float32 stays so."""
  mesh = AbstractMesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
  sizes = {"vocab_size": 37, "dim": 8, "num_layers": 1, "num_heads": 2, "dtype": jnp.bfloat16}
  block = jax.eval_shape(lambda: LanguageModel(**sizes, rngs=nnx.Rngs(0)).blocks)
  graph, parts = split(block)
  gathered = lambda parts: split(sharding.gather(nnx.merge(graph, parts), "fsdp"))[1]
  specs = sharding.param_specs(parts)
  seen = {}

  def look(parts):
    seen.update(gathered(parts)["mixer"])
    return seen["q_proj"]["kernel"]

  jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(specs,), out_specs=P("fsdp")), parts)
  for name in ("q_proj", "o_proj"):
    kernel = seen[name]["kernel"]
    assert (kernel.dtype, kernel.shape) == (jnp.bfloat16, (1, 8, 8))
  assert seen["w"].dtype == jnp.float32


def test_specs_without_an_axis_leave_it_out():
  specs = sharding.param_specs(params(), axes=("data",))
  assert specs["head"]["kernel"] == P(None, None)


def test_specs_of_optimizer_moments_equal_those_of_parameters():
  memory = jax.eval_shape(optax.adam(1e-3).init, params())
  specs = sharding.param_specs(memory)
  assert specs[0].mu["blocks"]["mixer"]["q_proj"]["kernel"] == P(None, "fsdp", None)
  assert specs[0].count == P()


def test_matrix_without_a_rule_raises_and_vector_is_replicated():
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
  assert sharding.param_specs({"other": shape(8)}) == {"other": P()}
  tree = {"adapter": {"kernel": shape(8, 4)}}
  with pytest.raises(ValueError, match="no sharding rule for parameter 'adapter/kernel'"):
    sharding.param_specs(tree)
  rules = (("adapter/kernel", ("fsdp", None)), *sharding.RULES)
  assert sharding.param_specs(tree, rules=rules) == {"adapter": {"kernel": P("fsdp", None)}}


def test_rule_matches_whole_keys_only():
  with pytest.raises(ValueError, match="no sharding rule for parameter 'overhead/kernel'"):
    sharding.param_specs({"overhead": {"kernel": jax.ShapeDtypeStruct((8, 4), "float32")}})


def test_fewer_axes_than_the_rule_raise():
  with pytest.raises(ValueError, match=r"'head/kernel' has shape \(8,\).*at least 2 axes"):
    sharding.param_specs({"head": {"kernel": jax.ShapeDtypeStruct((8,), "float32")}})


def test_columns_that_all_channels_share_need_not_divide():
  """SSD projects to one number and twice N; its channels do divide."""
  mesh = AbstractMesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
  kernel = {
    "blocks": {"mixer": {"x_proj": {"kernel": jax.ShapeDtypeStruct((2, 32, 7), "float32")}}}
  }
  (placed,) = jax.tree.leaves(sharding.shardings(kernel, mesh))
  assert placed.spec == P(None, ("tensor", "fsdp"), None)


def test_uneven_sharding_raises():
  mesh = AbstractMesh((3,), ("fsdp",))
  message = r"axis of 8 does not divide evenly over the 3 devices of mesh axis 'fsdp'"
  with pytest.raises(ValueError, match=message):
    sharding.shardings(params(), mesh)


@pytest.mark.slow
def test_model_sharded_over_four_devices_is_equal():
  result = devices.result_of("-c", PROGRAM, devices=4)
  assert result["shard"] == [[2, 2, 8]] * 4
  assert result["parameters"] < 1e-6
  assert result["logits"] < 1e-5
