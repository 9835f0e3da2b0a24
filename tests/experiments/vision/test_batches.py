"""Batches as functions of their number, and what the device does with them."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from experiments.vision import batches
from experiments.vision.images import ArrayImages
from experiments.vision.settings import Augment, Data, Model, Vision
from tests.experiments.vision.conftest import SIZE, pixels
from train.config import Optimizer

IMAGES = ArrayImages("all", *pixels(30))


def config(**changes) -> Vision:
  model = Model(dim=8, num_layers=1, num_classes=3, image_size=SIZE, patch_size=4)
  optimizer = Optimizer(peak_lr=1e-2, final_lr=1e-2)
  data = Data(train="t", validation="v")
  values = {"model": model, "optimizer": optimizer, "data": data, "run_dir": "r", "epochs": 2}
  return Vision(**(values | {"global_batch": 7} | changes))


def batch(n, workers=2, **changes):
  with ThreadPoolExecutor(workers) as pool:
    return batches.training_batch(IMAGES, config(**changes), n, pool)


def test_batch_depends_on_seed_and_number_only():
  for one, two in zip(batch(5), batch(5, workers=1), strict=True):
    np.testing.assert_array_equal(one, two)
  assert not np.array_equal(batch(5).images, batch(6).images)
  assert not np.array_equal(batch(5).images, batch(5, seed=1).images)
  with batches.training_batches(IMAGES, config(), start=4) as stream:
    next(stream)
    np.testing.assert_array_equal(next(stream).images, batch(5).images)


def test_order_changes_and_plan_are_drawn_anew_by_seed_and_batch():
  plain = Augment(least_area=1, flip=False, rand_augment=None, repeats=1, erasing=1, cutmix=0)
  found = [batch(n, seed=seed, augment=plain) for n, seed in ((0, 0), (1, 0), (0, 1))]
  assert len({each.images.tobytes() for each in found}) == 3  # nothing but their order
  assert len({each.erased.tobytes() for each in found}) == 3
  assert len({row.tobytes() for row in found[0].erased}) == 7
  assert len({float(each.weight) for each in found}) == 3


def test_epoch_has_every_image_at_most_once():
  plain = Augment(least_area=1, flip=False, rand_augment=None, repeats=1)
  epochs = [
    np.concatenate([batch(4 * e + n, augment=plain).images for n in range(4)]) for e in (0, 1)
  ]
  unique = [{image.tobytes() for image in epoch} for epoch in epochs]
  assert [len(found) for found in unique] == [28, 28]
  assert not np.array_equal(*epochs)


def test_repeated_images_of_an_epoch_are_neighbors_and_differ():
  plain = Augment(least_area=1, flip=False, rand_augment=None)  # three times each, as in DeiT
  images = np.concatenate([batch(n, augment=plain).images for n in range(4)])
  found = [image.tobytes() for image in images]
  assert found[::3] == found[1::3] + found[27:] == found[2::3] + found[27:]
  assert len(set(found)) == 10
  flipped = Augment(least_area=0.5, flip=True, rand_augment=None)
  assert len({image.tobytes() for image in batch(0, augment=flipped).images}) == 7


def test_evaluation_has_every_image_once():
  counted = []
  for images, labels, counts in batches.evaluation_batches(IMAGES, config()):
    assert images.shape == (7, SIZE, SIZE, 3)
    counted += list(labels[counts])
  np.testing.assert_array_equal(counted, IMAGES.labels)


def made(**changes):
  """A batch of 4 random images with nothing done to it, but for `changes`."""
  rng, nothing = np.random.default_rng(0), np.zeros(4, np.int32)
  images = rng.integers(256, size=(4, SIZE, SIZE, 3)).astype(np.uint8)
  plain = batches.Batch(
    images,
    np.array([0, 1, 2, 1]),
    np.zeros((4, 4), np.int32),
    nothing,
    np.float32(1),
    np.float32(1),
  )
  return plain._replace(**changes)


def on_device(batch, smoothing=0.0):
  cfg = config(augment=Augment(smoothing=smoothing))
  images, targets = jax.jit(lambda b: batches.on_device(b, cfg, jax.random.key(0)))(batch)
  return np.asarray(images, np.float64), np.asarray(targets, np.float64)


def normalized(images):
  mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
  return (images.astype(np.float64) / 255 - mean) / std


def test_pixels_normalized_and_labels_smoothed():
  plain = made()
  images, targets = on_device(plain, smoothing=0.3)
  np.testing.assert_allclose(images, normalized(plain.images), atol=1e-5)
  np.testing.assert_allclose(targets, 0.7 * np.eye(3)[plain.labels] + 0.1, atol=1e-6)


def test_mixup_mixes_rows_with_the_reversed_batch():
  mixed = made(weight=np.float32(0.3), label_weight=np.float32(0.3))
  images, targets = on_device(mixed)
  x, y = normalized(mixed.images), np.eye(3)[mixed.labels]
  np.testing.assert_allclose(images, 0.3 * x + 0.7 * x[::-1], atol=1e-5)
  np.testing.assert_allclose(targets, 0.3 * y + 0.7 * y[::-1], atol=1e-6)


def test_cutmix_pastes_a_box_and_erasing_fills_one_with_noise():
  box = np.array([2, 3, 6, 9], np.int32)  # left, top, right, bottom
  images, _ = on_device(made(pasted=box))
  x = normalized(made().images)
  want = x.copy()
  want[:, 3:9, 2:6] = x[::-1, 3:9, 2:6]
  np.testing.assert_allclose(images, want, atol=1e-5)
  erased, _ = on_device(made(erased=np.stack([box, 0 * box, box, 0 * box])))
  kept = np.ones(x.shape, bool)
  kept[[0, 2], 3:9, 2:6] = False
  np.testing.assert_allclose(erased[kept], x[kept], atol=1e-5)
  assert 0.7 < erased[~kept].std() < 1.3


@pytest.mark.parametrize(
  ("mixup", "cutmix", "kinds"),
  [(0, 0, {"none"}), (0.8, 0, {"mixup"}), (0.8, 1, {"mixup", "cutmix"})],
)
def test_mixing_plan_weighs_labels_by_the_pixels_kept(mixup, cutmix, kinds):
  augment, found = Augment(mixup=mixup, cutmix=cutmix), set()
  for seed in range(40):
    box, weight, label_weight = batches._mixing(np.random.default_rng(seed), SIZE, augment)
    area = (box[2] - box[0]) * (box[3] - box[1]) / SIZE**2
    assert np.isclose(label_weight, weight * (1 - area))
    assert np.all((box >= 0) & (box <= SIZE))
    found.add("cutmix" if area else "mixup" if weight < 1 else "none")
  assert found - {"none"} == kinds - {"none"}


@pytest.mark.parametrize("a", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_weights_of_mixing_have_the_beta_distribution(kind, a):
  """Of mean 1/2 and variance 1 / (4 (2 a + 1)); of a box, of the share before it is cut off."""
  augment = Augment(**{"mixup": 0, "cutmix": 0} | {kind: a})
  beta, drawn = np.random.Generator.beta, []

  class Watched:
    def __init__(self, seed):
      self.rng = np.random.default_rng(seed)

    def beta(self, *given):
      drawn.append(beta(self.rng, *given))
      return drawn[-1]

    def integers(self, *given, **how):
      return self.rng.integers(*given, **how)

  for seed in range(500):
    _, weight, label_weight = batches._mixing(Watched(seed), 32, augment)
    assert label_weight >= np.float32(drawn[-1]) - 0.07  # but for whole pixels
    assert weight == (np.float32(drawn[-1]) if kind == "mixup" else 1)
  assert np.mean(drawn) == pytest.approx(0.5, abs=0.06)
  assert np.var(drawn) == pytest.approx(1 / (4 * (2 * a + 1)), rel=0.2)


def test_erasing_happens_with_its_probability():
  boxes = [batches._erased(np.random.default_rng(n), 32, 0.25) for n in range(400)]
  assert 60 < sum(box != (0, 0, 0, 0) for box in boxes) < 140
