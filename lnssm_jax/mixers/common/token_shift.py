"""Token shift: each token is interpolated with the one before it."""

from collections.abc import Sequence

import jax
from flax import nnx

from lnssm_jax.ops import ConvState, token_shift
from lnssm_jax.ops.core.halo import of_last
from lnssm_jax.ops.core.precision import wide


def last_input(x: jax.Array, axis_name: str | None) -> jax.Array:
  """Returns the last token of x [B, T, D], [B, D] in float32 at least.

  With `axis_name`, that of the whole sequence, which is sharded over this mesh axis.
  """
  last = wide(x[:, -1])
  return last if axis_name is None else of_last(last, axis_name=axis_name)


def interpolated(
  x: jax.Array,  # [B, T, D]
  weights: Sequence[nnx.Param | jax.Array],  # [D] each
  previous: jax.Array | None,  # [B, D]
  segment_ids: jax.Array | None,  # [B, T] integer
  *,
  offsets: jax.Array | None = None,  # [B, T, S D]
  axis_name: str | None,
  dtype,
) -> tuple[jax.Array, ...]:
  """Returns mu * x + (1 - mu) * (the token before) for each mu of `weights`, [B, T, D] in `dtype`.

  Before the first token stands `previous` (zeros if None); before the first of every later segment,
  zeros. `offsets` are subtracted from mu. With `axis_name`, x is one device's shard of a sequence
  over that mesh axis.
  """
  state = None if previous is None else ConvState(previous[:, None])
  mus = [mu[...] for mu in weights]
  options = {"initial_state": state, "segment_ids": segment_ids, "axis_name": axis_name}
  return token_shift(x, mus, offsets=offsets, dtype=dtype, **options)[0]
