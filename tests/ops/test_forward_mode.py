"""Forward-mode derivatives: which implementation has them, and what the others say."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from tests.ops.cases import SCANS
from tests.ops.promises import close

names = [pytest.param(name, marks=[pytest.mark.slow] * (name != "diagonal_scan")) for name in SCANS]


def point_and_direction(scan):
  """(a short case, its inputs, others of the same shapes)."""
  case = dataclasses.replace(scan.small, T=5)
  wide = lambda seed: {n: jnp.asarray(x, jnp.float32) for n, x in scan.inputs(case, seed).items()}
  return case, wide(0), wide(1)


@pytest.mark.parametrize("name", names)
def test_forward_mode_error_names_the_implementation_that_has_it(name):
  scan = SCANS[name]
  case, x, direction = point_and_direction(scan)
  run = lambda form: lambda x: scan(case, x, implementation=form)[0]
  y, forward = jax.jvp(run("reference"), (x,), (direction,))
  _, transposed = jax.vjp(lambda u: jax.vjp(run("reference"), x)[1](u)[0], jnp.zeros_like(y))
  close(forward, transposed(direction)[0])  # by two backward passes, as docs/own_models.md has it

  args, kwargs = scan.bind(case, x)
  along = lambda form: lambda x: jax.jvp(run(form), (x,), (direction,))[1].sum()
  for form in ops.supported(scan.function, *args, **kwargs):
    try:
      along(form)(x)
    except TypeError as error:
      with pytest.raises(TypeError, match=f"^{name}: implementation={form!r} has"):
        jax.grad(along(form))(x)
      message = str(error)
      assert form != "reference"
      assert message.startswith(f"{name}: implementation={form!r} has")
      assert "use implementation='reference', or jax.jacrev" in message
    else:
      assert (name, form) in WITH_FORWARD_MODE or form == "reference"


WITH_FORWARD_MODE = (
  ("linear_attention", "associative"),
  ("delta_rule", "associative"),
  ("long_convolution", "chunked"),
)


@pytest.mark.parametrize("name", names)
def test_second_derivative_equals_that_of_the_reference(name):
  """Forward mode of the backward pass, as `jax.hessian` takes it; docs/own_models.md names them."""
  scan = SCANS[name]
  case, x, direction = point_and_direction(scan)
  loss = lambda form: lambda x: (scan(case, x, implementation=form)[0] ** 2).sum()
  second = lambda form: jax.jvp(jax.grad(loss(form)), (x,), (direction,))[1]
  want = second("reference")
  args, kwargs = scan.bind(case, x)
  for form in set(ops.supported(scan.function, *args, **kwargs)) - {"reference"}:
    if (name, form) in WITHOUT_SECOND_DERIVATIVES:
      with pytest.raises(
        TypeError, match=f"implementation='{form}' has a backward pass of its own"
      ):
        second(form)
    else:
      close(second(form), want)


WITHOUT_SECOND_DERIVATIVES = (
  ("delta_rule", "chunked"),
  ("elementwise_decay_scan", "chunked"),
  ("long_convolution", "associative"),
  ("longhorn_scan", "chunked"),
  ("selective_scan", "chunked"),
  ("sparse_state_attention", "chunked"),
  ("sparse_state_attention", "associative"),
)


def test_other_type_errors_are_not_changed():
  with pytest.raises(TypeError, match="another"), dispatch._naming_forward_mode("op", "chunked"):
    raise TypeError("another")
