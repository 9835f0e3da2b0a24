"""Calls of layers without an axis of batch or time."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import mixers
from lnssm_jax.models import LanguageModel
from tests.mixers.tiny import DIM, inputs, randomized

B, T = 2, 4
one = jax.jit(mixers.step)
whole = jax.jit(lambda layer, x, segment_ids=None: layer(x, None, segment_ids))
row = jax.jit(mixers.single)


def test_steps_and_single_sequences_equal_the_call():
  mixer, x = randomized("lrn"), inputs(B, T)
  state, outputs = mixer.init_state(B), []
  for t in range(T):
    y, state = one(mixer, x[:, t], state)
    assert y.shape == (B, DIM)
    outputs.append(y)
  want, last = whole(mixer, x)
  close = lambda got, want: chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)
  close((jnp.stack(outputs, 1), state), (want, last))
  segment_ids = np.array([5, 5, 2, 2])
  y, state = row(mixer, x[1], None, segment_ids)
  want, last = whole(mixer, x[1:], segment_ids[None])
  close((y[None], state), (want, last))


def test_steps_and_single_sequences_of_a_language_model_have_logits():
  build = lambda: LanguageModel(vocab_size=11, dim=4, num_layers=1, mixer="lrn", rngs=nnx.Rngs(0))
  tokens = jnp.array([3, 4])
  run = lambda call: jax.eval_shape(lambda: call(build(), tokens)[0]).shape
  assert run(mixers.step) == run(mixers.single) == (2, 11)


def test_other_shapes_raise_and_name_the_call_for_them():
  mixer = randomized("lrn")
  wrong = {
    r"LRN: x has shape \(4, 8\).*mixers\.single.*\[T, D\].*mixers\.step.*\[B, D\]": mixer,
    r"step: x has shape \(2, 4, 8\), but one token of each sequence is \[B, D\]": (
      lambda x: mixers.step(mixer, x[None].repeat(2, 0))
    ),
    r"single: x has shape \(8,\), but one sequence is \[T, D\]": (
      lambda x: mixers.single(mixer, x[0])
    ),
    r"single: x has shape \(4, 8\), but one sequence is \[T\] of tokens": (
      lambda x: mixers.single(mixer, x.astype(int))
    ),
  }
  for message, call in wrong.items():
    with pytest.raises(ValueError, match=message):
      call(inputs(1, T)[0])
