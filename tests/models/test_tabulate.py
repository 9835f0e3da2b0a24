"""`nnx.tabulate` prints mixers and models, whose states are NamedTuples."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lnssm_jax import mixers, models, ops
from lnssm_jax.mixers import MIXERS
from tests.mixers.tiny import initial

X, TOKENS = jnp.ones((2, 3, 8)), jnp.zeros((2, 3), int)


def tabulate(module, *args) -> str:
  """The table as plain text."""
  table = nnx.tabulate(module, *args, console_kwargs={"width": 200})
  return re.sub(r"\x1b\[[0-9;]*m", "", table)


def test_tabulate_of_a_mixer_with_a_state_lists_its_parts():
  mixer = mixers.LNSSM(8, num_heads=2, rngs=nnx.Rngs(0))
  table = tabulate(mixer, X, mixer.init_state(2))
  assert "LNSSM Summary" in table and "q_proj" in table and "float32[2,2,4,4]" in table


@pytest.mark.slow
def test_tabulate_of_a_model_with_several_kinds_of_state_lists_its_parts():
  options = {"softmax_attention": {"max_length": 8}}
  model = models.LanguageModel(
    vocab_size=11,
    dim=8,
    num_layers=2,
    num_heads=2,
    mixer=("mamba", "softmax_attention"),
    mixer_options=options,
    rngs=nnx.Rngs(0),
  )
  table = tabulate(model, TOKENS, model.init_state(2))
  assert "LanguageModel Summary" in table and "blocks/0" in table and "float32[2,3,11]" in table


@pytest.mark.slow
def test_tabulate_of_a_vision_model_lists_its_parts():
  sizes = {"image_size": 4, "patch_size": 2, "num_classes": 3, "channels": 1}
  model = models.VisionModel(**sizes, dim=8, num_layers=1, rngs=nnx.Rngs(0))
  table = tabulate(model, jnp.ones((2, 4, 4, 1)))
  assert "VisionModel Summary" in table and "patch_embedding" in table


def keys(tree) -> set[type]:
  paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
  return {type(key) for path in paths for key in path}


@pytest.mark.slow
def test_states_of_all_ops_and_mixers_have_positions_as_keys():
  """Attribute names, the keys of a plain NamedTuple, are what `nnx.tabulate` fails on."""
  attribute = jax.tree_util.GetAttrKey
  wrong = {
    name
    for name in MIXERS
    if attribute in keys(jax.eval_shape(lambda n=name: initial(n).init_state(2)))
  }
  for module in (ops, mixers, models):
    for name in module.__all__:
      if name.endswith("State") and hasattr(state := getattr(module, name), "_fields"):
        wrong |= {name} if attribute in keys(state(*state._fields)) else set()
  assert wrong == set()


def test_path_of_a_state_prints_field_names():
  state = models.BlockState(ops.LinearAttentionState(1, 2), None)
  paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
  assert list(map(jax.tree_util.keystr, paths)) == [".mixer.kv", ".mixer.key_sum"]
