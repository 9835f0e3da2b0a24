"""Models on a sequence that is sharded over four devices: the numbers of one device."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from lnssm_jax import linen
from lnssm_jax.mixers import MIXERS, shard_time
from lnssm_jax.models import LanguageModel
from tests import devices
from tests.mixers.tiny import initial
from tests.ops.divided import AXIS, DIVIDED, PARTS, WHOLE
from tests.pages import blocks_of

UNDIVIDED = {"base_conv", "hyena", "lln", "mom", "s4", "sse", "tnn"}
DIVIDED_MIXERS = sorted(MIXERS.keys() - UNDIVIDED)


def check(*calls, limit=2e-6):
  """Logits, last states and all gradients, in one program: starting jax takes seconds."""
  arguments = ("-m", "tests.models.sharded", *map(json.dumps, calls))
  for call, errors in devices.result_of(*arguments, devices=PARTS).items():
    wrong = {name: error for name, error in errors.items() if not error < limit}
    assert not wrong, call
    assert any("gradients" in name for name in errors)


HYBRID = {"mixer": ["lnssm", "softmax_attention"], "state": False}


@pytest.mark.slow
def test_hybrid_model_on_shards_equals_one_device():
  """Token shift, normalized linear attention, softmax attention with rotations, segments."""
  check(HYBRID | {"channel_mixer": "none"})


@pytest.mark.slow
@pytest.mark.parametrize("part", range(11))
def test_model_of_every_mixer_on_shards_equals_one_device(part):
  check(*({"mixer": name} for name in DIVIDED_MIXERS[part::11]))


@pytest.mark.slow
@pytest.mark.parametrize(
  "code", ["0-0-0-0", "0-11-0-0", "1-9-0-4", "0-3-1-1", "1-11-1-3", "1-m2-1-3", "0"]
)
def test_lcsm_of_each_op_on_shards_equals_one_device(code):
  check({"mixer": "lcsm", "mixer_options": {"code": code, "state_dim": 3}})


@pytest.mark.slow
def test_learned_positions_on_shards_equal_one_device():
  check({"mixer": "lrn", "learned_positions": 64})


@pytest.mark.slow
def test_models_on_shards_without_segments_or_state_are_equal():
  names = ("rwkv4", "longhorn", "gated_delta_net", "sliding_window_attention")
  check(*({"mixer": name, "segments": False, "state": False} for name in names))


@pytest.mark.slow
@pytest.mark.parametrize("channel_mixer", ["rwkv4_channel_mix", "rwkv6_channel_mix"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_channel_mixers_that_shift_tokens_on_shards_are_equal(channel_mixer, remat):
  check(HYBRID | {"channel_mixer": channel_mixer, "remat": remat, "num_layers": 3})


def test_mixers_that_cannot_shard_time_raise_and_the_others_set_their_axis():
  wrong = {name for name, cls in MIXERS.items() if cls.can_shard_time == (name in UNDIVIDED)}
  assert wrong == set()
  for name in ("lnssm", "mamba", "s4d", "softmax_attention"):  # with layers inside, or without
    mixer = shard_time(jax.eval_shape(lambda name=name: initial(name)), AXIS)
    parts = [part for _, part in nnx.iter_modules(mixer) if hasattr(part, "sequence_axis")]
    assert parts and all(part.sequence_axis == AXIS for part in parts), name
  mixer = jax.eval_shape(lambda: initial("hyena"))
  with pytest.raises(NotImplementedError, match="Hyena cannot run on a sequence that is sharded"):
    shard_time(mixer, AXIS)


SIZES = {"vocab_size": 13, "dim": 8, "num_layers": 2, "num_heads": 2}


def test_model_with_a_mixer_that_cannot_shard_time_raises():
  with pytest.raises(NotImplementedError, match="TNN cannot run on a sequence that is sharded"):
    jax.eval_shape(
      lambda: LanguageModel(
        **SIZES,
        mixer="tnn",
        mixer_options={"max_length": 8},
        sequence_axis=AXIS,
        rngs=nnx.Rngs(0),
      )
    )


@pytest.mark.slow
def test_code_of_the_page_runs(tmp_path):
  page = (Path(__file__).parents[2] / "docs" / "sequence_parallelism.md").read_text()
  (code,) = blocks_of(page)
  script = tmp_path / "page.py"
  script.write_text(code.replace("print(logits.shape)", "print(list(logits.shape))"))
  assert devices.result_of(str(script), devices=PARTS) == [2, 64, 257]


def on_parts(face, x, **variables):
  """Shapes of what a Linen face gives on four parts of x, without any device."""
  run = jax.shard_map(
    lambda variables, x: face.apply(variables, x),
    mesh=AbstractMesh((4,), (AXIS,), axis_types=(AxisType.Auto,)),
    in_specs=(WHOLE, DIVIDED),
    out_specs=(DIVIDED, WHOLE),
  )
  return jax.eval_shape(run, variables, x)


def test_linen_faces_on_shards_have_the_parameters_of_the_whole():
  whole, divided = (linen.LanguageModel(**SIZES, sequence_axis=axis) for axis in (None, AXIS))
  tokens = jnp.zeros((2, 8), jnp.int32)
  variables = jax.eval_shape(lambda: whole.init(jax.random.key(0), tokens))
  logits, state = on_parts(divided, tokens, **variables)
  assert logits.shape == (2, 8, 13)
  assert state.mixer.shift.shape == (2, 2, 8)

  x = jnp.zeros((2, 8, 8))
  variables = jax.eval_shape(lambda: linen.LNSSM(8, num_heads=2).init(jax.random.key(0), x))
  y, state = on_parts(linen.LNSSM(8, num_heads=2, sequence_axis=AXIS), x, **variables)
  assert y.shape == x.shape
  assert state.shift.shape == (2, 8)
