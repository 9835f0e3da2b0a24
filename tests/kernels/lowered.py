"""Helpers of tests that lower programs for CUDA and inspect them."""

import jax
import jax.numpy as jnp


def lowered(function, *shapes):
  """The text of `function`, lowered for CUDA."""
  return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(function, *shapes):
  """How many kernels `function`, lowered for CUDA, has."""
  return lowered(function, *shapes).count("custom_call @mosaic_gpu")


def total(results):
  """The sum of all numbers of all arrays, to differentiate."""
  return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))
