"""The frame of kernels that carry a state along the chunks of a head, in registers.

A block of threads has some columns of values. One group of its threads copies what the columns have
in common of the next chunks to shared memory and works on it (`prepare`); each of the others has 64
columns: it copies what is theirs alone, and carries their state along.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention import gates
from pallas_kernels.linear_attention.chunk import Piece, Place
from pallas_kernels.tensor_core import (
  CHUNK,
  GROUP,
  ROWS,
  WITHOUT_SCRATCH,
  across,
  in_32_bits,
  iota,
  rows_of,
  scaled,
  store_anywhere,
  sum_of_rows,
  tile,
  unit,
  zeros,
)


class Decays(NamedTuple):
  """What chunks leave of the state, as an array."""

  decay: jax.Array  # [B|1, H, N|1, K] float32; or [B|1, H, N|1] for all K of a head
  width: int  # K

  @property
  def vectors(self):
    """What the methods read, by name."""
    return {"decay": self.decay}

  def leaving(self, ins):
    """A function of the place: [K] float32, what its chunk leaves of the state."""

    def at_place(at):
      decay = ins["decay"]
      row, n = at.b if decay.shape[0] > 1 else 0, at.n if decay.shape[2] > 1 else 0
      if len(decay.shape) == 4:
        return rows_of(decay.at[row, at.h, n])
      return plgpu.layout_cast(lax.broadcast(decay[row, at.h, n], (self.width,)), ROWS)

    return at_place


class Undecayed(NamedTuple):
  """Constant decays per key channel; queries and keys as they are, which are decayed on the way."""

  log_decay: jax.Array  # [H, K] float32
  reach: jax.Array | None  # [2, B, T] float32, see `tables.reaching`
  read_first: bool  # whether queries see the state before the decay of their own step
  length: int  # steps before padding

  @property
  def vectors(self):
    """What the methods read, by name."""
    vectors = {"log_decay": self.log_decay, "reach": self.reach}
    return {name: x for name, x in vectors.items() if x is not None}

  def leaving(self, ins):
    """A function of the place: [K] float32, what its chunk leaves of the state."""
    log_decay = rows_of(ins["log_decay"].at[lax.axis_index("head")])
    rate = jnp.maximum(log_decay, gates.SMALLEST_LOG_DECAY)

    def at_place(at):
      steps = jnp.clip(self.length - at.n * CHUNK, 0, CHUNK).astype(jnp.float32)
      left = jnp.exp(rate * steps)
      if "reach" in ins:  # a state passes a chunk whose last step sees it
        left = left * ins["reach"][0, at.b, at.n * CHUNK + CHUNK - 1]
      return left

    return at_place

  def factors(self, which, at, ins, valid=CHUNK):
    """[C, K] bfloat16: what is left of queries from the chunk's start (`which` is `gates.BEFORE`),
    of keys at its end (`gates.AFTER`), in a chunk of `valid` steps."""
    gate = gates.ConstantGates(ins["log_decay"].at[at.h], 0, self.read_first, valid)
    factors = gate.before() if which is gates.BEFORE else gate.after()
    return factors.astype(jnp.bfloat16)

  def of_chunk(self, which, factors, at, ins):
    """What `decay_tile` wants for a chunk: `factors`, made again where its steps end early, and
    [C], above 0 for steps that see the entering state or that reach the leaving one; or None."""
    seen = None
    if "reach" in ins:
      seen = rows_of(ins["reach"].at[0 if which is gates.BEFORE else 1, at.b, at.steps])
    if which is gates.AFTER and self.length % CHUNK:
      valid = self.length - at.n * CHUNK
      again = jnp.where((valid > 0) & (valid < CHUNK), 1, 0)
      make = lambda _, x: self.factors(which, at, ins, valid)
      factors = lax.fori_loop(0, again, make, factors)
    return factors, seen


def decay_tile(x, factors, seen):
  """The tile x [C, K] times its factors, in place. Of steps that are not `seen` nothing is left,
  whatever they hold."""
  value = scaled(x, factors)
  if seen is not None:
    value = jnp.where(across(seen, value.shape) > 0, value, jnp.bfloat16(0.0))
  x[...] = value


class Sums(NamedTuple):
  """A vector carried beside the state: what the state would be for values of 1, or of `weights`."""

  shape: tuple[int, ...]  # (B, H, P, K)
  initial: jax.Array | None  # of that shape, float32, one for each part; None for zeros
  weights: jax.Array | None  # [B, H, T] float32; None for 1

  @property
  def vectors(self):
    """What the methods read, by name."""
    vectors = {"initial_sum": self.initial, "weights": self.weights}
    return {name: x for name, x in vectors.items() if x is not None}

  @property
  def held(self):
    """Shared memory: the sums, and the right operand of the products that add up steps."""
    return {"sum": plgpu.SMEM(self.shape[3:], jnp.float32), "unit": tile(CHUNK, GROUP)}

  def out_type(self, blocks, chunks):
    """Results, with an axis for blocks of columns, so that no two write the same numbers."""
    B, H, P, K = self.shape
    made = {"last_sum": jax.ShapeDtypeStruct((blocks, B, H, P, K), jnp.float32)}
    if chunks:
      made["sums"] = jax.ShapeDtypeStruct((blocks, B, H, chunks, K), jnp.float32)
    return made

  def start(self, held, at, part, ins):
    """Fills what is `held`."""
    if self.weights is None:
      unit(held["unit"])
    if self.initial is None:
      initial = plgpu.layout_cast(jnp.zeros(self.shape[3:], jnp.float32), ROWS)
    else:
      initial = rows_of(ins["initial_sum"].at[at.b, at.h, part])
    held["sum"][...] = initial
    plgpu.commit_smem()

  def weigh(self, held, at, ins):
    """Puts the weights of the chunk's steps where the products find them."""
    if self.weights is None:
      return
    weights = rows_of(ins["weights"].at[at.b, at.h, at.steps])
    rounded = weights.astype(jnp.bfloat16).astype(jnp.float32)
    column = iota((CHUNK, GROUP), 1)  # two numbers hold a weight to 2^-17
    split = (across(x, column.shape) for x in (rounded, weights - rounded))
    first, second = (jnp.where(column == n, x, 0.0) for n, x in enumerate(split))
    held["unit"][...] = (first + second).astype(jnp.bfloat16)

  def add(self, held, x, left, interpret):
    """Goes on by a chunk: `x` is its tile [C, K], `left` [K] what it leaves."""
    added = sum_of_rows([x], held["unit"], interpret)
    held["sum"][...] = rows_of(held["sum"]) * left + added
    plgpu.commit_smem()

  def put(self, held, ref):
    """Copies the sums to [K] in device memory."""
    store_anywhere(ref, rows_of(held["sum"]))


class Prepare(NamedTuple):
  """What a block of threads does once for all of its columns."""

  begin: Callable  # (place, part, ins, held) -> what does not change
  step: Callable  # (fixed, place, tiles, ins, outs, held, wait): tiles after `wait()`. May return a
  # function of what remains to be done when the others go on with the chunk.
  end: Callable  # (place, part, outs, held)


def columns_of_state(x):
  """64 columns of a chunk's state. x: [B, H, N, K, V]."""
  index = lambda at: (at.b, at.h, at.n, slice(None), at.channels)
  return Piece(x, (x.shape[3], GROUP), index, True)


@in_32_bits
def walk(
  carry,
  prepare,
  inputs,
  decay,
  vectors,
  initial,
  out_type,
  *,
  shape,
  parts,
  reverse=False,
  borders=True,
  state_tile=True,
  left_in=None,
  prepared=None,
  held=None,
  value_tile=None,
  stages=3,
  interpret=None,
):
  """Walks the chunks of each part of each sequence and head.

  Args:
    carry: `(place, tiles, outs, state, decayed) -> (state, out)` for 64 columns of values, the
      group of the place: from the state and what the chunk leaves of it to the next state, and the
      columns of the output [C, 64] float32, or None. It finds the state in bfloat16 in
      tiles["state"] if `state_tile`.
    prepare: `Prepare`, which may change the tiles of inputs; or None.
    inputs: pieces by name. Those of a group have 64 columns of values; `carry` gets its own.
    decay: `Decays` or `Undecayed`.
    vectors: further arrays by name, left in device memory for `prepare`.
    initial: [B, H, P, K, V] float32, one for each part, or None for zeros.
    out_type: of `carry` and `prepare`'s further results, by name; of "out" [B, T, H, V] bfloat16,
      if `carry` makes it.
    shape: (B, T, H, K, V).
    borders: whether to return the states that enter the chunks.
    prepared: shared memory for each chunk, filled by `prepare`, by name: vectors, or tiles.
    held: shared memory that `prepare` keeps from chunk to chunk, by name; or None.
    left_in: the input in whose tile `carry` leaves the state that entered, in bfloat16, where there
      are `borders`; or None. It saves the tile for the state; not with an output.
    value_tile: columns in a block.
    stages: how many chunks have their inputs in shared memory.

  Returns:
    a dictionary with `out_type`'s results; "last" [B, H, P, K, V] float32, the last state of each
    part; with `borders` "borders" [B, H, N, K, V] bfloat16.
  """
  (B, T, H, K, V), C = shape, CHUNK
  N, W = T // C, (value_tile or V) // GROUP
  M = N // parts
  stages = min(stages, M)
  state_tile = state_tile or (borders and left_in is None)
  gives_out = "out" in out_type
  out_type = {"last": jax.ShapeDtypeStruct((B, H, parts, K, V), jnp.float32), **out_type}
  if borders:
    out_type["borders"] = jax.ShapeDtypeStruct((B, H, N, K, V), jnp.bfloat16)
  scratch = {"staged": {}}
  copies = 0
  for name, piece in inputs.items():
    copies += W if piece.grouped else 1
    scratch["staged"][name] = tile(stages, *([W] if piece.grouped else []), *piece.shape)
  for name, one in (prepared or {}).items():
    size = stages, *one.shape
    scratch["staged"][name] = tile(*size) if len(size) == 3 else plgpu.SMEM(size, one.dtype)
  if held is not None:
    scratch["held"] = held
  if state_tile:
    scratch["state"] = tile(W, K, GROUP)
  if gives_out:
    scratch["out"] = tile(W, C, GROUP)
  scratch["loaded"] = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
  scratch["used"] = plgpu.Barrier(num_arrivals=W, num_barriers=stages)
  if prepare is not None:
    scratch["ready"] = plgpu.Barrier(num_barriers=stages)

  def body(ins, initial_ref, outs, s):
    row, h = lax.axis_index("row"), lax.axis_index("head")
    first = lax.axis_index("value") * W
    b, part = row // parts, lax.rem(row, parts)
    role = lax.axis_index("role")
    stage_of = lambda n: lax.rem(n, stages)

    def place_of(n, column=0):
      return Place(b, h, part * M + (M - 1 - n if reverse else n), first + column)

    def tiles_of(n):
      return {name: ref.at[stage_of(n)] for name, ref in s["staged"].items()}

    def fetch(n, column=None):
      """Copies what all columns share or, with `column`, what that one has for itself."""
      for name, piece in inputs.items():
        if piece.grouped == (column is not None):
          target = tiles_of(n)[name]
          target = target.at[column] if piece.grouped else target
          source = ins[name].at[piece.index(place_of(n, 0 if column is None else column))]
          plgpu.copy_gmem_to_smem(source, target, s["loaded"].at[stage_of(n)])

    @pl.when(role == 0)
    def _fetch():
      lax.fori_loop(0, stages, lambda n, _: fetch(n), None)  # one copy of the code: compile time

      def refill(n):
        plgpu.barrier_wait(s["used"].at[stage_of(n)])
        fetch(n + stages)

      def step(n, _):
        if prepare is not None:
          wait = lambda: plgpu.barrier_wait(s["loaded"].at[stage_of(n)])
          rest = prepare.step(fixed, place_of(n), tiles_of(n), ins, outs, s.get("held"), wait)
          plgpu.commit_smem()
          plgpu.barrier_arrive(s["ready"].at[stage_of(n)])
          if rest is not None:
            rest()
        pl.when((n >= 1) & (n - 1 + stages < M))(lambda: refill(n - 1))

      if prepare is not None:
        fixed = prepare.begin(place_of(0), part, ins, s.get("held"))
      lax.fori_loop(0, M, step, None)
      if prepare is not None:
        prepare.end(place_of(0), part, outs, s.get("held"))
      last = lambda n, _: plgpu.barrier_wait(s["used"].at[stage_of(n)])
      lax.fori_loop(M - stages, M, last, None)  # until nobody uses the barriers

    @pl.when(role > 0)
    def _carry():
      column = role - 1
      at_last = place_of(0, column)
      leaving = decay.leaving(ins)
      lax.fori_loop(0, stages, lambda n, _: fetch(n, column), None)

      def release(n):
        plgpu.barrier_arrive(s["used"].at[stage_of(n)])
        pl.when(n + stages < M)(lambda: fetch(n + stages, column))

      def step(n, state):
        at, tiles = place_of(n, column), tiles_of(n)
        own = {name: s[name].at[column] for name in ("state", "out") if name in s}
        own |= {name: tiles[name].at[column] for name, piece in inputs.items() if piece.grouped}
        border = outs["borders"].at[at.b, at.h, at.n, :, at.channels] if borders else None
        left = leaving(at)
        if left_in is not None:
          plgpu.wait_smem_to_gmem(0, wait_read_only=True)
          pl.when(n > 0)(lambda: release(n - 1))
        if state_tile:
          if borders:
            plgpu.wait_smem_to_gmem(int(gives_out), wait_read_only=True)
          own["state"][...] = state.astype(jnp.bfloat16)
          plgpu.commit_smem()
        if borders and left_in is None:
          plgpu.copy_smem_to_gmem(own["state"], border)
        plgpu.barrier_wait(s["loaded"].at[stage_of(n)])
        if prepare is not None:
          plgpu.barrier_wait(s["ready"].at[stage_of(n)])
        state, out = carry(at, tiles | own, outs, state, state * across(left, state.shape))
        plgpu.commit_smem()  # reads into registers come before copies into the same memory
        if left_in is None:
          release(n)
        else:
          plgpu.copy_smem_to_gmem(own[left_in], border)
        if gives_out:
          plgpu.wait_smem_to_gmem(int(borders), wait_read_only=True)
          own["out"][...] = out.astype(jnp.bfloat16)
          plgpu.commit_smem()
          target = outs["out"].at[at.b, at.steps, at.h, at.channels]
          plgpu.copy_smem_to_gmem(own["out"], target)
        return state

      start = zeros(K, GROUP)
      of_part = lambda ref: ref.at[b, h, part, :, at_last.channels]
      if initial_ref is not None:
        start = plgpu.load(of_part(initial_ref), layout=plgpu.Layout.WGMMA, optimized=False)
      of_part(outs["last"])[...] = lax.fori_loop(0, M, step, start)
      plgpu.wait_smem_to_gmem(0)
      if left_in is not None:
        release(M - 1)

  kernel = lambda body: plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch],
    grid=(V // (W * GROUP), H, B * parts),
    grid_names=("value", "head", "row"),
    num_threads=1 + W,
    thread_name="role",
    interpret=interpret,
    compiler_params=WITHOUT_SCRATCH,
  )
  arrays = {name: piece.array for name, piece in inputs.items()} | decay.vectors | vectors
  if initial is None:
    return kernel(lambda ins, outs, s: body(ins, None, outs, s))(arrays)
  return kernel(body)(arrays, initial)
