"""What is S6's own in a walk along the steps: exp(dt a) as decay, dt x as what is written."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG2_E = 1.4426950408889634


class Gates(NamedTuple):
  """Of a step, vectors of channels."""

  rate: jax.Array
  write: jax.Array


class Cell(NamedTuple):
  """`exact`: decays to the last digit of float32, for inputs that have as many."""

  exact: bool = False
  name = "selective_scan"
  keys = ("b", "c")
  parameters = ("a",)  # without `exact`, times log2(e)
  sums = ("c", "b")
  together = 2  # steps whose sums are added at once
  fewest_parts = 4  # into how many a sequence is cut at least: cutting costs a pass

  def prepare(self, arrays):
    """The arrays as the kernels read them."""
    return arrays if self.exact else arrays | {"a": arrays["a"] * LOG2_E}

  def passing(self, arrays, first, run):
    """What all steps together leave of a state, [B, D, N]: exp(a sum of dt)."""
    del run
    time = jnp.sum(arrays["rate"].astype(jnp.float32), axis=1)
    left = jnp.exp(time[..., None] * arrays["a"])
    return left if first is None else jnp.where(jnp.any(first, axis=1)[:, None, None], 0.0, left)

  def tiles(self, form, refs, base):
    """The parameters of each tile."""
    return [(a,) for a in form.load(refs["a"], base)]

  def load_keys(self, form, refs, t):
    """What all channels share at a step."""
    return {name: form.states(refs[name].at[t]) for name in self.keys}

  def scalars(self, refs, t):
    """What all channels and states share at a step."""
    del refs, t

  def keys_alone(self, form, keys):
    """`load_keys` and `scalars` of a step for which nothing is prepared."""
    del form
    return keys, None

  def gates(self, x, rate, scalars):
    """What all states of a channel share at a step."""
    del scalars
    return Gates(rate, rate * x)

  def decay(self, form, gates, parameters, keys):
    """The decays of a step."""
    (a,) = parameters
    log_decay = form.across(gates.rate) * a
    if not self.exact:
      return jnp.exp2(log_decay)
    # 1 - exp(u) by its series where it is at most 1/2: the difference would lose digits.
    part = 1 / 362880
    for factor in (40320, 5040, 720, 120, 24, 6, 2, 1):
      part = part * log_decay + 1 / factor
    decay = jnp.exp2(log_decay * LOG2_E)
    return decay, -log_decay * part

  def decayed(self, decay, state):
    """A state or its adjoint, decayed."""
    if not self.exact:
      return decay * state
    kept, lost = decay
    return jnp.where(kept < 0.5, kept * state, state - lost * state)

  def after(self, decay, state, added):
    """The state after a step that adds to it what is `added`."""
    if not self.exact:
      return decay * state + added
    kept, lost = decay
    # Long sums of small changes: each change is rounded once, as it is added.
    return jnp.where(kept < 0.5, kept * state + added, state + (added - lost * state))

  def back(self, form, gates, parameters, keys, x, along, adjoint, passed, state):
    """Gradients of x and rate, terms of `totals` but the first, terms of the parameters'."""
    (a,) = parameters
    d_log = passed * state
    d_rate = form.sum_of(d_log, a)
    if not self.exact:
      d_rate = d_rate * (1 / LOG2_E)
    sums = [adjoint * form.across(gates.write)]
    return gates.rate * along, d_rate + x * along, sums, [d_log * form.across(gates.rate)]

  def totals(self, form, keys, sums):
    """What is summed over the tiles of a block, as `sums` names it."""
    del form, keys
    return sums

  def key_gradients(self, sums, arrays):
    """Gradients of the arrays without channels, from `sums` by name, [B, T, N] float32."""
    del arrays
    return sums
