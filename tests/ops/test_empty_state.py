"""Ops without a state inside a larger program, where XLA for CPUs errs with constants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops import contract
from tests.ops.cases import SCANS

B, T, H, K = 4, 64, 1, 64  # one chunk, which reads the empty state itself
COMPILATIONS = 3  # a wrong program is right by chance at times


def _op(name, form=None):
  return lambda q, k, v, rate: {
    "linear_attention": lambda: ops.linear_attention(
      q, k, v, log_decay=jnp.log(rate), implementation=form
    ),
    "delta_rule": lambda: ops.delta_rule(q, k, v, rate[..., 0], implementation=form),
  }[name]()[0]


@pytest.mark.parametrize("name", ["linear_attention", "delta_rule"])
@pytest.mark.parametrize("reduction", ["sum of squares", "maximum"])
def test_reduction_in_the_same_program_has_the_value_of_the_output(name, reduction):
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(B, T, H, K)).astype(np.float32) for _ in range(3))
  arrays = q, k / np.linalg.norm(k, axis=-1, keepdims=True), v
  arrays = *arrays, rng.uniform(0.5, 1.0, (B, T, H, K)).astype(np.float32)
  output = contract.in_float64(lambda x: {"out": _op(name, "reference")(*x)}, arrays)["['out']"]
  reduced = {
    "sum of squares": lambda x: (x * x).sum(axis=-1),
    "maximum": lambda x: x.max(axis=-1),
  }[reduction]
  for _ in range(COMPILATIONS):
    program = jax.jit(lambda *arrays: reduced(_op(name)(*arrays)))  # another program each time
    np.testing.assert_allclose(program(*arrays), reduced(output), rtol=1e-4, atol=1e-5)


def _loss(x):
  """A norm, a projection and a softmax: x is read twice, and stays an array."""
  matrix = np.random.default_rng(2).normal(size=(x.shape[-1], 9)) / np.sqrt(x.shape[-1])
  y = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-2)
  y = y @ matrix.astype(x.dtype)
  return jax.nn.logsumexp(y, axis=-1) - y[..., 0]


def _squares(x):
  """Mean squares alone, as a norm has them: XLA fuses them with the product before."""
  return jnp.mean(x * x, axis=-1)


def _layer(scan, case, tail):
  """An op after projections of its inputs and before `tail`."""

  def projected(x):
    rows = x.shape[-1]
    matrix = np.eye(rows) + np.random.default_rng(1).normal(size=(rows, rows)) / (10 * rows)
    return x @ matrix.astype(x.dtype)

  def call(inputs, form):
    wide = lambda n, x: n in scan.narrow and jnp.ndim(x) > 1
    given = {n: projected(x) if wide(n, x) else x for n, x in inputs.items()}
    out, state = scan(case, given, implementation=form)
    return jax.tree.map(tail, scan.compared(out, state)["out"])

  return call


def _stateless(name, length):
  """The first case of an op in one chunk and one head, as wide as what XLA fuses."""
  scan = SCANS[name]
  sizes = {"T": length, "chunk": None, "H": 1, "K": 64, "V": 64, "D": 64, "normalize": False}
  fields = {field.name for field in dataclasses.fields(scan.small)}
  return dataclasses.replace(scan.small, **{n: x for n, x in sizes.items() if n in fields})


DEFAULT = ("linear_attention", "delta_rule", "wkv4")
TAILS = {"squares": _squares, "loss": _loss}


def _slow_but(default):
  """A mark for all but what is run by default."""
  return [] if default else [pytest.mark.slow]


@pytest.mark.parametrize(
  ("name", "form", "length", "tail"),
  [
    pytest.param(
      *(name, form, length, tail),
      marks=_slow_but((form, length, tail) == ("chunked", 64, "squares") and name in DEFAULT),
    )
    for name, scan in SCANS.items()
    for form in scan.implementations
    for length in (2, 64)
    for tail in TAILS
  ],
)
def test_op_inside_a_larger_program_has_the_values_of_float64(name, form, length, tail):
  scan, case = SCANS[name], _stateless(name, length)
  layer, inputs = _layer(scan, case, TAILS[tail]), scan.inputs(case)
  inputs = jax.tree.map(lambda x: np.asarray(x, np.float32), inputs)
  want = contract.in_float64(lambda x: layer(x, "reference"), inputs)
  for _ in range(COMPILATIONS):
    program = jax.jit(lambda x: layer(x, form))  # another program each time
    errors = contract.named_errors(contract.by_path(program(inputs)), want)
    assert max(errors.values()) <= contract.tolerance(jnp.float32, length), errors


@pytest.mark.slow
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
  ("name", "form"), [(name, form) for name, scan in SCANS.items() for form in scan.implementations]
)
def test_op_inside_a_larger_program_has_the_gradients_of_float64(name, form, tail):
  scan, case = SCANS[name], _stateless(name, 64)
  inputs = scan.inputs(case)
  dtypes = contract.dtypes_of(scan, inputs, jnp.float32)
  errors = contract.errors_against_reference(_layer(scan, case, TAILS[tail]), inputs, dtypes, form)
  contract.assert_small(errors, jnp.float32, case.T, strength=case.strength)
