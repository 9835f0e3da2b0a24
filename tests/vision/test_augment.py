"""Changes of single images, against NumPy and against what RandAugment's paper says."""

import numpy as np
import pytest
from PIL import Image

from train.config.vision import Augment
from train.vision import augment


def image(seed=0, size=(10, 20), channels=3):
  shape = size if channels == 1 else (*size, channels)
  return Image.fromarray(np.random.default_rng(seed).integers(256, size=shape).astype(np.uint8))


def smooth(channels):
  """Brighter to the lower right; colors differ."""
  y, x = np.arange(10)[:, None, None], np.arange(20)[None, :, None]
  pixels = 40 + y**2 + x**2 // 4 + 20 * np.arange(channels)
  return Image.fromarray((pixels if channels == 3 else pixels[..., 0]).astype(np.uint8))


def changed(name, level, sign=1, before=None):
  return np.asarray(augment.OPERATIONS[name](before or image(), level, sign)).astype(int)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", augment.OPERATIONS)
def test_operation_keeps_size_and_is_stronger_at_larger_levels(name, channels):
  first = image(channels=channels) if name == "sharpness" else smooth(channels)
  before = np.asarray(first).astype(int)
  weak, strong = (changed(name, level, 1, first) for level in (0.1, 0.9))
  assert weak.shape == strong.shape == before.shape
  if name in ("autocontrast", "equalize", "invert"):
    np.testing.assert_array_equal(weak, strong)
  elif not (name == "color" and channels == 1):
    assert np.abs(strong - before).mean() > np.abs(weak - before).mean()


def test_operations_equal_their_definitions():
  x = np.asarray(image()).astype(int)
  np.testing.assert_array_equal(changed("invert", 0.5), 255 - x)
  np.testing.assert_array_equal(changed("posterize", 0.5), x & 0b11000000)
  np.testing.assert_array_equal(changed("solarize", 0.5), np.where(x < 128, x, 255 - x))
  np.testing.assert_array_equal(changed("solarize_add", 1.0), np.where(x < 128, x + 110, x))
  np.testing.assert_allclose(changed("brightness", 0.5, -1), 0.55 * x, atol=1)
  shifted = changed("translate_x", 4 / 20 / 0.45)  # 4 of 20 columns
  np.testing.assert_array_equal(shifted[:, :16], x[:, 4:])
  assert (shifted[:, 17:] == 128).all()


def test_rand_augment_is_a_function_of_its_generator():
  run = lambda seed: np.asarray(augment.rand_augment(image(), 9, np.random.default_rng(seed)))
  np.testing.assert_array_equal(run(3), run(3))
  assert len({run(seed).tobytes() for seed in range(20)}) > 10


def test_random_box_has_the_area_and_aspect_asked_for():
  rng = np.random.default_rng(0)
  for _ in range(200):
    box = augment.random_box(rng, 300, 200, (0.1, 0.5), (0.5, 2.0))
    assert box is not None
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    assert left >= 0 <= top and right <= 300 and bottom <= 200
    assert 0.09 < width * height / (300 * 200) < 0.51
    assert 0.48 < width / height < 2.1
  assert augment.random_box(rng, 300, 200, (1.0, 1.0), (3.0, 4.0)) is None


def test_training_pixels_without_changes_are_the_image():
  plain = Augment(least_area=1, flip=False, rand_augment=None)
  same = image(size=(16, 16))
  for channels in (1, 3):
    rng = np.random.default_rng(0)
    pixels = augment.training_pixels(same, plain, 16, channels, rng)
    want = np.asarray(same.convert("L" if channels == 1 else "RGB")).reshape(16, 16, channels)
    np.testing.assert_array_equal(pixels, want)


def test_training_pixels_flip_every_other_image():
  flips = Augment(least_area=1, rand_augment=None)
  same = image(size=(16, 16))
  x, rng = np.asarray(same), np.random.default_rng(0)
  found = [augment.training_pixels(same, flips, 16, 3, rng) for _ in range(40)]
  flipped = sum(np.array_equal(pixels, x[:, ::-1]) for pixels in found)
  assert 10 < flipped < 30
  assert flipped + sum(np.array_equal(pixels, x) for pixels in found) == 40


def test_evaluation_pixels_are_the_middle():
  wide = np.zeros((64, 128, 3), np.uint8)
  wide[4:60, 36:92] = 200  # the central square of 0.875 of the shorter side
  pixels = augment.evaluation_pixels(Image.fromarray(wide), 28, 3)
  assert pixels.shape == (28, 28, 3)
  assert (pixels[2:-2, 2:-2] == 200).all()
