"""The recurrence of Longhorn: gains and decays that need no exponential.

With n = ||k||^2, r_i the sum of the squares of the other entries and w = 1 / (1 + beta n), the gain
is beta w and the decay of entry i is w + gain r_i. `key_norm` (n) and `other_squares` (r) are
inputs of their own, and so are their gradients: how they follow from k is not the kernel's matter.

Backward, with M the product of the state and its cotangent: to float32 as the README of the op has
it, without a difference that loses digits. To bfloat16 the decay is taken as 1 - gain k_i^2, which
does not depend on r, so that there is less to sum over the channels:

    dk_i = sum_d (adjoint_i gain x - 2 k_i gain M_i)
    dn = -sum_d gain^2 (x (adjoint k) - M k^2)
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.channel_states.recurrence import (
  Decay,
  Gates,
  Inputs,
  KeyGradients,
  Keys,
  TokenGradients,
)


@dataclasses.dataclass(frozen=True)
class LonghornScan:
  """`Recurrence` of the Longhorn scan; see there for the methods.

  `exact` is needed as well where a channel's states are cut into groups: otherwise the gradient by
  way of the norm takes the states at hand for all.
  """

  exact: bool = False
  name = "longhorn_scan"
  min_splits = 8

  @property
  def num_sums(self) -> int:
    """Those of the gradients of q and k, and with `exact` of other_squares and key_norm."""
    return 4 if self.exact else 2

  def prepare(self, inputs: Inputs) -> Inputs:
    return inputs

  def slope(self, rate):
    """Of the sigmoid."""
    return rate * (1 - rate)

  def split_decay(self, inputs, first, run):
    """The last state of a scan from 1 that writes nothing; `run` resets it at boundaries."""
    del first
    # Derived from inputs: inside `shard_map` it must vary over the same mesh axes.
    like = inputs.x[:, 0, :, None] + inputs.write_key[:, 0, None, :]
    ones = jnp.ones_like(like, jnp.float32)
    return run(inputs._replace(x=jnp.zeros_like(inputs.x), initial=ones))

  def load_keys(self, tiles, streams_smem, t) -> Keys:
    load = lambda ref: tiles.load_states(ref.at[t])
    write, read = load(streams_smem.write_key), load(streams_smem.read_key)
    return Keys(write, read, load(streams_smem.other_squares), write * write)

  def complete_keys(self, tiles, keys):
    """Computes norm and sums of other squares.

    The sum of the other squares is needed where an entry is more than half of the norm, so that of
    the largest will do for all; entries as large as that are among its others.
    """
    squares = keys.write * keys.write
    ones = jnp.ones_like(squares)
    norm = tiles.dot(squares, ones)
    largest = jnp.max(squares, axis=1)
    at_top = squares >= tiles.broadcast_channels(largest)
    ties = tiles.dot(jnp.where(at_top, 1.0, 0.0), ones) - 1.0
    others = tiles.dot(jnp.where(at_top, 0.0, squares), ones) + ties * largest
    return keys._replace(squares=squares, other_squares=tiles.broadcast_channels(others)), norm

  def gates(self, x, rate, norm) -> Gates:
    whole = 1.0 + rate * norm
    if self.exact:
      inverse = 1.0 / whole
    else:  # without the division's care for numbers that `whole` cannot be
      root = lax.rsqrt(whole)
      inverse = root * root
    gain = rate * inverse
    return Gates(write=gain * x, rate=gain, inverse=inverse)

  def decay(self, tiles, gates, a, keys) -> Decay:
    gain = tiles.broadcast_channels(gates.rate)
    factor = tiles.broadcast_channels(gates.inverse) + gain * keys.other_squares
    if not self.exact:
      return Decay(factor)
    loss = gain * keys.squares
    return Decay(factor, loss, loss > 0.5)

  def token_gradients(self, tiles, gates, a, keys, x, along, adjoint, passed, state):
    both = adjoint * state
    gain, inverse = gates.rate, gates.inverse
    wide = tiles.broadcast_channels
    d_gain = x * along - tiles.dot(both, keys.squares)
    written = adjoint * wide(gates.write)
    if self.exact:
      # gain a M = gain w M + r gain^2 M
      own = wide(gain * inverse) * both
      sums = [written, own, wide(gain * gain) * both, gain * gates.write * along]
    else:
      sums = [written, wide(gain) * both, gain * gain * d_gain]
    return TokenGradients(x=gain * along, rate=inverse * inverse * d_gain, sums=sums)

  def key_sums(self, tiles, keys, sums):
    query, written, own, *rest = sums
    if self.exact:
      others, norm = rest
      own = own + keys.other_squares * others
      return query, written - (2.0 * keys.write) * own, others, tiles.broadcast_channels(norm)
    # The gradient by way of the norm, which every entry of k changes alike, is added here.
    own = own + tiles.broadcast_channels(rest[0])
    return query, written - (2.0 * keys.write) * own

  def key_gradients(self, sums: jax.Array, inputs: Inputs) -> KeyGradients:
    d_q, d_k = sums[:, :, 0], sums[:, :, 1]
    if not self.exact:
      return KeyGradients(d_k, d_q, jnp.zeros_like(d_k), jnp.zeros_like(d_k[..., 0]))
    k = inputs.write_key.astype(jnp.float32)
    return KeyGradients(d_k, d_q, sums[:, :, 2] * (k * k), -sums[:, :, 3, 0])
