"""The GPU that tile sizes and grids are chosen for, asked and never assumed."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax

MAX_GRID_SIZE = 65535  # CTAs along the second and the third axis of a grid
_RESERVED = 1024  # bytes of SMEM that the driver takes for each CTA
SM90, AMPERE = "sm90", "ampere"  # folders of kernels: for Hopper, for all GPUs since Ampere
EVERY = SM90, AMPERE
_AMPERE = 8  # the major compute capability of Ampere


@dataclasses.dataclass(frozen=True)
class Device:
  """Facts about a GPU."""

  kind: str  # as JAX names it
  architecture: str | None  # the folder of the kernels made for it; None: there are none
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
HOPPER = Device("NVIDIA H100", SM90, sm_count=132, smem=227 * 1024)


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
  return Device(device.device_kind, architecture_of(device), device.core_count, smem)


def unsupported(architectures: Collection[str] = (SM90,)) -> str | None:
  """Why the device on which new programs run cannot run kernels of these folders, or None."""
  device = default_device()
  needed, capability = ("a Hopper GPU", "9.0 (Hopper)")
  if AMPERE in architectures:
    needed, capability = ("an NVIDIA GPU since Ampere", "8.0 (Ampere) or more")
  if device.platform != "gpu":
    return f"the default device is a {device.platform}, and the kernels need {needed}"
  # Hopper runs the kernels for Ampere, too.
  able = {architecture_of(device)} | ({AMPERE} if architecture_of(device) else set())
  if able.isdisjoint(architectures):
    found = getattr(device, "compute_capability", "unknown")
    return f"the GPU has compute capability {found}, and the kernels need {capability}"
  return None


def kernels() -> str:
  """One line for users: whose kernels the default device runs, or why it runs none."""
  reason = unsupported(EVERY)
  if reason is not None:
    return f"XLA's forms, because {reason}"
  device = default_device()
  name = {SM90: "Hopper", AMPERE: "Ampere and later"}[architecture_of(device)]
  return f"compute capability {device.compute_capability}: Pallas kernels for {name}"


def architecture_of(device: jax.Device) -> str | None:
  """The folder of the kernels made for a GPU; None: there are none."""
  major = str(getattr(device, "compute_capability", "unknown")).partition(".")[0]
  if not major.isdigit() or int(major) < _AMPERE:
    return None
  return SM90 if int(major) == 9 else AMPERE


class Kernels(NamedTuple):
  """An op's kernels for one architecture: what its entry point calls."""

  forward: Callable[..., Any]
  backward: Callable[..., Any]


def choose[Body](kernels: Mapping[str, Body], architecture: str | None = None) -> Body:
  """The kernels, by their folders, of `architecture`, or those that the current device runs."""
  return kernels[running(architecture)]


def running(architecture: str | None = None) -> str:
  """The folder of kernels: `architecture`, else that of the current device, else Hopper's."""
  return architecture or current().architecture or SM90
