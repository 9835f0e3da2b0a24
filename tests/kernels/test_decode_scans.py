"""Single-token kernels of the other ops, interpreted, and lowered for CUDA as they ship.

(That of linear attention: test_decode.py.)
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.delta_rule import cases as delta_case
from lnssm_jax.ops.wkv4 import cases as wkv4_case
from pallas_kernels.channel_states import decode as channel_states
from pallas_kernels.channel_states.longhorn import LonghornScan
from pallas_kernels.channel_states.selective import SelectiveScan
from pallas_kernels.core import decode as steps
from pallas_kernels.delta_rule import decode as delta_rule
from tests.kernels.interpreted import inputs_of
from tests.kernels.lowered import kernels_in, kernels_traced, total
from tests.ops import contract
from tests.ops.cases import channel_states as channel_case
from tests.ops.cases.channel_states import LONGHORN_SCAN, SELECTIVE_SCAN
from tests.ops.cases.delta_rule import DELTA_RULE
from tests.ops.cases.wkv4 import WKV4

F32, BF16 = jnp.float32, jnp.bfloat16
Heads = functools.partial(delta_case.Case, T=1, chunk=None)
Channels = functools.partial(channel_case.Case, T=1, chunk=None)
Width = functools.partial(wkv4_case.Case, T=1, chunk=None)
FITTING = {  # sizes that need no padding, of several CTAs
  "delta_rule": (DELTA_RULE, Heads(K=16, V=32, decay="ordinary", erase=True)),
  "selective_scan": (SELECTIVE_SCAN, Channels(D=64, N=16)),
  "longhorn_scan": (LONGHORN_SCAN, Channels(D=64, N=16)),
  "wkv4": (WKV4, Width(D=256)),
}
SCANS = pytest.mark.parametrize("name", FITTING)


def state_of(inputs):
  return {n: x for n, x in inputs.items() if n.startswith("state.")}


THREE_KEYS = Heads(K=20, V=24, H=1, decay="ordinary", rates="column", erase=True)
THREE_KEYS = dataclasses.replace(THREE_KEYS, channels=True, keys="before")
CASES = [
  (DELTA_RULE, THREE_KEYS, F32),
  (SELECTIVE_SCAN, Channels(strength="extreme", segments=True, D=5, N=3), F32),
  (LONGHORN_SCAN, Channels(D=3, N=40, skip=False), BF16),
  (WKV4, Width(D=5, strength="extreme", keys="wide", segments=True), F32),
]
MORE_CASES = [
  (DELTA_RULE, Heads(K=20, V=24, H=1, decay="ordinary", rates="column"), F32),
  (DELTA_RULE, Heads(K=16, V=32, decay="extreme", channels=True, keys="early"), F32),
  (DELTA_RULE, Heads(K=16, V=16, decay="weak", channels=True, H=4, keys="write", readers=2), BF16),
  (DELTA_RULE, Heads(K=16, V=16, decay="extreme", erase=True, segments=True), BF16),
  (DELTA_RULE, Heads(K=16, V=40, H=1, decay="ordinary", rates="column", erase=True), F32),
  (SELECTIVE_SCAN, Channels(strength="extreme", segments=True, D=32, N=16), BF16),
  (SELECTIVE_SCAN, Channels(strength="weak", D=5, N=3), F32),
  (LONGHORN_SCAN, Channels(strength="extreme", segments=True, D=64, N=7), F32),
  (WKV4, Width(D=128), BF16),
]


@pytest.mark.parametrize(
  ("scan", "case", "dtype"),
  [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)],
  ids=lambda x: getattr(getattr(x, "function", None), "__name__", str(x)),
)
def test_decode_single_token_matches_reference(scan, case, dtype):
  """Against float64. `test_decode_transformed_has_one_kernel` shows that the kernel runs."""
  contract.assert_case(scan, case, dtype, "pallas_interpret")


@pytest.mark.parametrize("ties", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_decode_longhorn_with_large_keys_keeps_every_digit(ties):
  """The decayed entry that is nearly all of a large key, or half of it, to every digit."""
  case = Channels(D=32, N=4)
  inputs = LONGHORN_SCAN.inputs(case)
  inputs["k"][:] = np.where(np.arange(4) < ties, 1e4, 1e-3)
  inputs["state.h"][..., ties:] = inputs["x"][:] = 0
  call = lambda x, form: LONGHORN_SCAN(case, x, implementation=form)[1]
  dtypes = dict.fromkeys(inputs, F32)
  errors = contract.errors_against_reference(call, inputs, dtypes, "pallas_interpret")
  assert errors["['values'].h"] <= contract.tolerance(F32, 1), errors


@SCANS
def test_decode_of_two_tokens_matches_reference(name):
  """Through the returned state; no call modifies the caller's arguments."""
  scan, case = FITTING[name]
  pieces = [inputs_of(scan, case, seed=n) for n in range(2)]
  step = jax.jit(lambda x, form: scan(case, x, implementation=form), static_argnames="form")

  def run(form, dtype):
    state, outs = state_of(pieces[0]), []
    for piece in pieces:
      given = jax.tree.map(lambda x: jnp.asarray(x, dtype), piece | state)
      before = jax.tree.map(np.array, given)
      out, new = step(given, form)
      jax.tree.map(np.testing.assert_array_equal, given, before)
      state = {f"state.{field}": x for field, x in new._asdict().items()}
      outs.append(out)
    return scan.compared(jnp.stack(outs), new)

  got = run("pallas_interpret", F32)
  with jax.enable_x64(True):
    want = run("reference", jnp.float64)
  errors = contract.named_errors(got, want)
  contract.assert_small(errors, F32, 2)


@pytest.mark.parametrize("wide", [pytest.param(False, marks=pytest.mark.slow), True])
@SCANS
def test_decode_transformed_has_one_kernel(hopper, name, wide):
  """Alone, under a gradient and under vmap, with and without 64 bits; in place where the state was
  donated."""
  scan, case = FITTING[name]
  inputs = inputs_of(scan, case, BF16)
  call = functools.partial(scan, case, implementation="pallas")
  with jax.enable_x64(wide):
    assert len(kernels_traced(call, inputs)) == 1  # lowered as a step below
    assert kernels_in(jax.value_and_grad(lambda x: total(call(x))), inputs) == 1
    assert kernels_in(jax.vmap(call), jax.tree.map(lambda x: jnp.stack([x] * 3), inputs)) == 1
  rest = {n: x for n, x in inputs.items() if not n.startswith("state.")}
  step = jax.jit(lambda state, rest: call(rest | state), donate_argnums=0)
  text = step.trace(state_of(inputs), rest).lower(lowering_platforms=("cuda",)).as_text()
  arrays = len(state_of(inputs))
  assert len(re.findall(r"output_tuple_indices = \[\d+\], operand_index", text)) == arrays
  assert len(re.findall(r"tf\.aliasing_output", text)) == arrays


def test_decode_under_vmap_keeps_shared_state():
  """vmap over inputs that share one state: no instance may write into it."""
  scan, case = FITTING["delta_rule"]
  inputs, others = inputs_of(scan, case), inputs_of(scan, case, seed=1)
  call = functools.partial(scan, case, implementation="pallas_interpret")
  apart = lambda *inputs: jax.tree.map(lambda *x: jnp.stack(x), *map(call, inputs))
  both = jax.tree.map(lambda *x: jnp.stack(x), inputs, others)
  axes = {n: None if n.startswith("state.") else 0 for n in inputs}
  got = jax.jit(jax.vmap(call, in_axes=(axes,)))(both | state_of(inputs))
  jax.tree.map(np.testing.assert_array_equal, got, apart(inputs, others | state_of(inputs)))


@pytest.mark.parametrize("recurrence", [SelectiveScan(exact=True), LonghornScan(exact=True)])
def test_decode_with_several_tiles_per_cta_equals_one(recurrence):
  """As with so many channels that every SM has CTAs enough: here two of two tiles, or four."""
  B, D, N = 2, 128, 16
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), F32)
  a = -jnp.abs(drawn(D, N)) if isinstance(recurrence, SelectiveScan) else None
  keys = drawn(B, N), drawn(B, N)
  token = channel_states.Inputs(drawn(B, D), jnp.abs(drawn(B, D)), *keys, drawn(D), a)
  state, interpret = drawn(B, D, N), plgpu.InterpretGPUParams(detect_races=True)
  run = functools.partial(channel_states.decode, recurrence, token, state, interpret=interpret)
  for got, want in zip(run(tiles=2), run(tiles=1), strict=True):
    np.testing.assert_array_equal(got, want)


DELTA = {"q": (2, 3, 16), "k": (2, 3, 16), "erase_key": (2, 3, 16), "v": (2, 3, 48)}
DELTA |= {"beta": (2, 3, 1), "log_decay": (2, 3), "kv": (2, 3, 16, 48)}


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"v": jnp.zeros((2, 3, 48), jnp.float16)}, "v is float16"),
    ({"beta": jnp.zeros((2, 3, 1), BF16)}, "beta is bfloat16"),
    ({"kv": jnp.zeros((2, 3, 16, 48), BF16)}, "the state is bfloat16"),
    ({"kv": jnp.zeros((2, 3, 272, 48))}, "K=272"),
    ({"tile": 32}, "tile=32 must be 16, 32 or 64 and divide V=48"),
  ],
)
def test_decode_delta_rule_with_unsupported_arguments_raises(change, message):
  arrays = {name: jnp.zeros(shape) for name, shape in DELTA.items()}
  with pytest.raises(ValueError, match=message):
    delta_rule.decode(**arrays | change)


def test_decode_with_large_states_is_unsupported():
  """A channel of more than 64 states, or keys of more than 256 channels, have no decode kernel."""
  case = Channels(D=3, N=65)
  args, kwargs = SELECTIVE_SCAN.bind(case, inputs_of(SELECTIVE_SCAN, case))
  inputs = dispatch.check("selective_scan", *args, **kwargs).inputs
  arrays = channel_states.Inputs(inputs.x, inputs.dt, inputs.b, inputs.c, inputs.skip, inputs.a)
  assert "65 states" in channel_states.unsupported(arrays, inputs.state.h)
  case = Heads(K=272, V=16)
  args, kwargs = DELTA_RULE.bind(case, inputs_of(DELTA_RULE, case))
  with pytest.raises(NotImplementedError, match="q has dtype float32"):
    ops.delta_rule(*args, **kwargs, implementation="pallas_interpret")


def test_decode_value_tile_fills_the_device():
  """Small batches have CTAs for most SMs; sizes that do not fit are padded."""
  assert [steps.value_tile(B, 16, 128) for B in (1, 64)] == [16, 32]
  assert channel_states.fits(4096, 16) and channel_states.fits(96, 16)
  assert not channel_states.fits(100, 16) and not channel_states.fits(4096, 12)
