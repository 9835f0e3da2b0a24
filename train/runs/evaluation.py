"""Evaluation: the mean loss of a model over token sets, by tokens or by documents."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from lnssm_jax.files.buckets import local
from train import config
from train.cluster import compile_cache, device_mesh, distributed
from train.data.bits_per_byte import bits_per_byte, tokens_per_byte
from train.data.tokenize import prepare
from train.data.windows import Documents, RandomCrops, TokenWindows, eval_batches
from train.loop import Callback, Moment
from train.runs import bindings, loading, reference
from train.runs.rows import Row
from train.runs.run_folder import RunFolder, of_step
from train.step.model import model_graph
from train.step.state import State
from train.step.train_step import make_eval_step

Source = TokenWindows | RandomCrops | Documents

_SECONDS_BETWEEN_LINES = 5


def run(cfg: config.Train, *, ema: bool = False) -> list[Row]:
  """Evaluates the newest checkpoint in `cfg.run_dir`, or its average, on all validation sets.

  Raises:
    ValueError: no validation sets, or a checkpoint of another model or tokenizer.
    FileNotFoundError: there is no checkpoint.
    CheckpointError: it cannot be read.
  """
  if not cfg.data.validation:
    raise ValueError("data.validation is empty; name a set with --set data.validation=NAME.")
  mesh = device_mesh.make_mesh(cfg)
  params, step, metadata = loading.load_params(cfg, mesh, ema=ema)
  bindings.check_before_preparing(metadata, cfg.data)
  prepare(cfg.data, progress=True)
  bindings.checked_tokenizer(metadata, cfg.data)
  evaluator = Evaluator(cfg, model_graph(cfg.model), mesh)
  reference.load(reference.pairs_of(evaluator.sources.values()), local(cfg.run_dir))
  return evaluator(step, params)


class Evaluator:
  """The validation sets of a run, opened and checked, with the jitted evaluation step.

  Attributes:
    sources: the sets by name; those of pairs need their references first.
  """

  def __init__(self, cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None = None):
    self._cfg, self._mesh = cfg, mesh
    step = make_eval_step(cfg, graph, mesh, kernels)
    self._step = compile_cache.found_by_trace(step, mesh, config.to_dict(cfg))
    self.sources = open_sets(cfg)

  def __call__(
    self,
    step: int,
    params: Any,
    should_stop: Callable[[], object] = lambda: False,
    progress: Callable[[str], object] = lambda line: None,
  ) -> list[Row]:
    """Returns a row of metrics.jsonl per set; none if `should_stop()` is true in any process.

    `progress` gets a line every few seconds.

    val_loss is in nats per predicted token, with `data.weighting="documents"` the mean of the
    documents' means, where `documents` is their number. bits_per_byte is None for such a mean, for
    a set without byte counts, and where not all tokens are targets; `tokens` is the sum of weights,
    the number of predicted tokens. Of a set of pairs it is in nats per pair, `pairs` is their
    number, and the row has the means of the measures of `train.step.preference`.
    """
    rows, said = [], time.monotonic()
    for name, source in self.sources.items():
      sums = []  # stay on the device until the end of the set
      count = count_of(self._cfg, source)
      size = self._cfg.global_batch // self._cfg.accumulate
      for number, batch in enumerate(self._batches(source, size, count)):
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
          progress(f"evaluating {name}: {min(1, number * size / count):.0%}")
          said = time.monotonic()
        # With several processes this is a collective, so ask rarely.
        if number % (1 if distributed.count() == 1 else 8) == 0 and distributed.any_of(
          bool(should_stop())
        ):
          return []
        sums.append(self._step(params, batch))
      sums = jax.device_get(sums)
      nats, weight = (math.fsum(float(getattr(s, k)) for s in sums) for k in ("nats", "weight"))
      row = row_of(self._cfg, name, source, step, nats, weight)
      if measured := [s.measures for s in sums if s.measures]:
        of = {key: math.fsum(float(x[key]) for x in measured) / weight for key in measured[0]}
        row |= {"pairs": row.pop("tokens"), **of}
      rows.append(row)
    return rows

  def of_state(self, step: int, state: State, **options: Any) -> list[Row]:
    """As a call for the parameters; with `ema_val_loss` of their average, if there is one."""
    rows = self(step, state["params"], **options)
    if not rows or "ema" not in state:
      return rows
    averaged = self(step, state["ema"], **options)
    losses = [{"ema_val_loss": row["val_loss"]} for row in averaged]
    return [row | loss for row, loss in zip(rows, losses, strict=True)] if averaged else []

  def _batches(self, source: Source, rows: int, count: int) -> Iterator[Any]:
    where = device_mesh.batch_sharding(self._mesh)
    local = distributed.local_rows(where, rows)
    for batch in eval_batches(source, rows, local, count):
      yield distributed.to_devices(batch, where, rows)


@dataclasses.dataclass(frozen=True)
class Evaluation(Callback):
  """Evaluates a run every `every` steps, after `steps` and, with `at_start`, before the first.

  `evaluated` of all callbacks follows, unless it was evaluated before a resume, or is to stop.
  """

  run: RunFolder
  evaluate: Callable[[int, State], list[Row]]  # of a step and its state; none if it was stopped
  line: Callable[[Row], str]  # what to say of a row
  _: dataclasses.KW_ONLY
  every: int
  steps: int
  sets: Iterable[str]
  at_start: bool = False

  def pauses(self, step: int) -> bool:
    return step % self.every == 0

  def started(self, now: Moment) -> None:
    if now.step or self.at_start:
      self.paused(now)

  def paused(self, now: Moment) -> None:
    is_due = self.pauses(now.step) or now.step == self.steps
    if not is_due or now.stopping or self.rows(now):
      return
    rows = self.evaluate(now.step, now.state)
    if not rows and self.sets:  # stopped
      return
    for row in self.run.append(rows):
      now.say(self.line(row))
    now.evaluations += rows
    now.call("evaluated")

  def ended(self, now: Moment) -> None:
    if not self.pauses(now.step):  # otherwise it has been evaluated, even without sets
      self.paused(now)

  def rows(self, now: Moment) -> list[Row]:
    """Those of this step, if it was evaluated."""
    return of_step(now.evaluations, now.step, self.sets)


def open_sets(cfg: config.Train) -> dict[str, Source]:
  """Opens and checks the validation sets of a config, by name."""
  data, (length, size) = cfg.data, (cfg.seq_len, cfg.model.vocab_size)
  prefixes = {name: f"{local(data.folder)}/{name}" for name in data.validation}
  if data.weighting == "documents":
    length = data.document_length or length
    return {name: Documents(prefix, length, size) for name, prefix in prefixes.items()}
  windows = {
    name: TokenWindows(prefix, length, size, data.boundaries, [data.documents_of_rows(name)])
    for name, prefix in prefixes.items()
  }
  if data.weighting == "crops":
    return {name: RandomCrops(source, cfg.seed) for name, source in windows.items()}
  return {**windows}


def count_of(cfg: config.Train, source: Source) -> int:
  """How many windows, crops or documents of a set are evaluated."""
  tokens = cfg.eval_tokens
  return len(source) if tokens is None else min(len(source), -(-tokens // cfg.seq_len))


def row_of(
  cfg: config.Train,
  name: str,
  source: Source,
  step: int,
  nats: float,
  weight: float,
) -> Row:
  """A row of metrics.jsonl, see `Evaluator`, from the sums of a set.

  Raises:
    ValueError: the set has nothing to predict.
  """
  if not weight:
    raise ValueError(
      f"validation set {name!r} has no token to predict: its documents have one token, or only"
      " targets of weight 0."
    )
  loss = nats / weight
  row = {"kind": "eval", "step": step, "set": name, "val_loss": loss}
  if isinstance(source, Documents):
    counts = {"tokens": source.num_predicted, "documents": len(source)}
    return row | {"bits_per_byte": None} | counts
  # Of the whole set, also where `eval_tokens` leaves most of it out.
  bits = bits_per_byte(loss, tokens_per_byte(local(cfg.data.folder), [name]))
  return row | {"bits_per_byte": bits, "tokens": int(weight)}
