"""Model FLOPs per token, and model FLOP utilization (MFU).

The count covers the multiplications and additions of matrix products (two per multiply-add) and of
the recurrences as written in the papers. It does not cover what an implementation adds (chunking,
recomputation), nor norms, activations, feature maps, gates and exponentials.

    forward FLOPs per token = 2 * (entries of all kernels, including the head) + recurrences

Of experts only those that a token selects count. Every other kernel entry is multiplied once per
token: projections, low-rank and block-diagonal maps,
short convolutions. The networks that generate long filters run once for all tokens and are not
counted. Of its recurrence a mixer states the FLOPs itself, `Mixer.recurrence_flops`
(`lnssm_jax.mixers.common.flops` has the formulas).

A training step costs three forward passes: each product has two in its backward pass.
"""

import functools
from typing import Any

import jax
from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.models import AfterShared, MixtureOfExperts
from lnssm_jax.models.options import NONE, mixer_class
from train import config
from train.step.model import build_model

TRAINING_FACTOR = 3

# Dense bf16 tensor-core peak in FLOP/s from the vendor's data sheets (without sparsity).
PEAK_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989.4e12,
  "NVIDIA H100 NVL": 835.5e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989.4e12,
  "NVIDIA H200 NVL": 835.5e12,
}

# Matrix parameters that are not named "kernel".
_OTHER_KERNELS = ("mix_up", "up_kernel")


def model_flops_per_token(model: config.Model, sequence_length: int) -> int | None:
  """FLOPs of the forward pass per token, or None if a mixer does not state those of its recurrence.

  Args:
    sequence_length: T, on which only attention and long convolutions depend.
  """
  pattern = (model.mixer,) if isinstance(model.mixer, str) else tuple(model.mixer)
  if any(no_formula(name) for name in pattern):
    return None
  built = jax.eval_shape(functools.partial(build_model, model), jax.random.key(0))
  products = kernel_entries(built)
  if model.tie_embeddings:
    products += model.dim * model.vocab_size
  if built.shared is not None:  # each layer that uses a block multiplies by its kernels
    products -= kernel_entries(built.shared)
  total = 2.0 * products
  for place in range(len(pattern)):
    stack = built.blocks if len(pattern) == 1 else built.blocks[str(place)]
    layers = len(range(place, model.num_layers, len(pattern)))
    if stack.mixer is not None:
      total += layers * mixer_recurrence(stack.mixer, sequence_length)
    if isinstance(stack.mixer, AfterShared):
      total += layers * 2.0 * kernel_entries(built.shared[str(stack.mixer.block)])
  return round(total)


def no_formula(mixer: str) -> bool:
  """Whether a mixer, by its name, does not state the FLOPs of its recurrence."""
  return mixer != NONE and mixer_class(mixer).recurrence_flops is Mixer.recurrence_flops


def mixer_recurrence(mixer: Mixer, sequence_length: int) -> float:
  """FLOPs per token of a mixer, without its kernels' matrix products.

  Raises:
    NotImplementedError: the mixer does not state them.
  """
  state = jax.eval_shape(lambda: mixer.init_state(1))
  return mixer.recurrence_flops(state, sequence_length)


def kernel_entries(module: nnx.Module) -> int:
  """Number of kernel entries that multiply a token, once."""
  leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
  return sum(x.size for path, x in leaves if is_kernel(path)) - idle_entries(module)


def idle_entries(module: nnx.Module) -> int:
  """Number of parameters of experts that a token does not select."""
  parts: Any = nnx.iter_modules(module)
  return sum(part.idle_entries for _, part in parts if isinstance(part, MixtureOfExperts))


def is_kernel(path: tuple[Any, ...]) -> bool:
  """Whether the parameter at this path is a matrix that multiplies every token."""
  names = [str(entry.key) for entry in path]
  return names[-1] in ("kernel", *_OTHER_KERNELS) and "filter" not in names


def peak_flops(device: jax.Device) -> float | None:
  """bf16 peak of a device by the longest known prefix of its name, or None if unknown."""
  known = [name for name in PEAK_FLOPS if device.device_kind.startswith(name)]
  return PEAK_FLOPS[max(known, key=len)] if known else None


def utilization(flops: int | None, tokens_per_second: float, devices: list) -> float | None:
  """Model FLOP utilization of training: model FLOP/s over the devices' bf16 peak, or None.

  Args:
    flops: of the forward pass per token (`model_flops_per_token`), or None.
  """
  peak = peak_flops(devices[0])
  if flops is None or peak is None:
    return None
  return TRAINING_FACTOR * flops * tokens_per_second / (peak * len(devices))
