"""The cotangent of a normalised output: through the division by the denominator."""

import jax.numpy as jnp

from pallas_kernels.linear_attention.chunk import all_chunks, rows_to, steps_of
from pallas_kernels.linear_attention.gates import step_numbers
from pallas_kernels.tensor_core import CHUNK, across, load, rows_of


def through_division(
  d_out,  # [B, T, H, V] bfloat16: the cotangent of out = scale n / D
  out,  # [B, T, H, V] bfloat16
  denominator,  # [B, H, T] float32: D; of steps of padding anything, as `out` is there
  *,
  length,  # steps before padding
  scale,
  interpret=None,
):
  """Returns those of n, scale d_out / D [B, T, H, V] bfloat16, and of D, -(d_out . out) / D [B, H,
  T] float32; zero for steps of padding.

  One kernel, because XLA reads the cotangent once for each of the two.
  """
  (B, T, H, V) = out.shape

  def chunk(at, ins, s, wait, put):
    inverse = 1.0 / rows_of(ins["denominator"].at[at.b, at.h, at.steps])
    is_step = step_numbers() < length - at.n * CHUNK
    if length < T:
      inverse = jnp.where(is_step, inverse, 0.0)
    wait()
    d_rows = load(s["d_out"])
    due = -jnp.sum(d_rows * load(s["out"]), axis=1) * inverse
    put("d_sum", jnp.where(is_step, due, 0.0) if length < T else due)
    put("d_out", d_rows * across(inverse * scale, (CHUNK, V)))

  results = all_chunks(
    chunk,
    {"d_out": steps_of(d_out), "out": steps_of(out)},
    {"denominator": denominator},
    {"d_out": steps_of(d_out), "d_sum": rows_to(B, H, T)},
    reuse={"d_out": "d_out"},
    interpret=interpret,
  )
  return results["d_out"], results["d_sum"]
