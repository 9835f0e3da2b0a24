"""Single steps that run in a kernel: what the scans share of T = 1."""

import functools

import jax

from pallas_kernels.core.gradients import custom_vjp


def run(kernel, form, inputs, options, *, interpret):
  """The results of a kernel for the single tokens `inputs`, with the gradient of XLA's `form`.

  One token is of one document, that of the state.
  """
  form = functools.partial(form, options=options._replace(chunk_size=None))
  step = with_gradient_of(form, functools.partial(kernel, options=options, interpret=interpret))
  return step(inputs._replace(segments=None))


def with_gradient_of(form, kernel):
  """`kernel`, a function of trees of arrays, with the gradient of `form`, which computes the same.

  Decoding needs no gradient; where one is asked for, it comes from XLA's form of the step.
  """
  step = custom_vjp(kernel)

  def backward(inputs, cotangents):
    return jax.vjp(form, *inputs)[1](cotangents)

  step.defvjp(lambda *inputs: (kernel(*inputs), inputs), backward)
  return step
