"""Images as sequences of pixels: the class after the last one.

A pixel is its gray value, 0 to 255, rows from the top; the answer, at the last pixel, is 256 plus
the class. Images have the size of the first one to train on.

Source: sequential MNIST (Le et al. 2015); Long Range Arena (Tay et al. 2021), section 2.2, whose
images are those of CIFAR-10 in gray.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from experiments.mqar import Examples
from experiments.vision.images import DataError, open_images

GRAYS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pixels:
  """The settings of the task.

  Args:
    train, test: sets of images, as those of `classify`: a folder or FILE.npz:NAME.

  Raises:
    DataError: there are none, or the test images have more classes.
  """

  name: ClassVar[str] = "image"

  train: str
  test: str

  def __post_init__(self):
    places = {"TRAIN": self.train, "TEST": self.test}  # as the command line names them
    known, asked = (len(open_images(place, name).classes) for name, place in places.items())
    if asked > known:
      raise DataError(
        f"{self.test} has {asked} classes, {self.train} only {known}; use sets that go together."
      )

  @property
  def vocabulary(self) -> int:
    """Gray values and classes."""
    return GRAYS + len(open_images(self.train).classes)

  @property
  def length(self) -> int:
    """Pixels of an image."""
    width, height = open_images(self.train).image(0).size
    return width * height

  def examples(self, rows: int, seed: int) -> Examples:
    """At most `rows` images, in an order of this seed; seeds of 2**31 and above: to test."""
    images = open_images(self.test if seed >= 2**31 else self.train)
    order = np.random.default_rng(seed).permutation(len(images))[:rows]
    size = open_images(self.train).image(0).size
    gray = (images.image(int(n)).convert("L").resize(size) for n in order)
    pixels = np.stack([np.asarray(image, np.int32).ravel() for image in gray])
    positions = np.full((len(order), 1), pixels.shape[1] - 1, np.int32)
    return Examples(pixels, positions, GRAYS + images.labels[order][:, None])
