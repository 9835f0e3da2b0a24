"""What is Longhorn's own in a walk along the steps: gains and decays that need no exponential.

With n = ||k||^2, r_i the sum of the squares of the other entries and w = 1 / (1 + beta n), the gain
is beta w and the decay of entry i is w + gain r_i. `norm` (n) and `others` (r) are inputs of their
own, and so are their gradients: how they are made of k is not the kernel's matter.

Backward, with M the product of the state and its adjoint: to float32 as README.md of the scan has
it, without a difference that loses digits. To bfloat16 the decay is taken as 1 - gain k_i^2, which
does not depend on r, so that there is less to sum over the channels:

    dk_i = sum_d (adjoint_i gain x - 2 k_i gain M_i)
    dn = -sum_d gain^2 (x (adjoint k) - M k^2)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Gates(NamedTuple):
  """Of a step, vectors of channels."""

  gain: jax.Array
  inverse: jax.Array
  write: jax.Array


class Cell(NamedTuple):
  """`exact`: decays to the last digit of float32, for inputs that have as many.

  It is needed as well where a channel's states are cut into groups: otherwise the gradient by way
  of the norm takes the states at hand for all.
  """

  exact: bool = False
  name = "longhorn_scan"
  keys = ("k", "q", "others")
  parameters = ()
  fewest_parts = 8  # into how many a sequence is cut at least: cutting costs two passes

  @property
  def sums(self):
    """What the backward pass sums over the channels of a block, [N] each."""
    return ("q", "k", "others", "norm") if self.exact else ("q", "k")

  @property
  def together(self):
    """Of how many steps at once: as many as there is memory for."""
    return 1 if self.exact else 2

  def prepare(self, arrays):
    """The arrays as the kernels read them."""
    return arrays

  def passing(self, arrays, first, run):
    """What all steps together leave of a state, [B, D, N]: that of 1, with nothing written."""
    del first
    # Like an array that is there: inside `shard_map` it must vary over the same mesh axes.
    like = arrays["x"][:, 0, :, None] + arrays["k"][:, 0, None, :]
    ones = jnp.ones_like(like, jnp.float32)
    return run({"x": jnp.zeros_like(arrays["x"]), "initial": ones})

  def tiles(self, form, refs, base):
    """The parameters of each tile."""
    del refs, base
    return [()] * form.number

  def load_keys(self, form, refs, t):
    """What all channels share at a step."""
    keys = {name: form.states(refs[name].at[t]) for name in self.keys}
    return keys | {"squares": keys["k"] * keys["k"]}

  def scalars(self, refs, t):
    """What all channels and states share at a step."""
    return refs["scalars"][1, t]

  def keys_alone(self, form, keys):
    """`load_keys` and `scalars` of a step whose norm and sums of others nobody has prepared.

    The sum of the other squares is needed where an entry is more than half of the norm, so that of
    the largest will do for all; entries as large as that are among its others.
    """
    squares = keys["k"] * keys["k"]
    ones = jnp.ones_like(squares)
    norm = form.sum_of(squares, ones)
    largest = jnp.max(squares, axis=1)
    at_top = squares >= form.across(largest)
    ties = form.sum_of(jnp.where(at_top, 1.0, 0.0), ones) - 1.0
    others = form.sum_of(jnp.where(at_top, 0.0, squares), ones) + ties * largest
    return keys | {"squares": squares, "others": form.across(others)}, norm

  def gates(self, x, rate, norm):
    """What all states of a channel share at a step."""
    whole = 1.0 + rate * norm
    if self.exact:
      inverse = 1.0 / whole
    else:  # without the division's care for numbers that `whole` cannot be
      root = lax.rsqrt(whole)
      inverse = root * root
    gain = rate * inverse
    return Gates(gain, inverse, gain * x)

  def decay(self, form, gates, parameters, keys):
    """The decays of a step."""
    del parameters
    kept = form.across(gates.inverse) + form.across(gates.gain) * keys["others"]
    if not self.exact:
      return kept
    return kept, form.across(gates.gain) * keys["squares"]

  def decayed(self, decay, state):
    """A state or its adjoint, decayed."""
    if not self.exact:
      return decay * state
    kept, lost = decay
    return jnp.where(lost > 0.5, kept * state, state - lost * state)

  def after(self, decay, state, added):
    """The state after a step that adds to it what is `added`."""
    if not self.exact:
      return decay * state + added
    kept, lost = decay
    # Long sums of small changes: each change is rounded once, as it is added.
    return jnp.where(lost > 0.5, kept * state + added, state + (added - lost * state))

  def back(self, form, gates, parameters, keys, x, along, adjoint, passed, state):
    """Gradients of x and rate, terms of `totals` but the first, terms of the parameters'."""
    del parameters, passed
    both = adjoint * state
    gain, inverse, write = gates
    d_gain = x * along - form.sum_of(both, keys["squares"])
    written, own = adjoint * form.across(write), form.across(gain) * both
    if self.exact:
      # gain a M = gain w M + r gain^2 M
      own = form.across(gain * inverse) * both
      sums = [written, own, form.across(gain * gain) * both, gain * write * along]
    else:
      sums = [written, own, gain * gain * d_gain]
    return gain * along, inverse * inverse * d_gain, sums, []

  def totals(self, form, keys, sums):
    """What is summed over the tiles of a block, as `sums` names it."""
    query, written, own, *rest = sums
    if self.exact:
      others, norm = rest
      own = own + keys["others"] * others
      return query, written - (2.0 * keys["k"]) * own, others, form.across(norm)
    # The gradient by way of the norm, which every entry of k changes alike, is added here.
    own = own + form.across(rest[0])
    return query, written - (2.0 * keys["k"]) * own

  def key_gradients(self, sums, arrays):
    """Gradients of the arrays without channels, from `sums` by name, [B, T, N] float32."""
    if not self.exact:
      return sums | {"others": jnp.zeros_like(sums["k"]), "norm": jnp.zeros_like(sums["k"][..., 0])}
    k = arrays["k"].astype(jnp.float32)
    sums["others"] *= k * k
    return sums | {"norm": -sums["norm"][..., 0]}
