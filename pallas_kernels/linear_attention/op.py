"""Linear attention over many tokens: the entry point; `decode.py` has that of a single token.

The kernels of an architecture are a `forward`, which also leaves residuals, and a `backward`.
"""

from typing import Any

import jax

from pallas_kernels.core import device
from pallas_kernels.core.op import differentiable
from pallas_kernels.linear_attention.ampere import passes
from pallas_kernels.linear_attention.config import AmpereConfig, Config, default
from pallas_kernels.linear_attention.sm90.backward import backward
from pallas_kernels.linear_attention.sm90.forward import forward
from pallas_kernels.linear_attention.types import Inputs, Options

_KERNELS = {
  device.SM90: device.Kernels(forward, backward),
  device.AMPERE: device.Kernels(passes.forward, passes.backward),
}


def linear_attention(
  inputs: Inputs,
  segments: jax.Array | None,
  *,
  scale: float,
  length: int,
  num_splits: int,
  normalize: bool,
  rank: int = 1,
  config: Config | AmpereConfig | None = None,
  architecture: str | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Runs linear attention on padded arguments.

  Args:
    segments: [B, T] int32 counted from 0, padded with each row's last, or None.
    length: tokens before padding.
    num_splits: into which the sequence is cut.
    rank: rows of a token, which all read each other; the arrays' T counts rows. Several only with
      scalar decays, 0 but in a token's first row, and own weights.
    config: None takes `config.default`.
    architecture: the folder of the kernels, "sm90" or "ampere"; None takes the device's own.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Returns:
    out [B, T, H, V] bfloat16, the last state [B, H, K, V] float32, and the last key sum [B, H, K]
    float32 or None.

  Raises:
    ValueError: the configuration does not fit these arguments or the device.
  """
  sizes = inputs.sizes(normalize)
  architecture = device.running(architecture)
  config = config or (AmpereConfig() if architecture == device.AMPERE else default(sizes))
  config.check(sizes)
  options = Options(scale, length, num_splits, normalize, config, interpret, architecture, rank)
  return _linear_attention(options, inputs, segments)


_linear_attention = differentiable(_KERNELS, named=True)
