"""Settings shared by all tests. Read when jax starts, hence set before any test is imported."""

import functools
import gc
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests import eager, fast_compile


def pytest_configure(config):
  """Tests give the same numbers wherever they run; only those on hardware, `-m gpu`, use it."""
  if config.getoption("markexpr") == "gpu":
    # All memory in one piece: tests fill and free it, and pieces of it do not join again.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    # References and products next to kernels need no search for their fastest form.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    os.environ["XLA_FLAGS"] = flags.strip()
  else:
    fast_compile.set_flags()
  os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # nobody reads them
  # Where Python is told to write nothing, every process that a test starts would compile the
  # project again, and every run the tests.
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
  sys.dont_write_bytecode = False
  # Traced programs are many objects that live on. Python's default looks through young ones after
  # every 700 more, an eighth of the time of the tests. Those that live on are not looked at again,
  # which takes seconds each time.
  gc.set_threshold(400_000, 1000, 1000)


def pytest_collection_finish():
  """No collection of garbage looks at modules and tests again: they live as long as the process."""
  gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are chosen
def pytest_collection_modifyitems(config, items):
  """Marks the tests of slow.txt, which only `make test-all` runs."""
  lines = (config.rootpath / "tests/slow.txt").read_text().splitlines()
  slow = {line for line in lines if not line.startswith("#")}
  for item in items:
    if item.nodeid in slow:
      item.add_marker(pytest.mark.slow)


def pytest_sessionfinish():
  """Collects young garbage at the end; pytest's hooks and Python would look at all, each again."""
  gc.collect(0)
  gc.freeze()


# Linux allows a process 65,530 memory maps, every compiled program takes several, and a process
# that wants one more dies.
_MAPS, _MOST_MAPS, _TESTS_BETWEEN_LOOKS = Path("/proc/self/maps"), 45_000, 32
_tests_run = 0


def pytest_runtest_teardown():
  """Frees the compiled programs of earlier tests before there are too many."""
  global _tests_run
  _tests_run += 1
  if _tests_run % _TESTS_BETWEEN_LOOKS == 0 and _MAPS.exists():
    with _MAPS.open("rb") as maps:
      count = sum(1 for _ in maps)
    if count > _MOST_MAPS:
      import chex
      import jax

      jax.clear_caches()
      chex.clear_trace_counter()
      gc.collect()


@functools.cache
def _write_programs_whole():
  import jax
  from jax._src import lru_cache

  def put(self, key, value):
    path = self.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    if not path.exists():
      part = self.path / f"{key}.{os.getpid()}"
      part.write_bytes(value)
      os.replace(part, path)  # also where another process was faster

  mock.patch.object(lru_cache.LRUCache, "put", put).start()
  # Few programs of a test are those of another, and to write one takes a twentieth of compiling it.
  # Processes that tests start, of which many run the same, write smaller ones too.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_collectstart(collector):
  """Another process finds a compiled program in the cache whole or not at all.

  And single operations are NumPy's. Before modules are imported, for some run programs then.
  """
  _write_programs_whole()
  if collector.config.getoption("markexpr") != "gpu":
    eager.install()


@pytest.fixture(autouse=True, scope="session")
def fast_callbacks():
  """Callbacks get numpy arrays and Python integers instead of arrays on a device.

  Making an array on a device takes most of the time of an interpreted kernel, whose every
  instruction is a callback.
  """
  from jax._src import callback as jax_callback

  def call(*args, callback, **_):
    numbers = (np.asarray(x) for x in args)
    return [
      np.asarray(result)
      for result in callback(
        *(x.item() if x.ndim == 0 and x.dtype.kind in "iu" else x for x in numbers)
      )
    ]

  with mock.patch.object(jax_callback, "io_callback_impl", call):
    yield


@pytest.fixture
def hopper(monkeypatch):
  """As if the default device were a Hopper GPU: enough to choose and to lower, not to run."""
  from lnssm_jax.ops.core import dispatch

  monkeypatch.setattr(dispatch.device, "unsupported", lambda *architectures: None)


@pytest.fixture(autouse=True)
def no_races(monkeypatch):
  """Kernels under interpretation have no races: JAX prints those that it finds, and continues."""
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  runs, detector = [], gpu_callbacks.GPURaceDetectionState  # one for every kernel that runs

  def watched(**options):
    runs.append(detector(**options))
    return runs[-1]

  monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", watched)
  yield runs
  found = any(run.races_found for run in runs)
  assert not found, "an interpreted kernel has races: see RACE DETECTED in its output"
