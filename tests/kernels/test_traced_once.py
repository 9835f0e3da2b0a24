"""Kernels of a model's training step: each is traced, lowered and compiled once."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.model_step import BODIES, settings
from tests.kernels.lowered import kernel_launches, total
from train.step.model import build_model, model_graph, params_of

LAYERS = 3


@pytest.mark.parametrize("name", ["gla", "lnssm", "gated_delta_net"])
def test_kernels_of_identical_layers_are_built_once(name, hopper):
  """Norms and convolutions of a layer that have the same sizes share a kernel, too."""
  model = dataclasses.replace(settings(BODIES[name]).model, num_layers=LAYERS, unroll=LAYERS)
  graph = model_graph(model)
  params = jax.eval_shape(lambda key: params_of(build_model(model, key)), jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
  loss = lambda params, tokens: total(nnx.merge(graph, params).hidden_and_aux(tokens)[0])
  traced = jax.jit(jax.grad(loss)).trace(params, tokens)
  launches = list(kernel_launches(traced.jaxpr.jaxpr))
  # Equal programs that were traced apart are equal as text only.
  programs = {str(equation.params) for equation in launches}
  assert len({id(equation.params["jaxprs"][0]) for equation in launches}) == len(programs)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  hashes = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)
  assert len(set(hashes)) == len(programs) < LAYERS * 6 < len(hashes)
