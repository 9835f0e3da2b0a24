"""A small model of bytes that tasks score, and its probabilities by one call."""

import jax
import numpy as np

from tests.train.test_export import random_params
from train import config
from train.data.tokenizers import load_tokenizer
from train.runs import export

MODEL = config.Model(
  mixer="lrn", dim=16, num_layers=1, num_heads=2, vocab_size=257, dtype="float32"
)


def exported(folder):
  """Writes the model to `folder`, and returns it."""
  params = random_params(MODEL)
  params["head"]["kernel"][:, 128:] = 0  # so the likeliest token is ASCII
  export.write(folder, MODEL, params, load_tokenizer("bytes"), 7)
  return folder


@jax.jit
def logits_of(model, tokens):
  return model(tokens)[0]


def log_probs(loaded, text):
  """Float64 log-probability of each byte but the first, and whether it is the likeliest.

  By one call on the whole text, padded so that texts of several lengths share a program.
  """
  tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
  length = len(tokens) - 1
  padded = np.zeros(
    (1, min(-(-length // 16) * 16, loaded.model.max_length or length + 16)), np.int32
  )
  padded[0, :length] = tokens[:-1]
  logits = np.asarray(logits_of(loaded.model, padded)[0, :length], np.float64)
  logits -= logits.max(-1, keepdims=True)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  return logits[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(-1) == tokens[1:]
