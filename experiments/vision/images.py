"""Sets of labeled images: a folder per class, or arrays in a file."""

from pathlib import Path

import numpy as np
from PIL import Image

from lnssm_jax.files.reading import DataError, open_regular

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ArrayImages:
  """Images [N, height, width] or [N, height, width, channels] uint8 with labels [N]."""

  def __init__(self, name: str, pixels: np.ndarray, labels: np.ndarray):
    if pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or not len(pixels):
      raise DataError(
        f"{name}_x is {pixels.dtype}{list(pixels.shape)}; images are uint8, [N, height, width] or "
        "[N, height, width, channels]."
      )
    if labels.shape != pixels.shape[:1] or not np.issubdtype(labels.dtype, np.integer):
      raise DataError(
        f"{name}_y is {labels.dtype}{list(labels.shape)}; it needs an integer for each of the "
        f"{len(pixels)} images."
      )
    if labels.min() < 0:
      raise DataError(f"{name}_y has labels below 0; classes are numbered from 0.")
    self._pixels = pixels[..., 0] if pixels.shape[3:] == (1,) else pixels
    self.labels = labels.astype(np.int32)
    self.classes = [str(label) for label in range(int(labels.max()) + 1)]

  def __len__(self) -> int:
    return len(self.labels)

  def image(self, number: int) -> Image.Image:
    """One of the images."""
    return Image.fromarray(self._pixels[number])


class FolderImages:
  """Image files, in one folder per class; classes are numbered in alphabetical order."""

  def __init__(self, folder: Path):
    self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    self._files, labels = [], []
    for label, name in enumerate(self.classes):
      files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES)
      self._files += files
      labels += [label] * len(files)
    if not self._files:
      raise DataError(
        f"{folder} has no folders with images ({', '.join(SUFFIXES)}); it needs one per class."
      )
    self.labels = np.array(labels, np.int32)

  def __len__(self) -> int:
    return len(self.labels)

  def image(self, number: int) -> Image.Image:
    """One of the images, decoded.

    Raises:
      DataError: the file is damaged.
    """
    try:
      path = self._files[number]
      with open_regular(path, follow_links=True) as file, Image.open(file) as image:
        image.load()
        return image
    except OSError as error:
      raise DataError(f"{self._files[number]} is no readable image: {error}") from error


Images = ArrayImages | FolderImages


def open_images(place: str, name_of_place: str = "data.train and data.validation") -> Images:
  """Opens the set of images of `place`, as `experiments.vision.settings.Data` describes it.

  Args:
    name_of_place: the setting or argument that errors tell users to change.

  Raises:
    DataError: there is none, or it has other arrays.
  """
  file, separator, name = place.partition(".npz:")
  if separator:
    path = Path(file + ".npz")
    if not path.is_file():
      raise DataError(f"no file {str(path)!r}; set {name_of_place} to your images.")
    with np.load(path) as arrays:
      missing = [key for key in (f"{name}_x", f"{name}_y") if key not in arrays]
      if missing:
        raise DataError(f"{path} has no array {missing[0]!r}; it has {', '.join(arrays)}.")
      return ArrayImages(f"{place}: {name}", arrays[f"{name}_x"], arrays[f"{name}_y"])
  if not Path(place).is_dir():
    raise DataError(
      f"no folder {place!r} with one folder of images per class; set {name_of_place} to yours, or"
      " to arrays, FILE.npz:NAME."
    )
  return FolderImages(Path(place))
