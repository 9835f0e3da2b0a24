"""The diagonal recurrence and its adjoint: one pass over memory each, a thread for each channel.

    h_t = a_t h_{t-1} + x_t                                            or h_{t+1} with `reverse`
    adjoint, the other way:  g_t = d_t + p     dx_t = g_t     da_t = g_t conj(h_{t-1})
                             p = conj(a_t) g_t

A number is a tuple of its parts, float32 arrays: (real,) or (real, imaginary). Gradients are those
of the parts, hence the conjugates.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import channels
from pallas_kernels.channels import CHANNELS
from pallas_kernels.tensor_core import in_32_bits

_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
_GROUP = 8  # steps whose rows are read together, before any of their results is written


@in_32_bits
def scan(
  decay,  # parts [B, T, D], or [D] float32 for a constant
  x,  # parts [B, T, D]
  initial,  # parts [B, P, D] float32, or None for zeros
  forget,  # [B, T] int32, set at the steps that forget the state, or None
  *,
  reverse,
  length,
  number_of_parts=1,
  outputs=True,
  interpret=None,
):
  """Runs the recurrence in P independent parts of the sequence.

  T is a multiple of `channels.padded_length`, D of `channels.CHANNELS`. Steps from `length` on are
  padding, where a constant decay is 1; decays of steps and x are 1 and 0 there already.

  Returns a dictionary: "last" [B, P, D] float32, the state that leaves each part; with `outputs`
  "out" [B, T, D], h in the dtype of a real x and float32 if complex; without them "product"
  [B, P, D] float32, the product of the decays of each part, 0 where the part forgets. Tuples of
  parts each.
  """
  B, T, D = x[0].shape
  P, L = number_of_parts, T // number_of_parts
  width = max(len(decay), len(x))
  constant = decay[0].ndim == 1
  per_step = {f"x{n}": y for n, y in enumerate(x)}
  if not constant:
    per_step |= {f"a{n}": y for n, y in enumerate(decay)}
  end = length if length < T else None
  out_dtype = x[0].dtype if width == 1 else jnp.float32
  written = [out_dtype] * width if outputs else []
  rows, stages = channels.sizes(read=_bytes(per_step.values()), written=_bytes(written))
  states = (jax.ShapeDtypeStruct((B, P, D), jnp.float32),) * width
  out_type: dict = {"last": states}
  if outputs:
    out_type["out"] = (jax.ShapeDtypeStruct((B, T, D), out_dtype),) * width
  else:
    out_type["product"] = states[: len(decay)]

  def body(ins, outs, *buffers):
    here, b, part = _place(P)
    per_step, constants, initial, forget = ins
    constants = [channels.row_anywhere(ref.at[here]) for ref in constants]
    start = [channels.full(0.0)] * width
    if initial is not None:
      start = [channels.row_anywhere(ref.at[b, part, here]) for ref in initial]
    product = [channels.full(1.0)] + [channels.full(0.0)] * (len(decay) - 1)

    def chunk(first, refs, flag, buffers, carry):
      h, product = carry
      for group in _groups(rows, reverse):
        xs = {t: [channels.row(refs[f"x{n}"].at[t]) for n in range(len(x))] for t in group}
        if constant:
          decays = {
            t: constants if end is None else _unless(first + t >= end, constants, 1.0)
            for t in group
          }
        else:
          decays = {
            t: [channels.row(refs[f"a{n}"].at[t]) for n in range(len(decay))] for t in group
          }
        results = {}
        for t in group:
          a = decays[t]
          if flag is not None:
            h = _unless(flag(t), h)
            product = None if outputs else _unless(flag(t), product)
          h = channels.computed(_add(_times(a, h), xs[t]), interpret)
          product = None if outputs else _times(a, product)
          results[t] = h
        if outputs:
          for t in group:
            for n, y in enumerate(results[t]):
              buffers[f"out{n}"].at[t][...] = y.astype(out_dtype)
      return h, product

    h, product = channels.walk(
      chunk,
      (start, None if outputs else product),
      steps={name: ref.at[b, :, here] for name, ref in per_step.items()},
      flags=None if forget is None else forget.at[b],
      results={
        f"out{n}": (memory, outs["out"][n].at[b, :, here]) for n, memory in enumerate(buffers)
      },
      start=part * L,
      count=L // rows,
      rows=rows,
      stages=stages,
      backwards=reverse,
    )
    for ref, y in zip(outs["last"], h, strict=True):
      channels.put_anywhere(ref.at[b, part, here], y)
    if not outputs:
      for ref, y in zip(outs["product"], product, strict=True):
        channels.put_anywhere(ref.at[b, part, here], y)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[channels.buffer(rows, dtype) for dtype in written],
    grid=(D // CHANNELS, B * P),
    grid_names=("channels", "row"),
    interpret=interpret,
    compiler_params=_PARAMS,
  )((per_step, decay if constant else (), initial, forget))


@in_32_bits
def adjoint(
  decay,  # parts [B, T, D], or [D] float32 for a constant
  d_out,  # parts [B, T, D]
  out,  # parts [B, T, D], what `scan` returned, or None: only "arriving" is wanted
  initial,  # parts [B, D] float32, the state before the first part
  arriving,  # parts [B, P, D] float32, what the steps behind each part send back, or None for zeros
  forget,  # [B, T] int32 or None
  *,
  reverse,
  length,
  real_x=False,
  x_dtype=None,
  number_of_parts=1,
  interpret=None,
):
  """Runs the adjoint in P independent parts; `reverse` is the direction of `scan`, `length`
  as there.

  Returns a dictionary: "arriving" parts [B, P, D] float32, what each part sends to the state before
  it; and, unless `out` is None, "decay" parts [B, T, D] in the dtype of the decay, or for a
  constant [B, P, D] float32, the sum over each part; "x" parts [B, T, D] in `x_dtype`, only the
  real one with `real_x`.
  """
  B, T, D = d_out[0].shape
  P, L = number_of_parts, T // number_of_parts
  width = len(d_out)
  constant = decay[0].ndim == 1
  end = length if length < T else None
  full = out is not None
  per_step = {f"d{n}": y for n, y in enumerate(d_out)}
  if not constant:
    per_step |= {f"a{n}": y for n, y in enumerate(decay)}
  results: dict = {}
  out_type: dict = {"arriving": (jax.ShapeDtypeStruct((B, P, D), jnp.float32),) * width}
  if full:
    per_step |= {f"h{n}": y for n, y in enumerate(out)}
    results |= {f"x{n}": x_dtype for n in range(1 if real_x else width)}
    out_type["x"] = (jax.ShapeDtypeStruct((B, T, D), x_dtype),) * len(results)
    if constant:
      out_type["decay"] = out_type["arriving"][: len(decay)]
    else:
      results |= {f"a{n}": y.dtype for n, y in enumerate(decay)}
      out_type["decay"] = tuple(jax.ShapeDtypeStruct(y.shape, y.dtype) for y in decay)
  rows, stages = channels.sizes(
    read=_bytes(per_step.values()), written=_bytes(list(results.values()))
  )

  def body(ins, outs, buffers):
    here, b, part = _place(P)
    per_step, constants, out, initial, arriving, forget = ins
    constants = [channels.row_anywhere(ref.at[here]) for ref in constants]
    start = [channels.full(0.0)] * width
    if arriving is not None:
      start = [channels.row_anywhere(ref.at[b, part, here]) for ref in arriving]
    total = [channels.full(0.0)] * (len(decay) if full and constant else 0)
    if full:
      entering = [channels.row_anywhere(ref.at[b, here]) for ref in initial]

    def before(first):
      """h before the step of the chunk that the scan met first."""
      neighbour = first + rows if reverse else first - 1
      inside = neighbour < T if reverse else neighbour >= 0
      step = lax.min(lax.max(neighbour, 0), T - 1)
      return [
        jnp.where(inside, channels.row_anywhere(ref.at[b, step, here]), y)
        for ref, y in zip(out, entering, strict=True)
      ]

    def chunk(first, refs, flag, buffers, carry):
      p, total = carry
      read = lambda name, count, t: [channels.row(refs[f"{name}{n}"].at[t]) for n in range(count)]
      if full:
        border = before(first)
        sums = [channels.full(0.0)] * len(total)
      for group in _groups(rows, not reverse):
        gs = {t: read("d", width, t) for t in group}
        decays = {t: constants if constant else read("a", len(decay), t) for t in group}
        if constant and end is not None:
          decays = {t: _unless(first + t >= end, constants, 1.0) for t in group}
        if full:
          earlier = lambda t: t + 1 if reverse else t - 1
          states = {
            t: read("h", width, earlier(t)) if 0 <= earlier(t) < rows else border for t in group
          }
        results = {}
        for t in group:
          g = _add(gs[t], p)
          p = channels.computed(_times(_conjugate(decays[t]), g), interpret)
          if flag is not None:
            p = _unless(flag(t), p)
          if full:
            h = states[t]
            if flag is not None:
              h = _unless(flag(t), h)
            if constant and end is not None:
              h = _unless(first + t >= end, h)
            d_decay = _times(_conjugate(h), g)[: len(decay)]
            results[t] = g, d_decay
            if constant:
              sums = [y + z for y, z in zip(sums, d_decay, strict=True)]
        for t, (g, d_decay) in results.items():
          for name, values in (("x", g), ("a", d_decay)):
            for n, y in enumerate(values):
              if f"{name}{n}" in buffers:
                target = buffers[f"{name}{n}"]
                target.at[t][...] = y.astype(target.dtype)
      if total:
        total = [y + z for y, z in zip(total, sums, strict=True)]
      return p, total

    p, total = channels.walk(
      chunk,
      (start, total),
      steps={name: ref.at[b, :, here] for name, ref in per_step.items()},
      flags=None if forget is None else forget.at[b],
      results={
        name: (memory, outs["decay" if name[0] == "a" else "x"][int(name[1])].at[b, :, here])
        for name, memory in buffers.items()
      },
      start=part * L,
      count=L // rows,
      rows=rows,
      stages=stages,
      backwards=not reverse,
    )
    for ref, y in zip(outs["arriving"], p, strict=True):
      channels.put_anywhere(ref.at[b, part, here], y)
    for n, y in enumerate(total):
      channels.put_anywhere(outs["decay"][n].at[b, part, here], y)

  return plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[{name: channels.buffer(rows, dtype) for name, dtype in results.items()}],
    grid=(D // CHANNELS, B * P),
    grid_names=("channels", "row"),
    interpret=interpret,
    compiler_params=_PARAMS,
  )((per_step, decay if constant else (), out, initial, arriving, forget))


def _bytes(arrays):
  return sum(jnp.dtype(getattr(y, "dtype", y)).itemsize for y in arrays)


def _place(number_of_parts):
  """(this block's channels, its sequence, its part)."""
  row = lax.axis_index("row")
  here = pl.ds(lax.axis_index("channels") * CHANNELS, CHANNELS)
  return here, row // number_of_parts, lax.rem(row, number_of_parts)


def _groups(rows, backwards):
  """The steps of a chunk in groups, in the order of the walk."""
  order = list(range(rows))[:: -1 if backwards else 1]
  return [order[n : n + _GROUP] for n in range(0, rows, _GROUP)]


def _unless(flag, number, value=0.0):
  """A real `value` where `flag`: even a state that is not finite does not pass."""
  constants = [channels.full(value if n == 0 else 0.0) for n in range(len(number))]
  return [jnp.where(flag, y, z) for y, z in zip(constants, number, strict=True)]


def _conjugate(number):
  return [number[0], *(-y for y in number[1:])]


def _add(y, z):
  longer, shorter = (y, z) if len(y) >= len(z) else (z, y)
  return [*(p + q for p, q in zip(longer, shorter, strict=False)), *longer[len(shorter) :]]


def _times(y, z):
  if len(y) == 1:
    return [y[0] * part for part in z]
  if len(z) == 1:
    return [part * z[0] for part in y]
  return [y[0] * z[0] - y[1] * z[1], y[0] * z[1] + y[1] * z[0]]
