"""Checks of interpreted kernels, the same for every scan, and their inputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax.ops.core import cases
from tests.ops import contract, promises

# The interpreter multiplies with numpy. Inside a block of steps the kernels weight a pair in the
# wrong order of time too, before it is masked: its weight may overflow, and nothing reads it.
MASKED_LATER = [
  pytest.mark.filterwarnings(f"ignore:{what} encountered in matmul:RuntimeWarning")
  for what in ("overflow", "invalid value")
]


# Implementations that nothing chooses.
BY_NAME = ["pallas_interpret", "pallas_ampere", "pallas_ampere_interpret"]


def documents_begin_at(monkeypatch, *rows):
  """From here on cases with segments have documents that begin at these tokens of each row."""

  def segment_ids(length):
    begins = jnp.stack([jnp.isin(jnp.arange(length), jnp.asarray(row)) for row in rows])
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)

  monkeypatch.setattr(cases, "segment_ids", segment_ids)


def inputs_of(scan, case, dtype=jnp.float32, seed=0):
  """The inputs of a case; those that may be narrow have this dtype."""
  inputs = scan.inputs(case, seed)
  return jax.tree.map(jnp.asarray, inputs, contract.dtypes_of(scan, inputs, dtype))


def call_of(scan, case, implementation="pallas_interpret"):
  return functools.partial(scan, case, implementation=implementation)


def assert_promises(
  scan, case, dtype, *, lengths, pieces, cuts, infinite, implementation="pallas_interpret"
):
  """Causality, packed documents of these lengths, and cuts of `pieces` (documents) at `cuts`.

  With `infinite`, an infinite number in one document reaches no other.
  """
  case = dataclasses.replace(case, T=sum(lengths))
  inputs, others = (inputs_of(scan, case, dtype, seed) for seed in range(2))
  steps, compared = scan.over_time(case, inputs), scan.compared
  call = call_of(scan, case, implementation)
  run = jax.jit(lambda x, state, ids: call(x, initial_state=state, segment_ids=ids))
  promises.nothing_flows_backwards_in_time(run, inputs, others, steps, infinite=infinite)
  promises.packing_changes_nothing(
    run, inputs, others, steps, compared, infinite=infinite, lengths=lengths, dtype=dtype
  )
  promises.splitting_changes_nothing(
    run, inputs, steps, compared, lengths=pieces, cuts=cuts, dtype=dtype
  )


def assert_transformations(scan, case, dtype):
  """Under vmap, scan and shard_map as in plain calls."""
  inputs, others = (inputs_of(scan, case, dtype, seed) for seed in range(2))
  promises.works_under_every_transformation(
    call_of(scan, case),
    inputs,
    others,
    scan.over_time(case, inputs),
    ["pallas_interpret"],
    checkpoint=lambda f: f,  # JAX cannot run the interpreter's callbacks there; see test_lowering
  )
