"""Mixers that route tokens: the auxiliary output, and the balance loss in it.

`Mixer.with_aux` returns an `Aux` after the state, `Block` and `LanguageModel` pass it on, and the
training step adds and logs it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.common.checks import check_choice, check_positive
from lnssm_jax.ops.core.checks import is_number
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

METHODS = ("mask", "varlen", "gather")  # of `ops.sparse_state_attention`


@register_state
class Aux(NamedTuple):
  """Auxiliary output of a mixer. float32; of several layers, with a leading axis of layers."""

  loss: jax.Array  # scalar, to be added to the mean loss per token; contains its coefficient
  share: jax.Array  # [P], the share of the tokens that select each part; the sum is k


def balance(
  mass: jax.Array, selected: jax.Array, *, coefficient: float, by_head: bool = False
) -> Aux:
  r"""Load balance of tokens that select k of P parts each.

      loss = coefficient (P / k) sum_i p_i f_i,      p = mean of `mass`, f = mean of `selected`

  The means are over all leading axes, and inside `jax.shard_map` also over the mesh axes along
  which the arguments vary: the loss is that of all tokens, on any mesh. f is a constant under
  differentiation. With p = f / k, the loss is at least `coefficient`, which it has where all parts
  are selected equally often.

  Args:
    by_head: whether the axis before P counts heads, each with parts of its own; the loss is then
      the mean of theirs, and `share` has those of all heads.
    mass: [..., P], the weight that a token gives to each part; its sum over parts is about 1.
    selected: [..., P] boolean.

  Sources: Switch Transformer (Fedus et al. 2021), eqs. 4-6; for k of P, SSE (Pan et al. 2025).
  """
  kept = 2 if by_head else 1
  p, f = _mean(wide(mass), kept), _mean(selected.astype(jnp.float32), kept)
  loss = coefficient * f.shape[-1] / f.sum() * jnp.sum(p * f)
  return Aux(loss.astype(jnp.float32), f.reshape(-1))


def joined(first: Aux | None, second: Aux) -> Aux:
  """The auxiliary output of a layer that selects twice: the sum of losses, the shares of both."""
  if first is None:
    return second
  return Aux(first.loss + second.loss, jnp.concatenate([first.share, second.share]))


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The k parts of P with the largest probability, for each token.

  Args:
    logits: [..., P] float32.

  Returns:
    (probabilities [..., P], those of the selected parts [..., k], their indices [..., k] int32),
    the selected ones in descending order; of equals the first.
  """
  probabilities = jax.nn.softmax(logits, axis=-1)
  # Of the logits: rounding makes more probabilities equal.
  indices = jax.lax.top_k(jax.lax.stop_gradient(logits), k)[1].astype(jnp.int32)
  return probabilities, jnp.take_along_axis(probabilities, indices, axis=-1), indices


def is_selected(indices: jax.Array, parts: int) -> jax.Array:
  """[..., k] indices -> [..., P] boolean."""
  return jnp.any(indices[..., None] == jnp.arange(parts), axis=-2)


def of_selected(indices: jax.Array, parts: list[jax.Array]) -> jax.Array:
  """The selected of P arrays [B, T, X], [B, T, k, X]. Indices [B, T, k].

  A loop over P instead of a gather, whose transpose would be a scatter: nothing has an axis P.
  """
  chosen = jnp.zeros((*indices.shape, parts[0].shape[-1]), parts[0].dtype)
  for number, part in enumerate(parts):
    chosen = jnp.where((indices == number)[..., None], part[:, :, None], chosen)
  return chosen


def check_selected(name: str, selected: int, parts_name: str, parts: int) -> None:
  """Raises `ValueError` unless 1 <= selected <= parts."""
  check_positive(parts_name, parts)
  if check_positive(name, selected) > parts:
    raise ValueError(
      f"{name}={selected} is more than {parts_name}={parts}: a token can select each only once; "
      f"use at most {parts}."
    )


def check_coefficient(name: str, value: float) -> float:
  """Returns the coefficient of a loss; raises `ValueError` unless it is a number of at least 0."""
  if not is_number(value) or not value >= 0:
    raise ValueError(f"{name}={value!r} must be a number of at least 0; 0 leaves the loss out.")
  return float(value)


@dataclasses.dataclass(frozen=True)
class RowSparsity:
  """Selection of k of the K rows of a head's state, per token: the others are frozen.

  A row that a token does not select keeps decay 1 and is not written; all are read.

  Attributes:
    selected: k.
    balance: coefficient of the balance loss.
    mass: its p: "selected", of the weights of the selected rows, or "full", of all.

  Source: SSE (Pan et al. 2025), section 3.1; its eq. 8 as printed decays every row, its text
  freezes those that are not selected.
  """

  selected: int
  balance: float
  mass: str

  @classmethod
  def checked(
    cls, selected: int | None, rows_name: str, rows: int, balance: float, mass: str
  ) -> "RowSparsity | None":
    """The selection, or None for `selected=None`; raises `ValueError` naming a wrong option."""
    check_coefficient("balance", balance)
    check_choice("mass", mass, ("selected", "full"))
    if selected is None:
      return None
    check_selected("selected_rows", selected, rows_name, rows)
    return cls(selected, balance, mass)

  def select(self, scores: jax.Array) -> jax.Array:
    """Whether a token selects a row: the k largest scores [B, T, H, K], of equals the first."""
    indices = jax.lax.top_k(jax.lax.stop_gradient(scores), self.selected)[1]
    return is_selected(indices, scores.shape[-1])

  def normalized(self, weights: jax.Array, chosen: jax.Array) -> jax.Array:
    """Weights >= 0 of the selected rows, divided by their sum; 0 elsewhere."""
    return _normalized(jnp.where(chosen, weights, 0.0))

  def aux(self, weights: jax.Array, chosen: jax.Array) -> Aux:
    """The balance loss of weights >= 0 [B, T, H, K]: of each head, their mean."""
    full = self.mass == "full"
    mass = _normalized(weights) if full else self.normalized(weights, chosen)
    return balance(mass, chosen, coefficient=self.balance, by_head=True)


def _normalized(weights):
  total = jnp.sum(weights, axis=-1, keepdims=True)
  return weights / jnp.where(total > 0, total, 1.0)


def _mean(x: jax.Array, kept: int) -> jax.Array:
  """The mean over all but the last `kept` axes, and over the devices."""
  mean = jnp.mean(x, axis=tuple(range(x.ndim - kept)))
  axes = tuple(jax.typeof(mean).manual_axis_type.varying)
  return jax.lax.pmean(mean, axes) if axes else mean
