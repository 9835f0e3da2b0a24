"""Reading of training metrics from the device, into metrics.jsonl and the progress line."""

import math
import time
from typing import Any

import jax

from lnssm_jax.files.buckets import local
from train import config
from train.data.bits_per_byte import bits_per_byte, tokens_per_byte
from train.logging.console import Console, train_line
from train.logging.throughput import Clock
from train.loop import Callback, DivergedError, Moment
from train.runs.rows import Row
from train.runs.run_folder import RunFolder
from train.step import flops

NO_TARGETS = "no target of its batch counts"  # why a step was skipped that is no failure


class MetricReader(Callback):
  """Reads the metrics of step n - 1 after step n was dispatched, so that the device never waits.

  At a pause it reads those of the last step too: saved parameters are finite, and have their rows.

  Attributes:
    votes: flags raised by any process in the last step that was read (`distributed.ballot`).
  """

  def __init__(self, cfg: config.Train, run: RunFolder, console: Console, devices: list):
    self._cfg, self._run, self._console, self._devices = cfg, run, console, devices
    self._tokens_per_step = cfg.global_batch * cfg.seq_len
    self._tokens_per_byte = tokens_per_byte(local(cfg.data.folder), cfg.data.train)
    known = flops.peak_flops(devices[0]) is not None
    self._flops = flops.model_flops_per_token(cfg.model, cfg.seq_len) if known else None
    self._clock = Clock(self._tokens_per_step)
    self._paused = True
    self._pending: tuple[int, dict[str, Any], float | None] | None = None
    self._skipped = run.skipped_steps()
    self.votes: tuple[bool, ...] = (False, False)

  def before_step(self, now: Moment) -> None:
    if self._paused:
      self._clock.restart()
    self._paused = False

  def after_step(self, now: Moment) -> None:
    self._clock.waited(now.waited)
    self.push(now.step, now.metrics)

  def paused(self, now: Moment) -> None:
    self.flush()
    self._paused = True

  def ended(self, now: Moment) -> None:
    self.flush()

  def push(self, step: int, metrics: dict[str, Any]) -> None:
    """Takes the metrics of a step that was just dispatched and reads those of the step before.

    Raises:
      DivergedError: too many consecutive steps were skipped, or a parameter is not finite.
    """
    # Small steps on a CPU have finished by now.
    finished = time.perf_counter() if metrics["loss"].is_ready() else None
    pending, self._pending = self._pending, (step, metrics, finished)
    if pending:
      self._read(*pending)

  def flush(self) -> None:
    """Reads the pending metrics: afterwards every step so far is checked and has its row."""
    pending, self._pending = self._pending, None
    if pending:
      self._read(*pending)

  def _read(self, step: int, metrics: dict[str, Any], finished: float | None) -> None:
    values = jax.device_get(metrics)
    self.votes = tuple(bool(vote) for vote in values.pop("votes", self.votes))
    aux, measures = values.pop("aux", None), values.pop("measures", {})
    values = {name: float(value) for name, value in values.items()}
    self._clock.tick(finished or time.perf_counter())
    if values["skipped"]:
      self._skip(step, values)
      return
    for name in ("loss", "grad_norm", "param_norm"):
      if not math.isfinite(values[name]):
        raise DivergedError(
          f"{name} is {values[name]} at step {step}, so training stopped; the last checkpoint in "
          f"{self._run.checkpoints} is from before that. Lower optimizer.peak_lr or set "
          "optimizer.clip_norm=1.0, and start again with another run_dir, or resume from that "
          "checkpoint with --allow-config-change."
        )
    if step % self._cfg.log_every and step != self._cfg.steps:
      return
    rate, wait = self._clock.read()
    row = {
      "kind": "train",
      "step": step,
      "loss": values["loss"],
      "bits_per_byte": bits_per_byte(values["loss"], self._tokens_per_byte),
      "learning_rate": values["learning_rate"],
      "grad_norm": values["grad_norm"],
      "param_norm": values["param_norm"],
      "tokens": step * self._tokens_per_step,
      "skipped": len(self._skipped),
      "tokens_per_second": rate,
      "mfu": flops.utilization(self._flops, rate, self._devices),
      "data_wait": wait,
      "peak_memory": _peak_memory(self._devices),
    }
    row |= {name: float(value) for name, value in measures.items()}
    if aux is not None:
      row |= aux_columns(aux)
    self._run.append([row])
    left = self._clock.seconds_left(self._cfg.steps - step)
    self._console.progress(train_line(row, self._cfg.steps, left))

  def _skip(self, step: int, values: dict[str, float]) -> None:
    """Counts and reports a skipped step.

    Raises:
      DivergedError: it reached the limit of consecutive skipped steps.
    """
    is_empty = values["tokens"] == 0
    measured = {name: math.nan if is_empty else values[name] for name in ("loss", "grad_norm")}
    nonfinite = [
      f"{name} is {value}" for name, value in measured.items() if not math.isfinite(value)
    ]
    why = ", ".join(nonfinite) or "a spike: loss {loss:.4g}, grad_norm {grad_norm:.4g}".format(
      **measured
    )
    why = self._skipped[step] = NO_TARGETS if is_empty else why
    finite = {name: v if math.isfinite(v) else None for name, v in measured.items()}
    row: Row = {"kind": "skipped", "step": step, "why": why, **finite}
    self._run.append([row])
    self._console.say(f"step {step} skipped ({why}); {len(self._skipped)} in total")
    limit, failures, before = self._cfg.max_skipped, 0, step
    while failures < limit and before in self._skipped:
      failures += self._skipped[before] != NO_TARGETS
      before -= 1
    if failures == limit and not is_empty:
      with_targets = "" if step - before == limit else " with targets"
      raise DivergedError(
        f"the last {limit} steps{with_targets}, up to {step}, were skipped ({why}), so training "
        "stopped with the parameters from before them. Inspect their text, lower "
        "optimizer.peak_lr or set optimizer.clip_norm=1.0, and start again with another run_dir or "
        "resume with --allow-config-change. max_skipped sets how many consecutive ones end a run.",
        weights_are_good=True,
      )


_MOST_SHARES = 64  # of a layer in a row of metrics.jsonl


def aux_columns(aux: list[Any]) -> dict[str, Any]:
  """Columns of a training row for the auxiliary outputs (`lnssm_jax.mixers.Aux`) of the layers.

  `aux_loss` is the sum of the layers' losses. `aux` has an object for each layer that has one: its
  number, its loss, `dead`, the number of parts that no token selected, and `share`, the share of
  the tokens that selected each part (left out if there are more than 64 parts).
  """
  by_layer: list[dict[str, Any]] = []
  for layer, output in enumerate(aux):
    if output is None:
      continue
    share = [float(x) for x in output.share]
    columns = {"layer": layer, "loss": float(output.loss), "dead": share.count(0.0)}
    by_layer.append(columns | ({"share": share} if len(share) <= _MOST_SHARES else {}))
  return {"aux_loss": math.fsum(columns["loss"] for columns in by_layer), "aux": by_layer}


def _peak_memory(devices: list) -> int | None:
  """Peak memory in bytes of any local device; None if the backend does not report it."""
  here = [d for d in devices if d.process_index == jax.process_index()]
  stats = [device.memory_stats() or {} for device in here]
  return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)
