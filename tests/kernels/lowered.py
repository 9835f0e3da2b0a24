"""Helpers of tests that lower programs for CUDA and inspect them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from benchmarks.model_step import BODIES, settings
from train.step.model import build_model

DATA, REPLICATED = PartitionSpec("data"), PartitionSpec()


def lowered(function, *shapes):
  """The text of `function`, lowered for CUDA."""
  return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels_in(function, *shapes):
  """How many kernels `function`, lowered for CUDA, has."""
  return lowered(function, *shapes).count("custom_call @mosaic_gpu")


def kernels_traced(function, *shapes) -> list[str]:
  """The names of the kernels in `function`, which costs a fraction of lowering them."""
  launches = kernel_launches(jax.jit(function).trace(*shapes).jaxpr.jaxpr)
  return [equation.params["name"] for equation in launches]


def kernel_launches(jaxpr):
  """The equations of a traced program that launch kernels; once, where a function is shared."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "mpmd_map":
      yield equation
      continue
    inner = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr"))
    for jaxpr in (getattr(x, "jaxpr", x) for x in inner):
      if hasattr(jaxpr, "eqns"):
        yield from kernel_launches(jaxpr)


def layer_of(name, rows, length):
  """A function `(params, x, ids) -> y` of one layer of a benchmark's body, and their shapes."""
  model = replace(settings(BODIES[name]).model, num_layers=1)
  stack = jax.eval_shape(lambda: build_model(model, jax.random.key(0))).blocks
  graph, params = nnx.split(stack)
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
  x = jax.ShapeDtypeStruct((rows, length, model.dim), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
  run = lambda params, x, ids: nnx.merge(graph, params).with_aux(x, None, ids)[0]
  return run, (params, x, ids)


def total(results):
  """The sum of all numbers of all arrays, to differentiate."""
  return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(results))


def recomputed_in_a_scan(loss):
  """The gradient of several problems one after the other, with activations computed again."""
  step = jax.grad(jax.checkpoint(loss))
  return lambda x: jax.lax.scan(lambda _, x: (_, step(x)), 0, x)[1]


def recomputed_for_several(loss):
  """The gradient of several problems at once, with activations computed again."""
  return jax.vmap(jax.grad(jax.checkpoint(loss)))


def assert_shard_map_keeps_shapes(gradient, inputs, specs=DATA):
  """`gradient(inputs)` under shard_map, where types say along which axes arrays vary."""
  mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
  sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(specs,), out_specs=specs)
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  assert shapes(jax.eval_shape(sharded, inputs)) == shapes(inputs)
