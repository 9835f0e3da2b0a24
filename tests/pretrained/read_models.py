"""Settings and parameters that the recorded files of published models become, as numbers.

The slow tests compare what these models compute with their own code; by these numbers the default
tests see when a file is read as another model. When all of `tests/pretrained` pass,

    python -m tests.pretrained.read_models

records them in golden/read.json.
"""

import hashlib
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.models.settings import params_of
from lnssm_jax.pretrained import exports, folders, hugging_face
from lnssm_jax.pretrained.families import family_of
from tests.pretrained.published import CASES, GOLDEN, REAL, real, recorded, write

FILE = GOLDEN / "read.json"


def settings_number(config: dict[str, Any]) -> str:
  """A digest of the settings that a config.json becomes."""
  settings = family_of(config).settings(folders.plain(config))
  text = json.dumps(settings, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def parameters_number(model: Any) -> float:
  """A sum over all parameters in which each entry has a weight of its own."""
  total = 0.0
  for name, x in exports.flat(params_of(model)).items():
    weights = np.random.default_rng(zlib.crc32(name.encode())).normal(size=x.shape)
    total += float((weights * np.asarray(x, np.float64)).sum())
  return total


def configs() -> dict[str, dict[str, Any]]:
  """config.json of all recorded files."""
  found = {case: recorded(case).config for case in CASES}
  return found | {f"real/{case}": real(case).config for case in REAL}


def main() -> None:
  parameters = {}
  for case in CASES:
    with tempfile.TemporaryDirectory() as folder:
      loaded = hugging_face.load(write(Path(folder), case, dtype=np.float32))
    parameters[case] = round(parameters_number(loaded.model), 6)
  settings = {case: settings_number(config) for case, config in configs().items()}
  FILE.write_text(json.dumps({"settings": settings, "parameters": parameters}, indent=1) + "\n")


if __name__ == "__main__":
  main()
