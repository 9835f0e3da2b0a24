"""Helpers of tests that lower programs for CUDA and inspect them."""

import jax
import jax.numpy as jnp


def lowered(function, *shapes):
  """The text of `function`, lowered for CUDA."""
  return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(function, *shapes):
  """How many kernels `function`, lowered for CUDA, has."""
  return lowered(function, *shapes).count("custom_call @mosaic_gpu")


def kernels_traced(function, *shapes) -> list[str]:
  """The names of the kernels in `function`, which costs a fraction of lowering them."""

  def names(jaxpr):
    for equation in jaxpr.eqns:
      if equation.primitive.name == "mpmd_map":
        yield equation.params["name"]
        continue
      inner = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr"))
      for jaxpr in (getattr(x, "jaxpr", x) for x in inner):
        if hasattr(jaxpr, "eqns"):
          yield from names(jaxpr)

  return list(names(jax.jit(function).trace(*shapes).jaxpr.jaxpr))


def total(results):
  """The sum of all numbers of all arrays, to differentiate."""
  return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))
