"""The causal convolution: its argument checks, dtypes and choice of implementation.

(Values, state and packed documents: tests/mixers/test_short_convolution.py.)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops import dispatch

BF16, F32 = jnp.bfloat16, jnp.float32
X, KERNEL, BIAS = jnp.ones((2, 9, 3)), jnp.ones((4, 3)), jnp.ones(3)


@pytest.mark.parametrize(
  ("arguments", "options", "message"),
  [
    ((X[0], KERNEL), {}, r"x has shape \(9, 3\)"),
    ((X[:, :0], KERNEL), {}, r"x \(2, 0, 3\) has an empty axis"),
    ((X.astype(int), KERNEL), {}, "x has dtype int32"),
    ((X, KERNEL[:, :2]), {}, r"kernel has shape \(4, 2\)"),
    ((X, KERNEL[:0]), {}, r"kernel \(0, 3\) has no steps"),
    ((X, KERNEL, BIAS[:2]), {}, r"bias has shape \(2,\)"),
    ((X, KERNEL), {"initial_state": X[:, :4]}, r"initial_state has shape \(2, 4, 3\)"),
    ((X, KERNEL), {"segment_ids": jnp.ones((2, 3), int)}, r"segment_ids has shape \(2, 3\)"),
    ((X, KERNEL), {"activation": "relu"}, "activation='relu' is unknown; use 'silu' or None"),
    ((X, KERNEL), {"dtype": "int32"}, "dtype=int32 must be floating point"),
    ((X, KERNEL), {"implementation": "chunked"}, "implementation='chunked' is unknown; use one of"),
  ],
)
def test_bad_arguments_are_named(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    ops.causal_conv1d(*arguments, **options)


def test_the_result_is_rounded_once():
  x = jax.random.normal(jax.random.key(0), X.shape).astype(BF16)
  wide, state = ops.causal_conv1d(x, KERNEL, BIAS, activation="silu", dtype=F32)
  y, _ = ops.causal_conv1d(x, KERNEL, BIAS, activation="silu")
  assert (y.dtype, wide.dtype, state.dtype) == (BF16, F32, F32)
  np.testing.assert_array_equal(y, wide.astype(BF16))
  z, _ = ops.causal_conv1d(x, KERNEL, BIAS, dtype=F32)
  np.testing.assert_allclose(wide, z / (1 + np.exp(-z)), rtol=1e-6)
  with jax.enable_x64(True):
    y, state = ops.causal_conv1d(x.astype("float64"), KERNEL)
  assert y.dtype == state.dtype == jnp.float64


@pytest.mark.parametrize(
  ("shape", "width", "dtype", "expected"),
  [
    ((2, 2, 128), 4, F32, ["pallas", "xla"]),
    ((2, 2048, 2304), 2, BF16, ["pallas", "xla"]),
    ((2, 1, 128), 4, BF16, ["xla", "pallas"]),  # one step is one loop of XLA's
    ((2, 2, 130), 4, BF16, ["xla", "pallas"]),  # padding would copy x
    ((2, 2, 128), 5, BF16, ["xla"]),
    ((2, 2, 128), 4, jnp.float16, ["xla"]),
    ((65536, 2, 128), 4, BF16, ["xla"]),
  ],
  ids=str,
)
def test_what_hopper_runs(shape, width, dtype, expected, monkeypatch):
  monkeypatch.setattr(dispatch, "hopper_obstacle", lambda: None)
  x, kernel = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((width, shape[2]), F32)
  found = []

  def trace(x, kernel):
    found.extend(ops.supported(ops.causal_conv1d, x, kernel))

  jax.eval_shape(trace, x, kernel)
  assert found == expected + ["pallas_interpret"] * ("pallas" in expected)


def test_what_cannot_run_is_named():
  x, kernel = jnp.ones((2, 9, 128)), jnp.ones((4, 128))
  run = lambda *args, **options: ops.causal_conv1d(*args, **options)
  for arguments, options, message in [
    ((x.astype("float16"), kernel), {}, "x has dtype float16"),
    ((x, kernel), {"dtype": "float16"}, "y has dtype float16"),
    ((x, jnp.ones((5, 128))), {}, "W=5"),
    ((jnp.ones((65536, 1, 3)), KERNEL), {}, "x has 65536 sequences"),
  ]:
    with pytest.raises(NotImplementedError, match=message):
      run(*arguments, **options, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="need a Hopper GPU"):
    run(x, kernel, implementation="pallas")
