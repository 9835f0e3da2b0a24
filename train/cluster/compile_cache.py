"""How programs are compiled: options, and caches of programs and of a GPU's autotuning results."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

IN_RUN = "run"  # as a folder: `programs` in the run folder


def folder(compile_cache: str | None, run_dir: str | Path) -> str | None:
  """The folder for `at`: that of the setting, where `IN_RUN` yields to one that JAX has already."""
  if compile_cache != IN_RUN:
    return compile_cache
  return None if jax.config.jax_compilation_cache_dir else str(Path(run_dir) / "programs")


@contextlib.contextmanager
def at(folder: str | None) -> Iterator[None]:
  """Context in which compiled programs are cached in `folder`; None changes nothing.

  Runs may share the folder. It holds code that will be executed: nobody else should be able to
  write there. If a file is unusable, JAX warns and compiles.

  Raises:
    ValueError: `folder` is not a folder and cannot be created.
  """
  if folder is None:
    yield
    return
  path = Path(os.path.expandvars(folder)).expanduser().absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f"compile_cache={folder!r} cannot be used ({error.strerror}); use a folder, or None."
    ) from error
  settings = {
    "jax_compilation_cache_dir": str(path),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
  }
  before = {name: jax.config.values[name] for name in settings}
  try:
    for name, value in settings.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the setting only once
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


def options(mesh: Mesh, kernels: Path | None) -> dict[str, Any] | None:
  """Compiler options of a program on a GPU; None elsewhere.

  Processes that share the folder `kernels` compute the same bits: XLA chooses matrix-product
  kernels by timing them, and the next process may choose others, which round differently. The
  folder caches the choices of the first process.
  """
  if mesh.devices.flat[0].platform != "gpu":
    return None
  # Projections of one input are not merged: our kernels read whole arrays, so that each result of
  # a merged product would be copied.
  chosen: dict[str, Any] = {"xla_gpu_dot_merger_threshold_mb": 0}
  if kernels is not None:
    kernels.mkdir(exist_ok=True)
    chosen["xla_gpu_per_fusion_autotune_cache_dir"] = str(kernels.absolute())
  return chosen
