"""`lnssm-train doctor`: checks whether the processes of a job can train."""

import os
import platform
import secrets
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lnssm_jax.files import buckets
from lnssm_jax.files.buckets import Bucket, local
from lnssm_jax.ops.core.dispatch import device
from train import config
from train.cluster import device_mesh, distributed, launcher
from train.config.versions import versions
from train.messages import Say, first_line

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_ELEMENTS = 1 << 22  # float32 numbers per device in the timed collective


def examine(cfg: config.Train | None, say: Say) -> bool:
  """Prints a report in process 0; returns whether no problem was found.

  Args:
    cfg: a run to be trained here, whose mesh and folder are checked, or None.
  """
  problems: list[str] = []
  launch = distributed.join()
  report = say if distributed.is_first() else lambda _: None
  found = versions()
  shown = ", ".join(f"{name} {version}" for name, version in found.items() if version)
  report(f"versions     python {platform.python_version()}, {shown}")
  report(f"launcher     {launch.launcher if launch else 'none: one process'}")
  here = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
  for (line,) in _gather_lines([f"{socket.gethostname()}, pid {os.getpid()}, {here}"]):
    report(f"process      {line}")
  report(f"devices      {jax.device_count()} x {jax.devices()[0].device_kind}")
  report(f"kernels      {device.kernels()}")
  problems += _environment(launch)
  try:
    report(f"collective   {_collective()}")
  except Exception as error:  # any failure here is a finding, not a fault
    problems.append(f"the devices cannot compute a sum: {first_line(error)}")
  if cfg is not None:
    try:
      sizes = ", ".join(f"{axis} {size}" for axis, size in device_mesh.make_mesh(cfg).shape.items())
      report(f"mesh         {sizes}")
    except ValueError as error:
      problems.append(str(error))
    problems += _folder(local(cfg.run_dir), report)
    if buckets.is_bucket(cfg.run_dir) and distributed.is_first():
      problems += _bucket(cfg.run_dir, report)
  problems = list(dict.fromkeys(line for lines in _gather_lines(problems) for line in lines))
  for problem in problems:
    report(f"PROBLEM      {problem}")
  report("no problem found" if not problems else f"{len(problems)} problems found")
  return not problems


def _environment(launch: launcher.Launch | None) -> list[str]:
  problems = []
  if jax.default_backend() == "cpu" and Path("/dev/nvidia0").exists():
    problems.append(
      "this machine has an NVIDIA GPU that JAX does not use: pip install 'jax[cuda13]'"
    )
  proxies = [name for name in os.environ if name.lower() in _PROXIES]
  if launch and proxies:
    problems.append(
      f"{', '.join(proxies)} is set; processes may fail to connect through a proxy: unset it in "
      "the job"
    )
  if launch and jax.process_count() != launch.processes:
    problems.append(
      f"{launch.launcher} started {launch.processes} processes, but JAX joined "
      f"{jax.process_count()}"
    )
  return problems


def _collective() -> str:
  """Times a sum of one float32 vector per device over all devices.

  Raises:
    ArithmeticError: the sum is wrong.
  """
  mesh = Mesh(np.array(jax.devices()), ("all",))
  size = mesh.size
  where = NamedSharding(mesh, PartitionSpec("all"))

  def add(x):
    return jax.lax.with_sharding_constraint(x.sum(0), NamedSharding(mesh, PartitionSpec()))

  row = lambda index: np.full((1, _ELEMENTS), index[0].start or 0, np.float32)
  ones = jax.make_array_from_callback((size, _ELEMENTS), where, row)
  run = jax.jit(add)
  total = run(ones)
  if not bool(jnp.all(total == size * (size - 1) / 2)):
    raise ArithmeticError("the sum over all devices is wrong")
  begin = time.perf_counter()
  run(ones).block_until_ready()
  spent = time.perf_counter() - begin
  return f"{_ELEMENTS * 4 >> 20} MiB summed over {size} devices, correct, {1e3 * spent:.1f} ms"


def _folder(path: Path, report: Say) -> list[str]:
  """Checks that process 0 can write the run folder and the others see what it writes."""
  name = f".doctor-{secrets.token_hex(4)}"

  def write() -> dict[str, Any]:
    try:
      path.mkdir(parents=True, exist_ok=True)
      with tempfile.NamedTemporaryFile(dir=path) as file:
        file.write(b"x" * 65536)
        file.flush()
        os.fsync(file.fileno())
      (path / name).touch()
    except OSError as error:
      return {"error": f"run_dir={str(path)!r} cannot be written ({error.strerror})"}
    return {"name": name, "free": shutil.disk_usage(path).free}

  found = distributed.on_first(write)
  if "error" in found:
    return [found["error"]]
  seen = not distributed.any_of(not (path / found["name"]).exists())
  distributed.on_first(lambda: (path / name).unlink(missing_ok=True))
  report(f"run folder   {path}, writable, {found['free'] / 1e9:.0f} GB free")
  if not seen:
    return [f"run_dir={str(path)!r} is not the same folder for all processes; use a shared "
            "file system"]  # fmt: skip
  return []


def _bucket(address: str, report: Say) -> list[str]:
  """Checks that process 0 can write, read and remove files of a bucket."""
  name = f"doctor-{secrets.token_hex(4)}"
  try:
    bucket = Bucket(address)
    bucket.write(name, b"x")
    same = bucket.read(name) == b"x"
    bucket.remove([name])
  except ValueError as error:
    return [str(error)]
  report(f"bucket       {address}, writable")
  return [] if same else [f"{address} does not return what was written"]


def _gather_lines(lines: list[str]) -> list[list[str]]:
  """All-gather of the lines of each process."""
  return [distributed.from_process(i, lines) for i in range(distributed.count())]
