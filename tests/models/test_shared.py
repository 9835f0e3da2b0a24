"""Mixers made of others: a layer after a shared block, and mixers side by side."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.routing import Aux
from lnssm_jax.models.layers import Gifts, given
from lnssm_jax.models.parallel import Parallel, Part
from lnssm_jax.models.shared import AfterShared, shared_blocks

MODEL = types.SimpleNamespace(
  dim=8, num_heads=2, num_layers=1, dtype=jnp.float32, param_dtype=jnp.float32
)
KEY = np.array([[1, 2]], np.uint32)  # of one row
BLOCKS = {"num_blocks": 2, "positions": "none", "hidden": None, "max_length": 9}


class Through(Mixer):
  """Its input plus its state, which is its last input; keeps its keys, and has a loss."""

  def __init__(self, attention_dropout=0.0, max_length=12):
    self.dim, self.attention_dropout, self.max_length = 8, attention_dropout, max_length
    self.keys = nnx.static([])

  def _init_state(self, B):
    return jnp.zeros((B, self.dim))

  def _mix_dropping(self, x, state, segment_ids, dropout_key):
    self.keys.append(dropout_key)
    return x if state is None else x + state[:, None], x[:, -1]

  def _mix_with_aux(self, x, state, segment_ids):
    return self._mix_dropping_with_aux(x, state, segment_ids, None)

  def _mix_dropping_with_aux(self, x, state, segment_ids, dropout_key):
    return *self._mix_dropping(x, state, segment_ids, dropout_key), Aux(1.0, jnp.ones(1))


def after_shared(mixer, **options):
  return AfterShared(
    8, mixers={"through": mixer}, num_heads=2, **BLOCKS | options, rngs=nnx.Rngs(0)
  )


def randomized(module):
  random = np.random.default_rng(0)
  draw = lambda x: jnp.asarray(random.normal(size=x.shape) / 2 + 0.1, jnp.float32)
  return jax.tree.map(draw, module)


def formula(layer, block, x, e, ids, state):
  """The output of a layer after a block in NumPy, float64."""
  wide = lambda parameter: np.float64(parameter[...])
  kernel = lambda owner, name: wide(getattr(owner, name).kernel)
  own = lambda down, up: kernel(layer, f"{down}_down_proj") @ kernel(layer, f"{up}_up_proj")
  norm = lambda norm, z: wide(norm.scale) * z / np.sqrt((z * z).mean(-1, keepdims=True) + 0.1)
  z = norm(block.mixer_norm, np.concatenate([x, e], axis=-1))
  q, k, v = ((z @ (kernel(block.mixer, f"{n}_proj") + own(n, n))).reshape(4, 2, 8) for n in "qkv")
  scores = np.einsum("thk,shk->hts", q, k) * np.sqrt(2 / 8)
  seen = np.tri(4, dtype=bool) & (ids[:, None] == ids)
  weights = np.where(seen, np.exp(scores), 0)
  y = np.einsum("hts,shk->thk", weights / weights.sum(-1, keepdims=True), v).reshape(4, 16)
  n = norm(block.channel_norm, y @ kernel(block.mixer, "o_proj"))
  gate, up = (n @ (kernel(block.channel_mixer, name) + own("mlp", name)) for name in ("gate", "up"))
  f = gate / (1 + np.exp(-gate)) * up @ kernel(block.channel_mixer, "down")
  return norm(layer.norm, x + f @ kernel(layer, "shared_proj")) + state


def test_layer_after_a_shared_block_follows_its_formula_in_float64():
  """After its own block, with W + V U in full, in documents, and with the state of its mixer."""
  options = {"hidden": 6, "activation": "silu", "norm_eps": 0.1}
  layer = randomized(after_shared(Through(), block=1, rank=2, attention_rank=3, **options))
  blocks = shared_blocks(MODEL, BLOCKS | options, None, nnx.Rngs(0))
  assert not np.array_equal(*(blocks[n].mixer.q_proj.kernel for n in "01"))
  x, e = np.random.default_rng(1).normal(size=(2, 4, 8)).astype(np.float32)
  ids, state = np.array([0, 0, 1, 1]), np.arange(8.0, dtype=np.float32)

  @jax.jit
  def run(layer, block, x, e):
    gifts = Gifts(None, e[None], {"0": None, "1": block})
    cache = layer.init_state(1)[0]
    return given(Part(layer), gifts).mixer(x[None], (cache, state[None]), ids[None])[0]

  block = randomized(blocks["1"])
  got, want = run(layer, block, x, e)[0], formula(layer, block, x, e, ids, state)
  np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_blocks_are_four_times_as_wide_and_drop_as_their_layer_says():
  options = BLOCKS | {"attention_dropout": 0.5}
  new = lambda: shared_blocks(MODEL, options, None, nnx.Rngs(0))
  block = jax.eval_shape(new)["0"]
  assert block.channel_mixer.up.kernel.shape == (8, 32)
  assert block.mixer.attention_dropout == 0.5


@pytest.mark.parametrize("outer", [0.0, 0.5])
def test_layer_after_a_shared_block_trains_with_dropout_and_the_loss_of_its_mixer(outer):
  """Also if only the mixer in it drops; the block and the mixer get keys of their own."""
  mixer, of_block = Through(0.5), []
  layer = after_shared(mixer, attention_dropout=outer)
  assert layer.attention_dropout == 0.5

  def block(x, embedding, state, segment_ids, *, dropout_key, corrections):
    of_block.append(dropout_key)
    return x, state

  layer.shared, layer.embedding = block, np.ones((1, 2, 8))
  aux = jax.eval_shape(lambda key: layer.with_aux(layer.embedding, dropout_key=key), KEY)[2]
  assert aux is not None and layer.mixer.keys[0] is not None and of_block[0] is not None
  layer.with_aux(layer.embedding, dropout_key=KEY)
  assert not np.array_equal(layer.mixer.keys[-1], of_block[-1])


def test_mixers_side_by_side_train_with_dropout_and_the_losses_of_both():
  mixers = {"one": Through(0.5), "other": Through()}
  aux = Parallel(mixers).with_aux(np.ones((1, 2, 8)), dropout_key=KEY)[2]
  assert aux is not None and float(aux.loss) == 2 and mixers["one"].keys[0] is not None


def test_longest_sequence_is_that_of_the_block_and_of_the_mixer():
  lengths = [after_shared(Through(max_length=n)).max_length for n in (12, 5, None)]
  assert lengths == [9, 5, 9]
  cache = jax.eval_shape(lambda: after_shared(Through(max_length=5)).init_state(1)[0])
  assert cache.k.shape[1] == 8  # of the block, whose window is its own
