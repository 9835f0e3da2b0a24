"""`custom_vjp` of `pallas_kernels.core.gradients`: results that depend on one of two arguments."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.core.gradients import custom_vjp

Q, V = jnp.arange(1.0, 4.0), jnp.float32(3.0)


def make(decorator):
  """(q v, v^2) and its rule, whose residuals are the first result and the arguments."""

  @functools.partial(decorator, nondiff_argnums=(0,))
  def call(power, arrays):
    return forward(power, arrays)[0]

  def forward(power, arrays):
    q, v = arrays["q"], arrays["v"]
    product = q * v
    return (product, v**power), (product, q, v)

  def backward(power, residuals, cotangents):
    product, _, v = residuals
    d_product, d_power = cotangents
    return ({"q": v * d_product, "v": product / v * d_product + power * v * d_power},)

  call.defvjp(forward, backward)
  return lambda q, v: call(2, {"q": q, "v": v})


ours = make(custom_vjp)
plain = lambda q, v: (q * v, v**2)  # what JAX differentiates by itself


def total(results):
  """Not linear, and with weights of their own."""
  return sum(jnp.sum(jnp.sin((n + 1) * x)) for n, x in enumerate(results))


MAPPED = {
  "first": lambda fn: lambda q, v: total(jax.vmap(fn, (0, None))(q, v)),
  "second": lambda fn: lambda q, v: total(jax.vmap(fn, (None, 0))(v, q)),
  "inside jit": lambda fn: jax.jit(lambda q, v: total(jax.vmap(fn, (0, None))(q, v))),
  "of jit": lambda fn: lambda q, v: total(jax.vmap(jax.jit(fn), (0, None))(q, v)),
  "of checkpoint": lambda fn: (
    lambda q, v: total(
      jax.vmap(jax.checkpoint(fn), (0, None))(q, v),
    )
  ),
  "both": lambda fn: lambda q, v: total(jax.vmap(fn)(q, v * q)),
  "nested, both": lambda fn: (
    lambda q, v: total(jax.vmap(lambda q: jax.vmap(lambda v: fn(q, v))(v * Q))(q))
  ),
  "nested, one": lambda fn: (
    lambda q, v: total(jax.vmap(lambda s: jax.vmap(lambda q: fn(s * q, v))(q))(Q))
  ),
  "nested, one outside": lambda fn: (
    lambda q, v: total(jax.vmap(lambda q: jax.vmap(lambda s: fn(q, v)[0] * s)(Q))(q))
  ),
  "last axis": lambda fn: (
    lambda q, v: total(
      jax.vmap(fn, (1, None), out_axes=(1, 0))(jnp.outer(Q, q), v * Q),
    )
  ),
  "spmd_axis_name": lambda fn: (
    lambda q, v: total(
      jax.vmap(fn, (0, None), spmd_axis_name="data")(q, v),
    )
  ),
  "in a scan": lambda fn: (
    lambda q, v: jax.lax.scan(
      lambda v, s: (0.1 * total(jax.vmap(fn, (0, None))(s * q, v)), None), v, Q
    )[0]
  ),
  "gradient of each": lambda fn: (
    lambda q, v: total(jax.vmap(jax.grad(lambda q, v: total(fn(q, v)), (0, 1)), (0, None))(q, v))
  ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_gradients_under_vmap_equal_those_of_a_function_without_a_rule(name):
  both = lambda q, v: [jax.grad(MAPPED[name](fn), (0, 1))(q, v) for fn in (ours, plain)]
  got, want = jax.jit(both)(Q, V)
  chex.assert_trees_all_close(got, want, rtol=2e-6)


def test_second_derivatives_under_vmap_equal_those_of_a_function_without_a_rule():
  def derivatives(fn):
    loss = MAPPED["first"](fn)
    gradient = jax.grad(loss, (0, 1))
    along = jax.jvp(gradient, (Q, V), (jnp.cos(Q), jnp.float32(0.5)))[1]
    return along, jax.jacrev(gradient, (0, 1))(Q, V)

  got, want = jax.jit(lambda: (derivatives(ours), derivatives(plain)))()
  chex.assert_trees_all_close(got, want, rtol=1e-5)


def test_second_derivatives_of_a_scan_equal_those_of_a_function_without_a_rule():
  def derivatives(fn):
    layers = lambda q: jax.lax.scan(lambda q, v: fn(q / 3, v), q, jnp.outer(Q, Q))
    gradient = jax.grad(lambda q: total(layers(q)))
    return jax.grad(lambda q: jnp.vdot(gradient(q), jnp.cos(q)))(Q)

  got, want = jax.jit(lambda: (derivatives(ours), derivatives(plain)))()
  chex.assert_trees_all_close(got, want, rtol=1e-5)


def test_all_results_have_the_mapped_axis_and_their_values():
  shapes = jax.eval_shape(jax.vmap(ours, (0, None)), Q, V)
  assert [x.shape for x in shapes] == [(3,), (3,)]
  got = jax.vmap(ours, (0, None))(jnp.asarray([jnp.nan, jnp.inf, 0.0]), jnp.float32(-jnp.inf))
  np.testing.assert_array_equal(got[0], [np.nan, -np.inf, np.nan])
  np.testing.assert_array_equal(got[1], [np.inf] * 3)


def test_program_that_is_not_mapped_is_that_of_jax():
  def lowered(decorator):
    step = jax.checkpoint(make(decorator))
    layers = lambda q, v: jax.lax.scan(lambda q, _: (step(q, v)[0], None), q, None, length=3)[0]
    gradient = jax.value_and_grad(lambda q, v: jnp.sum(layers(q, v)), (0, 1))
    return [jax.jit(fn).lower(Q, Q).as_text() for fn in (step, layers, gradient)]

  assert lowered(custom_vjp) == lowered(jax.custom_vjp)


def test_residual_that_is_a_result_is_kept_once():
  """In a scan, whose residuals are stacked: not the product under two names."""

  def step(q, _):
    product, _ = ours(q, V)
    return product * product, None

  layers = lambda q: jax.lax.scan(step, q, None, length=4)[0]
  kept = jax.tree.leaves(jax.eval_shape(lambda q: jax.vjp(layers, q)[1], Q))
  assert [x.shape for x in kept if x.shape[:1] == (4,)] == [(4, 3)] * 2  # q and the product


def test_symbolic_zeros_reach_the_rules():
  seen = []

  @custom_vjp
  def call(q, v):
    return q * v, v**2

  def forward(q, v):
    seen.append((q.perturbed, v.perturbed))
    return (q.value * v.value, v.value**2), (q.value, v.value)

  def backward(residuals, cotangents):
    seen.append(tuple(type(x).__name__ for x in cotangents))
    return residuals[1] * cotangents[0], residuals[0] * cotangents[0]

  call.defvjp(forward, backward, symbolic_zeros=True)
  gradient = jax.grad(lambda q: jnp.sum(jax.vmap(call, (0, None))(q, V)[0]))(Q)
  np.testing.assert_array_equal(gradient, [3.0] * 3)
  assert seen[0] == (True, False)
  assert seen[1][1] == "SymbolicZero"
