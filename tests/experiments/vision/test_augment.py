"""Changes of single images, against NumPy and against what RandAugment's paper says."""

import numpy as np
import pytest
from PIL import Image

from experiments.vision import augment
from experiments.vision.settings import Augment


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


def test_random_box_reaches_all_edges():
  rng, size = np.random.default_rng(0), (9, 7)
  boxes = np.array([augment.random_box(rng, *size, (0.2, 0.4), (0.9, 1.1)) for _ in range(200)])
  assert boxes[:, :2].min(axis=0).tolist() == [0, 0]
  assert boxes[:, 2:].max(axis=0).tolist() == list(size)


def test_random_box_has_an_aspect_and_its_inverse_equally_often():
  rng = np.random.default_rng(0)
  boxes = [augment.random_box(rng, 400, 400, (0.1, 0.2), (0.25, 4.0)) for _ in range(400)]
  wide = sum(right - left > bottom - top for left, top, right, bottom in boxes)
  assert 160 < wide < 240


def test_rand_augment_has_two_operations_each_of_every_other_image(monkeypatch):
  """With magnitudes of a deviation of 0.5 around the given one, and both signs equally often."""
  used = []

  def operation(name):
    return lambda image, level, sign: used.append((name, level, sign)) or image

  monkeypatch.setattr(augment, "OPERATIONS", {name: operation(name) for name in "abcd"})
  rng, counts = np.random.default_rng(0), []
  for _ in range(400):
    before = len(used)
    augment.rand_augment(image(), 6, rng)
    counts.append(len(used) - before)
  assert np.bincount(counts) / 400 == pytest.approx([0.25, 0.5, 0.25], abs=0.06)
  names, levels, signs = zip(*used, strict=True)
  assert {name: names.count(name) > 60 for name in "abcd"} == dict.fromkeys("abcd", True)
  assert np.mean(levels) == pytest.approx(0.6, abs=0.01)
  assert np.std(levels) == pytest.approx(0.05, rel=0.15)
  assert abs(np.mean(signs)) < 0.15


def test_operations_with_a_sign_go_both_ways():
  x = np.asarray(smooth(3)).astype(int)
  for name in ("brightness", "contrast", "color", "sharpness"):
    noisy = image() if name == "sharpness" else smooth(3)
    up, down = (changed(name, 0.5, sign, noisy).std() for sign in (1, -1))
    assert up > np.asarray(noisy).std() > down or name in ("brightness", "color")
    assert not np.array_equal(changed(name, 0.5, 1, noisy), changed(name, 0.5, -1, noisy))
  tall = Image.fromarray(np.tile(np.arange(20)[:, None, None] * 10, (1, 10, 3)).astype(np.uint8))
  down = changed("translate_y", 4 / 20 / 0.45, 1, tall)  # 4 of 20 rows
  np.testing.assert_array_equal(down[:16], np.asarray(tall)[4:])
  up = changed("translate_y", 4 / 20 / 0.45, -1, tall)
  np.testing.assert_array_equal(up[4:], np.asarray(tall)[:16])
  turned = changed("rotate", 1.0, 1) != changed("rotate", 1.0, -1)
  assert turned.mean() > 0.5
  assert x.shape == changed("shear_x", 0.5, -1, smooth(3)).shape
  for name in ("shear_x", "shear_y", "translate_x"):
    assert not np.array_equal(changed(name, 0.5, 1), changed(name, 0.5, -1))


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
