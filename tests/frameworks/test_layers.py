"""All mixers as systems (DSF) and as expansion, oscillation, shrinkage (LCSM), in float64.

The oracle is the mixer's reference in NumPy (tests/mixers/references).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.frameworks import Recurrence, dsf, lcsm, mix_with, recurrences
from lnssm_jax.mixers import MIXERS, Mixer
from tests.mixers import tiny
from tests.mixers.helpers import relative_error, split

T = 5
TAPS = "free taps"
SOFTMAX = "attention is softmax, whose state is all keys and values"
# What the frameworks do not cover, and why.
NO_RECURRENCE = {
  "base_conv": TAPS,
  "hyena": TAPS,
  "lln": "attention is softmax within blocks of tokens, averaged with its linear attention",
  "s4": "taps of a recurrence whose matrix is not diagonal",
  "short_conv": TAPS,
  "sliding_window_attention": SOFTMAX,
  "softmax_attention": SOFTMAX,
  "tnn": TAPS,
}
# Each op with decays, and a layer with two memories; tests/mixers/test_decay.py has all mixers.
DECAYS = ("dss", "gla", "gsa", "longhorn", "mamba", "mom", "rwkv4")
NOT_DIAGONAL = (
  *("comba", "delta_net", "delta_product", "gated_delta_net", "gated_delta_net2", "kda"),
  *("longhorn_exact", "rwkv7"),
)


def build(name, **options):
  """(mixer, its parameters): the tiny mixer, random and float64."""
  options |= {"dtype": jnp.float64, "param_dtype": jnp.float64}
  graph, params = split(jax.eval_shape(lambda: tiny.initial(name, **options)))
  random = np.random.default_rng(0)
  params = jax.tree.map(lambda p: 0.5 * random.normal(size=p.shape), params)
  return nnx.merge(graph, params), params


def through_kernel(recurrence):
  phi = dsf.kernel(dsf.system(recurrence))
  return jnp.einsum("ijab,jb->ia", phi, recurrence.u.reshape(T, -1))


def through_streams(recurrence):
  run = lambda streams: lcsm.recurrence(streams, product=recurrence.product)[0]
  outputs = jnp.moveaxis(jax.vmap(run)(lcsm.streams(recurrence)), 0, 1)
  return recurrence.add_copies(outputs + recurrence.direct * recurrence.u)


@pytest.mark.parametrize("name", [name for name in MIXERS if name not in NO_RECURRENCE])
def test_mixer_equals_its_kernel_matrix_and_its_streams(name):
  x = np.random.default_rng(1).normal(size=(T, tiny.DIM))

  def run(x):
    """(the layer on streams, the outputs of its recurrences by streams and by kernels, decays)."""
    pairs, factors = [], []

    def by_streams(recurrence):
      factors.append(jnp.abs(recurrence.o).reshape(T, -1))
      out = through_streams(recurrence)
      same = out if name in NOT_DIAGONAL else through_kernel(recurrence)
      pairs.append((out, same.reshape(out.shape)))
      return out

    y = mix_with(mixer, x, by_streams)
    if name not in DECAYS:
      return y, pairs, None
    return y, pairs, (jnp.concatenate(factors, axis=1), jnp.exp(mixer.decay(x[None])))

  with jax.enable_x64():
    mixer, params = build(name)
    y, pairs, decays = jax.jit(run)(x)
  want = tiny.TINY[name].reference(params, x, **tiny.TINY[name].reference_options)
  assert relative_error(y, want) < 1e-13
  for by_streams, by_kernel in jax.tree.map(np.asarray, pairs):
    assert np.linalg.norm(by_streams - by_kernel) < 1e-13 * np.linalg.norm(by_streams)
  if decays is not None:  # the same numbers, wherever they are
    factors, kept = map(np.asarray, decays)
    kept = kept[0] if kept.ndim >= 4 else np.broadcast_to(kept, (T, *kept.shape))
    for a, b in zip(factors, kept.reshape(T, -1), strict=True):
      np.testing.assert_allclose(*(np.unique(np.float32(z)) for z in (a, b)), rtol=1e-6)


# Decays of entries, constant expansions, real poles, another vector that erases.
@pytest.mark.parametrize("code", ["1-6-1-0", "0-1-0-0", "0-0-0-0", "0-3-0-0", "1-m2-1-3"])
def test_code_of_lcsm_equals_its_recurrence(code):
  x = np.random.default_rng(1).normal(size=(T, tiny.DIM))
  with jax.enable_x64():
    mixer, params = build("lcsm", code=code)
    y = jax.jit(lambda x: mix_with(mixer, x, Recurrence.outputs))(x)
  assert relative_error(y, tiny.TINY["lcsm"].reference(params, x, code=code)) < 1e-13


@pytest.mark.parametrize("name", NO_RECURRENCE)
def test_mixer_without_a_recurrence_says_why(name):
  run = lambda x: recurrences(tiny.initial(name), x)
  with pytest.raises(
    ValueError, match=rf"{MIXERS[name].__name__} (calls|has) no .*{NO_RECURRENCE[name]}"
  ):
    jax.eval_shape(run, jnp.ones((T, tiny.DIM)))


@pytest.mark.parametrize("name", NOT_DIAGONAL)
def test_delta_rule_is_no_system_with_a_diagonal_matrix(name):
  with pytest.raises(ValueError, match=r"which is not diagonal.*lcsm"):
    jax.eval_shape(lambda x: dsf.systems(tiny.initial(name), x), jnp.ones((T, tiny.DIM)))


class OneOp(Mixer):
  """A layer that is `op` of its input."""

  def __init__(self, op):
    self.dim, self.op = 2, op

  def _mix(self, x, state, segment_ids):
    return self.op(x), None


@pytest.mark.parametrize(
  ("op", "message"),
  [
    (lambda x: ops.diagonal_scan(x, x, reverse=True)[0], "runs from the last token to the first"),
    (
      lambda x: ops.sparse_state_attention(
        *[x[:, :, None]] * 3,
        jnp.zeros((1, T, 1), int), jnp.ones((1, T, 1)), num_partitions=2, beta=x[..., :1],
      )[0][:, :, 0],
      "has the delta rule inside",
    ),
    (
      lambda x: ops.linear_attention(
        *[x[:, :, None]] * 3, bonus=jnp.ones((1, 2)), value_log_decay=-jnp.ones((1, 2))
      )[0][:, :, 0],
      "reads before the update",
    ),
    (lambda x: x, "OneOp calls no recurrence"),
    (lambda x: ops.long_convolution(x, x[0])[0], "has free taps: its state is the window"),
  ],
)  # fmt: skip
def test_ops_outside_the_form_say_why(op, message):
  with pytest.raises(ValueError, match=message):
    recurrences(OneOp(op), jnp.ones((T, 2)))


def test_input_of_another_rank_raises():
  with pytest.raises(ValueError, match=r"x has shape \(1, 5, 8\), but \[T, D\]"):
    recurrences(tiny.starting("lrn"), jnp.ones((1, T, tiny.DIM)))
