"""Text from a model: prompts in, continuations out."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lnssm_jax import generate
from lnssm_jax.models import LanguageModel
from train import config
from train.data.tokenizers import Tokenizer

# Documents are trained apart, so the end of one never predicts the start of the next. An empty
# prompt therefore starts from a line feed, not from the end of text.
OPENING = "\n"


def complete(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  sample: config.Sample,
  seed: int = 0,
) -> list[str]:
  """The continuation of each prompt, at most `sample.tokens` tokens, up to the end of text."""
  options = _options(tokenizer, sample, seed)
  continuations = generate.generate(model, _encode(tokenizer, prompts), **options)
  return [tokenizer.decode(tokens) for tokens in continuations]


def stream(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompt: str,
  sample: config.Sample,
  seed: int = 0,
) -> Iterator[str]:
  """Pieces of the continuation of one prompt, as they are made; bad settings raise at once."""
  steps = generate.stream(model, _encode(tokenizer, [prompt]), **_options(tokenizer, sample, seed))
  return _pieces(steps, tokenizer)


def _pieces(steps: Iterator[np.ndarray], tokenizer: Tokenizer) -> Iterator[str]:
  tokens, text, shown = [], "", 0
  for step in steps:
    if step[0] == tokenizer.end_of_text:
      break
    tokens.append(step[0])
    text = tokenizer.decode(tokens)
    # A character of several bytes can be cut between tokens; what is not final yet is held back.
    final = len(text.rstrip("\ufffd"))
    yield text[shown:final]
    shown = max(shown, final)
  yield text[shown:]


def _encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
  return [tokenizer.encode(prompt or OPENING).tolist() for prompt in prompts]


def _options(tokenizer: Tokenizer, sample: config.Sample, seed: int) -> dict[str, Any]:
  return {
    "max_tokens": sample.tokens,
    "temperature": sample.temperature,
    "top_k": sample.top_k,
    "top_p": sample.top_p,
    "seed": seed,
    "stop_token": tokenizer.end_of_text,
  }
