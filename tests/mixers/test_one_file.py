"""A mixer of one's own is its file and nothing else: models, training, sharding, Linen, analysis.

The op and the class state what others need to know; no table elsewhere has their names.
"""

import ast
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lnssm_jax import analysis, frameworks, linen, mixers, sharding
from lnssm_jax.mixers import Mixer
from lnssm_jax.models import LanguageModel
from lnssm_jax.ops.core import dispatch
from tests.test_structure import nodes_of, trees
from train.config import Model
from train.step import flops

FILE = """
import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax import mixers
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.ops import DiagonalState, diagonal_scan


class OneFile(mixers.Mixer[DiagonalState]):
  '''h_t = sigmoid(rate) h_{t-1} + W x_t,   out = W_o h_t.'''

  starts_as_model = True
  recurrence_flops = flops.diagonal
  sharding = ((r"inward", ("fsdp", "tensor")),)  # [D, D]
  without_weight_decay = ("inward",)

  def __init__(self, dim, *, gain: float = 1.0, dtype=jnp.float32, param_dtype=jnp.float32, rngs):
    self.dim, self.dtype, self.gain = dim, jnp.dtype(dtype), gain
    self.inward = nnx.Param(jax.random.normal(rngs.params(), (dim, dim), param_dtype))
    self.leak = nnx.Param(jnp.zeros((dim,), param_dtype))
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.o_proj = Linear(dim, dim, kernel_init=uniform_fan_in(dim), **options)

  def _init_state(self, B):
    return diagonal_scan.init_state(batch=B, dim=self.dim)

  def _mix(self, x, state, segment_ids):
    v = self.gain * (x @ self.inward[...])
    decay = jax.nn.sigmoid(self.leak[...])
    h, state = diagonal_scan(decay, v, initial_state=state, segment_ids=segment_ids)
    return self.o_proj(h).astype(self.dtype), state


mixers.register("one_file", OneFile)
"""
SIZES = {"vocab_size": 11, "dim": 8, "num_layers": 2, "mixer": "one_file", "channel_mixer": "none"}


@pytest.fixture
def one_file(tmp_path):
  path = tmp_path / "one_file.py"
  path.write_text(FILE)
  spec = importlib.util.spec_from_file_location("one_file", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  yield module.OneFile
  del mixers.MIXERS["one_file"]


def test_one_file_is_all_that_a_mixer_needs(one_file):
  tokens = jnp.arange(12).reshape(2, 6) % 11
  options = {"mixer_options": {"gain": 0.5}}
  model = LanguageModel(**SIZES, **options, rngs=nnx.Rngs(0))
  assert jax.jit(lambda model: model(tokens)[0])(model).shape == (2, 6, 11)

  cfg = Model(num_heads=1, **SIZES, **options)
  per_layer = 2 * (8 * 8) + 2 * 8  # o_proj and the recurrence
  assert flops.model_flops_per_token(cfg, 6) == 2 * per_layer + 2 * 8 * 11

  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  of_mixer = sharding.param_specs(params, ("fsdp", "tensor"))["blocks"]["mixer"]
  assert tuple(of_mixer["inward"]) == (None, "fsdp", "tensor")
  assert not any(of_mixer["leak"])
  assert not sharding.has_weight_decay(params)["blocks"]["mixer"]["inward"]

  face = linen.MIXERS["one_file"](8, gain=0.5)
  assert linen.OneFile is type(face) and face.init_state(2).h.shape == (2, 8)
  x = jnp.ones((1, 3, 8))
  y, _ = face.apply(face.init(jax.random.key(0), x), x)
  assert y.shape == x.shape

  layer = one_file(8, rngs=nnx.Rngs(0))
  assert jnp.allclose(layer.decay(), jnp.log(0.5))
  assert all(jnp.allclose(lives, 1.0) for lives in analysis.half_lives(model, tokens))
  assert analysis.state_size(layer) == 8
  (recurrence,) = frameworks.recurrences(layer, x[0])
  assert recurrence.op == "diagonal_scan"


class UsesItsOwnOp(Mixer):
  """A layer that is one op of its input."""

  def __init__(self, op):
    self.dim, self.op = 2, op

  def _mix(self, x, state, segment_ids):
    return self.op(x)


@pytest.fixture
def silent_op(monkeypatch):
  """A public op whose decorator states nothing but the state."""
  monkeypatch.setattr(dispatch, "_OPS", dict(dispatch._OPS))
  monkeypatch.setattr(dispatch, "_FACTS", dict(dispatch._FACTS))

  @dispatch.op(lambda: None)
  def silent(x):
    return x, None

  return silent


@pytest.mark.parametrize(
  ("fact", "ask"),
  [
    ("log_decay", lambda mixer, x: mixer.decay(x)),
    ("query_key", lambda mixer, x: analysis.scores(mixer, x)),
    ("recurrence", lambda mixer, x: frameworks.recurrences(mixer, x[0])),
  ],
)
def test_fact_that_an_op_does_not_state_raises_naming_it(silent_op, fact, ask):
  message = rf"silent: this op does not state its {fact}; give {fact}=\.\.\. to its decorator"
  with pytest.raises(ValueError, match=message):
    ask(UsesItsOwnOp(silent_op), jnp.ones((1, 3, 2)))


def test_every_op_states_every_fact():
  assert {"attention", "linear_attention", "wkv4"} <= set(dispatch.names())
  for op in dispatch.names():
    assert all(dispatch.fact(op, name) is not ... for name in dispatch.Facts._fields)


def test_decay_of_a_layer_without_ops_is_not_known():
  with pytest.raises(NotImplementedError, match=r"UsesItsOwnOp\.decay: the layer calls no op"):
    UsesItsOwnOp(lambda x: (x, None)).decay(jnp.ones((1, 3, 2)))


# Names of a paper, of old formats, of published layers.
OTHER_NAMES = {
  "lnssm_jax.frameworks.online_learning",
  "lnssm_jax.mixers.migration",
  "lnssm_jax.pretrained.families.hybrids",
  "lnssm_jax.pretrained.families.nemotron_h",
  "lnssm_jax.pretrained.families.olmo_hybrid",
}


def test_no_table_elsewhere_is_keyed_by_ops_or_mixers():
  names = {*mixers.MIXERS, *dispatch.names()}
  found = set()
  for module, tree in trees("lnssm_jax", "train").items():
    for node in nodes_of(tree):
      if isinstance(node, ast.Dict):
        keys = [x.value for x in node.keys if isinstance(x, ast.Constant)]
        found |= {module} if len(names.intersection(keys)) > 1 else set()
  assert found == OTHER_NAMES
