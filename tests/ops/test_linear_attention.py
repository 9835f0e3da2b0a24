"""linear_attention: what is particular to it, next to the tests that all scans share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops import contract
from tests.ops.promises import close

B, H, K, V = 2, 2, 4, 6


def inputs(T, seed=0):
  rng = np.random.default_rng(seed)
  q, k = (jnp.asarray(np.exp(rng.normal(size=(B, T, H, K))), jnp.float32) for _ in range(2))
  v = jnp.asarray(rng.normal(size=(B, T, H, V)), jnp.float32)
  return q, k, v, jnp.asarray(-np.exp(rng.uniform(-5, 3, size=(H, K))), jnp.float32)


@functools.partial(jax.jit, static_argnames="implementation")
def attention(q, k, v, log_decay, **kwargs):
  return ops.linear_attention(q, k, v, log_decay=log_decay, normalize=True, chunk_size=8, **kwargs)


@pytest.mark.parametrize("decay_first", [True, False])
def test_normalized_output_equals_the_formula_of_the_paper(decay_first):
  """LNSSM, eq. 14: weight a^(t-j), or a^(t-1-j) with weight 1 at j = t, summed in float64."""
  q, k, v, log_decay = (np.asarray(x, np.float64) for x in inputs(23))
  lag = np.arange(23)[:, None] - np.arange(23)[None, :]
  power = lag if decay_first else np.maximum(lag - 1, 0)
  weight = np.where(lag >= 0, 1.0, 0.0)[..., None, None] * np.exp(
    power[..., None, None] * log_decay
  )
  scores = np.einsum("bihk,bjhk,ijhk->bhij", q, k, weight)
  want = np.einsum("bhij,bjhv->bihv", scores / scores.sum(-1, keepdims=True), v)
  bonus = None if decay_first else jnp.ones((H, K))
  out, _ = attention(*inputs(23), bonus=bonus)
  close(out, want)


@pytest.mark.slow
def test_backward_pass_equals_the_published_recursions():
  """LNSSM's backward pass with Algorithm 2 put right: both adjoint states, step by step."""
  T = 19
  q, k, v, log_decay = (np.asarray(x, np.float64) for x in inputs(T))
  a, G = np.exp(log_decay), np.random.default_rng(5).normal(size=(B, T, H, V))
  S, z = np.zeros((T + 1, B, H, K, V)), np.zeros((T + 1, B, H, K))
  for t in range(T):
    S[t + 1] = a[..., None] * S[t] + k[:, t, ..., None] * v[:, t, :, None]
    z[t + 1] = a * z[t] + k[:, t]
  adjoint, adjoint_z = np.zeros((B, H, K, V)), np.zeros((B, H, K))
  dq, dk, dv, da = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros_like(a)
  for t in reversed(range(T)):
    D = np.einsum("bhk,bhk->bh", q[:, t], z[t + 1])[..., None]
    y = np.einsum("bhk,bhkv->bhv", q[:, t], S[t + 1]) / D
    dO, dD = G[:, t] / D, -(G[:, t] * y).sum(-1, keepdims=True) / D
    adjoint = q[:, t, ..., None] * dO[..., None, :] + a[..., None] * adjoint
    adjoint_z = dD * q[:, t] + a * adjoint_z
    dq[:, t] = np.einsum("bhkv,bhv->bhk", S[t + 1], dO) + dD * z[t + 1]
    dk[:, t] = np.einsum("bhkv,bhv->bhk", adjoint, v[:, t]) + adjoint_z
    dv[:, t] = np.einsum("bhkv,bhk->bhv", adjoint, k[:, t])
    da += ((adjoint * S[t]).sum(-1) + adjoint_z * z[t]).sum(0)
  _, vjp = jax.vjp(lambda *args: attention(*args)[0], *inputs(T))
  close(vjp(jnp.asarray(G, jnp.float32)), (dq, dk, dv, a * da))


@pytest.mark.slow
def test_gradient_of_strong_decay_is_accurate_per_channel():
  """Next to gradients of 1, that of a decay of exp(-20) is 1e-9: its own relative error counts."""
  T = 48
  q, k, v, _ = inputs(T)
  log_decay = jnp.broadcast_to(jnp.asarray([-20.0, -12.0, -5.0, -0.01]), (H, K))
  gradient = lambda implementation: jax.grad(
    lambda g: jnp.sum(attention(q, k, v, g, implementation=implementation)[0] ** 2)
  )
  with jax.enable_x64(True):
    q, k, v = (x.astype(jnp.float64) for x in (q, k, v))
    want = np.asarray(gradient("reference")(log_decay.astype(jnp.float64)))
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  got = np.asarray(gradient("chunked")(log_decay))
  np.testing.assert_allclose(got, want, rtol=contract.tolerance(jnp.float32, T))
  assert np.abs(want).min() < 1e-7 < np.abs(want).max()


@pytest.mark.slow
def test_infinite_decay_is_exact():
  """log_decay = -inf forgets everything: each output is then its own value."""
  q, k, v, _ = inputs(20)
  out, state = attention(q, k, v, jnp.full((H, K), -jnp.inf))
  close((out, state.kv), (v, k[:, -1, :, :, None] * v[:, -1, :, None, :]))
  gradients = jax.grad(
    lambda *x: jnp.sum(attention(*x, jnp.full((H, K), -jnp.inf))[0]), argnums=(0, 1, 2)
  )
  assert all(jnp.isfinite(g).all() for g in gradients(q, k, v))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, H, K)}, r"k has shape \(2, 5, 2, 4\).*\[2, 6, any, 4\]"),
    ({"v": (B, 6, 3, V)}, "the numbers of heads are q 2, k 2, v 3, but they must be H or"),
    ({"q": (B, 6, K)}, r"q has shape \(2, 6, 4\).*\[B, T, H, K\]"),
    ({"q": (B, 0, H, K), "k": (B, 0, H, K), "v": (B, 0, H, V)}, "T >= 1"),
    ({"log_decay": (K,)}, r"log_decay has shape \(4,\), but one of"),
    ({"value_log_decay": (H, K)}, r"value_log_decay has shape \(2, 4\)"),
    ({"bonus": (K,)}, r"bonus has shape \(4,\)"),
    ({"own_weight": (H,)}, r"own_weight has shape \(2,\)"),
    ({"own_weight": (B, 6, H), "bonus": (H, K)}, "bonus and own_weight both weight"),
    ({"value_log_decay": (H, V), "normalize": True}, "no meaning together with value_log_decay"),
    ({"q": (B, 6, 3, H, K)}, r"k has shape \(2, 6, 2, 4\).*\[2, 6, 3, any, any\]"),
    (dict.fromkeys("qkv", (B, 6, 3, H, K)) | {"bonus": (H, K)}, r"q \(2, 6, 3\) has 3 queries"),
    ({"initial_state": ops.LinearAttentionState(jnp.zeros((B, H, V, K)))}, r"initial_state.kv"),
    (
      {"initial_state": ops.LinearAttentionState(jnp.zeros((B, H, K, V))), "normalize": True},
      "key_sum",
    ),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"scale": jnp.ones(())}, "scale=.* must be a Python number"),
  ],
)
def test_bad_argument_raises_and_is_named(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, H, K), "v": (B, 6, H, V)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    ops.linear_attention(**arguments)


def test_integer_inputs_raise():
  q = jnp.zeros((B, 6, H, K), jnp.int32)
  with pytest.raises(ValueError, match="q has dtype int32; it must be floating point"):
    ops.linear_attention(q, q, q)
