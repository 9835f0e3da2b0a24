"""Tests particular to sparse_state_attention; the contract suite covers the rest."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.delta_rule import api as delta_rule_api
from lnssm_jax.ops.linear_attention import api as linear_attention_api
from lnssm_jax.ops.sparse_state_attention import api as sparse_api
from tests.ops import contract, promises
from tests.ops.cases.sparse_state_attention import SPARSE_STATE_ATTENTION, Case
from tests.ops.promises import close

B, H, K, V = 2, 2, 3, 5
METHODS = ("mask", "varlen", "gather")


def inputs(T, S, N, seed=0, dtype=jnp.float32):
  """q, k, v, indices, gates, log_decay [B, T, H, K] from about -3 to -1e-2."""
  rng = np.random.default_rng(seed)
  q, k = (jnp.asarray(rng.normal(size=(B, T, H, K)), dtype) for _ in range(2))
  v = jnp.asarray(rng.normal(size=(B, T, H, V)), dtype)
  indices = jnp.asarray(rng.random((B, T, N)).argsort(-1)[..., :S], jnp.int32)
  gates = jnp.asarray(rng.random((B, T, S)), dtype)
  return q, k, v, indices, gates, jnp.asarray(-np.exp(rng.uniform(-5, 1, (B, T, H, K))), dtype)


def attention(q, k, v, indices, gates, log_decay, N, **options):
  options = {"num_partitions": N, "chunk_size": 4, "scale": 1.0} | options
  return ops.sparse_state_attention(q, k, v, indices, gates, log_decay=log_decay, **options)


def written_out(x, N, segments, scale):
  """The recurrence, one step, one partition and one head at a time, in float64."""
  x = {n: np.asarray(a, np.float64) for n, a in x.items()}
  kv = x["state.kv"].copy()
  outs = np.zeros_like(x["v"][:, :, 0])
  for b, t, h in np.ndindex(B, x["q"].shape[1], H):
    if h == 0 and t > 0 and segments[b, t] != segments[b, t - 1]:
      kv[b] = 0
    for s, i in enumerate(x["indices"][b, t].astype(int)):
      if 0 <= i < N:
        a = np.exp(x["log_decay"][b, t, s, h])
        key, value = x["k"][b, t, s, h], x["v"][b, t, s, h]
        rate = x["gates"][b, t, s]
        if "beta" in x:
          rate = rate * x["beta"][b, t, h]
          value = value - a * kv[b, i, h].T @ key
        kv[b, i, h] = np.reshape(a, (-1, 1)) * kv[b, i, h] + rate * np.outer(key, value)
        outs[b, t, h] += scale * kv[b, i, h].T @ (x["read_gates"][b, t, s] * x["q"][b, t, h])
  return outs, kv


def selects_nothing_twice(rate, state=True):
  """A case with everything at once, and two indices out of range: under jit they select nothing."""
  decay = "BTSH" if rate else "BTSHK"
  rest = {"key": "BTSHK", "value": "BTSHV", "read": True, "chunk": 4, "state": state}
  case = Case(T=21, S=2, N=4, decay=decay, rate=rate, **rest)
  x = SPARSE_STATE_ATTENTION.draw(case, np.random.default_rng(0))
  x["indices"][0, 3, 1], x["indices"][1, 20, 0] = 4, -1
  return case, x, np.asarray(promises.documents(B, (5, 9, 7)))


@pytest.mark.parametrize("rate", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_sparse_state_attention_equals_the_recurrence(method, rate):
  case, x, segments = selects_nothing_twice(rate)
  run = lambda x: SPARSE_STATE_ATTENTION(case, x, method=method, segment_ids=jnp.asarray(segments))
  with jax.enable_x64(True):
    out, state = jax.jit(run)({n: jnp.asarray(a) for n, a in x.items()})
    out, kv = np.asarray(out), np.asarray(state.kv)
  close((out, kv), written_out(x, 4, segments, 0.7), dtype=jnp.float64)


@pytest.mark.parametrize("rate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sparse_state_attention_rows_for_kernels_equal_the_recurrence(rate, hopper, monkeypatch):
  """The form for kernels does not pad the runs. What is inside runs as it does on this device."""
  case, x, segments = selects_nothing_twice(rate, state=False)
  case = dataclasses.replace(case, chunk=None)

  def run(x):
    options = {"method": "varlen", "segment_ids": jnp.asarray(segments)}
    return SPARSE_STATE_ATTENTION(case, x, implementation="pallas", **options)

  with jax.enable_x64(True), monkeypatch.context() as inside:
    inside.setattr(linear_attention_api._KERNELS, "_unsupported", lambda *_: "on a CPU")
    inside.setattr(delta_rule_api._KERNELS, "_unsupported", lambda *_: "on a CPU")
    out, state = jax.jit(run)({n: jnp.asarray(a) for n, a in x.items()})
    out, kv = np.asarray(out), np.asarray(state.kv)
  x["state.kv"] = np.zeros_like(kv)
  close((out, kv), written_out(x, 4, segments, 0.7), dtype=jnp.float64)


@pytest.mark.slow
def test_sparse_state_attention_with_one_partition_equals_linear_attention():
  q, k, v, indices, gates, log_decay = inputs(19, 1, 1)
  want, state = ops.linear_attention(q, k, v, log_decay=log_decay, scale=1.0, chunk_size=4)
  for method in METHODS:
    run = jax.jit(lambda *x: attention(*x, log_decay, 1, method=method))  # noqa: B023
    out, sparse = run(q, k, v, indices, jnp.ones_like(gates))
    close((out, sparse.kv[:, 0]), (want, state.kv))


@pytest.mark.slow
def test_sparse_state_attention_with_a_partition_per_row_is_row_sparse():
  """A token uses S rows of the state. The others keep decay 1, are not written and not read."""
  rows, S, T = 6, 2, 13
  q, k, v, indices, _, _ = inputs(T, S, rows)
  rng = np.random.default_rng(4)
  q, k, log_decay = (jnp.asarray(rng.normal(size=(B, T, rows)), jnp.float32) for _ in range(3))
  v, log_decay = v[:, :, :1], -jnp.exp(log_decay)
  used = (indices[..., None] == jnp.arange(rows)).any(2)

  def dense(x, v):
    q, k, log_decay = (jnp.where(used, y, 0.0)[:, :, None] for y in x)
    out, state = ops.linear_attention(q, k, v, log_decay=log_decay, scale=1.0, chunk_size=4)
    return out, state.kv[:, 0]

  def sparse(x, v):
    q, k, log_decay = (jnp.take_along_axis(y, indices, 2) for y in x)
    ones = jnp.ones((B, T, 1, 1))
    out, state = ops.sparse_state_attention(
      ones, ones[:, :, None] + jnp.zeros((S, 1, 1)), v, indices, k, read_gates=q,
      num_partitions=rows, log_decay=log_decay[..., None], method="varlen", chunk_size=4,
    )  # fmt: skip
    return out, state.kv[:, :, 0, 0]

  arguments = ((q, k, log_decay), v)
  got = contract.values_and_gradients(lambda x: sparse(*x), arguments)
  close(got, contract.values_and_gradients(lambda x: dense(*x), arguments))


@pytest.mark.slow
def test_sparse_state_attention_unselected_partitions_do_not_decay():
  """SSE's Algorithm 1 masks q, k and v, not the decay. That is another function."""
  T, N = 17, 4
  q, k, v, indices, gates, log_decay = inputs(T, 2, N)
  weights = jnp.sum(jnp.where(indices[..., None] == jnp.arange(N), gates[..., None], 0.0), 2)

  @functools.partial(jax.jit, static_argnums=0)
  def masked(decay_where_used):
    fold = lambda x, w: (x[:, :, None] * w[..., None, None]).reshape(B, T, N * H, -1)
    every = jnp.ones_like(weights)
    out, state = ops.linear_attention(
      fold(q, weights),
      fold(k, weights),
      fold(v, every),
      log_decay=fold(log_decay, (weights > 0) if decay_where_used else every),
      scale=1.0,
      chunk_size=4,
    )
    return out.reshape(B, T, N, H, V).sum(2), state.kv.reshape(B, N, H, K, V)

  out, state = jax.jit(lambda *x: attention(*x, N))(q, k, v, indices, gates, log_decay)
  close((out, state.kv), masked(True))
  errors = jax.tree.map(contract.relative_error, (out, state.kv), masked(False))
  assert min(errors) > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_sparse_state_attention_unused_partition_keeps_its_bits(method):
  *arrays, log_decay = inputs(9, 2, 3)
  initial = jnp.asarray(np.random.default_rng(7).normal(size=(B, 5, H, K, V)), jnp.float32)
  run = lambda *x: attention(*x, 5, initial_state=ops.SparseState(initial), method=method)
  _, state = jax.jit(run)(*arrays, 10 * log_decay)
  np.testing.assert_array_equal(state.kv[:, 3:], initial[:, 3:])
  assert not np.allclose(state.kv[:, :3], initial[:, :3])


@pytest.mark.parametrize("method", METHODS)
def test_sparse_state_attention_later_selections_change_no_earlier_bit(method):
  """Bit for bit, though "varlen" then moves earlier tokens to other chunks."""
  first, second = inputs(23, 2, 5), inputs(23, 2, 5, seed=1)
  changed = [x.at[:, 13:].set(y[:, 13:]) for x, y in zip(first, second, strict=True)]
  run = jax.jit(lambda *x: attention(*x, 5, method=method)[0])
  before, after = run(*first), run(*changed)
  np.testing.assert_array_equal(before[:, :13], after[:, :13])
  assert not np.allclose(before[:, 13:], after[:, 13:])


@pytest.mark.slow
def test_sparse_state_attention_decoding_continues_prefill():
  arrays = inputs(14, 2, 4)
  call = jax.jit(lambda x, method: attention(*x, 4, method=method), static_argnums=1)
  want = call(arrays, "mask")
  out, state = call([x[:, :11] for x in arrays], "varlen")
  outs = [out]
  step = jax.jit(lambda x, state: attention(*x, 4, initial_state=state))
  for t in range(11, 14):
    out, state = step([x[:, t : t + 1] for x in arrays], state)
    outs.append(out)
  close((jnp.concatenate(outs, 1), state), want)


def test_sparse_decoding_loop_copies_no_states():
  """With the state as a donated carry, temporary memory does not grow with N."""

  def step(state, token):
    *arrays, log_decay = (x[:, None] for x in token)
    N = state.kv.shape[1]
    return attention(*arrays, log_decay, N, initial_state=state)[::-1]

  def temporary(N):
    state = jax.ShapeDtypeStruct((1, N, H, K, V), jnp.float32)
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :1], inputs(4, 1, 4))
    loop = jax.jit(lambda *x: jax.lax.scan(step, *x), donate_argnums=0)
    compiled = loop.lower(ops.SparseState(state), tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(64) == temporary(4)


@pytest.mark.slow
def test_sparse_varlen_memory_has_no_array_per_partition_and_token():
  """Nor a state per token. "mask" does hold T N K numbers."""
  T, S, N, width, chunk = 512, 1, 16, 24, 16
  x = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  gates = jax.ShapeDtypeStruct((1, T, S), jnp.float32)
  indices = jax.ShapeDtypeStruct((1, T, S), jnp.int32)

  def measure(method):
    def gradients(q, k, v, indices, gates, log_decay):
      run = lambda q, k, v, gates, log_decay: jnp.sum(
        ops.sparse_state_attention(
          q, k, v, indices, gates, num_partitions=N, log_decay=log_decay, method=method,
          chunk_size=chunk,
        )[0]
        ** 2
      )  # fmt: skip
      return jax.grad(run, argnums=range(5))(q, k, v, gates, log_decay)

    return promises.measure(gradients, x, x, x, indices, gates, x)

  chunks = S * T // chunk + N
  states, copies = chunks * width * width, chunks * chunk * width
  largest, temporary = measure("varlen")
  assert largest <= max(states, copies) < min(T * N * width, T * width * width) / 4
  # States: initial, added, entering, leaving, and their gradients. Copies of q, k, v, decays.
  assert temporary <= 4 * (8 * states + 40 * copies)
  assert measure("mask")[0] >= T * N * width
  # Left to itself, the function sorts if partitions are many.
  assert measure(None)[0] == largest


# (T, S, N): the method for training on a CPU, on a GPU, after a state on a CPU. README.md has the
# measured times that the rule follows.
CHOSEN = {
  (1, 2, 4): ("gather", "gather", "gather"),
  (1024, 1, 1): ("mask", "mask", "mask"),
  (1024, 1, 2): ("varlen", "varlen", "varlen"),
  (1024, 3, 4): ("varlen", "varlen", "mask"),  # with rows of padding more than 3/4
  (1024, 4, 5): ("mask", "mask", "mask"),
  (255, 1, 4): ("varlen", "mask", "varlen"),
  (256, 1, 4): ("varlen", "varlen", "varlen"),
  (15, 1, 64): ("varlen", "mask", "varlen"),
}


@pytest.mark.parametrize("sizes", CHOSEN)
def test_sparse_method_follows_length_and_numbers_of_partitions(sizes):
  where = ((True, False), (True, True), (False, False))
  got = [sparse_api.choose_method(*sizes, fresh=fresh, on_gpu=on_gpu) for fresh, on_gpu in where]
  assert tuple(got) == CHOSEN[sizes]


@pytest.mark.parametrize(("sizes", "method"), [((19, 1, 4), "varlen"), ((9, 3, 3), "mask")])
def test_sparse_attention_left_to_itself_is_the_chosen_method_bit_for_bit(sizes, method):
  arrays = inputs(*sizes)
  assert sparse_api.choose_method(*sizes, fresh=True, on_gpu=False, chunk_size=4) == method
  got, want = (attention(*arrays, sizes[-1], method=name) for name in (None, method))
  jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.slow
def test_sparse_uniform_gates_have_no_router_gradient():
  """Softmax is invariant to a shift of all channels: in SSE's eq. 11 the router has no gradient."""
  q, k, v, indices, _, log_decay = inputs(9, 2, 4)
  logits = jnp.asarray(np.random.default_rng(8).normal(size=(B, 9, 4)), jnp.float32)
  weights = jax.random.normal(jax.random.key(0), v.shape)

  def loss(logits, uniform):
    chosen = jnp.take_along_axis(logits, indices, 2)
    probabilities = jnp.take_along_axis(jax.nn.softmax(logits), indices, 2)
    gates = jnp.full_like(chosen, 0.5) if uniform else probabilities
    keys = jax.nn.softmax(k[:, :, None] + chosen[..., None, None])
    decay = jnp.repeat(log_decay[:, :, None], 2, 2)
    return jnp.sum(weights * attention(q, keys, v, indices, gates, decay, 4)[0])

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  assert jnp.abs(gradient(logits, False)).max() > 0.1
  assert jnp.abs(gradient(logits, True)).max() < 1e-6


def test_supported_sparse_forms_depend_on_the_method():
  *arrays, _ = inputs(3, 2, 4)
  every = ["chunked", "reference", "associative"]
  supported = functools.partial(ops.supported, ops.sparse_state_attention, *arrays)
  for method, want in [(None, every), ("mask", every), ("varlen", every), ("gather", every[1:2])]:
    assert supported(num_partitions=4, method=method) == want
  with pytest.raises(
    NotImplementedError, match="'chunked' cannot run: method='gather' runs token by token"
  ):
    attention(*arrays, None, 4, method="gather", implementation="chunked")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, H, K)}, r"k has shape \(2, 5, 2, 3\).*\[2, 6, 2, 3\]"),
    ({"k": (B, 6, 3, H, K)}, r"k has shape \(2, 6, 3, 2, 3\).*\[B, T, S, H, K\]"),
    ({"v": (B, 6, 3, V)}, r"v has shape \(2, 6, 3, 5\)"),
    ({"v": (B, 6, 3, H, V)}, r"v has shape \(2, 6, 3, 2, 5\).*\[B, T, S, H, V\]"),
    ({"q": (B, 0, H, K), "k": (B, 0, H, K), "v": (B, 0, H, V), "gates": (B, 0, 2),
      "indices": jnp.zeros((B, 0, 2), int)}, "empty axis"),
    ({"gates": (B, 6, 3)}, r"gates has shape \(2, 6, 3\).*\[2, 6, 2\]"),
    ({"read_gates": (B, 6)}, r"read_gates has shape \(2, 6\)"),
    ({"log_decay": (B, 6, 2, H, K)}, r"log_decay has shape \(2, 6, 2, 2, 3\).*k being \[B, T, H"),
    ({"k": (B, 6, 2, H, K), "log_decay": (B, 6, H, K)}, r"log_decay.*k being \[B, T, S, H, K\]"),
    ({"indices": (B, 6, 2)}, "indices has dtype float32; it must be integer"),
    ({"indices": jnp.zeros((B, 6), int)}, r"indices has shape \(2, 6\)"),
    ({"indices": jnp.full((B, 6, 2), 4)}, r"indices\[0, 0, 0\]=4 is out of range.*from 0 to 3"),
    ({"indices": jnp.zeros((B, 6, 2), int)}, r"indices\[0, 0\]=\[0, 0\] repeats 0"),
    ({"num_partitions": 1}, "select S=2 partitions per token, but num_partitions=1"),
    ({"num_partitions": 2.0}, "num_partitions=2.0 must be an integer"),
    ({"initial_state": ops.SparseState(jnp.zeros((B, 3, H, K, V)))}, r"initial_state.kv has shape"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
    ({"scale": jnp.ones(())}, "scale=.* must be a Python number"),
    ({"method": "sort"}, "method='sort' is unknown; use one of 'mask', 'varlen', 'gather'"),
    ({"beta": (B, 6, 3)}, r"beta has shape \(2, 6, 3\), but \[2, 6, 2\] or \[2, 6, 2, 2\]"),
    ({"beta": (B, 6, H), "log_decay": (B, 6, H, K)}, "one log_decay per head, not .* 3 key"),
  ],
)  # fmt: skip
def test_sparse_state_attention_bad_argument_raises_naming_it(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, H, K), "v": (B, 6, H, V), "gates": (B, 6, 2)}
  arguments |= {"indices": jnp.broadcast_to(jnp.arange(2), (B, 6, 2)), "num_partitions": 4} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    ops.sparse_state_attention(**arguments)
