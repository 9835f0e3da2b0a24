"""Evaluation: the mean loss of a model over token sets, each window once."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from train import config
from train.cluster import device_mesh, distributed
from train.data.bits_per_byte import bits_per_byte, tokens_per_byte
from train.data.tokenize import prepare
from train.data.windows import TokenWindows, eval_batches
from train.runs import loading
from train.runs.rows import Row
from train.step.model import model_graph
from train.step.train_step import make_eval_step


def run(cfg: config.Train) -> list[Row]:
  """Evaluates the newest checkpoint in `cfg.run_dir` on all validation sets.

  Raises:
    ValueError: no validation sets, or a checkpoint of another model.
    FileNotFoundError: there is no checkpoint.
    CheckpointError: it cannot be read.
  """
  if not cfg.data.validation:
    raise ValueError("data.validation is empty; name a set with --set data.validation=NAME.")
  mesh = device_mesh.make_mesh(cfg)
  prepare(cfg.data, progress=True)
  params, step = loading.load_params(cfg, mesh)
  return Evaluator(cfg, model_graph(cfg.model), mesh)(step, params)


class Evaluator:
  """The validation sets of a run, opened and checked, with the jitted evaluation step."""

  def __init__(self, cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None = None):
    self._cfg, self._mesh = cfg, mesh
    self._step = make_eval_step(cfg, graph, mesh, kernels)
    self._windows = {
      name: TokenWindows([f"{cfg.data.folder}/{name}"], cfg.seq_len, cfg.model.vocab_size)
      for name in cfg.data.validation
    }

  def __call__(
    self, step: int, params: Any, should_stop: Callable[[], object] = lambda: False
  ) -> list[Row]:
    """Returns a row of metrics.jsonl per set; none if `should_stop()` is true in any process.

    val_loss is in nats per predicted token; bits_per_byte is None for a set without byte counts.
    """
    rows = []
    for name, windows in self._windows.items():
      sums = []  # stay on the device until the end of the set
      for number, batch in enumerate(self._batches(windows)):
        # With several processes this is a collective, so ask rarely.
        if number % (1 if distributed.count() == 1 else 8) == 0 and distributed.any_of(
          bool(should_stop())
        ):
          return []
        sums.append(self._step(params, batch))
      sums = jax.device_get(sums)
      nats, weight = (math.fsum(float(getattr(s, k)) for s in sums) for k in ("nats", "weight"))
      if not weight:
        raise ValueError(
          f"validation set {name!r} has no token to predict: all its documents have one token."
        )
      ratio = tokens_per_byte(self._cfg.data.folder, [name])
      loss = nats / weight
      rows.append(
        {
          "kind": "eval",
          "step": step,
          "set": name,
          "val_loss": loss,
          "bits_per_byte": bits_per_byte(loss, ratio),
          "tokens": int(weight),
        }
      )
    return rows

  def _batches(self, windows: TokenWindows) -> Iterator[Any]:
    rows = self._cfg.global_batch // self._cfg.accumulate
    where = device_mesh.batch_sharding(self._mesh)
    local = distributed.local_rows(where, rows)
    for batch in eval_batches(windows, rows, local):
      yield distributed.to_devices(batch, where, rows, local)
