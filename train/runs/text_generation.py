"""Text generation with a model and its tokenizer."""

from collections.abc import Iterator, Sequence

import numpy as np

from lnssm_jax import generate
from lnssm_jax.models import LanguageModel
from train import config
from train.data.tokenizers import Tokenizer

# The model never learns to predict a document from the end of the one before it, so an empty
# prompt starts from a line feed, not from the end-of-text token.
OPENING = "\n"


def complete(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompts: Sequence[str],
  sample: config.Sample,
  seed: int = 0,
) -> list[str]:
  """Continues each prompt by at most `sample.tokens` tokens, up to the end of text."""
  options = _options(tokenizer, sample, seed)
  continuations = generate.generate(model, _encode(tokenizer, prompts), options)
  return [tokenizer.decode(tokens) for tokens in continuations]


def stream(
  model: LanguageModel,
  tokenizer: Tokenizer,
  prompt: str,
  sample: config.Sample,
  seed: int = 0,
) -> Iterator[str]:
  """Yields the continuation of one prompt in pieces; invalid settings raise immediately."""
  steps = generate.stream(model, _encode(tokenizer, [prompt]), _options(tokenizer, sample, seed))
  return _pieces(steps, tokenizer)


def _pieces(steps: Iterator[np.ndarray], tokenizer: Tokenizer) -> Iterator[str]:
  tokens, text, shown = [], "", 0
  for step in steps:
    if step[0] == tokenizer.end_of_text:
      break
    tokens.append(step[0])
    text = tokenizer.decode(tokens)
    # Tokens may split a multi-byte character: hold back text that is not final yet.
    final = len(text.rstrip("\ufffd"))
    yield text[shown:final]
    shown = max(shown, final)
  yield text[shown:]


def _encode(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
  return [tokenizer.encode(prompt or OPENING).tolist() for prompt in prompts]


def _options(tokenizer: Tokenizer, sample: config.Sample, seed: int) -> generate.SamplingOptions:
  return generate.SamplingOptions(
    max_tokens=sample.tokens,
    temperature=sample.temperature,
    top_k=sample.top_k,
    top_p=sample.top_p,
    seed=seed,
    stop_token=tokenizer.end_of_text,
  )
