"""Dropout of the layers of a model: what one key for each row of a batch becomes in each layer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core.dropout import drop_rows, dropout, fold, row_keys, token_keys

# The places in a layer where values are dropped, each with keys of its own.
IN_MIXER, AFTER_MIXER, AFTER_CHANNEL_MIXER, _DROP_PATH = 0, 1, 2, 8


class LayerDropout(NamedTuple):
  """The keys and the rate of one layer; of several, with a leading axis L.

  Attributes:
    keys: [B, 2] uint32, of the rows.
    drop_path: [], the rate at which a row loses a whole branch; None for 0 in all layers.
  """

  keys: jax.Array
  drop_path: jax.Array | None

  def in_mixer(self) -> jax.Array:
    """The `dropout_key` of the layer's mixer."""
    return fold(self.keys, IN_MIXER)

  def branch(
    self, y: jax.Array, place: int, rate: float, axis_name: str | None = None
  ) -> jax.Array:
    """The output y [B, T, D] of a branch, of which values and whole rows are dropped."""
    y = dropout(y, token_keys(fold(self.keys, place), y.shape[1], axis_name), rate)
    if self.drop_path is None:
      return y
    return drop_rows(y, fold(self.keys, _DROP_PATH + place), self.drop_path)


class ModelDropout(NamedTuple):
  """Dropout of a call of a model: the keys of its embedding and of its layers."""

  embedding: jax.Array  # [B, 2] uint32
  layers: LayerDropout  # [L]

  @classmethod
  def of(
    cls, name: str, key: jax.Array | None, rows: int, num_layers: int, drop_path: float
  ) -> "ModelDropout | None":
    """That of a `dropout_key`; None for None.

    The rate of drop path rises linearly from 0 in the first layer to `drop_path` in the last
    (a single layer has `drop_path`).

    Raises:
      ValueError: it is no key, nor one for each row; `name` is the model's.
    """
    if key is None:
      return None
    keys = row_keys(name, key, rows)
    depth = jnp.linspace(0.0 if num_layers > 1 else 1.0, 1.0, num_layers)
    rates = drop_path * depth if drop_path else None
    of_layers = LayerDropout(fold(keys, jnp.arange(num_layers)[:, None]), rates)
    return cls(fold(keys, num_layers), of_layers)
