"""Products of projections in FP8, against float64; which products of a model they are."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax.mixers.common import fp8
from lnssm_jax.mixers.common.projections import Linear, split_linear
from lnssm_jax.models import LanguageModel, ModelConfig
from lnssm_jax.ops.core.precision import wide
from pallas_kernels.core import device

# Of a number in the normal range of a format, relative; of a smaller one, in units of the scale.
ROUNDING = {fp8.VALUES: 2.0**-4, fp8.GRADIENTS: 2.0**-3}
SMALLEST = {fp8.VALUES: 2.0**-10, fp8.GRADIENTS: 2.0**-17}
LAST = (((1,), (0,)), ((), ()))


def arrays(dtype, scales=(1.0, 0.02, 1e-3)):
  """x [48, 256], W [256, 272] and the cotangent [48, 272] with these standard deviations."""
  rng = np.random.default_rng(0)
  shapes = (48, 256), (256, 272), (48, 272)
  return [
    jnp.asarray(scale * rng.standard_normal(shape), dtype)
    for scale, shape in zip(scales, shapes, strict=True)
  ]


def bound(a, b, of_a, of_b):
  """Largest error of a b [i, j] [j, k] in float64 if each entry is rounded to its format."""
  largest = [np.abs(x).max() for x in (a, b)]
  a, b = np.abs(a), np.abs(b)
  # A scale is less than twice what maps the largest modulus to the largest number.
  steps = [
    2 * most / float(jnp.finfo(of).max) * SMALLEST[of]
    for most, of in zip(largest, (of_a, of_b), strict=True)
  ]
  wrong_a, wrong_b = ROUNDING[of_a] * a + steps[0], ROUNDING[of_b] * b + steps[1]
  return wrong_a @ b + a @ wrong_b + wrong_a @ wrong_b


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_product_and_gradients_are_within_the_rounding_of_their_formats(dtype):
  x, kernel, cotangent = arrays(dtype)

  @jax.jit
  def run(x, kernel, cotangent):
    y, transpose = jax.vjp(lambda x, kernel: fp8.dot_general(x, kernel, LAST), x, kernel)
    return y, *transpose(cotangent)

  y, dx, dkernel = run(x, kernel, cotangent)
  assert {y.dtype, dx.dtype, dkernel.dtype} == {jnp.dtype(dtype)}
  X, W, G = (np.asarray(wide(a), np.float64) for a in (x, kernel, cotangent))
  values, gradients = fp8.VALUES, fp8.GRADIENTS
  last = 2.0**-8 if dtype == "bfloat16" else 2.0**-20  # of the result, or of its sums
  for name, found, factors, formats in (
    ("y", y, (X, W), (values, values)),
    ("dx", dx, (G, W.T), (gradients, values)),
    ("dW", dkernel, (X.T, G), (values, gradients)),
  ):
    want, most = factors[0] @ factors[1], bound(*factors, *formats)
    error = np.abs(np.asarray(wide(found), np.float64) - want)
    assert (error <= most + last * (np.abs(want) + most)).all(), name
    # Independent errors, uniform between two numbers of a format: relative to the norm of all.
    usual = np.sqrt(sum(ROUNDING[of] ** 2 for of in formats) / 3)
    assert 0.3 * usual < np.linalg.norm(error) / np.linalg.norm(want) < usual, name


def test_scaled_arrays_keep_their_largest_number():
  scales = np.asarray([0.0, 1e-30, 1e-12, 1.0, 3e30])
  x = np.asarray(scales[:, None] * np.linspace(-1, 1, 511), np.float32)
  dtypes = fp8.VALUES, fp8.GRADIENTS
  run = jax.jit(jax.vmap(lambda x: [fp8._scaled(x, dtype) for dtype in dtypes]))
  for dtype, (values, factors) in zip(dtypes, run(x), strict=True):
    factors = np.asarray(factors, np.float64)[:, None]
    assert (np.frexp(factors)[0] == 0.5).all()  # powers of two
    error = np.abs(np.asarray(values, np.float64) * factors - x)
    assert (error <= ROUNDING[dtype] * np.abs(x) + factors * SMALLEST[dtype]).all()


def test_gradients_are_the_same_with_a_policy_that_keeps_everything():
  x, kernel, _ = arrays("float32")
  keep = jax.checkpoint_policies.everything_saveable
  multiply = lambda x, kernel: jnp.sum(jnp.sin(fp8.dot_general(x, kernel, LAST)))
  run = jax.jit(
    lambda *of: [jax.grad(f)(*of) for f in (multiply, jax.checkpoint(multiply, policy=keep))]
  )
  np.testing.assert_array_equal(*run(x, kernel))


def test_product_of_what_is_not_finite_is_not_finite():
  x, kernel, _ = arrays("float32")
  run = jax.jit(fp8.product)
  for wrong in (np.nan, np.inf):
    assert not np.isfinite(np.asarray(run(x.at[3, 5].set(wrong), kernel))[3]).any()


def model(**changes):
  settings = {"vocab_size": 512, "dim": 512, "num_layers": 1, "num_heads": 2, "mixer": "gla"}
  settings |= {"channel_mixer": "swiglu", "dtype": "bfloat16", "matmul": "fp8"} | changes
  return LanguageModel(**settings, rngs=nnx.Rngs(0))


def products(run, *arguments):
  """[D, F] of the products in FP8 that a function makes, and the number of its others."""
  found, others = [], 0
  for eqn in _products(jax.make_jaxpr(run)(*arguments).jaxpr):
    kernel = eqn.invars[1].aval
    is_narrow = kernel.dtype == fp8.VALUES
    found, others = found + [kernel.shape] * is_narrow, others + (not is_narrow)
  return sorted(found), others


def _products(jaxpr):
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "dot_general":
      yield eqn
    for inner in jaxprs_in_params(eqn.params):
      yield from _products(inner)


def test_wide_projections_of_layers_are_in_fp8_and_nothing_else():
  graph, params = nnx.split(jax.eval_shape(model))
  run = lambda params, tokens: nnx.merge(graph, params)(tokens)[0]
  found, others = products(run, params, jax.ShapeDtypeStruct((2, 16), jnp.int32))
  q_and_k, v_g_and_o = [(512, 256)] * 2, [(512, 512)] * 3
  assert found == sorted([*q_and_k, *v_g_and_o, (512, 2 * 1536), (1536, 512)])
  # Two products of decays, the head, and those of the recurrence.
  assert others >= 3


def test_wide_parts_of_one_projection_are_in_fp8():
  options = {"kernel_init": nnx.initializers.zeros_init(), "dtype": jnp.bfloat16}
  layer = Linear(256, 700, param_dtype=jnp.float32, rngs=nnx.Rngs(0), **options)
  found = lambda: products(
    lambda x: split_linear(layer, x, [256, 272, 128, 44]), jnp.zeros((1, 2, 256))
  )
  assert found() == ([], 4)
  fp8.use(layer)
  assert found() == ([(256, 256), (256, 272)], 2)


def test_parameters_are_those_of_other_products():
  shapes = lambda **how: jax.eval_shape(
    lambda: nnx.to_pure_dict(nnx.state(model(**how), nnx.Param))
  )
  assert shapes() == shapes(matmul="dtype")


def test_gradient_of_a_kernel_is_summed_over_devices():
  """Each device has its own scale; a kernel is the same on all."""
  mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))

  def loss(x, kernel):
    return jax.lax.psum(jnp.sum(fp8.dot_general(x, kernel, LAST)), "data")

  mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
  x, kernel, _ = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays("float32"))
  lines = str(jax.make_jaxpr(jax.grad(mapped, argnums=1))(x, kernel)).splitlines()
  assert [line for line in lines if "f32[256,272] = psum" in line]


def test_fp8_wrong_settings_rejected(monkeypatch):
  with pytest.raises(ValueError, match="matmul='fp8' sums beyond dtype='float16'; use"):
    ModelConfig(vocab_size=8, dim=8, num_layers=1, mixer="lrn", dtype="float16", matmul="fp8")
  with pytest.raises(ValueError, match="matmul='int8'"):
    ModelConfig(vocab_size=8, dim=8, num_layers=1, mixer="lrn", matmul="int8")
  for capability, rejected in (("8.0", True), ("8.9", False), ("9.0", False), ("10.0", False)):
    gpu = {"platform": "gpu", "device_kind": "A", "compute_capability": capability}
    monkeypatch.setattr(device, "default_device", lambda gpu=gpu: types.SimpleNamespace(**gpu))
    assert (fp8.unsupported() is not None) == rejected
    if rejected:
      with pytest.raises(ValueError, match=r"compute capability 8\.9 .* use matmul='dtype'"):
        fp8.use(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
