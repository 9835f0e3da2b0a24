"""Training metrics on their way from the device to metrics.jsonl and the progress line."""

import math
import time
from typing import Any

import jax

from train import config, flops
from train.metrics import Clock, Console, Row, bits_per_byte, tokens_per_byte, train_line
from train.run_folder import RunFolder


class DivergedError(FloatingPointError):
  """Training cannot go on; `weights_are_good` says whether its parameters can be kept."""

  exit_code = 1  # of the command line

  def __init__(self, message: str, *, weights_are_good: bool = False):
    super().__init__(message)
    self.weights_are_good = weights_are_good


class Recorder:
  """Reads the metrics of step n - 1 when step n is on its way, so that the device never waits.

  Attributes:
    votes: what any process had voted by the last step that was read (`train.distributed.ballot`).
  """

  def __init__(self, cfg: config.Train, run: RunFolder, console: Console, devices: list):
    self._cfg, self._run, self._console, self._devices = cfg, run, console, devices
    self._tokens_per_step = cfg.global_batch * cfg.seq_len
    self._tokens_per_byte = tokens_per_byte(cfg.data.folder, cfg.data.train)
    known = flops.peak_flops(devices[0]) is not None
    self._flops = flops.model_flops_per_token(cfg.model, cfg.seq_len) if known else None
    self._clock = Clock(self._tokens_per_step)
    self._pending: tuple[int, dict[str, Any], float | None] | None = None
    self._skipped = run.skipped_steps()
    self.votes: tuple[bool, ...] = (False, False)

  def start_clock(self) -> None:
    """Begins to measure time: the first step comes now."""
    self._clock = Clock(self._tokens_per_step)

  def push(self, step: int, metrics: dict[str, Any]) -> None:
    """Takes the metrics of a step that was just dispatched, and reads those of the one before.

    Raises:
      DivergedError: too many steps one after another were left out, or a parameter is not finite.
    """
    # A device that computes at once (small steps on a CPU do) has finished already.
    finished = time.perf_counter() if metrics["loss"].is_ready() else None
    pending, self._pending = self._pending, (step, metrics, finished)
    if pending:
      self._read(*pending)

  def flush(self) -> None:
    """Reads what is pending: afterwards every step so far is checked and has its row."""
    pending, self._pending = self._pending, None
    if pending:
      self._read(*pending)

  def waited(self, seconds: float) -> None:
    """Counts time that was spent waiting for a batch."""
    self._clock.waited(seconds)

  def restart_clock(self) -> None:
    """Leaves the time since the last step out of tokens a second."""
    self._clock.restart()

  def _read(self, step: int, metrics: dict[str, Any], finished: float | None) -> None:
    values = jax.device_get(metrics)
    self.votes = tuple(bool(vote) for vote in values.pop("votes", self.votes))
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
          "optimizer.clip_norm=1.0, and start anew with another run_dir, or go on from that "
          "checkpoint with --allow-config-change."
        )
    if step % self._cfg.log_every and step != self._cfg.steps:
      return
    wait, rate = self._clock.data_wait(), self._clock.tokens_per_second()
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
    self._run.append([row])
    left = self._clock.seconds_left(self._cfg.steps - step)
    self._console.progress(train_line(row, self._cfg.steps, left))

  def _skip(self, step: int, values: dict[str, float]) -> None:
    """Counts and tells a step that was left out.

    Raises:
      DivergedError: it was the last that is allowed one after another.
    """
    self._skipped.append(step)
    measured = {name: values[name] for name in ("loss", "grad_norm")}
    odd = [f"{name} is {value}" for name, value in measured.items() if not math.isfinite(value)]
    why = ", ".join(odd) or "a spike: loss {loss:.4g}, grad_norm {grad_norm:.4g}".format(**measured)
    finite = {name: v if math.isfinite(v) else None for name, v in measured.items()}
    row: Row = {"kind": "skipped", "step": step, "why": why, **finite}
    self._run.append([row])
    self._console.say(f"step {step} left out ({why}); {len(self._skipped)} in all")
    limit = self._cfg.max_skipped
    if self._skipped[-limit:] == list(range(step - limit + 1, step + 1)):
      raise DivergedError(
        f"the last {limit} steps, up to {step}, were left out ({why}), so training stopped with "
        "the parameters from before them. Look at the text of these steps, lower "
        "optimizer.peak_lr or set optimizer.clip_norm=1.0, and start anew with another run_dir or "
        "go on with --allow-config-change. max_skipped says how many in a row end a run.",
        weights_are_good=True,
      )


def _peak_memory(devices: list) -> int | None:
  """The most bytes that a device of this process ever held; None where the backend does not say."""
  here = [d for d in devices if d.process_index == jax.process_index()]
  stats = [device.memory_stats() or {} for device in here]
  return max((s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s), default=None)
