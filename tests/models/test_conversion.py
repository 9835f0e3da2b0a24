"""Models that continue with other mixers."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models import LanguageModel, layers, replace_mixers
from tests.mixers.helpers import drawn

SIZES = {"vocab_size": 13, "dim": 8, "num_layers": 3, "num_heads": 2, "channel_mixer": "geglu"}
SSE = {"num_partitions": 3, "lora_rank": 2, "gate_rank": 2, "method": "mask"}
ATTENTION = {"max_length": 16}
HYBRID = {"sse": SSE, "softmax_attention": ATTENTION}


@functools.cache
def transformer(seed=0):
  return build("softmax_attention", ATTENTION, seed)


def build(mixer, options, seed=1, **sizes):
  make = lambda: LanguageModel(
    **SIZES | sizes, mixer=mixer, mixer_options=options, rngs=nnx.Rngs(seed)
  )
  return drawn(make, seed)


def params(block):
  return nnx.to_pure_dict(nnx.state(block, nnx.Param))


def test_hybrid_keeps_every_parameter_that_means_the_same():
  source, target = transformer(), build(("sse", "softmax_attention"), HYBRID)
  model, own = replace_mixers(source, target)
  before, fresh, after = (
    [params(block) for block in layers.apart(m.blocks, 3)] for m in (source, target, model)
  )
  assert own[1] == []
  jax.tree.map(np.testing.assert_array_equal, after[1], before[1])
  for layer in (0, 2):
    assert "router_proj/kernel" in own[layer]
    assert not any(name.startswith(("q_proj", "o_proj")) for name in own[layer])
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
      want = before[layer]["mixer"][name]["kernel"]
      np.testing.assert_array_equal(after[layer]["mixer"][name]["kernel"], want)
    mine = [tree["mixer"]["router_proj"]["kernel"] for tree in (after[layer], fresh[layer])]
    np.testing.assert_array_equal(*mine)
    jax.tree.map(
      np.testing.assert_array_equal, after[layer]["channel_mixer"], before[layer]["channel_mixer"]
    )
  np.testing.assert_array_equal(model.embedding[...], source.embedding[...])
  np.testing.assert_array_equal(model.head.kernel[...], source.head.kernel[...])


def test_gla_continues_as_sse_with_the_gates_of_its_decays():
  gates, sse = {"expand_k": 1.0, "gate_rank": 2}, SSE | {"output_gate": "full"}
  source, target = build("gla", gates, num_layers=1), build("sse", sse, num_layers=1)
  model, own = replace_mixers(source, target)
  new = ["down_proj", "up_proj"]
  assert own == [sorted([f"{x}_{n}/kernel" for x in "qk" for n in new] + ["router_proj/kernel"])]
  old, kept = (params(m.layer(0))["mixer"] for m in (source, model))
  for name in ("always_gates", "sparse_gates"):
    got, want = kept[name], old["decay_up_proj"]
    np.testing.assert_array_equal(got["down_proj"]["kernel"], old["decay_down_proj"]["kernel"])
    np.testing.assert_array_equal(got["up_kernel"][0], want["kernel"])
    np.testing.assert_array_equal(got["up_bias"], want["bias"])
  for name in ("g_proj", "norm", "k_proj"):
    jax.tree.map(np.testing.assert_array_equal, kept[name], old[name])


@pytest.mark.slow
def test_model_of_the_same_mixers_is_the_source():
  source = transformer()
  model, own = replace_mixers(source, transformer(1))
  assert own == [[], [], []]
  jax.tree.map(np.testing.assert_array_equal, params(model), params(source))


@pytest.mark.slow
def test_models_that_differ_elsewhere_raise():
  options = {"sse": SSE, "softmax_attention": ATTENTION}
  with pytest.raises(ValueError, match="num_layers=3 and target num_layers=2"):
    replace_mixers(transformer(), build(tuple(options), options, num_layers=2))
  other = build("softmax_attention", ATTENTION, channel_hidden=5)
  with pytest.raises(ValueError, match="channel_mixer of layer 0 has shapes"):
    replace_mixers(transformer(), other)
