"""Needles in a haystack: values hidden in a long text, asked for at its end.

    single_1      one word with a number, in repeated sentences
    single_2      the same, in running text
    single_3      a word with a UUID, in running text
    multikey      four words with a number each; one is asked for
    multivalue    one word with four numbers; all are asked for
    multiquery    four words with a number each; all are asked for

After the tasks of RULER (Hsieh et al. 2024), section 3 and appendix B; the sentences are
ours, so scores are comparable with each other, not with printed ones.
"""

import itertools
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.answers import answers
from experiments.limits import check_prompts, kind_of
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.tokenizers import Tokenizer, encode_whole
from train.data.errors import DataError
from train.data.sources import read_documents
from train.scoring.report import Report


class Kind(NamedTuple):
  """A task: its haystack, how many words it hides, how many values of each, how many it asks."""

  repeated: bool
  keys: int
  values: int
  queries: int
  uuids: bool = False


KINDS = {
  "single_1": Kind(True, 1, 1, 1),
  "single_2": Kind(False, 1, 1, 1),
  "single_3": Kind(False, 1, 1, 1, uuids=True),
  "multikey": Kind(False, 4, 1, 1),
  "multivalue": Kind(False, 1, 4, 1),
  "multiquery": Kind(False, 4, 1, 4),
}

# The repeated haystack.
NOISE = (
  "Rain fell on the roof.",
  "The clock ticked on.",
  "Nobody was at home.",
  "Then it was noon.",
)
# Words of generated sentences and of the keys.
FIRST = "amber brave calm dusty early faint gentle hollow idle jolly keen lively misty narrow odd"
SECOND = (
  "anchor bridge candle desert engine forest garden harbor island jacket kettle ladder market"
)
VERBS = "carries follows finds watches leaves passes moves turns holds meets"
WORDS = [f"{first}-{second}" for first, second in itertools.product(FIRST.split(), SECOND.split())]


class Needle(NamedTuple):
  """A prompt, and the values that the answer must hold."""

  prompt: str
  values: list[str]


def make(
  kind: str,
  length: int,
  tokenizer: Tokenizer,
  seed: int,
  text: Sequence[str] | None = None,
  answer: int = 0,
) -> Needle:
  """A prompt as full as whole sentences make it, of at most `length` tokens with its answer.

  Args:
    answer: tokens of the answer.
    text: sentences of the running text, repeated if too short; None generates them.

  Raises:
    ValueError: the kind is unknown, or the question and the answer are longer than `length`.
  """
  task, rng = kind_of(kind, KINDS), np.random.default_rng(seed)
  keys = [WORDS[number] for number in rng.choice(len(WORDS), task.keys, replace=False)]
  value = lambda: str(uuid.UUID(bytes=rng.bytes(16))) if task.uuids else str(
    rng.integers(10**6, 10**7)
  )  # fmt: skip
  hidden = [(key, value()) for key in keys for _ in range(task.values)]
  asked = keys[: task.queries]
  thing = "code" if task.uuids else "number"
  needles = [f"The special {thing} of {key} is {value}." for key, value in hidden]
  rng.shuffle(needles)
  names = ", ".join(asked)
  start = f"A special {thing} is hidden in this text. Remember it.\n\n"
  many = "s" if task.values * task.queries > 1 else ""
  end = f"\n\nQuestion: which special {thing}{many} of {names} did the text name?\n"
  end += f"Answer: the special {thing}{many} of {names} {'are' if many else 'is'}"

  sentences = itertools.cycle(NOISE if task.repeated else text or _generated(rng))
  size = lambda prompt: len(encode_whole(tokenizer, prompt))
  room = length - answer - size(start + " ".join(needles) + end)
  hay = []
  while room > 0:
    hay.append(next(sentences))
    room -= len(tokenizer.encode(" " + hay[-1]))
  depths = np.sort(rng.random(len(needles)))
  while True:  # pieces may have more tokens joined than apart
    body = list(hay)
    for depth, needle in zip(depths[::-1], needles, strict=True):
      body.insert(int(depth * (len(hay) + 1)), needle)
    prompt = start + " ".join(body) + end
    if size(prompt) <= length - answer:
      return Needle(prompt, [value for key, value in hidden if key in asked])
    if not hay:
      raise ValueError(
        f"length={length} does not hold the question of {kind!r} and its answer; use"
        f" {size(prompt) + answer} tokens or more."
      )
    hay.pop()


def score(answer: str, values: Sequence[str]) -> float:
  """Share of the values that are in the answer."""
  return sum(value in answer for value in values) / len(values)


def run(
  loaded: LoadedModel,
  *,
  kinds: Sequence[str],
  lengths: Sequence[int],
  samples: int = 100,
  max_tokens: int = 128,
  source: str | None = None,
  seed: int = 0,
  batch: int = 8,
) -> Report:
  """Scores greedy answers; a length counts the tokens of the prompt and of the answer.

  Raises:
    ValueError: a length is too short for its question, or longer than the model's cache holds.
    DataError: `source` is unreadable or has no sentence.
  """
  check_prompts("--lengths", lengths, samples)
  tokenizer, text = loaded.tokenizer, sentences(source) if source else None
  table, details = [], []
  for kind, length in itertools.product(kinds, lengths):
    made = [make(kind, length, tokenizer, seed + n, text, max_tokens) for n in range(samples)]
    found = answers(loaded, [each.prompt for each in made], max_tokens=max_tokens, batch=batch)
    pairs = [(answer, needle.values) for answer, needle in zip(found, made, strict=True)]
    scores = [score(*pair) for pair in pairs]
    which = {"kind": kind, "length": length}
    details += [which | {"values": values, "answer": answer} for answer, values in pairs]
    table.append(which | {"recall": float(np.mean(scores))})
  settings = {"model": str(loaded.source), "step": loaded.step, "text": source or "generated"}
  settings |= {"samples": samples, "max_tokens": max_tokens, "seed": seed}
  return Report("niah", settings, {"recall": table}, {"answers": details})


def sentences(source: str) -> list[str]:
  """Sentences of the documents of a path, as full stops end them."""
  found = []
  for document in read_documents(source):
    found += [f"{part.strip()}." for part in " ".join(document.split()).split(". ") if part.strip()]
  if not found:
    raise DataError(f"{source} has no sentence; use another file or folder.")
  return [sentence.replace("..", ".") for sentence in found]


def _generated(rng: np.random.Generator) -> list[str]:
  """512 sentences, different in most cases."""
  first, second, verbs = (words.split() for words in (FIRST, SECOND, VERBS))
  draw = lambda words: str(rng.choice(words))
  return [
    f"The {draw(first)} {draw(second)} {draw(verbs)} the {draw(first)} {draw(second)}."
    for _ in range(512)
  ]
