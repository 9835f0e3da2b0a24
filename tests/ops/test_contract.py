"""Every op, every implementation: values and all gradients against the reference in float64."""

import dataclasses
import datetime
import os
import zlib

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax.ops.core import chunk_groups
from tests.kernels.interpreted import MASKED_LATER
from tests.ops import contract, golden
from tests.ops.cases import SCANS


def parameters(checks):
  """(name, check) of all ops, for a test."""
  return [
    pytest.param(
      name, check, marks=MASKED_LATER if "interpret" in (check.implementation or "") else ()
    )
    for name, scan in SCANS.items()
    for check in checks(scan)
  ]


@pytest.mark.parametrize(("name", "check"), parameters(lambda scan: scan.checks), ids=str)
def test_values_and_gradients(name, check):
  want = None
  if golden.is_kept(name, check):
    want = golden.reference_of(name, check.case, contract.inputs_of(name, check)[0])
  errors, case = contract.errors_of(name, check, want), check.case
  values = contract.value_limit(check.dtype, case.T)
  contract.assert_small(errors, check.dtype, case.T, strength=case.strength, values=values)


def drawn(checks, week=None):
  """A tenth of the checks, another one each week; with `SWEEP=all` in the environment, all."""
  if os.environ.get("SWEEP") == "all":
    return checks
  week = datetime.date.today().isocalendar().week if week is None else week
  return [check for check in checks if zlib.crc32(str(check).encode()) % 10 == week % 10]


def test_ten_weeks_draw_every_combination(monkeypatch):
  monkeypatch.delenv("SWEEP", raising=False)
  for scan in SCANS.values():
    tenths = [str(check) for week in range(10) for check in drawn(scan.sweep, week)]
    assert sorted(tenths) == sorted(map(str, scan.sweep))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), parameters(lambda scan: drawn(scan.sweep)), ids=str)
def test_every_combination(name, check):
  contract.assert_small(contract.errors_of(name, check), check.dtype, check.case.T)


def compare_with_golden(name, checks):
  for check in checks:
    inputs, _ = contract.inputs_of(name, check)
    found = golden.kept(name, golden.key_of(name, check.case, inputs))
    errors = contract.named_errors(found, contract.reference_of(name, check.case, inputs))
    assert max(errors.values()) < 1.6 * golden.rounding(check), (check, errors)


@pytest.mark.parametrize("name", SCANS)
def test_golden_references_are_current_and_one_is_right(name):
  checks = golden.kept_checks(name)
  keys = {c: golden.key_of(name, c.case, contract.inputs_of(name, c)[0]) for c in checks}
  missing = [str(check) for check, key in keys.items() if golden.kept(name, key) is None]
  assert not missing, f"run `make goldens`: {name} has no reference of {missing}"
  short = [check for check in checks if check.case.T <= golden.LONGEST]
  compare_with_golden(name, sorted(short, key=keys.__getitem__)[:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANS)
def test_golden_references_are_right(name):
  compare_with_golden(name, golden.kept_checks(name))


@pytest.mark.parametrize(
  "name", ["linear_attention", pytest.param("delta_rule", marks=pytest.mark.slow)]
)
def test_groups_of_chunks_have_values_and_gradients_of_the_reference(name, monkeypatch):
  """Of two chunks each, and of one in a forward pass alone, which has the same values."""
  monkeypatch.setattr(chunk_groups, "_SMALLEST", 1)  # small arrays, too, run by groups
  monkeypatch.setattr(chunk_groups, "_MOST_GROUPS", 3)
  scan = SCANS[name]
  case = next(check.case for check in scan.checks if check.case.segments)
  case = dataclasses.replace(case, T=37, chunk=8)  # a last chunk that is not full
  contract.assert_case(scan, case, jnp.float32, "chunked")
  inputs = jax.tree.map(jnp.float32, scan.inputs(case))
  alone, both = (
    jax.jit(lambda x, form=form: scan.compared(*scan(case, x, implementation=form)))(inputs)
    for form in ("chunked", "reference")
  )
  assert contract.relative_error(alone["out"], both["out"]) < 1e-5
