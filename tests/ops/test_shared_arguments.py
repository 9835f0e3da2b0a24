"""`grad(vmap(op))`: one argument is mapped and the others are shared, with a loss on all results.

A result that depends on shared arguments alone is one array for all mapped calls; its gradient
counts once. See `pallas_kernels.core.gradients`.
"""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.models.embedding import lookup
from tests.kernels.interpreted import MASKED_LATER
from tests.ops import contract, promises
from tests.ops.cases import SCANS
from train.step.loss import next_token_loss

CALLS = 3


def weighted(results, number):
  """A sum over all results with weights of their own in each call, by its number."""
  total = 0.0
  for n, x in enumerate(jax.tree.leaves(results)):
    weights = np.random.default_rng(n).normal(size=(CALLS, *x.shape))
    total += jnp.sum(jnp.asarray(weights, x.dtype)[number] * x)
  return total


def assert_equals_separate_calls(call, draw, name, dtype=jnp.float32):
  """Gradients of all inputs, of which `name` is another in each call, equal those of a loop.

  Args:
    call: results of a dictionary of arrays.
    draw: (seed) -> such a dictionary, of which this is the narrowest dtype.
  """
  rows = [draw(seed) for seed in range(CALLS)]
  shared = {n: x for n, x in rows[0].items() if n != name}
  alone = jax.jit(jax.grad(lambda x, number: weighted(call(x), number)))
  apart = [alone(shared | {name: row[name]}, n) for n, row in enumerate(rows)]
  want = jax.tree.map(lambda *x: sum(x), *apart) | {name: jnp.stack([x[name] for x in apart])}

  def loss(inputs):
    axes = {n: 0 if n == name else None for n in inputs}
    results = jax.vmap(call, in_axes=(axes,))(inputs)
    return sum(weighted(jax.tree.map(operator.itemgetter(n), results), n) for n in range(CALLS))

  got = jax.jit(jax.grad(loss))(shared | {name: jnp.stack([row[name] for row in rows])})
  promises.close(got, want, dtype)


def check_of(scan, form):
  """Three chunks of few tokens, of the case that a form is checked on with the most inputs."""
  chunk = None if form.endswith("interpret") else 2
  short = lambda case: dataclasses.replace(case, T=5, chunk=chunk)
  checks = {short(c.case): c for c in scan.checks if c.implementation == form}
  number = {case: len(scan.inputs(case)) for case in checks}
  case = max(checks, key=lambda c: (number[c], c.segments, c.strength == "ordinary"))
  return checks[case]._replace(case=case)


def assert_op(name, form, argument):
  scan = SCANS[name]
  check = check_of(scan, form)

  def draw(seed):
    inputs = scan.inputs(check.case, seed)
    return jax.tree.map(jnp.asarray, inputs, contract.dtypes_of(scan, inputs, check.dtype))

  call = lambda x: scan.compared(*scan(check.case, x, implementation=form))
  assert_equals_separate_calls(call, draw, argument, check.dtype)


# Of these arguments not all results depend. The others are slow.
TELLING = {
  ("linear_attention", "chunked", "q"),
  ("linear_attention", "chunked", "state.key_sum"),
  ("wkv4", "chunked", "bonus"),
  ("delta_rule", "chunked", "q"),
  ("diagonal_scan", "chunked", "x"),
}


# XLA compiles these programs on CPU and then does not run them (docs/upstream/xla_cpu_dot.md).
REJECTED = {("attention", "chunked", "v"), ("attention", "chunked", "state.v")}
REJECTED_BY_XLA = [
  pytest.mark.xfail(raises=jax.errors.JaxRuntimeError, reason="XLA on CPU", strict=True)
]


def every_argument():
  """(op, form, argument) of everything that is checked."""
  found = []
  for name, scan in SCANS.items():
    for form in sorted({check.implementation for check in scan.checks} - {"reference"}):
      for argument in scan.inputs(check_of(scan, form).case):
        marks = [] if (name, form, argument) in TELLING else [pytest.mark.slow]
        marks += MASKED_LATER if form == "pallas_interpret" else []
        marks += REJECTED_BY_XLA if (name, form, argument) in REJECTED else []
        found.append(pytest.param(name, form, argument, marks=marks))
  return found


@pytest.mark.parametrize(("name", "form", "argument"), every_argument())
def test_one_mapped_argument_equals_separate_calls(name, form, argument):
  assert_op(name, form, argument)


def drawn(seed, **shapes):
  rng = np.random.default_rng(seed)
  return {n: jnp.asarray(rng.normal(size=shape), jnp.float32) for n, shape in shapes.items()}


NORM = {
  "x": (2, 8, 128),
  "scale": (128,),
  "bias": (128,),
  "added": (2, 8, 128),
  "gate": (2, 8, 128),
}
CONVOLUTION = {"x": (2, 5, 128), "kernel": (4, 128), "bias": (128,), "state": (2, 3, 128)}
HEAD = {"hidden": (2, 5, 4), "head": (4, 7), "weights": (2, 5)}
TABLE = {"table": (7, 4)}


def norm(x):
  return ops.normalize(**x, implementation="pallas_interpret")


def convolution(x):
  state = ops.ConvState(x["state"])
  arguments = x["x"], x["kernel"], x["bias"]
  return ops.causal_conv1d(*arguments, initial_state=state, implementation="pallas_interpret")


def loss_of_tokens(x):
  targets = jnp.asarray([[0, 6, 2, 2, 1], [3, 0, 5, 1, 4]])
  sums = next_token_loss(x["hidden"], x["head"], targets, x["weights"], chunk=4)
  return sums.nats, sums.weight


def rows_of_table(x):
  return lookup(x["table"], jnp.asarray([[0, 6, 2], [2, 2, 1]]))


OTHERS = {norm: NORM, convolution: CONVOLUTION, loss_of_tokens: HEAD, rows_of_table: TABLE}
TELLING_OTHERS = {(norm, "scale"), (norm, "gate"), (convolution, "bias"), (loss_of_tokens, "head")}


@pytest.mark.parametrize(
  ("call", "argument"),
  [
    pytest.param(call, name, marks=[pytest.mark.slow] * ((call, name) not in TELLING_OTHERS))
    for call, shapes in OTHERS.items()
    for name in shapes
  ],
)
def test_one_mapped_argument_of_norms_convolutions_and_losses(call, argument):
  assert_equals_separate_calls(call, lambda seed: drawn(seed, **OTHERS[call]), argument)


def test_sum_of_keys_that_heads_of_values_share():
  """Grouped heads are mapped inside the op: the sum of the keys is one for all heads of a group."""
  shapes = {"q": (2, 5, 2, 3), "k": (2, 5, 2, 3), "v": (2, 5, 4, 3)}
  inputs = {n: jnp.abs(x) for n, x in drawn(0, **shapes).items()}

  def gradients(form):
    call = lambda x: ops.linear_attention(**x, normalize=True, implementation=form)
    return jax.jit(jax.grad(lambda x: weighted(call(x), 0)))(inputs)

  promises.close(gradients("chunked"), gradients("reference"))
