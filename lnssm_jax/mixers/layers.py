"""Small layers that several mixers share. Pure functions, axis letters as in `lnssm_jax.ops`."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.ops.checks import accumulation_dtype, first_of_segment
from lnssm_jax.ops.sequence_parallel import inputs_before, of_last


def linear_parts(layer: nnx.Linear, x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
  """The outputs of a linear layer without bias, cut into parts of these widths.

  Each part is a product of its own: a kernel reads whole arrays, and to cut one out of a larger
  product would copy it. A single step makes one product: there the weights would be copied.
  """
  borders = list(itertools.accumulate(widths))[:-1]
  if x.shape[1] == 1:
    return jnp.split(layer(x), borders, axis=-1)
  x, kernel = (y.astype(layer.dtype) for y in (x, layer.kernel[...]))
  return [x @ part for part in jnp.split(kernel, borders, axis=-1)]


def token_shift(
  x: jax.Array,  # [B, T, D]
  previous: jax.Array | None = None,  # [B, D]
  segment_ids: jax.Array | None = None,  # [B, T] integer
  *,
  axis_name: str | None = None,
) -> jax.Array:
  """x of the step before, [B, T, D] in the dtype of x.

  Before the first step stands `previous` (zeros if None). At the first step of every later segment
  stands zero, not the last token of the segment before. With `axis_name`, x is one device's part of
  a sequence whose steps are divided over that mesh axis.
  """
  if axis_name is not None:
    first = None if previous is None else previous[:, None]
    previous = inputs_before(x, 1, first, segment_ids, axis_name=axis_name)[:, 0]
  if previous is None:
    previous = jnp.zeros_like(x[:, 0])
  shifted = jnp.concatenate([previous.astype(x.dtype)[:, None], x[:, :-1]], axis=1)
  if segment_ids is None:
    return shifted
  starts = first_of_segment(jnp.asarray(segment_ids))
  return jnp.where(starts[..., None], jnp.zeros_like(shifted), shifted)


def last_input(x: jax.Array, axis_name: str | None) -> jax.Array:
  """x [B, T, D] of the last step, [B, D], in float32 at least.

  With `axis_name`, the last step of the sequence that is divided over that mesh axis.
  """
  last = wide(x[:, -1])
  return last if axis_name is None else of_last(last, axis_name=axis_name)


def interpolate(x: jax.Array, shifted: jax.Array, mu: jax.Array) -> jax.Array:
  """mu * x + (1 - mu) * shifted, with mu [D], in float32 at least: the caller rounds it, once."""
  acc = accumulation_dtype(x)
  mu = mu.astype(acc)
  return mu * x.astype(acc) + (1 - mu) * shifted.astype(acc)


def rms_norm(x: jax.Array, gain: jax.Array, *, eps: float, floor: float = 0.0) -> jax.Array:
  """gain * x / (max(rms(x), floor) + eps), rms over the last axis; in float32 at least.

  With a positive `floor` the gradient exists everywhere. The maximum is taken under the root: the
  derivative of sqrt(mean(x^2)) itself is 0 / 0 at x = 0.
  """
  x = x.astype(accumulation_dtype(x))
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return gain.astype(x.dtype) * (x / (jnp.sqrt(jnp.maximum(mean_square, floor**2)) + eps))


def smooth_rms_norm(x: jax.Array, gain: jax.Array | None = None, *, eps: float = 1e-5) -> jax.Array:
  """gain * x / sqrt(mean(x^2) + eps) over the last axis; in float32 at least.

  Its gradient exists everywhere, and is at most about 1 / sqrt(eps).
  """
  x = x.astype(accumulation_dtype(x))
  x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
  return x if gain is None else gain.astype(x.dtype) * x


def group_norm(x: jax.Array, *, eps: float = 1e-5) -> jax.Array:
  """(x - mean) / sqrt(variance + eps) over the last axis; in float32 at least."""
  x = x.astype(accumulation_dtype(x))
  x = x - jnp.mean(x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def layer_norm(x: jax.Array, gain: jax.Array, bias: jax.Array) -> jax.Array:
  """gain * (x - mean) / sqrt(variance + 1e-5) + bias over the last axis; in float32 at least."""
  return group_norm(x) * wide(gain) + wide(bias)


def unit_norm(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
  """x / sqrt(sum(x^2) + eps) over the last axis, of length at most 1; in float32 at least."""
  x = x.astype(accumulation_dtype(x))
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + eps)


def wide(x: jax.Array) -> jax.Array:
  """x in the dtype of states, decays and sums: float32, or float64 if x is."""
  return x.astype(accumulation_dtype(x))


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
  """x Phi(x), Phi the normal distribution function, by erf. x: any shape and float dtype, as is y.

  Its derivative, in float32 at least and rounded once, is written out because jax 0.12 cannot make
  that of erf inside `jax.shard_map`. Source: GELU (Hendrycks and Gimpel 2016), section 2.
  """
  return jax.nn.gelu(x, approximate=False)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  acc = wide(x)
  density = jnp.exp(-0.5 * acc * acc) / math.sqrt(2 * math.pi)
  slope = 0.5 * jax.lax.erfc(-acc * math.sqrt(0.5)) + acc * density
  return exact_gelu(x), slope.astype(x.dtype) * dx


def silu_gate(y: jax.Array, gate: jax.Array) -> jax.Array:
  """y * silu(gate), in float32 at least: the caller rounds it, once."""
  acc = accumulation_dtype(y, gate)
  return y.astype(acc) * jax.nn.silu(gate.astype(acc))


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
  """[B, T, D] -> [B, T, H, D / H]."""
  return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)


def merge_heads(x: jax.Array) -> jax.Array:
  """[B, T, H, K] -> [B, T, H K]."""
  return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def linear(
  inputs: int, outputs: int, kernel_init, *, dtype, param_dtype, rngs: nnx.Rngs
) -> nnx.Linear:
  """W x without bias. Biases in float32 are the caller's own parameters."""
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=False,
    kernel_init=kernel_init,
    dtype=dtype,
    param_dtype=param_dtype,
    rngs=rngs,
  )
