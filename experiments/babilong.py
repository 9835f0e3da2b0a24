"""BABILong: facts of bAbI among sentences of books, and a question.

Rows of a .jsonl file: {"input", "question", "target"}. The prompt is as LNSSM fine-tunes it, input,
question and "The answer is"; an answer is right if it begins with the target, a word or words with
commas between them, and does not continue the list.

Source: BABILong (Kuratov et al. 2024); the prompt: LNSSM, the section on BABILong.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.answers import answers
from experiments.samples import read_samples
from lnssm_jax.pretrained.loaded import LoadedModel
from train.scoring.report import Report, Row

QUESTION = "The answer is"


def prompt_of(row: dict[str, Any]) -> str:
  """The text before the answer."""
  return f"{row['input']} {row['question']} {QUESTION}"


def is_right(answer: str, target: str) -> bool:
  """Whether the answer begins with the target as a whole word or list, in whatever case.

  White space around commas does not count. A list that continues after the target is wrong: else
  an answer that names all things would be right wherever the target is the first of them.
  """
  answer, target = (re.sub(r"\s*,\s*", ",", text.strip().lower()) for text in (answer, target))
  return answer.startswith(target) and not re.match(r",?[^\W_]", answer[len(target) :])


def divide(
  rows: Sequence[dict[str, Any]], share: float, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """(rows to train on, a share of at least one row; the rest), the same for the same seed.

  Raises:
    ValueError: no row would be left to score.
  """
  count = max(1, round(share * len(rows)))
  if count >= len(rows):
    raise ValueError(f"train_share={share} of {len(rows)} rows leaves none; use a smaller share.")
  order = np.random.default_rng(seed).permutation(len(rows))
  chosen = set(order[:count].tolist())
  part = lambda inside: [row for n, row in enumerate(rows) if (n in chosen) == inside]
  return part(True), part(False)


def training_rows(
  paths: Sequence[str], share: float, *, split_seed: int = 0, limit: int | None = None
) -> Iterator[tuple[str, str]]:
  """The prompt and completion of rows that `run` with the same share and split seed never scores.

  Raises:
    DataError: a file is unreadable or of another format.
    ValueError: no row would be left to score.
  """
  for _, rows, _ in _parts(paths, share, split_seed, limit):
    for row in rows:
      yield prompt_of(row), f" {row['target']}"


def run(
  loaded: LoadedModel,
  paths: Sequence[str],
  *,
  max_tokens: int = 8,
  top_p: float | None = None,
  seed: int = 0,
  limit: int | None = None,
  train_share: float | None = None,
  split_seed: int = 0,
  batch: int = 8,
) -> Report:
  """Accuracy by file, such as qa1_0k.jsonl; greedy, or drawn from the likeliest with `top_p`.

  Of several files with such names, also by task and length, with the mean over the tasks.

  Args:
    limit: rows of a file that are scored, of those that are not to train on.
    train_share, split_seed: leave out the rows that `training_rows` gives.

  Raises:
    DataError: a file is unreadable or of another format.
    ValueError: a prompt is longer than the model's cache holds.
  """
  table, details = [], []
  for path, _, rows in _parts(paths, train_share, split_seed, limit):
    prompts = [prompt_of(row) for row in rows]
    how = {"max_tokens": max_tokens, "top_p": top_p, "seed": seed, "batch": batch}
    found = answers(loaded, prompts, **how)
    targets = [row["target"] for row in rows]
    right = [is_right(*pair) for pair in zip(found, targets, strict=True)]
    name = path.name.split(".")[0]
    table.append({"set": name, "rows": len(rows), "accuracy": float(np.mean(right))})
    each = zip(targets, found, strict=True)
    details += [{"set": path.name, "target": t, "answer": answer} for t, answer in each]
  settings = {"model": str(loaded.source), "step": loaded.step, "max_tokens": max_tokens}
  settings |= {"top_p": top_p, "seed": seed, "train_share": train_share}
  settings["split_seed"] = None if train_share is None else split_seed
  tables = {"sets": table}
  if by_length := _by_length(table):
    tables["accuracy by length"] = by_length
  return Report("babilong", settings, tables, {"answers": details})


def _parts(
  paths: Sequence[str], share: float | None, seed: int, limit: int | None
) -> Iterator[tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]]:
  """Each file with its first rows to train on and to score.

  The whole file is split, before the limit: the parts are the same whatever the limit is.
  """
  for source in paths:
    for path, rows in read_samples(source, _wrong, limit if share is None else None):
      train, score = ([], rows) if share is None else divide(rows, share, seed)
      yield path, train[:limit], score[:limit]


def _by_length(sets: Sequence[Row]) -> list[Row]:
  """A row per length with the accuracy of each task; none if names are not TASK_LENGTH."""
  named = {tuple(each["set"].rsplit("_", 1)): each["accuracy"] for each in sets}
  if len(named) < 2 or len(named) < len(sets) or any(len(name) < 2 for name in named):
    return []
  tasks, lengths = (list(dict.fromkeys(names)) for names in zip(*named, strict=True))
  rows: list[Row] = []
  for length in lengths:
    found = {task: named.get((task, length)) for task in tasks}
    known = [accuracy for accuracy in found.values() if accuracy is not None]
    rows.append({"length": length, **found, "mean": float(np.mean(known))})
  return rows


def _wrong(row: dict[str, Any]) -> str | None:
  names = ("input", "question", "target")
  given = all(isinstance(row.get(name), str) for name in names) and row["target"].strip()
  return None if given else 'strings "input", "question" and "target", which is not empty'
