"""The recurrence of S6: decay exp(dt a), write dt x; dt may be a softplus."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.channel_states.recurrence import (
  Decay,
  Gates,
  Inputs,
  KeyGradients,
  Keys,
  TokenGradients,
)
from pallas_kernels.core import boundaries

_LOG2_E = 1.4426950408889634
# Below it dt stands for 1 - exp(-dt), with a relative error of at most 2^-11: an eighth of that of
# rounding to bfloat16, and only gradients by bfloat16 logits take `slope`. Above it the difference
# has as many digits.
_SMALL_RATE = 2.0**-10


@dataclasses.dataclass(frozen=True)
class SelectiveScan:
  """`Recurrence` of the selective scan; see there for the methods."""

  exact: bool = False
  name = "selective_scan"
  min_splits = 4
  num_sums = 2  # of the gradients of c and b

  def prepare(self, inputs: Inputs) -> Inputs:
    """`a` in units of log2, but for `exact`."""
    return inputs if self.exact else inputs._replace(a=inputs.a * _LOG2_E)

  def slope(self, rate):
    """Of the softplus: 1 - exp(-dt), to 11 bits."""
    return jnp.where(rate < _SMALL_RATE, rate, 1 - jnp.exp2(rate * -_LOG2_E))

  def split_decay(self, inputs, first, run):
    """exp(a sum of dt)."""
    del run
    time = jnp.sum(inputs.rate.astype(jnp.float32), axis=1)
    decay = jnp.exp(time[..., None] * inputs.a)
    blocked = boundaries.in_splits(first, 1)
    return boundaries.reset(blocked, decay, 0.0)

  def load_keys(self, tiles, streams_smem, t) -> Keys:
    load = lambda ref: tiles.load_states(ref.at[t])
    return Keys(load(streams_smem.write_key), load(streams_smem.read_key))

  def complete_keys(self, tiles, keys):
    return keys, None

  def gates(self, x, rate, norm) -> Gates:
    return Gates(write=rate * x, rate=rate)

  def decay(self, tiles, gates, a, keys) -> Decay:
    log_decay = tiles.broadcast_channels(gates.rate) * a
    if not self.exact:
      return Decay(jnp.exp2(log_decay))
    # 1 - exp(u) by its series where it is at most 1/2: the difference would lose digits.
    part = 1 / 362880
    for factor in (40320, 5040, 720, 120, 24, 6, 2, 1):
      part = part * log_decay + 1 / factor
    factor = jnp.exp2(log_decay * _LOG2_E)
    return Decay(factor, -log_decay * part, factor < 0.5)

  def token_gradients(self, tiles, gates, a, keys, x, along, adjoint, passed, state):
    d_log_decay = passed * state
    d_rate = tiles.dot(d_log_decay, a)
    if not self.exact:
      d_rate = d_rate * (1 / _LOG2_E)
    return TokenGradients(
      x=gates.rate * along,
      rate=d_rate + x * along,
      sums=[adjoint * tiles.broadcast_channels(gates.write)],
      a=d_log_decay * tiles.broadcast_channels(gates.rate),
    )

  def key_sums(self, tiles, keys, sums):
    return sums

  def key_gradients(self, sums: jax.Array, inputs: Inputs) -> KeyGradients:
    return KeyGradients(read_key=sums[:, :, 0], write_key=sums[:, :, 1])
