"""linear_attention: the promises beside its values. The values are the business of the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops import contract

B, H, K, V = 2, 2, 4, 6


def inputs(T, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  q, k = (jnp.asarray(np.exp(rng.normal(size=(B, T, H, K))), dtype) for _ in range(2))
  v = jnp.asarray(rng.normal(size=(B, T, H, V)), dtype)
  return q, k, v, jnp.asarray(-np.exp(rng.uniform(-5, 3, size=(H, K))), jnp.float32)


def attention(q, k, v, log_decay, **kwargs):
  return ops.linear_attention(q, k, v, log_decay=log_decay, normalize=True, chunk_size=8, **kwargs)


def close(got, want, dtype=jnp.float32, length=64):
  errors = jax.tree.leaves(jax.tree.map(contract.relative_error, got, want))
  assert max(errors) <= contract.tolerance(dtype, length), errors


@pytest.mark.parametrize("decay_first", [True, False])
def test_equals_the_formula_of_the_paper(decay_first):
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


def test_backward_equals_the_published_recursions():
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


def test_gradient_of_a_strong_decay_is_right_channel_by_channel():
  """Beside gradients of 1, that of a decay of exp(-20) is 1e-9: its own relative error counts."""
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


def test_complete_forgetting_is_exact():
  """log_decay = -inf forgets everything: each output is then its own value."""
  q, k, v, _ = inputs(20)
  out, state = attention(q, k, v, jnp.full((H, K), -jnp.inf))
  close((out, state.kv), (v, k[:, -1, :, :, None] * v[:, -1, :, None, :]))
  gradients = jax.grad(
    lambda *x: jnp.sum(attention(*x, jnp.full((H, K), -jnp.inf))[0]), argnums=(0, 1, 2)
  )
  assert all(jnp.isfinite(g).all() for g in gradients(q, k, v))


@pytest.mark.parametrize("cuts", [[1], [8], [13], list(range(1, 20))], ids=["1", "8", "13", "each"])
def test_splitting_a_sequence_changes_nothing(cuts):
  *arrays, log_decay = inputs(20)
  segments = jnp.asarray(np.arange(20) // 7 * np.ones((B, 1)), jnp.int32)
  whole = attention(*arrays, log_decay, segment_ids=segments)
  state, outs = None, []
  call = jax.jit(attention)
  for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
    # A state belongs to the segment that begins a call: at a border between documents it is not
    # passed on.
    if start and start % 7 == 0:
      state = None
    piece = [x[:, start:end] for x in arrays]
    out, state = call(*piece, log_decay, initial_state=state, segment_ids=segments[:, start:end])
    outs.append(out)
  close((jnp.concatenate(outs, 1), state), whole)


def test_packed_documents_equal_separate_documents():
  *arrays, log_decay = inputs(30)
  lengths = [1, 11, 8, 10]
  segments = jnp.asarray(np.repeat([4, 9, 4, 0], lengths)[None].repeat(B, 0), jnp.int32)
  packed, last = attention(*arrays, log_decay, segment_ids=segments)
  ends = np.cumsum(lengths)
  apart = [
    attention(*(x[:, end - n : end] for x in arrays), log_decay)
    for n, end in zip(lengths, ends, strict=True)
  ]
  close((packed, last), (jnp.concatenate([out for out, _ in apart], 1), apart[-1][1]))


@pytest.mark.parametrize("implementation", ["chunked", "associative", "reference"])
def test_nothing_flows_backwards_in_time(implementation):
  q, k, v, log_decay = inputs(21)
  changed = [x.at[:, 13].add(1.0) for x in (q, k, v)]
  call = jax.jit(lambda *x: attention(*x, log_decay, implementation=implementation)[0])
  before, after = call(q, k, v), call(*changed)
  np.testing.assert_array_equal(before[:, :13], after[:, :13])
  assert not np.allclose(before[:, 13:], after[:, 13:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
  out, state = attention(*inputs(5, dtype=dtype))
  assert out.dtype == dtype
  assert state.kv.dtype == state.key_sum.dtype == jnp.float32


def test_works_under_every_transformation():
  arrays = inputs(12)
  plain = attention(*arrays)[0]
  loss = lambda *x: jnp.sum(attention(*x)[0] ** 2)
  stacked = [jnp.stack([x, 2 * x]) for x in arrays[:3]]
  mapped = jax.vmap(lambda *x: attention(*x, arrays[3])[0])(*stacked)
  close(mapped[0], plain)
  close(mapped[1], attention(*(x[1] for x in stacked), arrays[3])[0])
  close(
    jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2, 3))(*arrays),
    jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays),
  )
  _, scanned = jax.lax.scan(lambda c, x: (c, attention(*x, arrays[3])[0]), 0, stacked)
  close(scanned, mapped)
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec("data")
  sharded = jax.shard_map(
    lambda *x: attention(*x, arrays[3])[0], mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
  )
  close(sharded(*arrays[:3]), plain)


def test_second_derivatives():
  q, k, v, log_decay = inputs(9)

  def directional(implementation):
    first = jax.grad(
      lambda g: jnp.sum(attention(q, k, v, g, implementation=implementation)[0] ** 3)
    )
    return jax.grad(lambda g: jnp.sum(first(g) * jnp.arange(float(H * K)).reshape(H, K)))(log_decay)

  close(directional("chunked"), directional("reference"), length=2**16)


def test_no_array_holds_a_state_per_step():
  """Memory is the inputs and the states between chunks: nothing of size T K V in either pass."""
  T, width, chunk = 512, 32, 64
  shape = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  decay = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  loss = lambda q, k, v, g: jnp.sum(
    ops.linear_attention(q, k, v, log_decay=g, implementation="chunked", chunk_size=chunk)[0]
  )
  compiled = (
    jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(shape, shape, shape, decay).compile()
  )
  states = T // chunk * width * width * 4
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * states + 40 * T * width * 4
  assert 4 * states + 40 * T * width * 4 < T * width * width * 4 * 2


def test_supported_lists_what_can_run():
  q, k, v, log_decay = inputs(3)
  assert ops.supported(ops.linear_attention, q, k, v, log_decay=log_decay) == [
    "chunked",
    "reference",
    "associative",
  ]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, H, K)}, r"k has shape \(2, 5, 2, 4\).*\[2, 6, 2, 4\]"),
    ({"v": (B, 6, 3, V)}, r"v has shape \(2, 6, 3, 6\)"),
    ({"q": (B, 6, K)}, r"q has shape \(2, 6, 4\).*\[B, T, H, K\]"),
    ({"q": (B, 0, H, K), "k": (B, 0, H, K), "v": (B, 0, H, V)}, "T >= 1"),
    ({"log_decay": (K,)}, r"log_decay has shape \(4,\), but one of"),
    ({"value_log_decay": (H, K)}, r"value_log_decay has shape \(2, 4\)"),
    ({"bonus": (K,)}, r"bonus has shape \(4,\)"),
    ({"value_log_decay": (H, V), "normalize": True}, "no meaning together with value_log_decay"),
    ({"initial_state": ops.LinearAttentionState(jnp.zeros((B, H, V, K)))}, r"initial_state.kv"),
    (
      {"initial_state": ops.LinearAttentionState(jnp.zeros((B, H, K, V))), "normalize": True},
      "key_sum",
    ),
    ({"segment_ids": jnp.zeros((B, 5), jnp.int32)}, r"segment_ids has shape \(2, 5\)"),
    ({"segment_ids": jnp.zeros((B, 6))}, "segment_ids has dtype float32; it must be integer"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"scale": jnp.ones(())}, "scale=.* must be a Python number"),
    ({"implementation": "chunkd"}, "'chunkd' is unknown; use one of 'chunked'"),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, H, K), "v": (B, 6, H, V)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    ops.linear_attention(**arguments)


def test_integer_inputs_are_refused():
  q = jnp.zeros((B, 6, H, K), jnp.int32)
  with pytest.raises(ValueError, match="q has dtype int32; it must be floating point"):
    ops.linear_attention(q, q, q)
