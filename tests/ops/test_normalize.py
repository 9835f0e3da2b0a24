"""normalize: its definition, dtypes, argument checks, dispatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.mixers.common.norms import LayerNorm, RMSNorm, RMSNormFromZero, layer_norm

BF16, F32 = jnp.bfloat16, jnp.float32
X = np.random.default_rng(0).normal(size=(3, 5)) * [[0.1], [1], [10]]
ADDED, GATE = 0.1 * np.cos(X), 2 * np.sin(X)
SCALE, BIAS = np.arange(1.0, 6.0), np.linspace(-1, 1, 5)


def silu(z):
  return z / (1 + np.exp(-z))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("floor", [None, 0.8])
def test_normalize_equals_its_definition(center, gate_first, floor):
  options = {"center": center, "gate_first": gate_first, "floor": floor, "eps": 0.1, "factor": 3}
  arrays = (jnp.float32(z) for z in (SCALE, BIAS))
  y, s = ops.normalize(F32(X), *arrays, added=F32(ADDED), gate=F32(GATE), **options)
  z = X + ADDED
  np.testing.assert_allclose(s, z, rtol=1e-6)
  z = z * silu(GATE) if gate_first else z
  z = z - z.mean(-1, keepdims=True) if center else z
  square = np.mean(z**2, -1, keepdims=True)
  assert floor is None or ((square < floor**2).any() and (square > floor**2).any())
  sigma = np.sqrt(square + 0.1) if floor is None else np.maximum(np.sqrt(square), floor) + 0.1
  want = 3 * z / sigma * SCALE + BIAS
  np.testing.assert_allclose(y, want if gate_first else want * silu(GATE), rtol=1e-5, atol=1e-5)


def test_normalize_without_options_is_an_rms_norm():
  y, s = ops.normalize(F32(X))
  np.testing.assert_allclose(y, X / np.sqrt(np.mean(X**2, -1, keepdims=True) + 1e-5), rtol=1e-6)
  np.testing.assert_array_equal(s, F32(X))
  norm = RMSNorm(5)
  np.testing.assert_array_equal(norm(F32(X)), y)
  y, s = norm.add(F32(X), F32(ADDED), BF16)
  assert (y.dtype, s.dtype) == (BF16, F32)
  want = LayerNorm(5)(F32(X + ADDED)).astype(BF16)
  np.testing.assert_array_equal(LayerNorm(5).add(F32(X), F32(ADDED), BF16)[0], want)


def test_norms_by_name_have_their_eps_scales_and_keys():
  small = 1e-2 * X
  square = lambda z: np.mean(z**2, -1, keepdims=True)
  centered = small - small.mean(-1, keepdims=True)
  want = centered / np.sqrt(square(centered) + 1e-5)
  np.testing.assert_allclose(layer_norm(F32(small)), want, rtol=1e-5, atol=1e-6)
  want = X / np.sqrt(square(X) + 0.5)
  for norm in (RMSNorm(5, eps=0.5), RMSNormFromZero(5, eps=0.5)):
    np.testing.assert_allclose(norm(F32(X)), want, rtol=1e-6)
  assert not RMSNormFromZero(5).scale[...].any()
  for norm, keys in ((RMSNorm, 1), (LayerNorm, 2)):  # as flax's draw, in the same order
    rngs = nnx.Rngs(0)
    norm(5, rngs=rngs)
    assert rngs.params.count[...] == keys
  with jax.enable_x64(True):
    assert ops.normalize(F32(X), jnp.asarray(SCALE))[0].dtype == jnp.float64


def test_normalize_narrow_sum_is_rounded_before_it_is_normalized():
  x, added = (jnp.asarray(z, BF16) for z in (X, ADDED))
  y, s = ops.normalize(x, added=added, dtype=BF16)
  assert s.dtype == BF16
  np.testing.assert_array_equal(s, x + added)
  np.testing.assert_array_equal(y, ops.normalize(s)[0].astype(BF16))
  with jax.enable_x64(True):
    assert ops.normalize(jnp.asarray(X))[0].dtype == jnp.float64


def test_normalize_at_zero_has_a_finite_gradient():
  for floor in (None, 0.01):
    slope = jax.grad(lambda x, floor=floor: ops.normalize(x, floor=floor)[0].sum())(jnp.zeros(8))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(
  ("arguments", "options", "message"),
  [
    ((jnp.ones((2, 3), int),), {}, "x has dtype int32"),
    ((jnp.ones(()),), {}, r"x has shape \(\)"),
    ((jnp.ones((2, 0)),), {}, r"x has shape \(2, 0\)"),
    ((F32(X), jnp.ones(4)), {}, r"scale has shape \(4,\)"),
    ((F32(X), None, jnp.ones((3, 5))), {}, r"bias has shape \(3, 5\)"),
    ((F32(X)[None], jnp.ones((2, 5))), {}, r"scale has shape \(2, 5\).*\[H, D\]"),
    ((F32(X),), {"added": jnp.ones(5)}, r"added has shape \(5,\)"),
    ((F32(X),), {"gate": jnp.ones((3, 4))}, r"gate has shape \(3, 4\)"),
    ((F32(X),), {"eps": -1e-5}, "eps=-1e-05 must be a Python number, 0 or more"),
    ((F32(X),), {"floor": True}, "floor=True must be a Python number"),
    ((F32(X),), {"factor": jnp.ones(())}, "factor=.* must be a Python number"),
    ((F32(X),), {"dtype": "int32"}, "dtype=int32 must be floating point"),
    ((F32(X),), {"implementation": "chunked"}, "implementation='chunked' is unknown; use one of"),
  ],
)
def test_normalize_bad_argument_raises_naming_it(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    ops.normalize(*arguments, **options)


@pytest.mark.parametrize(
  ("shape", "dtype", "message"),
  [
    ((2, 64), jnp.float16, "x has dtype float16"),
    ((2, 100), F32, "x has 100 channels"),
    ((2, 1088), F32, "x has 1088 channels"),
    ((2, 8192), F32, "x has 8192 channels"),
    ((64,), F32, "x has 1 axes"),
    ((1, 2, 3, 4, 64), F32, "x has 5 axes"),
  ],
)
def test_normalize_unsupported_argument_raises_naming_it(shape, dtype, message):
  with pytest.raises(NotImplementedError, match=message):
    ops.normalize(jnp.ones(shape, dtype), dtype=F32, implementation="pallas_interpret")


@pytest.mark.parametrize(
  ("shape", "takes_kernels"),
  [
    ((16, 2048, 1024), True),
    ((4096, 64), True),
    ((1, 1, 1024), False),  # XLA fuses a few tokens into one loop
    ((1, 1001, 1024), False),  # padding would copy x
    ((16, 2048, 1000), False),
  ],
)
def test_normalize_on_hopper_prefers_kernels_by_size(shape, takes_kernels, hopper):
  call = lambda x: ops.normalize(x, dtype=BF16)
  program = str(jax.make_jaxpr(call)(jax.ShapeDtypeStruct(shape, BF16)))
  assert ("norm_forward" in program) == takes_kernels


@pytest.mark.parametrize(("axis", "takes_kernels"), [("fsdp", True), ("tensor", False)])
def test_normalize_of_all_channels_is_left_to_xla_under_tensor_parallelism(
  axis, takes_kernels, hopper
):
  """XLA adds up the sums of sharded channels; a kernel would have them gathered."""
  mesh = jax.sharding.AbstractMesh((2,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
  call = lambda x: ops.normalize(x, dtype=BF16)
  with jax.sharding.use_abstract_mesh(mesh):
    program = str(jax.make_jaxpr(call)(jax.ShapeDtypeStruct((16, 2048, 1024), BF16)))
  assert ("norm_forward" in program) == takes_kernels
