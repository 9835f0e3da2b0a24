"""`lnssm_jax.save_model`: models of any loop, opened like exports of the trainer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lnssm_jax
from lnssm_jax import linen, mixers, models
from lnssm_jax.files.buckets import BucketError
from lnssm_jax.generate import SamplingOptions
from lnssm_jax.models.settings import params_of
from lnssm_jax.pretrained import ExportError, exports
from tests.mixers.tiny import TINY
from train import config
from train.inspection.report import report
from train.runs import export

SIZES = {"dim": 16, "num_layers": 3, "vocab_size": 257, "num_heads": 2}
# A class, which a file can only name, in a hybrid with options by the names of classes.
HYBRID = {
  "mixer": (mixers.LRN, "sliding_window_attention"),
  "mixer_options": {"sliding_window_attention": {"window": 4}},
  "channel_mixer": "none",
  "param_dtype": "bfloat16",
}


def random_model(seed=0, **settings):
  build = lambda: models.LanguageModel(**SIZES | settings, rngs=nnx.Rngs(0))
  graph, shapes = nnx.split(jax.eval_shape(build))
  rng = np.random.default_rng(seed)
  draw = lambda x: (0.3 * rng.standard_normal(x.shape)).astype(x.dtype)
  return nnx.merge(graph, jax.tree.map(draw, shapes))


def averaged(*several):
  """The mean in float32, as a loop of one's own computes it."""
  mean = lambda *leaves: jnp.stack([jnp.float32(x) for x in leaves]).mean(0)
  graph, first = nnx.split(several[0])
  return nnx.merge(graph, jax.tree.map(mean, first, *map(nnx.state, several[1:])))


def same(a, b):
  return all(
    jax.tree.leaves(jax.tree.map(lambda x, y: x.dtype == y.dtype and (x == y).all(), a, b))
  )


def test_average_of_hybrids_is_saved_and_opened_by_everything(tmp_path):
  model, folder = averaged(random_model(0, **HYBRID), random_model(1, **HYBRID)), tmp_path / "out"
  options = SamplingOptions(max_tokens=3, temperature=0, stop_token=(7,))
  lnssm_jax.save_model(folder, model, "bytes", options, step=5)
  loaded = lnssm_jax.load_model(folder)
  assert same(params_of(loaded.model), params_of(model)) and loaded.step == 5
  settings = loaded.settings["model"]
  assert settings["mixer"] == ["lrn", "sliding_window_attention"]
  assert settings["param_dtype"] == "float32" and settings["channel_mixer"] == "none"
  found = loaded.options()
  assert (found.max_tokens, found.temperature, found.stop_tokens) == (3, 0, (256, 7))
  tokens = jnp.array([list(b"abc")])
  logits = jax.nn.log_softmax(model(tokens)[0][0, :-1])
  want = jnp.take_along_axis(logits, tokens[0, 1:, None], 1)[:, 0]
  np.testing.assert_allclose(loaded.score("abc").log_probs, want, rtol=1e-4)
  assert report(folder)["kind"] == "exported model"
  manifest, _ = exports.checked_manifest(folder)
  export.check_same_model(manifest, config.exported_model(folder))  # as `import` does


def test_what_cannot_be_opened_again_is_not_saved(tmp_path):
  class Halved(mixers.LRN):
    """Has no name."""

  save = lambda model, *args: lnssm_jax.save_model(tmp_path / "out", model, *args)
  with pytest.raises(ValueError, match="mixer=Halved is a class without a name"):
    save(random_model(mixer=Halved))
  model = random_model(mixer="lrn")
  with pytest.raises(ValueError, match=r"tokenizer has 257 tokens.*vocabulary 50"):
    save(random_model(mixer="lrn", vocab_size=50), "bytes")
  with pytest.raises(ValueError, match="model is of the class dict"):
    save(params_of(model))
  with pytest.raises(BucketError, match="is no folder of a bucket; use gs://BUCKET/FOLDER"):
    lnssm_jax.save_model("az://bucket/model", model)
  broken = random_model(mixer="lrn")
  broken.norm.scale[...] = np.full(16, np.nan, np.float32)
  with pytest.raises(ExportError, match=r"norm.scale has numbers that are NaN"):
    save(broken)
  model.head = None
  with pytest.raises(ExportError, match=r"head.kernel: found nothing"):
    save(model)
  assert list(tmp_path.iterdir()) == []
  face = linen.LanguageModel(**SIZES, mixer="lrn")
  save(face.bind({"params": params_of(random_model(mixer="lrn"))}))
  loaded = lnssm_jax.load_model(tmp_path / "out")
  with pytest.raises(ExportError, match="has no tokenizer, and text needs one"):
    loaded.score("ab")


@pytest.mark.slow
@pytest.mark.parametrize("mixer", sorted(mixers.MIXERS))
def test_every_mixer_is_saved(mixer, tmp_path):
  model = random_model(mixer=mixer, mixer_options=TINY[mixer].model_options)
  lnssm_jax.save_model(tmp_path / "out", model)
  assert same(params_of(lnssm_jax.load_model(tmp_path / "out").model), params_of(model))
