"""GLA, MetaLA and GSA that update a few rows of their states per token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from tests.mixers.helpers import apply, drawn, float64_params, relative_error
from tests.mixers.tiny import DIM, TINY, inputs

ROWS = {"gla": 4, "metala": 4, "gsa": 5}
WIDE = {"gla": {"expand_k": 1.0}, "metala": {"expand_k": 1.0}, "gsa": {"num_slots": 5}}


def build(name, **options):
  """With no parameter at its initial value."""
  options = dict(TINY[name].options) | WIDE[name] | {"selected_rows": 2} | options
  return drawn(lambda: MIXERS[name](DIM, **options, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", ROWS)
def test_rows_that_are_not_selected_keep_their_state(name):
  mixer, x = build(name), inputs(2, 9)
  reference = functools.partial(TINY[name].reference, float64_params(mixer), num_heads=2)
  want = np.stack([reference(np.float64(row), selected_rows=2) for row in x])
  every = np.stack([reference(np.float64(row)) for row in x])
  out, state = apply(mixer, x)
  assert relative_error(out, want) < 2e-6
  assert relative_error(every, want) > 1e-2
  first, before = apply(mixer, x[:, :5])
  rest, last = apply(mixer, x[:, 5:], before)
  np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), out, rtol=1e-4, atol=1e-5)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), last, state)


@pytest.mark.parametrize(
  "name", ["gla", *(pytest.param(n, marks=pytest.mark.slow) for n in ("metala", "gsa"))]
)
def test_balance_loss_of_rows_is_the_mean_of_the_heads(name):
  losses = {}
  for mass in ("selected", "full"):
    mixer, x = build(name, mass=mass, balance=0.3), inputs(2, 9)
    out, _, aux = jax.jit(lambda mixer, x=x: mixer.with_aux(x))(mixer)
    np.testing.assert_allclose(out, apply(mixer, x)[0], rtol=1e-5, atol=1e-6)
    assert aux.share.shape == (2 * ROWS[name],)
    assert float(aux.share.sum()) == pytest.approx(4, rel=1e-6)  # k = 2 of each of two heads
    losses[mass] = float(aux.loss)
    if name != "metala":
      # GLA selects by the keys' logits, GSA by what a slot is written with.
      project = mixer.k_proj if name == "gla" else mixer.f_proj
      z = np.asarray(x @ project.kernel[...], np.float64).reshape(18, 2, rows := ROWS[name])
      p = np.exp(z) if name == "gla" else 1 - (1 + np.exp(-z)) ** (-1 / 8)
      f = np.argsort(np.argsort(-p, axis=-1), axis=-1) < 2
      p = p * f if mass == "selected" else p
      p = p / p.sum(-1, keepdims=True)
      want = 0.3 * (rows / 2) * np.sum(p.mean(0) * f.mean(0), axis=-1).mean()
      assert losses[mass] == pytest.approx(want, rel=1e-5)
  assert losses["selected"] != losses["full"]


@pytest.mark.parametrize(
  ("name", "options", "message"),
  [
    ("gla", {"selected_rows": 5}, "selected_rows=5 is more than the key width=4"),
    ("gsa", {"selected_rows": 6}, "selected_rows=6 is more than num_slots=5"),
    ("metala", {"mass": "all"}, "mass='all' is unknown.*'selected', 'full'"),
    ("gla", {"balance": -1.0}, "balance=-1.0 must be a number of at least 0"),
  ],
)
def test_bad_row_options_raise_naming_the_option(name, options, message):
  with pytest.raises(ValueError, match=message):
    build(name, **options)


def test_without_selection_there_is_no_auxiliary_output():
  mixer = build("gla", selected_rows=None)
  assert jax.eval_shape(lambda mixer: mixer.with_aux(inputs(2, 9)), mixer)[2] is None
