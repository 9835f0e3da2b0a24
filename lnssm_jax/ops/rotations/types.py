"""Types of `rotations`: its arguments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 16  # tokens, or all of a shorter sequence


class Inputs(NamedTuple):
  """The arguments of every implementation; T tokens in L chunks."""

  keys: jax.Array  # [B, T, R, G, N]
  queries: jax.Array  # [B, T, R, G, N]
  key_offset: jax.Array  # [H, R, N]
  query_offset: jax.Array  # [H, R, N]
  pace: jax.Array  # [B, T, A], float32 at least, as all that follow
  step: jax.Array  # [B, T, H]
  weight: jax.Array  # [B, T, H]
  entering: jax.Array  # [B, L, H, A], the angles before each chunk
  keep: jax.Array  # [B, T], 0 where a document begins that is not a row's first, else 1

  AXES = {  # noqa: RUF012
    "keys": "BTRGN",
    "queries": "BTRGN",
    "key_offset": "HRN",
    "query_offset": "HRN",
    "pace": "BTA",
    "step": "BTH",
    "weight": "BTH",
    "entering": "BLHA",
    "keep": "BT",
  }
  RESULTS = ("BTHRN", "BTHRN")


class Options(NamedTuple):
  """Static arguments."""

  dtype: jnp.dtype  # of the results
