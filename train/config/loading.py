"""Reading config files, and the JSON form of a config.

A config file is Python: its `get_config()` returns a `Train`. A file of several configs, such as
those of a paper's table, has their names as keys of `VARIANTS`, and `get_config(name)`.
"""

import contextlib
import dataclasses
import re
import traceback
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lnssm_jax.files.printable import printable
from train.config.checked import ConfigError, check
from train.config.schema import Train

# Config files of earlier versions, and where they are now.
_MOVED = {
  "configs/sweeps/": "experiments/sweeps/",
  "configs/mqar.py": "experiments/configs/mqar.py",
  "configs/vision.py": "experiments/configs/vision.py",
}


def load_config(path: str | Path) -> Train:
  """Loads the config of a language model: `load` with `kind=Train`."""
  return load(path, Train)


def load[T](path: str | Path, kind: type[T]) -> T:
  """Executes the Python file of `path`, "FILE.py" or "FILE.py:VARIANT", and returns its config.

  Without a variant that is the first of a file's `VARIANTS`. The file runs with all permissions of
  the caller: load only files that you would run.

  Raises:
    FileNotFoundError: no such file; the message lists the config files of that folder.
    ConfigError: the file is not valid Python, raises, has no `get_config`, or that does not return
      a `kind`; or it has no such variant, and the message lists those it has.
  """
  file, separator, name = str(path).partition(".py:")
  path, variant = Path(file + separator[:-1]), name if separator else None
  with executed(path) as namespace:
    get_config = namespace.get("get_config")
    check(callable(get_config), f"{path} has no function get_config() that returns a Train.")
    config = typing.cast(Any, get_config)(*_variant(path, namespace, variant))
  home = "train.config" if kind is Train else kind.__module__
  check(
    isinstance(config, kind),
    f"get_config() of {path} returned {type(config).__name__}, not a {home}.{kind.__name__}.",
  )
  return config


@contextlib.contextmanager
def executed(path: Path) -> Iterator[dict[str, Any]]:
  """Context with the names of a Python file; errors of its code are raised as of `load`."""
  if not path.is_file():
    for old, new in _MOVED.items():
      moved = re.sub(rf"(^|/){old}", rf"\1{new}", path.as_posix())
      if moved != path.as_posix() and Path(moved).is_file():
        raise FileNotFoundError(f"no config file {str(path)!r}: it is now {moved}.")
    others = sorted(str(p) for p in path.parent.glob("*.py"))
    listing = f"; that folder has {printable(', '.join(others), 1000)}" if others else ""
    raise FileNotFoundError(f"no config file {str(path)!r}{listing}.")
  namespace: dict[str, Any] = {"__name__": "config", "__file__": str(path)}
  try:
    code = compile(path.read_bytes(), str(path), "exec")
  except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
    line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    raise ConfigError(f"{path}{line}: {getattr(error, 'msg', error)}.") from error
  try:
    exec(code, namespace)
    yield namespace
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    where = f", line {lines[-1]}" if lines else ""
    raise ConfigError(f"{path}{where}: {type(error).__name__}: {error}") from error


def _variant(path: Path, namespace: Mapping[str, Any], name: str | None) -> list[str]:
  """The arguments of `get_config`: the name of a variant, if the file has any."""
  known = list(namespace.get("VARIANTS", ()))
  has = f"it has {', '.join(known)}" if known else "it is a single config; leave the name out"
  check(name is None or name in known, f"{path} has no variant {name!r}; {has}.")
  return known[:1] if name is None else [name]


def to_dict(config: Any) -> dict[str, Any]:
  """Converts a config to plain dictionaries, lists, strings and numbers for `json.dumps`."""
  return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def from_dict(values: Mapping[str, Any]) -> Train:
  """Inverse of `to_dict`, also after a round trip through JSON; checks everything again."""
  return Train(**values)


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_dict(value)
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  return [_plain(v) for v in value] if isinstance(value, tuple | list) else value
