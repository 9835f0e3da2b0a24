"""delta_rule: the promises beside its values. The values are the business of the contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.delta_rule.api import delta_rule
from lnssm_jax.ops.delta_rule.state import DeltaRuleState
from tests.ops import contract

B, H, K, V = 2, 2, 4, 6


def inputs(T, seed=0, dtype=jnp.float32, per_column=False):
  """q, k of length 1, v, beta, log_decay."""
  rng = np.random.default_rng(seed)
  q, k = rng.normal(size=(B, T, H, K)), rng.normal(size=(B, T, H, K))
  k = k / np.linalg.norm(k, axis=-1, keepdims=True)
  v = rng.normal(size=(B, T, H, V))
  beta = rng.random((B, T, H, V) if per_column else (B, T, H))
  decay = -np.exp(rng.normal(size=(B, T, H)) - 1)
  return *(jnp.asarray(x, dtype) for x in (q, k, v)), jnp.float32(beta), jnp.float32(decay)


@functools.partial(jax.jit, static_argnames=("implementation", "chunk_size", "scale"))
def rule(q, k, v, beta, log_decay=None, chunk_size=8, **kwargs):
  return delta_rule(q, k, v, beta, log_decay=log_decay, chunk_size=chunk_size, **kwargs)


def close(got, want, dtype=jnp.float32, length=64):
  errors = jax.tree.leaves(jax.tree.map(contract.relative_error, got, want))
  assert max(errors) <= contract.tolerance(dtype, length), errors


def in_float64(fn, *arrays):
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, fn(*(jnp.asarray(np.asarray(x, np.float64)) for x in arrays)))


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_equals_the_product_of_matrices(implementation):
  """S_t = A_t S_{t-1} + X_t unrolled: the sum over j of A_t A_{t-1} .. A_{j+1} X_j, in numpy."""
  T = 19
  arrays = inputs(T)
  erase_key = inputs(T, seed=1)[1]
  q, k, v, beta, log_decay = (np.asarray(x, np.float64) for x in arrays)
  e, S_0 = np.asarray(erase_key, np.float64), np.random.default_rng(2).normal(size=(B, H, K, V))
  want = np.zeros((B, T, H, V))
  for b, h in np.ndindex(B, H):
    step = lambda t, b=b, h=h: (
      np.exp(log_decay[b, t, h]) * (np.eye(K) - beta[b, t, h] * np.outer(k[b, t, h], e[b, t, h]))
    )
    for t in range(T):
      product, S = np.eye(K), np.zeros((K, V))
      for j in range(t, -1, -1):
        S += product @ (beta[b, j, h] * np.outer(k[b, j, h], v[b, j, h]))
        product = product @ step(j)
      S += product @ S_0[b, h]
      want[b, t, h] = 0.5 * S.T @ q[b, t, h]
  out, state = in_float64(
    lambda *x: rule(
      *x[:5], erase_key=x[5], initial_state=DeltaRuleState(x[6]), scale=0.5,
      implementation=implementation,
    ),
    *arrays, erase_key, S_0,
  )  # fmt: skip
  close((out, np.einsum("bhkv,bhk->bhv", state.kv, q[:, -1]) / 2), (want, want[:, -1]), np.float64)


def test_reference_gradients_equal_finite_differences():
  arrays = inputs(5, per_column=True)
  weights = np.random.default_rng(3).normal(size=(B, 5, H, V))
  loss = jax.jit(lambda *x: jnp.sum(rule(*x, implementation="reference")[0] * weights))
  gradients = in_float64(jax.grad(loss, argnums=tuple(range(5))), *arrays)
  rng, step = np.random.default_rng(4), 1e-5
  exact = [np.asarray(x, np.float64) for x in arrays]
  for i, gradient in enumerate(gradients):
    direction = rng.normal(size=gradient.shape)
    moved = lambda s, i=i, d=direction: [x + s * d if j == i else x for j, x in enumerate(exact)]
    slope = (in_float64(loss, *moved(step)) - in_float64(loss, *moved(-step))) / (2 * step)
    np.testing.assert_allclose(slope, np.sum(gradient * direction), rtol=1e-8)


def test_exact_longhorn_minimises_its_objective():
  """Longhorn, theorem 3.1: S_t minimises |S - S_{t-1}|^2 + |S k - x|^2 weighted by b (float64)."""
  q, k, x, b, _ = inputs(1, per_column=True)
  k, S_0 = 3 * k, np.random.default_rng(5).normal(size=(B, H, K, V))
  rates = lambda k, b: b / (1 + b * jnp.sum(k * k, axis=-1, keepdims=True))
  S = in_float64(
    lambda q, k, x, b, S_0: rule(q, k, x, rates(k, b), initial_state=DeltaRuleState(S_0))[1].kv,
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


def test_one_rate_per_column_is_one_delta_rule_per_column():
  q, k, v, beta, log_decay = inputs(21, per_column=True)
  apart = [
    rule(q, k, v[..., i : i + 1], beta[..., i], log_decay, implementation="reference")
    for i in range(V)
  ]
  want = jax.tree.map(lambda *x: jnp.concatenate(x, -1), *apart)
  close(rule(q, k, v, beta, log_decay), want)


def test_beta_zero_and_one():
  """beta = 0 leaves the state as it is; beta = 1 with a unit key and no decay makes S^T k = v."""
  q, k, v, beta, _ = inputs(20)
  S_0 = DeltaRuleState(jnp.asarray(np.random.default_rng(7).normal(size=(B, H, K, V)), jnp.float32))
  out, state = rule(q, k, v, 0 * beta, initial_state=S_0)
  np.testing.assert_array_equal(state.kv, S_0.kv)
  close(out, jnp.einsum("bthk,bhkv->bthv", q, S_0.kv, precision="highest"))
  close(rule(k, k, v, jnp.ones_like(beta), initial_state=S_0)[0], v)


def test_orthogonal_keys_do_not_disturb_each_other():
  """Then the delta rule is linear attention with values beta v."""
  q, _, v, beta, _ = inputs(K)
  k = jnp.broadcast_to(jnp.eye(K)[None, :, None], (B, K, H, K))
  want = ops.linear_attention(q, k, beta[..., None] * v)
  got = rule(q, k, v, beta)
  close((got[0], got[1].kv), (want[0], want[1].kv))


def test_equal_keys_are_no_trouble():
  """64 equal keys in a chunk of 64: powers of the triangular matrix would reach 1e18."""
  q, k, v, beta, _ = inputs(64)
  k = jnp.broadcast_to(k[:, :1], k.shape)
  exact = in_float64(lambda *x: rule(*x, implementation="reference"), q, k, v, beta)
  close(rule(q, k, v, beta, chunk_size=64), exact)


def test_keys_that_are_too_long_make_the_state_grow():
  """beta |k|^2 = 4: the state reaches 1e5, accurate beside its size. 36: it overflows."""
  q, k, v, beta, _ = inputs(64)
  ones = jnp.ones_like(beta)
  exact = in_float64(lambda *x: rule(*x, implementation="reference"), q, 2 * k, v, ones)
  assert np.abs(exact[1].kv).max() > 1e5
  close(rule(q, 2 * k, v, ones), exact)
  for implementation in ("chunked", "reference"):
    _, state = rule(q, 6 * k, v, ones, implementation=implementation)
    assert not np.isfinite(state.kv).any()


def test_complete_forgetting_is_exact():
  """log_decay = -inf forgets everything: each output is then its own value's."""
  q, k, v, beta, decay = inputs(20)
  forget = jnp.full_like(decay, -jnp.inf)
  want = jnp.sum(q * k, -1, keepdims=True) * beta[..., None] * v
  close(rule(q, k, v, beta, forget)[0], want)
  gradients = jax.grad(lambda *x: jnp.sum(rule(*x, forget)[0]), argnums=(0, 1, 2, 3))
  assert all(jnp.isfinite(g).all() for g in gradients(q, k, v, beta))


@pytest.mark.parametrize(
  ("cuts", "per_column"),
  [([1], False), ([8], True), (range(1, 20), False), (range(1, 20), True)],
  ids=["1", "8-column", "each", "each-column"],
)
def test_splitting_a_sequence_changes_nothing(cuts, per_column):
  arrays = inputs(20, per_column=per_column)
  segments = jnp.asarray(np.arange(20) // 7 * np.ones((B, 1)), jnp.int32)
  whole = rule(*arrays, segment_ids=segments)
  state, outs = None, []
  for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
    # A state belongs to the segment that begins a call: at a border between documents it is not
    # passed on.
    if start and start % 7 == 0:
      state = None
    piece = [x[:, start:end] for x in arrays]
    out, state = rule(*piece, initial_state=state, segment_ids=segments[:, start:end])
    outs.append(out)
  close((jnp.concatenate(outs, 1), state), whole)


def test_packed_documents_equal_separate_documents():
  arrays = inputs(30)
  lengths = [1, 12, 5, 12]
  segments = jnp.asarray(np.repeat([4, 9, 4, 0], lengths)[None].repeat(B, 0), jnp.int32)
  packed, last = rule(*arrays, segment_ids=segments)
  ends = np.cumsum(lengths)
  apart = [rule(*(x[:, e - n : e] for x in arrays)) for n, e in zip(lengths, ends, strict=True)]
  close((packed, last), (jnp.concatenate([out for out, _ in apart], 1), apart[-1][1]))


@pytest.mark.parametrize(
  ("implementation", "per_column"), [("chunked", False), ("chunked", True), ("reference", False)]
)
def test_nothing_flows_backwards_in_time(implementation, per_column):
  arrays = inputs(21, per_column=per_column)
  changed = [x.at[:, 13].add(-0.5) for x in arrays]
  before, after = (rule(*x, implementation=implementation)[0] for x in (arrays, changed))
  np.testing.assert_array_equal(before[:, :13], after[:, :13])
  assert not np.allclose(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
  out, state = rule(*inputs(5, dtype=dtype))
  assert out.dtype == dtype
  assert state.kv.dtype == jnp.float32


def test_works_under_every_transformation():
  arrays = inputs(12, per_column=True)
  plain = rule(*arrays)[0]
  loss = lambda *x: jnp.sum(rule(*x)[0] ** 2)
  stacked = [jnp.stack([x, x / 2]) for x in arrays]
  mapped = jax.vmap(lambda *x: rule(*x)[0])(*stacked)
  close(mapped[0], plain)
  close(mapped[1], rule(*(x[1] for x in stacked))[0])
  every = tuple(range(5))
  gradients = jax.jit(jax.grad(loss, argnums=every))(*arrays)
  close(jax.jit(jax.grad(jax.checkpoint(loss), argnums=every))(*arrays), gradients)
  _, scanned = jax.lax.scan(lambda c, x: (c, rule(*x)[0]), 0, tuple(stacked))
  close(scanned, mapped)
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("data")
  sharded = jax.shard_map(
    jax.grad(loss, argnums=every), mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 5
  )
  close(jax.jit(sharded)(*arrays), gradients)


def test_second_derivatives():
  q, k, v, beta, _ = inputs(9)

  def directional(implementation):
    first = jax.grad(lambda b: jnp.sum(rule(q, k, v, b, implementation=implementation)[0] ** 3))
    weights = jnp.arange(float(beta.size)).reshape(beta.shape)
    return jax.jit(jax.grad(lambda b: jnp.sum(first(b) * weights)))(beta)

  close(directional("chunked"), directional("reference"), length=2**16)


@pytest.mark.parametrize("per_column", [False, True])
def test_no_array_holds_a_state_per_step(per_column):
  """Memory is the inputs and the states between chunks: nothing of size T K V in either pass."""
  T, width, chunk = 512, 64, 16
  shape = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  per_head = jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
  loss = lambda *x: jnp.sum(rule(*x, implementation="chunked", chunk_size=chunk)[0])
  arguments = (shape,) * 3 + (shape if per_column else per_head, per_head)
  compiled = jax.jit(jax.grad(loss, argnums=tuple(range(5)))).lower(*arguments).compile()
  states = T // chunk * width * width * 4
  limit = 3 * states + 40 * T * width * 4
  assert compiled.memory_analysis().temp_size_in_bytes < limit < T * width * width * 4


def test_supported_lists_what_can_run():
  assert ops.supported(delta_rule, *inputs(3)[:4]) == ["chunked", "reference"]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, H, K)}, r"k has shape \(2, 5, 2, 4\).*\[2, 6, 2, 4\]"),
    ({"v": (B, 6, 3, V)}, r"v has shape \(2, 6, 3, 6\)"),
    ({"q": (B, 6, K)}, r"q has shape \(2, 6, 4\).*\[B, T, H, K\]"),
    (dict.fromkeys("qkv", (B, 0, H, K)), "T >= 1"),
    ({"beta": (B, 6, H, K)}, r"beta has shape \(2, 6, 2, 4\), but \[2, 6, 2\].*\[2, 6, 2, 6\]"),
    ({"beta": jnp.ones((B, 6, H), jnp.int32)}, "beta has dtype int32"),
    ({"log_decay": (H,)}, r"log_decay has shape \(2,\)"),
    ({"erase_key": (B, 6, H, V)}, r"erase_key has shape \(2, 6, 2, 6\)"),
    ({"initial_state": DeltaRuleState(jnp.zeros((B, H, V, K)))}, r"initial_state.kv has shape"),
    ({"segment_ids": jnp.zeros((B, 5), jnp.int32)}, r"segment_ids has shape \(2, 5\)"),
    ({"segment_ids": jnp.zeros((B, 6))}, "segment_ids has dtype float32; it must be integer"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"scale": jnp.ones(())}, "scale=.* must be a Python number"),
    ({"implementation": "associative"}, "'associative' is unknown; use one of 'chunked'"),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, H, K), "v": (B, 6, H, V), "beta": (B, 6, H)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    delta_rule(**arguments)
