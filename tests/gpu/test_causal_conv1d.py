"""The kernels of the causal convolution on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.gpu.hardware import assert_bits_repeat, fill_memory_with_nan
from tests.kernels.test_causal_conv1d import BF16, F32, Case, call, check, drawn
from tests.ops import contract, promises

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
  "case",
  [
    Case(T=1000),
    Case(T=1000, D=1024, dtype=BF16),
    Case(T=4100, D=2304, W=3, dtype=BF16, segments=False, bias=False),
    Case(T=130, W=2, D=512, silu=False, state=False),
    Case(T=2, D=128, dtype=BF16),
    Case(T=1, W=1),
    Case(T=1000, S=4, W=2, D=1024, bias=False, dtype=BF16),
    Case(T=130, S=6, W=2, D=256, bias=False),
  ],
  ids=str,
)
def test_causal_conv1d_on_gpu_matches_reference(case):
  fill_memory_with_nan()
  check(case, "pallas")


@functools.partial(jax.jit, static_argnums=(0, 2))
def with_gradients(case, arrays, form):
  """y, the state and the gradients of a sum in which no two steps weigh alike."""

  def functional(arrays):
    out, last = call(case, arrays, form)
    wide = out.astype(arrays["kernel"].dtype)
    weight = jnp.cos(jnp.arange(wide.shape[1], dtype=wide.dtype))[:, None]
    return jnp.sum(wide * weight) + jnp.sum(last.inputs), {"out": out, "state": last}

  (_, values), gradients = jax.value_and_grad(functional, has_aux=True)(arrays)
  return {"values": values, "gradients": gradients}


@pytest.mark.parametrize(
  ("case", "B"),
  [
    (Case(T=2048, D=4096, dtype=BF16, state=False, segments=False), 8),
    (Case(T=2048, D=4096, dtype=BF16), 8),
    (Case(T=32768, D=2048, dtype=BF16, bias=False), 1),
    (Case(T=2048, D=2048), 8),
  ],
  ids=str,
)
def test_causal_conv1d_at_model_sizes_matches_reference(case, B):
  """128 channels against the reference; every bit of all, again and again."""
  arrays = {n: jnp.asarray(x, F32) for n, x in drawn(case, B=B).items()}
  arrays["x"] = arrays["x"].astype(case.dtype)
  fill_memory_with_nan()
  first = with_gradients(case, arrays, "pallas")
  assert_bits_repeat(lambda: with_gradients(case, arrays, "pallas"), first)
  channels = slice(-200, -72)
  with jax.enable_x64(True):
    exact = {n: x[..., channels].astype(jnp.float64) for n, x in arrays.items()}
    want = jax.tree.map(np.asarray, with_gradients(case, exact, "reference"))
  got = jax.tree.map(lambda x: np.asarray(x[..., channels]), first)
  errors = contract.named_errors(got, want)
  contract.assert_small(errors, case.dtype, case.T)


def test_causal_conv1d_under_vmap_matches_separate_calls():
  """`vmap` runs the same kernels over a larger grid."""
  case = Case(T=200)
  inputs = [{n: jnp.asarray(x, F32) for n, x in drawn(case, seed).items()} for seed in range(2)]
  stack = lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
  apart = stack(*(with_gradients(case, x, "pallas") for x in inputs))
  at_once = jax.vmap(lambda x: with_gradients(case, x, "pallas"))(stack(*inputs))
  promises.close(at_once, apart)
