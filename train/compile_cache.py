"""Compiled programs that are kept on disk, so that the next start need not compile them again."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def at(folder: str | None) -> Iterator[None]:
  """Keeps what is compiled inside in `folder`, and takes it from there; None changes nothing.

  Runs may share the folder. It holds programs that are run: let nobody else write into it. Whatever
  goes wrong with a file there, JAX warns and compiles.

  Raises:
    ValueError: it is no folder, and cannot be made.
  """
  if folder is None:
    yield
    return
  path = Path(os.path.expandvars(folder)).expanduser().absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f"compile_cache={folder!r} cannot be used ({error.strerror}); give a folder, or None."
    ) from error
  settings = {
    "jax_compilation_cache_dir": str(path),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
  }
  before = {name: jax.config.values[name] for name in settings}
  try:
    for name, value in settings.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX looks at the folder once
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
