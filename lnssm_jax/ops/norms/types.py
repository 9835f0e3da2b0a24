"""Types of `normalize`: its arguments once they are checked."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
  """The arguments in the form that every implementation takes."""

  x: jax.Array  # [..., D]
  added: jax.Array | None  # [..., D]
  scale: jax.Array | None  # [D], or [H, D] for x [..., H, D]
  bias: jax.Array | None  # likewise
  gate: jax.Array | None  # [..., D]

  @property
  def AXES(self) -> dict[str, str]:
    """Axes of the fields: D is a norm's and never sharded, so it has the letter of a head's V."""
    rows = ROW_AXES.get(self.x.ndim, "")
    axes = lambda z: "V" if z is None else rows[-z.ndim :]
    scale, bias = axes(self.scale), axes(self.bias)
    return {"x": rows, "added": rows, "scale": scale, "bias": bias, "gate": rows}


ROW_AXES = {2: "BV", 3: "BTV", 4: "BTHV"}  # of x, by its rank


class Options(NamedTuple):
  """Static arguments."""

  center: bool
  eps: float
  floor: float | None
  factor: float
  gate_first: bool
  dtype: jnp.dtype  # of y
