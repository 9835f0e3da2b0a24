"""Systems that are special cases of one another: each pair of formulas by two different routes.

One route is a scan of the library in its fastest form, the other another scan, or the published
formula in float64 numpy. Gradients are compared where both routes are ours.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops.contract import values_and_gradients
from tests.ops.promises import close

B, T, H, K, V = 2, 37, 2, 4, 6

# Compiled as a whole: outside of `same` the operations would be compiled one by one.
linear_attention = jax.jit(
  functools.partial(ops.linear_attention, scale=1.0), static_argnames=("scale", "normalize")
)
delta_rule = jax.jit(functools.partial(ops.delta_rule, scale=1.0))
longhorn_scan = jax.jit(ops.longhorn_scan)
attention = jax.jit(ops.attention, static_argnames=("window", "block"))


def normal(*shapes, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def qkv(seed=0):
  return normal((B, T, H, K), (B, T, H, K), (B, T, H, V), seed=seed)


def decays(*shape, seed=9):
  """Log decays from about -3 to -1e-2."""
  rng = np.random.default_rng(seed)
  return jnp.asarray(-np.exp(rng.uniform(-5, 1, size=shape)), jnp.float32)


def exact(*arrays):
  return tuple(np.asarray(x, np.float64) for x in arrays)


def same(one, other, arguments, dtype=jnp.float32):
  """Values and all gradients of two functions of `arguments` agree."""
  close(
    values_and_gradients(lambda x: one(*x), arguments),
    values_and_gradients(lambda x: other(*x), arguments),
    dtype,
    T,
  )


def test_linear_attention_with_constant_decay_equals_retention():
  """RetNet: (Q K^T ⊙ D) V with D_ij = γ^(i-j), γ_h = 1 - 2^(-5-h)."""
  arguments = qkv()
  gamma = 1 - 2.0 ** (-5 - np.arange(H))
  q, k, v = exact(*arguments)
  lag = np.arange(T)[:, None] - np.arange(T)
  D = np.where(lag >= 0, gamma[:, None, None] ** np.maximum(lag, 0), 0)
  want = np.einsum("bihk,bjhk,hij,bjhv->bihv", q, k, D, v) * K**-0.5
  out, _ = linear_attention(*arguments, log_decay=jnp.log(gamma).astype(jnp.float32), scale=K**-0.5)
  # log γ rounded to float32 is off by up to 1e-7 of itself: far below a rounding of γ^37.
  close(out, want, length=T)


@pytest.mark.slow
def test_linear_attention_with_bonus_one_equals_decay_after_the_update():
  """LNSSM, eq. 14 with a^(t-1-j) and a weight of 1 at j = t: the decay of step t is taken back."""
  u, v_weight = jnp.ones((H, K)), lambda q, k: jnp.sum(q * k, -1, keepdims=True)

  def taken_back(q, k, v, g):
    late = q * jnp.exp(-g)
    own = (v_weight(q, k) - v_weight(late, k)) * v
    return linear_attention(late, k, v, log_decay=g)[0] + own

  with jax.enable_x64(True):
    same(
      lambda q, k, v, g: linear_attention(q, k, v, log_decay=g, bonus=u)[0],
      taken_back,
      tuple(jnp.asarray(x, jnp.float64) for x in (*qkv(), decays(H, K))),
      jnp.float64,
    )


@pytest.mark.slow
def test_linear_attention_with_tied_keys_equals_hgrn2():
  """HGRN2: S = diag(f) S + (1 - f) v^T; with K = V = 1 per head it is HGRN."""
  q, _, v = qkv()
  f = jnp.exp(decays(B, T, H, K))
  out, _ = linear_attention(q, 1 - f, v, log_decay=jnp.log(f))
  S, want = np.zeros((B, H, K, V)), []
  for q_t, f_t, v_t in zip(*(np.moveaxis(x, 1, 0) for x in exact(q, f, v)), strict=True):
    S = f_t[..., None] * S + (1 - f_t)[..., None] * v_t[..., None, :]
    want.append(np.einsum("bhk,bhkv->bhv", q_t, S))
  close(out, np.stack(want, 1), length=T)

  one = lambda x: x.reshape(B, T, -1, 1)
  f, v = f.reshape(B, T, -1), v[..., :K].reshape(B, T, -1)
  same(
    lambda f, v: linear_attention(
      one(jnp.ones_like(f)), one(1 - f), one(v), log_decay=one(jnp.log(f))
    )[0].reshape(f.shape),
    lambda f, v: ops.diagonal_scan(f, (1 - f) * v)[0],
    (f, v),
  )


@pytest.mark.slow
def test_key_and_value_decays_equal_an_elementwise_decay():
  """Gated fast weights: two gates make a decay of rank one, the entries of which multiply."""
  q, k, v = qkv()
  a, c = decays(B, T, H, K), decays(B, T, H, V, seed=3)
  same(
    lambda q, k, v, a, c: linear_attention(q, k, v, log_decay=a, value_log_decay=c)[0],
    lambda q, k, v, a, c: ops.elementwise_decay_scan(q, k, v, a[..., None] + c[..., None, :])[0],
    (q, k, v, a, c),
  )


@pytest.mark.slow
def test_delta_rule_with_zero_and_infinite_decay_equals_the_formula():
  """A log decay of 0 is none; of -inf, each step sees itself alone: out = β (q·k) v."""
  q, k, v = qkv()
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  beta = jax.nn.sigmoid(normal((B, T, H), seed=5)[0])
  same(
    lambda *x: delta_rule(*x, log_decay=jnp.zeros((B, T, H)))[0],
    lambda *x: delta_rule(*x)[0],
    (q, k, v, beta),
  )
  out, _ = delta_rule(q, k, v, beta, log_decay=jnp.full((B, T, H), -jnp.inf))
  q, k, v, beta = exact(q, k, v, beta)
  close(out, (beta * (q * k).sum(-1))[..., None] * v, length=T)


@pytest.mark.slow
def test_delta_rule_with_zero_erase_key_equals_linear_attention():
  """An erase key of 0, or keys at right angles, leave S = a S + β k v^T."""
  q, k, v = qkv()
  beta, g = jax.nn.sigmoid(normal((B, T, H), seed=5)[0]), decays(B, T, H)
  additive = lambda q, k, v, beta, g: linear_attention(q, beta[..., None] * k, v, log_decay=g)[0]
  same(
    lambda *x: delta_rule(*x[:4], log_decay=x[4], erase_key=jnp.zeros_like(x[1]))[0],
    additive,
    (q, k, v, beta, g),
  )
  q, k, v, beta, g = (x[:, :K] for x in (q, k, v, beta, g))
  k = jnp.broadcast_to(jnp.eye(K)[:, None], k.shape)
  close(delta_rule(q, k, v, beta, log_decay=g)[0], additive(q, k, v, beta, g))


def test_exact_longhorn_update_minimizes_its_objective():
  """Longhorn, eq. 5 and theorem 3.1: ||S - S_{t-1}||² + ||S^T k - x||² weighted by β is least.

  At the minimum the objective's gradient is 0; it is evaluated in float64 numpy.
  """
  steps = 6
  k, x, S, beta = exact(
    *normal((B, steps, 1, K), (B, steps, 1, V), (B, 1, K, V)),
    jax.nn.sigmoid(normal((B, steps, 1, V), seed=7)[0]),
  )
  with jax.enable_x64(True):
    rate = beta / (1 + beta * np.sum(k**2, -1, keepdims=True))
    run = jax.jit(lambda S, *inputs: delta_rule(*inputs, initial_state=ops.DeltaRuleState(S))[1].kv)
    whole = run(S, k, k, x, rate)
    for t in range(steps):
      old = S
      S = np.asarray(run(old, *(y[:, t : t + 1] for y in (k, k, x, rate))))
      error = np.einsum("bhkv,bhk->bhv", S, k[:, t]) - x[:, t]
      slope = (S - old) + k[:, t, ..., None] * (beta[:, t] * error)[..., None, :]
      assert np.abs(slope).max() < 1e-14 * np.abs(S).max()
    close(whole, S, jnp.float64)


@pytest.mark.slow
def test_longhorn_decay_equals_the_diagonal_of_the_exact_transition():
  """Longhorn, algorithm 1: k k^T becomes k², which changes nothing for keys with one entry."""
  D, N = 6, 4
  x, k, q = normal((B, T, D), (B, T, N), (B, T, N))
  beta = jax.nn.sigmoid(normal((B, T, D), seed=2)[0])
  single = k * jax.nn.one_hot(np.arange(T) % N, N)

  @jax.jit
  def exact_form(x, beta, k, q):
    rate = beta / (1 + beta * jnp.sum(k**2, -1, keepdims=True))
    head = lambda y: y[:, :, None]
    return delta_rule(head(q), head(k), head(x), head(rate))[0][:, :, 0]

  close(longhorn_scan(x, beta, single, q)[0], exact_form(x, beta, single, q), length=T)
  # Other keys do: the two are different systems.
  assert not np.allclose(longhorn_scan(x, beta, k, q)[0], exact_form(x, beta, k, q), atol=1e-2)

  def every_entry(x, beta, k, q):
    rate = beta / (1 + beta * jnp.sum(k**2, -1, keepdims=True))
    decay = jnp.log1p(-rate[:, :, None, :] * k[..., None] ** 2)
    head = lambda y: y[:, :, None]
    written = head(rate * x)
    return ops.elementwise_decay_scan(head(q), head(k), written, head(decay))[0][:, :, 0]

  same(lambda *y: longhorn_scan(*y)[0], every_entry, (x, beta, k, q))


@pytest.mark.slow
def test_mamba_and_mamba2_equal_elementwise_and_per_head_decays():
  """S6 with one rate for all entries is SSD: linear attention with a decay per step and head."""
  D, N = 6, 4
  x, b, c, dt = normal((B, T, D), (B, T, N), (B, T, N), (B, T, D))
  a = decays(D, N)
  head = lambda y: y[:, :, None]

  def every_entry(x, dt, a, b, c):
    decay = dt[:, :, None, :] * a.T[None, None]
    return ops.elementwise_decay_scan(head(c), head(b), head(dt * x), head(decay))[0][:, :, 0]

  arguments = (x, jax.nn.softplus(dt), a, b, c)
  same(lambda *y: ops.selective_scan(*y)[0], every_entry, arguments)

  rate, step = jnp.asarray(-0.7), jax.nn.softplus(dt[..., :1])

  def one_rate(x, step, rate, b, c):
    dt = jnp.broadcast_to(step, x.shape)
    return ops.selective_scan(x, dt, jnp.broadcast_to(rate, (D, N)), b, c)[0]

  def ssd(x, step, rate, b, c):
    out, _ = linear_attention(head(c), head(b), head(step * x), log_decay=step * rate)
    return out[:, :, 0]

  same(one_rate, ssd, (x, step, rate, b, c))


@pytest.mark.slow
def test_rotated_features_equal_a_complex_decay():
  """cosFormer and LRPE: [q cos tθ; q sin tθ] · [k cos sθ; k sin sθ] is S = e^{iθ} S + k v^T."""
  theta = jnp.asarray(10000.0 ** (-2 * np.arange(K) / K), jnp.float32)
  g = decays(H, K)  # LRPE with an exponential decay, as TNL has it

  def rotated(q, k, v, theta, g):
    angle = jnp.arange(T)[:, None, None] * theta
    turn = lambda x: jnp.concatenate([x * jnp.cos(angle), x * jnp.sin(angle)], -1)
    return linear_attention(turn(q), turn(k), v, log_decay=jnp.tile(g, (1, 2)))[0]

  def complex_decay(q, k, v, theta, g):
    decay = jnp.exp(jax.lax.complex(g, jnp.broadcast_to(theta, g.shape)))
    decay = jnp.broadcast_to(decay[..., None], (H, K, V)).reshape(-1)
    written = (k[..., None] * v[..., None, :]).reshape(B, T, -1)
    S = ops.diagonal_scan(decay, written)[0].real.reshape(B, T, H, K, V)
    return jnp.einsum("bthk,bthkv->bthv", q, S)

  with jax.enable_x64(True):  # angles of many turns are known to a rounding of the number of turns
    arguments = tuple(jnp.asarray(x, jnp.float64) for x in (*qkv(), theta, g))
    same(rotated, complex_decay, arguments, jnp.float64)


@pytest.mark.slow
def test_gated_slot_attention_equals_two_passes_of_linear_attention():
  """GSA: slots K̃ and Ṽ are written with 1 - f, read with a softmax over the slots."""
  M = 5
  q, k, v = qkv()
  f = jnp.exp(decays(B, T, H, M))
  first, _ = linear_attention(q, k, 1 - f, value_log_decay=jnp.log(f))
  out, _ = linear_attention(jax.nn.softmax(first), 1 - f, v, log_decay=jnp.log(f))
  key_slots, value_slots, want = np.zeros((B, H, M, K)), np.zeros((B, H, M, V)), []
  for q_t, k_t, v_t, f_t in zip(*(np.moveaxis(x, 1, 0) for x in exact(q, k, v, f)), strict=True):
    f_t = f_t[..., None]
    key_slots = f_t * key_slots + (1 - f_t) * k_t[..., None, :]
    value_slots = f_t * value_slots + (1 - f_t) * v_t[..., None, :]
    scores = np.exp(np.einsum("bhmk,bhk->bhm", key_slots, q_t))
    weights = scores / scores.sum(-1, keepdims=True)
    want.append(np.einsum("bhm,bhmv->bhv", weights, value_slots))
  close(out, np.stack(want, 1), length=T)


@pytest.mark.slow
def test_wkv4_equals_normalized_linear_attention_with_one_channel_per_head():
  """RWKV-4, eq. 16: keys exp(k), queries 1, decay -w, bonus exp(u); the read is one decay later."""
  D = 5
  k, v, u = normal((B, T, D), (B, T, D), (D,))
  w = -decays(D)

  def weighted_mean(k, v, w, u):
    head = lambda x: x[..., None]
    # S_{t-1} is read without the decay of step t, which linear_attention applies to it: the bonus
    # form reads S_{t-1} itself.
    out, _ = linear_attention(
      jnp.ones((B, T, D, 1)), head(jnp.exp(k)), head(v),
      log_decay=-head(w), bonus=head(jnp.exp(u)), normalize=True,
    )  # fmt: skip
    return out[..., 0]

  same(lambda *x: ops.wkv4(*x)[0], weighted_mean, (k, v, w, u))


@pytest.mark.parametrize("data_dependent", [False, True])
def test_linear_attention_with_bonus_equals_rwkv5_and_rwkv6(data_dependent):
  """RWKV-5 and RWKV-6: o = r^T (S_{t-1} + diag(u) k v^T), S = diag(w) S + k v^T, in numpy."""
  r, k, v = qkv()
  u, g = normal((H, K), seed=4)[0], decays(*((B, T) if data_dependent else ()), H, K)
  out, _ = linear_attention(r, k, v, log_decay=g, bonus=u)
  each = np.broadcast_to(np.exp(np.asarray(g, np.float64)), (B, T, H, K))
  r, k, v, u = exact(r, k, v, u)
  S, want = np.zeros((B, H, K, V)), []
  for t in range(T):
    update = k[:, t, ..., None] * v[:, t, :, None]
    want.append(np.einsum("bhk,bhkv->bhv", r[:, t], S + u[..., None] * update))
    S = each[:, t, ..., None] * S + update
  close(out, np.stack(want, 1), length=T)


@pytest.mark.slow
def test_softmax_attention_equals_its_definition():
  """A window of 1 is the value itself; blocks are separate sequences; q = 0 is a running mean."""
  q, k, v = normal((B, T, H, K), (B, T, H, K), (B, T, H, V))
  close(attention(q, k, v, window=1)[0], v)
  apart = [attention(*(x[:, s : s + 10] for x in (q, k, v)))[0] for s in range(0, T, 10)]
  close(attention(q, k, v, block=10)[0], jnp.concatenate(apart, 1))
  ones = jnp.ones((B, T, H, 1))
  mean, _ = linear_attention(ones, ones, v, normalize=True)
  close(attention(jnp.zeros_like(q), k, v)[0], mean)
