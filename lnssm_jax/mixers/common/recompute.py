"""Layers whose backward pass computes again what costs little."""

import math
from collections.abc import Callable
from typing import Any

import jax

from lnssm_jax.ops.core.dispatch import MADE_BY_KERNELS

# Channels that a product sums over, from which on it is kept: those of low rank cost little.
_WIDE = 256
_OF_KERNELS = jax.checkpoint_policies.save_only_these_names(MADE_BY_KERNELS)


def recomputed[**P, Result](function: Callable[P, Result]) -> Callable[P, Result]:
  """`function`, whose residuals are projections, what kernels leave, and the order of sorts.

  All else is elementwise, a permutation, or a product of low rank: its values would take several
  times the memory of the projections that they are made of.
  """
  return jax.checkpoint(function, policy=_is_kept)


def _is_kept(primitive: Any, *arrays: Any, **params: Any) -> bool:
  if primitive.name == "dot_general":
    (contracted, _), (batch, _) = params["dimension_numbers"]
    return not batch and math.prod(arrays[0].shape[axis] for axis in contracted) >= _WIDE
  return primitive.name == "sort" or _OF_KERNELS(primitive, *arrays, **params)
