"""A run in several processes: initialization, decisions in common, and batches by process.

With one process (no launcher) no distributed service is started, and every function here reduces to
the trivial case.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lnssm_jax.files.printable import PrintableError
from lnssm_jax.files.reading import is_transient
from train.cluster import launcher
from train.messages import first_line

# Seconds without a sign of life of a process after which all others end, whatever they wait for.
HEARTBEAT = 60


class OtherProcessError(PrintableError, RuntimeError):
  """Another process failed, without which this one cannot go on; the message is its error."""

  def __init__(self, message: str, exit_code: int):
    super().__init__(*message.split("\n"))
    self.exit_code = exit_code


def join() -> launcher.Launch | None:
  """Initializes `jax.distributed` if a launcher started several processes.

  Call it before JAX is used.

  Raises:
    LaunchError: the environment describes several processes incompletely.
    jax.errors.JaxRuntimeError: process 0 does not answer.
  """
  launch = launcher.detect()
  if launch is not None:
    # It would handle SIGTERM itself, which `train.cluster.stop_signal` and `ballot` do here.
    jax.config.update("jax_enable_preemption_service", False)
    try:
      jax.distributed.initialize(**launch.arguments, heartbeat_timeout_seconds=HEARTBEAT)
    except jax.errors.JaxRuntimeError:
      raise
    # JAX's detection reads more variables than those that say that a launcher is there.
    except (LookupError, ValueError, AttributeError, ImportError, RuntimeError) as error:
      raise launcher.LaunchError(
        f"{launch.launcher} started {launch.processes} processes, but JAX cannot find process 0"
        f" ({first_line(error)}); set {launcher.ADDRESS}=HOST:PORT for all of them."
      ) from error
  return launch


def count() -> int:
  """Number of processes of the run."""
  return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
  """Whether this process writes the run folder and prints messages."""
  return count() == 1 or jax.process_index() == 0


def on_first[T](function: Callable[[], T]) -> T:
  """Calls `function` in process 0 and returns its result, which must be JSON, in all processes.

  Raises:
    OtherProcessError: `function` raised in process 0 (which itself raises the original error).
  """
  if count() == 1:
    return function()
  outcome, failure = None, None
  if is_first():
    try:
      outcome = {"value": function()}
    except Exception as error:
      failure = error
      outcome = _told(error)
  outcome = from_process(0, outcome)
  if failure is not None:
    raise failure
  if "error" in outcome:
    raise OtherProcessError(f"process 0: {outcome['error']}", outcome["exit_code"])
  return outcome["value"]


def _told(error: Exception | None) -> dict[str, Any]:
  """An error as the other processes hear of it."""
  usual = 1 if is_transient(error) else 2
  return {"error": str(error), "exit_code": getattr(error, "exit_code", usual)}


def from_process(which: int, value: Any) -> Any:
  """Broadcasts the JSON `value` of process `which` to all processes."""
  if count() == 1:
    return value
  from jax.experimental import multihost_utils

  is_source = jax.process_index() == which
  send = functools.partial(multihost_utils.broadcast_one_to_all, is_source=is_source)
  text = json.dumps(value).encode() if is_source else b""
  # All processes must know the shapes: broadcast the length first, then the bytes.
  padded = np.zeros(int(send(np.int32(len(text)))), np.uint8)
  padded[: len(text)] = np.frombuffer(text, np.uint8)
  return json.loads(bytes(np.asarray(send(padded))))


def on_all[T](function: Callable[[], T]) -> T:
  """Calls `function` in every process and returns its own result there.

  Raises:
    OtherProcessError: `function` raised in another process (which itself raises the original
      error); so none of them waits for a process that has failed.
  """
  results: list[T] = []
  failure = None
  try:
    results.append(function())
  except Exception as error:
    failure = error
  failed = first_with(failure is not None)
  if failed is None:
    return results[0]
  report = from_process(failed, _told(failure))
  if failure is not None:
    raise failure
  raise OtherProcessError(f"process {failed}: {report['error']}", report["exit_code"])


def first_with(flag: bool) -> int | None:
  """The first process in which `flag` is true. A collective: all processes must call it."""
  if count() == 1:
    return 0 if flag else None
  from jax.experimental import multihost_utils

  flags = np.ravel(multihost_utils.process_allgather(np.array([flag])))
  return int(np.argmax(flags)) if flags.any() else None


def any_of(flag: bool) -> bool:
  """Whether `flag` is true in any process. A collective: all processes must call it."""
  return first_with(flag) is not None


@functools.cache
def local_rows(where: NamedSharding, global_batch: int) -> range:
  """Rows of a batch `[global_batch, T]` that are stored, at least in part, on local devices."""
  of_rows = NamedSharding(where.mesh, PartitionSpec(where.spec[0]))
  places = of_rows.addressable_devices_indices_map((global_batch,)).values()
  parts = [range(global_batch)[(place or (slice(None),))[0]] for place in places]
  # The devices of a process are contiguous in a mesh.
  return range(min(part.start for part in parts), max(part.stop for part in parts))


def to_devices(
  batch: dict[str, np.ndarray], where: NamedSharding, global_batch: int
) -> dict[str, jax.Array]:
  """Puts a batch on its devices, given the rows that this process has read (`local_rows`)."""
  if count() == 1:
    return jax.device_put(batch, where)
  first = local_rows(where, global_batch).start

  def place(array):
    def part(index):
      begin, end, _ = index[0].indices(global_batch)
      return array[(slice(begin - first, end - first), *index[1:])]

    return jax.make_array_from_callback((global_batch, *array.shape[1:]), where, part)

  return {name: place(array) for name, array in batch.items()}


def ballot(mesh: Mesh, votes: Sequence[bool]) -> jax.Array:
  """Flags of this process as an int32 array `[devices, len(votes)]`: `votes` of a training batch.

  The compiled step returns their maximum over all devices with its metrics, which are read one step
  late: all processes see the result after the same step, and no device waits for it.
  """
  where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  mine = np.tile(np.array(votes, np.int32), (len(mesh.local_devices), 1))
  return jax.make_array_from_process_local_data(where, mine, (mesh.size, len(votes)))
