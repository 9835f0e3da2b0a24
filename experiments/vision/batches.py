"""Batches of images: batch n is a pure function of (data, seed, batch size, n).

The host crops and changes single images (`experiments.vision.augment`); the device normalizes them,
erases boxes and mixes pairs, by a plan that comes with the batch.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.vision.augment import evaluation_pixels, random_box, training_pixels
from experiments.vision.images import Images
from experiments.vision.settings import Augment, Data, Vision

_ERASED_AREAS = (0.02, 1 / 3)
_ERASED_ASPECTS = (0.3, 1 / 0.3)

Box = Any  # [..., 4] int32: left, top, right, bottom


class Batch(NamedTuple):
  """Images and the plan of what the device does with them."""

  images: Any  # [B, size, size, channels] uint8
  labels: Any  # [B] int32
  erased: Box  # [B, 4]; an empty box erases nothing
  pasted: Box  # [4], from the other image of each pair (cutmix)
  weight: Any  # [] float32, of an image's own pixels outside `pasted` (mixup)
  label_weight: Any  # [] float32, of an image's own label


def training_batch(images: Images, cfg: Vision, n: int, pool: ThreadPoolExecutor) -> Batch:
  """Batch n of those of B images; an epoch has N // B of them.

  An epoch takes the first of a permutation of the N images, each `augment.repeats` times in a row
  (repeated augmentation, Hoffer et al. 2020, as in DeiT): with 3, about a third of the images.
  """
  B, size = cfg.global_batch, cfg.model.image_size
  epoch, place = divmod(n, len(images) // B)
  order = np.random.default_rng([cfg.seed, 0, epoch]).permutation(len(images))
  order = order.repeat(cfg.augment.repeats)
  rows = order[place * B : (place + 1) * B]
  draws = [np.random.default_rng([cfg.seed, 1, n, row]) for row in range(B)]

  def one(row):
    image, rng = images.image(rows[row]), draws[row]
    return training_pixels(image, cfg.augment, size, cfg.model.channels, rng)

  pixels = np.stack(list(pool.map(one, range(B))))
  erased = np.array([_erased(rng, size, cfg.augment.erasing) for rng in draws], np.int32)
  mixing = _mixing(np.random.default_rng([cfg.seed, 2, n]), size, cfg.augment)
  return Batch(pixels, images.labels[rows], erased, *mixing)


@contextlib.contextmanager
def training_batches(images: Images, cfg: Vision, start: int) -> Iterator[Iterator[Batch]]:
  """Context with batches start, start + 1, ..., each made while the one before it is used."""
  workers = cfg.workers or os.cpu_count() or 1
  with ThreadPoolExecutor(workers, "image") as pool, ThreadPoolExecutor(1, "batch") as ahead:

    def generate():
      pending = ahead.submit(training_batch, images, cfg, start, pool)
      for n in itertools.count(start + 1):
        batch, pending = pending.result(), ahead.submit(training_batch, images, cfg, n, pool)
        yield batch

    batches = generate()
    with contextlib.closing(batches):
      yield batches


def evaluation_batches(
  images: Images, cfg: Vision
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """(images uint8, labels, whether they count) of all images; the last batch is filled up."""
  B, size, channels = cfg.global_batch, cfg.model.image_size, cfg.model.channels
  with ThreadPoolExecutor(cfg.workers or os.cpu_count() or 1, "image") as pool:
    for first in range(0, len(images), B):
      rows = np.arange(first, first + B)
      counts, rows = rows < len(images), np.minimum(rows, len(images) - 1)
      pixels = pool.map(lambda row: evaluation_pixels(images.image(row), size, channels), rows)
      yield np.stack(list(pixels)), images.labels[rows], counts


def normalized(images: jax.Array, data: Data) -> jax.Array:
  """uint8 pixels as float32, (pixel / 255 - mean) / std per channel."""
  return (images / jnp.float32(255) - jnp.float32(data.mean)) / jnp.float32(data.std)


def on_device(batch: Batch, cfg: Vision, key: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The images [B, size, size, channels] and targets [B, classes] that the model is trained on.

  Erased boxes are filled with normal noise. The pairs of mixup and cutmix are rows b and B - 1 - b.
  Sources: Zhong et al. 2020 (random erasing), Zhang et al. 2018 (mixup), Yun et al. 2019 (cutmix).
  """
  size, classes = cfg.model.image_size, cfg.model.num_classes
  images = normalized(batch.images, cfg.data)
  noise = jax.random.normal(key, images.shape, images.dtype)
  images = jnp.where(_inside(batch.erased, size), noise, images)
  other = images[::-1]
  own = batch.weight * images + (1 - batch.weight) * other
  images = jnp.where(_inside(batch.pasted[None], size), other, own)

  smoothing = cfg.augment.smoothing
  targets = jax.nn.one_hot(batch.labels, classes) * (1 - smoothing) + smoothing / classes
  targets = batch.label_weight * targets + (1 - batch.label_weight) * targets[::-1]
  return images, targets


def _inside(box: jax.Array, size: int) -> jax.Array:
  """Whether pixels are in the boxes [B, 4]: [B, size, size, 1]."""
  left, top, right, bottom = (box[:, n, None, None, None] for n in range(4))
  y, x = (jnp.arange(size)[:, None, None], jnp.arange(size)[None, :, None])
  return (x >= left) & (x < right) & (y >= top) & (y < bottom)


def _erased(rng: np.random.Generator, size: int, probability: float):
  if rng.random() >= probability:
    return (0, 0, 0, 0)
  return random_box(rng, size, size, _ERASED_AREAS, _ERASED_ASPECTS) or (0, 0, 0, 0)


def _mixing(rng: np.random.Generator, size: int, augment: Augment):
  """(pasted, weight, label_weight): cutmix, mixup, or one of the two with equal probability."""
  nothing = np.zeros(4, np.int32)
  kinds = [name for name in ("mixup", "cutmix") if getattr(augment, name)]
  if not kinds:
    return nothing, np.float32(1), np.float32(1)
  kind = kinds[rng.integers(len(kinds))]
  weight = rng.beta(*[getattr(augment, kind)] * 2)
  if kind == "mixup":
    return nothing, np.float32(weight), np.float32(weight)
  # A box of 1 - weight of the area around a random point, cut off at the edges.
  half, center = size * np.sqrt(1 - weight) / 2, rng.integers(size, size=2)
  low, high = (np.clip(np.int32(center + s * half), 0, size) for s in (-1, 1))
  kept = 1 - np.prod(high - low) / size**2
  return np.concatenate([low, high]).astype(np.int32), np.float32(1), np.float32(kept)
