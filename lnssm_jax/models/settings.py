"""Language models of plain settings, as configs and exports store them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.models.language_model import LanguageModel


def model_of(
  settings: Mapping[str, Any], key: jax.Array, *, sequence_axis: str | None = None
) -> LanguageModel:
  """Builds `LanguageModel(**settings)`, whose dtypes are names, with random parameters.

  Raises:
    ValueError, TypeError: the settings are none of a model.
  """
  dtypes = {name: jnp.dtype(settings[name]) for name in ("dtype", "param_dtype")}
  arguments: dict[str, Any] = {**settings, **dtypes, "sequence_axis": sequence_axis}
  return LanguageModel(**arguments, rngs=nnx.Rngs(key))


def graph_of(settings: Mapping[str, Any], *, sequence_axis: str | None = None) -> Any:
  """Static part of the model for `nnx.merge(graph, params)`; computes no parameters."""
  build = lambda: model_of(settings, jax.random.key(0), sequence_axis=sequence_axis)
  return nnx.split(jax.eval_shape(build), nnx.Param)[0]


def params_of(model: nnx.Module) -> dict[str, Any]:
  """Parameters of a model, as a nested dictionary of arrays."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def abstract_params(settings: Mapping[str, Any]) -> dict[str, Any]:
  """Shapes and dtypes of the parameters of a model, as `params_of` arranges them."""
  return jax.eval_shape(lambda: params_of(model_of(settings, jax.random.key(0))))
