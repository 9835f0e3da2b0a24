"""Image classifiers: ViL and the ViM that it is compared with, and small ones of digits.

    python -m experiments classify --config experiments/configs/vision.py:vil-tiny \\
      --set data.train=FOLDER --set data.validation=FOLDER

FOLDER has one folder of image files per class (the papers use ImageNet, 1,000 classes). vim-tiny,
vim-small, vil-tiny and vil-small are trained as DeiT is, 300 epochs. vil-digits and vim-digits are
for 28 x 28 gray images of ten digits: `--set data.train=mnist.npz:train`, an array train_x
[N, 28, 28] uint8 and train_y [N] of that file.
Measured: 6,853,096 parameters of vil-tiny, for 7M printed (docs/configs.md has all).
"""

from typing import Any

from experiments.vision.settings import Augment, Data, Model, Vision
from train.config import Optimizer

BATCH = {"tiny": 1024, "small": 512}

# {name: (mixer, width, weight decay, drop path)}; "digits" is a smaller model of smaller images.
VARIANTS: dict[str, tuple[str, int, float, float]] = {
  "vil-tiny": ("longhorn", 192, 0.1, 0.0),
  "vil-small": ("longhorn", 384, 0.05, 0.05),
  "vim-tiny": ("mamba", 192, 0.1, 0.0),
  "vim-small": ("mamba", 384, 0.05, 0.05),
  "vil-digits": ("longhorn", 64, 0.05, 0.0),
  "vim-digits": ("mamba", 64, 0.05, 0.0),
}


def get_config(variant: str) -> Vision:
  """A run of Longhorn (Liu et al. 2024), table 4, with the recipe of Vim (Zhu et al. 2024)."""
  mixer, dim, weight_decay, drop_path = VARIANTS[variant]
  usual = {"mixer": mixer, "dim": dim, "drop_path": drop_path}
  if variant.endswith("digits"):
    return _digits(variant, usual, weight_decay)
  return Vision(
    model=Model(num_layers=24, num_classes=1000, **usual),
    optimizer=_optimizer(1e-3, weight_decay, ema_decay=0.99996),
    data=Data(train="data/imagenet/train", validation="data/imagenet/val"),
    run_dir=f"runs/vision-{variant}",
    epochs=300,
    warmup_epochs=5,
    global_batch=BATCH[variant.split("-")[1]],
  )


def _digits(variant: str, usual: dict[str, Any], weight_decay: float) -> Vision:
  sizes = {"num_classes": 10, "image_size": 28, "patch_size": 4, "channels": 1}
  return Vision(
    model=Model(num_layers=2, dtype="float32", **sizes, **usual),
    optimizer=_optimizer(3e-3, weight_decay),
    data=Data(train="mnist.npz:train", validation="mnist.npz:test", mean=(0.13,), std=(0.31,)),
    augment=Augment(least_area=0.5, flip=False, repeats=1),
    run_dir=f"runs/vision-{variant}",
    epochs=20,
    warmup_epochs=1,
    global_batch=128,
  )


def _optimizer(peak_lr: float, weight_decay: float, **changes: Any) -> Optimizer:
  return Optimizer(
    peak_lr=peak_lr,
    final_lr=1e-5,
    schedule="cosine",
    b1=0.9,
    b2=0.999,
    weight_decay=weight_decay,
    **changes,
  )
