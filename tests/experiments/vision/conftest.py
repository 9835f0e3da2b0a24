"""Images of three classes, by the third of the image that is bright."""

import numpy as np
import pytest

SIZE = 12


def pixels(count: int, seed: int = 0, channels: int = 3):
  """(images [count, SIZE, SIZE, channels] uint8, labels [count])."""
  rng = np.random.default_rng(seed)
  labels = rng.integers(3, size=count)
  images = rng.integers(60, size=(count, SIZE, SIZE, channels))
  for image, label in zip(images, labels, strict=True):
    image[4 * label : 4 * label + 4] += 180
  return images.astype(np.uint8), labels


@pytest.fixture(scope="session")
def file(tmp_path_factory):
  """A file with 50 images to train on and 20 to validate."""
  path = tmp_path_factory.mktemp("images") / "bright.npz"
  arrays = {}
  for name, count, seed in (("train", 50, 0), ("test", 20, 1)):
    arrays[f"{name}_x"], arrays[f"{name}_y"] = pixels(count, seed)
  np.savez(path, **arrays)
  return path
