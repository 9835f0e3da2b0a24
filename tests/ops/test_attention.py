"""attention: what is particular to it, beside the tests that all scans share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.attention import fused
from lnssm_jax.ops.attention.api import attention
from lnssm_jax.ops.attention.state import (
  AttentionState,
  Rule,
  attention_positions,
  init_attention_state,
)
from tests.ops.promises import close

B, H, G, K, V = 2, 4, 2, 4, 6
KINDS = [{}, {"window": 5}, {"block": 6}]
KIND_NAMES = ["full", "window", "block"]


def inputs(T, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  shapes = ((B, T, H, K), (B, T, G, K), (B, T, G, V))
  return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@functools.partial(
  jax.jit, static_argnames=("window", "block", "causal", "scale", "implementation", "chunk_size")
)
def attend(q, k, v, chunk_size=8, **kwargs):
  return attention(q, k, v, chunk_size=chunk_size, **kwargs)


def in_float64(fn, *arrays):
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, fn(*(jnp.asarray(np.asarray(x, np.float64)) for x in arrays)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_equals_the_formula(kind, causal):
  """One query at a time over a list of the steps that it sees, in numpy float64."""
  T = 20
  q, k, v = (np.asarray(x, np.float64) for x in inputs(T))
  want = np.zeros((B, T, H, V))
  for b, t, h in np.ndindex(B, T, H):
    first, last = 0, T - 1
    if "window" in kind:
      first, last = t - 4, t + 4
    if "block" in kind:
      first = 6 * (t // 6)
      last = first + 5
    seen = range(max(first, 0), (t if causal else min(last, T - 1)) + 1)
    scores = np.array([q[b, t, h] @ k[b, j, h // 2] for j in seen]) / 2
    weights = np.exp(scores) / np.exp(scores).sum()
    want[b, t, h] = sum(w * v[b, j, h // 2] for w, j in zip(weights, seen, strict=True))
  out, state = attend(*inputs(T), causal=causal, **kind)
  close(out, want)
  assert (state is None) == (not causal)
  exact = in_float64(
    lambda *x: attend(*x, causal=causal, implementation="reference", **kind)[0], *inputs(T)
  )
  close(exact, want, np.float64)


def test_block_diagonal_is_attention_in_every_block_alone():
  """The diagonal part of LLN attention: blocks of the head's width and a remainder."""
  arrays = inputs(4 * K + 3)
  for causal in (True, False):
    apart = [
      attend(*(x[:, i : i + K] for x in arrays), causal=causal)[0] for i in range(0, 4 * K + 3, K)
    ]
    close(attend(*arrays, block=K, causal=causal)[0], jnp.concatenate(apart, 1))


def test_a_window_of_the_greatest_length_is_a_fixed_cache_for_full_attention():
  """One step at a time inside `lax.scan`: the cache keeps its size."""
  T, room = 20, 32
  arrays = inputs(T)
  state = init_attention_state(B, G, K, V, window=room)

  def step(state, x):
    out, state = attention(*(a[:, None] for a in x), window=room, initial_state=state)
    return state, out[:, 0]

  by_time = tuple(jnp.moveaxis(x, 1, 0) for x in arrays)
  state, out = jax.jit(lambda s, x: jax.lax.scan(step, s, x))(state, by_time)
  close(jnp.moveaxis(out, 0, 1), attend(*arrays)[0])
  np.testing.assert_array_equal(state.k[:, :T], arrays[1])
  np.testing.assert_array_equal(state.position, [T, T])


@pytest.mark.parametrize(
  ("kind", "cuts"),
  [
    (KINDS[0], [12, 13]),
    (KINDS[1], range(1, 20)),
  ],
  ids=["full", "window"],
)
def test_splitting_a_sequence_changes_nothing(kind, cuts):
  """With rows that differ: the first has documents of 7 steps, the second is one document."""
  arrays = inputs(20)
  segments = jnp.asarray(np.stack([np.arange(20) // 7, np.zeros(20)]), jnp.int32)
  whole, last = attend(*arrays, segment_ids=segments, **kind)
  state, outs = None, []
  empty = init_attention_state(B, G, K, V, **kind)
  for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
    if start and start % 7 == 0:
      # A document ends with the call: its row goes on with an empty cache.
      state = jax.tree.map(lambda x: x.at[0].set(0), state)
    piece = [x[:, start:end] for x in arrays]
    out, state = attend(*piece, initial_state=state, segment_ids=segments[:, start:end], **kind)
    outs.append(out)
    assert not kind or state.k.shape == empty.k.shape
  close(jnp.concatenate(outs, 1), whole)
  np.testing.assert_array_equal(state.position, last.position)
  np.testing.assert_array_equal(state.k[1], last.k[1])
  if kind:
    jax.tree.map(np.testing.assert_array_equal, state, last)


def test_a_new_document_empties_the_cache():
  arrays = inputs(3)
  full = jax.tree.map(lambda x: x + 6, init_attention_state(B, G, K, V, window=9))
  segments = jnp.asarray([[0, 1, 1]] * B)
  _, state = attend(*arrays, window=9, initial_state=full, segment_ids=segments)
  _, fresh = attend(*(x[:, 1:] for x in arrays), window=9)
  jax.tree.map(np.testing.assert_array_equal, state, fresh)


def test_scores_of_any_size():
  """Scores around 1e7: no overflow, and each query takes the value of its best key."""
  q, k, v = inputs(20)
  scores = np.einsum("bthk,bshk->bhts", q, np.repeat(k, 2, 2))
  best = np.where(np.tri(20, dtype=bool), scores, -np.inf).argmax(-1)
  want = np.take_along_axis(np.repeat(v, 2, 2), best.transpose(0, 2, 1)[..., None], 1)
  close(attend(1e7 * q, k, v)[0], want)
  gradients = jax.grad(lambda *x: jnp.sum(attend(*x)[0] ** 2), argnums=(0, 1, 2))(1e7 * q, k, v)
  assert all(jnp.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
  """The cache has the dtype of the keys and values, and so loses nothing."""
  q, k, v = inputs(5, dtype=dtype)
  out, state = attend(q, k, v)
  assert out.dtype == state.k.dtype == state.v.dtype == dtype
  np.testing.assert_array_equal(state.k, k)


@pytest.mark.parametrize("kind", [{}, {"window": 100}], ids=["full", "window"])
def test_scores_are_never_all_in_memory(kind):
  """Memory of forward and backward together is linear in T: tiles of T x C, not T x T."""
  T, width, chunk = 4096, 16, 32
  shape = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  loss = lambda *x: jnp.sum(
    attention(*x, implementation="chunked", chunk_size=chunk, **kind)[0] ** 2
  )
  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
  limit = (8 * chunk + 40 * width) * T * 4
  assert compiled.memory_analysis().temp_size_in_bytes < limit < T * T * 4 / 4


def test_supported_lists_what_can_run():
  q, k, v = inputs(3)
  assert ops.supported(attention, q, k, v, window=2) == ["chunked", "reference"]
  bfloat16 = [jnp.zeros((B, 3, 2, 8), jnp.bfloat16)] * 3
  with pytest.raises(NotImplementedError, match="the default device is a cpu, not an NVIDIA GPU"):
    attention(*bfloat16, implementation="fused")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({}, None),
    ({"window": 3}, None),
    ({"causal": False}, None),
    ({"segment_ids": jnp.zeros((B, 4), jnp.int32)}, "segment_ids: cuDNN"),
    ({"initial_state": init_attention_state(B, 2, 8, dtype=jnp.bfloat16)}, "initial_state: cuDNN"),
    ({"block": 2}, "block: cuDNN"),
    ({"window": 3, "causal": False}, "causal=False: cuDNN has windows"),
    ({"q": jnp.zeros((B, 4, 2, 8))}, "dtypes float32, bfloat16, bfloat16"),
    ({"v": jnp.zeros((B, 4, 2, 16), jnp.bfloat16)}, "k has width 8 and v 16"),
    ({n: jnp.zeros((B, 4, 2, 12), jnp.bfloat16) for n in "qkv"}, "multiple of 8"),
    ({n: jnp.zeros((B, 1, 2, 8), jnp.bfloat16) for n in "qkv"}, "T = 1"),
  ],
)
def test_the_fused_form_says_what_stands_in_its_way(change, message, monkeypatch):
  monkeypatch.setattr(fused, "_obstacle_of_device", lambda q: None)
  arguments = {n: jnp.zeros((B, 4, 2, 8), jnp.bfloat16) for n in "qkv"} | change
  assert ("fused" in ops.supported(attention, **arguments)) == (message is None)
  if message:
    with pytest.raises(NotImplementedError, match=message):
      attention(**arguments, implementation="fused")


@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"causal": False}, {"scale": 0.3}], ids=str)
def test_the_fused_form_means_the_same(kind):
  """What is passed to the platform's function, here run by its XLA form instead of cuDNN."""
  q, k, _ = inputs(12)
  rule = Rule(kind.get("window"), None, kind.get("causal", True))
  out = fused.fused(
    q, k, k, None, None, rule=rule, scale=kind.get("scale", 0.5), segmented=False,
    backend="xla",
  )  # fmt: skip
  close(out, attend(q, k, k, implementation="reference", **kind)[0])


def test_positions_count_in_segments_and_go_on_with_the_state():
  state = init_attention_state(1, G, K)._replace(position=jnp.asarray([5]))
  segments = jnp.asarray([[2, 2, 0, 0, 0, 2]])
  got = attention_positions(1, 6, segment_ids=segments, initial_state=state)
  np.testing.assert_array_equal(got, [[5, 6, 0, 1, 2, 0]])
  np.testing.assert_array_equal(attention_positions(2, 3), [[0, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, G, K)}, r"k has shape \(2, 5, 2, 4\).*\[2, 6, any, 4\]"),
    ({"v": (B, 6, 3, V)}, r"v has shape \(2, 6, 3, 6\)"),
    ({"q": (B, 6, K)}, r"q has shape \(2, 6, 4\).*\[B, T, H, K\]"),
    ({"q": (B, 0, H, K), "k": (B, 0, G, K), "v": (B, 0, G, V)}, "T >= 1"),
    ({"k": (B, 6, 3, K), "v": (B, 6, 3, V)}, "q has 4 heads and k 3"),
    ({"q": jnp.zeros((B, 6, H, K), jnp.int32)}, "q has dtype int32"),
    ({"window": 0}, "window=0 must be None or a Python integer, at least 1"),
    ({"block": 2.0}, "block=2.0 must be None"),
    ({"window": 2, "block": 2}, "window=2 and block=2 exclude each other"),
    ({"causal": None}, "causal=None must be True or False"),
    ({"scale": jnp.ones(())}, "scale=.* must be a Python number"),
    ({"chunk_size": 0}, "chunk_size=0 must be None"),
    (
      {"initial_state": init_attention_state(B, G, K, V), "causal": False},
      "no meaning with causal",
    ),
    (
      {"initial_state": init_attention_state(B, G, K, V, window=4), "window": 5},
      r"initial_state.k has shape \(2, 3, 2, 4\).*\[2, 4, 2, 4\]",
    ),
    ({"initial_state": init_attention_state(B, G, K)}, r"initial_state.v has shape"),
    (
      {"initial_state": init_attention_state(B, G, K, V)._replace(position=jnp.zeros(3))},
      r"initial_state.position has shape \(3,\)",
    ),
    (
      {"initial_state": init_attention_state(B, G, K, V, dtype=jnp.bfloat16)},
      "initial_state.k has dtype bfloat16, but k has float32.*dtype=k.dtype",
    ),
    ({"segment_ids": jnp.zeros((B, 5), jnp.int32)}, r"segment_ids has shape \(2, 5\)"),
    ({"implementation": "flash"}, "'flash' is unknown; use one of 'fused', 'chunked'"),
  ],
)
def test_bad_arguments_are_named(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, G, K), "v": (B, 6, G, V)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    attention(**arguments)


def test_a_state_is_a_small_named_tuple():
  state = init_attention_state(3, G, K, V, block=4, dtype=jnp.bfloat16)
  assert [x.shape for x in state] == [(3, 3, G, K), (3, 3, G, V), (3,)]
  assert isinstance(state, AttentionState)
