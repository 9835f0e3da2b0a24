"""`jax.export` of layers for any batch and, in multiples of 512, any length."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import export

from lnssm_jax.mixers import MIXERS
from lnssm_jax.models import LanguageModel
from tests.mixers.helpers import relative_error, split
from tests.mixers.tiny import DIM, TINY, inputs, with_noise


class KnownLength(MIXERS["lrn"]):
  """A mixer that can only be computed where the length is a number."""

  needs_length = True

  def _mix(self, x, state, segment_ids):
    assert isinstance(x.shape[1], int)
    return super()._mix(x, state, segment_ids)


def layer(name):
  if name == "known_length":
    return KnownLength(DIM, rngs=nnx.Rngs(0))
  longer = {"max_length": 1024} if "max_length" in TINY[name].options else {}
  return MIXERS[name](DIM, **TINY[name].options | longer, rngs=nnx.Rngs(0))


def exported(run, module, shape, *, documents=False):
  shape = export.symbolic_shape(shape)
  ids = (jax.ShapeDtypeStruct(shape[:2], jnp.int32),) * documents
  return export.export(jax.jit(run))(module, jax.ShapeDtypeStruct(shape, jnp.float32), *ids)


names = [pytest.param(name, marks=[pytest.mark.slow] * (name != "lrn")) for name in MIXERS]


@pytest.mark.parametrize("name", ["known_length", *names])
def test_exported_layer_takes_any_batch_and_length(name):
  run = lambda module, x, ids=None: module(x, segment_ids=ids)
  graph, params = split(jax.jit(lambda: layer(name))())
  module = nnx.merge(graph, with_noise(params))
  # The second document begins where 512 tokens of a program do, and in the middle of them.
  x, starts = inputs(2, 1536), jnp.array([[1024], [700]])
  ids = (jnp.arange(1536) >= starts).astype(jnp.int32)
  y, state = jax.jit(run)(module, x, ids)
  packed = exported(run, module, f"b, 512*n, {DIM}", documents=True).call(module, x, ids)
  whole, _ = exported(run, module, f"b, 512*n, {DIM}").call(module, x[:1, :1024])
  assert jax.tree.all(jax.tree.map(lambda x, y: x.shape == y.shape, packed[1], state))
  for got, want in ((packed[0], y), (whole, y[:1, :1024])):
    assert relative_error(got, want) < 2e-6


def test_length_that_is_no_multiple_raises_naming_the_rule():
  module = jax.eval_shape(lambda: layer("lrn"))
  message = (
    r"diagonal_scan: the length n is a symbol.*multiples of 512, of jax\.export\.symbolic_sh"
  )
  with pytest.raises(NotImplementedError, match=message):
    exported(lambda module, x: module(x), module, f"b, n, {DIM}")


def test_wrong_argument_of_symbolic_shape_raises_as_any_other():
  module = jax.eval_shape(lambda: layer("lrn"))
  with pytest.raises(ValueError, match=r"LRN: x has shape \(b, 512\*n, 7\)"):
    exported(lambda module, x: module(x), module, "b, 512*n, 7")


@pytest.mark.slow
def test_language_model_with_its_state_is_exported():
  build = lambda: LanguageModel(vocab_size=11, dim=8, num_layers=2, mixer="lrn", rngs=nnx.Rngs(0))
  model = jax.jit(build)()
  b, length = export.symbolic_shape("b, 512*n")
  spec = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
  state = jax.eval_shape(lambda: model.init_state(1))
  state = jax.tree.map(lambda x: spec((x.shape[0], b, *x.shape[2:]), x.dtype), state)
  run = jax.jit(lambda model, tokens, state: model(tokens, state))
  for T in (1, length):
    program = export.export(run)(model, spec((b, T), jnp.int32), state)
    tokens = jnp.arange(3 * (1 if T == 1 else 512)).reshape(3, -1) % 11
    got, want = (call(model, tokens, model.init_state(3))[0] for call in (program.call, run))
    assert relative_error(got, want) < 2e-6


def test_exported_program_is_saved_with_its_states():
  pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
  mixer = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), jax.eval_shape(lambda: layer("mamba")))
  state = mixer.init_state(2)
  specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (inputs(2, 1), state))
  program = export.export(jax.jit(lambda x, state: mixer(x, state)))(*specs)
  _, last = export.deserialize(program.serialize()).call(inputs(2, 1), state)
  assert type(last) is type(state)
  assert type(last.recurrent) is type(state.recurrent)
