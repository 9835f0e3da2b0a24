"""Mixers whose elementwise parts are computed again in the backward pass."""

import functools
import math

import jax
import pytest

from lnssm_jax.mixers import MIXERS
from tests.mixers.tiny import initial, inputs


@pytest.mark.parametrize("name", [name for name, mixer in MIXERS.items() if mixer.recomputes])
def test_training_keeps_half_of_what_a_plain_call_keeps(name):
  mixer = jax.eval_shape(functools.partial(initial, name))

  def residuals(trains: bool) -> int:
    run = lambda x, mixer: (mixer.with_aux if trains else mixer)(x)[0]
    kept = jax.eval_shape(lambda *args: jax.vjp(run, *args)[1], inputs(2, 96), mixer)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(kept))

  assert 0 < residuals(trains=True) < residuals(trains=False) / 2
