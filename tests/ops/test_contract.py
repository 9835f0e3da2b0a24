"""Every scan, every implementation: values and all gradients against the reference in float64."""

import jax.numpy as jnp
import pytest

from tests.kernels.interpreted import MASKED_LATER
from tests.ops import contract
from tests.ops.scans import SCANS


def parameters(checks):
  """(name, check) of all scans, for a test."""
  return [
    pytest.param(
      name, check, marks=MASKED_LATER if check.implementation == "pallas_interpret" else ()
    )
    for name, scan in SCANS.items()
    for check in checks(scan)
  ]


def run(name, check):
  scan = SCANS[name]
  inputs = scan.inputs(check.case)
  dtypes = {n: check.dtype if n in scan.narrow else jnp.float32 for n in inputs}

  def call(inputs, implementation):
    return scan.compared(*scan(check.case, inputs, implementation=implementation))

  errors = contract.errors_against_reference(call, inputs, dtypes, check.implementation)
  contract.assert_small(errors, check.dtype, check.case.T)


@pytest.mark.parametrize(("name", "check"), parameters(lambda scan: scan.checks), ids=str)
def test_values_and_gradients(name, check):
  run(name, check)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "check"), parameters(lambda scan: scan.sweep), ids=str)
def test_every_combination(name, check):
  run(name, check)
