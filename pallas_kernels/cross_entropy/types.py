"""Arguments and results of the cross-entropy kernel."""

from typing import Any, NamedTuple

import jax

NUM_STATISTICS = 4  # per position: largest, sum, ties, logit of the target


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  vocab_size: int  # columns from here on are masked; fewer than LANES of them
  logit_penalty: float
  z_loss: float
  dtype: Any  # of the gradient; None: it is not computed
  config: Any  # a `KernelConfig`, or an `AmpereConfig`, for the kernel of that architecture
  interpret: Any = None
  architecture: str | None = None  # whose kernel runs; None: that of the current device


class Inputs(NamedTuple):
  """R positions; V is a multiple of LANES."""

  logits: jax.Array  # [R, V / LANES, LANES] float32
  targets: jax.Array  # [R] int32; one outside of the V columns is equal to none
  weights: jax.Array  # [R] float32


class Results(NamedTuple):
  """Results of the kernel."""

  statistics: Any  # [R, NUM_STATISTICS] float32; ties are 0 without `logit_penalty`
  d_logits: Any  # [R, V / LANES, LANES] in `Static.dtype`, or None
