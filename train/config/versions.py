"""Versions of the code that produced a run."""

import importlib.metadata
import subprocess
from pathlib import Path

import lnssm_jax


def versions() -> dict[str, str | None]:
  """Package versions, and the git commit if the code runs from a checkout."""
  here = Path(__file__).parent
  try:
    commit = subprocess.run(
      ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
      cwd=here,
      capture_output=True,
      text=True,
      check=True,
      timeout=10,
    ).stdout.strip()
  except (OSError, subprocess.SubprocessError):
    commit = None
  packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")
  installed = {name: importlib.metadata.version(name) for name in packages}
  return {"lnssm_jax": lnssm_jax.__version__, **installed, "git_commit": commit}
