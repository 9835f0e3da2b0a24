"""Order of execution of FFTs inside one program.

FFTs that do not depend on each other may run at the same time. That costs memory (the arrays of all
of them are alive), and on CPUs it can deadlock: XLA runs an FFT on a worker of its thread pool, and
DUCC waits there for other workers of the same pool (jax 0.11.2: the gradient of a tree of 131,072
steps hung in 3 of 3 runs on two cores; openxla/xla issue 46345 describes the check against nested
parallelism that XLA has added since). An optimization barrier orders what the compiler allocates,
but is gone when the program runs. On CPUs each FFT therefore gets an artificial data dependency on
the one before it. Remove it once the oldest supported jax passes
`test_long_convolution_deep_tree_finishes` with `run_after` as the identity.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.core.gradients import custom_vjp


def run_after(x: jax.Array, earlier: jax.Array) -> jax.Array:
  """x; on CPUs (the default backend) with an artificial dependency on the number `earlier`."""
  if jax.default_backend() != "cpu":
    return x
  # The condition never holds, but XLA does not know that.
  return jnp.where((earlier > 1) & (earlier < -1), 0, x)


@custom_vjp
def in_order(inputs, out):
  """The identity; the backward pass uses d out only after the gradients of `inputs` are computed.

  On all platforms the compiler then allocates the levels of a tree one after the other.
  """
  return jax.lax.optimization_barrier((inputs, out))


def _in_order_backward(_, gradients):
  d_inputs, d_out = jax.lax.optimization_barrier(gradients)
  last: Any = sum(d.ravel()[0] for d in d_inputs)
  return d_inputs, run_after(d_out, last)


in_order.defvjp(lambda inputs, out: (in_order(inputs, out), None), _in_order_backward)


@custom_vjp
def run_after_forward(out):
  """The identity; no FFT of the backward pass starts before `out` is computed."""
  return out


run_after_forward.defvjp(
  lambda out: (out, out.ravel()[0]), lambda number, d_out: (run_after(d_out, number),)
)
