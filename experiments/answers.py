"""Answers of a model to the prompts of a task."""

from collections.abc import Sequence

import numpy as np

from lnssm_jax.generate import SamplingOptions
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel


def answers(
  loaded: LoadedModel,
  prompts: Sequence[str],
  *,
  max_tokens: int,
  top_p: float | None = None,
  seed: int = 0,
  until: Sequence[str] = (),
  batch: int = 8,
) -> list[str]:
  """Continues each prompt, `batch` at once, greedily or, with `top_p`, by drawing.

  An answer ends before the first of the strings `until`, or at the end of text. Its random numbers
  depend on `seed` and the number of its prompt only, whatever the batch.

  Raises:
    ValueError: a prompt with its answer is longer than the model's cache holds.
  """
  # Hashed: with seed + number, prompt n of seed 1 would draw as prompt n + 1 of seed 0.
  seeds = [
    int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    for number in range(len(prompts))
  ]
  found = []
  for first in range(0, len(prompts), batch):
    options = SamplingOptions(
      max_tokens=max_tokens,
      temperature=0.0 if top_p is None else 1.0,
      top_p=top_p,
      seed=tuple(seeds[first : first + batch]),
      stop_token=loaded.stop_tokens,
    )
    part = prompts[first : first + batch]
    found += texts.complete(loaded.model, loaded.tokenizer, part, options, until=until)
  return found
