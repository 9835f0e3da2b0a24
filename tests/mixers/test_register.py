"""Mixers of one's own, by name."""

import jax
import pytest
from flax import nnx

from lnssm_jax import mixers
from lnssm_jax.models import LanguageModel
from lnssm_jax.models.settings import abstract_params, complete
from tests.mixers.helpers import split


class Own(mixers.LRN):
  """A mixer of another name."""


@pytest.fixture
def registered():
  yield mixers.register("own", Own)
  del mixers.MIXERS["own"]


def test_registered_mixer_is_a_choice_of_models_and_configs(registered):
  sizes = {"vocab_size": 5, "dim": 4, "num_layers": 1, "mixer": "own"}
  model = jax.eval_shape(lambda: LanguageModel(**sizes, rngs=nnx.Rngs(0)))
  assert type(model.blocks.mixer) is registered
  assert complete(sizes)["mixer"] == ["own"]
  params = abstract_params(sizes | {"dtype": "float32", "param_dtype": "float32"})  # as of a config
  assert params["blocks"]["mixer"].keys() == split(model)[1]["blocks"]["mixer"].keys()


def test_class_that_is_defined_again_replaces_itself(registered):
  again = type("Own", (mixers.LRN,), {"__module__": __name__, "__qualname__": Own.__qualname__})
  assert mixers.register("own", again) is mixers.MIXERS["own"] is again


@pytest.mark.parametrize(
  ("name", "mixer", "message"),
  [
    ("gla", Own, r"register: name='gla' is that of lnssm_jax\.mixers\..*\.GLA; choose another"),
    ("my mixer", Own, "register: name='my mixer' must be an identifier"),
    ("mine", nnx.Linear, r"register: mixer=<class .*Linear'> must be a subclass of lnssm_jax\.mix"),
    ("mine", lambda dim: Own(dim, rngs=nnx.Rngs(0)), "register: mixer=<function .*must be a subcl"),
  ],
)
def test_bad_registrations_raise_and_change_nothing(name, mixer, message):
  before = dict(mixers.MIXERS)
  with pytest.raises(ValueError, match=message):
    mixers.register(name, mixer)
  assert before == mixers.MIXERS


def test_unknown_mixer_raises_naming_register():
  with pytest.raises(ValueError, match=r"mixer='own' is unknown.*lnssm_jax\.mixers\.register"):
    LanguageModel(vocab_size=5, dim=4, num_layers=1, mixer="own", rngs=nnx.Rngs(0))
