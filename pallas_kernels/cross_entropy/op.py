"""Cross-entropy of float32 logits and its gradient: the entry point."""

from pallas_kernels.core import device
from pallas_kernels.cross_entropy.ampere.kernel import cross_entropy as ampere
from pallas_kernels.cross_entropy.sm90.kernel import cross_entropy as sm90
from pallas_kernels.cross_entropy.types import Inputs, Results, Static

_KERNELS = {device.SM90: sm90, device.AMPERE: ampere}


def cross_entropy(inputs: Inputs, static: Static) -> Results:
  """Statistics and gradients of all positions."""
  return device.choose(_KERNELS, static.architecture)(inputs, static)
