"""SSE's methods in the kernels of the recurrence inside, on a Hopper GPU: `make test-gpu`.

Everything is compared with the reference in float64, all gradients too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import SSE
from lnssm_jax.ops.sparse_state_attention.cases import SPARSE_STATE_ATTENTION, Case
from tests.gpu.hardware import assert_values_and_gradients

pytestmark = pytest.mark.gpu

WIDE = {"K": 64, "V": 128, "chunk": None, "read": True}


@pytest.mark.parametrize("method", ["mask", "varlen"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
  "options",
  [
    {"T": 300, "N": 4, "S": 1, "segments": True},
    {"T": 1000, "N": 16, "strength": "weak"},
    {"T": 300, "N": 4, "decay": "BTH", "rate": True, "segments": True},
  ],
  ids=str,
)
def test_values_and_gradients(method, state, options):
  case = Case(**WIDE, method=method, state=state, **options)
  assert_values_and_gradients(SPARSE_STATE_ATTENTION, case, jnp.bfloat16)


def test_methods_of_the_mixer_agree_and_decode():
  x = jax.random.normal(jax.random.key(0), (2, 200, 256), jnp.bfloat16)
  segments = (jnp.arange(200) >= 70).astype(jnp.int32)[None].repeat(2, 0)
  outs = {}
  for method in ("gather", "mask", "varlen"):
    sizes = {"num_heads": 2, "num_partitions": 8, "num_selected": 2, "method": method}
    mixer = SSE(256, **sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    run = jax.jit(lambda mixer, x, state=None, ids=None: mixer(x, state, ids))
    out, state = run(mixer, x, None, segments)
    next_out, _ = run(mixer, x[:, :1], state, segments[:, -1:])
    outs[method] = [np.asarray(y, np.float64) for y in (out, next_out)]
  for method in ("mask", "varlen"):
    for got, want in zip(outs[method], outs["gather"], strict=True):
      assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)
