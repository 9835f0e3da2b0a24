"""The state along the chunks: forward with the outputs, in reverse for its cotangent.

With S the state that enters a chunk, b = before, a = after, g = the chunk's decay:

    x  = inverse beta (v - b e S)     out  = b q S + scores x     S' = g S + (a k)^T x

and with A the cotangent of S', G that of out, the transposes of these lines:

    y  = inverse^T (a k A + scores^T G)     A' = g A + (b q)^T G - (b e)^T (beta y)

where beta y is the gradient of v. A CTA has some columns of values of one head. Three products
depend on one another in each chunk, and little else may stand between them. So a CTA has three
warpgroups (`core.pipeline`): the producer loads inputs; the first consumer carries the state, in
registers; the second does everything that the next state does not need, the epilogue. The first
hands tiles to the second in a ring of slots in SMEM.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.chunk_grid import shared_head
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers, launch_pipeline
from pallas_kernels.core.wgmma import (
  COMPILER_PARAMS,
  Backend,
  Dots,
  broadcast_rows,
  load_row_vector,
  load_tile,
  map_refs,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.delta_rule.config import RecurrenceConfig
from pallas_kernels.delta_rule.types import AFTER, BEFORE, DECAY, NUM_ROWS, RATE


class Stage(NamedTuple):
  """Inputs of a chunk: whole arrays, their GMEM references, or tiles in SMEM.

  Groups of heads may share one of any array.
  """

  erase_key: Any  # [B, T, H, K] bfloat16, or None for k; tiles [C, K]
  inverse: Any  # [B, H, T, C] bfloat16; tiles [C, C]
  k: Any  # [B, T, H, K] bfloat16
  q: Any  # [B, T, H, K] bfloat16
  scores: Any  # [B, H, T, C] bfloat16; tiles [C, C]
  v: Any  # [B, T, H, V] bfloat16: values or, in reverse, G; tiles [C, value_tile]
  tables: Any  # [B, H, N, NUM_ROWS, C] float32

  @property
  def erase(self) -> Any:
    """The erase key."""
    return self.k if self.erase_key is None else self.erase_key

  def rows(self, row: int) -> jax.Array:
    """A row of the chunk's table, along the rows of a tile [C, value_tile]."""
    return broadcast_rows(load_row_vector(self.tables.at[row]), self.v.shape)


class Results(NamedTuple):
  """Results of the recurrence; inside the kernel also their tiles, which pass through slots."""

  out: Any = None  # [B, T, H, V] bfloat16; forward only
  states: Any = None  # [B, H, N, K, V] bfloat16: S or A; in SMEM also an operand
  corrections: Any = None  # [B, T, H, V] bfloat16: x or y
  last_state: Any = None  # [B, H, K, V] float32; not in slots


class _Work(NamedTuple):
  """Tiles of the first consumer alone."""

  right: Any  # [C, value_tile]
  left: Any  # [C, value_tile]
  d_out: Any = None  # [C, value_tile]: G times before; in reverse only


class HandOver(NamedTuple):
  """Signals of the first consumer to the second: tiles of a slot are filled."""

  states: Any
  corrections: Any


def forward_recurrence(
  inputs: Stage,
  initial: jax.Array | None,  # [B, H, K, V] float32
  *,
  heads: int,  # H
  scale: float,
  for_gradient: bool,
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> Results:
  """`Results` with out, last_state and, `for_gradient`, S in states and x in corrections."""

  def recur(stage, state, slot, work, signal):
    decay = stage.tables[DECAY, 0]
    old = backend.dot(stage.erase, slot.states)
    right = (load_tile(stage.v) - stage.rows(BEFORE) * old) * stage.rows(RATE)
    work.right[...] = right.astype(jnp.bfloat16)
    plgpu.commit_smem()
    x = backend.dot(stage.inverse, work.right)
    slot.corrections[...] = x.astype(jnp.bfloat16)
    work.left[...] = (x * stage.rows(AFTER)).astype(jnp.bfloat16)
    signal.corrections()
    return backend.dot(transpose_ref(stage.k), work.left, start=state * decay)

  def epilogue(stage, slot, wait):
    wait.states()
    out = backend.dot(stage.q, slot.states)
    out = out * stage.rows(BEFORE)
    wait.corrections()
    out = backend.dot(stage.scores, slot.corrections, start=out)
    slot.out[...] = (out * scale).astype(jnp.bfloat16)

  stored = Results(out=True, states=for_gradient or None, corrections=for_gradient or None)
  return _run(
    recur,
    epilogue,
    inputs,
    initial,
    stored=stored,
    work=_Work(True, True),
    heads=heads,
    reverse=False,
    config=config,
    chunk=chunk,
    backend=backend,
  )


def reverse_recurrence(
  inputs: Stage,  # v: the cotangent of out
  d_last: jax.Array | None,  # [B, H, K, V] float32
  *,
  heads: int,  # H
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> Results:
  """`Results` with y in `corrections`, A in `states`, of the states that leave the chunks, and the
  cotangent of the first state in `last_state`."""

  def recur(stage, adjoint, slot, work, signal):
    decay = stage.tables[DECAY, 0]
    from_state, from_out = backend.dots(
      Dots([(stage.k, slot.states)]), Dots([(transpose_ref(stage.scores), stage.v)])
    )
    work.right[...] = (from_state * stage.rows(AFTER) + from_out).astype(jnp.bfloat16)
    before = stage.rows(BEFORE)
    work.d_out[...] = (load_tile(stage.v) * before).astype(jnp.bfloat16)
    plgpu.commit_smem()
    y = backend.dot(transpose_ref(stage.inverse), work.right)
    slot.corrections[...] = y.astype(jnp.bfloat16)
    work.left[...] = (y * (-before * stage.rows(RATE))).astype(jnp.bfloat16)
    signal.corrections()
    pairs = [(transpose_ref(stage.q), work.d_out), (transpose_ref(stage.erase), work.left)]
    return backend.dots(Dots(pairs, start=adjoint * decay))[0]

  def epilogue(stage, slot, wait):
    del stage, slot
    wait.states()
    wait.corrections()

  return _run(
    recur,
    epilogue,
    inputs,
    d_last,
    stored=Results(states=True, corrections=True),
    work=_Work(True, True, True),
    heads=heads,
    reverse=True,
    config=config,
    chunk=chunk,
    backend=backend,
  )


class _Gmem(NamedTuple):
  inputs: Stage
  initial: Any


class _Scratch(NamedTuple):
  stages: Stage
  slots: Results
  work: _Work
  barriers: PipelineBarriers
  handed: HandOver  # barriers, one per slot
  stored_barrier: Any  # one per slot: its tiles are in GMEM


@with_int32_indices
def _run(
  recur: Callable,
  epilogue: Callable,
  inputs: Stage,
  initial: jax.Array | None,
  *,
  stored: Results,
  work: _Work,
  heads: int,
  reverse: bool,
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> Results:
  """Carries the state along the chunks of each sequence and head.

  Args:
    recur: `(stage, state, slot, work, signal) -> next state`, by the first consumer; it finds the
      state in bfloat16 in slot.states, and calls `signal.corrections()` when it has filled those.
    epilogue: `(stage, slot, wait)`, by the second; `wait.states()` waits for the first consumer.
    stored: which results are stored when `epilogue` has returned.
    work: which tiles `recur` needs.
  """
  (B, T, _, K), V, H = inputs.q.shape, inputs.v.shape[-1], heads
  C, N, BV, cluster = chunk, T // chunk, config.value_tile, config.cluster
  num_stages, num_slots = min(config.num_stages, N), config.num_slots
  # Both operands of a product have the same swizzle, which the narrower one bounds.
  transforms = (plgpu.TilingTransform((8, BV)), plgpu.SwizzleTransform(2 * BV))
  tile = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
  bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  whole = Results(bf16(B, T, H, V), bf16(B, H, N, K, V), bf16(B, T, H, V))
  out_type = Results(*(x if y else None for x, y in zip(whole, stored, strict=True)))
  out_type = out_type._replace(last_state=jax.ShapeDtypeStruct((B, H, K, V), jnp.float32))
  keys = tile(num_stages, C, K)
  consumed = {"num_arrivals": 2, "num_barriers": num_stages}
  scratch = _Scratch(
    stages=Stage(
      erase_key=None if inputs.erase_key is None else keys,
      inverse=tile(num_stages, C, C),
      k=keys,
      q=keys,
      scores=tile(num_stages, C, C),
      v=tile(num_stages, C, BV),
      tables=plgpu.SMEM((num_stages, NUM_ROWS, C), jnp.float32),
    ),
    slots=Results(
      out=tile(num_slots, C, BV) if stored.out else None,
      states=tile(num_slots, K, BV),
      corrections=tile(num_slots, C, BV),
    ),
    work=map_refs(lambda _: tile(C, BV), work),
    barriers=PipelineBarriers(
      loaded=plgpu.Barrier(
        num_arrivals=sum(x is not None for x in inputs), num_barriers=num_stages
      ),
      consumed=plgpu.ClusterBarrier(collective_axes=("cta",), **consumed)
      if cluster > 1
      else plgpu.Barrier(**consumed),
    ),
    handed=HandOver(*[plgpu.Barrier(num_barriers=num_slots)] * 2),
    stored_barrier=plgpu.Barrier(num_barriers=num_slots),
  )

  def body(gmem: _Gmem, outs: Results, smem: _Scratch):
    b, h = lax.axis_index("row"), lax.axis_index("head")
    tile_index = lax.axis_index("value") * cluster + lax.axis_index("cta")
    values = pl.ds(tile_index * BV, BV)
    warpgroup = lax.axis_index("warpgroup")
    pipeline = Pipeline(N, num_stages, smem.barriers)
    chunk_of = lambda n: N - 1 - n if reverse else n
    slot_of = lambda n: lax.rem(n, num_slots)

    def slot_tiles(n):
      slot = slot_of(n)
      return map_refs(lambda ref: ref.at[slot], smem.slots)

    def load(n):
      tokens = pl.ds(chunk_of(n) * C, C)
      of_tokens = lambda ref: None if ref is None else ref.at[b, tokens, shared_head(h, H, ref)]
      head_of = lambda ref: shared_head(h, H, ref, axis=1)
      ins = gmem.inputs
      sources = Stage(
        erase_key=of_tokens(ins.erase_key),
        inverse=ins.inverse.at[b, head_of(ins.inverse), tokens],
        k=of_tokens(ins.k),
        q=of_tokens(ins.q),
        scores=ins.scores.at[b, head_of(ins.scores), tokens],
        v=ins.v.at[b, tokens, shared_head(h, H, ins.v), values],
        tables=ins.tables.at[b, head_of(ins.tables), chunk_of(n)],
      )
      # The CTAs of a cluster have the same chunk: one of them loads for all, but not tables, too
      # small for that.
      alone = {"v", "tables"} if cluster > 1 else set(Stage._fields)
      targets, barrier = pipeline.stage(n, smem.stages), pipeline.loaded_barrier(n)
      for name, source, target in zip(Stage._fields, sources, targets, strict=True):
        if source is not None:
          multicast = None if name in alone else "cta"
          plgpu.copy_gmem_to_smem(source, target, barrier, collective_axes=multicast)

    @pl.when(warpgroup == 0)
    def _producer():
      pipeline.produce(load)

    @pl.when(warpgroup == 1)
    def _recurrence():
      def mainloop(n, state):
        slot = slot_tiles(n)

        def signal(barrier):
          plgpu.commit_smem()
          plgpu.barrier_arrive(barrier.at[slot_of(n)])

        signals = HandOver(*(lambda x=x: signal(x) for x in smem.handed))
        pl.when(n >= num_slots)(lambda: plgpu.barrier_wait(smem.stored_barrier.at[slot_of(n)]))
        slot.states[...] = state.astype(jnp.bfloat16)
        signals.states()
        pipeline.wait_loaded(n)
        state = recur(pipeline.stage(n, smem.stages), state, slot, smem.work, signals)
        pipeline.release(n)
        return state

      start = zero_accumulator(K, BV)
      if gmem.initial is not None:
        source = gmem.initial.at[b, h, :, values]
        start = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
      last = lax.fori_loop(0, N, mainloop, start)
      outs.last_state.at[b, h, :, values][...] = last
      # Drain: the second consumer arrives once for every chunk but the last.
      for n in range(max(N, num_slots), N - 1 + num_slots):
        plgpu.barrier_wait(smem.stored_barrier.at[n % num_slots])

    @pl.when(warpgroup == 2)
    def _epilogue():
      def step(n, _):
        slot = slot_tiles(n)
        pipeline.wait_loaded(n)
        wait = lambda barrier: plgpu.barrier_wait(barrier.at[slot_of(n)])
        waits = HandOver(*(lambda x=x: wait(x) for x in smem.handed))
        epilogue(pipeline.stage(n, smem.stages), slot, waits)
        plgpu.commit_smem()
        pipeline.release(n)
        tokens = lambda: pl.ds(chunk_of(n) * C, C)
        if stored.out:
          _store(slot.out, outs.out.at[b, tokens(), h, values])
        if stored.states:
          _store(slot.states, outs.states.at[b, h, chunk_of(n), :, values])
        if stored.corrections:
          _store(slot.corrections, outs.corrections.at[b, tokens(), h, values])
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        stored_barrier = smem.stored_barrier
        pl.when(n >= 1)(lambda: plgpu.barrier_arrive(stored_barrier.at[slot_of(n - 1)]))

      lax.fori_loop(0, N, step, None)
      plgpu.wait_smem_to_gmem(0)

  return launch_pipeline(
    body,
    _Gmem(inputs, initial),
    out_type,
    scratch,
    grid=(V // BV // cluster, H, B),
    num_warpgroups=3,
    cluster=cluster,
    name="delta_rule_recurrence_" + ("reverse" if reverse else "forward"),
    backend=backend,
    compiler_params=COMPILER_PARAMS,
  )


def _store(source_smem, target_gmem):
  plgpu.copy_smem_to_gmem(source_smem, target_gmem, commit_group=False)
