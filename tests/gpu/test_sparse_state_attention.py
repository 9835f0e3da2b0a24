"""SSE's methods in the kernels of the recurrence inside, on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import SSE
from tests.gpu.hardware import alone, assert_values_and_gradients, compiled
from tests.ops.cases.sparse_state_attention import SPARSE_STATE_ATTENTION, Case

pytestmark = pytest.mark.gpu

WIDE = {"K": 64, "V": 128, "chunk": None, "read": True}


# Every method with and without a state, and with all options, which have a state in one method.
FORMS = [("mask", False), ("varlen", True)], [("mask", True), ("varlen", False)]
OPTIONS = [
  ({"T": 300, "N": 4, "S": 1, "segments": True}, FORMS[0]),
  ({"T": 1000, "N": 16, "strength": "weak"}, FORMS[1]),
  ({"T": 300, "N": 4, "decay": "BTH", "rate": True, "segments": True}, FORMS[1]),
]
CASES = [
  Case(**WIDE, method=method, state=state, **options)
  for options, forms in OPTIONS
  for method, state in forms
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
  assert_values_and_gradients(SPARSE_STATE_ATTENTION, case, jnp.bfloat16)


def test_methods_of_the_mixer_agree_and_decode():
  x = jax.random.normal(jax.random.key(0), (2, 200, 256), jnp.bfloat16)
  segments = (jnp.arange(200) >= 70).astype(jnp.int32)[None].repeat(2, 0)
  outs = {}
  for method in ("gather", "mask", "varlen"):
    sizes = {"num_heads": 2, "num_partitions": 8, "num_selected": 2, "method": method}
    mixer = SSE(256, **sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    call = lambda mixer, x, state, ids: mixer(x, state, ids)
    run = compiled(call, mixer, x, None, segments)
    step = compiled(call, mixer, x[:, :1], run.out_info[1], segments[:, -1:])
    with alone:
      out, state = run(mixer, x, None, segments)
      next_out, _ = step(mixer, x[:, :1], state, segments[:, -1:])
      outs[method] = [np.asarray(y, np.float64) for y in (out, next_out)]
  for method in ("mask", "varlen"):
    for got, want in zip(outs[method], outs["gather"], strict=True):
      assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)
