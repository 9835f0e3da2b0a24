"""mLSTM: its unit and its stabilizer, options, initial values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MLSTM
from lnssm_jax.mixers.mlstm import _running_maximum
from lnssm_jax.ops import recording
from lnssm_jax.ops.core.segments import segments_of
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import mlstm as reference
from tests.mixers.tiny import DIM, HEADS, disturbed, inputs

T = 40
UNCAPPED = {"gate_soft_cap": None, "denominator_eps": 0.0}


def gates_of(mixer, size, forget):
  """The mixer with input gates of exp(size) and forget gates whose logits are near `forget`."""
  graph, params = split(mixer)
  params["i_proj"]["kernel"] = params["i_proj"]["kernel"] * size
  params["f_proj"]["bias"] = params["f_proj"]["bias"] + forget
  return nnx.merge(graph, params)


@pytest.mark.parametrize(
  ("options", "size", "forget"),
  [
    ({}, 30.0, 5.0),
    pytest.param(UNCAPPED | {"use_bias": True}, 150.0, 1.0, marks=pytest.mark.slow),
    (UNCAPPED | {"variant": "block", "block_size": 2, "norm_eps": 1e-5}, 150.0, -4.0),
    pytest.param(UNCAPPED, 5.0, 1.0, marks=pytest.mark.slow),
  ],
)
def test_mlstm_equals_float64_whatever_its_gates(options, size, forget):
  """Each side of the floor and of both maxima; exp(log i) alone would overflow without a cap."""
  mixer, _ = disturbed(lambda: MLSTM(DIM, **HEADS, **options, rngs=nnx.Rngs(0)))
  mixer, x = gates_of(mixer, size, forget), inputs(2, T)
  ids = np.repeat([[5, 3]], [T - 15, 15], axis=1)
  before = apply(mixer, inputs(2, 15, seed=9))[1]
  numbers = ("gate_soft_cap", "denominator_eps", "norm_eps")
  more = {name: options[name] for name in numbers if name in options}
  run = lambda x: reference.mlstm(float64_params(mixer), np.float64(x), **HEADS, **more)
  out, last = apply(mixer, x, before, jnp.tile(ids, (2, 1)))
  first = np.concatenate([inputs(2, 15, seed=9), x[:, : T - 15]], axis=1)
  for row in range(2):
    want = np.concatenate([run(first[row])[15:], run(x[row, T - 15 :])])
    assert relative_error(out[row], want) < 3e-6
  alone = apply(mixer, x[:, T - 15 :])[1]
  for got, want in zip(jax.tree.leaves(last), jax.tree.leaves(alone), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_op_is_given_no_memory_that_grows():
  """With a maximum that is rounded it would be, by a rounding of m in some of the tokens."""
  mixer = gates_of(disturbed(lambda: MLSTM(DIM, **HEADS, rngs=nnx.Rngs(0)))[0], 20.0, 6.0)

  @jax.jit
  def decays(x):
    with recording() as calls:
      mixer(x)
    return calls[0].arguments["log_decay"]

  assert np.max(decays(inputs(1, 2000))) <= 0


def test_running_maximum_on_the_grid_is_exact_in_each_document():
  random = np.random.default_rng(0)
  grid = lambda z: np.ceil(np.float32(z) * 4096) / np.float32(4096)
  decay = grid(-random.exponential(0.01, (2, 200, 3)))
  x = grid(40 * random.normal(size=decay.shape))
  ids = np.sort(random.integers(4, size=(2, 200)))
  segments = segments_of("test", jnp.asarray(ids), 2, 200)
  start = jnp.asarray(grid(random.normal(size=(2, 3))))
  before, m, last = jax.jit(lambda *z: _running_maximum(*z, segments, None))(decay, x, start)
  want, state = np.zeros_like(x, np.float64), np.float64(start)
  for t in range(200):
    first = t and (ids[:, t] != ids[:, t - 1])
    state = np.where(np.reshape(first, (-1, 1)), 0.0, state)
    np.testing.assert_array_equal(before[:, t], state)
    state = want[:, t] = np.maximum(decay[:, t] + state, x[:, t])
  np.testing.assert_array_equal(m, want)
  np.testing.assert_array_equal(last, want[:, -1])
  assert np.all(decay + (before - m) <= 0)


def test_initial_values():
  params = split(MLSTM(64, num_heads=4, num_layers=2, rngs=nnx.Rngs(0)))[1]
  for name in "qkvg":
    assert np.std(params[f"{name}_proj"]["kernel"]) == pytest.approx((0.4 / 64) ** 0.5, rel=0.05)
  assert np.std(params["o_proj"]["kernel"]) == pytest.approx(1 / 8, rel=0.05)
  np.testing.assert_array_equal(params["i_proj"]["bias"], np.full(4, -10))
  np.testing.assert_array_equal(params["f_proj"]["bias"], [3, 4, 5, 6])
  assert not params["i_proj"]["kernel"].any() and not params["f_proj"]["kernel"].any()
