"""Settings shared by all tests."""

import os

# Tests give the same numbers wherever they run. Read when jax starts, hence set before any import.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
