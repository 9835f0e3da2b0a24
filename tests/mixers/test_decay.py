"""`Mixer.decay` against the linear map from the state before a call to the state after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.mixers import LCSM, LNSSM, MIXERS, ComplexState
from tests.mixers import tiny
from tests.mixers.tiny import randomized

B, T = 2, 3
CONSTANT = {"dss", "lnssm", "retnet", "rwkv5", "s4d", "s5", "tnl", "tnn"}
NONE = {
  *("base_conv", "based", "cosformer", "delta_net", "hyena", "linear_attention", "lln", "lrpe"),
  *("longhorn_exact", "normalized_attention", "short_conv", "sliding_window_attention"),
  "softmax_attention",
}
OTHER_MAPS = {  # not one factor per number
  *("comba", "delta_product", "gated_delta_net", "gated_delta_net2", "kda", "log_linear", "mlstm"),
  *("rwkv4", "rwkv7", "s4"),
}
QUICK = {"gfw", "gsa", "lnssm", "mamba", "rg_lru"}  # forms of decays and of states
LINEAR = (
  *(ops.DiagonalState, ops.ElementwiseDecayState, ops.ExponentialState, ops.LinearAttentionState),
  *(ops.LonghornState, ops.SelectiveState, ops.SparseState, ComplexState),
)


def linear_states(state) -> list:
  """The parts of a mixer's state in which the state after a call is linear."""
  parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, LINEAR))
  return [part for part in parts if isinstance(part, LINEAR)]


def numbers(state) -> jax.Array:
  """[B, H, K, ...]"""
  if isinstance(state, ops.SparseState):
    kv = jnp.moveaxis(state.kv, 1, 2)  # [B, H, partitions, K, V]
    return kv.reshape(*kv.shape[:2], -1, kv.shape[-1])
  first = jax.lax.complex(*state) if isinstance(state, ComplexState) else state[0]
  return first[:, None] if first.ndim == 2 else first


@jax.jit
def decays_and_factors(mixer, x):
  """(decays, [the factors [B, H, K, ...] of the numbers of each state])."""
  empty = mixer.init_state(B)
  is_linear = lambda part: isinstance(part, LINEAR)
  ones = lambda part: jax.tree.map(jnp.ones_like, part) if is_linear(part) else part
  full = jax.tree.map(ones, empty, is_leaf=is_linear)
  before, after, without = map(linear_states, (full, mixer(x, full)[1], mixer(x, empty)[1]))
  change = lambda new, old, start: jnp.abs((numbers(new) - numbers(old)) / numbers(start))
  return mixer.decay(x), list(map(change, after, without, before))


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
    for name in sorted(set(MIXERS) - NONE - OTHER_MAPS)
  ],
)
def test_decays_are_the_factors_of_the_state_before(name):
  mixer, x = randomized(name), tiny.inputs(B, T)
  decays, factors = decays_and_factors(mixer, x)
  assert decays.dtype == jnp.float32
  assert jnp.all(decays <= 0)
  if name in CONSTANT:
    assert decays.ndim == 2
    np.testing.assert_allclose(mixer.decay(), decays, rtol=1e-6)
    decays = jnp.broadcast_to(decays, (B, T, *decays.shape))
  else:
    with pytest.raises(ValueError, match=r"decay: x=None, but its decays depend on x"):
      mixer.decay()
  if name == "gsa":
    factors = factors[1:]  # of the values, [B, H, slots, V]; those of keys have them as columns
  got = np.concatenate([np.broadcast_to(f, f.shape) for f in factors], axis=2)
  kept = np.exp(np.sum(np.asarray(decays, np.float64), axis=1))
  kept = kept.reshape(*kept.shape, *[1] * (got.ndim - kept.ndim))
  assert all(size in (1, n) for size, n in zip(kept.shape, got.shape, strict=True))
  np.testing.assert_allclose(got, np.broadcast_to(kept, got.shape), rtol=3e-4, atol=1e-6)


@pytest.mark.slow
def test_decay_of_the_gated_delta_rule_is_its_largest_eigenvalue():
  mixer, x = randomized("gated_delta_net"), tiny.inputs(1, 1)

  def after(kv):  # of one token; [K, V] per head, columns alike
    state = mixer.init_state(1)
    kv = jnp.broadcast_to(kv[None, None, :, None], state.recurrent.kv.shape)
    return mixer(x, state._replace(recurrent=ops.DeltaRuleState(kv)))[1].recurrent.kv[0, :, :, 0]

  K = mixer.key_dim
  maps = jax.jit(jax.vmap(lambda kv: after(kv) - after(0 * kv)))(jnp.eye(K))  # [K, H, K]
  largest = np.abs(np.linalg.eigvals(np.moveaxis(maps, 1, 0))).max(-1)
  np.testing.assert_allclose(jnp.exp(mixer.decay(x))[0, 0, :, 0], largest, rtol=1e-5)


@pytest.mark.slow
def test_decay_of_rwkv4_is_its_rate():
  mixer = randomized("rwkv4")
  want = -np.exp(np.asarray(mixer.w[...], np.float64))[None]
  np.testing.assert_allclose(mixer.decay(), want, rtol=1e-6)


@pytest.mark.slow
def test_decay_of_s4_has_the_moduli_of_its_eigenvalues():
  mixer = randomized("s4")
  D, pairs = mixer.dim, mixer.state_size
  x = jnp.zeros((2 * pairs, 1, D))
  parts = jnp.eye(2 * pairs)[:, None] * jnp.ones((1, D, 1))
  _, after = mixer(x, ComplexState(parts[..., :pairs], parts[..., pairs:]))
  maps = np.concatenate(after, axis=-1)  # [N, D, N]
  moduli = np.abs(np.linalg.eigvals(np.moveaxis(maps, 1, 0)))
  np.testing.assert_allclose(mixer.decay(), np.log(np.sort(moduli)), atol=1e-5)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in {"lln", "delta_net"}))
    for name in sorted(NONE)
  ],
)
def test_mixer_without_decay_says_so(name):
  with pytest.raises(NotImplementedError, match=rf"{MIXERS[name].__name__}.decay: .* no decay"):
    jax.eval_shape(lambda: tiny.initial(name).decay(tiny.inputs(1, 1)))


def test_mixer_whose_options_leave_the_decay_out_says_so():
  mixer = LNSSM(8, num_heads=2, use_decay=False, rngs=nnx.Rngs(0))
  with pytest.raises(NotImplementedError, match="no decay"):
    mixer.decay()


def test_decays_of_lcsm_that_are_constant_need_no_input():
  by_value = LCSM(8, state_dim=3, code="1-5-0-0", rngs=nnx.Rngs(0))  # in `diagonal_scan`
  log_sigmoid = -np.log1p(np.exp(-np.asarray(by_value.decay_logit[...], np.float64)))
  np.testing.assert_allclose(by_value.decay(), log_sigmoid[None] / 16, rtol=1e-5)
  by_entry = LCSM(8, state_dim=3, code="1-0-1-0", rngs=nnx.Rngs(0))
  assert by_entry.decay().shape == (1, 3, 8)


def test_decay_of_partitions_is_one_where_a_token_does_not_select_them():
  @jax.jit
  def run(mixer, x):
    with ops.recording() as calls:
      mixer(x)
    assert [call.op for call in calls] == ["linear_attention", "sparse_state_attention"]
    return mixer.decay(x), calls[-1].arguments["indices"]

  decays, selected = run(randomized("sse"), tiny.inputs(2, 5))
  decays = decays.reshape(2, 5, 2, 4, 4)  # of the state that all use and of 3 partitions
  for b, t, p in np.ndindex(2, 5, 3):
    assert np.all(decays[b, t, :, 1 + p] < 0) == (p in selected[b, t])


def test_decay_of_a_wrong_input_raises():
  with pytest.raises(ValueError, match=r"LNSSM: x"):
    tiny.starting("lnssm").decay(jnp.zeros((1, 2, 9)))
