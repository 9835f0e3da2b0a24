"""RWKV-4, 5 and 6: initial values, against numbers worked out by hand; sizes; bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from lnssm_jax.mixers import RWKV4, RWKV5, RWKV6, shard_time
from lnssm_jax.mixers.common.norms import layer_norm
from tests.kernels.lowered import REPLICATED, assert_shard_map_keeps_shapes, kernels_traced, total
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import rwkv as reference
from tests.mixers.tiny import inputs


def initial(layer, num_layers=6, dim=8):
  return split(RWKV5(dim, num_heads=2, layer=layer, num_layers=num_layers, rngs=nnx.Rngs(0)))[1]


def at(params, path):
  """The parameter of a path such as "norm/scale"."""
  for name in path.split("/"):
    params = params[name]
  return params


@pytest.mark.parametrize(
  "layer, name, channel, value",
  [
    (0, "w", 0, -6.0),
    (0, "w", 7, -1.0),
    (0, "w", 3, -6 + 5 * (3 / 7) ** 0.7),  # r = 0
    (5, "w", 3, -6 + 5 * (3 / 7) ** 2.0),  # r = 1
    (0, "u", 0, 0.0),  # (0 + 1) mod 3 - 1
    (0, "u", 1, 0.1),
    (0, "u", 2, -0.1),
    (5, "u", 1, 1 - 1 / 7 + 0.1),
    (0, "mu_r", 2, 0.5),  # power rho / 2
    (0, "mu_g", 2, 0.5),
    (0, "mu_k", 6, 0.75),  # rho = 1
    (3, "mu_v", 2, 0.5 + 0.3 * 3 / 5),
    (2, "norm/scale", 4, 0.5**0.7),
    (5, "norm/scale", 4, 1.0),
    (5, "norm/bias", 4, 0.0),
  ],
)
def test_initial_values(layer, name, channel, value):
  np.testing.assert_allclose(at(initial(layer), name)[channel], value, rtol=1e-5, atol=1e-7)


def test_initial_matrices():
  params = initial(0)
  for name, gain in {"r": 1, "k": 0.1, "v": 1, "g": 0.1, "o": 0}.items():
    kernel = np.float64(params[f"{name}_proj"]["kernel"])
    np.testing.assert_allclose(kernel @ kernel.T, gain**2 * np.eye(8), atol=1e-6)


def test_a_traced_layer_gives_the_same_values():
  make = lambda layer: RWKV5(8, num_heads=2, layer=layer, num_layers=6, rngs=nnx.Rngs(0))
  stacked = jax.vmap(make)(jnp.arange(6))
  for name in ("w", "u", "mu_v"):
    want = np.stack([initial(layer)[name] for layer in range(6)])
    np.testing.assert_allclose(getattr(stacked, name)[...], want, rtol=1e-6, atol=1e-7)


def test_layer_norm_without_scale_and_bias_matches_numpy():
  x = np.random.default_rng(0).normal(3, 2, size=(5, 7))
  want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.5)
  np.testing.assert_allclose(layer_norm(jnp.float32(x), eps=0.5), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "layer, name, channel, value",
  [
    (0, "w", 0, -5.0),
    (0, "w", 7, 3.0),
    (0, "u", 0, np.log(0.3)),  # (0 + 1) mod 3 - 1
    (3, "u", 1, np.log(0.3) + 0.5),
    (3, "u", 2, np.log(0.3) - 0.5),
    (0, "mu_r", 2, 0.5),  # power rho / 2
    (0, "mu_k", 6, 0.75),  # rho = 1
    (3, "mu_v", 2, 0.5 + 0.3 * 3 / 5),
  ],
)
def test_initial_values_of_rwkv4(layer, name, channel, value):
  params = split(RWKV4(8, layer=layer, num_layers=6, rngs=nnx.Rngs(0)))[1]
  np.testing.assert_allclose(params[name][channel], value, rtol=1e-5)
  for kernel in "rko":
    np.testing.assert_array_equal(params[f"{kernel}_proj"]["kernel"], np.zeros((8, 8)))


@pytest.mark.parametrize(
  "layer, name, channel, value",
  [
    (0, "w", 0, -6.0),
    (5, "w", 3, -6 + 5 * (3 / 7) ** 2.0),
    (5, "u", 1, 1 - 1 / 7 + 0.1),
    (0, "mu_x", 6, 0.25),  # rho = 1
    (0, "mu_w", 6, 0.25),
    (0, "mu_r", 2, 0.5),  # power rho / 2
    (3, "mu_v", 2, 1 - (0.5 + 0.3 * 3 / 5)),
    (2, "norm/scale", 4, 0.5**0.7),
  ],
)
def test_initial_values_of_rwkv6(layer, name, channel, value):
  mixer = RWKV6(8, num_heads=2, layer=layer, num_layers=6, rngs=nnx.Rngs(0))
  params = split(mixer)[1]
  np.testing.assert_allclose(at(params, name)[channel], value, rtol=1e-5, atol=1e-7)
  for kernel in ("mix_down", "decay_down", "o"):
    assert not np.any(params[f"{kernel}_proj"]["kernel"])
  assert 0.009 < np.abs(params["mix_up"]).max() <= 0.01


def test_rwkv6_starts_as_rwkv5():
  """But for W_o, which is zero in both."""
  mixer, x = RWKV6(8, num_heads=2, layer=1, num_layers=3, rngs=nnx.Rngs(0)), inputs(1, 9)
  mixer.o_proj.kernel = nnx.Param(jnp.eye(8))
  params = float64_params(mixer)
  params |= {f"mu_{name}": 1 - params[f"mu_{name}"] for name in "rkvg"}
  want = reference.rwkv5(params, np.float64(x[0]), num_heads=2)
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6


def of_kernels(change=lambda mixer: mixer):
  """The sum of a layer wide enough for the kernels, of (parameters, x); and their shapes."""
  build = lambda: RWKV6(128, num_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  graph, params = nnx.split(change(jax.eval_shape(build)), nnx.Param)
  inputs = params, jax.ShapeDtypeStruct((2, 256, 128), jnp.bfloat16)
  return lambda inputs: total(nnx.merge(graph, inputs[0])(inputs[1])[0]), inputs


def test_rwkv6_gradients_on_shards_are_of_whole_parameters(hopper):
  """Of the kernels too: the types of `shard_map` show a sum over shards that is missing."""
  run, inputs = of_kernels(lambda mixer: shard_time(mixer, "data"))
  assert_shard_map_keeps_shapes(jax.grad(run), inputs, (REPLICATED, P(None, "data")))


def test_rwkv6_streams_are_made_by_one_kernel_in_each_direction(hopper):
  """And the input of their offsets by another one."""
  run, inputs = of_kernels()
  names = kernels_traced(jax.grad(run), inputs)
  assert [names.count(f"causal_conv1d_{n}") for n in ("forward", "backward")] == [2, 2]
