"""RWKV-4, 5 and 6: initial values, against numbers worked out by hand; sizes; bad options."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax.mixers import RWKV4, RWKV5, RWKV6
from lnssm_jax.mixers.common.norms import layer_norm
from lnssm_jax.mixers.common.token_shift import weighted_streams
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


def shard(x, shifted, weights, offsets):
  """`weighted_streams` on one device's part of the time axis."""
  specs = P(None, "time")
  mesh = jax.make_mesh((1,), ("time",), axis_types=(AxisType.Auto,))
  call = jax.shard_map(
    weighted_streams, mesh=mesh, in_specs=(specs, specs, P(), specs), out_specs=specs
  )
  return call(x, shifted, weights, offsets)


@pytest.mark.parametrize("function", [weighted_streams, shard])
def test_rwkv6_streams_have_the_gradient_of_their_formula(function):
  """Every gradient, of five streams, in float64."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape)
  x, shifted, offsets = normal(2, 3, 4), normal(2, 3, 4), normal(2, 3, 20)
  weights, factors = tuple(normal(5, 4)), normal(5, 2, 3, 4)

  def streams(x, shifted, weights, offsets):
    offsets = jnp.split(offsets, 5, axis=-1)
    return [x + (shifted - x) * (w + m) for w, m in zip(weights, offsets, strict=True)]

  def loss(function):
    total = lambda *arrays: sum(
      jnp.sum(f * jnp.sin(y)) for f, y in zip(factors, function(*arrays), strict=True)
    )
    return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(x, shifted, weights, offsets)

  with jax.enable_x64(True):
    chex.assert_trees_all_close(loss(function), loss(streams), rtol=1e-12)
