"""Several processes of one run on this machine, forked after all imports."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.reliability import platforms


def start(
  function: Callable[..., None], *arguments: Any, processes: int, devices: int, log: Path
) -> list[BaseProcess]:
  """Runs `function(*arguments)` in each of `processes`, which share `devices` devices equally.

  This process must not have started a backend.
  """
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  children = []
  for index in range(processes):
    environment = {
      "JAX_COORDINATOR_ADDRESS": address,
      "JAX_NUM_PROCESSES": str(processes),
      "JAX_PROCESS_ID": str(index),
      **platforms.of_process(index, devices // processes),
    }
    options = (environment, devices // processes, log, function, arguments)
    child = multiprocessing.get_context("fork").Process(target=_run, args=options)
    child.start()
    children.append(child)
  return children


def join(children: list[BaseProcess], log: Path, timeout: float = 300) -> None:
  """Waits until all have exited successfully.

  Raises:
    RuntimeError: one has not; with the end of the log.
  """
  for child in children:
    child.join(timeout)
  if any(child.exitcode != 0 for child in children):
    codes = [child.exitcode for child in children]
    for child in children:
      child.kill()
    raise RuntimeError(f"exit codes {codes}, see {log}:\n{log.read_text()[-3000:]}")


def _run(environment: dict[str, str], devices: int, log: Path, function, arguments) -> None:
  with log.open("a") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
  os.environ.update(environment)
  import jax

  jax.config.update("jax_num_cpu_devices", devices)
  from train.cluster import distributed

  distributed.join()
  function(*arguments)


def share_compilations(folder: Path) -> None:
  """Shares a compilation cache between processes; imports what all need."""
  import jax

  import train.trainer  # noqa: F401

  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
