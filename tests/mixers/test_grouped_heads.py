"""Layers whose keys, values and decays have fewer heads than their queries."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.mixers import MIXERS
from lnssm_jax.ops.core.recording import observing
from tests.mixers import tiny
from tests.ops.promises import close

SHARED = ("k", "v", "log_decay", "value_log_decay")


@pytest.mark.parametrize(("name", "states"), [("gla", 2), ("gsa", 2), ("retnet", 4)])
def test_neighboring_heads_share_keys_values_and_decays(name, states):
  """As in fla and in published models of grouped attention: head h has the keys of head h // 2.

  The op is given no copies; there is one state for each group, but for RetNet's, whose heads have
  decays of their own.
  """
  mixer = MIXERS[name](tiny.DIM, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
  shapes = []

  def compare(call, run):
    result = run()
    if call.op != "linear_attention":
      return result
    x = call.arguments
    shapes.append(tuple(x[n].shape[2] for n in "qkv"))
    copies = {
      n: x[n] if x[n] is None or x[n].ndim < 4 else jnp.repeat(x[n], 2, axis=2) for n in SHARED
    }
    want, _ = ops.linear_attention(x["q"], **copies, scale=x["scale"])
    close(result[0], want)
    return result

  with observing(compare):
    _, state = mixer(tiny.inputs(1, 3))
  assert shapes and set(shapes) == {(4, 2, 2)}
  matrices = [x for x in jax.tree.leaves(state) if x.ndim == 4]
  assert matrices and all(x.shape[1] == states for x in matrices)
  empty = mixer.init_state(1)
  assert jax.tree.map(jnp.shape, empty) == jax.tree.map(jnp.shape, state)
