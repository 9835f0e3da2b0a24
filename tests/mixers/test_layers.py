"""The small layers that mixers share."""

import math
from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.common.activations import exact_gelu, log_gate, silu_gate
from lnssm_jax.mixers.common.norms import (
  LayerNorm,
  RMSNorm,
  layer_norm,
  rms_norm,
  rms_norm_with_floor,
  unit_norm,
)
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads, split_linear
from lnssm_jax.mixers.common.token_shift import interpolated
from lnssm_jax.ops.core.activations import softplus


def before(x, previous=None, segment_ids=None):
  """The token before each of x [T, 1]: `interpolated` with a weight of 0."""
  options = {"axis_name": None, "dtype": x.dtype}
  return interpolated(x[None], [jnp.zeros(1)], previous, segment_ids, **options)[0][0, :, 0]


def test_interpolated_starts_from_the_given_token_and_from_zero():
  x = jnp.arange(1.0, 6.0)[:, None]
  np.testing.assert_array_equal(before(x), [0, 1, 2, 3, 4])
  np.testing.assert_array_equal(before(x, jnp.array([[9.0]])), [9, 1, 2, 3, 4])


def test_interpolated_does_not_cross_segments():
  segment_ids = jnp.array([[3, 3, 0, 3, 3]])
  shifted = before(jnp.arange(1.0, 6.0)[:, None], jnp.array([[9.0]]), segment_ids)
  np.testing.assert_array_equal(shifted, [9, 1, 0, 0, 4])


def test_interpolated_leaks_no_nan_across_segments():
  shifted = before(jnp.array([[1.0], [jnp.nan], [2.0]]), segment_ids=jnp.array([[0, 0, 1]]))
  np.testing.assert_array_equal(shifted, [0, jnp.nan, 0])


@pytest.mark.parametrize(("length", "products"), [(1, 1), (2, 3)])
def test_split_linear_makes_one_product_per_wide_part(length, products):
  """Narrow parts next to each other share one, and all parts of a single token."""
  init = nnx.initializers.normal()
  options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
  layer = Linear(12, 10, kernel_init=init, **options)
  x = jax.random.normal(jax.random.key(0), (2, length, 12))
  run = lambda x: split_linear(layer, x, [2, 4, 3, 1])
  np.testing.assert_array_equal(jnp.concatenate(run(x), axis=-1), layer(x))
  assert [y.dtype for y in run(x)] == [jnp.bfloat16] * 4
  assert str(jax.make_jaxpr(run)(x)).count("dot_general") == products


def test_linear_bias_is_added_in_float32():
  options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
  layer = Linear(4, 3, kernel_init=nnx.initializers.normal(), bias_init="zeros", **options)
  layer.bias = nnx.Param(jnp.full(3, 1e-4))
  x = jnp.ones((2, 4), jnp.bfloat16)
  product = x @ layer.kernel[...].astype(jnp.bfloat16)
  assert layer(x).dtype == jnp.float32
  np.testing.assert_array_equal(layer(x), product.astype(jnp.float32) + 1e-4)


def test_linear_zero_bias_draws_no_random_number():
  dtypes = {"dtype": jnp.float32, "param_dtype": jnp.float32}
  kernel = lambda bias: [
    layer.kernel[...]
    for rngs in (nnx.Rngs(0),)
    for layer in (
      Linear(2, 2, kernel_init=init, bias_init=bias, **dtypes, rngs=rngs)
      for init in 2 * [nnx.initializers.normal()]
    )
  ]
  np.testing.assert_array_equal(kernel("zeros")[1], kernel(None)[1])


def test_interpolated_rounds_once():
  x = jnp.array([1.0, 3.0], jnp.bfloat16)[None, None]
  weights = [nnx.Param(jnp.array([1 / 3, 1.0]))]
  options = {"previous": None, "segment_ids": None, "axis_name": None}
  (wide,) = interpolated(x, weights, **options, dtype=jnp.float32)
  np.testing.assert_array_equal(wide[0, 0], np.float32([1 / 3, 3.0]))
  (narrow,) = interpolated(x, weights, **options, dtype=jnp.bfloat16)
  np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("size", [0.02, 1.0, 1e4])
def test_rms_norm_above_the_floor_is_the_published_one(size):
  x = size * np.random.default_rng(0).normal(size=(3, 16))
  x[np.sqrt(np.mean(x**2, -1)) < 0.01] = size
  gain = np.linspace(0.5, 2, 16)
  want = gain * x / (np.linalg.norm(x, axis=-1, keepdims=True) / 4 + 1e-8)
  got = rms_norm_with_floor(jnp.float32(x), jnp.float32(gain), eps=1e-8, floor=0.01)
  np.testing.assert_allclose(got, want, rtol=2e-6)


def test_rms_norm_below_the_floor_is_linear():
  x = jnp.array([3e-3, -4e-3])
  np.testing.assert_allclose(
    rms_norm_with_floor(x, jnp.ones(2), eps=0.0, floor=0.01), 100 * x, rtol=1e-6
  )


def test_rms_norm_has_a_gradient_at_zero():
  slope = jax.jacobian(lambda x: rms_norm_with_floor(x, jnp.ones(3), eps=1e-8, floor=0.01))(
    jnp.zeros(3)
  )
  np.testing.assert_allclose(slope, 100 * np.eye(3), rtol=1e-5)


def test_norms_by_default_have_the_published_epsilons():
  """Seen where the input is about as small as the root of the epsilon."""
  x = 1e-3 * np.random.default_rng(0).normal(size=(3, 5))
  centered = x - x.mean(-1, keepdims=True)
  mean = lambda x: np.mean(x**2, axis=-1, keepdims=True)
  wants = {
    rms_norm: x / np.sqrt(mean(x) + 1e-5),
    layer_norm: centered / np.sqrt(mean(centered) + 1e-5),
    unit_norm: x / np.sqrt(5 * mean(x) + 1e-6),
  }
  wants |= {RMSNorm(5): wants[rms_norm], LayerNorm(5): wants[layer_norm]}
  for norm, want in wants.items():
    np.testing.assert_allclose(norm(jnp.float32(x)), want, rtol=2e-5)


def test_norms_with_the_epsilon_under_the_root():
  x = np.random.default_rng(0).normal(size=(3, 5))
  gain = np.linspace(0.5, 2, 5)
  got = rms_norm(jnp.float32(x), jnp.float32(gain), eps=0.5)
  want = gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 0.5)
  np.testing.assert_allclose(got, want, rtol=2e-6)
  want = x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 0.5)
  np.testing.assert_allclose(unit_norm(jnp.float32(x), eps=0.5), want, rtol=2e-6)


@pytest.mark.parametrize("norm, slope", [(rms_norm, 1e-5**-0.5), (unit_norm, 1e3)])
def test_rms_and_unit_norm_have_a_gradient_at_zero(norm, slope):
  np.testing.assert_allclose(jax.jacobian(norm)(jnp.zeros(3)), slope * np.eye(3), rtol=1e-5)


def test_gates_and_norms_of_small_dtypes_are_float32():
  x = jnp.full((1, 2), 3, jnp.bfloat16)
  assert rms_norm(x).dtype == unit_norm(x).dtype == silu_gate(x, x).dtype == jnp.float32
  np.testing.assert_allclose(silu_gate(x, x), np.full((1, 2), 9 / (1 + np.exp(-3))), rtol=1e-6)


@pytest.mark.parametrize(
  "function, want, slope",
  [
    (softplus, lambda z: np.logaddexp(z, 0), lambda z: 1 / (1 + np.exp(-z))),
    (
      lambda z: log_gate(z, 16.0),
      lambda z: -np.logaddexp(-z, 0) / 16,
      lambda z: 1 / (1 + np.exp(z)) / 16,
    ),
  ],
  ids=["softplus", "log_gate"],
)
def test_gates_differentiate_their_result(function, want, slope):
  """Exactly, for every z, and without z: the result is kept anyway, and z need not be."""
  z = np.linspace(-80, 80, 641)
  value, pull = jax.vjp(function, jnp.float32(z))
  np.testing.assert_allclose(value, want(z), rtol=1e-6)
  np.testing.assert_allclose(pull(jnp.ones_like(value))[0], slope(z), rtol=1e-6)
  with_gradient = lambda z: jax.vjp(function, z)[1](jnp.ones_like(z))
  jaxpr = jax.make_jaxpr(with_gradient)(jnp.float32(z)).jaxpr
  assert sum(jaxpr.invars[0] in equation.invars for equation in jaxpr.eqns) == 1


def test_heads_are_consecutive_channels():
  x = jnp.arange(12.0).reshape(1, 2, 6)
  heads = split_heads(x, 3)
  np.testing.assert_array_equal(heads[0, 1], [[6, 7], [8, 9], [10, 11]])
  np.testing.assert_array_equal(merge_heads(heads), x)


def gelu_and_slope(x):
  """x Phi(x) and its derivative in float64."""
  normal = np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in x])
  return x * normal, normal + x * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)


def test_exact_gelu_and_its_derivative():
  x = jnp.concatenate([jnp.linspace(-9, 9, 181), jnp.array([-1e30, 0.0, 1e30])])
  got = jax.jvp(exact_gelu, (x,), (jnp.ones_like(x),))
  for values, want in zip(got, gelu_and_slope(np.float64(x)), strict=True):
    np.testing.assert_allclose(values, want, rtol=3e-7, atol=3e-7)
  np.testing.assert_array_equal(jax.vmap(jax.grad(exact_gelu))(x), got[1])


@pytest.mark.parametrize(
  ("dtype", "of_y", "of_slope"), [("bfloat16", 0.501, 0.501), ("float16", 0.51, 0.82)]
)
def test_exact_gelu_of_every_number_of_16_bits_is_rounded_once(dtype, of_y, of_slope):
  """Errors in units in the last place. CPUs flush numbers below 1e-37."""
  x = jnp.arange(2**16, dtype=jnp.uint16).view(dtype)
  limits = np.float32(exact_gelu(jnp.array([-jnp.inf, jnp.inf, jnp.nan], dtype)))
  np.testing.assert_array_equal(limits, np.float32([0, np.inf, np.nan]))
  x = x[jnp.isfinite(x)]
  got = jax.jvp(exact_gelu, (x,), (jnp.ones_like(x),))
  info = jnp.finfo(dtype)
  for values, want, limit in zip(
    got, gelu_and_slope(np.asarray(x, np.float64)), (of_y, of_slope), strict=True
  ):
    assert values.dtype == x.dtype
    magnitude = np.maximum(np.abs(want), float(info.smallest_normal))
    unit = np.exp2(np.floor(np.log2(magnitude)) - info.nmant)
    error = np.abs(np.asarray(values, np.float64) - want)
    assert np.all(error <= limit * unit + 1e-37 * (dtype == "bfloat16"))
  np.testing.assert_array_equal(jax.vmap(jax.grad(exact_gelu))(x), got[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_gelu_of_16_bits_has_higher_derivatives_and_short_residuals(dtype):
  x = jnp.arange(2**16, dtype=jnp.uint16).view(dtype)
  x = x[jnp.abs(x) < 20]
  wide = np.asarray(x, np.float64)
  density = np.exp(-0.5 * wide**2) / math.sqrt(2 * math.pi)
  second = jax.grad(jax.grad(exact_gelu))
  for derivative, want in [
    (second, density * (2 - wide**2)),
    (jax.jacfwd(second), density * (wide**3 - 4 * wide)),
  ]:
    got = np.asarray(jax.jit(jax.vmap(derivative))(x), np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.26 * float(jnp.finfo(dtype).eps))
  pull = jax.vjp(exact_gelu, x)[1]
  assert [(leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(pull)] == [(x.dtype, x.shape)]


def test_exact_gelu_and_its_derivative_of_16_bits_share_no_quotient():
  """XLA would keep what they share, in float32, for the backward pass."""
  x = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16)
  program = jax.jit(lambda x: jax.jvp(exact_gelu, (x,), (x,))).lower(x).compile().as_text()
  assert program.count(" divide(") == 2


# Mixers with a norm; the options of those that have it by choice.
NORMED = {name for name, cls in MIXERS.items() if "norm_eps" in signature(cls.__init__).parameters}
CHOSEN = {key: {"inner_norm": "rms"} for key in ("mamba", "longhorn", "longhorn_exact")}
CHOSEN |= {key: {"qk_norm": True} for key in ("softmax_attention", "sliding_window_attention")}


def program(name, **options):
  """The jaxpr of a call."""
  cls = MIXERS[name]
  options |= {"num_heads": 2} if "num_heads" in cls.set_by_model else {}
  build = lambda: cls(32, **CHOSEN.get(name, {}), **options, rngs=nnx.Rngs(0))
  graph, params = nnx.split(jax.eval_shape(build), nnx.Param)
  x = jax.ShapeDtypeStruct((1, 4, 32), jnp.float32)
  return str(jax.make_jaxpr(lambda p, x: nnx.merge(graph, p)(x)[0])(params, x))


@pytest.mark.parametrize("name", sorted(NORMED))
def test_norm_eps_of_a_mixer_is_that_of_its_norm(name):
  """Seen in the jaxpr, where the number is added under the root or to it."""
  # RWKV-5 and 6 multiply it by 64, RWKV-7 by the width of a head, here 16.
  scaled = {"rwkv5": "21.0", "rwkv6": "21.0", "rwkv7": "5.25"}
  seen = scaled.get(name, "0.328125")
  assert seen in program(name, norm_eps=0.328125)
  assert name not in scaled or seen not in program(name)
  for wrong in (0, 1.0, True, "1e-5"):
    with pytest.raises(ValueError, match=rf"norm_eps={wrong!r} must be a (finite )?number"):
      program(name, norm_eps=wrong)


@pytest.mark.parametrize("name", sorted(MIXERS.keys() - NORMED))
def test_mixer_without_norm_eps_has_no_norm(name):
  assert "rsqrt" not in program(name)
