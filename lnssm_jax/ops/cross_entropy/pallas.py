"""Cross-entropy on the Mosaic-GPU kernel: supported arguments, shapes, the call.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

import math

import jax
import jax.numpy as jnp

from lnssm_jax.ops.cross_entropy.types import (
  Inputs,
  Options,
  Statistics,
  in_vocabulary,
  weighted_terms,
)
from pallas_kernels.core import device
from pallas_kernels.cross_entropy import config, op, types

# Smaller ones take microseconds either way, and were not timed.
_LEAST_VOCABULARY = 4096


def unsupported(inputs: Inputs, options: Options) -> str | None:
  """Why the kernel cannot run these arguments on any device, or None."""
  V = inputs.logits.shape[-1]
  if inputs.logits.dtype != jnp.float32:
    return f"logits have dtype {inputs.logits.dtype}, and the kernel takes float32"
  if options.dtype is not None and options.dtype not in (jnp.bfloat16, jnp.float32):
    return f"the gradient has dtype {options.dtype}, and the kernel stores bfloat16 and float32"
  if V % config.LANES or not 0 <= V - options.vocab_size < config.LANES:
    return (
      f"logits have {V} columns for a vocabulary of {options.vocab_size}, and the kernel takes the "
      f"next multiple of {config.LANES}"
    )
  if options.vocab_axis is not None:
    return f"the vocabulary is sharded over {options.vocab_axis!r}, and the kernel needs all of it"
  return None


def unsupported_ampere(inputs: Inputs, options: Options) -> str | None:
  """As `unsupported`, for the kernel of every GPU since Ampere."""
  least = config.TILE * config.LANES
  if inputs.logits.shape[-1] < least:
    return f"logits have {inputs.logits.shape[-1]} columns, and the kernel takes {least} or more"
  return unsupported(inputs, options)


def preferred(inputs: Inputs, options: Options) -> bool:
  """Whether `implementation=None` takes the kernel: vocabularies and batches that fill a GPU."""
  positions = math.prod(inputs.logits.shape[:-1])
  return options.vocab_size >= _LEAST_VOCABULARY and positions >= device.current().sm_count


def run(
  inputs: Inputs,
  options: Options,
  *,
  sizes=None,
  interpret=None,
  architecture: str | None = None,
) -> tuple[jax.Array, ...]:
  """The fields of `CrossEntropy`.

  Args:
    sizes: the configuration of the kernel; None takes that of the table.
    architecture: whose kernel runs; None takes that of the device.
  """
  shape = inputs.logits.shape
  folded = types.Inputs(
    logits=inputs.logits.reshape(-1, shape[-1] // config.LANES, config.LANES),
    # -1 is no column: a target outside the vocabulary may be a column of the padding.
    targets=jnp.where(in_vocabulary(inputs, options), inputs.targets, -1).reshape(-1),
    weights=inputs.weights.reshape(-1),
  )
  gradient = 0 if options.dtype is None else jnp.dtype(options.dtype).itemsize
  architecture = device.running(architecture)
  ampere = architecture == device.AMPERE
  sizes = sizes or (config.AmpereConfig() if ampere else config.default(config.Shape(gradient)))
  sizes.check(config.Shape(gradient))
  static = types.Static(
    vocab_size=options.vocab_size,
    logit_penalty=options.logit_penalty,
    z_loss=options.z_loss,
    dtype=options.dtype,
    config=sizes,
    interpret=interpret,
    architecture=architecture,
  )
  results = op.cross_entropy(folded, static)
  by_field = results.statistics.reshape(*shape[:2], types.NUM_STATISTICS)
  largest, total, _, target_logit = (by_field[..., n] for n in range(types.NUM_STATISTICS))
  statistics = Statistics(largest, largest + jnp.log(total), target_logit)
  terms = weighted_terms(inputs, options, statistics)
  return terms if results.d_logits is None else (*terms, results.d_logits.reshape(shape))
