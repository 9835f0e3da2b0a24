"""How programs are compiled: options, and caches of programs and of a GPU's autotuning results."""

import contextlib
import gc
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh

from lnssm_jax.files import user_cache
from lnssm_jax.files.printable import printable
from train.cluster import agreement, distributed, signatures

IN_RUN = "run"  # as a folder: `programs` in the run folder

# Where a traced program is looked up before it is lowered. On a CPU that would save little, and
# another processor that shares the folder may lack instructions of the program.
_LOOKED_UP = ("gpu",)
_FOLDER: list[Path] = []  # of the contexts `at`


def folder(compile_cache: str | None, run_dir: str | Path) -> str | None:
  """The folder for `at`: that of the setting, where `IN_RUN` yields to one that JAX has already."""
  if compile_cache != IN_RUN:
    return compile_cache
  return None if jax.config.jax_compilation_cache_dir else str(Path(run_dir) / "programs")


def of_dry_run(settings: Mapping[str, Any]) -> Path | None:
  """An empty folder of this user for what a dry run of these settings compiles, or None.

  It replaces those of other dry runs.
  """
  if distributed.count() == 1:
    with contextlib.suppress(OSError, RuntimeError):
      path = _of_dry_run(settings)
      shutil.rmtree(path.parent, ignore_errors=True)
      path.mkdir(mode=0o700, parents=True)
      return path
  return None


def take_from_dry_run(settings: Mapping[str, Any], run_dir: str | Path) -> None:
  """Moves what the last dry run compiled into a new run folder, if its settings are these."""
  programs = Path(run_dir) / "programs"
  if distributed.is_first() and not programs.exists():
    with contextlib.suppress(OSError, RuntimeError, shutil.Error):
      shutil.move(_of_dry_run(settings) / "programs", programs)


def _of_dry_run(settings: Mapping[str, Any]) -> Path:
  digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
  return user_cache.folder() / "dry_run" / digest


@contextlib.contextmanager
def at(folder: str | None) -> Iterator[None]:
  """Context in which compiled programs are cached in `folder`; None changes nothing.

  Runs may share the folder. It holds code that will be executed, so JAX sees only files that this
  user has signed (`train.cluster.signatures`); others are removed and compiled again. A folder that
  is a link, of another user, or writable for others is not used.

  Raises:
    ValueError: `folder` is not a folder and cannot be created.
  """
  if folder is None:
    yield
    return
  path = Path(os.path.expandvars(folder)).expanduser().absolute()
  try:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
  except OSError as error:
    raise ValueError(
      f"compile_cache={folder!r} cannot be used ({error.strerror}); use a folder, or None."
    ) from error
  if why := signatures.prepare(path, keep=not distributed.is_first()):
    warnings.warn(printable(f"{path} is not used for compiled programs: {why}."), stacklevel=3)
    yield
    return
  settings = {
    "jax_compilation_cache_dir": str(path),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    # By default XLA for GPUs opens files in a folder within, which nobody checks (`options` has
    # another folder).
    "jax_persistent_cache_enable_xla_caches": "none",
  }
  before = {name: jax.config.values[name] for name in settings}
  _FOLDER.append(path)
  try:
    for name, value in settings.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX reads the setting only once
    yield
  finally:
    signatures.sign_new(_FOLDER.pop())
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
    _check_files(kernels)
    chosen["xla_gpu_per_fusion_autotune_cache_dir"] = str(kernels.absolute())
  return chosen


def _check_files(folder: Path) -> None:
  """Raises ValueError if a file of `folder` is none, such as a pipe, for which XLA would wait."""
  for inside, folders, names in os.walk(folder):
    for path in (folder, *(Path(inside, name) for name in (*folders, *names))):
      if path.is_symlink() or not (path.is_file() or path.is_dir()):
        raise ValueError(f"{path} is a link, or no regular file; remove it.")


def compiled(
  function: jax.stages.Wrapped, arguments: tuple[Any, ...], mesh: Mesh, settings: Mapping[str, Any]
) -> jax.stages.Compiled:
  """The program of a jitted function for these arguments, compiled or found in the folder of `at`.

  JAX looks programs up by their lowered text, and lowering is most of a warm start: some tenths of
  a second of Python for each GPU kernel. The text of a kernel also counts the kernels that this
  process lowered before (JAX 0.11), so a process that lowers fewer of them finds nothing. So the
  executable is also kept under a digest of what was traced, with all constants, `settings`,
  packages, source files, flags and devices. It is signed with its name: a file that is damaged, is
  another program's or does not load is compiled again. Only for a run of one process on GPUs.
  """
  with _no_garbage_collection():
    result = _compiled(function.trace(*arguments), mesh, settings)
  if _FOLDER:  # now: a killed process would leave files without signatures
    signatures.sign_new(_FOLDER[-1])
  return result


def found_by_trace(
  function: jax.stages.Wrapped, mesh: Mesh, settings: Mapping[str, Any]
) -> Callable[..., Any]:
  """A jitted function whose programs, one per shapes of arguments, are found as by `compiled`."""
  if not _is_looked_up(mesh):
    return function
  programs: dict[Any, jax.stages.Compiled] = {}

  def call(*arguments):
    leaves, tree = jax.tree.flatten(arguments)
    key = tree, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    if key not in programs:
      programs[key] = compiled(function, arguments, mesh, settings)
    return programs[key](*arguments)

  return call


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
  """Context of tracing and lowering: their millions of objects stay, collections find little."""
  enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if enabled:
      gc.enable()


def _is_looked_up(mesh: Mesh) -> bool:
  platform = mesh.devices.flat[0].platform
  cached = jax.config.jax_compilation_cache_dir is not None
  return cached and platform in _LOOKED_UP and distributed.count() == 1


def _compiled(
  traced: jax.stages.Traced, mesh: Mesh, settings: Mapping[str, Any]
) -> jax.stages.Compiled:
  if not _is_looked_up(mesh):
    return traced.lower().compile()
  folder = Path(jax.config.jax_compilation_cache_dir or "")
  path = folder / f"{_key(traced, mesh, settings)}.program"
  program = signatures.read(path)
  if program:
    devices = list(mesh.devices.flat)
    try:
      trees = traced.in_tree, traced.out_tree
      return serialize_executable.deserialize_and_load(program, *trees, execution_devices=devices)
    except Exception as error:  # of another driver, for one: compiling says what is wrong, if so
      text = f"{path} does not load ({error}); the program is compiled again."
      warnings.warn(printable(text, 2000), stacklevel=2)
  result = traced.lower().compile()
  try:
    program, *_ = serialize_executable.serialize(result)
    signatures.write(path, program)
  except Exception as error:  # the next start takes longer
    warnings.warn(printable(f"{path} cannot be written: {error}", 2000), stacklevel=2)
  return result


def _key(traced: jax.stages.Traced, mesh: Mesh, settings: Mapping[str, Any]) -> str:
  """Digest of everything that determines the compiled program."""
  digest = hashlib.sha256(str(traced.jaxpr).encode())
  for constant in _constants(traced.jaxpr, set()):  # the text has only their shapes
    array = np.asarray(constant)
    digest.update(f"{array.dtype} {array.shape}\n".encode() + array.tobytes())
  kept = lambda name: not name.startswith(("jax_compilation_cache", "jax_persistent_cache"))
  facts = {
    "arguments": str(traced.args_info),
    "software": agreement.software(),
    "settings": {name: value for name, value in settings.items() if name != "run_dir"},
    "jax": {name: repr(value) for name, value in jax.config.values.items() if kept(name)},
    "xla": {name: value for name, value in os.environ.items() if name.startswith("XLA_")},
    "backend": mesh.devices.flat[0].client.platform_version,
    "devices": [(device.id, device.device_kind) for device in mesh.devices.flat],
    "mesh": dict(mesh.shape),
  }
  digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
  return digest.hexdigest()


def _constants(value: Any, seen: set[int]) -> Iterator[Any]:
  """The arrays that a traced program holds, also those of the functions that it calls."""
  if isinstance(value, tuple | list):
    for part in value:
      yield from _constants(part, seen)
  elif isinstance(value, ClosedJaxpr | Jaxpr) and id(value) not in seen:
    seen.add(id(value))  # layers share functions
    yield from (x for x in getattr(value, "consts", ()) if not isinstance(x, jax.core.Tracer))
    for equation in value.eqns:
      yield from (x.val for x in equation.invars if isinstance(x, Literal) and np.ndim(x.val))
      yield from _constants(tuple(equation.params.values()), seen)
