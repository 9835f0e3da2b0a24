"""The language model of a config, and its parameters as a plain dictionary."""

from typing import Any

import jax

from lnssm_jax.models import LanguageModel, settings
from lnssm_jax.models.settings import params_of
from train import config

__all__ = ["build_model", "model_graph", "params_of"]


def build_model(
  model: config.Model, key: jax.Array, *, sequence_axis: str | None = None
) -> LanguageModel:
  """Builds the language model of a config with randomly initialized parameters."""
  return settings.model_of(config.to_dict(model), key, sequence_axis=sequence_axis)


def model_graph(model: config.Model, sequence_axis: str | None = None) -> Any:
  """Static part of the model for `nnx.merge(graph, params)`; computes no parameters."""
  return settings.graph_of(config.to_dict(model), sequence_axis=sequence_axis)
