"""The GPU that tile sizes and grids are chosen for, asked and never assumed."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

MAX_GRID_SIZE = 65535  # CTAs along the second and the third axis of a grid
_RESERVED = 1024  # bytes of SMEM that the driver takes for each CTA
_ARCHITECTURES = {"9": "sm90"}  # folders of kernels, by the major compute capability


@dataclasses.dataclass(frozen=True)
class Device:
  """Facts about a GPU."""

  kind: str  # as JAX names it
  architecture: str | None  # the folder of its kernels; None: there are none
  sm_count: int
  smem: int  # bytes that a CTA can have

  def smem_of_each(self, ctas: int) -> int:
    """Bytes of SMEM that each of so many CTAs can have that share an SM."""
    return (self.smem + _RESERVED) // ctas - _RESERVED

  def num_splits(self, ctas: int, length: int, min_length: int, ctas_per_sm: int = 1) -> int:
    """Number of splits of a sequence, a power of two, that gives every SM work.

    Args:
      ctas: CTAs per split.
      length: tokens of the sequence.
      min_length: tokens that a split has at least.
      ctas_per_sm: CTAs that an SM runs at the same time.
    """
    number = 1
    while 2 * number * ctas <= ctas_per_sm * self.sm_count and length >= 2 * number * min_length:
      number *= 2
    return number


# Described, for kernels that are interpreted or only lowered: an H100 with SXM, an H200.
HOPPER = Device("NVIDIA H100", "sm90", sm_count=132, smem=227 * 1024)


def default_device() -> jax.Device:
  """The device on which new programs run."""
  device = jax.config.jax_default_device  # a device, the name of a platform, or None
  return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def current() -> Device:
  """The GPU on which new programs run; `HOPPER` where that is no GPU."""
  device = default_device()
  if device.platform != "gpu":
    return HOPPER
  smem = device.shared_memory_per_block_optin
  return Device(device.device_kind, _architecture(device), device.core_count, smem)


def unsupported() -> str | None:
  """Why the device on which new programs run has no kernels, or None."""
  device = default_device()
  if device.platform != "gpu":
    return f"the default device is a {device.platform}, and the kernels need a Hopper GPU"
  if _architecture(device) is None:
    capability = getattr(device, "compute_capability", "unknown")
    return f"the GPU has compute capability {capability}, and the kernels need 9.0 (Hopper)"
  return None


def _architecture(device):
  capability = str(getattr(device, "compute_capability", "unknown"))
  return _ARCHITECTURES.get(capability.partition(".")[0])


class Kernels(NamedTuple):
  """An op's kernels for one architecture: what its entry point calls."""

  forward: Callable[..., Any]
  backward: Callable[..., Any]


def choose[Body](kernels: Mapping[str, Body]) -> Body:
  """The kernels, by their folders, that the current device runs."""
  return kernels[current().architecture or HOPPER.architecture]
