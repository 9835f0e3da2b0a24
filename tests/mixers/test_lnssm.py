"""The LNSSM mixer: its values, its state, what it promises of dtypes and of bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import LNSSM, LNSSMState
from lnssm_jax.ops import LinearAttentionState
from tests.mixers.helpers import apply, float64_params, inputs, random_lnssm, relative_error, split
from tests.mixers.references import lnssm as reference

OPTIONS = [
  {"shift": shift, "decay_first": decay_first}
  for shift in ("qkvg", "kvg")
  for decay_first in (True, False)
]
OTHER_OPTIONS = OPTIONS[-1:]  # the contract suite covers the default ones


def expected(mixer, x, **options):
  params = float64_params(mixer)
  rows = np.asarray(x, np.float64)
  options |= {"num_heads": mixer.num_heads}
  return np.stack([reference.lnssm(params, row, **options) for row in rows])


@pytest.mark.parametrize(
  "options",
  [pytest.param(each, marks=[pytest.mark.slow] * (each != OPTIONS[-1])) for each in OPTIONS[1:]],
  ids=str,
)
def test_matches_the_equations_in_float32(options):
  mixer, x = random_lnssm(**options), inputs(2, 70, 8)
  out, _ = apply(mixer, x)
  assert relative_error(out, expected(mixer, x, **options)) < 2e-6


ABLATIONS = [
  {"feature_map": "elu"},
  {"feature_map": "identity", "decay_first": False},
  {"use_decay": False, "shift": "kv"},
  {"use_gate": False, "shift": "none"},
  {"norm": "after"},
  {"norm": "none", "use_decay": False, "decay_first": False},
]


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_ablation_matches_the_equations(options):
  """Split in two: what is left out leaves the state, too."""
  mixer, x = random_lnssm(**options), inputs(2, 9, 8)
  want = expected(mixer, x, **options)
  assert relative_error(split_call(mixer, x), want) < 2e-6


@jax.jit
def split_call(mixer, x):
  """The outputs of a first call on 4 tokens and of a second on the rest."""
  first, state = mixer(x[:, :4])
  return jnp.concatenate([first, mixer(x[:, 4:], state)[0]], axis=1)


def test_ablations_have_no_parameters_of_what_they_leave_out():
  everything = {"feature_map": "identity", "use_decay": False, "use_gate": False, "norm": "none"}
  names = split(jax.eval_shape(lambda: random_lnssm(shift="none", **everything)))[1].keys()
  assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("T", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_matches_the_equations_on_the_shortest_sequences(T):
  mixer, x = random_lnssm(), inputs(2, T, 8)
  out, _ = apply(mixer, x)
  assert relative_error(out, expected(mixer, x)) < 2e-6


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=str)
def test_matches_the_equations_in_bfloat16(options):
  mixer = random_lnssm(16, dtype=jnp.bfloat16, **options)
  x = inputs(2, 70, 16).astype(jnp.bfloat16)
  out, _ = apply(mixer, x)
  assert out.dtype == jnp.bfloat16
  assert relative_error(out, expected(mixer, x, **options)) < 2 * 2**-8  # two units of rounding


@pytest.mark.parametrize("decay_first, weights", [(True, (1, 0.5, 0.25)), (False, (1, 1, 0.5))])
def test_weights_of_lags(decay_first, weights):
  """W_q = W_k = 0 makes all features equal: y is the mean of v with the weights of the decay."""
  mixer = LNSSM(2, num_heads=1, decay_first=decay_first, rngs=nnx.Rngs(0))
  graphdef, params = split(mixer)
  params |= {"w": jnp.full(2, np.log(np.log(2.0))), "mu_v": jnp.ones(2)}  # a = 1/2, no shift of v
  params["v_proj"]["kernel"], params["o_proj"]["kernel"] = jnp.eye(2), 2 * jnp.eye(2)
  mixer = nnx.merge(graphdef, params)
  x = jnp.array([[[1.0, 0.0], [0.0, 1.0], [4.0, 0.0]]])
  out, _ = apply(mixer, x)  # the gate is 1/2 everywhere, W_o doubles
  lag_0, lag_1, lag_2 = weights
  last = np.array([4 * lag_0 + lag_2, lag_1]) / (lag_0 + lag_1 + lag_2)
  np.testing.assert_allclose(out[0, 2], last, rtol=1e-6)


def test_output_at_initialization_is_zero():
  out, _ = apply(LNSSM(8, num_heads=2, rngs=nnx.Rngs(0)), inputs(2, 33, 8))
  np.testing.assert_array_equal(out, np.zeros((2, 33, 8)))


@pytest.mark.parametrize("gamma", [1.0, 40.0])
def test_y_is_a_weighted_mean_of_v(gamma):
  """Whatever gamma is: the exponents are bounded, and the denominator is not zero."""
  graphdef, params = split(random_lnssm(8, 2))
  params |= {"gamma": jnp.full(8, gamma)}
  params["g_proj"]["kernel"], params["o_proj"]["kernel"] = jnp.zeros((8, 8)), 2 * jnp.eye(8)
  x = 3 * inputs(1, 100, 8)
  y = np.asarray(apply(nnx.merge(graphdef, params), x)[0][0])
  before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
  stream = params["mu_v"] * x + (1 - params["mu_v"]) * before
  v = np.asarray((stream @ params["v_proj"]["kernel"])[0])
  slack = 1e-5 * np.abs(v).max()
  assert (y <= np.maximum.accumulate(v) + slack).all()
  assert (y >= np.minimum.accumulate(v) - slack).all()


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=str)
def test_output_does_not_depend_on_later_tokens(options):
  mixer, x = random_lnssm(**options), inputs(2, 70, 8)
  out, _ = apply(mixer, x)
  for t in (1, 30, 64, 69):
    disturbed, _ = apply(mixer, x.at[:, t].add(100.0))
    np.testing.assert_array_equal(disturbed[:, :t], out[:, :t])
    assert not np.array_equal(disturbed[:, t], out[:, t])


@pytest.mark.parametrize("options, cut", [(OPTIONS[0], 64), (OPTIONS[-1], 37)])
def test_split_sequence_equals_one_call(options, cut):
  mixer, x = random_lnssm(**options), inputs(2, 70, 8)
  whole, last = apply(mixer, x)
  left, state = apply(mixer, x[:, :cut])
  right, state = apply(mixer, x[:, cut:], state)
  assert relative_error(jnp.concatenate([left, right], 1), whole) < 1e-6
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), state, last)


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=str)
def test_one_token_at_a_time_equals_one_call(options):
  mixer, x = random_lnssm(**options), inputs(2, 20, 8)
  whole, last = apply(mixer, x)
  state, outputs = mixer.init_state(2), []
  for t in range(20):
    out, state = apply(mixer, x[:, t : t + 1], state)
    outputs.append(out)
  assert relative_error(jnp.concatenate(outputs, 1), whole) < 1e-6
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), state, last)


@pytest.mark.parametrize("options", OTHER_OPTIONS, ids=str)
def test_packed_documents_equal_separate_ones(options):
  mixer, x = random_lnssm(**options), inputs(2, 70, 8)
  _, initial = apply(mixer, inputs(2, 1, 8, seed=9))
  segment_ids = np.repeat([[4, 2, 4]] * 2, [37, 1, 32], axis=1)
  packed, last = apply(mixer, x, initial, segment_ids)
  first, _ = apply(mixer, x[:, :37], initial)
  second, _ = apply(mixer, x[:, 37:38])
  third, state = apply(mixer, x[:, 38:])
  assert relative_error(packed, jnp.concatenate([first, second, third], 1)) < 1e-6
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), last, state)


def test_float16_holds_features_above_its_range():
  graphdef, params = split(random_lnssm(dtype=jnp.float16))
  params |= {"gamma": jnp.full(8, 15.0)}  # exponents beyond 11.09, where exp leaves float16
  mixer = nnx.merge(graphdef, params)
  out, _ = apply(mixer, inputs(1, 6, 8).astype(jnp.float16))
  assert np.isfinite(out).all()
  assert np.abs(out).max() > 0.1


@pytest.mark.slow
def test_under_jit_vmap_checkpoint_and_scan():
  """Value and gradient of vmap inside checkpoint inside scan, compiled, equal the plain call's."""
  mixer, x = random_lnssm(), inputs(2, 4, 8)
  plain = lambda x: mixer(x)[0]
  one = lambda row: plain(row[None])[0]
  step = jax.checkpoint(lambda carry, row: (carry, jax.vmap(one)(row[None])[0]))
  transformed = lambda x: jax.lax.scan(step, None, x)[1]
  results = [
    jax.jit(jax.value_and_grad(lambda x, f=f: jnp.sum(f(x) ** 2)))(x) for f in (plain, transformed)
  ]
  for got, want in zip(*results, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_state_with_a_wrong_array_raises_naming_its_path():
  mixer = random_lnssm()
  state = mixer.init_state(2)
  recurrent = LinearAttentionState(jnp.ones((2, 2, 5, 4)), state.recurrent.key_sum)
  with pytest.raises(ValueError, match=r"state.recurrent.kv has shape \(2, 2, 5, 4\)"):
    mixer(jnp.ones((2, 5, 8)), LNSSMState(state.shift, recurrent))
