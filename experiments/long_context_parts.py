"""The parts of `experiments.long_context`: rows to train on, and scores of a model."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import babilong, babilong_samples, needles, rouge
from experiments.answers import answers
from lnssm_jax import analysis, ops
from lnssm_jax.analysis.layers import each_layer
from lnssm_jax.pretrained import texts
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.tokenizers import Tokenizer
from train.data import packing
from train.data.errors import DataError
from train.scoring import memory, perplexity

STORIES = ("qa1", "qa2", "qa3", "qa4", "qa5")
TASKS = tuple(f"qa{number}" for number in range(1, 21))
KINDS = ("single_2", "multikey")
SETS = {  # of ROUGE without training, in the folder `rouge`
  "asqa": "asqa_dev.json",
  "eli5": "eli5_1000.json",
  "wikilarge": "wiki.full.aner.ori.test.src",
}
ANSWER, SUMMARY = 12, 64  # most tokens
DOCUMENTS = 4  # whose states are looked at
FIELDS = 4  # times the training length, of which receptive fields are measured


class Sizes(NamedTuple):
  """The model, its training, and how much is scored."""

  dim: int = 512
  num_layers: int = 6
  channel_hidden: int = 1408
  vocab_size: int = 8192
  length: int = 1024
  rows: int = 16  # windows per step and copy
  learning_rate: float = 1e-3  # of training on text
  steps: int = 1000
  finetuning_rate: float = 5e-4
  babilong_steps: int = 400
  needles_steps: int = 1000
  rouge_steps: int = 150
  questions_steps: int = 400
  train_share: float = 0.05  # of the questions of each of the 20 tasks
  questions: int = 200  # of each of the 20 tasks, that are scored
  stories: int = 1000  # of each task, to train on
  hidden: int = 20_000  # rows of each kind of needle, to train on
  unit: int = 1000  # tokens: BABILong is trained at 0 and 1 of these, scored at 0, 1, 2, 4
  samples: int = 50  # scored, of each task and length
  summaries: int = 100  # scored
  batch: int = 50  # prompts answered at once
  tokens: int = 262_144  # of held-out text
  longest: int = 32  # times the training length

  @classmethod
  def parse(cls, text: str) -> "Sizes":
    """`rows=2,length=64`: the default sizes but for these."""
    pairs = [part.split("=") for part in text.split(",") if part]
    default = cls()
    return default._replace(**{k: type(getattr(default, k))(value) for k, value in pairs})

  @property
  def changes(self) -> str:
    """The text to parse, in the order of the sizes; empty for the default ones."""
    changed = {k: v for k, v in self._asdict().items() if v != self._field_defaults[k]}
    return ",".join(f"{name}={value}" for name, value in changed.items())

  @property
  def times(self) -> list[int]:
    """1, 2, 4, ... to `longest`."""
    return [2**n for n in range(self.longest.bit_length())]

  @property
  def babilong_lengths(self) -> list[int]:
    return [n * self.unit for n in (0, 1, 2, 4)]

  @property
  def needle_lengths(self) -> list[int]:
    return [n * self.length for n in (1, 2, 4, 8)]


class Score(NamedTuple):
  """A number of one model."""

  of: str
  length: int
  measure: str
  value: float | None


class Part(NamedTuple):
  """An experiment: windows to train on, if any, and the scores of a model."""

  steps: int
  windows: dict[str, np.ndarray]
  reach: int  # most tokens of a text that the model reads
  score: Callable[[LoadedModel], Iterable[Score]]


def packed(
  rows: Iterable[tuple[str, str]], tokenizer: Tokenizer, length: int
) -> dict[str, np.ndarray]:
  """Windows [N, length] of whole rows (prompt, completion), as batches of `TokenWindows` have them.

  Each row has a state of its own. The loss counts the tokens of the completion and the end of text.
  Rows that are longer than a window are left out.

  Raises:
    ValueError: no row is short enough.
  """
  prompts, completions = (tokenizer.encode_batch(list(x)) for x in zip(*rows, strict=True))
  end = [tokenizer.end_of_text]
  encoded = [
    (np.concatenate([prompt, completion, end]), len(prompt))
    for prompt, completion in zip(prompts, completions, strict=True)
  ]
  encoded = [row for row in encoded if len(row[0]) - 1 <= length]
  if not encoded:
    raise ValueError(f"no row to train on has at most {length + 1} tokens; use a larger length.")
  chosen = packing.best_fit([len(ids) - 1 for ids, _ in encoded], length)
  weighted = [(ids, np.arange(1, len(ids)) >= prompt) for ids, prompt in encoded]
  windows = [packing.window([weighted[n] for n in members], length) for members in chosen]
  return {name: np.stack([window[name] for window in windows]) for name in windows[0]}


def shuffled(
  windows: dict[str, np.ndarray], rows: int, seeds: Sequence[int]
) -> Iterator[dict[str, np.ndarray]]:
  """Batches [R, rows, T] without end; each seed passes over the windows in an order of its own."""

  def order(seed):
    rng, count = np.random.default_rng(seed), len(windows["tokens"])
    while True:
      yield from rng.permutation(count)

  orders = [order(seed) for seed in seeds]
  while True:
    chosen = np.array([list(itertools.islice(each, rows)) for each in orders])
    yield {name: array[chosen] for name, array in windows.items()}


def text_part(data: Path, sizes: Sizes) -> Part:
  """Held-out text in longer windows."""
  (source,) = map(str, data.glob("lm/val_books.*"))
  how = {"train_length": sizes.length, "times": sizes.times, "tokens": sizes.tokens}

  def score(loaded):
    for row in perplexity.extrapolate(loaded, source, **how).tables["lengths"]:
      for measure in ("nats_per_token", "perplexity", "beyond"):
        yield Score("books", row["length"], measure, row[measure])

  return Part(0, {}, sizes.length * sizes.longest, score)


def states_part(data: Path, sizes: Sizes) -> Part:
  """How many directions the states after a training length of held-out text have."""
  (source,) = map(str, data.glob("lm/val_books.*"))

  def score(loaded):
    try:
      table = memory.states(loaded, source, length=sizes.length, rows=DOCUMENTS).tables["states"]
    except DataError:
      raise
    except ValueError:  # attention has a cache instead
      table = []
    for measure in ("entropy", "rank", "cosine"):
      values = [row[measure] for row in table if row[measure] is not None]
      mean = float(np.mean(values)) if values else None
      yield Score("mean of layers", sizes.length, measure, mean)

  return Part(0, {}, sizes.length, score)


def babilong_part(data: Path, tokenizer: Tokenizer, sizes: Sizes) -> Part:
  """Questions about facts, alone and among sentences of books."""
  make = functools.partial(babilong_samples.rows_of, data / "babi", tasks=STORIES)
  train, test = (f"{data}/lm/{name}_books.*" for name in ("train", "val"))
  lengths = sizes.babilong_lengths
  how = {"lengths": lengths[:2], "samples": sizes.stories, "split": "train", "seed": 1}
  rows = [row for _, _, found in make(train, tokenizer, **how) for row in found]
  windows = packed(
    [(babilong.prompt_of(row), f" {row['target']}") for row in rows], tokenizer, sizes.length
  )
  tests: dict[int, list[tuple[str, dict[str, str]]]] = {length: [] for length in lengths}
  for task, length, found in make(test, tokenizer, lengths=lengths, samples=sizes.samples):
    tests[length] += [(task, row) for row in found]

  def score(loaded):
    for length, asked in tests.items():
      # Batches have stories of all tasks, and so prompts of about the same lengths.
      asked = [asked[n] for n in np.random.default_rng(0).permutation(len(asked))]
      yield from _accuracies(loaded, asked, STORIES, length, sizes)

  prompts = [babilong.prompt_of(row) for asked in tests.values() for _, row in asked]
  reach = max(map(len, tokenizer.encode_batch(prompts))) + ANSWER
  return Part(sizes.babilong_steps, windows, reach, score)


def questions_part(data: Path, tokenizer: Tokenizer, sizes: Sizes) -> Part:
  """All 20 tasks without other text, trained on a share of the questions of their test files."""
  (text,) = map(str, data.glob("lm/val_books.*"))
  make = functools.partial(babilong_samples.rows_of, data / "babi", text, tokenizer)
  rows, asked = list[tuple[str, str]](), list[tuple[str, dict[str, str]]]()
  for task, _, found in make(tasks=TASKS, lengths=[0], samples=10**6):
    train, test = babilong.divide(found, sizes.train_share)
    rows += [(babilong.prompt_of(row), f" {row['target']}") for row in train]
    asked += [(task, row) for row in test[: sizes.questions]]
  # Batches have prompts of about the same lengths.
  asked.sort(key=lambda x: len(babilong.prompt_of(x[1])))
  reach = max(map(len, tokenizer.encode_batch([babilong.prompt_of(row) for _, row in asked])))
  windows = packed(rows, tokenizer, sizes.length)
  score = lambda loaded: _accuracies(loaded, asked, TASKS, 0, sizes)
  return Part(sizes.questions_steps, windows, reach + ANSWER, score)


def _accuracies(
  loaded: LoadedModel,
  asked: Sequence[tuple[str, dict[str, str]]],
  tasks: Sequence[str],
  length: int,
  sizes: Sizes,
) -> Iterator[Score]:
  """The accuracy of each task and their mean, and that of one answer to all of a task."""
  prompts = [babilong.prompt_of(row) for _, row in asked]
  found = answers(loaded, prompts, max_tokens=ANSWER, batch=sizes.batch)
  right: dict[str, list[bool]] = {task: [] for task in tasks}
  for (task, row), answer in zip(asked, found, strict=True):
    right[task].append(babilong.is_right(answer, row["target"]))
  means = {task: float(np.mean(each)) for task, each in right.items()}
  for task, mean in (means | {"mean": float(np.mean(list(means.values())))}).items():
    yield Score(task, length, "accuracy", mean)
  constant = [_share_of_most_frequent(task, asked) for task in tasks]
  yield Score("mean", length, "most_frequent_answer", float(np.mean(constant)))


def _share_of_most_frequent(task: str, asked: Sequence[tuple[str, dict[str, str]]]) -> float:
  """The accuracy of one answer to all questions of a task."""
  targets = [row["target"] for name, row in asked if name == task]
  return max(map(targets.count, targets)) / len(targets)


def needles_part(data: Path, tokenizer: Tokenizer, sizes: Sizes) -> Part:
  """Numbers hidden in books; as many tokens of rows of each length to train on."""
  train, test = (needles.sentences(f"{data}/lm/{name}_books.*") for name in ("train", "val"))

  def make(kind, length, seed, text):
    first = int(np.random.default_rng(seed).integers(len(text)))
    part = text[first : first + length]
    row = needles.make(kind, length, tokenizer, seed, part, answer=ANSWER)
    return row.prompt, f" {', '.join(row.values)}."

  lengths = itertools.cycle(sizes.length // n for n in (4, 2, 1) for _ in range(n))
  rows = [
    make(kind, next(lengths), 10**6 + n, train) for kind in KINDS for n in range(sizes.hidden)
  ]
  tests = {
    (kind, length): [make(kind, length, n, test) for n in range(sizes.samples)]
    for kind in KINDS
    for length in sizes.needle_lengths
  }

  def score(loaded):
    for (kind, length), made in tests.items():
      found = texts.scores(loaded.model, tokenizer, made, batch=sizes.batch)
      # Greedy decoding gives exactly this answer if each of its tokens is the likeliest.
      yield Score(kind, length, "recall", float(np.mean([each.likeliest.all() for each in found])))
      nats = -np.concatenate([each.log_probs for each in found])
      yield Score(kind, length, "nats_per_token", float(np.mean(nats)))

  return Part(
    sizes.needles_steps, packed(rows, tokenizer, sizes.length), sizes.needle_lengths[-1], score
  )


def rouge_part(data: Path, tokenizer: Tokenizer, sizes: Sizes) -> Part:
  """Summaries of abstracts."""
  train, test = (str(data / "scitldr" / f"{name}.jsonl") for name in ("train", "test"))
  windows = packed(rouge.training_rows("scitldr", [train]), tokenizer, sizes.length)
  how = {"max_tokens": SUMMARY, "limit": sizes.summaries, "batch": sizes.batch}

  def score(loaded):
    (row,) = rouge.run(loaded, "scitldr", [test], **how).tables["sets"]
    yield Score("SciTLDR", 0, "rouge_l", row["rouge_l"])

  samples = rouge.read("scitldr", test, sizes.summaries)
  prompts = [rouge.prompt_of("scitldr", sample) for sample in samples]
  reach = max(map(len, tokenizer.encode_batch(prompts))) + SUMMARY
  return Part(sizes.rouge_steps, windows, reach, score)


def zero_shot_part(data: Path, tokenizer: Tokenizer, sizes: Sizes) -> Part:
  """Answers to questions and simplified sentences, not trained further."""
  files = {kind: data / "rouge" / name for kind, name in SETS.items()}
  how = {"max_tokens": SUMMARY, "limit": sizes.summaries, "batch": sizes.batch}
  prompts = [
    rouge.prompt_of(kind, sample)
    for kind, file in files.items()
    for sample in rouge.read(kind, file, sizes.summaries)
  ]

  def score(loaded):
    for kind, file in files.items():
      (row,) = rouge.run(loaded, kind, [str(file)], **how).tables["sets"]
      yield Score(kind, 0, "rouge_l", row["rouge_l"])

  return Part(0, {}, max(map(len, tokenizer.encode_batch(prompts))) + SUMMARY, score)


def fields_part(data: Path, sizes: Sizes) -> Part:
  """The receptive fields of the states in held-out text, and how far partitions part values."""
  (source,) = map(str, data.glob("lm/val_books.*"))
  length = FIELDS * sizes.length  # most fields end within it

  def score(loaded):
    tokens = jnp.asarray(memory.beginnings(loaded, source, length, DOCUMENTS))
    try:
      fields = analysis.receptive_fields(loaded.model, tokens)
    except NotImplementedError:  # no layer forgets by a decay
      fields = []
    fields = [np.asarray(field) for field in fields if field is not None]
    for name, of in (("median", np.median), ("largest", np.max)):
      mean = float(np.mean([of(field) for field in fields])) if fields else None
      yield Score("mean of layers", length, f"{name}_field", mean)
    parted = [each for each in each_layer(_parted, loaded.model, tokens) if each is not None]
    for place, name in enumerate(("parted", "parted_at_random")):
      mean = float(np.mean([each[place] for each in parted])) if parted else None
      yield Score("mean of layers", length, name, mean)

  return Part(0, {}, length, score)


def _parted(mixer, x, segment_ids):
  """The share of the variance of a layer's values that is between partitions, by the first
  partition of each token and by the same at random; None of a mixer without partitions."""
  with ops.recording() as calls:
    mixer(x, None, segment_ids)
  found = [call.arguments for call in calls if call.op == "sparse_state_attention"]
  if not found:
    return None
  values = found[0]["v"].astype(jnp.float32)
  values = values.reshape(values.shape[0] * values.shape[1], -1)
  chosen, count = found[0]["indices"][..., 0].reshape(-1), found[0]["num_partitions"]
  by_chance = jax.random.permutation(jax.random.key(0), chosen)
  return between(values, chosen, count), between(values, by_chance, count)


def between(values: jax.Array, chosen: jax.Array, count: int) -> jax.Array:
  """The share of the variance of `values` [n, D] between `count` groups; [n] says whose each is."""
  values = values - values.mean(axis=0)
  inside = jax.nn.one_hot(chosen, count)
  sums = inside.T @ values
  return jnp.sum(sums**2 / jnp.maximum(inside.sum(axis=0), 1)[:, None]) / jnp.sum(values**2)


def missing(names: Sequence[str], data: Path) -> list[str]:
  """Patterns of files that the parts need and that `data` has none of."""
  stories = [f"babi/{task}_*{split}.txt" for task in STORIES for split in ("train", "test")]
  needed = {
    "babilong": stories,
    "questions": [f"babi/{task}_*test.txt" for task in TASKS],
    "zero_shot": [f"rouge/{name}" for name in SETS.values()],
    "rouge": ["scitldr/train.jsonl", "scitldr/test.jsonl"],
  }
  patterns = ["lm/train_books.*", "lm/val_books.*"]
  patterns += [pattern for name in names for pattern in needed.get(name, [])]
  return [pattern for pattern in patterns if not any(data.glob(pattern))]


def make_parts(
  names: Sequence[str], data: Path, tokenizer: Tokenizer, sizes: Sizes
) -> dict[str, Part]:
  """The parts by name, with their rows."""
  made = {
    "extrapolate": lambda: text_part(data, sizes),
    "states": lambda: states_part(data, sizes),
    "babilong": lambda: babilong_part(data, tokenizer, sizes),
    "needles": lambda: needles_part(data, tokenizer, sizes),
    "rouge": lambda: rouge_part(data, tokenizer, sizes),
    "questions": lambda: questions_part(data, tokenizer, sizes),
    "zero_shot": lambda: zero_shot_part(data, tokenizer, sizes),
    "fields": lambda: fields_part(data, sizes),
  }
  parts = {name: made[name]() for name in names}
  # A cache of one size is one program for all answers; that of the longest text is much larger.
  reach = max((part.reach for part in parts.values() if part.steps), default=0)
  return {name: part._replace(reach=reach) if part.steps else part for name, part in parts.items()}


def scored_tokens(name: str, sizes: Sizes) -> dict[int, int]:
  """Tokens that a model reads to be scored, by the length of their texts; at most so many."""
  asked = len(STORIES) * sizes.samples
  return {
    "extrapolate": {n * sizes.length: sizes.tokens for n in sizes.times},
    "states": {sizes.length: 2 * DOCUMENTS * sizes.length},
    "babilong": {n or sizes.unit: asked * (n or sizes.unit) for n in sizes.babilong_lengths[1:]},
    "needles": {n: len(KINDS) * sizes.samples * n for n in sizes.needle_lengths},
    "rouge": {sizes.length: sizes.summaries * sizes.length},
    "questions": {sizes.length: len(TASKS) * sizes.questions * sizes.length},
    "zero_shot": {sizes.length: len(SETS) * sizes.summaries * sizes.length},
    "fields": {FIELDS * sizes.length: 2 * DOCUMENTS * FIELDS * sizes.length},
  }[name]
