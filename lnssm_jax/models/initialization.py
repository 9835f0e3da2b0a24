"""How a language model starts, outside its mixers."""

import math
from typing import Any, NamedTuple

from flax import nnx

from lnssm_jax.mixers.common.initializers import orthogonal

GPT2_STD = 0.02


class Initialization(NamedTuple):
  """How a model starts, outside its mixers."""

  embedding: Any  # initializers
  head: Any
  matrix_std: float | None  # of the matrices in blocks; None: as mixers and channel mixers say


def _lnssm(vocab_size: int, dim: int) -> Initialization:
  head = 0.5 * math.sqrt(max(1.0, vocab_size / dim))
  embedding = 1e-4 * math.sqrt(max(vocab_size, dim))
  return Initialization(orthogonal(embedding), orthogonal(head), None)


def _gpt2(vocab_size: int, dim: int) -> Initialization:
  del vocab_size, dim
  normal = nnx.initializers.normal(GPT2_STD)
  return Initialization(normal, normal, GPT2_STD)


INITIALIZATIONS = {"lnssm": _lnssm, "gpt2": _gpt2}
