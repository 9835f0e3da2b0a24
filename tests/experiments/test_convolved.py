"""Mixers behind one short convolution of their input, as `lm_convolution.py` compares them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.convolved import Convolved, UnshiftedRWKV5
from tests.mixers.helpers import drawn, float64_params, relative_error
from tests.mixers.references import hgrn, rwkv

DIM, LENGTH, WIDTH = 8, 11, 3


def convolved(x, kernel):
  """x + conv(x) in float64, of x [T, D] and a kernel [W, D]."""
  padded = np.concatenate([np.zeros((len(kernel) - 1, x.shape[1])), x])
  return x + sum(weights * padded[n : n + len(x)] for n, weights in enumerate(kernel))


def test_convolved_mixer_sees_its_input_and_the_tokens_before_it():
  mixer = drawn(lambda: Convolved(DIM, inner="lrn", options={}, conv_size=WIDTH, rngs=nnx.Rngs(0)))
  x = jax.random.normal(jax.random.key(0), (1, 2 * LENGTH, DIM))
  documents = jnp.arange(2 * LENGTH)[None] // LENGTH
  params = float64_params(mixer)
  exact = np.float64(x[0]).reshape(2, LENGTH, DIM)
  inputs = [convolved(document, params["conv"]["kernel"]) for document in exact]
  want = np.concatenate([hgrn.lrn(params["mixer"], document) for document in inputs])
  graph, state = nnx.split(mixer)
  run = jax.jit(lambda state, x, before: nnx.merge(graph, state).with_aux(x, before, documents)[:2])
  whole, last = run(state, x, mixer.init_state(1))
  assert relative_error(whole[0], want) < 2e-6
  np.testing.assert_allclose(last.conv.inputs[0], exact[1, -WIDTH + 1 :], rtol=1e-6)

  # The gradient of the kernel: that of the inner mixer's input times the input, token by token.
  weights = np.random.default_rng(0).normal(size=want.shape)
  loss = lambda state: jnp.sum(run(state, x, mixer.init_state(1))[0] * weights)
  got = jax.grad(loss)(state)["conv"]["kernel"][...]
  step, numeric = 1e-6, np.zeros((WIDTH, DIM))
  for place in np.ndindex(numeric.shape):
    for sign in (1, -1):
      kernel = params["conv"]["kernel"].copy()
      kernel[place] += sign * step
      y = [hgrn.lrn(params["mixer"], convolved(document, kernel)) for document in exact]
      numeric[place] += sign * np.sum(weights * np.concatenate(y)) / (2 * step)
  assert relative_error(got, numeric) < 5e-6

  first, state = mixer(x[:, :5])
  rest, _ = mixer(x[:, 5:LENGTH], state)
  assert relative_error(jnp.concatenate([first, rest], 1)[0], want[:LENGTH]) < 2e-6


def test_without_a_convolution_it_is_the_mixer_itself():
  mixer = drawn(lambda: Convolved(DIM, inner="lrn", options={}, rngs=nnx.Rngs(0)))
  x = jax.random.normal(jax.random.key(0), (1, 4, DIM))
  assert mixer.conv is None
  np.testing.assert_array_equal(mixer(x)[0], mixer.mixer(x)[0])


@pytest.mark.slow
def test_unshifted_rwkv5_has_streams_of_the_token_alone():
  mixer = drawn(lambda: UnshiftedRWKV5(DIM, num_heads=2, rngs=nnx.Rngs(0)))
  params = float64_params(mixer)
  assert not [name for name in params if name.startswith("mu_")]
  x = jax.random.normal(jax.random.key(0), (1, LENGTH, DIM))
  ones = {f"mu_{name}": np.ones(DIM) for name in "rkvg"}
  want = rwkv.rwkv5(params | ones, np.float64(x[0]), num_heads=2)
  assert relative_error(mixer(x)[0][0], want) < 2e-6
