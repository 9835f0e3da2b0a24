"""Tests in this folder need a Hopper GPU to themselves: they fill its memory with NaN.

Nearly all of their time goes into compiling programs. So they run in threads, ahead of their turn,
some compiling while one has the GPU: see `hardware`. They take parameters, and no fixtures.
"""

import concurrent.futures
import sys

import jax
import pytest

from pallas_kernels.core import device

# Kernels are compiled one at a time in a process, by whichever thread: while one does, another one
# lowers programs or runs them, and the others wait or compile what is not a kernel. So
# `make test-gpu` runs four processes, each with a quarter of the tests and of the GPU's memory.
_pool = concurrent.futures.ThreadPoolExecutor(7)
_started: dict[pytest.Item, concurrent.futures.Future] = {}


def pytest_addoption(parser):
  parser.addoption("--part", default="0/1", help="I/N: of N equal parts of the GPU's tests, part I")
  parser.addoption("--ampere", action="store_true", help="kernels for all GPUs since Ampere")


def pytest_configure(config):
  if config.getoption("--ampere", False):
    device.architecture_of = lambda _: device.AMPERE


def pytest_collection_modifyitems(config, items):
  index, parts = map(int, config.getoption("--part", "0/1").split("/"))
  items[:] = items[index::parts]


@pytest.fixture(autouse=True)
def hopper():
  gpu = jax.devices()[0]
  capability = str(getattr(gpu, "compute_capability", "none"))
  if gpu.platform != "gpu" or not capability.startswith("9."):
    kind = f"{gpu.platform}, compute capability {capability}"
    pytest.skip(f"needs a Hopper GPU, by `make test-gpu` (the default device is a {kind})")


def pytest_pyfunc_call(pyfuncitem):
  """Waits for the end of a test. The first one starts all."""
  if pyfuncitem not in _started:
    for item in pyfuncitem.session.items:
      if item.get_closest_marker("gpu"):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        _started[item] = _pool.submit(item.function, **parameters)
  _started.pop(pyfuncitem).result()
  return True


def pytest_runtest_logreport(report):
  """Shows a failure at once: a run that is cut off has no summary."""
  if report.failed:
    print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)


def pytest_sessionfinish():
  _pool.shutdown(wait=False, cancel_futures=True)
