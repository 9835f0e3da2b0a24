"""Random changes of one image, with Pillow: crop, flip and RandAugment.

RandAugment (Cubuk et al. 2020) as DeiT and the models after it use it, "rand-m9-mstd0.5-inc1" in
their settings: two of the operations, each with probability 1/2 and a magnitude drawn around the
given one; a larger magnitude is a stronger change in all of them.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from experiments.vision.settings import Augment

Box = tuple[int, int, int, int]  # left, top, right, bottom

ROUNDS = 2  # operations per image
_PROBABILITY = 0.5  # of each
_MAGNITUDE_STD = 0.5
_CROP_ASPECTS = (3 / 4, 4 / 3)
_ATTEMPTS = 10  # to find a box inside the image
_KEPT_BY_EVALUATION = 0.875  # side of the central crop, of the shorter side


def training_pixels(
  image: Image.Image, augment: Augment, size: int, channels: int, rng: np.random.Generator
) -> np.ndarray:
  """A randomly changed image, [size, size, channels] uint8."""
  image = _in_mode(image, channels)
  if augment.least_area < 1:
    box = random_box(rng, *image.size, (augment.least_area, 1.0), _CROP_ASPECTS)
    image = _resized(image, size, box or _central(image, 1.0))
  else:
    image = _evaluation_crop(image, size)
  if augment.flip and rng.random() < 0.5:
    image = ImageOps.mirror(image)
  if augment.rand_augment is not None:
    image = rand_augment(image, augment.rand_augment, rng)
  return _pixels(image)


def evaluation_pixels(image: Image.Image, size: int, channels: int) -> np.ndarray:
  """The middle of an image, [size, size, channels] uint8; all of it if it has that size."""
  return _pixels(_evaluation_crop(_in_mode(image, channels), size))


def random_box(
  rng: np.random.Generator,
  width: int,
  height: int,
  areas: tuple[float, float],
  aspects: tuple[float, float],
) -> Box | None:
  """A box of a uniform share of the area and a log-uniform aspect; None if none fits."""
  for _ in range(_ATTEMPTS):
    area = width * height * rng.uniform(*areas)
    aspect = math.exp(rng.uniform(math.log(aspects[0]), math.log(aspects[1])))
    w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if 0 < w <= width and 0 < h <= height:
      left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
      return left, top, left + w, top + h
  return None


def rand_augment(image: Image.Image, magnitude: float, rng: np.random.Generator) -> Image.Image:
  """Two random operations of a `magnitude` from 0 to 10."""
  operations = list(OPERATIONS.values())
  for number in rng.integers(len(operations), size=ROUNDS):
    level = np.clip(rng.normal(magnitude, _MAGNITUDE_STD), 0, 10) / 10
    sign = 1 if rng.random() < 0.5 else -1
    if rng.random() < _PROBABILITY:
      image = operations[number](image, float(level), sign)
  return image


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
  """output(x, y) = image(a x + b y + c, d x + e y + f), gray outside; `matrix` is a, ..., f."""
  resampling, gray = Image.Resampling.BICUBIC, (128,) * len(image.getbands())
  return image.transform(image.size, Image.Transform.AFFINE, matrix, resampling, fillcolor=gray)


def _rotate(image, level, sign):
  gray = (128,) * len(image.getbands())
  return image.rotate(30 * level * sign, Image.Resampling.BICUBIC, fillcolor=gray)


def _solarize_add(image, level, sign):
  added = int(110 * level)
  table = [min(255, value + added) if value < 128 else value for value in range(256)]
  return image.point(table * len(image.getbands()))


def _enhance(kind) -> Callable[[Image.Image, float, int], Image.Image]:
  """Color, contrast, brightness or sharpness times 1 + 0.9 level, or 1 - 0.9 level."""
  return lambda image, level, sign: kind(image).enhance(max(0.1, 1 + 0.9 * level * sign))


# (image, level from 0 to 1, sign) -> image
OPERATIONS: dict[str, Callable[[Image.Image, float, int], Image.Image]] = {
  "autocontrast": lambda image, level, sign: ImageOps.autocontrast(image),
  "equalize": lambda image, level, sign: ImageOps.equalize(image),
  "invert": lambda image, level, sign: ImageOps.invert(image),
  "rotate": _rotate,
  "posterize": lambda image, level, sign: ImageOps.posterize(image, max(1, 4 - int(4 * level))),
  "solarize": lambda image, level, sign: ImageOps.solarize(image, 256 - int(256 * level)),
  "solarize_add": _solarize_add,
  "color": _enhance(ImageEnhance.Color),
  "contrast": _enhance(ImageEnhance.Contrast),
  "brightness": _enhance(ImageEnhance.Brightness),
  "sharpness": _enhance(ImageEnhance.Sharpness),
  "shear_x": lambda image, level, sign: _affine(image, (1, 0.3 * level * sign, 0, 0, 1, 0)),
  "shear_y": lambda image, level, sign: _affine(image, (1, 0, 0, 0.3 * level * sign, 1, 0)),
  "translate_x": lambda image, level, sign: _affine(
    image, (1, 0, 0.45 * level * sign * image.width, 0, 1, 0)
  ),
  "translate_y": lambda image, level, sign: _affine(
    image, (1, 0, 0, 0, 1, 0.45 * level * sign * image.height)
  ),
}


def _in_mode(image: Image.Image, channels: int) -> Image.Image:
  return image.convert("L" if channels == 1 else "RGB")


def _central(image: Image.Image, share: float) -> Box:
  """The square in the middle whose side is a share of the shorter side."""
  side = max(1, round(min(image.size) * share))
  left, top = (image.width - side) // 2, (image.height - side) // 2
  return left, top, left + side, top + side


def _resized(image: Image.Image, size: int, box: Box) -> Image.Image:
  return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def _evaluation_crop(image: Image.Image, size: int) -> Image.Image:
  if image.size == (size, size):
    return image
  return _resized(image, size, _central(image, _KEPT_BY_EVALUATION))


def _pixels(image: Image.Image) -> np.ndarray:
  pixels = np.asarray(image)
  return pixels[..., None] if pixels.ndim == 2 else pixels
