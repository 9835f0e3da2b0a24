"""One run in several processes: how they find each other, decide together, and share the work.

With one process, which is what happens without a launcher, every function here does nothing but
what its arguments say, and no distributed service is started.
"""

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import launcher


class OtherProcessError(RuntimeError):
  """The first process failed where all had to agree; the message is its own."""

  def __init__(self, message: str, exit_code: int):
    super().__init__(message)
    self.exit_code = exit_code


def join() -> launcher.Launch | None:
  """Meets the other processes, if there are any; call it before anything computes.

  Raises:
    LaunchError: the environment describes several processes, but not fully.
  """
  launch = launcher.detect()
  if launch is not None:
    # It would take SIGTERM for itself; `train.stop` and `ballot` do that work.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(**launch.arguments)
  return launch


def count() -> int:
  """The number of processes of the run."""
  return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
  """Whether this is the process that writes the run folder and talks to the user."""
  return count() == 1 or jax.process_index() == 0


def on_first[T](function: Callable[[], T]) -> T:
  """What `function` returns in the first process, in all of them; JSON goes between them.

  Raises:
    OtherProcessError: `function` raised in the first process, where the error itself is raised.
  """
  if count() == 1:
    return function()
  told, failure = None, None
  if is_first():
    try:
      told = {"value": function()}
    except Exception as error:
      failure = error
      told = {"error": str(error), "exit_code": getattr(error, "exit_code", 2)}
  told = from_process(0, told)
  if failure is not None:
    raise failure
  if "error" in told:
    raise OtherProcessError(f"process 0: {told['error']}", told["exit_code"])
  return told["value"]


def from_process(which: int, value: Any) -> Any:
  """The `value` of process `which`, JSON, in all of them."""
  if count() == 1:
    return value
  from jax.experimental import multihost_utils

  is_source = jax.process_index() == which
  send = functools.partial(multihost_utils.broadcast_one_to_all, is_source=is_source)
  text = json.dumps(value).encode() if is_source else b""
  # Shapes must be known everywhere: first the length, then the bytes.
  padded = np.zeros(int(send(np.int32(len(text)))), np.uint8)
  padded[: len(text)] = np.frombuffer(text, np.uint8)
  return json.loads(bytes(np.asarray(send(padded))))


def any_of(flag: bool) -> bool:
  """Whether `flag` is true in any process; all must ask at the same point."""
  if count() == 1:
    return flag
  from jax.experimental import multihost_utils

  return bool(np.any(multihost_utils.process_allgather(np.array([flag]))))


def local_rows(where: NamedSharding, global_batch: int) -> range:
  """The rows of a batch `[global_batch, T]` of which a part lies on devices of this process."""
  rows: set[int] = set()
  of_rows = NamedSharding(where.mesh, PartitionSpec(where.spec[0]))
  for place in of_rows.addressable_devices_indices_map((global_batch,)).values():
    rows |= set(range(global_batch)[(place or (slice(None),))[0]])
  return range(min(rows), max(rows) + 1)  # a mesh lists the devices of a process together


def to_devices(
  batch: dict[str, np.ndarray], where: NamedSharding, global_batch: int, rows: range
) -> dict[str, jax.Array]:
  """A batch on its devices, from those of its rows that this process has read (`local_rows`)."""
  if count() == 1:
    return jax.device_put(batch, where)

  def place(array):
    def part(index):
      begin, end, _ = index[0].indices(global_batch)
      return array[(slice(begin - rows.start, end - rows.start), *index[1:])]

    return jax.make_array_from_callback((global_batch, *array.shape[1:]), where, part)

  return {name: place(array) for name, array in batch.items()}


def ballot(mesh: Mesh, votes: Sequence[bool]) -> jax.Array:
  """Votes of this process as int32 `[devices, len(votes)]`, for the `votes` of a training batch.

  The compiled step takes the largest over all devices. Its metrics are read a step late anyway, so
  all processes learn the outcome after the same step, and no device waits for it.
  """
  where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  mine = np.tile(np.array(votes, np.int32), (len(mesh.local_devices), 1))
  return jax.make_array_from_process_local_data(where, mine, (mesh.size, len(votes)))
