"""The runs of `tests.reliability.soak`: their settings, commands in forked processes, rows."""

import atexit
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

from tests.reliability import tiny_run
from train import config
from train.runs.run_folder import RunFolder

NUMBERS = ("loss", "grad_norm", "param_norm", "val_loss")
EVERY = 25  # steps between checkpoints


def settings(root: Path, name: str, processes: int, steps: int) -> config.Train:
  """Config of a run of about 170,000 parameters."""
  base = tiny_run.settings(root, name)
  text = base.data.sources["train"]
  validation = root / "validation.txt"
  if not validation.exists():
    validation.write_text(Path(text).read_text()[:9000])
  return dataclasses.replace(
    base,
    model=dataclasses.replace(base.model, dim=128, num_layers=1, vocab_size=320, mixer="lrn"),
    data=config.Data(
      folder=str(root / "tokens"), tokenizer="bpe:290", train=("train",),
      validation=("validation",), sources={"train": text, "validation": str(validation)},
    ),
    mesh=config.Mesh(data=processes), steps=steps, checkpoint_every=EVERY, eval_every=200,
    compile_cache=str(root / name / "programs"),
  )  # fmt: skip


def run_command(arguments, launch, out: Path | int, errors: Path, before) -> None:
  """Runs `python -m train` in a forked process."""
  from train.cli import process
  from train.cli.main import main

  atexit._clear()  # of the parent
  signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would stay ignored
  os.environ.update(launch)
  with errors.open("a") as file:
    os.dup2(file.fileno(), 2)
  if isinstance(out, Path):
    with out.open("a") as file:
      os.dup2(file.fileno(), 1)
  else:
    os.dup2(out, 1)
    os.close(out)
  sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
  before()
  process.run(lambda: main(arguments))


def rows_of(cfg: config.Train) -> dict[tuple, tuple]:
  """{(kind, step, set): numbers} of metrics.jsonl, where a damaged line is a row too."""
  path = RunFolder(cfg.run_dir).metrics_file
  found = {}
  lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
  for line in lines:
    try:
      row = json.loads(line)
      key = row["kind"], row["step"], row.get("set", "")
      found[key] = tuple(row.get(name) for name in NUMBERS)
    except (ValueError, KeyError, TypeError, AttributeError):
      if line.endswith(b"\n"):
        found["damaged", 0, line.decode(errors="replace")] = ()
  return found
