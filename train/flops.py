"""Model FLOPs: what a token costs by formula, and the share of a device's peak that is used.

Counted are the multiplications and additions of the recurrence and of the matrix products (two a
multiply-add), not what an implementation does in their place (chunks, recomputation), nor norms,
activations and gates. D is `dim`, H the number of heads, K = V = D / H, V_ocab the vocabulary.

    forward FLOPs a token = num_layers * (mixer + channel mixer) + head

    mixer lnssm         10 D^2            q, k, v, gate and output projections
                      + 5 H K V + 4 H K   S = a S + k v^T, z = a z + k; S^T q and z^T q
    channel mixer gpt2  16 D^2            D -> 4 D -> D
                 swiglu  6 D hidden       three products; hidden: 8/3 D, rounded up to 256s
                 geglu  18 D^2            the same with 3 D
                 rwkv4  18 D^2            D -> 4 D -> D, and D -> D; of rwkv6 with 3.5 D
                 none    0
    head                2 D V_ocab

A training step costs three forward passes: each product has two in its backward pass.
"""

import jax

from lnssm_jax.models.channel_mixers import rwkv6_width, swiglu_width
from train import config

TRAINING_FACTOR = 3

# Dense bf16 tensor-core peak in FLOP/s from the vendors' data sheets (without sparsity).
PEAK_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989.4e12,
  "NVIDIA H100 NVL": 835.5e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989.4e12,
  "NVIDIA H200 NVL": 835.5e12,
}

MIXERS = {"lnssm": lambda D, H: 10 * D**2 + 5 * (D // H) * D + 4 * D}
CHANNEL_MIXERS = {
  "gpt2": lambda D: 16 * D**2,
  "swiglu": lambda D: 6 * D * swiglu_width(D),
  "geglu": lambda D: 18 * D**2,
  "rwkv4_channel_mix": lambda D: 18 * D**2,
  "rwkv6_channel_mix": lambda D: 4 * D * rwkv6_width(D) + 2 * D**2,
  "none": lambda D: 0,
}


def model_flops_per_token(model: config.Model) -> int | None:
  """FLOPs of the forward pass for one token, or None for a mixer that has no formula here."""
  if model.mixer not in MIXERS or model.channel_mixer not in CHANNEL_MIXERS:
    return None
  mixer = MIXERS[model.mixer](model.dim, model.num_heads)
  layer = mixer + CHANNEL_MIXERS[model.channel_mixer](model.dim)
  return model.num_layers * layer + 2 * model.dim * model.vocab_size


def peak_flops(device: jax.Device) -> float | None:
  """bf16 peak of a device by its name (the longest known beginning of it), or None if unknown."""
  known = [name for name in PEAK_FLOPS if device.device_kind.startswith(name)]
  return PEAK_FLOPS[max(known, key=len)] if known else None


def utilization(model: config.Model, tokens_per_second: float, devices: list) -> float | None:
  """Model FLOP utilisation of training: model FLOP/s over the devices' bf16 peak, or None."""
  flops, peak = model_flops_per_token(model), peak_flops(devices[0])
  if flops is None or peak is None:
    return None
  return TRAINING_FACTOR * flops * tokens_per_second / (peak * len(devices))
