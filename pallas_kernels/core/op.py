"""An op on the kernels of the current device, with its gradient."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.core import device
from pallas_kernels.core.gradients import custom_vjp, no_gradient


def differentiable(kernels: Mapping[str, device.Kernels], *, named: bool) -> Callable[..., Any]:
  """`run(options, inputs, segments)` on the kernels of the current device, with its gradient.

  Args:
    kernels: by architecture. `forward(options, inputs, segments, for_gradient=...)` returns the
      results and what the backward pass needs of it; `backward(options, inputs, segments, kept,
      cotangents, decays)` the gradients of the inputs, where a cotangent of None is zero and
      `decays` says whether `inputs.log_decay` wants a gradient.
    named: whether policies of rematerialization may keep what the forward pass leaves.
  """
  # Of the current device, unless the options name one.
  chosen = lambda options: device.choose(kernels, getattr(options, "architecture", None))

  @functools.partial(custom_vjp, nondiff_argnums=(0,))
  def run(options, inputs, segments):
    return chosen(options).forward(options, inputs, segments, for_gradient=False)[0]

  def forward_rule(options, inputs, segments):
    decays = inputs.log_decay.perturbed
    is_leaf = lambda x: hasattr(x, "perturbed")
    inputs, segments = jax.tree.map(lambda x: x.value, (inputs, segments), is_leaf=is_leaf)
    results = chosen(options).forward(options, inputs, segments, for_gradient=True)
    if named:
      name = functools.partial(checkpoint_name, name=MADE_BY_KERNELS)
      results = jax.tree.map(name, results)
    result, kept = results
    return result, (inputs, segments, kept, () if decays else None)

  def backward_rule(options, residuals, cotangents):
    inputs, segments, kept, decays = residuals
    cotangents = [None if isinstance(x, SymbolicZero) else x for x in cotangents]
    backward = chosen(options).backward
    d_inputs = backward(options, inputs, segments, kept, cotangents, decays is not None)
    return d_inputs, no_gradient(segments)

  run.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
  return run
