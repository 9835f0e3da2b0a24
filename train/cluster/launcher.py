"""Detection of the launcher that started this process, from environment variables.

The first match of:

    by hand, Kubernetes  JAX_NUM_PROCESSES, JAX_PROCESS_ID, and JAX_COORDINATOR_ADDRESS=HOST:PORT
                         of process 0
    Slurm                SLURM_STEP_NUM_TASKS, SLURM_PROCID: srun with more than one task
    Open MPI             OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK
    MPICH, Intel MPI     PMI_SIZE, PMI_RANK, and JAX_COORDINATOR_ADDRESS

A single task, or a shell with only some of Slurm's variables, is a run of one process.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lnssm_jax.files.printable import PrintableError

ADDRESS, NUM, ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
# Variables for process count, process id, process id within the host; JAX's detection method.
LAUNCHERS = {
  "by hand": (NUM, ID, "JAX_LOCAL_PROCESS_ID", None),
  "Slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "slurm"),
  "Open MPI": (
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "ompi",
  ),
  "MPICH": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", None),
}


class LaunchError(PrintableError, ValueError):
  """The environment describes several processes incompletely; the message says what is missing."""


class Launch(NamedTuple):
  """One process among several."""

  launcher: str
  processes: int
  process: int
  arguments: dict[str, Any]  # of jax.distributed.initialize


def detect(environment: Mapping[str, str] = os.environ) -> Launch | None:
  """Returns how this process was launched; None for a run of one process.

  Raises:
    LaunchError: a variable is missing or not a number.
  """
  address = environment.get(ADDRESS)
  for name, (num, rank, local, method) in LAUNCHERS.items():
    if num not in environment:
      continue
    processes = _number(environment, num, least=1)
    if processes == 1:
      continue
    if rank not in environment:
      if name == "by hand":
        raise LaunchError(f"{num}={processes} is set, but {rank} is not: 0 .. {processes - 1}.")
      continue
    process = _number(environment, rank, least=0)
    if process >= processes:
      raise LaunchError(f"{rank}={process} must be less than {num}={processes}.")
    if address is None and method is None:
      raise LaunchError(
        f"{num}={processes} is set, but {ADDRESS} is not: set it to HOST:PORT for all "
        "processes, where HOST runs process 0 and PORT is free there."
      )
    if address is not None and not re.fullmatch(r".+:\d+", address):
      raise LaunchError(f"{ADDRESS}={address} must be HOST:PORT, such as node1:12345.")
    arguments = {
      "coordinator_address": address,
      "num_processes": processes,
      "process_id": process,
      "local_device_ids": _local_devices(environment, num, local),
      # With an explicit address JAX has nothing to detect.
      "cluster_detection_method": method if address is None else "deactivate",
    }
    return Launch(name, processes, process, arguments)
  if address is not None and environment.get(NUM) != "1":
    raise LaunchError(
      f"{ADDRESS}={address} is set, but neither {NUM} nor a launcher gives the number of "
      f"processes; set {NUM} and {ID}, or remove {ADDRESS}."
    )
  return None


def _local_devices(environment: Mapping[str, str], num: str, local: str) -> list[int] | None:
  """Indices of this process's GPUs among the visible ones; None leaves the choice to JAX."""
  visible = [d for d in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
  here = _processes_here(environment, num)
  if not visible or local not in environment or here is None:
    return None
  # Some launchers make only a process's own GPUs visible, others all GPUs of the host.
  if len(visible) < here or len(visible) % here:
    return list(range(len(visible)))
  share, rank = len(visible) // here, _number(environment, local, least=0)
  return list(range(rank * share, (rank + 1) * share))


def _processes_here(environment: Mapping[str, str], num: str) -> int | None:
  """Number of processes on this host."""
  if num.startswith("OMPI"):
    return _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", least=1)
  if num.startswith("SLURM"):  # "4(x2)": as many on each of two hosts
    counts = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(counts[0]) if counts else None
  return None


def _number(environment: Mapping[str, str], name: str, least: int) -> int:
  text = environment.get(name, "")
  if not (text.isascii() and text.isdecimal()) or int(text) < least:
    raise LaunchError(f"{name}={text!r} must be a whole number, at least {least}.")
  return int(text)
