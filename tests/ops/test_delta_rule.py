"""delta_rule: what is particular to it, next to the tests that all scans share."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops import contract
from tests.ops.promises import close, in_float64

B, H, K, V = 2, 2, 4, 6

delta_rule = functools.partial(ops.delta_rule, scale=1.0)


def inputs(T, seed=0, per_column=False, channels=False):
  """[q, k of length 1, v, beta, log_decay]."""
  rng = np.random.default_rng(seed)
  q, k = rng.normal(size=(B, T, H, K)), rng.normal(size=(B, T, H, K))
  k = k / np.linalg.norm(k, axis=-1, keepdims=True)
  v = rng.normal(size=(B, T, H, V))
  beta = rng.random((B, T, H, V) if per_column else (B, T, H))
  decay = -np.exp(rng.normal(size=(B, T, H, K) if channels else (B, T, H)) - 1)
  return [jnp.asarray(x, jnp.float32) for x in (q, k, v, beta, decay)]


@functools.partial(
  jax.jit, static_argnames=("implementation", "chunk_size", "scale", "erase_before_decay")
)
def rule(q, k, v, beta, log_decay=None, chunk_size=8, **kwargs):
  return delta_rule(q, k, v, beta, log_decay=log_decay, chunk_size=chunk_size, **kwargs)


@pytest.mark.parametrize(
  ("implementation", "before"), [("chunked", True), ("reference", False), ("reference", True)]
)
def test_output_equals_the_product_of_transitions(implementation, before):
  """S_t = A_t S_{t-1} + X_t unrolled: the sum over j of A_t A_{t-1} .. A_{j+1} X_j, in numpy.

  With decays per key channel, two of which are 0, and keys that erase and write.
  """
  T = 19
  arrays = inputs(T, channels=True)
  arrays[-1] = arrays[-1].at[:, 5, :, 1].set(-np.inf).at[:, 11].set(-np.inf)
  keys = [inputs(T, seed=seed)[1] for seed in (1, 3)]
  q, k, v, beta, log_decay, e, w = (np.asarray(x, np.float64) for x in (*arrays, *keys))
  S_0 = np.random.default_rng(2).normal(size=(B, H, K, V))
  want = np.zeros((B, T, H, V))
  for b, h in np.ndindex(B, H):

    def transition(t, b=b, h=h):
      erased = beta[b, t, h] * np.outer(k[b, t, h], e[b, t, h])
      decay = np.diag(np.exp(log_decay[b, t, h]))
      return decay - erased if before else (np.eye(K) - erased) @ decay

    for t in range(T):
      product, S = np.eye(K), np.zeros((K, V))
      for j in range(t, -1, -1):
        S += product @ (beta[b, j, h] * np.outer(w[b, j, h], v[b, j, h]))
        product = product @ transition(j)
      S += product @ S_0[b, h]
      want[b, t, h] = 0.5 * S.T @ q[b, t, h]
  out, state = in_float64(
    lambda *x: rule(
      *x[:5], erase_key=x[5], write_key=x[6], initial_state=ops.DeltaRuleState(x[7]), scale=0.5,
      erase_before_decay=before, implementation=implementation,
    ),
    *arrays, *keys, S_0,
  )  # fmt: skip
  close((out, np.einsum("bhkv,bhk->bhv", state.kv, q[:, -1]) / 2), (want, want[:, -1]), np.float64)


def test_exact_longhorn_rate_minimizes_its_objective():
  """Longhorn, theorem 3.1: S_t minimises |S - S_{t-1}|^2 + |S k - x|^2 weighted by b (float64)."""
  q, k, x, b, _ = inputs(1, per_column=True)
  k, S_0 = 3 * k, np.random.default_rng(5).normal(size=(B, H, K, V))
  rates = lambda k, b: b / (1 + b * jnp.sum(k * k, axis=-1, keepdims=True))
  S = in_float64(
    lambda q, k, x, b, S_0: rule(q, k, x, rates(k, b), initial_state=ops.DeltaRuleState(S_0))[1].kv,
    q, k, x, b, S_0,
  )  # fmt: skip
  k, x, b = (np.asarray(a[:, 0], np.float64) for a in (k, x, b))

  def objective(S):
    error = np.einsum("bhkv,bhk->bhv", S, k) - x
    return np.sum((S - S_0) ** 2) + np.sum(b * error**2)

  error = np.einsum("bhkv,bhk->bhv", S, k) - x
  slope = 2 * (S - S_0) + 2 * k[..., :, None] * (b * error)[..., None, :]
  assert np.abs(slope).max() <= contract.tolerance(np.float64, 1) * np.abs(S).max()
  # The objective is quadratic and convex, so that this is its minimum.
  direction = np.random.default_rng(6).normal(size=S.shape)
  assert all(objective(S + s * direction) > objective(S) for s in (-1, -1e-3, 1e-3, 1))


def test_rates_per_column_equal_one_delta_rule_per_column():
  q, k, v, beta, log_decay = inputs(21, per_column=True)
  apart = [
    rule(q, k, v[..., i : i + 1], beta[..., i], log_decay, implementation="reference")
    for i in range(V)
  ]
  want = jax.tree.map(lambda *x: jnp.concatenate(x, -1), *apart)
  close(rule(q, k, v, beta, log_decay), want)


def test_beta_zero_keeps_and_beta_one_replaces_the_value():
  """beta = 0 leaves the state as it is; beta = 1 with a unit key and no decay makes S^T k = v."""
  q, k, v, beta, _ = inputs(20)
  S_0 = ops.DeltaRuleState(
    jnp.asarray(np.random.default_rng(7).normal(size=(B, H, K, V)), jnp.float32)
  )
  out, state = rule(q, k, v, 0 * beta, initial_state=S_0)
  chex.assert_trees_all_equal(state, S_0)
  close(out, jnp.einsum("bthk,bhkv->bthv", q, S_0.kv, precision="highest"))
  close(rule(k, k, v, jnp.ones_like(beta), initial_state=S_0)[0], v)


@pytest.mark.slow
def test_orthogonal_keys_are_independent():
  """Then the delta rule is linear attention with values beta v."""
  q, _, v, beta, _ = inputs(K)
  k = jnp.broadcast_to(jnp.eye(K)[None, :, None], (B, K, H, K))
  want = ops.linear_attention(q, k, beta[..., None] * v, scale=1.0)
  got = rule(q, k, v, beta)
  close((got[0], got[1].kv), (want[0], want[1].kv))


def test_equal_keys_stay_accurate():
  """64 equal keys in a chunk of 64: powers of the triangular matrix would reach 1e18."""
  q, k, v, beta, _ = inputs(64)
  k = jnp.broadcast_to(k[:, :1], k.shape)
  exact = in_float64(lambda *x: rule(*x, implementation="reference"), q, k, v, beta)
  close(rule(q, k, v, beta, chunk_size=64), exact)


def test_long_keys_make_the_state_grow():
  """beta |k|^2 = 4: the state reaches 1e5, accurate next to its size. 36: it overflows."""
  q, k, v, beta, _ = inputs(64)
  ones = jnp.ones_like(beta)
  exact = in_float64(lambda *x: rule(*x, implementation="reference"), q, 2 * k, v, ones)
  assert np.abs(exact[1].kv).max() > 1e5
  close(rule(q, 2 * k, v, ones), exact)
  for implementation in ("chunked", "reference"):
    _, state = rule(q, 6 * k, v, ones, implementation=implementation)
    assert not np.isfinite(state.kv).any()


@pytest.mark.parametrize("channels", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_infinite_decay_is_exact(channels):
  """log_decay = -inf forgets everything: each output is then its own value's."""
  q, k, v, beta, decay = inputs(20, channels=channels)
  forget = jnp.full_like(decay, -jnp.inf)

  def loss(*x):
    out, _ = rule(*x)
    return jnp.sum(out), out

  gradients, out = jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(q, k, v, beta, forget)
  close(out, jnp.sum(q * k, -1, keepdims=True) * beta[..., None] * v)
  assert all(jnp.isfinite(g).all() for g in gradients)


@pytest.mark.slow
def test_equal_decays_of_all_channels_are_one_decay():
  q, k, v, beta, decay = inputs(37)
  each = jnp.broadcast_to(decay[..., None], k.shape)
  close(rule(q, k, v, beta, each), rule(q, k, v, beta, decay))


@pytest.mark.slow
def test_bfloat16_with_heads_of_values_that_share_keys_and_decays_runs_on_a_cpu():
  """XLA compiled a product there that its CPU runtime does not have."""
  normal = np.random.default_rng(0).normal
  q, k, v = (
    jnp.asarray(normal(size=(2, 8, heads, 3)) / 3, jnp.bfloat16).astype(jnp.float32)
    for heads in (3, 3, 6)
  )
  beta, log_decay = jnp.full((2, 8, 6), 0.5), jnp.full((2, 8, 3), -0.5)
  run = lambda *x: ops.delta_rule(*x, beta, log_decay=log_decay, implementation="chunked")[0]
  got = run(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
  np.testing.assert_allclose(got.astype(jnp.float32), run(q, k, v), atol=5e-3)


def test_memory_with_rates_per_column_holds_no_state_per_token():
  """Memory is the inputs and the states between chunks: nothing of size T K V in either pass."""
  T, width, chunk = 512, 64, 16
  shape = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  decay = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
  loss = lambda *x: jnp.sum(rule(*x, implementation="chunked", chunk_size=chunk)[0])
  arguments = (shape,) * 3 + (shape, decay)
  compiled = jax.jit(jax.grad(loss, argnums=tuple(range(5)))).lower(*arguments).compile()
  states = T // chunk * width * width * 4
  limit = 3 * states + 40 * T * width * 4
  assert compiled.memory_analysis().temp_size_in_bytes < limit < T * width * width * 4


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, H, K)}, r"k has shape \(2, 5, 2, 4\).*\[2, 6, any, 4\]"),
    ({"v": (B, 6, 3, V)}, "the numbers of heads are q 2, k 2, v 3, but they must be H or"),
    ({"q": (B, 6, K)}, r"q has shape \(2, 6, 4\).*\[B, T, H, K\]"),
    (dict.fromkeys("qkv", (B, 0, H, K)), "T >= 1"),
    ({"beta": (B, 6, H, K)}, r"beta has shape \(2, 6, 2, 4\), but \[2, 6, 2\].*\[2, 6, 2, 6\]"),
    ({"beta": jnp.ones((B, 6, H), jnp.int32)}, "beta has dtype int32"),
    ({"log_decay": (H,)}, r"log_decay has shape \(2,\), but \[2, 6, 2\].*\[2, 6, 2, 4\]"),
    ({"log_decay": (B, 6, H, V)}, r"log_decay has shape \(2, 6, 2, 6\)"),
    ({"erase_key": (B, 6, H, V)}, r"erase_key has shape \(2, 6, 2, 6\)"),
    ({"write_key": (B, 6, 1, K)}, r"write_key has shape \(2, 6, 1, 4\).*\[2, 6, 2, 4\]"),
    ({"initial_state": ops.DeltaRuleState(jnp.zeros((B, H, V, K)))}, r"initial_state.kv has shape"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"scale": jnp.ones(())}, "scale=.* must be a Python number"),
    ({"implementation": "cudnn"}, "'cudnn' is unknown; use one of 'pallas', 'chunked'"),
  ],
)
def test_bad_argument_raises_and_is_named(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, H, K), "v": (B, 6, H, V), "beta": (B, 6, H)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    delta_rule(**arguments)
