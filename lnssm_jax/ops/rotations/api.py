"""`rotations`: dispatch. Only mixers call it, whose arguments are checked."""

import jax
import jax.numpy as jnp

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.rotations.reference import reference
from lnssm_jax.ops.rotations.types import Inputs, Options, with_whole_chunks

IMPLEMENTATIONS = dispatch.Kernels(f"{__package__}.pallas", Inputs.RESULTS).with_forms(
  reference=reference
)


def rotations(
  inputs: Inputs, *, dtype, implementation: ty.Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
  """Keys and queries of all heads, made of shared ones and rotated by running angles.

      angle_t = keep_t angle_{t-1} + step_t pace_t        per head and pair of channels (i, i + A)
      k_t = weight_t R(angle_t) (key_t + key_offset)      q_t = R(angle_t) (query_t + query_offset)

  A token has R keys for all heads, or for those of each of G groups. Angles, sines and sums are
  float32 at least; results are rounded once.

  Args:
    inputs: `entering` are the angles before each chunk, so that chunks are independent.
    dtype: of the results.
    implementation: "pallas", "reference", "pallas_interpret"; None takes "pallas" where it is
      supported and preferred, otherwise "reference".

  Returns:
    Keys and queries [B, T, R, H, N].

  Raises:
    ValueError, NotImplementedError: as `dispatch.run`.

  Source: Mamba-3 (Lahoti et al. 2026), whose state rotates instead of keys and queries.
  """
  options, how = Options(jnp.dtype(dtype)), {"implementation": implementation}
  found = dispatch.run("rotations", IMPLEMENTATIONS, with_whole_chunks(inputs), options, **how)
  return tuple(x[:, : inputs.keys.shape[1]] for x in found)
