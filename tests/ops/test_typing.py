"""Annotations of the public signatures: what goes in and comes out has those dtypes and axes."""

import runpy
import sys

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from lnssm_jax import ops, typing
from tests.ops.cases import SCANS


def annotated(function):
  """`function` with its annotations checked in every call."""
  return jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)


def state_arrays(state):
  """(Annotation, array) of every array of a state, but those whose sizes are computed (`W-1`)."""
  if state is None:
    return []
  hints = type(state).__annotations__
  found = [(hints[name], x) for name, x in state._asdict().items() if x is not None]
  return [(hint, x) for hint, x in found if "-" not in getattr(hint, "dim_str", "")]


@pytest.mark.parametrize("name", SCANS)
def test_annotations_of_every_case_hold(name):
  scan = SCANS[name]
  checked = annotated(scan.function)
  cases = {scan.program_of(check.case) for check in scan.checks if check.case.T < 60}
  for case in [scan.small, *scan.variants, *sorted(cases, key=str)[:6]]:
    inputs = {n: jnp.asarray(x, jnp.float32) for n, x in scan.inputs(case).items()}

    def call(inputs, case=case):
      args, kwargs = scan.bind(case, inputs, implementation="reference")
      return checked(*args, **kwargs)

    _, state = jax.eval_shape(call, inputs)
    for hint, x in state_arrays(state):
      assert isinstance(jnp.zeros(x.shape, x.dtype), hint), (hint, x)


def test_aliases_without_jaxtyping_are_arrays(monkeypatch):
  monkeypatch.setitem(sys.modules, "jaxtyping", None)
  aliases = runpy.run_path(typing.__file__)
  assert aliases["BTHK"] is jax.Array
  assert aliases["Ids"] is jax.Array


def test_annotations_reject_other_axes():
  q = jnp.ones((1, 4, 2, 3))
  with pytest.raises(jaxtyping.TypeCheckError):
    annotated(ops.linear_attention)(q, q, jnp.ones((1, 5, 2, 3)))
