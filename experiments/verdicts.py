"""The differences that claims.md and the pages of results/ quote, from the files there.

    python -m experiments verdicts

A difference has its 95 % interval: of Welch's t-test, or of the paired one where the file has the
runs one by one and both models the same seeds. Where a run either solves a task or does not, the
share of runs that do has Wilson's interval, and a ratio of two differences Fieller's. In files with
the runs of a sweep one by one the seed that chose the rates has no part.
"""

import csv
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from train.messages import show

RESULTS = Path(__file__).parent / "results"
SOLVED = 0.99  # the accuracy at which a run of a sweep ends

Which = dict[str, str]  # the columns that name a model, and their values


class Difference(NamedTuple):
  """`score` of `first` minus that of `second`, each the rows of a file that have these values."""

  file: str
  score: str
  first: Which
  second: Which

  def __str__(self) -> str:
    runs = " and ".join(str(len(values)) for values in self.values())
    how = "paired" if self.paired else "Welch"
    return (
      f"{self.file}, {self.score}: {named(self.first)} - {named(self.second)}, {runs} runs, {how}"
    )

  @property
  def text(self) -> str:
    """The difference and its interval."""
    first, second = self.values()
    found = math.fsum(first) / len(first) - math.fsum(second) / len(second)
    test = stats.ttest_rel if self.paired else functools.partial(stats.ttest_ind, equal_var=False)
    low, high = test(first, second).confidence_interval(0.95)
    return f"{found:+.3f} [{low:.3f}, {high:.3f}]"

  @property
  def paired(self) -> bool:
    """Whether the file has the runs one by one."""
    return not is_summary(self.file)

  def values(self) -> tuple[list[float], list[float]]:
    """Those of the runs of each, in the order of their seeds where the file has it."""
    first, second = (values_of(self.file, self.score, which) for which in self[2:])
    return first, second


class Solved(NamedTuple):
  """How many runs of a model, over all columns of a file that are not named, reach `least`."""

  file: str
  which: Which
  least: float = SOLVED
  score: str = "accuracy"

  def __str__(self) -> str:
    return f"{self.file}, {self.score} of {self.least} or more: {named(self.which)}"

  @property
  def text(self) -> str:
    """Their number and the interval of their share."""
    values = values_of(self.file, self.score, self.which)
    solved = sum(x >= self.least for x in values)
    low, high = stats.binomtest(solved, len(values)).proportion_ci(0.95, method="wilson")
    return f"{solved} of {len(values)} [{low:.2f}, {high:.2f}]"


class Closed(NamedTuple):
  """The share of a gap that a model closes, (worst - model) / (worst - best), by the same seeds."""

  file: str
  score: str
  worst: Which
  model: Which
  best: Which

  def __str__(self) -> str:
    names = (named(which) for which in (self.model, self.worst, self.best))
    return "{}, {}: of {} between {} and {}, Fieller".format(self.file, self.score, *names)

  @property
  def text(self) -> str:
    """The share in percent and its interval."""
    worst, model, best = (values_of(self.file, self.score, which) for which in self[2:])
    closed = [a - b for a, b in zip(worst, model, strict=True)]
    gap = [a - b for a, b in zip(worst, best, strict=True)]
    low, high = fieller(closed, gap)
    return f"{100 * math.fsum(closed) / math.fsum(gap):.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def fieller(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
  """The 95 % interval of the ratio of two means of pairs: those r for which the paired t-test of
  first - r second finds no difference. NaN if that is not an interval.

  Source: Fieller 1954.
  """
  count = len(first)
  x, y = math.fsum(first) / count, math.fsum(second) / count
  (xx, xy), (_, yy) = np.cov(first, second) / count * stats.t.ppf(0.975, count - 1) ** 2
  a, b, c = y * y - yy, x * y - xy, x * x - xx
  if a <= 0 or b * b < a * c:
    return math.nan, math.nan
  root = math.sqrt(b * b - a * c)
  return (b - root) / a, (b + root) / a


def named(which: Which) -> str:
  """The model in a line."""
  return ", ".join(which.values())


@functools.cache
def rows_of(file: str) -> Sequence[Which]:
  """The rows of a file of results/."""
  with (RESULTS / file).open(newline="") as lines:
    return list(csv.DictReader(lines))


def is_summary(file: str) -> bool:
  """Whether its rows are of all seeds at one rate, and not of a run each."""
  return "best" in rows_of(file)[0]


def values_of(file: str, score: str, which: Which) -> list[float]:
  """The score of each run: as the file has it, or from its summary over seeds at the best rate.

  Raises:
    ValueError: the file has no such rows.
  """
  rows = [row for row in rows_of(file) if all(row[name] == x for name, x in which.items())]
  if is_summary(file):
    found = [x for row in rows if row["best"] == "True" for x in seeds_of(row, score)]
  elif "measure" in rows_of(file)[0]:
    found = [float(row["value"]) for row in rows if row["measure"] == which.get("measure", score)]
  else:
    found = [float(row[score]) for row in rows if row.get("use", "result") == "result"]
  if not found:
    raise ValueError(f"{file} has no rows with {which} and a score {score!r}.")
  return found


def seeds_of(row: Which, score: str) -> list[float]:
  """The values that have the mean, standard deviation, minimum and maximum of a row, of up to 4."""
  count, mean = int(row["runs"]), float(row[score])
  if count == 1:
    return [mean]
  low, high, std = (float(row[f"{score} {name}"]) for name in ("min", "max", "std"))
  if count == 2:
    return [low, high]
  middle = count * mean - low - high
  if count == 3:
    return [low, middle, high]
  if count != 4:
    raise ValueError(f"a row of {count} runs has no known values; at most 4 can be computed.")
  squares = 3 * std**2 - (low - mean) ** 2 - (high - mean) ** 2
  apart = math.sqrt(max(squares / 2 - (middle / 2 - mean) ** 2, 0.0))
  return [low, middle / 2 - apart, middle / 2 + apart, high]


def _books(file: str, *columns: str):
  """Differences of the loss on books, by the names in these columns."""
  of = lambda names: dict(zip(columns, names.split(), strict=True))
  return lambda *pairs: [Difference(file, "val_books loss", of(a), of(b)) for a, b in pairs]


def _recall(file: str, column: str, **where: str):
  """Differences of the accuracy, by the name in one column, in rows with these values."""
  of = lambda name: {column: name} | where
  return lambda a, b: Difference(file, "accuracy", of(a), of(b))


def _long(part: str, score: str, of: str):
  """Differences of a score of long_context.csv, by mixer and length."""
  row = lambda mixer, length: {"part": part, "mixer": mixer, "of": of, "length": length}
  return lambda a, b: Difference("long_context.csv", score, row(*a), row(*b))


def _normalized(positions: str, score: str):
  """Differences of lm_normalization.csv between models with these positions."""
  row = lambda name: {"model": name, "positions": positions}
  return lambda a, b: Difference("lm_normalization.csv", score, row(a), row(b))


def _convolution(*pairs, sets: Sequence[str] = ("books",)):
  """Differences of lm_convolution.csv between (model, convolution), of the loss on these sets."""
  row = lambda model, convolution: {"model": model, "convolution": convolution}
  return [
    Difference("lm_convolution.csv", f"val_{of} loss", row(*a), row(*b))
    for of in sets
    for a, b in pairs
  ]


_SIZES = [("64", "16"), ("64", "64"), ("128", "16"), ("128", "64")]
_dsf = lambda width, state: _recall("mqar_dsf.csv", "model", width=width, state=state, mlp="no")
_accuracy = _long("babilong", "accuracy", "mean")
_entropy, _rank, _cosine = (
  _long("states", x, "mean of layers") for x in ("entropy", "rank", "cosine")
)
_needles = _long("needles", "recall", "single_2")
_nats = _long("extrapolate", "nats_per_token", "books")
_lnssm = _books("lm_lnssm.csv", "model", "channels")
_longhorn = _books("lm_longhorn.csv", "model")
_sse = _books("lm_sse.csv", "model")
_lcsm = _books("lm_lcsm.csv", "code")

_questions = _long("questions", "accuracy", "mean")
_newest = _books("lm_newest.csv", "model")

_PUBLISHED = ("attention", "longhorn", "mamba", "rwkv", "based", "hyena", "base_conv")
_RECALLING = (
  *("rwkv7", "kda", "gated_delta_net", "gated_delta_net2", "comba", "delta_product", "mamba2"),
)
_RECURRENCES = ("gla", "mamba2", "sse", "longhorn", "lnssm", "rwkv5")

# By claim, in the order of claims.md.
COMPARISONS: dict[str, Sequence[Difference | Solved | Closed]] = {
  "LNSSM's channel mixer (figure 1)": _lnssm(
    ("rwkv4 gpt2", "rwkv4 rwkv"),
    ("mamba2 gpt2", "mamba2 none"),
    ("lnssm gpt2", "lnssm rwkv"),
  ),
  "LNSSM against RWKV, all with MLP (figure 5)": _lnssm(
    ("lnssm gpt2", "rwkv4 gpt2"),
    ("lnssm gpt2", "rwkv5 gpt2"),
    ("lnssm rwkv", "rwkv5 rwkv"),
  ),
  "LNSSM against attention on BABILong (figure 6)": [
    _accuracy(("lnssm", n), ("softmax_attention", n)) for n in ("1000", "4000")
  ],
  "LNSSM against Mamba-2": [
    *(_accuracy(("lnssm", n), ("mamba2", n)) for n in ("0", "4000")),
    _long("rouge", "rouge_l", "SciTLDR")(("lnssm", "0"), ("mamba2", "0")),
  ],
  "LNSSM on all 20 BABILong tasks": [
    _questions(("lnssm", "0"), (name, "0")) for name in ("mamba2", "rwkv5", "rwkv4")
  ],
  "LNSSM's ROUGE-L without further training": [
    _long("zero_shot", "rouge_l", kind)(("lnssm", "0"), ("mamba2", "0"))
    for kind in ("asqa", "eli5", "wikilarge")
  ],
  "size of linear attention's state": [
    Difference(
      "mqar_dsf.csv",
      "accuracy",
      *({"model": "linear", "width": width, "state": n, "mlp": "no"} for n in ("64", "16")),
    )
    for width in ("64", "128")
  ],
  "normalized against linear attention": [_dsf(*x)("normalized", "linear") for x in _SIZES],
  "S6 and SSD against normalized attention": [
    _dsf(*x)(name, "normalized") for x in _SIZES for name in ("s6", "ssd")
  ],
  "normalization in language models": [
    *(
      _normalized(where, score)(*pair)
      for where in ("none", "learned")
      for score in ("val_books loss", "val_wikitext103 loss")
      for pair in (("linear", "softmax"), ("normalized", "linear"))
    ),
    Closed(
      "lm_normalization.csv",
      "val_books loss",
      worst={"model": "linear", "positions": "learned"},
      model={"model": "normalized", "positions": "learned"},
      best={"model": "softmax", "positions": "learned"},
    ),
  ],
  "Longhorn against Mamba": _longhorn(("longhorn", "mamba")),
  "Longhorn's recall": [
    Solved("mqar_longhorn.csv", {"model": name}, least)
    for name, least in (("attention", 0.9), ("based", 0.9), ("longhorn", 0.9), ("mamba", 0.9))
  ],
  "recall as published": [
    *(Solved("mqar_published.csv", {"model": name, "length": "64"}) for name in _PUBLISHED),
    *(
      Difference(
        "mqar_published.csv",
        "test accuracy",
        *({"model": model, "length": "64"} for model in ("longhorn", name)),
      )
      for name in ("mamba", "rwkv", "based", "hyena", "base_conv")
    ),
  ],
  "recall as published in longer rows": [
    *(
      Solved("mqar_published_longer.csv", {"model": "attention", "length": "128", **rate})
      for rate in ({"learning_rate": x} for x in ("0.00046", "0.0022", "0.01"))
    ),
    *(
      Solved("mqar_published_longer.csv", {"model": name, "length": "128"})
      for name in _PUBLISHED[1:-1]
    ),
    Difference(
      "mqar_published_longer.csv",
      "test accuracy",
      *({"model": model, "length": "128"} for model in ("longhorn", "mamba")),
    ),
  ],
  "the newest mixers' recall": [
    Solved("mqar_newest.csv", {"model": name, "length": "64"})
    for name in (*_RECALLING, "gla", "mlstm", "mamba3")
  ],
  "the newest mixers as language models": _newest(
    ("rwkv7", "mamba2"),
    ("mamba3", "mamba2"),
    ("mamba2", "gla"),
    ("gated_delta_net", "gla"),
    ("kda", "gated_delta_net"),
    ("gated_delta_net2", "gated_delta_net"),
    ("gla", "softmax_attention"),
  ),
  "a larger eps in the norm of GLA's outputs": _newest(
    ("gla_eps", "gla"),
    ("mamba2", "gla_eps"),
    ("gated_delta_net", "gla_eps"),
    ("gla_eps", "softmax_attention"),
  ),
  "extrapolation from 1,024 to 32,768 tokens": [
    _nats((name, "32768"), (name, "1024"))
    for name in ("longhorn", "lnssm", "gla", "mamba2", "sse", "softmax_attention", "delta_net")
  ],
  "SSE as a language model": _sse(
    ("sse-n4k1", "gla"),
    ("sse-n4k1", "mom-n4k1"),
    ("mom-n4k1", "gla"),
    ("mom-n4k2", "gla"),
    ("sse-n4k1", "sse-n4k2"),
    ("sse-n4k1", "gdn"),
  ),
  "SSE and MoM as models of bytes": [
    Difference(
      "sparse_training.csv", "score", *({"mixer": name, "of": "val_books"} for name in pair)
    )
    for pair in (("sse", "gla"), ("mom", "gla"))
  ],
  "a layer of attention": _sse(
    ("sse-n4k1", "sse-h"),
    ("gla-h", "gla"),
    ("sse-n4k1", "transformer"),
    ("sse-h", "transformer"),
    ("gla-h", "transformer"),
  ),
  "states of equal size": [
    Solved("mqar_states.csv", {"model": name, "rows": rows})
    for name in ("sse", "gla", "mom")
    for rows in ("96", "160")
  ],
  "partitions": [Solved("mqar_partitions.csv", {"partitions": "8", "selected": "1"})],
  "selected rows": [
    Solved("mqar_top_k.csv", {"model": name, "rows": rows}, least)
    for name, least in (("gla", SOLVED), ("gsa", 0.5), ("metala", SOLVED))
    for rows in ("top quarter", "all")
  ],
  "entropy and rank of states": [x(("sse", "1024"), ("gla", "1024")) for x in (_entropy, _rank)],
  "rows of states": [_cosine(("sse", "1024"), ("gla", "1024"))],
  "needles": [
    _needles((a, n), (b, n))
    for n in ("1024", "8192")
    for a, b in (("sse", "gla"), ("longhorn", "sse"))
  ],
  "a short convolution": _convolution(
    *(((name, "with"), (name, "without")) for name in _RECURRENCES),
    sets=("books", "peps", "openwebtext", "wikitext103"),
  ),
  "recurrences with and without one": _convolution(
    *(
      ((a, how), (b, how))
      for how in ("without", "with")
      for a, b in (
        ("lnssm", "rwkv5"),
        ("longhorn", "mamba2"),
        ("sse", "gla"),
        ("mamba2", "rwkv5"),
      )
    ),
  ),
  "LCSM's decay": _lcsm(
    ("1-10-1-0", "1-4-1-0"),
    ("1-1-1-0", "1-4-1-0"),
    ("0-1-1-0", "1-1-1-0"),
    ("1-1-0-0", "1-1-1-0"),
  ),
  "LCSM's codes 2, 3 and 4": _lcsm(("1-2-1-0", "1-4-1-0"), ("1-3-1-0", "1-4-1-0")),
  "LCSM's state-space parameters": _lcsm(("0", "1-1-1-0")),
  "LCSM's activation in recall": [
    _recall("mqar_lcsm.csv", "code", width=width)("1-10-1-1", "1-10-1-0") for width in ("64", "128")
  ],
  "LCSM's rotation and activation in recall": [
    Difference("mqar_lcsm_parts.csv", "test accuracy", {"code": code}, {"code": other})
    for code, other in (
      ("1-11-1-0", "1-10-1-0"),
      ("1-11-1-0", "1-0-1-0"),
      ("1-11-1-0", "1-2-1-0"),
      ("1-11-1-0", "1-1-1-0"),
      ("1-10-1-6", "1-10-1-0"),
    )
  ],
  "LCSM's constant decays in recall": [
    _recall("mqar_lcsm.csv", "code", width=width)("1-0-1-0", "1-1-1-0") for width in ("64", "128")
  ],
}


def show_all() -> None:
  """Prints all comparisons."""
  for claim, comparisons in COMPARISONS.items():
    show(claim)
    for comparison in comparisons:
      show(f"  {comparison.text:28} {comparison}")
