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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.answers import answers
from experiments.limits import kind_of
from lnssm_jax.files.checked_json import SyntaxProblem, check_shape, parse
from lnssm_jax.files.reading import read_bytes
from lnssm_jax.pretrained.loaded import LoadedModel
from train.data.errors import DataError, reading
from train.data.sources import MAX_ROW, read_rows
from train.scoring.report import Report


class Sample(NamedTuple):
  """A text to answer or to rewrite, and the answers it is compared with."""

  text: str
  references: list[str]


class Kind(NamedTuple):
  """A task: its prompt, and what its file holds."""

  prompt: str
  read: Callable[[Path], Iterator[Sample]]


def _asqa(path: Path) -> Iterator[Sample]:
  shape = {"question": str, "annotations": [{"long_answer": str}]}
  for where, row in _listed(path, shape):
    yield _sample(where, row["question"], [each["long_answer"] for each in row["annotations"]])


def _eli5(path: Path) -> Iterator[Sample]:
  for where, row in _listed(path, {"question": str, "answer": str}):
    yield _sample(where, row["question"], [row["answer"]])


def _wikilarge(path: Path) -> Iterator[Sample]:
  if path.suffix != ".src":
    raise DataError(f"{path} is not a file NAME.src, next to NAME.dst with the simple sentences.")
  simple = path.with_suffix(".dst")
  texts, references = (
    content.removesuffix("\n").split("\n") if (content := _content(each)) else []
    for each in (path, simple)
  )
  if len(texts) != len(references):
    raise DataError(f"{path} has {len(texts)} lines and {simple} has {len(references)}.")
  for number, (text, reference) in enumerate(zip(texts, references, strict=True), 1):
    yield _sample(f"{path}, line {number}", text, [reference])


def _scitldr(path: Path) -> Iterator[Sample]:
  for where, row in read_rows(path):
    _check(where, row, {"source": [str], "target": [str]}, "lists ")
    yield _sample(where, " ".join(row["source"]), row["target"])


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


def _listed(path: Path, shape: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
  """Rows of a .json list, each after its place for messages."""
  try:
    rows = parse(_content(path))
  except SyntaxProblem as error:
    raise DataError(f"{path}, line {error.line}: {error}.") from None
  except ValueError as error:
    raise DataError(f"{path}: {error}.") from None
  if not isinstance(rows, list):
    raise DataError(f"{path}: found {type(rows).__name__}, expected a list of rows.")
  for number, row in enumerate(rows, 1):
    where = f"{path}, row {number}"
    _check(where, row, shape)
    yield where, row


def _check(where: str, row: Any, shape: dict[str, Any], kind: str = "") -> None:
  try:
    check_shape(row, shape)
  except ValueError as error:
    names = " and ".join(f'"{name}"' for name in shape)
    raise DataError(f"{where}: expected {kind}{names} with text in them ({error}).") from None


def _sample(where: str, text: str, references: list[str]) -> Sample:
  if not references or not text.strip() or not all(each.strip() for each in references):
    raise DataError(f"{where}: a text or reference is empty, or there is no reference; remove it.")
  return Sample(text, references)
