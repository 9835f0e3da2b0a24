"""Every scan: what it promises next to its values, on short cases."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B
from tests.ops import promises
from tests.ops.cases import SCANS

CASES = [(name, case) for name, scan in SCANS.items() for case in (scan.small, *scan.variants)]
# Of these the variants differ little from the small case, next to what is held here.
ALIKE = ("sparse_state_attention", "delta_rule", "wkv4", "diagonal_scan")
FLOWS = [
  pytest.param(name, case, marks=[pytest.mark.slow] * (name in ALIKE and case != SCANS[name].small))
  for name, case in CASES
]


def drawn(name, case, seed=0):
  return {n: jnp.asarray(x, jnp.float32) for n, x in SCANS[name].inputs(case, seed).items()}


def compiled(name, case, form):
  """`run` of tests.ops.promises."""
  call = functools.partial(SCANS[name], case, implementation=form)
  return jax.jit(lambda x, state, ids: call(x, initial_state=state, segment_ids=ids))


def call_of(name, case):
  return functools.partial(SCANS[name], case)


def forms(name, case):
  args, kwargs = SCANS[name].bind(case, drawn(name, case))
  return ops.supported(SCANS[name].function, *args, **kwargs)


@pytest.mark.parametrize(("name", "case"), FLOWS, ids=str)
def test_splitting_packing_and_causality_hold_for_every_form(name, case):
  scan, inputs, others = SCANS[name], drawn(name, case), drawn(name, case, seed=1)
  steps, infinite = scan.over_time(case, inputs), scan.isolates_documents
  first, *rest = forms(name, case)
  first = compiled(name, case, first)  # one for all three: most of the time is compiling
  promises.splitting_changes_nothing(first, inputs, steps, scan.compared)
  for run in (first, *(compiled(name, case, form) for form in rest)):
    promises.nothing_flows_backwards_in_time(run, inputs, others, steps, infinite=infinite)
    options = {"infinite": infinite, "alone": first}
    promises.packing_changes_nothing(run, inputs, others, steps, scan.compared, **options)


def brief(name):
  """Three chunks of few steps: for what is large to compile."""
  small = SCANS[name].small
  return dataclasses.replace(small, T=5, chunk=small.chunk and 2)


def some(*names):
  """All scans, of which those not named are slow."""
  return [pytest.param(name, marks=[pytest.mark.slow] * (name not in names)) for name in SCANS]


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  "name", some("linear_attention", "delta_rule", "diagonal_scan", "selective_scan")
)
def test_transformations_equal_plain_calls(name, which):
  """Sharded with the preferred implementation; with the others it is slow."""
  scan, case = SCANS[name], brief(name)
  inputs, others = drawn(name, case), drawn(name, case, seed=1)
  forms = [form for form in scan.implementations if form != "reference"]
  forms = forms[1:] if which else forms[:1]
  promises.works_under_every_transformation(
    call_of(name, case), inputs, others, scan.over_time(case, inputs), forms
  )


@pytest.mark.parametrize("name", some("linear_attention", "elementwise_decay_scan"))
def test_derivatives_in_float64_equal_the_reference(name):
  case = brief(name)
  inputs, others = drawn(name, case), drawn(name, case, seed=1)
  compared = SCANS[name].compared
  promises.derivatives_in_float64_are_right(call_of(name, case), inputs, others, compared)


@pytest.mark.parametrize("name", some("linear_attention", "delta_rule", "longhorn_scan", "wkv4"))
def test_reference_gradient_equals_finite_differences(name):
  """Of the case of the contract with the most inputs that has segments and a state."""
  scan = SCANS[name]
  cases = [check.case for check in scan.checks if check.case.segments and check.case.T <= 130]
  inputs = {case: scan.inputs(case) for case in cases}
  with_state = [c for c in cases if any(n.startswith("state.") for n in inputs[c])]
  case = max(with_state, key=lambda c: (len(inputs[c]), c.strength == "ordinary"))
  promises.gradient_equals_finite_differences(call_of(name, case), inputs[case], scan.compared)


@pytest.mark.parametrize(
  "narrow",
  [jnp.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in (jnp.float32, jnp.float16))],
)
@pytest.mark.parametrize(("name", "case"), CASES, ids=str)
def test_dtypes_of_output_and_state_follow_the_inputs(name, case, narrow):
  """`out` is as narrow as the inputs, the state only where it is made of them; or both float64."""
  scan = SCANS[name]
  inputs = scan.inputs(case)

  def dtypes(form, narrow, wide):
    shapes = {n: (x.shape, narrow if n in scan.narrow else wide) for n, x in inputs.items()}
    shapes = {n: jax.ShapeDtypeStruct(*shape) for n, shape in shapes.items()}
    out, state = jax.eval_shape(lambda x: scan(case, x, implementation=form), shapes)
    state = {n: x.dtype for n, x in state._asdict().items() if x is not None}
    # Of complex numbers the parts count; a number of steps is an integer.
    real = {n: jnp.finfo(x).dtype for n, x in state.items() if x != jnp.int32}
    return jnp.finfo(out.dtype).dtype, real

  for form in forms(name, case):
    out, state = dtypes(form, narrow, jnp.float32)
    assert out == narrow
    assert state == {n: narrow if f"state.{n}" in scan.narrow else jnp.float32 for n in state}
    with jax.enable_x64(True):
      out, state = dtypes(form, jnp.float64, jnp.float64)
    assert {out, *state.values()} == {jnp.dtype(jnp.float64)}


@pytest.mark.parametrize("name", SCANS)
def test_supported_lists_every_implementation_as_preferred(name):
  scan = SCANS[name]
  assert forms(name, scan.small) == list(scan.implementations)


@pytest.mark.parametrize(
  "name",
  [
    # Of the scans it takes longest to compile.
    pytest.param(name, marks=[pytest.mark.slow] * (name == "long_convolution"))
    for name, scan in SCANS.items()
    if scan.memory
  ],
)
def test_memory_of_chunks_holds_no_state_per_token(name):
  """No array of forward and backward pass exceeds the inputs and the states between chunks."""
  scan = SCANS[name]

  def sizes(T, implementation):
    case = scan.memory(T)
    shapes = {n: jax.ShapeDtypeStruct(x.shape, jnp.float32) for n, x in scan.inputs(case).items()}
    run = lambda x: scan(case, x, implementation=implementation)
    out, state = jax.eval_shape(run, shapes)
    kept = [math.prod(shapes[n].shape) for n in scan.over_time(case, shapes)] + [out.size]
    numbers = lambda x: x.size * (2 if jnp.iscomplexobj(x) else 1)
    kept.append(T // case.chunk * sum(numbers(x) for x in jax.tree.leaves(state)))
    largest, temporary = promises.measure(jax.grad(lambda x: jnp.sum(run(x)[0] ** 2)), shapes)
    return max(kept), sum(kept), largest, temporary

  chunk = scan.memory(1).chunk
  T = 64 * chunk  # next to which an array of a few chunks' size is small
  largest_kept, all_kept, largest, temporary = sizes(T, "chunked")
  assert largest <= largest_kept
  # As many bytes for each step more, and these are a few times what is kept (measured: up to 4.6).
  _, all_kept_of_twice, _, temporary_of_twice = sizes(2 * T, "chunked")
  assert temporary_of_twice - temporary <= 5 * 4 * (all_kept_of_twice - all_kept)
  # The reference does hold a state per step, and this is seen.
  few, _, largest, _ = sizes(2 * chunk, "reference")
  assert largest > few


@pytest.mark.parametrize("name", SCANS)
def test_bad_arguments_that_all_scans_have_raise_and_are_named(name):
  case = dataclasses.replace(SCANS[name].small, T=6)
  args, kwargs = SCANS[name].bind(case, drawn(name, case))
  wrong = [
    ({"segment_ids": jnp.zeros((B, 5), int)}, r"segment_ids has shape \(2, 5\)"),
    ({"segment_ids": jnp.zeros((B, 6))}, "segment_ids has dtype float32; it must be integer"),
    ({"implementation": "chunkd"}, "'chunkd' is unknown; use one of "),
    ({"chunk_size": 0}, "chunk_size=0 must be "),
  ]
  for change, message in wrong:
    with pytest.raises(ValueError, match=message):
      SCANS[name].function(*args, **kwargs | change)
