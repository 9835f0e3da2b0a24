"""Settings shared by all tests. Read when jax starts, hence set before any import."""

import os

# Tests give the same numbers wherever they run.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of a test's time goes into compiling small programs: spend less on optimising them.
_FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FAST_COMPILE}".strip()
