"""The kernels of the delta rule: interpreted, lowered for CUDA, and which arguments they get.

(Values and gradients: `KERNELS` in lnssm_jax/ops/delta_rule/cases.py.)
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax import ops
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.delta_rule import pallas
from lnssm_jax.ops.delta_rule.types import Inputs, Options
from pallas_kernels.core import device
from pallas_kernels.core.wgmma import WITHOUT_BARRIERS, Backend
from pallas_kernels.delta_rule import config, types
from pallas_kernels.delta_rule.sm90 import recurrence
from pallas_kernels.delta_rule.triangular_inverse import (
  ROWS,
  InverseTiles,
  diagonal_blocks,
  lhs_scratch,
  triangular_inverse,
)
from tests.kernels.interpreted import (
  BY_NAME,
  MASKED_LATER,
  assert_promises,
  assert_transformations,
  call_of,
  documents_begin_at,
  inputs_of,
)
from tests.kernels.lowered import (
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
  recomputed_in_a_scan,
  total,
)
from tests.ops import contract
from tests.ops.cases.delta_rule import DELTA_RULE, Case

pytestmark = MASKED_LATER
SMALL = Case(K=16, V=24, H=1, chunk=None, state=False, decay="ordinary")
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
XLA = ["chunked", "reference", "associative"]


def inverse_of(lower, interpret):
  def body(lower_ref, out, s):
    lower = plgpu.load(lower_ref, layout=plgpu.Layout.WGMMA, optimized=False)
    out[...] = triangular_inverse(lower, *s, backend)

  backend = Backend(interpret)
  return plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32),
    scratch_types=[(diagonal_blocks(), InverseTiles.of(), lhs_scratch(backend))],
    grid=(1,),
    grid_names=("block",),
    interpret=interpret,
    compiler_params=WITHOUT_BARRIERS,
  )(lower)


@pytest.mark.parametrize("kind", ["random", "equal keys", "alternating keys"])
def test_the_inverse_is_exact_to_sixteen_bits(kind):
  """Also of systems in which the powers of N are 10^18 times as large as the inverse."""
  strictly = np.tri(ROWS, k=-1)
  rng = np.random.default_rng(0)
  lower = {
    "random": strictly * rng.normal(size=(ROWS, ROWS)) * ROWS**-0.5,
    "equal keys": strictly,
    "alternating keys": strictly * (-1.0) ** np.add.outer(np.arange(ROWS), np.arange(ROWS)),
  }[kind].astype(np.float32)
  want = np.linalg.inv(np.eye(ROWS) + lower.astype(np.float64))
  got = inverse_of(jnp.asarray(lower), plgpu.InterpretGPUParams(detect_races=True))
  # Each operand is the sum of two bfloat16 numbers.
  assert contract.relative_error(got, want) < 2**-15


@pytest.mark.slow
def test_decays_and_rates_from_none_to_everything():
  """Decays down to -inf, which forgets all, and the largest that is not yet that. beta = 0 is an
  ordinary value, with a gradient of its own; so are beta = 1 and equal keys."""
  case = dataclasses.replace(SMALL, T=66, state=True)
  inputs = DELTA_RULE.inputs(case)
  levels = np.asarray([-np.inf, 0.0, -1e-3, -20.0, -1000.0])
  inputs["log_decay"] = np.random.default_rng(2).choice(levels, size=inputs["log_decay"].shape)
  inputs["log_decay"].flat[:2] = levels[:2]
  inputs["beta"] = np.round(inputs["beta"])
  inputs["k"][:, 5:9] = inputs["k"][:, 5:6]
  contract.assert_case(DELTA_RULE, case, BF16, "pallas_interpret", inputs)


@pytest.mark.parametrize(
  ("K", "V"), [(16, 80), pytest.param(100, 24, marks=pytest.mark.slow)], ids=["V", "K"]
)
def test_splits_that_run_at_the_same_time(monkeypatch, K, V):
  """Values and all gradients, where the initial state passes the first split, and where not."""
  monkeypatch.setattr(config, "num_splits", lambda *_: 2)
  documents_begin_at(monkeypatch, [65], [40])
  case = Case(T=66, K=K, V=V, H=1, chunk=None, decay="weak", segments=True)
  contract.assert_case(DELTA_RULE, case, BF16, "pallas_interpret", DELTA_RULE.inputs(case))


def test_split_of_wide_keys_that_are_zero_scales_every_row_of_a_state():
  """Of 128 rows, in two tiles: the unit matrix times the decay, and nothing is added."""
  C, K, V = config.CHUNK, 128, 64
  tables = jnp.ones((1, 1, 1, config.NUM_ROWS, C)).at[..., types.DECAY, :].set(0.5)
  stage = recurrence.Stage(
    erase_key=None,
    inverse=jnp.eye(C, dtype=BF16)[None, None],
    k=jnp.zeros((1, C, 1, K), BF16),
    q=None,
    v=jnp.ones((1, C, 1, V), BF16),
    tables=tables,
    segment_ids=None,
  )
  backend = Backend(plgpu.InterpretGPUParams(detect_races=True))
  maps = recurrence.split_maps(
    stage,
    heads=1,
    num_splits=1,
    config=config.RecurrenceConfig(64, 1, 232, 232),
    chunk=C,
    backend=backend,
  )
  np.testing.assert_array_equal(maps[0, 0, 0], np.concatenate([np.eye(K) / 2, np.zeros((V, K))]))


@pytest.mark.parametrize(
  "case",
  [
    Case(T=66, K=16, V=20, decay="ordinary", erase=True, segments=True, H=1, chunk=None),
    Case(T=66, K=16, V=20, decay="ordinary", keys="write", segments=True, H=1, chunk=None),
    Case(T=9, K=16, V=20, decay="weak", channels=True, keys="early", H=1, chunk=None),
  ],
  ids=["erase", "write", "channels"],
)
def test_kernels_for_ampere_equal_the_reference(case):
  """In two chunks, with documents; with decays per channel and the gradient of a last state."""
  inputs = DELTA_RULE.inputs(case)
  contract.assert_case(DELTA_RULE, case, BF16, "pallas_ampere_interpret", inputs)


CHANNELS = dataclasses.replace(SMALL, channels=True)


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["", "write"])
def test_decays_per_channel_in_splits(monkeypatch, keys):
  monkeypatch.setattr(config, "num_splits", lambda *_: 2)
  documents_begin_at(monkeypatch, [65], [40])
  options = {"V": 24, "H": 1, "chunk": None, "decay": "weak", "channels": True, "segments": True}
  case = Case(T=66, **options, **({"K": 64, "keys": keys} if keys else {"K": 100}))
  contract.assert_case(DELTA_RULE, case, BF16, "pallas_interpret", DELTA_RULE.inputs(case))


@pytest.mark.slow
@pytest.mark.parametrize("keys", ["", "early", "before"])
def test_decays_per_channel_from_none_to_everything(keys):
  """Down to -inf, with the largest that is not yet that, mixed in every token; and lower-bounded
  ones, -5 for all."""
  case = dataclasses.replace(CHANNELS, T=66, state=True, keys=keys)
  inputs = DELTA_RULE.inputs(case)
  levels = np.asarray([-np.inf, 0.0, -1e-3, -5.0, -20.0, -1000.0])
  inputs["log_decay"] = np.random.default_rng(2).choice(levels, size=inputs["log_decay"].shape)
  inputs["log_decay"][:, 40:50] = -5.0
  inputs["beta"] = np.round(inputs["beta"])
  inputs["k"][:, 5:9] = inputs["k"][:, 5:6]
  contract.assert_case(DELTA_RULE, case, BF16, "pallas_interpret", inputs)


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", [SMALL, CHANNELS, dataclasses.replace(CHANNELS, erase=True, keys="before")], ids=str
)
def test_splitting_packing_and_causality(case):
  """Documents of one step, documents that end at a chunk boundary, cuts on all sides of it."""
  sizes = {"lengths": (1, 63, 1, 63), "pieces": (66, 62), "cuts": (1, 64, 65)}
  assert_promises(DELTA_RULE, case, BF16, **sizes, infinite=False)


@pytest.mark.slow
def test_every_transformation():
  assert_transformations(DELTA_RULE, dataclasses.replace(SMALL, T=5, erase=True), BF16)


def arguments(K, V, erase, segments, T=1024, lead=(), channels=False, write=False):
  """Arguments of `pallas.run`, as shapes; `lead` are axes in front of all."""
  B, H = 2, 3
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct((*lead, *shape), dtype)
  inputs = {"q": array(B, T, H, K, dtype=BF16), "k": array(B, T, H, K, dtype=BF16)}
  inputs |= {"v": array(B, T, H, V, dtype=BF16), "beta": array(B, T, H, 1)}
  inputs |= {"log_decay": array(B, T, H, K if channels else 1), "kv": array(B, H, K, V)}
  for name, given in (("erase_key", erase), ("write_key", write)):
    if given:
      inputs[name] = array(B, T, H, K, dtype=BF16)
  return inputs, array(B, T, dtype=jnp.int32) if segments else None


def run(inputs, segments, **splits):
  state = ops.DeltaRuleState(inputs["kv"])
  segments = None if segments is None else Segments(segments, segments)
  arrays = {n: inputs.get(n) for n in Inputs._fields if n not in ("state", "segments")}
  arguments = Inputs(**arrays, state=state, segments=segments)
  return pallas.run(arguments, Options(scale=0.5), **splits)


WIDTHS = tuple(itertools.product((64, 128), repeat=2))  # K, V


@pytest.mark.parametrize(
  ("widths", "erase", "segments"),
  [
    ((128, 128), True, True),
    *(
      pytest.param(*options, marks=pytest.mark.slow)
      for options in itertools.product(
        (*WIDTHS, (192, 64), (256, 128)), (False, True), (False, True)
      )
    ),
  ],
)
def test_lowers(widths, erase, segments):
  inputs, ids = arguments(*widths, erase, segments)
  gradient = jax.grad(lambda x, ids: total(run(x, ids)))
  assert len(kernels_traced(run, inputs, ids)) == 2
  assert kernels_in(gradient, inputs, ids) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
  ("widths", "channels", "write"),
  [
    ((128, 128), False, False),
    ((128, 128), True, False),
    ((64, 64), False, False),
    ((64, 128), True, True),
    ((256, 128), True, False),
  ],
)
def test_kernels_for_ampere_lower(widths, channels, write):
  """Of a write key two more of scores, two of gradients, one of values."""
  inputs, ids = arguments(*widths, channels, True, channels=channels, write=write)
  ampere = lambda x, ids: run(x, ids, architecture="ampere")
  assert len(kernels_traced(ampere, inputs, ids)) == (6 if write else 4)
  gradient = jax.grad(lambda x, ids: total(ampere(x, ids)))
  assert kernels_in(gradient, inputs, ids) == (12 if write else 7)


@pytest.mark.slow
@pytest.mark.parametrize("erase", [False, True])
@pytest.mark.parametrize(
  ("widths", "write"),
  [((128, 128), False), ((64, 64), False), ((64, 64), True), ((64, 128), True), ((256, 64), False)],
)
def test_decays_per_channel_lower(widths, write, erase):
  inputs, ids = arguments(*widths, erase, True, channels=True, write=write)
  assert len(kernels_traced(run, inputs, ids)) == 2
  assert kernels_in(jax.grad(lambda x, ids: total(run(x, ids))), inputs, ids) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
  ("K", "channels", "write"),
  [(128, False, False), (128, True, False), (64, True, True), (256, False, False)],
)
def test_splits_lower(K, channels, write):
  inputs, ids = arguments(K, 128, False, True, channels=channels, write=write)
  gradient = jax.grad(lambda x, ids: total(run(x, ids, num_splits=8)))
  assert kernels_in(gradient, inputs, ids) == (6 if channels else 7)  # one is of log decays


@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_transformations_lower(wide, channels):
  with jax.enable_x64(wide):
    inputs, _ = arguments(64, 64, False, False, T=100, lead=(3,), channels=channels)
    loss = lambda x: total(run(x, None))
    number = 4 if channels else 5  # one is of log decays
    assert kernels_in(jax.vmap(jax.grad(loss)), inputs) == number
    assert kernels_in(recomputed_in_a_scan(loss), inputs) == number


def test_lowers_under_shard_map():
  """Where every array's type says along which axes of the mesh it varies."""
  inputs, _ = arguments(64, 64, False, False, T=100)
  assert_shard_map_keeps_shapes(jax.grad(lambda x: total(run(x, None))), inputs)


@pytest.mark.parametrize(
  ("case", "dtype", "expected"),
  [
    (Case(T=2, K=64, V=64, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=65, K=32, V=128, chunk=64, erase=True, segments=True), BF16, ["pallas", *XLA]),
    (Case(T=1, K=16, V=48, rates="column", chunk=None), F32, ["pallas", *XLA]),
    (Case(T=1, K=64, V=56, chunk=None), BF16, [*XLA, "pallas"]),  # padding would copy the state
    (Case(T=2, K=16, V=64, chunk=None), BF16, [*XLA, "pallas"]),  # not measured
    (Case(T=2, K=64, V=16, chunk=None), BF16, [*XLA, "pallas"]),
    (Case(T=2, K=64, V=64, chunk=None), F32, XLA),
    (Case(T=2, K=64, V=64, chunk=None), jnp.float16, XLA),
    (Case(T=2, K=64, V=64, chunk=32), BF16, XLA),
    (Case(T=2, K=257, V=64, chunk=None), BF16, XLA),
    (Case(T=2, K=256, V=512, erase=True, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=2, K=129, V=64, decay="weak", channels=True, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=2, K=64, V=129, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=2, K=64, V=64, rates="column", chunk=None), BF16, XLA),
    (Case(T=2, K=64, V=64, decay="weak", channels=True, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=2, K=64, V=64, erase=True, keys="early", chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=2, K=64, V=64, keys="write", chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=1, K=80, V=64, decay="weak", channels=True, keys="before"), F32, ["pallas", *XLA]),
    (Case(T=2, K=65, V=64, keys="write", chunk=None), BF16, XLA),
  ],
  ids=str,
)
def test_what_hopper_runs(hopper, case, dtype, expected):
  args, kwargs = DELTA_RULE.bind(case, inputs_of(DELTA_RULE, case, dtype))
  by_name = BY_NAME if "pallas" in expected else []
  assert ops.supported(ops.delta_rule, *args, **kwargs) == expected + by_name


@pytest.mark.parametrize(
  ("case", "dtype", "message"),
  [
    (SMALL, F32, "q has dtype float32"),
    (dataclasses.replace(SMALL, chunk=32), BF16, "chunk_size=32"),
    (dataclasses.replace(SMALL, K=257), BF16, "q is 257 wide"),
    (dataclasses.replace(SMALL, rates="column"), BF16, "beta has a rate for each value column"),
    (dataclasses.replace(SMALL, K=65, keys="write"), BF16, "write_key is 65 wide"),
  ],
  ids=str,
)
def test_what_cannot_run_is_named(case, dtype, message):
  with pytest.raises(NotImplementedError, match=message):
    jax.eval_shape(call_of(DELTA_RULE, case), inputs_of(DELTA_RULE, case, dtype))


def test_wide_heads_name_the_smem_that_a_small_gpu_lacks(monkeypatch):
  small = dataclasses.replace(device.HOPPER, smem=99 * 1024)
  monkeypatch.setattr(device, "HOPPER", small)
  able = []
  for K, erase in itertools.product((128, 192, 193), (False, True)):
    case = dataclasses.replace(SMALL, K=K, erase=erase)
    args, options = DELTA_RULE.bind(case, inputs_of(DELTA_RULE, case, BF16))
    if "pallas_ampere_interpret" in ops.supported(ops.delta_rule, *args, **options):
      able.append((K, erase))
  assert able == [(128, False), (128, True), (192, False)]
  with pytest.raises(NotImplementedError, match="q is 193 wide, for which the kernels need 157696"):
    ops.delta_rule(*args, **options, implementation="pallas_ampere_interpret")


def test_every_width_has_a_configuration_that_fits():
  flags = itertools.product((1, 200), config.KEY_WIDTHS, config.VALUE_WIDTHS, *[(False, True)] * 2)
  for heads, K, V, erase, channels in flags:
    shape = config.Shape(heads, K, V, erase or channels, channels)
    config.default(shape).check(shape)


def test_on_a_cpu_the_kernels_are_not_chosen():
  args, options = DELTA_RULE.bind(SMALL, inputs_of(DELTA_RULE, SMALL, BF16))
  able = [*XLA, "pallas_interpret", "pallas_ampere_interpret"]
  assert ops.supported(ops.delta_rule, *args, **options) == able
  with pytest.raises(NotImplementedError, match="need an NVIDIA GPU since Ampere"):
    ops.delta_rule(*args, **options, implementation="pallas")
