"""The size of every initial parameter, as recorded in initial_values.json.

python -m tests.mixers.initial_values   # records them again
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np

FILE = Path(__file__).with_suffix(".json")


def of(params) -> np.ndarray:
  """[parameters, 3]: elements, mean and root mean square of each, sorted: names do not count."""
  leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(params)]
  rows = sorted((x.size, x.mean(), np.sqrt(np.mean(x**2))) for x in leaves)
  return np.asarray(rows)


@functools.cache
def recorded() -> dict[str, list]:
  """Recorded values, by the mixer's name."""
  return json.loads(FILE.read_text())


def main():
  from lnssm_jax.mixers import MIXERS
  from tests.mixers.helpers import split
  from tests.mixers.tiny import initial

  sizes = {name: of(split(initial(name))[1]) for name in sorted(MIXERS)}
  rows = {name: [[float(f"{x:.6g}") for x in row] for row in size] for name, size in sizes.items()}
  lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
  FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
  main()
