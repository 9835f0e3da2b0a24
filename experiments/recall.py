"""Recall of a value from a text: FDA, SWDE, SQuAD, NQ, TriviaQA and DROP as completions.

Rows of a .jsonl file: {"text", "key", "value"} (FDA, SWDE), {"context", "question", "answers"} (NQ,
TriviaQA, DROP) or {"text", "value"}, whose text ends with the words before the value (SQuAD), with
"context" and "question" for reading twice; or {"context", "answer", "aliases"}, whose context is
the whole prompt, for questions without a text. The prompts, "." at the end of a text that has none:

    text. Key:            text. question             text
    Information about Key. text.<newline>text. Key:  question text.<newline>text. question
                                                     question context<newline>text

The second line is the prompt that is read twice (JRT); where a row has "orig_question", it comes
first. A key or question that the text ends with is removed, and from the context of rows with a
question the markers [PAR], [DOC] and [TLE] of TriviaQA's pages. An answer, up to the line feed, is
right if it contains the value in whatever case.

Source: Just Read Twice (Arora et al. 2024), section 3 and its code, which Longhorn's table 1 uses.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.answers import answers
from experiments.samples import read_samples
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.tokenizers import encode_whole
from train.scoring.report import Report

_SUMMARY = "Summary of information above..."  # what follows it in a text of SWDE is a prompt
_MARKERS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # of paragraphs, documents and titles in TriviaQA


def prompt_of(row: dict[str, Any], *, twice: bool = False) -> str:
  """The text before the value."""
  if "answer" in row:
    return row["context"].rstrip()
  if "key" in row:
    key = row["key"][0].upper() + row["key"][1:]
    text = _sentence(row["text"].split(_SUMMARY)[0], row["key"] + ":")
    return f"Information about {key}. {text}\n{text} {key}:" if twice else f"{text} {key}:"
  question = row.get("question", "").strip()
  if "text" in row:
    text = row["text"].strip()
    if not twice:
      return text
    return f"{question} {row['context'].split('Question:')[0]}\n{text}"
  text = _sentence(_MARKERS.sub("", row["context"]), question)
  first = row.get("orig_question", question).strip(":")
  return f"{first} {text}\n{text} {question}" if twice else f"{text} {question}"


def values_of(row: dict[str, Any]) -> list[str]:
  """The values of which an answer has to contain one."""
  if "answer" in row:
    return [row["answer"], *row.get("aliases", ())]
  return list(row["answers"]) if "answers" in row else [row["value"]]


def is_right(answer: str, values: Sequence[str]) -> bool:
  """Whether one of the values is in the answer, in whatever case."""
  return any(value.lower() in answer.lower() for value in values)


def run(
  loaded: LoadedModel,
  paths: Sequence[str],
  *,
  twice: bool = False,
  max_tokens: int = 48,
  length: int | None = None,
  limit: int | None = None,
  batch: int = 8,
) -> Report:
  """The share of right answers by file; `length` leaves out rows with longer prompts, in tokens.

  Raises:
    DataError: a file is unreadable or of another format.
    ValueError: a prompt is longer than the model's cache holds, or `length` leaves out all rows.
  """
  table, details, shortest = [], [], math.inf
  for source in paths:
    for path, rows in read_samples(source, _wrong_twice if twice else _wrong, limit):
      prompts = [prompt_of(row, twice=twice) for row in rows]
      kept = list(range(len(prompts)))
      if length is not None:
        sizes = [len(encode_whole(loaded.tokenizer, prompt)) for prompt in prompts]
        kept, shortest = [n for n in kept if sizes[n] <= length], min(shortest, *sizes)
      prompts = [prompts[n] for n in kept]
      found = answers(loaded, prompts, max_tokens=max_tokens, until=("\n",), batch=batch)
      values = [values_of(rows[n]) for n in kept]
      right = [is_right(*pair) for pair in zip(found, values, strict=True)]
      accuracy = float(np.mean(right)) if right else None
      table.append({"set": path.name.split(".")[0], "rows": len(kept), "accuracy": accuracy})
      each = zip(values, found, strict=True)
      details += [{"set": path.name, "values": v, "answer": answer} for v, answer in each]
  if not details and shortest < math.inf:
    raise ValueError(
      f"length={length} leaves no row: the shortest prompt has {shortest} tokens; use --length"
      f" {shortest} or more, or leave it out."
    )
  settings = {"model": str(loaded.source), "step": loaded.step}
  settings |= {"prompt": "twice" if twice else "once", "max_tokens": max_tokens, "length": length}
  return Report("recall", settings, {"sets": table}, {"answers": details})


def _sentence(text: str, end: str) -> str:
  """The text without `end` at its end, and with one full stop."""
  text = text.strip()
  while end and text.lower().endswith(end.lower()):
    text = text[: -len(end)].strip()
  return text.strip(".").strip() + "."


def _wrong(row: dict[str, Any]) -> str | None:
  is_text = lambda *names: all(isinstance(row.get(name), str) and row[name] for name in names)
  is_list = lambda several: (
    isinstance(several, list) and all(isinstance(x, str) and x for x in several)
  )
  if "answer" in row:
    right = is_text("context", "answer") and is_list(row.get("aliases", []))
    return None if right else '"context", "answer" and, if any, a list "aliases"; no text empty'
  if is_text("text", "value") and ("key" not in row or is_text("key")):
    return None
  listed = is_list(row.get("answers")) and row["answers"]
  if is_text("context", "question") and (listed or ("answers" not in row and is_text("value"))):
    return None
  return (
    '"text", "key", "value", or "context", "question", "answers", or "text", "value"; none of them'
    " empty"
  )


def _wrong_twice(row: dict[str, Any]) -> str | None:
  if (missing := _wrong(row)) is not None:
    return missing
  if "answer" in row:
    return 'a text to read twice, which rows with "answer" do not have'
  if "text" in row and "key" not in row and not {"context", "question"} <= set(row):
    return 'also "context" and "question", which a prompt that is read twice begins with'
  return None
