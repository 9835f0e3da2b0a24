"""A small model of bytes that tasks score, and its probabilities by one call."""

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


def log_probs(loaded, text):
  """Float64 log-probability of each byte but the first, by one call on the whole text."""
  tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
  logits = np.asarray(loaded.model(tokens[None, :-1])[0][0], np.float64)
  logits -= logits.max(-1, keepdims=True)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  return logits[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(-1) == tokens[1:]
