"""The kernels of linear attention, interpreted: promises besides values, which the contract holds.

(Values and gradients: `KERNELS` in lnssm_jax/ops/linear_attention/cases.py.)
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.cases import B
from pallas_kernels.core.wgmma import COMPILER_PARAMS, TILE_WIDTH, Backend
from pallas_kernels.linear_attention import config
from pallas_kernels.linear_attention.ampere import passes
from pallas_kernels.linear_attention.ampere.states import StateInputs
from pallas_kernels.linear_attention.config import CHUNK
from pallas_kernels.linear_attention.sm90 import intra_chunk
from pallas_kernels.linear_attention.types import Options
from tests.kernels.interpreted import (
  MASKED_LATER,
  assert_promises,
  assert_transformations,
  call_of,
  inputs_of,
)
from tests.ops import contract
from tests.ops.cases.linear_attention import LINEAR_ATTENTION, PARTS, Case

pytestmark = MASKED_LATER
SMALL = Case(K=16, V=24, H=1, chunk=None, state=False)


BF16 = jnp.dtype(jnp.bfloat16)


AMPERE = "pallas_ampere_interpret"


def check(case, inputs=None, implementation="pallas_interpret"):
  contract.assert_case(LINEAR_ATTENTION, case, BF16, implementation, inputs)


def test_the_interpreter_looks_for_races_and_for_memory_that_nothing_wrote():
  params = dispatch.interpreter()
  assert params.detect_races
  assert params.uninitialized_memory == "nan"


def test_a_race_would_be_found(no_races):
  def body(out):
    out[...] = jnp.full((128,), jax.lax.axis_index("thread"), jnp.int32)

  interpret = dispatch.interpreter()
  options = {"num_threads": 2, "thread_name": "thread", "interpret": interpret}
  kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32), **options)
  try:
    jax.block_until_ready(kernel())
  except jax.errors.JaxRuntimeError as error:  # JAX 0.12 raises
    assert "RACE DETECTED" in str(error)
  else:
    assert [run.races_found for run in no_races] == [True]
  no_races.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
  "case",
  [
    dataclasses.replace(SMALL, **options)
    for options in (
      {"decay": "BTHK", "bonus": True},
      {"decay": "BTH", "normalize": True},
      {"decay": "HK", "bonus": True, "normalize": True},
      {"decay": "H"},
    )
  ],
  ids=str,
)
@pytest.mark.parametrize("implementation", ["pallas_interpret", AMPERE])
def test_splitting_packing_and_causality(case, implementation):
  """Documents of one step, documents that end at a chunk boundary, cuts on all sides of it."""
  sizes = {"lengths": (1, 63, 1, 63), "pieces": (66, 62), "cuts": (1, 64, 65)}
  sizes |= {"infinite": False, "implementation": implementation}
  assert_promises(LINEAR_ATTENTION, case, BF16, **sizes)


@pytest.mark.parametrize(
  "implementation", ["pallas_interpret", pytest.param(AMPERE, marks=pytest.mark.slow)]
)
def test_outputs_of_a_document_have_the_same_bits_whatever_the_others_hold(implementation):
  """Also where a document's decays decide how scores are computed."""
  lengths = 20, 12
  case = dataclasses.replace(SMALL, T=sum(lengths), decay="BTHK")
  ids = jnp.repeat(jnp.asarray([[0, 1]] * B), jnp.asarray(lengths), axis=1, total_repeat_length=32)
  call = call_of(LINEAR_ATTENTION, case, implementation)
  run = jax.jit(lambda x: call(x, segment_ids=ids)[0])
  inputs, others = (inputs_of(LINEAR_ATTENTION, case, BF16, seed) for seed in range(2))
  others["log_decay"] = jnp.full_like(others["log_decay"], -9.0)
  first = jnp.arange(sum(lengths)) < lengths[0]
  for same in (first, ~first):
    of_document = same[:, None, None]
    changed = jax.tree.map(lambda x, y, at=of_document: jnp.where(at, x, y), inputs, others)
    np.testing.assert_array_equal(run(changed)[:, same], run(inputs)[:, same])
    assert not np.array_equal(run(changed)[:, ~same], run(inputs)[:, ~same])


@pytest.mark.slow
def test_second_block_of_channels_decays_by_its_own_factors():
  """Where queries read that block alone, and the first one would keep scores and state."""
  case = dataclasses.replace(SMALL, T=64, K=120, decay="BTHK", strength="uneven", state=True)
  inputs = LINEAR_ATTENTION.inputs(case)
  inputs["q"][..., :64] = 0
  inputs["log_decay"][..., 64:] /= 3
  given = jax.tree.map(jnp.asarray, inputs, contract.dtypes_of(LINEAR_ATTENTION, inputs, BF16))
  run = lambda form: jax.jit(lambda x: LINEAR_ATTENTION(case, x, implementation=form))
  out, state = run("pallas_interpret")(given)
  want, want_state = run("reference")(jax.tree.map(lambda x: x.astype(jnp.float32), given))
  assert contract.relative_error(out, want) < 2**-7
  kv, want_kv = (x.kv[:, :, 64:] for x in (state, want_state))
  assert contract.relative_error(kv, want_kv) < 2**-7


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["H", "BTHK"])
def test_every_transformation(decay):
  case = dataclasses.replace(SMALL, T=5, decay=decay, normalize=True, bonus=decay == "BTHK")
  assert_transformations(LINEAR_ATTENTION, case, BF16)


@pytest.mark.parametrize(
  "case",
  [
    *PARTS,
    pytest.param(
      Case(T=130, K=16, V=24, H=1, decay="HK", normalize=True, strength="weak"),
      marks=pytest.mark.slow,
    ),
    pytest.param(Case(T=200, K=16, V=24, H=1, decay="BTH"), marks=pytest.mark.slow),
    pytest.param(
      Case(T=130, K=16, V=24, H=1, decay="BTHK", bonus=True, segments=True), marks=pytest.mark.slow
    ),
  ],
  ids=str,
)
def test_a_sequence_in_splits(case, monkeypatch):
  """As long ones are cut: here two splits, the last with a chunk of padding; and a CTA
  has up to four chunks, here of the three that there are."""
  monkeypatch.setattr(config, "num_splits", lambda *sizes: 2)
  monkeypatch.setattr(config, "chunks_per_cta", lambda chunks: 4)
  check(dataclasses.replace(case, chunk=None))


def test_pairs_meet_at_the_start_or_where_blocks_merge():
  """Kernels for Ampere: at the start forward, at merges in the gradients, whose bound is lower."""
  case = dataclasses.replace(PARTS[2], T=40, strength="ordinary", segments=False, chunk=None)
  check(case, implementation=AMPERE)


@pytest.mark.slow
@pytest.mark.parametrize("bonus", [False, True])
@pytest.mark.parametrize("fastest", [0.5, 2.0, 4.2, 9.0, 20.9, 60.0])
def test_subchunks_for_ampere_are_as_long_as_the_fastest_channel_allows(fastest, bonus):
  case = {"T": 66 if bonus else 40, "normalize": bonus, "segments": bonus, "state": bonus}
  case = dataclasses.replace(SMALL, decay="HK", bonus=bonus, strength="ordinary", **case)
  inputs = LINEAR_ATTENTION.inputs(case)
  rates = np.geomspace(1e-3, fastest, case.K)
  inputs["log_decay"] = -np.broadcast_to(rates, inputs["log_decay"].shape)
  check(case, inputs, AMPERE)


def test_state_that_passes_chunks_has_a_constant_decay_s_gradient_for_ampere():
  """The fastest channel asks for subchunks of 16 tokens."""
  case = dataclasses.replace(SMALL, T=66, decay="HK", strength="weak", state=True)
  inputs = LINEAR_ATTENTION.inputs(case)
  inputs["log_decay"][..., 8:] = -np.geomspace(0.1, 9.0, 8)
  check(case, inputs, AMPERE)


@pytest.mark.slow
@pytest.mark.parametrize("case", PARTS, ids=str)
def test_a_sequence_in_splits_for_ampere(case, monkeypatch):
  monkeypatch.setattr(config, "num_splits", lambda *sizes: 2)
  check(dataclasses.replace(case, chunk=None), implementation=AMPERE)


@pytest.mark.parametrize("reverse", [False, True])
def test_splits_for_ampere_have_the_states_of_one(reverse):
  """The pass along the chunks alone: two splits of a chunk each, two blocks of values."""
  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  K, V, T = TILE_WIDTH, 2 * TILE_WIDTH, 2 * CHUNK
  a, b = (array(1, T, 1, width).astype(BF16) for width in (K, V))
  decay = jax.nn.sigmoid(array(1, 1, 2, K))
  inputs = StateInputs(a, b, None, decay, array(1, 1, K, V))

  def along(num_splits):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    options = Options(1.0, T, num_splits, False, config.AmpereConfig(), interpret)
    results = passes._along_chunks(inputs, options, 1, store_states=True, reverse=reverse)
    return results.states, results.last[:, :, 0 if reverse else -1]

  for got, want in zip(along(2), along(1), strict=True):
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_key_sums_for_ampere_are_those_of_a_loop(reverse):
  rng = np.random.default_rng(0)
  total, added = (rng.uniform(0.2, 1.0, (1, 2, 3, 4)).astype(np.float32) for _ in range(2))
  first = rng.normal(size=(1, 2, 4)).astype(np.float32)
  entering, last = jax.jit(passes._key_sums, static_argnames="reverse")(
    total, added, first, reverse=reverse
  )
  state = first
  for n in range(3)[:: -1 if reverse else 1]:
    np.testing.assert_allclose(entering[:, :, n], state, rtol=1e-5, atol=1e-6)
    state = total[:, :, n] * state + added[:, :, n]
  np.testing.assert_allclose(last, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "case",
  [
    Case(T=20, K=16, V=72, H=2, decay="BTH", normalize=True, strength="weak"),
    *(
      pytest.param(Case(K=K, V=72, decay=decay, **options), marks=pytest.mark.slow)
      for K, decay, options in [
        (16, "BTHK", {"T": 20, "H": 2, "strength": "weak", "segments": True}),
        (136, "HK", {"T": 65, "H": 2, "normalize": True}),
        (16, "BTH", {"T": 20, "H": 4, "shared": 2}),
        (16, "HK", {"T": 20, "H": 4, "readers": 2}),
      ]
    ),
  ],
  ids=str,
)
def test_more_columns_of_values_than_a_head_has_are_further_heads(case, monkeypatch):
  """Two groups of 64, which share queries, keys and decays; heads have up to 256."""
  monkeypatch.setattr(config, "VALUE_WIDTHS", (64,))
  check(dataclasses.replace(case, chunk=None))


def test_a_sequence_is_cut_only_where_ctas_are_few():
  """Value columns beyond 128 are CTAs, too: with 64 heads of 256 an SM has one already."""
  assert config.num_splits(16, 4, 256, 2048) == config.num_splits(16, 8, 128, 2048) == 1
  assert config.num_splits(16, 4, 128, 2048) == 2
  assert config.num_splits(1, 16, 128, 32768) == 8


@pytest.mark.parametrize(
  ("decay", "implementation"),
  [
    ("H", "pallas_interpret"),
    *(
      pytest.param(decay, implementation, marks=pytest.mark.slow)
      for decay in ("HK", "BTH", "BTHK")
      for implementation in ("pallas_interpret", AMPERE)
    ),
  ],
)
def test_decays_from_none_to_everything(decay, implementation):
  """Down to -inf, which forgets all; and the largest that is not yet that."""
  case = dataclasses.replace(SMALL, T=66, H=2 if decay == "H" else 1, decay=decay, state=True)
  inputs = LINEAR_ATTENTION.inputs(case)
  levels = np.asarray([-np.inf, 0.0, -1e-3, -20.0, -1000.0])
  rng = np.random.default_rng(2)
  inputs["log_decay"] = rng.choice(levels, size=inputs["log_decay"].shape)
  inputs["log_decay"].flat[:2] = levels[:2]
  check(case, inputs, implementation)


def test_subchunks_are_as_large_as_decays_allow():
  """No factor inside a subchunk is above 2^92, and some would be in one of twice the size."""
  rates = np.concatenate([np.geomspace(1e-3, 200.0, 400), [np.inf]])
  others = np.zeros_like(rates)  # the fastest channel counts
  level = np.asarray(intra_chunk.subchunk_level(jnp.asarray(-np.stack([others, rates], -1))))
  largest = lambda level: (4 * 2.0**level - 1) * np.minimum(rates, 21.0) / np.log(2.0)
  assert (largest(level) <= 92.0).all()
  assert ((largest(level + 1) > 92.0) | (level == intra_chunk.LEVELS)).all()
  assert set(level) == {0, 1, 2, 3}


def factors_in_subchunk(log_decay, *, level, read_first):
  """The factors [C, 64] of queries and of keys inside a subchunk.

  log_decay: [64], the same at every token, or [C, 64]. level: of `subchunk_level`.
  """
  constant = log_decay.ndim == 1
  scratch = intra_chunk.DecayScratch.of(jnp.zeros((1,) * (2 if constant else 4)), CHUNK)

  def body(log_decay_gmem, queries_gmem, keys_gmem, scratch_smem):
    f: Any
    if constant:
      valid = jnp.int32(CHUNK)
      f = intra_chunk.ConstantDecayFactors(log_decay_gmem, level, read_first, valid, CHUNK)
    else:
      f = intra_chunk.TokenDecayFactors(log_decay_gmem, scratch_smem, read_first, Backend(True))
      f.choose_level(intra_chunk.LARGEST_LOG2)
    queries_gmem[...], keys_gmem[...], _ = f.in_subchunk()

  return plgpu.kernel(
    body,
    out_type=(jax.ShapeDtypeStruct((CHUNK, TILE_WIDTH), jnp.float32),) * 2,
    scratch_types=[scratch],
    grid=(1,),
    grid_names=("block",),
    interpret=dispatch.interpreter(),
    compiler_params=COMPILER_PARAMS,
  )(jnp.asarray(log_decay, jnp.float32))


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "per token"])
def test_factors_inside_a_subchunk_are_finite_for_large_keys(constant, read_first):
  """Those of its first query and last key meet nothing, and would be infinite times a key of 1e8.

  A product of two factors is the decay between a query and a key before it.
  """
  rates = np.geomspace(1e-3, 4.25, TILE_WIDTH)
  level = int(intra_chunk.subchunk_level(jnp.asarray(-rates)))
  size = 8 << level
  assert size == 32
  log_decay = -rates if constant else np.repeat(-rates[None], CHUNK, axis=0)
  factors = factors_in_subchunk(log_decay, level=level, read_first=read_first)
  queries, keys = (np.asarray(x, np.float64) for x in factors)
  assert max(queries.max(), keys.max()) <= 2.0**92
  for i, j in [(1, 0), (size - 1, 0), (size - 1, size - 2), (size // 2, 1), (size + 3, size)]:
    want = np.exp(-rates * (i - j - read_first))
    np.testing.assert_allclose(queries[i] * keys[j], want, rtol=3e-3, atol=1e-30)


@pytest.mark.parametrize("segments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decays_that_turn_strong_within_a_chunk(segments):
  """The first rows of scores are made in another way than the last."""
  case = dataclasses.replace(SMALL, T=64, decay="BTHK", state=False, segments=segments)
  inputs = LINEAR_ATTENTION.inputs(case)
  inputs["log_decay"] = np.full_like(inputs["log_decay"], -0.3)
  inputs["log_decay"][:, 29:40] = -18.0
  check(case, inputs)


@pytest.mark.slow
def test_values_that_are_not_numbers_reach_no_earlier_gradient_of_queries():
  """Gradients of a query from later keys are left out by selection, not multiplied by 0."""
  case = dataclasses.replace(SMALL, T=20, decay="H")
  inputs = inputs_of(LINEAR_ATTENTION, case, BF16)
  inputs["v"] = inputs["v"].at[:, 13].set(jnp.nan)
  run = lambda q: call_of(LINEAR_ATTENTION, case)(inputs | {"q": q})[0]
  out, pull = jax.vjp(run, inputs["q"])
  (d_q,) = pull(jnp.ones_like(out))
  assert jnp.isfinite(d_q[:, :13]).all()
  assert not jnp.isfinite(d_q[:, 13:]).any()


def test_dtypes():
  """`out` is as narrow as the inputs, the states are float32; other inputs are rejected by name."""
  case = dataclasses.replace(SMALL, normalize=True)
  inputs, call = inputs_of(LINEAR_ATTENTION, case, BF16), call_of(LINEAR_ATTENTION, case)
  out, state = jax.eval_shape(call, inputs)
  assert (out.dtype, state.kv.dtype, state.key_sum.dtype) == (
    jnp.bfloat16,
    jnp.float32,
    jnp.float32,
  )
  for name in "qkv":
    with pytest.raises(NotImplementedError, match=f"{name} has dtype float32"):
      jax.eval_shape(call, inputs | {name: inputs[name].astype(jnp.float32)})


@pytest.mark.parametrize(
  "decay", ["HK", pytest.param("BTHK", marks=pytest.mark.slow)], ids=lambda decay: decay
)
def test_large_keys_under_strong_decay(decay):
  """The LNSSM's features reach e^20, its decays exp(-20) per token: no factor may be infinite."""
  case = dataclasses.replace(SMALL, T=20, decay=decay)
  inputs = LINEAR_ATTENTION.inputs(case)
  inputs["k"] = inputs["k"] * np.float64(1e8)
  inputs["log_decay"] = np.full_like(inputs["log_decay"], -20.0)
  check(case, inputs)


@pytest.mark.parametrize(
  ("case", "message"),
  [
    (dataclasses.replace(SMALL, value_decay="HV"), "value_log_decay is given"),
    (dataclasses.replace(SMALL, chunk=32), "chunk_size=32"),
    (dataclasses.replace(SMALL, K=257), "q is 257 wide"),
  ],
  ids=str,
)
def test_what_cannot_run_is_named(case, message):
  inputs = inputs_of(LINEAR_ATTENTION, case, BF16)
  with pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(call_of(LINEAR_ATTENTION, case), inputs)
  args, options = LINEAR_ATTENTION.bind(case, inputs)
  assert "pallas_interpret" not in ops.supported(ops.linear_attention, *args, **options)


def test_on_a_cpu_the_kernels_are_not_chosen():
  args, options = LINEAR_ATTENTION.bind(SMALL, inputs_of(LINEAR_ATTENTION, SMALL, BF16))
  assert ops.supported(ops.linear_attention, *args, **options)[0] == "chunked"
  with pytest.raises(NotImplementedError, match="need an NVIDIA GPU since Ampere"):
    ops.linear_attention(*args, **options, implementation="pallas")
