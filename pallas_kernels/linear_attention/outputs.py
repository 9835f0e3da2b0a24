"""The outputs, chunk after chunk, with the state in registers.

Inside a chunk the scores of its own steps multiply the values; the state that entered answers the
queries, decayed from the chunk's start; then the keys, decayed to its end, and the values go into
the state. Two faces:

* `scalar_outputs`: one decay for all key channels. Scores are made here, on the way.
* `gated_outputs`: scores come from `scores.py`, and with decays a step so do queries and keys.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.linear_attention import gates
from pallas_kernels.linear_attention.chunk import (
  channels_of,
  same_segment,
  scores_of,
  steps_of,
)
from pallas_kernels.linear_attention.walk import Prepare, Undecayed, decay_tile, walk
from pallas_kernels.tensor_core import (
  CHUNK,
  GROUP,
  across,
  columns_of,
  down,
  in_32_bits,
  iota,
  load,
  multiply,
  rows_of,
  store_anywhere,
  turned,
)


class _Decaying(NamedTuple):
  """How a chunk's queries and keys are decayed, and what else is made for all columns of values."""

  begin: Callable  # (place, ins) -> what does not change
  step: (
    Callable  # (fixed, place, tiles, ins, wait): tiles after `wait()`; the sums of rows of scores
  )


def scalar_outputs(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  cumulative,  # [B|1, H, T|C] float32: the log decays, summed inside each chunk
  before,  # [B|1, H, T|C] float32: what is left of the entering state at each step
  after,  # [B|1, H, T|C] float32: what is left of each step in the leaving state
  segments,  # [B, T] int32 or None
  decay,  # `walk.Decays`
  initial,  # [B, H, P, K, V] float32 or None
  sums,  # `walk.Sums` of the keys, for the normaliser, or None
  **options,
):
  """Returns a dictionary as `gated_outputs` does."""
  always = cumulative.shape[2] == CHUNK and cumulative.shape[0] == 1  # all chunks are alike

  def tables(at, ins):
    between = row_decay(at.rows(ins["cumulative"]))
    return between, rows_of(at.rows(ins["before"])), rows_of(at.rows(ins["after"]))

  def step(fixed, at, tiles, ins, wait):
    between, *ends = fixed if always else tables(at, ins)
    seen = visible(ins, at)
    wait()
    products = [(tiles["q"], turned(tiles["k"]))]
    (scores,) = multiply(((CHUNK, CHUNK), products), interpret=options["interpret"])
    scores = jnp.where(seen, scores * between, 0.0)
    tiles["scores"][...] = scores.astype(jnp.bfloat16)
    for name, left in zip("qk", ends, strict=True):
      x = tiles[name]
      x[...] = (load(x) * across(left, x.shape)).astype(jnp.bfloat16)
    return None if sums is None else jnp.sum(scores, axis=1)

  vectors = {"cumulative": cumulative, "before": before, "after": after, "segments": segments}
  return _outputs(
    _Decaying(lambda at, ins: tables(at, ins) if always else None, step),
    {"q": steps_of(q), "k": steps_of(k), "v": channels_of(v)},
    {name: x for name, x in vectors.items() if x is not None},
    {"scores": jax.ShapeDtypeStruct((CHUNK, CHUNK), jnp.bfloat16)},
    *(decay, initial, sums),
    **options,
  )


def gated_outputs(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  scores,  # [B, H, T, C] bfloat16
  score_sum,  # [B, H, T] float32, the sum of each row of scores, or None
  decay,  # `walk.Undecayed`; or `walk.Decays`, q decayed from the chunk's start, k to its end
  initial,  # [B, H, P, K, V] float32 or None
  sums,  # `walk.Sums` of the keys, for the normaliser, or None
  **options,
):
  """Returns a dictionary: "out" [B, T, H, V] bfloat16; "last", and with `borders` "borders", as
  `walk` does; with `sums` "denominator" [B, H, T], "last_sum" [B, H, P, K] and, with `borders`,
  "sums" [B, H, N, K], the sums that enter the chunks, float32.
  """
  kinds = {"q": gates.BEFORE, "k": gates.AFTER} if isinstance(decay, Undecayed) else {}

  def step(factors, at, tiles, ins, wait):
    how = {name: decay.of_chunk(kinds[name], x, at, ins) for name, x in factors.items()}
    total = None if sums is None else rows_of(ins["score_sum"].at[at.b, at.h, at.steps])
    wait()
    for name, x in how.items():
      decay_tile(tiles[name], *x)
    return total

  begin = lambda at, ins: {name: decay.factors(which, at, ins) for name, which in kinds.items()}
  return _outputs(
    _Decaying(begin, step) if kinds or sums is not None else None,
    {"q": steps_of(q), "k": steps_of(k), "v": channels_of(v), "scores": scores_of(scores)},
    {} if sums is None else {"score_sum": score_sum},
    {},
    *(decay, initial, sums),
    **options,
  )


@in_32_bits
def _outputs(
  decaying,
  inputs,
  vectors,
  prepared,
  decay,
  initial,
  sums,
  *,
  scale=1.0,
  borders=True,
  value_tile=None,
  interpret=None,
  **options,
):
  """`walk` with these inputs, vectors and prepared tiles; `decaying`: `_Decaying` or None."""
  (B, T, H, K), V = inputs["q"].array.shape, inputs["v"].array.shape[-1]
  value_tile = value_tile or V
  blocks = V // value_tile
  out_type = {"out": jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16)}
  if sums is not None:
    vectors = vectors | sums.vectors
    # One row for each tile of values, so that no two blocks write the same numbers.
    out_type["denominator"] = jax.ShapeDtypeStruct((blocks, B, H, T), jnp.float32)
    out_type |= sums.out_type(blocks, T // CHUNK if borders else 0)
    prepared = prepared | {"denominator": jax.ShapeDtypeStruct((CHUNK,), jnp.float32)}

  def begin(at, part, ins, held):
    if sums is not None:
      sums.start(held, at, part, ins)
    return decay.leaving(ins), decaying.begin(at, ins)

  def step(fixed, at, tiles, ins, outs, held, wait):
    leaving, fixed = fixed
    if sums is None:
      decaying.step(fixed, at, tiles, ins, wait)
      return None
    of_block = {name: outs[name].at[block_of(at), at.b, at.h] for name in own if name in outs}
    left = leaving(at)
    if borders:
      sums.put(held, of_block["sums"].at[at.n])
    denominator = decaying.step(fixed, at, tiles, ins, wait)
    for start in range(0, K, GROUP):  # by 64 channels, for want of registers
      channels = pl.ds(start, GROUP)
      queries = load(tiles["q"].at[:, channels])
      entering = down(columns_of(held["sum"].at[channels]), queries.shape)
      denominator = denominator + jnp.sum(queries * entering, axis=1)
    tiles["denominator"][...] = denominator
    store_anywhere(of_block["denominator"].at[at.steps], denominator)
    return lambda: sums.add(held, tiles["k"], left, interpret)

  def end(at, part, outs, held):
    if sums is not None:
      sums.put(held, outs["last_sum"].at[block_of(at), at.b, at.h, part])

  def block_of(at):
    return at.group // (value_tile // GROUP)

  def carry(at, tiles, outs, state, left):
    del at, outs, state
    out, state = multiply(
      ((CHUNK, GROUP), [(tiles["scores"], tiles["v"]), (tiles["q"], tiles["state"])]),
      (left, [(turned(tiles["k"]), tiles["v"])]),
      interpret=interpret,
    )
    if sums is not None:
      out = out / across(rows_of(tiles["denominator"]), out.shape)
    return state, out * scale if scale != 1.0 else out

  own = "denominator", "sums", "last_sum"
  results = walk(
    *(carry, None if decaying is None else Prepare(begin, step, end)),
    *(inputs, decay, vectors, initial, out_type),
    shape=(B, T, H, K, V),
    borders=borders,
    prepared=prepared,
    held=None if sums is None else sums.held,
    value_tile=value_tile,
    interpret=interpret,
    **options,
  )
  return results | {name: results[name][0] for name in own if name in results}


def row_decay(cumulative, *, turned=False):
  """[C, C]: exp of the decay from step j to step i, 1 where j is the later one. Rows are i, or j if
  `turned`."""
  shape = (CHUNK, CHUNK)
  lag = across(rows_of(cumulative), shape) - down(columns_of(cumulative), shape)
  return jnp.exp(jnp.minimum(-lag if turned else lag, 0.0))


def visible(ins, at):
  """[C, C]: whether output i may see step j."""
  mask = iota((CHUNK, CHUNK), 0) >= iota((CHUNK, CHUNK), 1)
  return mask & same_segment(ins, at) if "segments" in ins else mask
