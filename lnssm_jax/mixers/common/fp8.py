r"""Products of projections in FP8, current scaling: `matmul="fp8"` of a model.

    y = (x / s_x)_e4m3 (W / s_W)_e4m3 * s_x s_W
    dx = (g / s_g)_e5m2 (W / s_W)_e4m3^T * s_g s_W
    dW = (x / s_x)_e4m3^T (g / s_g)_e5m2 * s_x s_g

Each array has one scale, the least power of two with which its largest modulus is a number of the
format: scaling rounds nothing, and an array that is a part of another is rounded alike but for its
smallest numbers. There is no state: parameters and checkpoints are those of other products. XLA
makes the products: on GPUs with FP8 tensor cores by cuBLAS, scales included. On a CPU they are
emulated, with the same rounding and no gain.

Source: formats, Micikevicius et al. 2022, "FP8 formats for deep learning".
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.spmd import vary_alike
from pallas_kernels.core import device
from pallas_kernels.core.gradients import custom_vjp

VALUES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2
LEAST = 256  # inputs and outputs of a product; narrower ones gain nothing, such as those of decays
MULTIPLE = 16  # of cuBLAS
_LEAST_SCALE = -60  # log2: two of them multiplied are a normal float32


def use(module: nnx.Module) -> None:
  """Has the linear layers below `module` multiply in FP8, but those with few inputs or outputs.

  Raises:
    ValueError: the default device is a GPU without FP8.
  """
  if (reason := unsupported()) is not None:
    raise ValueError(f"matmul='fp8': {reason}; use matmul='dtype'.")
  for _, layer in nnx.iter_modules(module):
    if isinstance(layer, nnx.Linear):
      layer.dot_general = dot_general


def unsupported() -> str | None:
  """Why the default device would be slower with FP8, or None; a CPU emulates it."""
  gpu = device.default_device()
  found = getattr(gpu, "compute_capability", None)
  if gpu.platform == "cpu" or (found and tuple(map(int, found.split("."))) >= (8, 9)):
    return None
  name = f"{gpu.device_kind} (compute capability {found or 'unknown'})"
  return f"FP8 needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or more, not {name}"


def dot_general(x, kernel, dimension_numbers, precision=None, out_sharding=None):
  """`jax.lax.dot_general` of [..., D] with a kernel [D, ...], in FP8 if it is wide enough."""
  inputs, outputs = kernel.shape[0], kernel.size // kernel.shape[0]
  if min(inputs, outputs) < LEAST or inputs % MULTIPLE or outputs % MULTIPLE:
    options = {"precision": precision, "out_sharding": out_sharding}
    return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
  rows, columns = x.reshape(-1, inputs), kernel.reshape(inputs, outputs)
  return product(*vary_alike((rows, columns))).reshape(*x.shape[:-1], *kernel.shape[1:])


@custom_vjp
def product(x, kernel):
  """x W of x [N, D] and W [D, F], in the dtype of x."""
  return _product(x, kernel)[0]


def _product(x, kernel):
  scaled = _scaled(x, VALUES), _scaled(kernel, VALUES)
  # Kept as bytes: a policy of `jax.checkpoint` would round what it keeps to an e4m3 with infinity,
  # which has no number beyond 240.
  kept = [(jax.lax.bitcast_convert_type(values, jnp.uint8), scale) for values, scale in scaled]
  return _multiplied(*scaled, (1, 0), x.dtype), kept


def _gradients(kept, g):
  x, kernel = ((jax.lax.bitcast_convert_type(x, VALUES), scale) for x, scale in kept)
  dtype, g = g.dtype, _scaled(g, GRADIENTS)
  precise = functools.partial(_multiplied, dtype=dtype, precision=jax.lax.Precision.HIGHEST)
  return precise(g, kernel, (1, 1)), precise(x, g, (0, 0))


product.defvjp(_product, _gradients)


def _multiplied(a, b, axes, dtype, precision=None):
  """The product of two scaled arrays along one axis of each; float32 sums if so precise."""
  (a, of_a), (b, of_b) = a, b
  dims = (axes[:1], axes[1:]), ((), ())
  y = jax.lax.dot_general(a, b, dims, precision, preferred_element_type=dtype)
  return y * (of_a * of_b).astype(dtype)  # after the product: XLA makes both one call of cuBLAS


def _scaled(x, dtype):
  """(x / scale in `dtype`, the scale, a power of two)."""
  # Kept apart, XLA writes x in the pass that finds its largest modulus; else it computes x twice.
  x, largest = jax.lax.optimization_barrier((x, wide(jnp.max(jnp.abs(x)))))
  exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))[1]
  exponent = jnp.maximum(exponent, _LEAST_SCALE)
  of = lambda exponent: jnp.ldexp(jnp.ones((), largest.dtype), exponent)
  return (wide(x) * of(-exponent)).astype(dtype), of(exponent)
