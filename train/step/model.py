"""The language model of a config, and its parameters as a plain dictionary."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.models import LanguageModel
from train import config


def build_model(
  model: config.Model, key: jax.Array, *, sequence_axis: str | None = None
) -> LanguageModel:
  """Builds the language model of a config with randomly initialized parameters."""
  return LanguageModel(
    vocab_size=model.vocab_size,
    dim=model.dim,
    num_layers=model.num_layers,
    num_heads=model.num_heads,
    mixer=model.mixer,
    mixer_options=model.mixer_options,
    channel_mixer=model.channel_mixer,
    channel_hidden=model.channel_hidden,
    channel_mixer_options=model.channel_mixer_options,
    norm=model.norm,
    norm_eps=model.norm_eps,
    embedding_norm=model.embedding_norm,
    initialization=model.initialization,
    tie_embeddings=model.tie_embeddings,
    learned_positions=model.learned_positions,
    remat=model.remat,
    unroll=model.unroll,
    sequence_axis=sequence_axis,
    dtype=jnp.dtype(model.dtype),
    param_dtype=jnp.dtype(model.param_dtype),
    rngs=nnx.Rngs(key),
  )


def model_graph(model: config.Model, sequence_axis: str | None = None) -> Any:
  """Static part of the model for `nnx.merge(graph, params)`; computes no parameters."""
  build = functools.partial(build_model, model, sequence_axis=sequence_axis)
  return nnx.split(jax.eval_shape(build, jax.random.key(0)), nnx.Param)[0]


def params_of(model: LanguageModel) -> dict[str, Any]:
  """Parameters of a model, as a nested dictionary of arrays."""
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))
