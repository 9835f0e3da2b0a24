"""The state at every border between chunks, in order of time or against it.

    S_{n+1} = diag(decay_n) S_n + sum over the steps j of chunk n of  a_j w_j b_j^T

Forward: a = keys, b = values, w = what is left of step j at the chunk's end. Backward, for the
adjoint of the state: chunks in reverse, a = queries, b = the output's cotangent, w = what is left
of the chunk's start at step i.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.linear_attention import gates
from pallas_kernels.linear_attention.chunk import channels_of, steps_of
from pallas_kernels.linear_attention.walk import (
  Prepare,
  Undecayed,
  columns_of_state,
  decay_tile,
  walk,
)
from pallas_kernels.tensor_core import (
  CHUNK,
  GROUP,
  across,
  load,
  multiply,
  rows_of,
  store_anywhere,
  turned,
)


def chunk_states(
  a,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  b,  # [B, T, H, V] bfloat16
  weight,  # [B|1, H, T|C] float32, or None for 1
  decay,  # `walk.Decays`, or `walk.Undecayed`, by which `a` is decayed too
  initial,  # [B, H, P, K, V] float32, one for each part, or None for zeros
  sums=None,  # `walk.Sums` of `a`, or None
  paired=None,  # [B, H, N, K, V] bfloat16
  *,
  parts=1,
  reverse=False,
  borders=True,
  value_tile=None,
  interpret=None,
  **options,
):
  """Runs the recurrence above in `parts` independent parts of the sequence.

  Returns a dictionary: "last" [B, H, P, K, V] float32, the last state of each part; with `borders`
  "borders" [B, H, N, K, V] bfloat16, the states that enter the chunks; with `sums` "last_sum" [B,
  H, P, K] and, with `borders`, "sums" [B, H, N, K] float32, the same for the sums; with `paired`
  "overlap" [B, H, N, K] float32, the sum over V of the entering state times `paired`.
  """
  V = b.shape[-1]
  value_tile = value_tile or V
  inputs = {"a": steps_of(a), "b": channels_of(b)}
  which = gates.BEFORE if reverse else gates.AFTER
  vectors, out_type = {"weight": weight} if weight is not None else {}, {}
  undecayed = decay if isinstance(decay, Undecayed) else None
  if sums is not None:
    vectors |= sums.vectors
    out_type |= sums.out_type(V // value_tile, a.shape[1] // CHUNK if borders else 0)
  if paired is not None:
    inputs["paired"] = columns_of_state(paired)
    # Columns of values apart, so that no two threads write the same numbers.
    out_type["overlap"] = jax.ShapeDtypeStruct((V // GROUP, *paired.shape[:4]), jnp.float32)

  def begin(at, part, ins, held):
    if sums is not None:
      sums.start(held, at, part, ins)
    return decay.leaving(ins), None if undecayed is None else undecayed.factors(which, at, ins)

  def step(fixed, at, tiles, ins, outs, held, wait):
    leaving, factors = fixed
    if undecayed is not None:
      of_chunk = undecayed.of_chunk(which, factors, at, ins)
    if sums is not None:
      left = leaving(at)
      sums.weigh(held, at, ins)
      if borders:
        sums.put(held, outs["sums"].at[_block(at), at.b, at.h, at.n])
    weights = None if weight is None else rows_of(at.rows(ins["weight"]))
    wait()
    if undecayed is not None:
      decay_tile(tiles["a"], *of_chunk)
    if weight is not None:
      for column in range(tiles["b"].shape[0]):
        b_s = tiles["b"].at[column]
        b_s[...] = (load(b_s) * across(weights, b_s.shape)).astype(jnp.bfloat16)
    return None if sums is None else lambda: sums.add(held, tiles["a"], left, interpret)

  def end(at, part, outs, held):
    if sums is not None:
      sums.put(held, outs["last_sum"].at[_block(at), at.b, at.h, part])

  def _block(at):
    return at.group // (value_tile // GROUP)

  def carry(at, tiles, outs, state, decayed):
    if paired is not None:
      overlap = jnp.sum(load(tiles["paired"]) * state, axis=1)
      store_anywhere(outs["overlap"].at[at.group, at.b, at.h, at.n], overlap)
      if borders:
        tiles["paired"][...] = state.astype(jnp.bfloat16)
    products = [(turned(tiles["a"]), tiles["b"])]
    return multiply((decayed, products), interpret=interpret)[0], None

  nothing = weight is None and undecayed is None and sums is None
  results = walk(
    *(carry, None if nothing else Prepare(begin, step, end)),
    *(inputs, decay, vectors, initial, out_type),
    shape=(*a.shape, V),
    parts=parts,
    reverse=reverse,
    borders=borders,
    state_tile=False,
    left_in="paired" if paired is not None and borders else None,
    held=None if sums is None else sums.held,
    value_tile=value_tile,
    interpret=interpret,
    **options,
  )
  if paired is not None:
    results["overlap"] = results["overlap"].sum(0)
  return results | {name: results[name][0] for name in ("sums", "last_sum") if name in results}
