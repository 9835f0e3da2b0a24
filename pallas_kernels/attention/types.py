"""Arguments of the attention kernels."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.dropout import Dropout
from pallas_kernels.core.wgmma import Backend

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # a maximum of no logits, finite: differences of infinite ones would be NaN


@dataclasses.dataclass(frozen=True)
class Logits:
  """Logits in base 2: log2(e) times scale times the products, within +- log2(e) `soft_cap`.

  Of the weights that they become, `dropout` says which share is dropped.
  """

  scale: float
  soft_cap: float | None = None
  dropout: float = 0.0

  def of(self, products: jax.Array) -> tuple[jax.Array, float]:
    """(x, c) with logits c x and c > 0, and x made from the products in few steps."""
    if self.soft_cap is not None:
      return jnp.tanh(products * (self.scale / self.soft_cap)), self.soft_cap * LOG2_E
    if self.scale > 0:
      return products, self.scale * LOG2_E
    return products * (self.scale * LOG2_E), 1.0

  def slope(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
    """`gradient` of scale * products within the cap, from that of the capped ones."""
    return gradient if self.soft_cap is None else gradient * (1.0 - x * x)


class Range(NamedTuple):
  """The tokens [first, end) of the other side that a token sees. Neither decreases with the token.

  So those that some token of a tile sees begin with the first of its first one and end with the end
  of its last one; those that all of them see begin with the first of the last and end with the end
  of the first.
  """

  first: Any  # None: the token's own number
  end: Any  # None: the number after its own


class Ranges(NamedTuple):
  """Who sees whom. Neither number of a range decreases from token to token."""

  seen: Range  # [B, T] int32: the keys that each query sees
  seen_by: Range  # [B, S] int32: the queries that see each key
  dropout: Dropout | None = None  # which weights are dropped; None: none


class Outputs(NamedTuple):
  """Results of the kernel for outputs."""

  out: Any  # [B, T, H, V] bfloat16
  log_sum: Any  # [B, H, T] float32: the logarithm in base 2 of the softmax's denominator


class Options(NamedTuple):
  """Static arguments."""

  logits: Logits
  config: Any  # a `Config`, or an `AmpereConfig`, for the kernels of that architecture
  interpret: Any = None
  architecture: str | None = None  # the folder of the kernels; None: that of the device

  @property
  def backend(self) -> Backend:
    """Compiled or interpreted."""
    return Backend(self.interpret)
