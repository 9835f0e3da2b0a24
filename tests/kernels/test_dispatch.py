"""Which arguments the kernels of linear attention get, and what a single step does there."""

import functools
import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import generate, ops, sampling
from lnssm_jax.models import LanguageModel
from lnssm_jax.ops.core import dispatch
from pallas_kernels.core import device
from tests.kernels import described, interpreted
from tests.kernels.lowered import kernels_in
from tests.mixers.helpers import drawn
from tests.ops import contract
from tests.ops.cases.linear_attention import LINEAR_ATTENTION, Case

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kernels.md").read_text()
STEP = Case(T=1, K=16, V=32, H=2, chunk=None)
compare = LINEAR_ATTENTION.compared


def inputs_of(case, dtype=jnp.float32, seed=0):
  return interpreted.inputs_of(LINEAR_ATTENTION, case, dtype, seed)


def supported(case, dtype, **options):
  args, kwargs = LINEAR_ATTENTION.bind(case, inputs_of(case, dtype), **options)
  return ops.supported(ops.linear_attention, *args, **kwargs)


def chosen(case, dtype):
  """The implementation that None takes."""
  args, kwargs = LINEAR_ATTENTION.bind(case, inputs_of(case, dtype))
  return dispatch.check("linear_attention", *args, **kwargs).choose()


@pytest.mark.parametrize(
  ("device", "reason"),
  [
    ({"platform": "cpu"}, "is a cpu, and the kernels need a Hopper GPU"),
    ({"platform": "tpu"}, "is a tpu"),
    ({"platform": "gpu", "compute_capability": "8.0"}, "compute capability 8.0"),
    ({"platform": "gpu", "compute_capability": "9.0"}, None),
    ({"platform": "gpu", "compute_capability": "10.0"}, "compute capability 10.0"),
    ({"platform": "gpu", "compute_capability": "gfx942"}, "gfx942"),
    ({"platform": "gpu"}, "unknown"),
  ],
)
def test_kernels_need_hopper(monkeypatch, device, reason):
  monkeypatch.setattr(dispatch.device, "default_device", lambda: types.SimpleNamespace(**device))
  said = dispatch.device.unsupported()
  assert said is None if reason is None else reason in said


def gpu(capability):
  facts = {"device_kind": "GPU", "core_count": 108, "shared_memory_per_block_optin": 101_376}
  return types.SimpleNamespace(platform="gpu", compute_capability=capability, **facts)


@pytest.mark.parametrize(
  ("capability", "whose"),
  [
    ("7.5", None),
    ("8.0", "Ampere and later"),
    ("8.9", "Ampere and later"),
    ("9.0", "Hopper"),
    ("10.0", "Ampere and later"),
    ("12.0", "Ampere and later"),
  ],
)
def test_gpus_since_ampere_run_their_kernels_by_default(monkeypatch, capability, whose):
  monkeypatch.setattr(dispatch.device, "default_device", lambda: gpu(capability))
  line = dispatch.device.kernels()
  reason = f"compute capability {capability}, and the kernels need 8.0 (Ampere) or more"
  assert (whose or reason) in line and capability in line
  assert (line.startswith("XLA's forms, because")) == (whose is None)
  many, one = Case(T=2, K=64, V=64, chunk=None), STEP
  assert [chosen(x, BF16) for x in (many, one)] == ["pallas" if whose else "chunked"] * 2
  assert ("pallas_ampere" in supported(many, BF16)) == (whose is not None)
  x = jnp.zeros((2, 256), jnp.bfloat16)
  assert ("pallas" in ops.supported(ops.normalize, x)) == (whose is not None)
  for length in (1, 2):
    x = jnp.zeros((1, length, 16), jnp.bfloat16)
    able = ops.supported(ops.wkv4, x, x, jnp.ones(16), jnp.ones(16))
    assert ("pallas" in able) == (whose is not None)
  x = jnp.zeros((1, 2, 1, 64), jnp.bfloat16)
  assert ("pallas" in ops.supported(ops.attention, x, x, x)) == (whose is not None)


def test_page_of_kernels_has_every_op_and_what_other_gpus_run():
  rows = re.findall(r"^\| `(\w+)`.*?\| (.+?) \| (.+?) \| (.+?) \|", PAGE, re.M)
  table = {
    op: (ours.strip("`"), others.strip("`")) for op, ours, others, how in rows if how == "yes"
  }
  forms = {
    op.parent.name: importlib.import_module(f"lnssm_jax.ops.{op.parent.name}.api").IMPLEMENTATIONS
    for op in (ROOT / "lnssm_jax/ops").glob("*/api.py")
  }
  names = {"norms": "normalize"}
  expected = {}
  for op, able in forms.items():
    if "pallas_interpret" not in able:
      continue
    there = [x for x in device.EVERY if (ROOT / "pallas_kernels" / op / x).is_dir()]
    one = "one kernel", "other copies" if "pallas_ampere" in able else "the same"
    expected[names.get(op, op)] = tuple(f"{op}/{x}" for x in there) if there else one
  assert table == expected
  compiled = {re.match(r"\w+", name)[0] for name in described.programs()}
  assert compiled == set(table) | {"token_shift"}


@pytest.mark.parametrize("nproc", ["2", None], ids=["NPROC=2", "two cores"])
def test_interpreted_kernels_with_few_threads_are_rejected_with_the_fix(monkeypatch, nproc):
  if nproc is None:
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(dispatch.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
  else:
    monkeypatch.setenv("NPROC", nproc)
  case = Case(K=16, V=16, chunk=None)
  args, kwargs = LINEAR_ATTENTION.bind(case, inputs_of(case, BF16))
  with pytest.raises(NotImplementedError, match="set NPROC=16 in the environment"):
    ops.linear_attention(*args, **kwargs, implementation="pallas_interpret")
  fix = "need an NVIDIA GPU since Ampere; leave it out, and 'chunked' runs"
  with pytest.raises(NotImplementedError, match=fix):
    ops.linear_attention(*args, **kwargs, implementation="pallas")
  assert "pallas_interpret" not in supported(case, BF16)
  monkeypatch.setenv("NPROC", "16")
  assert "pallas_interpret" in supported(case, BF16)


@pytest.mark.parametrize("device", ["cpu", jax.local_devices(backend="cpu")[-1], None], ids=str)
def test_the_default_device_is_asked(device):
  with jax.default_device(device):
    assert dispatch.device.default_device().platform == "cpu"


BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
XLA = ["chunked", "reference", "associative"]


@pytest.mark.parametrize(
  ("case", "dtype", "expected"),
  [
    (STEP, F32, ["pallas", *XLA]),
    (STEP, BF16, ["pallas", *XLA]),
    (Case(T=1, K=16, V=32, chunk=None, segments=True, decay="BTHK"), F32, ["pallas", *XLA]),
    (Case(T=1, K=256, V=512, H=1, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=1, K=20, V=32, chunk=None), F32, [*XLA, "pallas"]),  # padding would copy the state
    (Case(T=1, K=16, V=24, chunk=None), BF16, [*XLA, "pallas"]),
    (Case(T=1, K=272, V=16, H=1, chunk=None), F32, XLA),
    (Case(T=1, K=16, V=16, chunk=None), jnp.float16, XLA),
    (Case(T=1, K=16, V=16, chunk=None, value_decay="HV"), F32, XLA),
    (Case(T=2, K=64, V=64, chunk=None), BF16, ["pallas", *XLA]),
    (Case(T=65, K=128, V=32, H=1, chunk=64), BF16, ["pallas", *XLA]),
    (Case(T=65, K=40, V=128, H=1, chunk=None, decay="BTHK", bonus=True), BF16, ["pallas", *XLA]),
    (Case(T=2, K=16, V=64, chunk=None), BF16, [*XLA, "pallas"]),  # not measured
    (Case(T=2, K=64, V=16, chunk=None), BF16, [*XLA, "pallas"]),
    (Case(T=2, K=64, V=64, chunk=None), F32, XLA),
    (Case(T=2, K=64, V=64, chunk=32), BF16, XLA),
    (Case(T=2, K=272, V=64, H=1, chunk=None), BF16, XLA),
  ],
  ids=str,
)
def test_what_hopper_runs(hopper, case, dtype, expected):
  """`None` takes the first of `supported`; what runs by name only is last."""
  by_name = interpreted.BY_NAME if "pallas" in expected else []
  assert supported(case, dtype) == expected + by_name
  assert chosen(case, dtype) == expected[0]


@pytest.mark.parametrize("case", [STEP, Case(T=2, K=64, V=64, chunk=None)], ids=str)
def test_elsewhere_xla_runs(case):
  assert supported(case, BF16) == [*XLA, "pallas_interpret", "pallas_ampere_interpret"]
  assert chosen(case, BF16) == "chunked"


def test_float64_is_for_xla(hopper):
  with jax.enable_x64(True):
    args, kwargs = LINEAR_ATTENTION.bind(STEP, LINEAR_ATTENTION.inputs(STEP))
    assert ops.supported(ops.linear_attention, *args, **kwargs) == XLA


def test_dispatch_with_the_interpreter_alone_raises():
  args, kwargs = LINEAR_ATTENTION.bind(STEP, inputs_of(STEP, F32))
  call = dispatch.check("linear_attention", *args, **kwargs)
  call = call._replace(forms={"pallas_interpret": call.forms["pallas_interpret"]})
  assert call.unsupported("pallas_interpret") is None
  with pytest.raises(NotImplementedError, match="no implementation"):
    call.choose()


@pytest.mark.parametrize(
  ("dtype", "case"),
  [
    (F32, Case(T=1, K=20, V=24, H=1, decay="H", chunk=None)),
    (F32, Case(T=1, K=16, V=16, decay="HK", chunk=None, normalize=True)),
    (F32, Case(T=1, K=16, V=16, decay="BTHK", strength="extreme", chunk=None, bonus=True)),
    (BF16, Case(T=1, K=16, V=32, decay=None, chunk=None, state=False)),
    (BF16, Case(T=1, K=16, V=16, decay="BTH", chunk=None, bonus=True, segments=True)),
    (BF16, Case(T=1, K=16, V=16, decay="HK", chunk=None, bonus=True, normalize=True)),
  ],
  ids=str,
)
def test_a_step_and_its_gradient(dtype, case):
  inputs = LINEAR_ATTENTION.inputs(case)
  dtypes = {n: dtype if n in LINEAR_ATTENTION.narrow else F32 for n in inputs}
  call = lambda x, form: compare(*LINEAR_ATTENTION(case, x, implementation=form))
  errors = contract.errors_against_reference(call, inputs, dtypes, "pallas_interpret")
  # XLA's form is right in float32 too; that its forward pass did not run shows the next test.
  contract.assert_small(errors, dtype, 1)


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_step_is_one_kernel(hopper, dtype, wide):
  inputs = inputs_of(STEP, dtype)
  call = functools.partial(LINEAR_ATTENTION, STEP)
  loss = lambda x: sum(jnp.sum(y.astype(F32)) for y in jax.tree.leaves(call(x)))
  with jax.enable_x64(wide):
    assert kernels_in(call, inputs) == 1
    assert kernels_in(jax.value_and_grad(loss), inputs) == 1
    assert kernels_in(jax.vmap(call), jax.tree.map(lambda x: jnp.stack([x] * 3), inputs)) == 1


def test_several_steps_at_once():
  """vmap, also over a state that all of them start from, which none may then write into."""
  inputs, others = inputs_of(STEP), inputs_of(STEP, seed=1)
  both = jax.tree.map(lambda *x: jnp.stack(x), inputs, others)
  call = functools.partial(LINEAR_ATTENTION, STEP, implementation="pallas_interpret")
  apart = lambda *inputs: jax.tree.map(lambda *x: jnp.stack(x), *map(call, inputs))
  jax.tree.map(np.testing.assert_array_equal, jax.jit(jax.vmap(call))(both), apart(inputs, others))
  shared = {n: x for n, x in inputs.items() if n.startswith("state.")}
  axes = {n: None if n in shared else 0 for n in inputs}
  got = jax.jit(jax.vmap(call, in_axes=(axes,)))(both | shared)
  jax.tree.map(np.testing.assert_array_equal, got, apart(inputs, others | shared))


def test_a_step_leaves_its_arguments_alone():
  """In place means the buffer of a donated or carried state: the caller's own is still there."""
  inputs = inputs_of(STEP)
  before = jax.tree.map(np.array, inputs)
  LINEAR_ATTENTION(STEP, inputs, implementation="pallas_interpret")
  jax.tree.map(np.testing.assert_array_equal, inputs, before)


def test_steps_continue_a_sequence():
  case = Case(T=3, K=16, V=16, H=1, chunk=None, decay="HK", normalize=True)
  inputs = inputs_of(case)
  want = LINEAR_ATTENTION(case, inputs, implementation="reference")
  step = jax.jit(functools.partial(LINEAR_ATTENTION, case, implementation="pallas_interpret"))
  steps = LINEAR_ATTENTION.over_time(case, inputs)
  state, outs = {n: x for n, x in inputs.items() if n.startswith("state.")}, []
  for t in range(case.T):
    piece = {n: x[:, t : t + 1] if n in steps else x for n, x in inputs.items()} | state
    out, new = step(piece)
    state = {"state.kv": new.kv, "state.key_sum": new.key_sum}
    outs.append(out)
  errors = jax.tree.map(contract.relative_error, (jnp.concatenate(outs, 1), new), want)
  assert max(jax.tree.leaves(errors)) <= contract.tolerance(F32, case.T)


def operations(block, name):
  return [op for op in block.operations if op.operation.name == name]


def test_generation_updates_the_states_in_place(hopper):
  """Lowered: from a donated argument by the loop's carry to the kernel and back, with no copy."""
  B, L, H, K, vocab = 3, 2, 2, 16, 29
  sizes = {"vocab_size": vocab, "dim": H * K, "num_layers": L, "num_heads": H}
  model = drawn(lambda: LanguageModel(**sizes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  options = generate.SamplingOptions(max_tokens=1)
  keys, limits = jax.random.split(jax.random.key(0), B), sampling.limits_of(options)
  choice = sampling.choice_of(options, vocab, log_probs=False)
  states = generate.apart(model.init_state(B), model.num_layers)
  traced = generate.decode.trace(
    model, None, states, jnp.zeros((B, vocab)), None, keys, 0, limits, choice=choice
  )
  module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
  functions = {f.sym_name.value: f for f in operations(module.body, "func.func")}
  blocks = {name: f.entry_block for name, f in functions.items()}
  main, attributes = blocks["main"], functions["main"].arg_attrs

  # All layers share one kernel, in a function of its own.
  (name,) = [name for name in blocks if name.startswith("_decode")]
  (kernel,) = operations(blocks[name], "stablehlo.custom_call")
  (result,) = operations(blocks[name], "func.return")
  alias = str(kernel.attributes["output_operand_aliases"])
  written = int(re.search(r"output_tuple_indices = \[(\d+)\]", alias)[1])
  read = int(re.search(r"operand_index = (\d+)", alias)[1])
  argument = list(blocks[name].arguments).index(kernel.operands[read])
  returned = list(result.operands).index(kernel.results[written])

  (loop,) = operations(main, "stablehlo.while")
  body = loop.regions[1].blocks[0]
  (carried_on,) = operations(body, "stablehlo.return")
  calls = [c for c in operations(body, "func.call") if str(c.attributes["callee"]) == f"@{name}"]
  assert len(calls) == L
  for call in calls:
    place = list(body.arguments).index(call.operands[argument])
    assert carried_on.operands[place] == call.results[returned]
    start = list(main.arguments).index(loop.operands[place])
    assert "tf.aliasing_output" in attributes[start]


def test_kernels_are_imported_when_needed():
  """Importing what they are written with costs more than all the rest of the library."""
  code = """
import sys
import jax
import jax.numpy as jnp
import lnssm_jax.generate
from lnssm_jax import ops
x = jax.ShapeDtypeStruct((1, 2, 1, 32), jnp.bfloat16)
jax.eval_shape(ops.linear_attention, x, x, x)
assert "jax.experimental.pallas" not in sys.modules
kernels = {name for name in sys.modules if name.startswith("pallas_kernels.")}
cheap = {f"pallas_kernels.core{x}" for x in ("", ".device", ".gradients")}
assert kernels <= cheap, kernels
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr
