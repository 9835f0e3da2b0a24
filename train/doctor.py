"""`python -m train doctor`: whether this machine, or these machines, can train; and if not, why."""

import os
import platform
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import config, distributed, launcher, run_folder
from train import mesh as meshes

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_ELEMENTS = 1 << 22  # float32 a device in the collective that is timed


def examine(cfg: config.Train | None, say: Callable[[str], object]) -> bool:
  """Prints, in the first process, what was found; returns whether nothing stands in the way.

  Args:
    cfg: a run that is to be trained here, or None; its mesh and its folder are looked at.
  """
  problems: list[str] = []
  launch = distributed.join()
  tell = say if distributed.is_first() else lambda _: None
  versions = run_folder.versions()
  shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
  tell(f"versions     python {platform.python_version()}, {shown}")
  tell(f"launcher     {launch.launcher if launch else 'none: one process'}")
  for line in _everyones(f"{socket.gethostname()}, pid {os.getpid()}, {_devices_here()}"):
    tell(f"process      {line}")
  tell(f"devices      {jax.device_count()} x {jax.devices()[0].device_kind}")
  problems += _environment(launch)
  try:
    tell(f"collective   {_collective()}")
  except Exception as error:  # whatever it is, it is what the user asked for
    problems.append(f"the devices cannot add numbers up: {_first_line(error)}")
  if cfg is not None:
    try:
      sizes = ", ".join(f"{axis} {size}" for axis, size in meshes.make_mesh(cfg).shape.items())
      tell(f"mesh         {sizes}")
    except ValueError as error:
      problems.append(str(error))
    problems += _folder(Path(cfg.run_dir), tell)
  problems = list(dict.fromkeys(line for lines in _everyones_lines(problems) for line in lines))
  for problem in problems:
    tell(f"PROBLEM      {problem}")
  tell("nothing stands in the way" if not problems else f"{len(problems)} to solve")
  return not problems


def _devices_here() -> str:
  return f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"


def _environment(launch: launcher.Launch | None) -> list[str]:
  problems = []
  if jax.default_backend() == "cpu" and Path("/dev/nvidia0").exists():
    problems.append("there is an NVIDIA GPU, but JAX does not use it: pip install -e '.[cuda13]'")
  proxies = [name for name in os.environ if name.lower() in _PROXIES]
  if launch and proxies:
    problems.append(
      f"{', '.join(proxies)} is set; processes may not find each other through a proxy: unset it "
      "in the job"
    )
  if launch and jax.process_count() != launch.processes:
    problems.append(
      f"{launch.launcher} started {launch.processes} processes, but JAX joined "
      f"{jax.process_count()}"
    )
  return problems


def _collective() -> str:
  """Adds one float32 vector a device up on all devices; says how long it took.

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
  return f"{_ELEMENTS * 4 >> 20} MiB added up over {size} devices, right, {1e3 * spent:.1f} ms"


def _folder(path: Path, tell: Callable[[str], object]) -> list[str]:
  """Whether the first process can write the run folder and the others see what it writes."""
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
  tell(f"run folder   {path}, writable, {found['free'] / 1e9:.0f} GB free")
  if not seen:
    return [f"run_dir={str(path)!r} is not the same folder for all processes; put it on a disk "
            "that they share"]  # fmt: skip
  return []


def _everyones(text: str) -> list[str]:
  return [lines[0] for lines in _everyones_lines([text])]


def _everyones_lines(lines: list[str]) -> list[list[str]]:
  """What each process brings, in all of them."""
  return [distributed.from_process(i, lines) for i in range(distributed.count())]


def _first_line(error: Exception) -> str:
  return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
