"""ROUGE-L of long answers, simplifications and summaries: ASQA, ELI5, WikiLarge, SciTLDR.

    asqa        a .json list of {"question", "annotations": [{"long_answer"}, ...]}
    eli5        a .json list of {"question", "answer"}
    wikilarge   sentences, one per line, NAME.src, and NAME.dst with the simple ones
    scitldr     .jsonl rows {"source": [sentences], "target": [summaries]}

The F-measure of the longest common subsequence of words, stems of words compared; of several
references the best counts. The prompts are ours (LNSSM, table 3, names none), the same without
training and after fine-tuning on rows that `training_rows` gives.

Needs the package `rouge-score`.
"""

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lnssm_jax.pretrained.files import read_bytes
from lnssm_jax.pretrained.loaded import LoadedModel
from train.data.errors import DataError, reading
from train.data.sources import MAX_ROW, read_rows
from train.tasks.answers import answers
from train.tasks.arguments import kind_of
from train.tasks.report import Report


class Sample(NamedTuple):
  """A text to answer or to rewrite, and the answers it is compared with."""

  text: str
  references: list[str]


class Kind(NamedTuple):
  """A task: its prompt, and what its file holds."""

  prompt: str
  read: Callable[[Path], Iterator[Sample]]


def _asqa(path: Path) -> Iterator[Sample]:
  for where, row in _listed(path):
    given = [each.get("long_answer") for each in row.get("annotations", []) if type(each) is dict]
    yield _checked(where, row.get("question"), given, '"question" and "annotations"')


def _eli5(path: Path) -> Iterator[Sample]:
  for where, row in _listed(path):
    yield _checked(where, row.get("question"), [row.get("answer")], '"question" and "answer"')


def _wikilarge(path: Path) -> Iterator[Sample]:
  if path.suffix != ".src":
    raise DataError(f"{path} is not a file NAME.src, next to NAME.dst with the simple sentences.")
  simple = path.with_suffix(".dst")
  texts, references = (_content(each).removesuffix("\n").split("\n") for each in (path, simple))
  if len(texts) != len(references):
    raise DataError(f"{path} has {len(texts)} lines and {simple} has {len(references)}.")
  for text, reference in zip(texts, references, strict=True):
    yield Sample(text, [reference])


def _scitldr(path: Path) -> Iterator[Sample]:
  for where, row in read_rows(path):
    row = row if isinstance(row, dict) else {}
    source = row.get("source")
    is_text = isinstance(source, list) and all(isinstance(each, str) for each in source)
    text = " ".join(source) if is_text else None
    yield _checked(where, text, row.get("target"), 'lists "source" and "target"')


KINDS = {
  "asqa": Kind("Question: {}\nAnswer:", _asqa),
  "eli5": Kind("Question: {}\nAnswer:", _eli5),
  "wikilarge": Kind("Sentence: {}\nIn simpler words:", _wikilarge),
  "scitldr": Kind("Abstract: {}\nSummary in one sentence:", _scitldr),
}


def run(
  loaded: LoadedModel,
  kind: str,
  paths: Sequence[str],
  *,
  max_tokens: int = 100,
  limit: int | None = None,
  batch: int = 8,
) -> Report:
  """Scores greedy answers up to the line feed; precision, recall and F-measure in percent.

  Raises:
    ValueError: `rouge-score` is not installed, the kind is unknown, or a prompt is longer than the
      model's cache holds.
    DataError: a file is unreadable or of another format.
  """
  kind_of(kind, KINDS)
  rouge_l = scorer()
  table, details = [], []
  for path in paths:
    samples = read(kind, path, limit)
    prompts = [prompt_of(kind, sample) for sample in samples]
    found = answers(loaded, prompts, max_tokens=max_tokens, until=("\n",), batch=batch)
    scores = [
      rouge_l.score_multi(sample.references, answer)["rougeL"]
      for sample, answer in zip(samples, found, strict=True)
    ]
    means = {"precision": "precision", "recall": "recall", "rouge_l": "fmeasure"}
    mean = lambda name, scores=scores: 100 * float(np.mean([getattr(s, name) for s in scores]))
    row = {name: mean(attribute) for name, attribute in means.items()}
    table.append({"set": Path(path).name, "rows": len(samples)} | row)
    details += [
      {"set": Path(path).name, "rouge_l": 100 * score.fmeasure, "answer": answer}
      for score, answer in zip(scores, found, strict=True)
    ]
  settings = {"model": str(loaded.source), "step": loaded.step, "kind": kind}
  return Report("rouge", settings | {"max_tokens": max_tokens}, {"sets": table}, {"rows": details})


def prompt_of(kind: str, sample: Sample) -> str:
  """The text before the answer."""
  return kind_of(kind, KINDS).prompt.format(sample.text)


def training_rows(
  kind: str, paths: Sequence[str], limit: int | None = None
) -> Iterator[tuple[str, str]]:
  """A prompt and its completion for each reference; a line feed ends the completion."""
  for path in paths:
    for sample in read(kind, path, limit):
      for reference in sample.references:
        yield prompt_of(kind, sample), f" {' '.join(reference.split())}\n"


def read(kind: str, path: str | Path, limit: int | None = None) -> list[Sample]:
  """The first samples of a file, `limit` of them.

  Raises:
    ValueError: the kind is unknown.
    DataError: the file is unreadable, empty or of another format.
  """
  samples = list(kind_of(kind, KINDS).read(Path(path)))[:limit]
  if not samples:
    raise DataError(f"{path} has no rows.")
  return samples


def scorer() -> Any:
  """The scorer of the package `rouge-score`.

  Raises:
    ValueError: it is not installed, or too old.
  """
  try:
    module = importlib.import_module("rouge_score.rouge_scorer")
  except ImportError as reason:
    raise ValueError(
      f"task rouge needs the package rouge-score: pip install rouge-score ({reason})"
    ) from None
  if not hasattr(module.RougeScorer, "score_multi"):  # of several references
    raise ValueError(
      "task rouge needs rouge-score 0.1.2 or newer, and an older version is installed: pip install"
      " 'rouge-score>=0.1.2'"
    )
  return module.RougeScorer(["rougeL"], use_stemmer=True)


def _content(path: Path) -> str:
  with reading(path):
    content = read_bytes(path, MAX_ROW, follow_links=True)
  try:
    return content.decode()
  except UnicodeDecodeError as error:
    raise DataError(f"{path}: not UTF-8 at byte {error.start}. Convert it to UTF-8.") from None


def _listed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """Rows of a .json list, each after its place for messages."""
  try:
    rows = json.loads(_content(path))
  except json.JSONDecodeError as error:
    raise DataError(f"{path}, line {error.lineno}: not JSON: {error.msg}.") from None
  if not isinstance(rows, list):
    raise DataError(f"{path}: found {type(rows).__name__}, expected a list of rows.")
  for number, row in enumerate(rows, 1):
    yield f"{path}, row {number}", row if isinstance(row, dict) else {}


def _checked(where: str, text: Any, references: Any, expected: str) -> Sample:
  is_list = isinstance(references, list) and references
  if not (isinstance(text, str) and is_list and all(isinstance(x, str) for x in references)):
    raise DataError(f"{where}: expected {expected} with text in them.")
  return Sample(text, references)
