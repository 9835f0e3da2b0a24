"""A scan with N states per channel, forward and with its own backward pass."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.channel_states import backward, forward, shapes


class Static(NamedTuple):
  """What the compiled program is specialised to."""

  cell: Any
  out_dtype: Any
  interpret: object = None


def scan(static, arrays, first):
  """Returns out [B, T, D] and the last state [B, D, N].

  Args:
    static: the cell, the dtype of `out`, and whether the kernels are interpreted.
    arrays: "x", "rate" [B, T, D]; the cell's `keys` [B, T, N] and maybe "norm" [B, T]; its
      `parameters` [D, N] and "skip" [D], "initial" [B, D, N] in float32. Padded to `shapes`.
    first: [B, T] whether a segment begins at a step, or None.
  """
  return _scan(static, arrays, first)


def scan_in_parts(static, arrays, first, parts):
  """`scan` of a long sequence with few channels, cut into parts that run at once.

  A first pass finds what each part adds to a state that enters it, `cell.passing` what it leaves of
  that state, and then every part can run from the state that truly enters it.
  """
  if parts == 1:
    return scan(static, arrays, first)
  cell = static.cell
  B, T, D = arrays["x"].shape
  own = ("skip", "initial", *cell.parameters)
  cut = lambda x: x.reshape(B * parts, T // parts, *x.shape[2:])
  pieces = {name: x if name in own else cut(x) for name, x in arrays.items()}
  first = None if first is None else cut(first)
  whole = lambda x: x.reshape(B, parts, *x.shape[1:])
  # Like an array that is there: inside `shard_map` it must vary over the same mesh axes.
  empty = jnp.zeros_like(jnp.repeat(arrays["initial"], parts, axis=0))
  alone = pieces | {"initial": empty, "skip": jnp.zeros_like(arrays["skip"])}
  added = whole(scan(static, alone, first)[1])
  passed = whole(cell.passing(pieces, first, lambda more: scan(static, alone | more, first)[1]))

  def enter(state, step):
    passed, added = step
    return passed * state + added, state

  by_part = lambda x: jnp.moveaxis(x, 1, 0)
  _, entering = jax.lax.scan(enter, arrays["initial"], (by_part(passed), by_part(added)))
  entering = jnp.moveaxis(entering, 0, 1).reshape(empty.shape)
  out, last = scan(static, pieces | {"initial": entering}, first)
  return out.reshape(B, T, D), whole(last)[:, -1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(static, arrays, first):
  made = _outputs(static, arrays, first, None)
  return made["out"], made["last"]


def _outputs(static, arrays, first, border_dtype):
  cell = static.cell
  N = arrays["initial"].shape[2]
  return forward.outputs(
    cell,
    _kernel_inputs(cell, arrays, first),
    out_dtype=static.out_dtype,
    border_dtype=border_dtype,
    resets=first is not None,
    interpret=static.interpret,
    **shapes.forward(cell.name, *arrays["x"].shape, N),
  )


def _kernel_inputs(cell, arrays, first):
  """What both kernels read, keys as float32 because each of their numbers serves many channels."""
  arrays = cell.prepare(arrays)
  wide = {name: arrays[name].astype(jnp.float32) for name in cell.keys}
  norm = arrays.get("norm")
  if first is not None or norm is not None:
    # By chunks, because a copy to shared memory moves a multiple of 128 bytes.
    B, T = arrays["x"].shape[:2]
    zero = jnp.zeros((B, T), jnp.float32)
    columns = [zero if x is None else x.astype(jnp.float32) for x in (first, norm)]
    chunked = [x.reshape(B, T // shapes.STEPS, shapes.STEPS) for x in columns]
    wide["scalars"] = jnp.stack(chunked, axis=2)
  kept = {name: arrays[name] for name in ("x", "rate", "skip", "initial", *cell.parameters)}
  return kept | wide


def _forward_rule(static, arrays, first):
  made = _outputs(static, arrays, first, arrays["x"].dtype)
  made = {name: checkpoint_name(x, MADE_BY_KERNELS) for name, x in made.items()}
  return (made["out"], made["last"]), (arrays, first, made["borders"])


def _backward_rule(static, kept, cotangents):
  arrays, first, borders = kept
  d_out, d_last = cotangents
  cell = static.cell
  x = arrays["x"]
  B, T, D = x.shape
  N = borders.shape[3]
  options = shapes.backward(N)
  inputs = _kernel_inputs(cell, arrays, first)
  del inputs["initial"]
  chunks = T // options["chunk"]
  # [B, T/C, D, N] as one column of tiles [channels, N] for each block of channels.
  borders = borders.reshape(B, chunks * D, N)
  made = backward.gradients(
    cell,
    inputs | {"borders": borders, "d_out": d_out.astype(x.dtype), "d_last": d_last},
    resets=first is not None,
    interpret=static.interpret,
    **options,
  )
  sums = made["sums"].sum(1)
  gradients = cell.key_gradients({n: sums[:, :, i] for i, n in enumerate(cell.sums)}, arrays)
  gradients |= {name: made[name].sum(0) for name in ("skip", *cell.parameters)}
  gradients |= {name: made[name] for name in ("x", "rate", "initial")}
  return {n: gradients[n].astype(arrays[n].dtype) for n in arrays}, None


_scan.defvjp(_forward_rule, _backward_rule)
