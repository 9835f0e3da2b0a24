"""A sum over an op's output in the same program, where XLA for CPUs errs with constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops

B, T, H, K = 4, 64, 1, 64  # one chunk, which reads the empty state itself
COMPILATIONS = 3  # a wrong program is right by chance at times


def _op(name):
  return lambda q, k, v, rate: {
    "linear_attention": lambda: ops.linear_attention(q, k, v, log_decay=jnp.log(rate)),
    "delta_rule": lambda: ops.delta_rule(q, k, v, rate[..., 0]),
  }[name]()[0]


@pytest.mark.parametrize("name", ["linear_attention", "delta_rule"])
@pytest.mark.parametrize("reduction", ["sum of squares", "maximum"])
def test_reduction_in_the_same_program_has_the_value_of_the_output(name, reduction):
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(B, T, H, K)).astype(np.float32) for _ in range(3))
  arrays = q, k / np.linalg.norm(k, axis=-1, keepdims=True), v
  arrays = *arrays, rng.uniform(0.5, 1.0, (B, T, H, K)).astype(np.float32)
  output = np.asarray(_op(name)(*arrays), np.float64)
  reduced = {
    "sum of squares": lambda x: (x * x).sum(axis=-1),
    "maximum": lambda x: x.max(axis=-1),
  }[reduction]
  for _ in range(COMPILATIONS):
    program = jax.jit(lambda *arrays: reduced(_op(name)(*arrays)))  # another program each time
    np.testing.assert_allclose(program(*arrays), reduced(output), rtol=1e-4, atol=1e-5)
