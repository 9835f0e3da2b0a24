"""`ModelConfig`: the one list of a model's settings, in every place that takes them."""

import dataclasses
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import linen
from lnssm_jax.mixers import LRN
from lnssm_jax.models import (
  NORMS,
  REMAT_POLICIES,
  LanguageModel,
  ModelConfig,
  VisionConfig,
  VisionModel,
)
from lnssm_jax.models.initialization import INITIALIZATIONS
from train import config

SIZES = {"vocab_size": 11, "dim": 8, "num_layers": 2, "num_heads": 2}


def shapes(build):
  graph, params = nnx.split(jax.eval_shape(build), nnx.Param)
  return graph, nnx.to_pure_dict(params)


def test_model_of_a_config_is_that_of_its_settings():
  options = {"mixer": ("gla", LRN), "mixer_options": {"gla": {"gate_rank": 3}}, "norm": "rms"}
  of_config = shapes(lambda: LanguageModel(ModelConfig(**SIZES, **options), rngs=nnx.Rngs(0)))
  assert of_config == shapes(lambda: LanguageModel(**SIZES, **options, rngs=nnx.Rngs(0)))
  image = {"dim": 8, "num_layers": 1, "num_classes": 3, "image_size": [4, 8], "patch_size": 4}
  of_config = shapes(lambda: VisionModel(VisionConfig(**image, mixer="lrn"), rngs=nnx.Rngs(0)))
  assert of_config == shapes(lambda: VisionModel(**image, mixer="lrn", rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
  ("model", "settings"), [(LanguageModel, ModelConfig), (VisionModel, VisionConfig)]
)
def test_signatures_faces_and_settings_of_runs_have_the_same_options(model, settings):
  fields = {field.name: field for field in dataclasses.fields(settings)}
  own = inspect.signature(model.__init__).parameters
  assert list(own) == [
    "self",
    *fields,
    *(["sequence_axis"] if "sequence_axis" in own else []),
    "rngs",
  ]
  face = {field.name for field in dataclasses.fields(linen.face(model))}
  assert fields.keys() <= face
  if settings is ModelConfig:
    assert issubclass(config.Model, ModelConfig)
    assert [field.name for field in dataclasses.fields(config.Model)] == list(fields)


def test_choices_of_the_types_are_those_of_the_model():
  hints = typing.get_type_hints(ModelConfig)
  assert set(typing.get_args(hints["norm"])) == set(NORMS)
  assert set(typing.get_args(hints["remat"])) == set(REMAT_POLICIES)
  names = typing.get_args(typing.get_args(hints["initialization"])[0])
  assert set(names) == set(INITIALIZATIONS)


def test_config_has_one_form_of_each_value():
  given = ModelConfig(**SIZES, mixer=["lrn", "lrn"], mixer_options=None, dtype=jnp.bfloat16)
  assert given == ModelConfig(**SIZES, mixer=("lrn", "lrn"), mixer_options={}, dtype="bfloat16")
  with pytest.raises(dataclasses.FrozenInstanceError):
    given.dim = 3


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (
      {"vocab": 3},
      r"^LanguageModel: option='vocab' is unknown; did you mean 'vocab_size'\? Use one",
    ),
    ({"dim": 2.5}, r"^dim=2\.5 must be an integer of at least 1\.$"),
    ({"norm": "rsm"}, r"^norm='rsm' is unknown; did you mean 'rms'\?"),
    ({"embedding_norm": "no"}, r"^embedding_norm='no' is of type str; give bool\.$"),
    ({"embedding_scale": "2"}, r"^embedding_scale='2' is of type str; give float or None\.$"),
    ({"mixer_options": [1]}, r"^mixer_options=\[1\] is of type list; give dict\.$"),
    (
      {"mixer": "gla", "mixer_options": {"gate_rnak": 3}},
      r"^mixer_options of 'gla': option='gate_rnak' is unknown; did you mean 'gate_rank'\? Use one",
    ),
    (
      {"mixer": "gla", "mixer_options": {"gate_rank": "16"}},
      r"^mixer_options of 'gla': gate_rank='16' is of type str; give int\.$",
    ),
    (
      {"mixer": "gla", "mixer_options": {"selected_rows": "4"}},
      r"^mixer_options of 'gla': selected_rows='4' is of type str; give int or None\.$",
    ),
    (
      {"channel_mixer_options": {"use_bias": 3}},
      r"^channel_mixer_options of 'gpt2': use_bias=3 is of type int; give bool\.$",
    ),
    ({"dtype": "int8"}, r"^dtype='int8' must be a floating-point dtype"),
  ],
)
def test_wrong_settings_raise_in_one_line(change, message):
  with pytest.raises(ValueError, match=message) as caught:
    LanguageModel(**SIZES | change, rngs=nnx.Rngs(0))
  assert "\n" not in str(caught.value)


def test_config_and_settings_together_raise():
  with pytest.raises(ValueError, match=r"LanguageModel: a config is given, and dim too"):
    LanguageModel(ModelConfig(**SIZES), dim=3, rngs=nnx.Rngs(0))


def test_options_may_be_numbers_of_numpy():
  options = {"mixer": "gla", "mixer_options": {"gate_rank": np.int64(3), "expand_k": 1}}
  shapes(lambda: LanguageModel(**SIZES, **options, rngs=nnx.Rngs(0)))
