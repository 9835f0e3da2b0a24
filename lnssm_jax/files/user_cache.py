"""The folder of this user in which things are kept that can be made again."""

import os
from pathlib import Path


def folder() -> Path:
  """`$XDG_CACHE_HOME/lnssm_jax`, by default `~/.cache/lnssm_jax`; it may not exist.

  Raises:
    RuntimeError: there is no home.
  """
  cache = os.environ.get("XDG_CACHE_HOME", "")
  if not os.path.isabs(cache):  # as its specification says: a relative one is not to be used
    cache = "~/.cache"
  return Path(cache).expanduser() / "lnssm_jax"
