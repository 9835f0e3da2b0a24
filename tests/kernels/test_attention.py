"""Kernels of softmax attention: ranges, tiles, documents, transformations, lowering, support.

(Values and gradients: `KERNEL_CASES` in lnssm_jax/ops/attention/cases.py.)
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from lnssm_jax import ops
from lnssm_jax.ops.attention import pallas
from lnssm_jax.ops.attention.types import Inputs, Mask, Options, Tokens
from lnssm_jax.ops.core.segments import positions, segments_of
from pallas_kernels.attention.config import ROWS, TILE, ForwardConfig, LoopConfig, Shape, default
from pallas_kernels.attention.decode import decode
from pallas_kernels.attention.softmax import steps_of
from pallas_kernels.attention.types import Logits
from tests.kernels.interpreted import assert_transformations
from tests.kernels.lowered import (
  DATA,
  REPLICATED,
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
  total,
)
from tests.ops import contract
from tests.ops.cases.attention import ATTENTION, KERNEL_CASES, Case

BF16 = jnp.dtype(jnp.bfloat16)
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
attend = functools.partial(ops.attention, implementation="pallas_interpret")


def drawn(T, *, H=1, G=1, K=64, V=64, B=1, seed=0):
  rng = np.random.default_rng(seed)
  sizes = ((H, K), (G, K), (G, V))
  return [jnp.asarray(rng.normal(size=(B, T, *size)), BF16) for size in sizes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [{}, {"window": 5}, {"window": 99}, {"block": 4}, {"block": 99}])
def test_key_ranges_equal_the_mask_of_the_reference(size, causal):
  """Both ways: the keys that a query sees, and the queries that see a key."""
  T = 30
  mask = Mask(**{"window": None, "block": None, "causal": causal} | size)
  for ids in (None, jnp.asarray([np.arange(T) // 7, np.r_[np.zeros(29), 1], np.arange(T)], int)):
    segments = segments_of("attention", ids, 3, T)
    ranges = pallas.key_ranges(mask, segments, 3, T)
    document = jnp.zeros((3, T), jnp.int32) if segments is None else segments.index
    tokens = Tokens(positions(segments, 3, T), document)
    want = np.asarray(mask.visible(tokens, tokens))
    other = np.arange(T)
    for bounds, seen in ((ranges.seen, want), (ranges.seen_by, want.swapaxes(1, 2))):
      pairs = zip(bounds, (other, other + 1), strict=True)  # None: by the token itself
      first, end = (np.broadcast_to(own if x is None else x, (3, T))[..., None] for x, own in pairs)
      np.testing.assert_array_equal((first <= other) & (other < end), seen)
      assert (np.diff(first, axis=1) >= 0).all() and (np.diff(end, axis=1) >= 0).all()


def test_tiles_that_no_query_sees_are_left_out():
  """Documents of 64 tokens: each tile of 128 queries needs two of 64 keys, all of them masked; of
  one document a tile in the middle needs no mask below the diagonal."""
  T, tile = 1024, 64
  mask = Mask(None, None, causal=True)
  steps = lambda ids, start: jax.tree.map(
    int,
    steps_of(
      pallas.key_ranges(mask, segments_of("attention", ids, 1, T), 1, T).seen, 0, start, TILE, tile
    ),
  )
  for start in range(0, T, TILE):
    found = steps(jnp.arange(T)[None] // 64, start)
    assert (found.begin, found.end) == (start // tile, start // tile + TILE // tile)
  begin, end, inside, outside = steps(None, 512)
  assert (begin, end) == (0, (512 + TILE) // tile)
  assert inside == 0 and outside == 512 // tile
  assert ROWS * 2 == TILE


@pytest.mark.slow
def test_documents_of_one_token_return_their_values():
  """A query that sees its own key alone: queries and keys get no gradient."""
  q, k, v = drawn(300)
  ids = jnp.arange(300)[None]
  run = lambda *x: attend(*x, segment_ids=ids)[0]
  out, pull = jax.vjp(run, q, k, v)
  np.testing.assert_array_equal(out, v)
  cotangent = jnp.asarray(np.random.default_rng(1).normal(size=out.shape), BF16)
  d_q, d_k, d_v = pull(cotangent)
  np.testing.assert_array_equal(d_v, cotangent)
  scale = float(jnp.abs(cotangent.astype(jnp.float32)).max())
  for gradient in (d_q, d_k):  # a difference of two sums of 64 products
    assert float(jnp.abs(gradient.astype(jnp.float32)).max()) < 1e-5 * scale * 64


def test_other_documents_do_not_matter():
  """Bit for bit, also where a document ends inside a tile; they may hold anything."""
  ids = jnp.asarray([[0] * 70 + [1] * 130])
  arrays, others = drawn(200), drawn(200, seed=1)
  mixed = [jnp.concatenate([o[:, :70], a[:, 70:]], 1) for o, a in zip(others, arrays, strict=True)]
  run = jax.jit(lambda *x: attend(*x, segment_ids=ids)[0][:, 70:])
  np.testing.assert_array_equal(run(*arrays), run(*mixed))


@pytest.mark.slow
def test_packed_documents_equal_separate_calls():
  lengths = [1, 1, 2, 126, 128, 3]
  arrays = drawn(sum(lengths), H=2)
  ids = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))[None]
  whole = attend(*arrays, segment_ids=ids)[0].astype(jnp.float32)
  start = 0
  for length in lengths:
    part = [x[:, start : start + length] for x in arrays]
    apart = attend(*part)[0].astype(jnp.float32)
    np.testing.assert_allclose(whole[:, start : start + length], apart, rtol=0.02, atol=0.01)
    start += length


@pytest.mark.parametrize(
  "size",
  [{"window": 9}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({}, {"causal": False}))],
)
def test_dropped_weights_are_those_of_the_reference(size):
  """Each one, by values that tell the weights apart; and with gradients, which use the masks."""
  T, H = 64, 4
  q, k, _ = drawn(T, H=H, G=2)
  v = jnp.repeat(jnp.eye(T, dtype=BF16)[None, :, None], 2, axis=2)
  how = {"dropout": 0.3, "dropout_key": jax.random.key(7)} | size
  how["segment_ids"] = jnp.asarray([[0] * 23 + [1] * 41])

  @functools.partial(jax.jit, static_argnums=0)
  def both(form, *arrays):
    run = lambda *x: ops.attention(*x, implementation=form, **how)[0].astype(jnp.float32)
    out, pull = jax.vjp(run, *arrays)
    gradients = pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape))
    return out, [x.astype(jnp.float32) for x in gradients]

  forms = "pallas_interpret", "reference"
  (got, gradients), (want, of_reference) = (both(form, q, k, v) for form in forms)
  np.testing.assert_array_equal(got == 0, want == 0)
  np.testing.assert_allclose(got, want, atol=0.01)
  for a, b in zip(gradients, of_reference, strict=True):
    np.testing.assert_allclose(a, b, atol=0.03)


@pytest.mark.parametrize("scale", [-0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_scales_that_are_not_positive_equal_the_reference(scale):
  arrays = drawn(40, K=32, V=32)
  both = lambda form: jax.vjp(
    lambda *x: ops.attention(*x, scale=scale, implementation=form)[0].astype(jnp.float32), *arrays
  )
  (got, pull), (want, pull_want) = both("pallas_interpret"), both("reference")
  np.testing.assert_allclose(got, want, atol=0.02)
  for a, b in zip(pull(got), pull_want(got), strict=True):
    np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    *KERNEL_CASES,
    Case(T=200, K=64, V=64, block=48, segments=True, chunk=None),
    Case(T=300, K=200, V=256, heads=(2, 2), window=200, chunk=None),
    Case(T=257, K=64, V=128, causal=False, window=99, chunk=None),
    Case(T=129, K=128, V=128, heads=(6, 2), strength="extreme", chunk=None),
  ],
  ids=str,
)
def test_attention_kernels_match_reference(case):
  contract.assert_case(ATTENTION, replace(case, chunk=None), BF16, "pallas_interpret")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["pallas_interpret", "pallas_ampere_interpret"])
def test_soft_cap_in_kernels_matches_reference(implementation):
  arrays = drawn(150, H=2, G=1)
  run = lambda form, *x: ops.attention(*x, soft_cap=0.8, window=70, implementation=form)[0]
  out, pull = jax.vjp(functools.partial(run, implementation), *arrays)
  with jax.enable_x64(True):
    exact = [x.astype(jnp.float64) for x in arrays]
    want, pull_want = jax.vjp(functools.partial(run, "reference"), *exact)
    gradients = pull_want(out.astype(jnp.float64))
  for got, wanted in zip((out, *pull(out)), (want, *gradients), strict=True):
    wanted = np.asarray(wanted)
    error = np.linalg.norm(np.asarray(got.astype(jnp.float32)) - wanted) / np.linalg.norm(wanted)
    assert error < contract.tolerance("bfloat16", 150)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1, 40])
def test_attention_kernels_transform_as_plain_calls(T):
  case = Case(T=T, K=32, V=32, heads=(2, 1), window=50, cached=(70, 20), chunk=None)
  assert_transformations(ATTENTION, case, BF16)


def arguments(T=1000, H=4, G=2, K=128, V=128, segments=True):
  array = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct((2, T, *shape), dtype)
  return array(H, K), array(G, K), array(G, V), array(dtype=jnp.int32) if segments else None


def run(q, k, v, ids, mask=Mask(None, None, True), soft_cap=None, **how):  # noqa: B008
  segments = None if ids is None else segments_of("attention", ids, *q.shape[:2])
  options = Options(mask, 0.1, None, soft_cap)
  return pallas.run(Inputs(q, k, v, None, segments), options, **how)


AMPERE = {"architecture": "ampere"}


@pytest.mark.parametrize(
  ("K", "V", "count", "how"),
  [(64, 64, 3, {}), (128, 128, 3, {}), (192, 128, 4, {}), (256, 256, 4, {}), (128, 64, 3, AMPERE)],
)
def test_attention_kernels_lower(K, V, count, how):
  """Outputs, gradients of queries, gradients of keys and values together or apart."""
  shapes, call = arguments(K=K, V=V), functools.partial(run, **how)
  names = kernels_traced(jax.grad(lambda *x: total(call(*x)), argnums=(0, 1, 2)), *shapes)
  assert len(names) == count
  assert kernels_in(call, *shapes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("V", [64, 128])
def test_kernels_for_ampere_lower(K, V):
  call = functools.partial(run, soft_cap=30.0, **AMPERE)
  shapes = arguments(K=K, V=V)
  assert kernels_in(jax.grad(lambda *x: total(call(*x)), argnums=(0, 1, 2)), *shapes) == 3


@pytest.mark.slow
@pytest.mark.parametrize("mask", [(None, None, True), (300, None, False), (None, 100, True)])
@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("K", [40, 128, 192, 256])
def test_every_configuration_of_attention_lowers(K, V, mask):
  call = functools.partial(run, mask=Mask(*mask), soft_cap=None if K == 40 else 30.0)
  shapes = arguments(K=K, V=V, segments=V != 64)
  assert kernels_in(jax.grad(lambda *x: total(call(*x)), argnums=(0, 1, 2)), *shapes) >= 3


@pytest.mark.parametrize(
  ("K", "V", "H", "G", "room", "dtype"),
  [
    pytest.param(64, 64, 16, 16, 1023, BF16, marks=pytest.mark.slow),
    pytest.param(128, 128, 32, 8, 4095, BF16, marks=pytest.mark.slow),
    (192, 128, 16, 16, 33, BF16),
    (256, 32, 16, 1, 100, jnp.float32),
  ],
)
def test_attention_decode_lowers(K, V, H, G, room, dtype):
  of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((2, *shape), dtype)
  state = ops.AttentionState(of(room, G, K), of(room, G, V), of(dtype=jnp.int32))
  options = Options(Mask(room + 1, None, True), 0.1, None, 30.0 if H == 16 else None)
  run = lambda q, k, v, state: pallas.run(Inputs(q, k, v, state, None), options)
  arrays = of(1, H, K), of(1, G, K), of(1, G, V), state
  assert kernels_in(run, *arrays) == 1
  of_queries = jax.grad(lambda q, *rest: total(run(q, *rest)))  # by XLA's form
  assert kernels_traced(of_queries, *arrays) == ["attention_decode"]


@pytest.mark.parametrize(
  ("number", "H", "G", "K", "V", "channels"),
  [
    pytest.param(1, 4, 2, 32, 64, 2304, marks=pytest.mark.slow),
    (1, 4, 2, 32, 64, 96),  # each of the four heads has a CTA
    (3, 6, 1, 256, 224, 2304),
  ],
)
def test_attention_decode_in_splits_equals_the_softmax(number, H, G, K, V, channels, monkeypatch):
  """Rows whose cache is empty, shorter than its splits, and full; logits beyond exp's range; heads
  that share a cache in one CTA and in two."""
  monkeypatch.setattr("pallas_kernels.attention.decode._CHANNELS", channels)
  rng = np.random.default_rng(0)
  B, M = 4, 101
  shapes = (B, H, K), (B, G, K), (B, G, V), (B, M, G, K), (B, M, G, V)
  arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
  held = np.asarray([0, 2, 70, 101])
  how = {"logits": Logits(-9.0), "num_splits": number, "interpret": INTERPRET}
  got = decode(*arrays, jnp.asarray(held), **how)
  q, k, v, cache_k, cache_v = (np.asarray(x, np.float64) for x in arrays)
  keys = np.repeat(np.concatenate([cache_k, k[:, None]], 1), H // G, 2)
  values = np.repeat(np.concatenate([cache_v, v[:, None]], 1), H // G, 2)
  x = -9.0 * np.einsum("bhk,bshk->bhs", q, keys)
  hidden = (np.arange(M + 1) >= held[:, None]) & (np.arange(M + 1) < M)
  x = np.where(hidden[:, None], -np.inf, x)
  weights = np.exp(x - x.max(-1, keepdims=True))
  want = np.einsum("bhs,bshv->bhv", weights / weights.sum(-1, keepdims=True), values)
  assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)


def test_attention_kernels_lower_under_shard_map():
  q, k, v, _ = arguments(T=100)
  assert_shard_map_keeps_shapes(
    jax.grad(lambda x: total(run(*x))), (q, k, v, None), (DATA, DATA, DATA, REPLICATED)
  )


def test_attention_on_a_sharded_sequence_runs_in_kernels(hopper):
  """The keys and values of earlier shards are a cache."""
  mesh = AbstractMesh((2,), ("sequence",), axis_types=(AxisType.Auto,))
  over = PartitionSpec(None, "sequence")

  def loss(q, k, v, ids):
    out, _ = ops.attention(q, k, v, window=300, segment_ids=ids, axis_name="sequence")
    return jax.lax.psum(total(out), "sequence")

  gradient = jax.grad(loss, argnums=(0, 1, 2))
  sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(over,) * 4, out_specs=(over,) * 3)
  assert len(kernels_traced(sharded, *arguments(T=1024))) == 3


@pytest.mark.parametrize("T", [1, 64])
def test_attention_with_one_key_head_runs_in_kernels_where_queries_are_sharded(
  T, hopper, monkeypatch
):
  """Each device has some heads of queries and all of the cache."""
  monkeypatch.setattr(jax, "device_count", lambda: 4)
  mesh = AbstractMesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  of = lambda *shape, dtype=BF16: jax.ShapeDtypeStruct((4, *shape), dtype)
  state = ops.AttentionState(of(99, 1, 64), of(99, 1, 64), of(dtype=jnp.int32))
  run = lambda q, k, v, state: ops.attention(q, k, v, window=100, initial_state=state)
  with jax.sharding.use_abstract_mesh(mesh):
    (name,) = kernels_traced(run, of(T, 4, 64), of(T, 1, 64), of(T, 1, 64), state)
  assert name == ("attention_decode" if T == 1 else "attention_outputs")


def test_attention_prefers_kernels_where_documents_are(hopper):
  """cuDNN, which has no documents, is not on this CPU; XLA's form takes what kernels cannot."""
  q, k, v, ids = (None if x is None else jnp.zeros(x.shape, x.dtype) for x in arguments(T=3, K=64))
  supported = functools.partial(ops.supported, "attention")
  assert supported(q, k, v, segment_ids=ids)[0] == "pallas"
  assert supported(q, k, v, window=2, soft_cap=3.0)[0] == "pallas"
  key = jax.random.key(0)
  assert supported(q, k, v, dropout=0.5, dropout_key=key)[0] == "pallas"
  for reason, change in {
    "chunk_size=8, and the kernels' tiles": {"chunk_size": 8},
    "q has dtype float32": {"q": q.astype(jnp.float32), "k": k.astype(jnp.float32)},
    "q is 264 wide, and at most 256": {"q": jnp.zeros((2, 3, 4, 264), BF16),
                                      "k": jnp.zeros((2, 3, 2, 264), BF16)},
  }.items():  # fmt: skip
    options = {"q": q, "k": k, "v": v} | change
    assert "pallas" not in supported(**options)
    with pytest.raises(NotImplementedError, match=reason):
      ops.attention(**options, implementation="pallas")
  with pytest.raises(NotImplementedError, match=r"dropout=0\.5, and only Hopper's kernels drop"):
    ops.attention(q, k, v, dropout=0.5, dropout_key=key, implementation="pallas_ampere_interpret")
  wide = (jnp.zeros((2, 3, n, 192), BF16) for n in (4, 2))
  with pytest.raises(NotImplementedError, match="q is 192 wide, and at most 128 is supported by"):
    ops.attention(*wide, v, implementation="pallas_ampere_interpret")
  assert supported(*(x[..., :16] for x in (q, k, v)))[0] == "chunked"  # padded fourfold
  one = [x[:, :1] for x in (q, k, v)]
  assert supported(*one)[0] == "chunked"
  cache = functools.partial(
    ops.attention.init_state, batch=2, kv_heads=2, key_dim=64, value_dim=128
  )
  for size, chosen in (({"window": 33}, "pallas"), ({"window": 9}, "chunked"), ({}, "chunked"),
                       ({"block": 99}, "chunked")):  # fmt: skip
    assert supported(*one, **size, initial_state=cache(**size, dtype=BF16))[0] == chosen
    assert supported(q, k, v, **size, initial_state=cache(**size, dtype=BF16))[0] == "pallas"
  exact = [x.astype(jnp.float32) for x in one]
  assert supported(*exact, window=33, initial_state=cache(window=33))[0] == "pallas"


def test_attention_config_rejects_tiles_that_tensor_cores_do_not_have():
  with pytest.raises(ValueError, match="tile=32 must be 64 or 128"):
    LoopConfig(tile=32)
  with pytest.raises(ValueError, match="num_stages=0 must be at least 1"):
    LoopConfig(tile=64, num_stages=0)
  with pytest.raises(ValueError, match="query_tiles=0 must be at least 1"):
    ForwardConfig(tile=64, query_tiles=0)
  assert default(Shape(256, 64, 1)).separate_keys and not default(Shape(128, 128, 1)).separate_keys


def forward_with(**changes):
  """The default configuration with other fields of the kernel for outputs."""
  config = default(Shape(64, 64, 1))
  return replace(config, forward=replace(config.forward, **changes))


@pytest.mark.parametrize("tiles", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_attention_with_several_tiles_of_queries_per_cta_is_the_same(tiles):
  """Bit for bit, where the last CTA has fewer; one document fills more than a tile of keys."""
  arrays = drawn(380)
  ids = jnp.asarray(np.repeat(np.arange(4), [20, 200, 1, 159]))[None]
  segments = segments_of("attention", ids, 1, 380)
  inputs, options = Inputs(*arrays, None, segments), Options(Mask(None, None, True), 0.1, None)
  call = lambda sizes: pallas.run(inputs, options, sizes=sizes, interpret=INTERPRET)[0]
  several = call(forward_with(query_tiles=tiles, num_stages=2))
  np.testing.assert_array_equal(several, call(forward_with(num_stages=4)))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("K", "V", "tiles"), [(64, 64, 3), (128, 128, 2), (128, 128, 3), (64, 128, 2), (192, 128, 2)]
)
def test_attention_with_several_tiles_of_queries_per_cta_lowers(K, V, tiles):
  call = functools.partial(run, sizes=forward_with(query_tiles=tiles, num_stages=1))
  assert kernels_in(call, *arguments(K=K, V=V)) == 1


def test_attention_takes_several_tiles_of_queries_per_cta_where_all_sms_have_work():
  few, many = (default(Shape(128, 128, tiles)).forward.query_tiles for tiles in (1000, 2000))
  assert (few, many) == (1, 2)
