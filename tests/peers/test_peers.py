"""Our layers against those of other projects, as recorded in golden/ by `make test-peers`.

In float64 on both sides: 1e-12 means the same function, with the same epsilons.
"""

import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from tests.mixers.helpers import relative_error
from tests.peers.golden_files import FOLDER
from tests.peers.layers import PEERS
from tests.peers.numbers import DIM, cotangent, inputs, parameter

TOLERANCE = 1e-12
# Of ours, the features of lags are float32.
LAGS = ("hyena_safari", "hyena_safari_order", "hyena_safari_filter", "base_conv_zoology_long")
TOLERANCES = dict.fromkeys(LAGS, 1e-6)
STEP_TOLERANCES = TOLERANCES | {"tnn_authors": 1e-6}  # the waves of its state are float32

# Layers whose options change the state; the others decode as their mixer does by default.
DECODED = (
  "gated_delta_net_fla_grouped",
  "gated_delta_net_fla_no_conv",
  "gla_fla_conv",
  "gsa_fla_grouped",
  "mamba2_groups",
  "mamba3_mimo_norm",
  "recurrent_gemma_attention",
)


@functools.cache
def golden() -> dict[str, dict[str, np.ndarray]]:
  """The recorded outputs and gradients of every case, by the names of the other side."""
  cases = {}
  for path in sorted(FOLDER.glob("*.npz")):
    with np.load(path) as file:
      index, rest = json.loads(file["index"].tobytes()), file["numbers"]
    for case, shapes in index.items():
      sizes = [math.prod(shape) for shape in shapes.values()]
      *pieces, rest = np.split(rest, np.cumsum(sizes))
      named = zip(shapes.items(), pieces, strict=True)
      cases[case] = {name: piece.reshape(shape) for (name, shape), piece in named}
  return cases


@jax.jit
def evaluate(layer, x, weights):
  """(out, gradients of the layer's parameters and of x) of sum(weights * out)."""

  def loss(layer, x):
    if hasattr(layer, "first_values"):
      layer.first_values = x
    out = layer(x)
    out = out[0] if isinstance(out, tuple) else out
    return (weights * out).sum(), out

  (_, out), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(layer, x)
  return out, gradients


@jax.jit
def decode(layer, x):
  """The outputs of one token at a time."""

  def step(state, token):
    out, state = layer(token[:, None], state)
    return state, out[:, 0]

  state = layer(x[:, :1], None)[1]
  state = jax.tree.map(lambda s, like: s.astype(like.dtype), layer.init_state(len(x)), state)
  return jax.lax.scan(step, state, x.swapaxes(0, 1))[1].swapaxes(0, 1)


def layer_of(case: str):
  """Our layer with their parameters, in float64."""
  peer, shapes = PEERS[case], {name: value.shape for name, value in golden()[case].items()}
  names = shapes.keys() - {"out", "x"}
  theirs = {name: parameter(case, name, shapes[name]) for name in names}
  options = peer.options | {"dtype": np.float64, "param_dtype": np.float64}
  start = jax.eval_shape(lambda: peer.cls(DIM, **options, rngs=nnx.Rngs(0)))
  graphdef, params = nnx.split(start, nnx.Param)
  ours = peer.params(theirs) | peer.constants
  shapes = jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(params))
  assert jax.tree.map(np.shape, ours) == shapes, case
  return nnx.merge(graphdef, ours)


@pytest.mark.parametrize("case", PEERS)
def test_layer_equals_the_recorded_one(case):
  want = golden()[case]
  with jax.enable_x64(True):
    out, (gradients, dx) = evaluate(layer_of(case), inputs(case), cotangent(case))
    tolerance = TOLERANCES.get(case, TOLERANCE)
    assert relative_error(out, want["out"]) < tolerance
    assert relative_error(dx, want["x"]) < tolerance
    got = nnx.to_pure_dict(nnx.state(gradients, nnx.Param))
    convert = PEERS[case].params
    nothing = convert({name: np.zeros_like(value) for name, value in want.items()})
    expected = jax.tree.map(np.subtract, convert(want), nothing)
    for path, gradient in jax.tree.leaves_with_path(expected):
      value = functools.reduce(lambda tree, key: tree[key.key], path, got)
      assert relative_error(value, gradient) < tolerance, jax.tree_util.keystr(path)


def decoded_cases():
  for case, peer in PEERS.items():
    if peer.layer in MIXERS and case != "rwkv7_fla_later":  # which takes values of another layer
      yield pytest.param(case, marks=[pytest.mark.slow] * (case not in DECODED))


@pytest.mark.parametrize("case", list(decoded_cases()))
def test_decoding_equals_the_recorded_layer(case):
  with jax.enable_x64(True):
    out = decode(layer_of(case), inputs(case))
  assert relative_error(out, golden()[case]["out"]) < STEP_TOLERANCES.get(case, TOLERANCE)


@pytest.mark.parametrize(
  "case", ["gla_fla_conv", "gsa_fla_grouped", "gated_delta_net_fla_no_conv", "mamba3_mimo"]
)
def test_packed_documents_equal_separate_ones_with_options(case):
  """The optional convolutions are reset too, and those that are left out keep nothing."""
  with jax.enable_x64(True):
    layer, x, ids = layer_of(case), inputs(case), np.repeat([[3, 1]] * 2, [2, 4], axis=1)
    call = jax.jit(lambda x, ids=None: layer(x, None, ids))
    packed, state = call(x, ids)
    second, last = call(x[:, 2:])
    assert relative_error(packed[:, 2:], second) < TOLERANCE
    assert relative_error(packed[:, :2], golden()[case]["out"][:, :2]) < TOLERANCE
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [case for case, peer in PEERS.items() if peer.layer in MIXERS])
def test_options_keep_the_promises_of_dtypes(case):
  """In bfloat16: the output; states are float32, as `init_state` makes them, but for a cache."""
  peer = PEERS[case]
  options = peer.options | {"dtype": jnp.bfloat16}
  layer = jax.eval_shape(lambda: peer.cls(DIM, **options, rngs=nnx.Rngs(0)))
  x = jax.ShapeDtypeStruct((2, 5, DIM), jnp.bfloat16)
  out, state = jax.eval_shape(lambda layer, x: layer(x), layer, x)
  assert (out.shape, out.dtype) == ((2, 5, DIM), jnp.bfloat16)
  expected = jax.eval_shape(lambda layer: layer.init_state(2), layer)
  assert jax.tree.map(lambda s: (s.shape, s.dtype), state) == jax.tree.map(
    lambda s: (s.shape, s.dtype), expected
  )


def test_every_recorded_layer_is_compared_and_named_in_the_docs():
  assert golden().keys() == PEERS.keys()
  page = (Path(__file__).parents[2] / "docs" / "mixers.md").read_text()
  assert [case for case in PEERS if f"`{case}`" not in page] == []
