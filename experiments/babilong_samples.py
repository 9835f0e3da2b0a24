"""Samples of BABILong: the facts of a bAbI story among the sentences of books.

bAbI files have numbered lines, which begin again at 1 with each story:

    1 Mary went to the office.
    2 Where is Mary? <tab>office<tab>1

Each question is a sample, after all facts of its story so far. Sentences of the text follow each
other from a random place on, as many as the length holds, again from the first after the last; the
facts keep their order, at random places among them. The sentences have at least 10 tokens and at
most half of the length: a prompt has more than the other half (published: the last one is cut). A
length of 0 has the facts alone.

Source: BABILong (Kuratov et al. 2024), section 3.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.babilong import prompt_of
from experiments.limits import check_prompts
from experiments.needles import sentences
from experiments.samples import write_rows
from lnssm_jax.files.reading import read_bytes
from lnssm_jax.pretrained.tokenizers import Tokenizer, encode_whole
from train.data.errors import DataError, reading, writing
from train.data.sources import MAX_ROW

LEAST = 10  # tokens of a sentence of the text


class Question(NamedTuple):
  """A question of a story."""

  facts: list[str]
  question: str
  target: str


def questions(path: Path) -> list[Question]:
  """All questions of a bAbI file.

  Raises:
    DataError: the file is unreadable, or a line is not of the format.
  """
  with reading(path):
    content = read_bytes(path, MAX_ROW, follow_links=True)
  found, facts = [], []
  for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
    first, _, rest = line.partition(" ")
    if not re.fullmatch(r"[0-9]{1,9}", first) or not rest.strip():
      raise DataError(f"{path}, line {number}: found {line!r:.60}, expected a number and a text.")
    if int(first) == 1:
      facts = []
    text, *answer = (part.strip() for part in rest.split("\t"))
    if not answer:
      facts = [*facts, text]
    elif not facts or not answer[0]:
      raise DataError(f"{path}, line {number}: a question without facts or without an answer.")
    else:
      found.append(Question(facts, text, answer[0]))
  if not found:
    raise DataError(f"{path} has no question; give a folder of bAbI's text files.")
  return found


def file_of(folder: str | Path, task: str, split: str) -> Path:
  """The file of a task such as "qa1", whose name ends with the split.

  Raises:
    DataError: there is none, or more than one.
  """
  found = sorted(Path(folder).glob(f"{task}_*{split}.txt"))
  if len(found) != 1:
    names = ", ".join(path.name for path in found) or "none"
    raise DataError(f"{folder} needs one file {task}_*{split}.txt; it has {names}.")
  return found[0]


class Noise:
  """Sentences of a text, each with its tokens counted when it is first used."""

  def __init__(self, source: str, tokenizer: Tokenizer):
    self.source, self._tokenizer = source, tokenizer
    self._sentences = sentences(source)
    self._sizes: dict[int, int] = {}

  def since(self, first: int, length: int) -> Iterator[tuple[str, int]]:
    """Yields sentences for a length from the place `first` on, again and again, with their tokens.

    Raises:
      DataError: there is none of LEAST tokens to half of the length.
    """
    found = []
    for number in itertools.chain(range(first, len(self)), range(first)):
      text = self._sentences[number]
      if number not in self._sizes:
        self._sizes[number] = len(self._tokenizer.encode(f" {text}"))
      if LEAST <= self._sizes[number] <= length // 2:
        found.append((text, self._sizes[number]))
        yield found[-1]
    if not found:
      raise DataError(
        f"{self.source} has no sentence of {LEAST} tokens to half of length={length}, which prompts"
        " of this length are filled with; use another text, or a longer length."
      )
    yield from itertools.cycle(found)

  def __len__(self) -> int:
    return len(self._sentences)


def make(
  question: Question, length: int, tokenizer: Tokenizer, noise: Noise, rng: np.random.Generator
) -> dict[str, str] | None:
  """A row whose prompt has half of `length` to `length` tokens; None if the facts alone have more.

  Raises:
    DataError: the text has no sentence for this length.
  """
  row = lambda body: {"input": " ".join(body), **question._asdict()}
  size = lambda body: len(encode_whole(tokenizer, prompt_of(row(body))))
  hay: list[str] = []
  if length:
    room = length - size(question.facts)
    if room < 0:
      return None
    for text, tokens in noise.since(int(rng.integers(len(noise))), length):
      if tokens > room:
        break
      hay.append(text)
      room -= tokens
  places = np.sort(rng.random(len(question.facts)))
  while True:
    body = list(hay)
    for place, fact in zip(places[::-1], question.facts[::-1], strict=True):
      body.insert(int(place * (len(hay) + 1)), fact)
    if not hay or size(body) <= length:  # pieces may have more tokens joined than apart
      found = row(body)
      del found["facts"]
      return found
    hay.pop()


def rows_of(
  babi: str | Path,
  text: str,
  tokenizer: Tokenizer,
  *,
  tasks: Sequence[str],
  lengths: Sequence[int],
  samples: int,
  split: str = "test",
  seed: int = 0,
) -> Iterator[tuple[str, int, list[dict[str, str]]]]:
  """Yields each task and length with its rows, at most `samples`.

  Raises:
    DataError: a file is unreadable or of another format, or the text has no sentence for a length.
    ValueError: a length holds none of a task's stories.
  """
  check_prompts("--lengths", lengths, samples * len(tasks))
  for task in tasks:
    if not re.fullmatch(r"\w[\w-]*", task):
      raise ValueError(f"--tasks {task!r} is no name of a task; use one such as qa1.")
  if not re.fullmatch(r"[\w.-]*", split):
    raise ValueError(f"--split {split!r} is no end of a file's name; use one such as test.")
  noise = Noise(text, tokenizer)
  for number, task in enumerate(tasks):
    found = questions(file_of(babi, task, split))
    for length in lengths:
      rng = np.random.default_rng((seed, number, length))
      order = rng.permutation(len(found))
      rows: list[dict[str, str]] = []
      for place in order:
        if (row := make(found[place], length, tokenizer, noise, rng)) is not None:
          rows.append(row)
        if len(rows) == samples:
          break
      if not rows:
        raise ValueError(f"length={length} holds no story of {task}; use a longer one, or 0.")
      yield task, length, rows


def write(
  folder: Path, *, babi: str, text: str, tokenizer: Tokenizer, **how: Any
) -> list[tuple[Path, int]]:
  """Writes a file for each task and length, such as qa1_4k.jsonl or qa1_500.jsonl, and returns the
  files and their rows; nothing is written if a row of any file cannot be made.

  `how` as in `rows_of`.

  Raises:
    DataError: a file is unreadable, of another format, or cannot be written.
    ValueError: a length holds none of a task's stories.
  """
  files = {}
  for task, length, rows in rows_of(babi, text, tokenizer, **how):
    size = f"{length // 1000}k" if length % 1000 == 0 else str(length)
    files[folder / f"{task}_{size}.jsonl"] = rows
  with writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  for path, rows in files.items():
    write_rows(path, rows)
  return [(path, len(rows)) for path, rows in files.items()]
