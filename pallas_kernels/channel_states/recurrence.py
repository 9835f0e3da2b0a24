"""Interface between the kernels of this folder and the recurrences that they run.

A recurrence with N states per channel, decayed by a factor per token, channel and state:

    h_t = decay_t h_{t-1} + write_t write_key_t        out_t = sum_n h_t read_key_t + skip x_t

`selective.py` (S6) and `longhorn.py` say how decay and write follow from the token's inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.channel_states.tiles import StateTiles


class Inputs(NamedTuple):
  """Arrays of a scan. T is a multiple of `CHUNK`, D of `CHANNELS`, N of `STATE_WIDTHS`."""

  x: jax.Array  # [B, T, D]
  rate: Any  # [B, T, D], dt or beta; None of a gradient by `rate_logits`
  write_key: jax.Array  # [B, T, N], b or k
  read_key: jax.Array  # [B, T, N], c or q
  skip: jax.Array  # [D] float32
  initial: jax.Array  # [B, D, N] float32
  a: Any = None  # [D, N] float32, of S6
  other_squares: Any = None  # [B, T, N], of Longhorn: the sum of the other k_j^2
  key_norm: Any = None  # [B, T], of Longhorn: ||k||^2
  # Where `rate` is the recurrence's activation of rate_logits + rate_bias. The kernels read `rate`
  # alone; the gradients are those by these two, so that none by `rate` is written.
  rate_logits: Any = None  # [B, T, D]
  rate_bias: Any = None  # [D] float32


class KeyGradients(NamedTuple):
  """Gradients of the arrays without channels, float32."""

  write_key: jax.Array
  read_key: jax.Array
  other_squares: jax.Array | None = None
  key_norm: jax.Array | None = None


class Keys(NamedTuple):
  """A token's keys in registers: tiles, equal along channels."""

  write: Any
  read: Any
  other_squares: Any = None
  squares: Any = None  # of `write`


class Gates(NamedTuple):
  """Vectors of channels of one token."""

  write: Any  # what is written along the write key
  rate: Any  # the factor of x in it
  inverse: Any = None  # of Longhorn: 1 / (1 + beta ||k||^2)


class Decay(NamedTuple):
  """Decay factors of one token, a tile.

  With `loss` they are exact to the last digit of float32: 1 - factor would lose digits near 1.
  """

  factor: Any
  loss: Any = None  # 1 - factor, computed without that difference
  is_strong: Any = None  # where the product with `factor` has all digits

  def apply(self, state):
    """The decayed state, or cotangent of a state."""
    if self.loss is None:
      return self.factor * state
    return jnp.where(self.is_strong, self.factor * state, state - self.loss * state)

  def update(self, state, added):
    """The decayed state plus `added`."""
    if self.loss is None:
      return self.factor * state + added
    # Long sums of small changes: each change is rounded once, as it is added.
    weak = state + (added - self.loss * state)
    return jnp.where(self.is_strong, self.factor * state + added, weak)


class TokenGradients(NamedTuple):
  """One tile's contribution of a token to the gradients."""

  x: Any  # a vector of channels, without the skip's part
  rate: Any  # a vector of channels
  sums: list  # tiles that are summed over channels, without that of the read key
  a: Any = None  # a tile


class Recurrence(Protocol):
  """The operations in which the two scans differ; tiles and vectors are registers."""

  name: str
  min_splits: int  # a sequence is split into this many at least: splitting costs passes

  @property
  def exact(self) -> bool:
    """Whether decays are exact to the last digit of float32, for inputs that have as many."""
    ...

  @property
  def num_sums(self) -> int:
    """The number of arrays [N] per token that the backward pass sums over channels."""
    ...

  def prepare(self, inputs: Inputs) -> Inputs:
    """The arrays as the kernels read them."""
    ...

  def slope(self, rate) -> Any:
    """The derivative of the activation that makes rates, where it has made this one."""
    ...

  def split_decay(self, inputs: Inputs, first: jax.Array | None, run) -> jax.Array:
    """[B, D, N]: the factor by which all tokens together decay a state.

    `run(inputs)` returns the last state of a scan; `first` as for `forward.scan`.
    """
    ...

  def load_keys(self, tiles: StateTiles, streams_smem, t) -> Keys:
    """The keys of token t of a chunk."""
    ...

  def complete_keys(self, tiles: StateTiles, keys: Keys) -> tuple[Keys, Any]:
    """(keys, norm) of a single token, of which only `write` and `read` are there."""
    ...

  def gates(self, x, rate, norm) -> Gates:
    """The values that all states of a channel share."""
    ...

  def decay(self, tiles: StateTiles, gates: Gates, a, keys: Keys) -> Decay:
    """The decay of each state at one token."""
    ...

  def token_gradients(
    self, tiles: StateTiles, gates: Gates, a, keys: Keys, x, along, adjoint, passed, state
  ) -> TokenGradients:
    """Gradients of one token.

    Args:
      along: the sum over states of adjoint * write key, a vector of channels.
      adjoint: the cotangent of the state after the token, a tile.
      passed: the same, decayed.
      state: the state before the token.
    """
    ...

  def key_sums(self, tiles: StateTiles, keys: Keys, sums: list) -> Sequence[Any]:
    """Tiles that a CTA sums over channels, from d_out * state and `TokenGradients.sums`."""
    ...

  def key_gradients(self, sums: jax.Array, inputs: Inputs) -> KeyGradients:
    """Gradients from the sums [B, T, num_sums, N] over all channels."""
    ...
