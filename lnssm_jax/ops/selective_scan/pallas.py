"""The selective scan on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Import this module where it is needed only (see `dispatch.kernels`).
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops import channel_kernels
from lnssm_jax.ops.selective_scan import xla
from lnssm_jax.ops.selective_scan.state import SelectiveState
from pallas_kernels.selective_scan.cell import Cell


def obstacle(x, dt, a, b, c, skip, state, segments, *, chunk_size=None):
  """Why the kernels cannot run these arguments on any device, or None."""
  del skip, segments
  arrays = {"x": x, "dt": dt, "a": a, "b": b, "c": c}
  return channel_kernels.obstacle(arrays, state.ssm, chunk_size)


def worthwhile(x, dt, a, b, c, skip, state, segments, **options):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del skip, segments, options
  arrays = {"x": x, "rate": dt, "a": a, "b": b, "c": c}
  return channel_kernels.worthwhile(arrays, state.ssm)


def run(x, dt, a, b, c, skip, state, segments, *, chunk_size=None, parts=None, interpret=None):
  """Arguments as in `reference.py`."""
  del chunk_size
  arrays = {"x": x, "rate": dt, "a": a, "b": b, "c": c}
  if channel_kernels.takes_a_step(arrays, state.ssm):
    options = {"form": _step, "interpret": interpret}
    out, ssm = channel_kernels.step(Cell(exact=True), arrays, skip, state.ssm, **options)
    return out, SelectiveState(ssm)
  cell = Cell(exact=x.dtype == jnp.float32)
  options = {"parts": parts, "interpret": interpret}
  out, ssm = channel_kernels.run(cell, arrays, skip, state.ssm, segments, **options)
  return out, SelectiveState(ssm)


def _step(arrays, skip, ssm):
  """A single step by XLA."""
  steps = (arrays[name] for name in ("x", "rate", "a", "b", "c"))
  out, state = xla.chunked(*steps, skip, SelectiveState(ssm), None)
  return out, state.ssm


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))
