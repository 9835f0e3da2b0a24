"""Dropout whose masks are functions of a key, the row, the token and the channel alone.

Every mask is `fold` of a key and counters, element by element. So it does not depend on how arrays
are sharded, on the microbatch that a row is in, or on the order of computation, and the backward
pass may compute it again. Keys are key data of Threefry, uint32 [..., 2].
"""

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.sequence_parallel import place


def check_rate(name: str, rate: float) -> float:
  """Returns a rate of dropout; raises `ValueError` unless it is a number in [0, 1)."""
  if not is_number(rate) or not 0 <= rate < 1:
    raise ValueError(
      f"{name}={rate!r} is the probability of dropping a value: it must be a number of at least 0 "
      "and below 1, such as 0.1; 0 drops nothing."
    )
  return float(rate)


def row_keys(name: str, key: jax.Array, rows: int) -> jax.Array:
  """One key for each row of a batch, [B, 2] uint32.

  Args:
    name: the caller's, for messages.
    key: a key (`jax.random.key(0)`), from which the rows' are derived by their number; or one for
      each row, [B]. Also as key data, [2] or [B, 2] uint32.

  Raises:
    ValueError: it is neither.
  """
  key = jnp.asarray(key)
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    key = jax.random.key_data(key)[..., :2]
  if key.dtype == jnp.uint32 and key.shape == (rows, 2):
    return key
  if key.dtype == jnp.uint32 and key.shape == (2,):
    return fold(key, jnp.arange(rows))
  raise ValueError(
    f"{name}: dropout_key has dtype {key.dtype} and shape {key.shape}; give jax.random.key(seed), "
    f"or one key for each of the {rows} rows: jax.random.split(key, {rows})."
  )


def token_keys(rows: jax.Array, length: int, axis_name: str | None = None) -> jax.Array:
  """One key for each token, [B, T, 2], of its row's key [B, 2] and its number in the sequence.

  `length` is T, on a sequence sharded over `axis_name` that of the shard.
  """
  first = 0 if axis_name is None else place(axis_name)[0] * length
  return fold(rows[:, None], first + jnp.arange(length))


def fold(keys: jax.Array, numbers: jax.Array | int) -> jax.Array:
  """New keys [..., 2] of keys [..., 2] and integers [...], which are broadcast."""
  shape = jnp.broadcast_shapes(keys.shape[:-1], jnp.shape(numbers))
  keys, numbers = jnp.broadcast_to(keys, (*shape, 2)), jnp.broadcast_to(numbers, shape)

  def one(key, number):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, number))

  for _ in shape:
    one = jax.vmap(one)
  return one(keys, numbers)


def multipliers(
  keys: jax.Array, numbers: jax.Array | int, rate: float | jax.Array, dtype=jnp.float32
) -> jax.Array:
  """0 with probability `rate`, else 1 / (1 - rate): [...] of keys [..., 2] and integers [...]."""
  uniform = (fold(keys, numbers)[..., 0] >> 8).astype(jnp.float32) * 2.0**-24
  return jnp.where(uniform >= rate, 1 / (1 - jnp.asarray(rate, dtype)), 0).astype(dtype)


def dropout(x: jax.Array, keys: jax.Array, rate: float) -> jax.Array:
  """x [B, T, D] times `multipliers`, each value its own; keys [B, T, 2]. In the dtype of x."""
  if rate == 0:
    return x
  y = wide(x)
  return (y * multipliers(keys[:, :, None], jnp.arange(x.shape[-1]), rate, y.dtype)).astype(x.dtype)


def drop_rows(x: jax.Array, keys: jax.Array, rate: float | jax.Array) -> jax.Array:
  """x [B, T, D] times `multipliers`, one for each row; keys [B, 2]. In the dtype of x."""
  y = wide(x)
  return (y * multipliers(keys, 0, rate, y.dtype)[:, None, None]).astype(x.dtype)
