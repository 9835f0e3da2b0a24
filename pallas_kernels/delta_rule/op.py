"""The delta rule over many tokens: the entry point; `decode.py` has that of a single token.

The kernels of an architecture are a `forward`, which also leaves residuals, and a `backward`.
"""

from typing import Any

import jax

from pallas_kernels.core import device
from pallas_kernels.core.op import differentiable
from pallas_kernels.delta_rule.ampere import passes
from pallas_kernels.delta_rule.config import AmpereConfig, Config, default
from pallas_kernels.delta_rule.sm90.backward import backward
from pallas_kernels.delta_rule.sm90.forward import forward
from pallas_kernels.delta_rule.types import Inputs, Options

_KERNELS = {
  device.SM90: device.Kernels(forward, backward),
  device.AMPERE: device.Kernels(passes.forward, passes.backward),
}


def delta_rule(
  inputs: Inputs,
  segments: jax.Array | None,
  *,
  scale: float,
  length: int,
  num_splits: int = 1,
  erase_before_decay: bool = False,
  config: Config | AmpereConfig | None = None,
  architecture: str | None = None,
  interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
  """Runs the delta rule on padded arguments.

  Args:
    segments: [B, T] int32 counted from 0, padded with each row's last, or None.
    length: tokens before padding.
    num_splits: into how many splits of whole chunks a sequence is cut, which run at the same time;
      by Hopper's kernels.
    erase_before_decay: with a decay per key channel and an erase key, whether it reads the state
      before the decay of its own token.
    config: None takes `config.default`.
    architecture: the folder of the kernels, "sm90" or "ampere"; None takes the device's own.
    interpret: `plgpu.InterpretGPUParams`, or None to compile.

  Returns:
    out [B, T, H, V] bfloat16 and the last state [B, H, K, V] float32.

  Raises:
    ValueError: the configuration does not fit these arguments or the device.
  """
  sizes = inputs.sizes
  sizes = sizes._replace(heads=sizes.heads * num_splits)
  architecture = device.running(architecture)
  config = config or (AmpereConfig() if architecture == device.AMPERE else default(sizes))
  config.check(sizes)
  static = scale, length, config, num_splits, erase_before_decay, interpret
  options = Options(*static, architecture)
  return _delta_rule(options, inputs, segments)


_delta_rule = differentiable(_KERNELS, named=True)
