"""Compiler flags of the tests, in the environment before jax starts."""

import os
from pathlib import Path

# Most of a test's time goes into compiling small programs: spend less on optimizing them. XLA's
# newer code generator takes twice as long for each fusion, and dividing a program among threads
# costs more than it saves with one test per core.
FLAGS = (
  "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
  "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
  "--xla_cpu_parallel_codegen_split_count=1"
)


def set_flags() -> None:
  """On the CPU; the same for all processes, so that they compute the same bits."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  # XLA's threads. An interpreted kernel holds some while it runs programs of its own that wait
  # for others: on two cores, with two threads, a kernel of a few hundred KiB waited for ever.
  os.environ.setdefault("NPROC", "16")
  # Read by the workers and by processes that tests start. NumPy's threads, of which interpreted
  # kernels need none for their small products, wait for each other in loops.
  os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
  # Larger programs are compiled once for all tests, their processes, and later runs.
  programs = Path(__file__).parents[1] / ".pytest_cache" / "programs"
  os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(programs))
  os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
