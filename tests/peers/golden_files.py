"""Files of recorded layers, which the environment of any side writes; NumPy only."""

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden"
AUTHORS = Path(__file__).parents[2] / ".venv-peers" / "authors"


def write(file: str, recorded: dict[str, dict[str, np.ndarray]]) -> None:
  """Writes golden/FILE.npz: `index`, the names and shapes as JSON, and all `numbers`."""
  index = {
    case: {name: list(value.shape) for name, value in results.items()}
    for case, results in recorded.items()
  }
  numbers = [value.ravel() for results in recorded.values() for value in results.values()]
  text = np.frombuffer(json.dumps(index).encode(), np.uint8)
  np.savez_compressed(FOLDER / f"{file}.npz", index=text, numbers=np.concatenate(numbers))
  print(f"golden/{file}.npz: {', '.join(recorded)}")
