"""The Longhorn scan on the Mosaic-GPU kernels: which arguments they take, and how they take them.

Import this module where it is needed only (see `dispatch.kernels`).
"""

import functools

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lnssm_jax.ops import channel_kernels
from lnssm_jax.ops.longhorn_scan import xla
from lnssm_jax.ops.longhorn_scan.gains import sum_of_others
from lnssm_jax.ops.longhorn_scan.state import LonghornState
from pallas_kernels.longhorn_scan.cell import Cell


def obstacle(x, beta, k, q, skip, state, segments, *, chunk_size=None):
  """Why the kernels cannot run these arguments on any device, or None."""
  del skip, segments
  arrays = {"x": x, "beta": beta, "k": k, "q": q}
  return channel_kernels.obstacle(arrays, state.memory, chunk_size)


def worthwhile(x, beta, k, q, skip, state, segments, **options):
  """Whether `implementation=None` prefers the kernels to XLA's form for sizes like these."""
  del skip, segments, options
  return channel_kernels.worthwhile({"x": x, "rate": beta, "k": k, "q": q}, state.memory)


def run(x, beta, k, q, skip, state, segments, *, chunk_size=None, parts=None, interpret=None):
  """Arguments as in `reference.py`."""
  del chunk_size
  arrays = {"x": x, "rate": beta, "k": k, "q": q}
  if channel_kernels.takes_a_step(arrays, state.memory):
    options = {"form": _step, "interpret": interpret}
    out, memory = channel_kernels.step(Cell(exact=True), arrays, skip, state.memory, **options)
    return out, LonghornState(memory)
  squares = jnp.square(k.astype(jnp.float32))
  arrays |= {"others": sum_of_others(squares), "norm": jnp.sum(squares, axis=-1)}
  cell = Cell(exact=x.dtype == jnp.float32 or channel_kernels.is_cut(k.shape[-1]))
  options = {"parts": parts, "interpret": interpret}
  out, memory = channel_kernels.run(cell, arrays, skip, state.memory, segments, **options)
  return out, LonghornState(memory)


def _step(arrays, skip, memory):
  """A single step by XLA."""
  steps = (arrays[name] for name in ("x", "rate", "k", "q"))
  out, state = xla.chunked(*steps, skip, LonghornState(memory), None)
  return out, state.memory


interpreted = functools.partial(run, interpret=plgpu.InterpretGPUParams(detect_races=True))
