"""Long context at a small scale: extrapolation, BABILong, needles and ROUGE over several seeds.

    python -m experiments.long_context --data FOLDER --out experiments/results/long_context.csv
    python -m experiments.long_context --data FOLDER --only needles --mixers gla sse
    python -m experiments.long_context --out experiments/results/long_context.csv \
      --plots experiments/results   # needs no data
    python -m experiments.long_context --dry-run   # parameters, tokens and FLOPs; needs no data

FOLDER has

    lm/train_books.jsonl.xz, lm/val_books.jsonl.xz     running text, or .txt and so on
    babi/qa1_*_train.txt, babi/qa1_*_test.txt, ...     bAbI's text files of qa1 to qa5
    scitldr/train.jsonl, scitldr/test.jsonl            SciTLDR, for which rouge-score is needed

Each mixer is trained on the books, in the same model (6 layers of 512, SwiGLU of 1,408, a BPE of
8,192 entries, tied embeddings), in bfloat16, for 1,000 steps of 16 x 1,024 tokens with one learning
rate. From there each part continues with a new optimizer:

    extrapolate  not trained further; perplexity of held-out books in windows of 1 to 32 times the
                 training length; `beyond`: of tokens further into their window than that length
    states       not trained further; entropy of singular values, effective rank and cosines of rows
                 of the states after a training length of held-out books (`train task states`)
    babilong     trained on stories of bAbI's training files, alone and in 1,000 tokens of books;
                 accuracy on those of its test files in 0, 1,000, 2,000 and 4,000 tokens, and that
                 of always giving the most frequent answer of a task
    needles      trained on a number hidden in 256, 512 or 1,024 tokens of books, alone (single_2)
                 or among four (multikey); in 1,024, 2,048, 4,096 and 8,192 tokens its share of
                 greedy answers that are right, and nats per token of the right one
    rouge        trained on SciTLDR's training summaries; ROUGE-L on 100 of its test set

and, only where `--only` names them,

    questions    trained on 5 % of the questions of the test files of all 20 tasks, without books;
                 accuracy on 200 others of each (`babi/qa1_*_test.txt` to `qa20`)
    zero_shot    not trained further; ROUGE-L on 100 rows each of ASQA, ELI5 and WikiLarge
                 (`rouge/asqa_dev.json`, `eli5_1000.json`, `wiki.full.aner.ori.test.src` and `.dst`)
    fields       not trained further; receptive fields of the states, and the share of the variance
                 of SSE's values that is between partitions

The loss of these is that of answer and end of text alone; answers are greedy; books are other ones
when it is scored. LNSSM trains on 2.5 to 10 % of the rows of BABILong and scores the rest. Here the
rows to train on are of other files, and many more, since a model of this size learns little from
so few.

The seeds of a mixer are copies of one program (`train.step.copies`), each with its own initial
values and order of the data. Further training runs in the same program: rows are packed into
windows of the same length, each with a state of its own. The programs of the next mixers are
compiled while one trains. `--out` is written after each part of a mixer; what it has is not
measured again, but drawn.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx

from benchmarks import csv_rows
from experiments import long_context_parts, over_seeds, rouge
from experiments.long_context_parts import STORIES, Part, Score, Sizes
from experiments.small_runs import COLORS
from lnssm_jax import mixers
from lnssm_jax.files.buckets import local
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.tokenizers import Tokenizer
from train import loop
from train.config import Data, Model, Optimizer, Train, to_dict
from train.data import tokenize
from train.data.tokenizers import tokenizer_of
from train.data.windows import TokenWindows, train_batches
from train.step import flops
from train.step.copies import Copies
from train.step.model import model_graph
from train.sweeps import Plot, tables

PARTS = ("extrapolate", "states", "babilong", "needles", "rouge")
MORE = ("questions", "zero_shot", "fields")  # only where they are asked for
MIXERS: dict[str, tuple[int, dict[str, Any]]] = {  # heads and options; others have 4 and none
  "lnssm": (4, {}),
  "gla": (4, {}),
  "longhorn": (4, {}),
  "mamba2": (4, {}),
  "softmax_attention": (8, {}),
  "sse": (4, {"num_partitions": 4}),
}
SHOWN = ("perplexity", "rank", "accuracy", "recall", "rouge_l", "median_field", "parted")


class Picture(NamedTuple):
  """The axes of a part's picture, and the panel of each measure ("": a panel per task)."""

  plot: Plot
  score: str
  measures: dict[str, str]
  bars: Literal["range", "std"] = "std"
  share_y: bool = True


PICTURES = {
  "extrapolate": Picture(
    Plot(x="length", line="mixer", colors=COLORS, panel="tokens"),
    "perplexity",
    {"perplexity": "all", "beyond": "beyond the training length"},
    bars="range",
  ),
  "states": Picture(
    Plot(x="mixer", panel="states:"),
    "mean over layers and heads",
    {"rank": "effective rank", "entropy": "entropy", "cosine": "cosine of rows"},
    share_y=False,
  ),
  "babilong": Picture(
    Plot(x="length", line="mixer", colors=COLORS, panel="BABILong:"), "accuracy", {"accuracy": ""}
  ),
  "needles": Picture(
    Plot(x="length", line="mixer", colors=COLORS, panel="needles"),
    "recall",
    {"recall": ""},
    bars="range",
  ),
  "rouge": Picture(Plot(x="mixer", panel="summaries of"), "ROUGE-L", {"rouge_l": ""}),
  "questions": Picture(
    Plot(x="of", line="mixer", colors=COLORS), "accuracy without other text", {"accuracy": ""}
  ),
  "zero_shot": Picture(Plot(x="mixer", panel="answers to"), "ROUGE-L", {"rouge_l": ""}),
  "fields": Picture(
    Plot(x="mixer", panel="states:"),
    "mean over layers",
    {"median_field": "median receptive field", "parted": "variance between partitions"},
    share_y=False,
  ),
}
FIELDS = ("part", "mixer", "seed", "of", "length", "measure", "value", "parameters", "sizes",
          "note")  # fmt: skip


def settings(mixer: str, sizes: Sizes, data: str = "-", folder: str = "-") -> Train:
  """The run of a mixer on the books; `Copies.step` scales the constant learning rate."""
  heads, options = MIXERS.get(mixer, (4, {}))
  return Train(
    model=Model(
      mixer=mixer,
      mixer_options=options,
      num_heads=heads,
      dim=sizes.dim,
      num_layers=sizes.num_layers,
      vocab_size=sizes.vocab_size,
      channel_mixer="swiglu",
      channel_hidden=sizes.channel_hidden,
      norm="rms",
      embedding_norm=False,
      tie_embeddings=True,
    ),
    optimizer=Optimizer(
      peak_lr=sizes.learning_rate,
      final_lr=sizes.learning_rate,
      schedule="constant",
      b2=0.95,
      weight_decay=0.1,
      clip_norm=1.0,
    ),
    data=Data(
      folder=folder,
      tokenizer=f"bpe:{sizes.vocab_size}",
      train=("train_books",),
      sources={"train_books": f"{data}/lm/train_books.*"},
    ),
    run_dir="-",
    seq_len=sizes.length,
    global_batch=sizes.rows,
    steps=sizes.steps,
    eval_every=sizes.steps,
    checkpoint_every=sizes.steps,
  )


def compiled(cfg: Train, seeds: Sequence[int]) -> Copies:
  """The copies of a mixer, with the one program that trains them."""
  copies = Copies(cfg, seeds=seeds, learning_rates=(cfg.optimizer.peak_lr,))
  empty = np.zeros((len(seeds), cfg.global_batch, cfg.seq_len), np.int32)
  batch = dict.fromkeys(("tokens", "targets", "segment_ids"), empty)
  copies.compile(batch | {"weights": empty.astype(np.float32)})
  return copies


def train(copies: Copies, batches: Iterator[Any], steps: int, scale: float = 1.0) -> np.ndarray:
  """The losses [R], mean over the last tenth of the steps.

  The learning rate, times `scale`, rises for a twentieth of the steps and falls linearly to 0.
  """
  warmup, losses = max(1, steps // 20), []
  now = loop.Moment(0, copies.state)

  def step(state, batch):
    rate = min((now.step + 1) / warmup, (steps - now.step) / max(1, steps - warmup))
    state, metrics = copies.advance(state, batch, scale * rate)
    losses.append(metrics["loss"])
    return state, metrics

  loop.train(now, step, batches, steps=steps)
  return np.mean(jax.device_get(losses[-max(1, steps // 10) :]), axis=0)


def read_books(copies: Copies) -> np.ndarray:
  """Trains on the books, each copy in the order of its seed."""
  cfg = copies.cfg
  source = TokenWindows(f"{local(cfg.data.folder)}/train_books", cfg.seq_len, cfg.model.vocab_size)
  with contextlib.ExitStack() as stack:
    how = {"global_batch": cfg.global_batch}
    orders = [
      stack.enter_context(train_batches(source, seed=seed, **how)) for seed, _ in copies.runs
    ]
    batches = (jax.tree.map(lambda *xs: np.stack(xs), *each) for each in zip(*orders, strict=True))
    return train(copies, batches, cfg.steps)


def model_of(copies: Copies, number: int, reach: int, tokenizer: Tokenizer) -> LoadedModel:
  """A copy, whose cache, if it has one, holds `reach` tokens."""
  cfg = copies.cfg.model
  params = jax.tree.map(lambda x: x[number], copies.params)
  model = nnx.merge(model_graph(cfg), params)
  if model.max_length is not None:
    options = cfg.mixer_options | {"max_length": reach}
    cfg = dataclasses.replace(cfg, mixer_options=options)
    model = nnx.merge(model_graph(cfg), params)
  return LoadedModel(model, {"model": to_dict(cfg)}, 0, Path("-"), list, lambda: tokenizer)


def measure(
  copies: Copies, start: Any, part: Part, tokenizer: Tokenizer, sizes: Sizes
) -> Iterator[tuple[int, list[Score], str]]:
  """Yields seed, scores and a note of each copy, fine-tuned from the parameters `start`."""
  begin, note = time.time(), "no fine-tuning"
  copies.restart(start)
  seeds, losses = [seed for seed, _ in copies.runs], None
  if part.steps:
    scale = sizes.finetuning_rate / sizes.learning_rate
    losses = train(
      copies, long_context_parts.shuffled(part.windows, sizes.rows, seeds), part.steps, scale
    )
  learning, begin = time.time() - begin, time.time()
  for number, seed in enumerate(seeds):
    scores = list(part.score(model_of(copies, number, part.reach, tokenizer)))
    if losses is not None:
      note = f"loss of answers {losses[number]:.4f}; {learning:.0f} s for all seeds"
    yield seed, scores, f"{note}; scored in {time.time() - begin:.0f} s"
    begin = time.time()


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """The rows over seeds, their lengths as numbers."""
  names = ("part", "measure", "mixer", "of", "length", "parameters")
  return over_seeds.summary([row | {"length": int(row["length"])} for row in rows], names, "value")


def markdown(rows: Sequence[dict[str, Any]]) -> str:
  """A table of each part and measure: mixers down, lengths across."""
  found, lines = summary(rows), []
  for part, measure in dict.fromkeys((x["part"], x["measure"]) for x in found):
    here = [x for x in found if (x["part"], x["measure"]) == (part, measure)]
    lengths = sorted({x["length"] for x in here})
    seeds = " to ".join(map(str, sorted({x["seeds"] for x in here})))
    lines += [f"{part}, {measure}, mean ± standard deviation of {seeds} seeds:", ""]
    heads = [f"{n:,}" for n in lengths] if len(lengths) > 1 else [measure]
    lines.append(f"| mixer | of | {' | '.join(heads)} |")
    lines.append("|---|---|" + "---|" * len(lengths))
    for mixer, of in dict.fromkeys((x["mixer"], x["of"]) for x in here):
      cells = {x["length"]: x for x in here if (x["mixer"], x["of"]) == (mixer, of)}
      text = [over_seeds.text(cells[n]) if n in cells else "" for n in lengths]
      lines.append(f"| `{mixer}` | {of} | " + " | ".join(text) + " |")
    lines.append("")
  return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], part: str, output: Path) -> None:
  """Writes the picture of a part.

  Raises:
    ValueError: there are no rows of the part.
  """
  plot, score, measures, bars, share_y = PICTURES[part]
  found = [
    row | {str(plot.panel): measures[row["measure"]] or row["of"]}
    for row in summary(rows)
    if row["part"] == part and row["measure"] in measures
    if plot.x != "of" or row["of"] != "mean"
  ]
  if not found:
    raise ValueError(f"a plot of the part {part} was asked for, of which there are no rows yet.")
  over_seeds.draw(found, plot, score, output, bars, share_y)


def estimate(mixer: str, names: Sequence[str], sizes: Sizes, seeds: int) -> Iterator[str]:
  """Rows of a table: parameters, and for all seeds the tokens and model FLOPs of each part."""
  model = settings(mixer, sizes).model
  per_token = functools.cache(lambda length: _flops(model, length) or float("nan"))
  count = f"| `{mixer}` | {tables.parameters(model):,} |"
  steps = {"books": sizes.steps, **{name: getattr(sizes, f"{name}_steps", 0) for name in names}}
  for name, number in steps.items():
    trained = seeds * number * sizes.rows * sizes.length
    scored = {} if name == "books" else long_context_parts.scored_tokens(name, sizes)
    learning = flops.TRAINING_FACTOR * per_token(sizes.length) * trained / 1e15
    scoring = sum(seeds * tokens * per_token(length) for length, tokens in scored.items()) / 1e15
    read = seeds * sum(scored.values())
    yield f"{count} {name} | {trained:,} | {learning:.2f} | {read:,} | {scoring:.2f} |"


def _flops(model: Model, length: int) -> int | None:
  options = {"max_length": length} if model.mixer == "softmax_attention" else {}
  model = dataclasses.replace(model, mixer_options=model.mixer_options | options)
  return flops.model_flops_per_token(model, length)


def is_finished(rows, part: str, mixer: str, seeds: Sequence[int]) -> bool:
  """Whether the rows have the part of a mixer for all seeds."""
  found = {row["seed"] for row in rows if (row["part"], row["mixer"]) == (part, mixer)}
  return set(map(str, seeds)) <= found


def run(parser, args, sizes: Sizes, rows: list[dict[str, Any]]) -> None:
  """Trains and scores what `rows` lack, and adds it to them and to the file."""
  missing = {
    mixer: [part for part in args.only if not is_finished(rows, part, mixer, args.seeds)]
    for mixer in args.mixers
  }
  missing = {mixer: names for mixer, names in missing.items() if names}
  if not missing:
    return
  rows[:] = [row for row in rows if row["part"] not in missing.get(row["mixer"], ())]
  if not args.data:
    parser.error("training needs --data, the folder of texts and tasks.")
  needed = [part for part in args.only if any(part in names for names in missing.values())]
  if absent := long_context_parts.missing(needed, Path(args.data)):
    parser.error(f"--data {args.data} has no {', '.join(absent)}.")
  if "rouge" in needed or "zero_shot" in needed:
    rouge.scorer()  # raises before anything is trained if its package is missing
  cfgs = {mixer: settings(mixer, sizes, args.data, args.work) for mixer in missing}
  data = next(iter(cfgs.values())).data
  tokenize.prepare(data, progress=True, least={"train_books": sizes.length + 1})
  tokenizer = tokenizer_of(data)
  pool = concurrent.futures.ThreadPoolExecutor(2)
  try:
    first, *later = missing
    programs = {first: pool.submit(compiled, cfgs[first], args.seeds)}
    made = pool.submit(long_context_parts.make_parts, needed, Path(args.data), tokenizer, sizes)
    programs |= {mixer: pool.submit(compiled, cfgs[mixer], args.seeds) for mixer in later}
    for mixer, names in missing.items():
      begin = time.time()
      copies = programs.pop(mixer).result()
      waited = time.time() - begin
      losses = read_books(copies)
      start = copies.params
      parameters = sum(x.size for x in jax.tree.leaves(start)) // len(args.seeds)
      means = " ".join(f"{loss:.3f}" for loss in losses)
      print(
        f"{mixer}: {parameters:,} parameters, compiled after {waited:.0f} s,"
        f" {time.time() - begin - waited:.0f} s of training, loss {means}", flush=True,
      )  # fmt: skip
      for name in names:
        known = {"part": name, "mixer": mixer, "parameters": parameters, "sizes": sizes.changes}
        for seed, scores, note in measure(copies, start, made.result()[name], tokenizer, sizes):
          new = [known | {"seed": seed, "note": note} | score._asdict() for score in scores]
          rows += [{field: _text(row[field]) for field in FIELDS} for row in new]
          print(f"{mixer}, {name}, seed {seed}: {_shown(scores)}; {note}", flush=True)
          if args.out:
            csv_rows.write(args.out, FIELDS, rows)  # at once: a later failure loses nothing
  finally:
    pool.shutdown(cancel_futures=True)


def _shown(scores: Sequence[Score]) -> str:
  """The scores of a line of progress: one measure, and the mean of tasks alone."""
  kept = [x for x in scores if x.measure in SHOWN and x.of not in STORIES and x.value is not None]
  return ", ".join(f"{x.of} {x.length:,} {x.value:.3f}" for x in kept)


def _text(value: Any) -> str:
  if value is None:
    return ""
  return f"{value:.6g}" if isinstance(value, float) else str(value)


def main(arguments=None) -> list[dict[str, Any]]:
  """Trains and scores, printing lines as they come, then tables; returns the rows."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", help="folder of texts and tasks")
  parser.add_argument("--out", type=Path, help="a CSV file, which is continued")
  parser.add_argument("--only", nargs="+", choices=PARTS + MORE, default=list(PARTS))
  parser.add_argument("--mixers", nargs="+", choices=list(mixers.MIXERS), default=list(MIXERS))
  parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
  parser.add_argument("--sizes", default="", metavar="rows=2,length=64", help="other sizes")
  parser.add_argument("--work", default="data/long_context", help="folder of token files")
  parser.add_argument("--plots", type=Path, help="folder of long_context_PART.png, of each part")
  parser.add_argument("--dry-run", action="store_true", help="print parameters, tokens and FLOPs")
  args = parser.parse_args(arguments)
  sizes = Sizes.parse(args.sizes)
  if args.dry_run:
    print("| mixer | parameters | part | training tokens | PFLOP | scored tokens | PFLOP |")
    print("|---|---|---|---|---|---|---|")
    for mixer in args.mixers:
      print(*estimate(mixer, args.only, sizes, len(args.seeds)), sep="\n")
    return []
  rows = csv_rows.read(args.out, without=(), column="part") if args.out else []
  if other := {row["sizes"] for row in rows} - {sizes.changes}:
    parser.error(f"{args.out} has rows with --sizes {other.pop()!r}; use another --out.")
  if args.plots:
    try:
      args.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      parser.error(f"--plots is a folder: {error}")
  run(parser, args, sizes, rows)
  print("\n" + markdown(rows))
  for part in args.only if args.plots else ():
    draw(rows, part, args.plots / f"long_context_{part}.png")
  return rows


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  main()
