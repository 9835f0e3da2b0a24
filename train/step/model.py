"""The language model of a config, and its parameters as a plain dictionary."""

from typing import Any

import jax
from flax import nnx

from lnssm_jax.models import LanguageModel, settings
from lnssm_jax.models.settings import params_of
from train import config
from train.config.checked import check

__all__ = ["build_model", "check_length", "model_graph", "params_of"]


def build_model(
  model: config.Model, key: jax.Array, *, sequence_axis: str | None = None
) -> LanguageModel:
  """Builds the language model of a config with randomly initialized parameters."""
  return settings.model_of(model, key, sequence_axis=sequence_axis)


def model_graph(model: config.Model, sequence_axis: str | None = None) -> Any:
  """Static part of the model for `nnx.merge(graph, params)`; computes no parameters."""
  return settings.graph_of(model, sequence_axis=sequence_axis)


def check_length(model: config.Model, name: str, length: int) -> None:
  """Raises ConfigError if a sequence is longer than the model's positions or a cache hold."""
  built = nnx.merge(*settings.abstract_model(model))
  pattern = (model.mixer,) if isinstance(model.mixer, str) else model.mixer
  holds = {"model.learned_positions": model.learned_positions}
  for place, mixer in enumerate(pattern):
    stack, of = (built.blocks, "") if len(pattern) == 1 else (built.blocks[str(place)], f".{mixer}")
    holds[f"model.mixer_options{of}.max_length"] = getattr(stack.mixer, "max_length", None)
  short = {setting: most for setting, most in holds.items() if most is not None and most < length}
  check(
    not short,
    f"{name}={length} is more than {' and '.join(f'{key}={most}' for key, most in short.items())};"
    f" use a smaller one, or {' '.join(f'--set {key}={length}' for key in short)}.",
  )
