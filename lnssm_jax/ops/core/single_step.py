"""Single steps that run in a kernel: what the scans share of T = 1."""

import jax

from pallas_kernels.core.gradients import custom_vjp


def with_gradient_of(form, kernel):
  """`kernel`, a function of trees of arrays, with the gradient of `form`, which computes the same.

  Decoding needs no gradient; where one is asked for, it comes from XLA's form of the step.
  """
  step = custom_vjp(kernel)

  def backward(inputs, cotangents):
    return jax.vjp(form, *inputs)[1](cotangents)

  step.defvjp(lambda *inputs: (kernel(*inputs), inputs), backward)
  return step
