"""Kills or suspends one of two processes of a run, and measures when the other ends.

    python -m tests.reliability.lost_peer
    python -m tests.reliability.lost_peer --platform gpu

On a CPU a killed process is noticed by its broken connections. A silent one (SIGSTOP, as a host
that hangs), and on GPUs, whose own links tell nothing, a killed one too, by its heartbeat. The
command returns 1 if the other process ends later than `LIMITS`, or with 0.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability import platforms, tiny_run
from train import config
from train.cluster.distributed import HEARTBEAT

SILENT = HEARTBEAT + 30.0  # seconds
LIMITS = {signal.SIGKILL: 30.0, signal.SIGSTOP: SILENT}


def start(file: Path, log: Path) -> list[subprocess.Popen[bytes]]:
  """Starts `train fit` in two processes of one run."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  children = []
  for index in (0, 1):
    launch = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2",
              "JAX_PROCESS_ID": str(index)}  # fmt: skip
    command = [sys.executable, "-m", "train", "fit", "--config", str(file)]
    environment = os.environ | launch | platforms.of_process(index, 1)
    with log.open("ab") as out:
      children.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
  return children


def lose(number: signal.Signals, victim: int, root: Path) -> tuple[float, int]:
  """Sends a signal to one of two processes; seconds until the other ends, and its exit code."""
  name = f"{number.name}-{victim}"
  changes = {"steps": 10**6, "checkpoint_every": 10**6, "mesh": config.Mesh(data=2)}
  cfg = tiny_run.settings(root, name, **changes, compile_cache=str(root / "programs"))
  file, log = root / f"{name}.py", root / f"{name}.txt"
  code = f"def get_config(): return from_dict({config.to_dict(cfg)!r})"
  file.write_text(f"from train.config import from_dict\n{code}\n")
  children = start(file, log)
  metrics, end = Path(cfg.run_dir) / "metrics.jsonl", time.monotonic() + 300
  try:
    while not metrics.exists() or metrics.read_bytes().count(b'"kind": "train"') < 20:
      if time.monotonic() > end or any(child.poll() is not None for child in children):
        raise RuntimeError(f"the run does not train: {log.read_text()[-3000:]}")
      time.sleep(0.05)
    children[victim].send_signal(number)
    begin = time.monotonic()
    code = children[1 - victim].wait(timeout=3 * HEARTBEAT)
    return time.monotonic() - begin, code
  finally:
    for child in children:
      child.kill()
      child.wait()


def main(arguments: list[str] | None = None) -> int:
  """Prints a row per signal and process; returns 1 if one was noticed too late, or not at all."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  platforms.add_option(parser)
  options = parser.parse_args(arguments)
  platforms.use(options.platform)
  wrong = 0
  print(f"| of two processes, on {options.platform} | the other ended after | exit code |")
  print("|---|---|---|", flush=True)
  with tempfile.TemporaryDirectory() as root:
    for number, limit in LIMITS.items():
      limit = SILENT if platforms.is_gpu() else limit
      for victim in (0, 1):
        seconds, code = lose(number, victim, Path(root))
        wrong += seconds > limit or code == 0
        print(f"| {number.name} to process {victim} | {seconds:.1f} s | {code} |", flush=True)
  return int(wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
