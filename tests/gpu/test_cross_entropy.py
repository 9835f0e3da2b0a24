"""The kernel of the cross-entropy on a Hopper GPU: `make test-gpu`.

Terms and gradients are compared with float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.cross_entropy import pallas
from lnssm_jax.ops.cross_entropy.types import CrossEntropy
from tests.gpu.hardware import alone, assert_bits_repeat, compiled, fill_memory_with_nan, same_bits
from tests.kernels.test_cross_entropy import BF16, F32, Case, check, drawn
from train.step.loss import next_token_loss

pytestmark = pytest.mark.gpu

# More positions than SMs, so that CTAs have several of them.
PENALTIES = {"logit_penalty": 0.3, "z_loss": 0.2}
CASES = [
  Case(V=32000, vocab_size=32000, T=300, config=None),
  Case(V=32000, vocab_size=32000, T=300, config=None, **PENALTIES),
  Case(V=50304, vocab_size=50277, T=300, config=None, **PENALTIES),  # fills all slots
  Case(V=50304, vocab_size=50277, T=300, dtype=F32, config=None),  # loaded twice
  Case(V=65536, vocab_size=65530, T=140, config=None, **PENALTIES),  # loaded twice
  Case(V=50304, vocab_size=50277, T=300, dtype=None, config=None, **PENALTIES),
  Case(V=4224, vocab_size=4100, B=3, T=101, dtype=F32, config=None, **PENALTIES),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cross_entropy_on_gpu_matches_float64(case):
  inputs = drawn(case)
  run = compiled(lambda inputs: pallas.run(inputs, case.options()), inputs)
  with alone:
    fill_memory_with_nan()
    got = jax.device_get(run(inputs))
  check(case, jax.tree.map(np.asarray, CrossEntropy(*got)), inputs)


@pytest.mark.parametrize("size", [(4096, 32000, 32000), (4608, 50304, 50277)], ids=str)
def test_cross_entropy_at_model_sizes_repeats_bits(size):
  T, V, vocab_size = size
  case = dataclasses.replace(CASES[1], T=T, V=V, vocab_size=vocab_size)
  inputs = drawn(case)
  run = compiled(lambda inputs: pallas.run(inputs, case.options()), inputs)
  same = compiled(same_bits, run.out_info, run.out_info)
  with alone:
    assert_bits_repeat(run, [inputs], same)


def test_loss_on_gpu_with_the_kernel_equals_that_without():
  """The logits of both are the same, from the same product; gradients differ by roundings."""
  B, T, D, V = 4, 512, 256, 50277
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys[0], (B, T, D)).astype(BF16)
  head = jax.random.normal(keys[1], (D, V)) * D**-0.5
  targets = jax.random.randint(keys[2], (B, T), 0, V)
  weights = jax.random.bernoulli(keys[3], 0.8, (B, T)).astype(F32)
  hidden = jnp.where(weights[..., None] != 0, hidden, jnp.nan)

  def run(hidden, head, implementation):
    def nats(hidden, head):
      options = {"chunk": 1024, **PENALTIES, "implementation": implementation}
      sums = next_token_loss(hidden, head, targets, weights, **options)
      return sums.nats, sums

    return jax.value_and_grad(nats, (0, 1), has_aux=True)(hidden, head)

  programs = [
    compiled(functools.partial(run, implementation=form), hidden, head)
    for form in ("pallas", "reference")
  ]
  with alone:
    fill_memory_with_nan()
    got, want = jax.device_get([program(hidden, head) for program in programs])
  ((_, sums), gradients), ((_, other), others) = got, want
  np.testing.assert_allclose(sums.nats, other.nats, rtol=2e-6)
  np.testing.assert_allclose(sums.penalty, other.penalty, rtol=2e-6)
  for x, y in zip(gradients, others, strict=True):
    x, y = (np.asarray(z, np.float64) for z in (x, y))
    assert np.linalg.norm(x - y) < 2**-8 * np.linalg.norm(y)
  assert not np.asarray(gradients[0], np.float32)[np.asarray(weights) == 0].any()
