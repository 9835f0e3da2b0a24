"""Arguments that are named as in other libraries are answered with ours."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lnssm_jax import linen, mixers, models

SIZES = {"vocab_size": 8, "dim": 8, "num_layers": 1, "mixer": "lrn"}
X = jnp.ones((1, 2, 8))
HERE = {
  "kernel_init": r"mixers\.redraw\(module, kernel_init, rngs=rngs\)",
  "mask": "lengths",
}


@pytest.mark.parametrize(
  ("call", "name", "message"),
  [
    (mixers.LRN, "kernel_init", "LRN"),
    (mixers.Mamba2, "d_state", "Mamba2: no argument 'd_state'; here it is state_dim"),
    (linen.LRN, "kernel_init", "linen.LRN"),
    (models.LanguageModel, "n_layers", "LanguageModel: no argument 'n_layers'; .* num_layers"),
    (models.Backbone, "kernel_init", "Backbone"),
    (
      lambda dim, **given: models.LanguageModel(**SIZES, mixer_options=given, rngs=nnx.Rngs(0)),
      "kernel_init",
      "mixer_options of 'lrn'",
    ),
    (lambda dim, **given: mixers.LRN(dim, rngs=nnx.Rngs(0))(X, **given), "mask", "LRN"),
  ],
)
def test_argument_named_as_elsewhere_raises_with_our_name(call, name, message):
  if name in HERE:
    message += f": no argument '{name}'; here it is {HERE[name]}"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda: call(8, **{name: None}))


def test_name_for_which_nothing_is_known_is_pythons_error():
  with pytest.raises(TypeError, match="unexpected keyword argument 'd_state'"):
    mixers.LRN(8, d_state=4)  # pyrefly: ignore[unexpected-keyword]


def test_face_of_a_class_without_rngs_raises():
  with pytest.raises(ValueError, match="face: Bidirectional has no argument rngs"):
    linen.face(models.Bidirectional)
