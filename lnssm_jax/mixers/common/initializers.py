"""Initial values. The LNSSM and RWKV share those that depend on depth and channel.

`layer` counts from 0 and may be a traced scalar, so that one `vmap` initializes all layers. Two
measures of depth occur: r = layer / (num_layers - 1), which reaches 1 in the last layer, and rho =
1 - layer / num_layers.
"""

import math

import jax
import jax.numpy as jnp


def channel_decay(
  dim: int, *, layer, num_layers: int, lowest: float = -5.0, span: float = 8.0
) -> jax.Array:
  """w [dim] float32 of a decay exp(-exp(w)): low channels decay slowly, high ones at once.

      w_i = lowest + span * (i / (dim - 1))^(0.7 + 1.3 r)

  The defaults give decays from 0.9933 (channel 0) to 1.9e-9 (the last channel).
  Sources: the LNSSM's and RWKV-4's published code.
  """
  depth = jnp.asarray(layer, jnp.float32) / max(num_layers - 1, 1)
  return lowest + span * jnp.linspace(0.0, 1.0, dim, dtype=jnp.float32) ** (0.7 + 1.3 * depth)


def shift_weight(
  dim: int, *, layer, num_layers: int, power: float = 1.0, offset: float = 0.0
) -> jax.Array:
  """mu [dim] float32, the weight of the current token in a token shift.

      mu_i = (i / dim)^(power * rho) + offset * r

  Sources: the LNSSM's and RWKV-4's published code.
  """
  layer = jnp.asarray(layer, jnp.float32)
  exponent = power * (1.0 - layer / num_layers)
  depth = layer / max(num_layers - 1, 1)
  return (jnp.arange(dim, dtype=jnp.float32) / dim) ** exponent + offset * depth


def zigzag_bonus(dim: int, *, layer, num_layers: int, zigzag: float = 0.1) -> jax.Array:
  """u [dim] float32, RWKV-5's weight of the current token, which differs between neighbors.

      u_i = r (1 - i / (dim - 1)) + zigzag ((i + 1) mod 3 - 1)

  Source: RWKV-5's published code.
  """
  depth = jnp.asarray(layer, jnp.float32) / max(num_layers - 1, 1)
  sides = (jnp.arange(dim) + 1) % 3 - 1.0
  return depth * (1 - jnp.linspace(0.0, 1.0, dim, dtype=jnp.float32)) + zigzag * sides


def orthogonal(gain: float):
  """Initializer: `gain` times a random matrix with orthonormal rows or columns, the fewer of them.

  It is the Q of A = Q R for a normal A, with R's diagonal positive. For a tall A, such as an
  embedding, R is the Cholesky factor of A^T A: two matrix products instead of Householder steps,
  and as accurate, because a tall normal matrix is well conditioned (its condition number is about
  3 where it is 4 times as tall as wide). Computed in float32 whatever `dtype` is.
  """

  def init(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    short, tall = sorted(shape)
    a = jax.random.normal(key, (tall, short), jnp.float32)
    if tall >= 4 * short:
      gram = jnp.matmul(a.T, a, precision="highest")
      lower = jnp.linalg.cholesky(gram)
      inverse = jax.scipy.linalg.solve_triangular(lower, jnp.eye(short), lower=True)
      q = jnp.matmul(a, inverse.T, precision="highest")
    else:
      q, r = jnp.linalg.qr(a)
      q = q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)
    return (gain * (q if shape[0] == tall else q.T)).astype(dtype)

  return init


def uniform_fan_in(fan_in: int, *, gain: float = 1.0):
  """Initializer: uniform between -b and b, b = gain / sqrt(fan_in)."""
  bound = gain / math.sqrt(fan_in)

  def init(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

  return init


def xavier_uniform(gain: float):
  """Initializer: uniform between -b and b, b = gain * sqrt(6 / (inputs + outputs))."""

  def init(key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    bound = gain * math.sqrt(6 / sum(shape))
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)

  return init


def decay_rate(
  key: jax.Array, shape: tuple[int, ...], dtype=jnp.float32, *, lowest: float = 0.0
) -> jax.Array:
  """Initializer: log(r), r uniform between `lowest` and 16.

  A rate of 0, which the distribution of the published code contains, has no logarithm: r >= 1e-4.
  Sources: Gated DeltaNet's published code, and that of Kimi Delta Attention with lowest=1.
  """
  rate = jax.random.uniform(key, shape, jnp.float32, lowest, 16.0)
  return jnp.log(jnp.maximum(rate, 1e-4)).astype(dtype)


def step_size_bias(
  key: jax.Array,
  shape: tuple[int, ...],
  dtype=jnp.float32,
  *,
  lowest: float = 1e-3,
  highest: float = 0.1,
  floor: float = 1e-4,
) -> jax.Array:
  """Initializer: b with softplus(b) log-uniform between `lowest` and `highest`.

  Source: Mamba (Gu and Dao 2023), section 3.6 and its published code.
  """
  log_step = jax.random.uniform(key, shape, jnp.float32, math.log(lowest), math.log(highest))
  step = jnp.maximum(jnp.exp(log_step), floor)
  return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)
