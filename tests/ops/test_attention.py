"""Tests particular to attention; the contract suite covers the rest."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.attention import cudnn
from lnssm_jax.ops.attention.api import attention
from lnssm_jax.ops.attention.types import AttentionState, Inputs, Mask, Options
from lnssm_jax.ops.core.segments import positions, segments_of
from tests.ops.promises import close, in_float64

B, H, G, K, V = 2, 4, 2, 4, 6
KINDS = [{}, {"window": 5}, {"block": 6}]
KIND_NAMES = ["full", "window", "block"]


def inputs(T, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  shapes = ((B, T, H, K), (B, T, G, K), (B, T, G, V))
  return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def empty_state(**sizes):
  return attention.init_state(**{"batch": B, "kv_heads": G, "key_dim": K, "value_dim": V} | sizes)


@functools.partial(
  jax.jit, static_argnames=("window", "block", "causal", "scale", "implementation", "chunk_size")
)
def attend(q, k, v, chunk_size=8, **kwargs):
  return attention(q, k, v, chunk_size=chunk_size, **kwargs)


def test_soft_cap_equals_the_formula_with_its_gradients():
  """In float64, with a cap that bends most scores; the chunked form has its own derivative."""
  arrays, cap = inputs(20), 0.8

  def loss(q, k, v, **options):
    return jnp.sum(jnp.sin(attention(q, k, v, window=7, soft_cap=cap, **options)[0]))

  def plain(q, k, v):
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    scores = cap * jnp.tanh(jnp.einsum("bthk,bshk->bhts", q, k) * K**-0.5 / cap)
    lag = jnp.arange(20)[:, None] - jnp.arange(20)
    weights = jax.nn.softmax(jnp.where((lag >= 0) & (lag < 7), scores, -jnp.inf), axis=-1)
    return jnp.sum(jnp.sin(jnp.einsum("bhts,bshv->bthv", weights, v)))

  want = in_float64(jax.jit(jax.value_and_grad(plain, (0, 1, 2))), *arrays)
  for form in ({"implementation": "reference"}, {"implementation": "chunked", "chunk_size": 8}):
    run = functools.partial(loss, **form)
    got = in_float64(jax.jit(jax.value_and_grad(run, (0, 1, 2))), *arrays)
    chex.assert_trees_all_close(got, want, rtol=1e-12, atol=1e-13)


def test_soft_cap_never_runs_in_cudnn():
  q, k, v = inputs(8, dtype=jnp.bfloat16)
  with pytest.raises(NotImplementedError, match=r"soft_cap=2\.0: cuDNN's kernel has no cap"):
    attention(q, k, v, soft_cap=2.0, implementation="cudnn")
  with pytest.raises(ValueError, match="soft_cap=0 must be None or a positive"):
    attention(q, k, v, soft_cap=0)
  with pytest.raises(ValueError, match="soft_cap=inf must be None or a positive, finite"):
    attention(q, k, v, soft_cap=float("inf"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_attention_every_mask_equals_the_formula(kind, causal):
  """One query at a time over a list of the tokens that it sees, in numpy float64."""
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


def test_attention_with_blocks_equals_separate_calls_per_block():
  """The diagonal part of LLN attention: blocks of the head's width and a remainder."""
  arrays = inputs(4 * K + 3)
  for causal in (True, False):
    apart = [
      attend(*(x[:, i : i + K] for x in arrays), causal=causal)[0] for i in range(0, 4 * K + 3, K)
    ]
    close(attend(*arrays, block=K, causal=causal)[0], jnp.concatenate(apart, 1))


def test_attention_window_of_the_greatest_length_decodes_like_full_attention():
  """Token by token inside `lax.scan`: the cache keeps its size."""
  T, room = 20, 32
  arrays = inputs(T)
  state = empty_state(window=room)

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
def test_attention_split_sequence_equals_one_call(kind, cuts):
  """With rows that differ: the first has documents of 7 tokens, the second is one document."""
  arrays = inputs(20)
  segments = jnp.asarray(np.stack([np.arange(20) // 7, np.zeros(20)]), jnp.int32)
  whole, last = attend(*arrays, segment_ids=segments, **kind)
  state, outs = None, []
  empty = empty_state(**kind)
  for start, end in zip([0, *cuts], [*cuts, 20], strict=True):
    if start and start % 7 == 0:
      # A document ends with the call: its row continues with an empty cache.
      state = jax.tree.map(lambda x: x.at[0].set(0), state)
    piece = [x[:, start:end] for x in arrays]
    out, state = attend(*piece, initial_state=state, segment_ids=segments[:, start:end], **kind)
    outs.append(out)
    assert not kind or state.k.shape == empty.k.shape
  close(jnp.concatenate(outs, 1), whole)
  chex.assert_trees_all_equal((state.position, state.k[1]), (last.position, last.k[1]))
  if kind:
    chex.assert_trees_all_equal(state, last)


def test_attention_document_boundary_empties_the_cache():
  arrays = inputs(3)
  full = jax.tree.map(lambda x: x + 6, empty_state(window=9))
  segments = jnp.asarray([[0, 1, 1]] * B)
  _, state = attend(*arrays, window=9, initial_state=full, segment_ids=segments)
  _, fresh = attend(*(x[:, 1:] for x in arrays), window=9)
  chex.assert_trees_all_equal(state, fresh)


def test_attention_huge_scores_do_not_overflow():
  """Scores around 1e7: each query takes the value of its best key."""
  q, k, v = inputs(20)
  scores = np.einsum("bthk,bshk->bhts", q, np.repeat(k, 2, 2))
  best = np.where(np.tri(20, dtype=bool), scores, -np.inf).argmax(-1)
  want = np.take_along_axis(np.repeat(v, 2, 2), best.transpose(0, 2, 1)[..., None], 1)
  close(attend(1e7 * q, k, v)[0], want)
  gradients = jax.grad(lambda *x: jnp.sum(attend(*x)[0] ** 2), argnums=(0, 1, 2))(1e7 * q, k, v)
  assert all(jnp.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_attention_cache_has_the_dtype_of_its_inputs(dtype):
  q, k, v = inputs(5, dtype=dtype)
  out, state = attend(q, k, v)
  assert out.dtype == state.k.dtype == state.v.dtype == dtype
  np.testing.assert_array_equal(state.k, k)


@pytest.mark.parametrize("kind", [{}, {"window": 100}], ids=["full", "window"])
def test_chunked_attention_memory_is_linear_in_length(kind):
  """Forward and backward together: tiles of T x C, not T x T."""
  T, width, chunk = 4096, 16, 32
  shape = jax.ShapeDtypeStruct((1, T, 1, width), jnp.float32)
  loss = lambda *x: jnp.sum(
    attention(*x, implementation="chunked", chunk_size=chunk, **kind)[0] ** 2
  )
  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
  limit = (8 * chunk + 40 * width) * T * 4
  assert compiled.memory_analysis().temp_size_in_bytes < limit < T * T * 4 / 4


def test_supported_attention_on_cpu_lists_no_cudnn():
  q, k, v = inputs(3)
  assert ops.supported(attention, q, k, v, window=2) == ["chunked", "reference"]
  bfloat16 = [jnp.zeros((B, 3, 2, 8), jnp.bfloat16)] * 3
  with pytest.raises(NotImplementedError, match="the default device is a cpu, not an NVIDIA GPU"):
    attention(*bfloat16, implementation="cudnn")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({}, None),
    ({"window": 3}, None),
    ({"causal": False}, None),
    ({"segment_ids": jnp.zeros((B, 4), jnp.int32)}, "segment_ids: cuDNN"),
    (
      {"initial_state": empty_state(key_dim=8, value_dim=8, dtype=jnp.bfloat16)},
      "initial_state: cuDNN",
    ),
    ({"block": 2}, "block: cuDNN"),
    ({"window": 3, "causal": False}, "causal=False: cuDNN has windows"),
    ({"q": jnp.zeros((B, 4, 2, 8))}, "dtypes float32, bfloat16, bfloat16"),
    ({"v": jnp.zeros((B, 4, 2, 16), jnp.bfloat16)}, "k has width 8 and v 16"),
    ({n: jnp.zeros((B, 4, 2, 12), jnp.bfloat16) for n in "qkv"}, "multiple of 8"),
    ({n: jnp.zeros((B, 1, 2, 8), jnp.bfloat16) for n in "qkv"}, "T = 1"),
  ],
)
def test_cudnn_unsupported_argument_raises_naming_it(change, message, monkeypatch):
  monkeypatch.setattr(cudnn, "unsupported_device", lambda inputs: None)
  arguments = {n: jnp.zeros((B, 4, 2, 8), jnp.bfloat16) for n in "qkv"} | change
  assert ("cudnn" in ops.supported(attention, **arguments)) == (message is None)
  if message:
    with pytest.raises(NotImplementedError, match=message):
      attention(**arguments, implementation="cudnn")


@pytest.mark.parametrize("kind", [{}, {"window": 5}, {"causal": False}, {"scale": 0.3}], ids=str)
def test_cudnn_arguments_equal_the_reference(kind):
  """The arguments of `jax.nn`'s function, here run by its XLA form instead of cuDNN."""
  q, k, _ = inputs(12)
  mask = Mask(kind.get("window"), None, kind.get("causal", True))
  options = Options(mask, kind.get("scale", 0.5))
  out = cudnn.cudnn(Inputs(q, k, k, None, None), options, backend="xla")
  close(out, attend(q, k, k, implementation="reference", **kind)[0])


def test_positions_continue_with_the_state_and_restart_at_boundaries():
  segments = segments_of("test", jnp.asarray([[2, 2, 0, 0, 0, 2]]), 1, 6)
  np.testing.assert_array_equal(positions(segments, 1, 6, jnp.asarray([5])), [[5, 6, 0, 1, 2, 0]])
  np.testing.assert_array_equal(positions(None, 2, 3), [[0, 1, 2], [0, 1, 2]])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, G, K)}, "k has 5 tokens and q 6.*CrossAttention"),
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
      {"initial_state": empty_state(), "causal": False},
      "no meaning with causal",
    ),
    (
      {"initial_state": empty_state(window=4), "window": 5},
      r"initial_state.k has shape \(2, 3, 2, 4\).*\[2, 4, 2, 4\]",
    ),
    ({"initial_state": empty_state(value_dim=K)}, r"initial_state.v has shape"),
    ({"sinks": jnp.full(H, jnp.inf, jnp.bfloat16)}, r"sinks=\[.*\] must be finite logits"),
    (
      {"initial_state": empty_state()._replace(position=jnp.zeros(3))},
      r"initial_state.position has shape \(3,\)",
    ),
    (
      {"initial_state": empty_state(dtype=jnp.bfloat16)},
      "initial_state.k has dtype bfloat16, but k has float32.*dtype=k.dtype",
    ),
  ],
)
def test_attention_bad_argument_raises_naming_it(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, G, K), "v": (B, 6, G, V)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    attention(**arguments)


def test_attention_init_state_with_blocks_has_fixed_size():
  state = empty_state(batch=3, block=4, dtype=jnp.bfloat16)
  assert [x.shape for x in state] == [(3, 3, G, K), (3, 3, G, V), (3,)]
  assert isinstance(state, AttentionState)
