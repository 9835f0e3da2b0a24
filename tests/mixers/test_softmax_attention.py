"""Softmax attention: grouped heads, positions, the cache's maximum length, bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import SlidingWindowAttention, SoftmaxAttention
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import softmax_attention as reference
from tests.mixers.tiny import DIM, disturbed, inputs


def large(cls=SoftmaxAttention, **options):
  """A layer with kernels of the size that learning gives them."""
  graphdef, params = split(cls(DIM, **({"num_heads": 2} | options), rngs=nnx.Rngs(0)))
  return nnx.merge(graphdef, jax.tree.map(lambda p: 20 * p + 0.1, params))


def test_grouped_heads_biases_head_dims_gate_sinks_and_no_positions():
  options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 5, "use_bias": True}
  options |= {"value_head_dim": 3, "use_gate": True, "sinks": True}
  mixer, x = large(positions="none", **options), inputs(1, 9)
  want = reference.softmax_attention(
    float64_params(mixer), np.float64(x[0]), num_heads=4, num_kv_heads=2, rotary=False
  )
  assert relative_error(apply(mixer, x)[0][0], want) < 2e-6
  state = mixer.init_state(3)
  assert (state.k.shape, state.v.shape) == ((3, 2047, 2, 5), (3, 2047, 2, 3))


LATENT = {"kv_rank": 5, "rotary_width": 2, "head_dim": 6, "value_head_dim": 3, "max_length": 12}


@pytest.mark.parametrize(
  "options",
  [
    {"q_rank": 4, "use_bias": True},
    {"window": 4, "max_length": 12},
    pytest.param({"positions": "none"}, marks=pytest.mark.slow),
  ],
)
def test_latent_attention_from_any_token_on_equals_float64(options):
  """Several tokens after a state compute its keys; single ones read the latents themselves."""
  build = lambda: SoftmaxAttention(DIM, num_heads=2, **LATENT | options, rngs=nnx.Rngs(0))
  (mixer, params), x = disturbed(build), 3 * inputs(2, 10)
  run = lambda x: reference.latent_attention(
    params,
    np.float64(x),
    num_heads=2,
    rotary_width=2,
    window=options.get("window"),
    rotary="positions" not in options,
  )
  first, state = apply(mixer, x[:, :3])
  assert (state.k.shape[2:], state.v.shape[2:]) == ((1, 7), (1, 0))
  ids, outputs = jnp.asarray([[4, 4, 4, 1]] * 2), [first]
  outputs.append(apply(mixer, x[:, 3:7], state, ids)[0])
  state = apply(mixer, x[:, 3:7], state, ids)[1]
  for t in range(7, 10):
    out, state = apply(mixer, x[:, t : t + 1], state)
    outputs.append(out)
  got = np.concatenate(outputs, axis=1)
  for row in range(2):
    want = np.concatenate([run(x[row, :6]), run(x[row, 6:])])
    assert relative_error(got[row], want) < 2e-6


def test_dynamic_scaling_has_a_longest_sequence():
  scaling = {"rule": "dynamic", "factor": 2.0, "original_length": 6}
  build = lambda **options: SoftmaxAttention(
    8, num_heads=2, rotary_scaling=scaling, **options, rngs=nnx.Rngs(0)
  )
  build(max_length=6)
  for options in ({"max_length": 7}, {"max_length": 6, "window": 2}):
    with pytest.raises(ValueError, match="max_length must be at most 6, its original_length"):
      build(**options)


def test_sequence_beyond_max_length_raises_or_is_nan():
  mixer, x = large(max_length=6), inputs(2, 7)
  whole, state = apply(mixer, x[:, :6])
  assert np.isfinite(whole).all()
  assert state.k.shape[1] == 5
  with pytest.raises(ValueError, match=r"x has 7 tokens after 0 .* max_length=6.* at least 7"):
    mixer(x)
  with pytest.raises(ValueError, match=r"x has 1 tokens after 6 .* max_length=6"):
    mixer(x[:, 6:], state)
  traced, _ = apply(mixer, x[:, 6:], state)
  assert np.isnan(traced).all()


@pytest.mark.slow
def test_packed_sequences_have_max_length_each():
  mixer, x = large(max_length=6), inputs(1, 15)
  segment_ids = jnp.repeat(jnp.array([[1, 2]]), jnp.array([6, 9]), axis=1, total_repeat_length=15)
  out, _ = apply(mixer, x, None, segment_ids)
  assert np.isfinite(out[:, :12]).all()
  assert np.isnan(out[:, 12:]).all()


def test_window_of_the_whole_sequence_equals_full_attention():
  full, window = large(), large(SlidingWindowAttention, window=9)
  np.testing.assert_allclose(
    apply(full, inputs(1, 9))[0], apply(window, inputs(1, 9))[0], rtol=1e-5
  )
