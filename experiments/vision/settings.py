"""The settings of a run that trains an image classifier, `python -m experiments classify`."""

import dataclasses
from typing import Literal

from lnssm_jax.models.config import VisionConfig
from train.config.checked import at_least, at_most, check, check_path, settings, within
from train.config.optimizer import Optimizer
from train.config.schema import MOST


@settings
class Model(VisionConfig):
  """Architecture of the classifier: `lnssm_jax.models.VisionConfig`, with the mixer's name."""

  mixer: str = "longhorn"  # in both directions
  image_size: int = 224  # pixels of a side
  dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of activations

  def __post_init__(self):
    for name in ("dim", "num_layers"):
      at_most(f"model.{name}", getattr(self, name), MOST[name])
    check(
      self.channels in (1, 3), f"model.channels={self.channels} must be 1 (gray) or 3 (colors)."
    )
    with within("model"):
      super().__post_init__()


@settings
class Data:
  """Labeled images.

  A set is a folder with one folder of image files per class, or "FILE.npz:NAME": the arrays NAME_x
  [N, height, width] or [N, height, width, channels] uint8 and NAME_y [N] integer of that file.
  """

  train: str  # a folder, or FILE.npz:NAME
  validation: str  # likewise
  mean: tuple[float, ...] = (0.485, 0.456, 0.406)  # per channel, of pixels from 0 to 1
  std: tuple[float, ...] = (0.229, 0.224, 0.225)  # likewise

  def __post_init__(self):
    for name in ("train", "validation"):
      check_path(f"data.{name}", getattr(self, name))
    check(min(self.std) > 0, f"data.std={self.std} must be positive.")


@settings
class Augment:
  """Random changes of training images; the defaults are DeiT's (Touvron et al. 2021), table 9."""

  least_area: float = 0.08  # share of the image that a random crop has; 1: no crop
  flip: bool = True  # left and right, every other image
  rand_augment: float | None = 9.0  # magnitude from 0 to 10; None: no RandAugment
  mixup: float = 0.8  # a of the weights' Beta(a, a); 0: no mixup
  cutmix: float = 1.0  # likewise; a batch with both has one of them
  erasing: float = 0.25  # probability of erasing a box of an image
  smoothing: float = 0.1  # share of the target that all classes have in common
  repeats: int = 3  # times that an image of an epoch occurs, each time changed otherwise

  def __post_init__(self):
    for name, most in (("least_area", 1), ("erasing", 1), ("smoothing", 1)):
      value = getattr(self, name)
      check(0 <= value <= most, f"augment.{name}={value} must be between 0 and {most}.")
    check(self.least_area > 0, "augment.least_area=0.0 leaves nothing of an image; 1 is no crop.")
    at_least("augment.repeats", self.repeats, 1)
    for name in ("mixup", "cutmix"):
      at_least(f"augment.{name}", getattr(self, name), 0)
    magnitude = self.rand_augment
    check(
      magnitude is None or 0 <= magnitude <= 10,
      f"augment.rand_augment={magnitude} must be between 0 and 10, or be None.",
    )


@settings
class Vision:
  """One training run of an image classifier."""

  model: Model
  optimizer: Optimizer
  data: Data
  augment: Augment = dataclasses.field(default_factory=Augment)
  run_dir: str  # folder that the run writes into
  epochs: int  # passes over the training images
  warmup_epochs: int = 0  # of the learning rate
  global_batch: int  # images per step, over all devices
  seed: int = 0  # of initial values, order, changes of images
  checkpoint_every: int = 1  # epochs
  keep_checkpoints: int = 2  # the newest
  log_every: int = 50  # steps
  max_skipped: int = 10  # consecutive steps that are not finite and skipped, which end the run
  workers: int | None = None  # threads that read and change images; None: all cores

  def __post_init__(self):
    check(self.run_dir != "", "run_dir is empty; give the folder that the run writes into.")
    check_path("run_dir", self.run_dir)
    positive = "epochs global_batch checkpoint_every keep_checkpoints log_every max_skipped"
    for name in positive.split():
      at_least(name, getattr(self, name), 1)
    if self.workers is not None:
      at_least("workers", self.workers, 1)
    check(0 <= self.seed < 2**32, f"seed={self.seed} must be in [0, 2**32).")
    check(
      0 <= self.warmup_epochs < self.epochs,
      f"warmup_epochs={self.warmup_epochs} must be between 0 and epochs={self.epochs} - 1.",
    )
    check(
      self.optimizer.warmup_steps == 0,
      f"optimizer.warmup_steps={self.optimizer.warmup_steps} counts steps, and image runs count "
      "epochs; give warmup_epochs.",
    )
    for name in ("z_loss", "logit_penalty"):
      value = getattr(self.optimizer, name)
      check(value == 0, f"optimizer.{name}={value} is for language models; use 0.")
    for name in ("mean", "std"):
      values, channels = getattr(self.data, name), self.model.channels
      check(
        len(values) == channels,
        f"data.{name}={values} needs one number for each of model.channels={channels}.",
      )
