"""The state along the chunks: forward with the outputs, in reverse for its cotangent.

With S the state that enters a chunk, b = before, a = after, g = the chunk's decay, P the scores:

    x  = inverse beta (v - b e S)     out  = b q S + P x     S' = g S + (a k)^T x

and with A the cotangent of S', G that of out, the transposes of these lines:

    y  = inverse^T (a k A + P^T G)     A' = g A + (b q)^T G - (b e)^T (beta y)

where beta y is the gradient of v. With a decay per key channel g has one number per channel; keys,
queries and P come decayed from `channel_chunks`, and a = b = 1.

A write key w stores u, the values times beta, and k what x removes. With the scores W of queries
and the write key, and M those of the erase key times -beta,

    x  = inverse (M u - beta e S)     out  = q S + P x + W u     S' = g S + k^T x + w^T u

The lines for y and A' stay, and the gradient of u is w A + W^T G + M^T y.

Three products depend on one another in each chunk, and little else may stand between them. So they
are computed transposed, columns of values along the rows: the state, x and y stay in registers,
where they are left operands, and all right operands are tiles that were copied. A CTA has some
columns of values of one head; its warpgroups are

* the producer, which loads inputs (`core.pipeline`);
* a consumer for every 64 columns, which carries their state, and does nothing else;
* the epilogue: scores, outputs, and all stores. The consumers hand it states and corrections, which
  they write to SMEM while the tensor cores are at work.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.chunk_grid import decay_between_tokens, shared_head
from pallas_kernels.core.pipeline import Pipeline, PipelineBarriers, launch_pipeline
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  WITHOUT_BARRIERS,
  Backend,
  Dots,
  broadcast_cols,
  broadcast_rows,
  causal_mask,
  equal_mask,
  iota,
  load_col_vector,
  load_row_vector,
  load_tile,
  smem_tile,
  transpose_ref,
  with_int32_indices,
  zero_accumulator,
)
from pallas_kernels.delta_rule.config import RecurrenceConfig
from pallas_kernels.delta_rule.types import AFTER, BEFORE, CUMULATIVE, DECAY, RATE

_WIDEST_READ = 2 * TILE_WIDTH  # columns of a state that are left operands at the same time


class Stage(NamedTuple):
  """Inputs of a chunk: whole arrays, their GMEM references, or tiles in SMEM.

  Groups of heads may share one of any array.
  """

  erase_key: Any  # [B, T, H, K] bfloat16, or None for k; tiles [C, K]
  inverse: Any  # [B, H, T, C] bfloat16; tiles [C, C]
  k: Any  # [B, T, H, K] bfloat16
  q: Any  # [B, T, H, K] bfloat16
  v: Any  # [B, T, H, V] bfloat16: values or, in reverse, G; tiles [C, 64], one per consumer
  tables: Any  # [B, H, N, NUM_ROWS, C] float32; with a decay per channel [B, H, N, 1, C]: beta
  segment_ids: Any  # [B, T] int32, or None
  # With a decay per channel; None otherwise.
  pairs: Any = None  # [B, H, T, C] bfloat16: P, where it is read; tiles [C, C]
  decay: Any = None  # [B, H, N, K] float32: g; SMEM [K]
  # With a write key; None otherwise. Then v has u.
  write_key: Any = None  # [B, T, H, K] bfloat16: w
  write_scores: Any = None  # [B, H, T, C] bfloat16: W
  write_lower: Any = None  # [B, H, T, C] bfloat16: M

  @property
  def erase(self) -> Any:
    """The erase key."""
    return self.k if self.erase_key is None else self.erase_key

  def before(self, shape: tuple[int, ...]) -> Any:
    """b along the rows of a tile."""
    if self.decay is not None:
      return 1.0
    return broadcast_rows(load_row_vector(self.tables.at[BEFORE]), shape)

  def cols(self, row: int, shape: tuple[int, ...]) -> Any:
    """A row of the chunk's table, along the columns of a tile."""
    if self.decay is not None:
      if row != RATE:
        return 1.0
      row = 0
    return broadcast_cols(load_col_vector(self.tables.at[row]), shape)

  def decayed(self, state: jax.Array) -> jax.Array:
    """g times a state [64, K]."""
    if self.decay is None:
      return state * self.tables[DECAY, 0]
    return state * broadcast_cols(load_col_vector(self.decay), state.shape)

  def scores(self, backend: Backend, *, skips: bool) -> jax.Array:
    """[C, C] float32: P.

    `skips`: whether documents are looked at only in chunks where one begins, which no state passes.
    It pays where others do not wait for the scores: a branch costs more than a mask.
    """
    mask = causal_mask(self.inverse.shape[-1])
    if self.segment_ids is not None and not skips:
      mask = mask & equal_mask(self.segment_ids)
    products = backend.dot(self.q, transpose_ref(self.k))
    scores = products * jnp.where(mask, decay_between_tokens(self.tables.at[CUMULATIVE]), 0.0)
    if self.segment_ids is None or not skips:
      return scores
    masked = lambda: jnp.where(equal_mask(self.segment_ids), scores, 0.0)
    return lax.cond(self.tables[DECAY, 0] == 0.0, masked, lambda: scores)


class Results(NamedTuple):
  """Results of the recurrence; transposed, as the backward pass reads them."""

  out: Any = None  # [B, T, H, V] bfloat16; in reverse, with a write key, the gradient of u
  states: Any = None  # [B, H, N, V, K] bfloat16: S or A
  corrections: Any = None  # [B, H, N, V, C] bfloat16: x or y
  last_state: Any = None  # [B, H, P, V, K] float32, of each of P splits of the sequence


class _Tiles(NamedTuple):
  """Tiles between consumers and epilogue."""

  states: Any  # [BV, K]: S or A
  corrections: Any  # [BV, C]: x or y
  out: Any = None  # [C, BV]; of the epilogue alone
  scores: Any = None  # [stages, C, C]; in reverse, from the epilogue to the consumers


class _HandOver(NamedTuple):
  """Barriers, or functions, of `_Tiles.states` and `_Tiles.corrections`."""

  states: Any
  corrections: Any


class _Scratch(NamedTuple):
  stages: Stage
  tiles: _Tiles
  barriers: PipelineBarriers
  filled: Any  # `_HandOver`, arrivals: consumers; None, as `free`, where nothing is handed over
  free: Any  # `_HandOver`, arrivals: the epilogue
  scores_barrier: Any  # of `_Tiles.scores`
  lhs: Any  # of `Backend.to_lhs`: of every consumer and the epilogue, four each
  done_barrier: Any  # arrivals: all warpgroups


class _Gmem(NamedTuple):
  inputs: Stage
  initial: Any


class _Consumer(NamedTuple):
  """Arguments of a consumer's step, with the state."""

  stage: Stage  # v: its own tile
  # Functions of a value and its first column: fill the tile; behind its last, tell the epilogue.
  give: _HandOver
  wait_free: _HandOver  # functions that return when its tile may be filled
  scores: Any  # function that returns P when the epilogue has computed it; in reverse
  lhs: Callable[[int, jax.Array], Any]  # an operand for the left
  keep: Any  # factor of v, 0 or 1; None for 1

  def values(self) -> Any:
    """Its values, columns along the rows."""
    v = plgpu.load(transpose_ref(self.stage.v), layout=plgpu.Layout.WGMMA)
    return v if self.keep is None else v.astype(jnp.float32) * self.keep


def _read(backend: Backend, cta: _Consumer, state, keys, work: Callable[[], Any], *more: Dots):
  """(the result of `work`, what keys read of the state, *more); meanwhile the state is handed over.

  In parts, because the registers would not hold all of a wide state twice.
  """
  K, read, results = state.shape[1], None, []
  for start in range(0, K, _WIDEST_READ):
    end = min(start + _WIDEST_READ, K)
    part, last = state[:, start:end], end == K
    product = cta.lhs(0, part), transpose_ref(keys.at[:, pl.ds(start, end - start)])
    if start == 0:
      cta.wait_free.states()

    def meanwhile(start=start, part=part, last=last):
      cta.give.states(part, start)
      return work() if last else None

    results = backend.overlapped(meanwhile, Dots([product], read), *(more if last else ()))
    read = results[1]
  return results


def _forward_step(backend: Backend, chunk: int):
  shape = TILE_WIDTH, chunk

  def step(cta: _Consumer, state):
    stage, more, writes = cta.stage, [], []
    if stage.write_key is not None:
      values = cta.lhs(3, cta.values())
      more.append(Dots([(values, transpose_ref(stage.write_lower))]))
      writes = [(values, stage.write_key)]
    work = lambda: None if writes else cta.values()
    v, old, *of_values = _read(backend, cta, state, stage.erase, work, *more)
    if writes:
      right = of_values[0] - old * stage.cols(RATE, shape)
    else:
      right = v.astype(jnp.float32) - stage.cols(BEFORE, shape) * old
      right = right * stage.cols(RATE, shape)
    right = cta.lhs(1, right)
    meanwhile = lambda: (stage.decayed(state), stage.cols(AFTER, shape))
    solution = Dots([(right, transpose_ref(stage.inverse))])
    (state, after), x = backend.overlapped(meanwhile, solution)
    left = cta.lhs(2, x * after)
    cta.wait_free.corrections()
    meanwhile = lambda: cta.give.corrections(x)
    return backend.overlapped(meanwhile, Dots([(left, stage.k), *writes], start=state))[1]

  return step


def _reverse_step(backend: Backend, chunk: int):
  shape = TILE_WIDTH, chunk

  def step(cta: _Consumer, adjoint):
    stage, d_out = cta.stage, transpose_ref(cta.stage.v)
    work = lambda: stage.cols(AFTER, shape)
    # Registers do not hold a sum of its own for what comes through the outputs: the compiler would
    # let all products run one by one. And the scores have more time.
    after, from_state = _read(backend, cta, adjoint, stage.k, work)
    right = cta.lhs(1, backend.dot(d_out, cta.scores(), from_state * after))

    def meanwhile():
      before = stage.cols(BEFORE, shape)
      weights = before, stage.cols(RATE, shape)
      return stage.decayed(adjoint), load_tile(d_out) * before, *weights

    solution = Dots([(right, stage.inverse)])
    (adjoint, d_out, before, rate), y = backend.overlapped(meanwhile, solution)
    pairs = [(cta.lhs(2, d_out), stage.q), (cta.lhs(3, y * (-before * rate)), stage.erase)]
    cta.wait_free.corrections()
    meanwhile = lambda: cta.give.corrections(y)
    return backend.overlapped(meanwhile, Dots(pairs, start=adjoint))[1]

  return step


def forward_recurrence(
  inputs: Stage,
  initial: jax.Array | None,  # [B, H, P, V, K] float32
  *,
  heads: int,  # H
  num_splits: int,  # P
  scale: float,
  for_gradient: bool,
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> Results:
  """`Results` with out, last_state and, `for_gradient`, S in states and x in corrections."""

  def epilogue(cta: _Epilogue):
    def step(n, _):
      stage, tiles = cta.stage(n), cta.tiles
      cta.pipeline.wait_loaded(n)
      scores = stage.pairs
      if scores is None:
        scores = cta.lhs(0, stage.scores(backend, skips=False))
      before = stage.before(tiles.out.shape)
      cta.wait_filled.states()
      if for_gradient:
        cta.store.states(n)
      pairs = [(stage.q, transpose_ref(tiles.states))]
      if stage.write_key is not None:
        pairs.append((stage.write_scores, stage.v.at[0]))
      out = backend.dots(Dots(pairs))[0] * before
      if not for_gradient:
        cta.release.states()
      cta.wait_filled.corrections()
      if for_gradient:
        cta.store.corrections(n)
      # The last outputs, and these states, have been read.
      plgpu.wait_smem_to_gmem(1 if for_gradient else 0, wait_read_only=True)
      if for_gradient:
        cta.release.states()
      out = backend.dot(scores, transpose_ref(tiles.corrections), start=out)
      tiles.out[...] = (out * scale).astype(jnp.bfloat16)
      plgpu.commit_smem()  # also behind the last reading of the stage
      cta.pipeline.release(n)
      cta.store.out(n)
      if for_gradient:
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
      cta.release.corrections()

    lax.fori_loop(0, cta.pipeline.num_chunks, step, None)

  return _run(
    _forward_step(backend, chunk),
    epilogue,
    inputs,
    initial,
    stored=Results(out=True, states=for_gradient or None, corrections=for_gradient or None),
    heads=heads,
    num_splits=num_splits,
    reverse=False,
    config=config,
    chunk=chunk,
    backend=backend,
  )


def split_maps(
  inputs: Stage,  # without q
  *,
  heads: int,  # H
  num_splits: int,  # P
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> jax.Array:
  """[B, H, P, K + V, K] float32: what each split makes of the state that enters it.

  With M the first K rows and E the others, the state S^T [V, K] leaves it as S^T M + E.
  """

  def epilogue(cta: _Epilogue):
    def step(n, _):
      cta.pipeline.wait_loaded(n)
      cta.pipeline.release(n)

    lax.fori_loop(0, cta.pipeline.num_chunks, step, None)

  results = _run(
    _forward_step(backend, chunk),
    epilogue,
    inputs,
    None,
    stored=Results(),
    heads=heads,
    num_splits=num_splits,
    reverse=False,
    maps=True,
    config=config,
    chunk=chunk,
    backend=backend,
  )
  return results.last_state


def reverse_recurrence(
  inputs: Stage,  # v: the cotangent of out
  d_last: jax.Array | None,  # [B, H, P, V, K] float32
  *,
  heads: int,  # H
  num_splits: int,  # P
  scale: float,
  store: bool = True,
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> Results:
  """`Results` with y in `corrections`, A in `states`, of the states that leave the chunks, and the
  cotangents of the states that enter the splits in `last_state`; without `store`, only these. With
  a write key also `scale` times the gradient of u in `out`."""
  if not store:
    inputs = inputs._replace(write_key=None, write_scores=None, write_lower=None)
  writes = inputs.write_key is not None

  def epilogue(cta: _Epilogue):
    last = cta.pipeline.num_chunks - 1

    def compute_scores(n):
      cta.pipeline.wait_loaded(n)
      if inputs.pairs is None:
        cta.give_scores(n, cta.stage(n).scores(backend, skips=True))
      cta.pipeline.release(n)

    def step(n, _):
      d_values: Any = None
      stage: Any = None
      tiles = cta.tiles
      if writes:
        stage = cta.stage(n)
        cta.pipeline.wait_loaded(n)
      if store:
        cta.wait_filled.states()
        cta.store.states(n)
      if not writes:
        # Those of the next chunk; a loop, for a conditional product would delay all others.
        lax.fori_loop(n + 1, jnp.minimum(n + 1, last) + 1, lambda n, _: compute_scores(n), None)
      if not store:
        return
      if not writes:  # the states have left while scores were computed
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        cta.release.states()
      if writes:
        of_state = stage.write_key, transpose_ref(tiles.states)
        of_out = transpose_ref(stage.write_scores), stage.v.at[0]
        d_values = backend.dots(Dots([of_state, of_out]))[0]
      cta.wait_filled.corrections()
      cta.store.corrections(n)
      if writes:
        lower, y = transpose_ref(stage.write_lower), transpose_ref(tiles.corrections)
        d_values = backend.dot(lower, y, start=d_values)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the last gradients have left, too
        cta.release.states()
        tiles.out[...] = (d_values * scale).astype(jnp.bfloat16)
        plgpu.commit_smem()  # also behind the last reading of the stage
        cta.pipeline.release(n)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
      cta.release.corrections()
      if writes:
        cta.store.out(n)

    if not writes:
      compute_scores(0)
    lax.fori_loop(0, last + 1, step, None)

  return _run(
    _reverse_step(backend, chunk),
    epilogue,
    inputs,
    d_last,
    stored=Results(out=writes or None, states=store or None, corrections=store or None),
    heads=heads,
    num_splits=num_splits,
    reverse=True,
    config=config,
    chunk=chunk,
    backend=backend,
  )


class _Epilogue(NamedTuple):
  """Arguments of the epilogue."""

  pipeline: Pipeline
  stage: Callable[[Any], Stage]
  tiles: _Tiles
  wait_filled: Any  # `_HandOver` of functions; None, as `release`, where nothing is handed over
  release: Any  # `_HandOver` of functions: consumers may fill the tile again
  store: Results  # functions of the chunk: start the copy of a tile
  give_scores: Callable[[Any, jax.Array], None]
  lhs: Callable[[int, jax.Array], Any]


@with_int32_indices
def _run(
  step: Callable[[_Consumer, jax.Array], jax.Array],
  epilogue: Callable[[_Epilogue], None],
  inputs: Stage,
  initial: jax.Array | None,
  *,
  stored: Results,
  heads: int,
  num_splits: int,
  reverse: bool,
  maps: bool = False,
  config: RecurrenceConfig,
  chunk: int,
  backend: Backend,
) -> Results:
  """Carries the state along the chunks of each sequence and head.

  Args:
    step: of a chunk, in a consumer: the next state [64, K].
    epilogue: of all chunks, in the last warpgroup.
    stored: which results there are besides `last_state`.
    maps: K more columns, before those of v, whose values are 0 and whose states begin as the rows
      of the unit matrix.
  """
  (B, T, _, K), V, H, P, C = inputs.k.shape, inputs.v.shape[-1], heads, num_splits, chunk
  columns = V + K if maps else V
  bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  whole = Results(bf16(B, T, H, V), bf16(B, H, T // C, V, K), bf16(B, H, T // C, V, C))
  out_type = Results(*(x if y else None for x, y in zip(whole, stored, strict=True)))
  out_type = out_type._replace(last_state=jax.ShapeDtypeStruct((B, H, P, columns, K), jnp.float32))
  run = _Run(inputs, stored, H, P, reverse, maps, config, C, backend)

  def body(gmem: _Gmem, outs: Results, smem: _Scratch):
    cta = _Cta(run, gmem, outs, smem)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(cta.load)
    consumes = (warpgroup > 0) & (warpgroup <= run.consumers)
    pl.when(consumes)(lambda: cta.consume(step, warpgroup - 1))
    pl.when(warpgroup == run.consumers + 1)(lambda: cta.finish(epilogue))
    # None leaves before the others: programs have failed where one left during products of another.
    plgpu.barrier_arrive(smem.done_barrier)
    plgpu.barrier_wait(smem.done_barrier)

  return launch_pipeline(
    body,
    _Gmem(inputs, initial),
    out_type,
    run.scratch(),
    grid=(columns // config.value_tile, H, B * P),
    num_warpgroups=run.consumers + 2,
    name="delta_rule_"
    + ("split_maps_forward" if maps else f"recurrence_{'reverse' if reverse else 'forward'}"),
    backend=backend,
    compiler_params=WITHOUT_BARRIERS,
  )


class _Run(NamedTuple):
  """The arguments of `_run`, and what follows from them."""

  inputs: Stage
  stored: Results
  heads: int
  num_splits: int
  reverse: bool
  maps: bool
  config: RecurrenceConfig
  chunk: int
  backend: Backend

  @property
  def consumers(self) -> int:
    """Warpgroups that carry a state."""
    return self.config.value_tile // TILE_WIDTH

  @property
  def num_chunks(self) -> int:
    """Chunks of a split."""
    return self.inputs.k.shape[1] // (self.chunk * self.num_splits)

  @property
  def num_stages(self) -> int:
    """Chunks in SMEM."""
    return min(self.config.num_stages, self.num_chunks)

  @property
  def handed(self) -> bool:
    """Whether consumers hand tiles to the epilogue."""
    return bool(self.stored.out or self.stored.states)

  def scratch(self) -> _Scratch:
    """SMEM and barriers."""
    inputs, stages, consumers, C = self.inputs, self.num_stages, self.consumers, self.chunk
    BV, K = self.config.value_tile, inputs.k.shape[-1]
    keys, pairs = smem_tile(stages, C, K), smem_tile(stages, C, C)
    copies = sum(x is not None for x in inputs) - 1 + consumers
    scored = self.reverse and inputs.pairs is None  # by the epilogue
    return _Scratch(
      stages=Stage(
        erase_key=None if inputs.erase_key is None else keys,
        inverse=pairs,
        k=keys,
        q=None if inputs.q is None else keys,
        v=smem_tile(stages, consumers, C, TILE_WIDTH),
        tables=plgpu.SMEM((stages, inputs.tables.shape[3], C), jnp.float32),
        segment_ids=None if inputs.segment_ids is None else plgpu.SMEM((stages, C), jnp.int32),
        pairs=None if inputs.pairs is None else pairs,
        decay=None if inputs.decay is None else plgpu.SMEM((stages, K), jnp.float32),
        write_key=None if inputs.write_key is None else keys,
        write_scores=None if inputs.write_scores is None else pairs,
        write_lower=None if inputs.write_lower is None else pairs,
      ),
      tiles=_Tiles(
        states=smem_tile(BV, K) if self.handed else None,
        corrections=smem_tile(BV, C) if self.handed else None,
        out=smem_tile(C, BV) if self.stored.out else None,
        scores=pairs if scored else None,
      ),
      barriers=PipelineBarriers(
        loaded=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=consumers + 1, num_barriers=stages),
      ),
      filled=_HandOver(*[plgpu.Barrier(num_arrivals=consumers)] * 2) if self.handed else None,
      free=_HandOver(*[plgpu.Barrier()] * 2) if self.handed else None,
      scores_barrier=plgpu.Barrier(num_barriers=stages) if scored else None,
      lhs=None if self.backend.interpret is None else smem_tile(consumers + 1, 4, C, max(K, C)),
      done_barrier=plgpu.Barrier(num_arrivals=consumers + 2),
    )


class _Cta:
  """A CTA's columns of one split: what its warpgroups do."""

  def __init__(self, run: _Run, gmem: _Gmem, outs: Results, smem: _Scratch):
    self.run, self.gmem, self.outs, self.smem = run, gmem, outs, smem
    row, self.h = lax.axis_index("row"), lax.axis_index("head")
    P = jnp.int32(run.num_splits)
    self.b, self.split = lax.div(row, P), lax.rem(row, P)
    self.first_column = lax.axis_index("value") * run.config.value_tile
    self.pipeline = Pipeline(run.num_chunks, run.num_stages, smem.barriers)

  def chunk_of(self, n):
    """The n-th chunk of the pipeline, of all of the sequence."""
    count = self.run.num_chunks
    return self.split * count + (count - 1 - n if self.run.reverse else n)

  def stage_of(self, n) -> Stage:
    """Its tiles."""
    return self.pipeline.stage(n, self.smem.stages)

  def lhs_of(self, warpgroup):
    """`_Consumer.lhs` of a warpgroup."""
    backend, lhs_smem = self.run.backend, self.smem.lhs

    def lhs(number, value):
      if lhs_smem is None:
        return backend.to_lhs(value, None)
      rows = lhs_smem.at[warpgroup, number, :, pl.ds(0, value.shape[1])]
      return backend.to_lhs(value, rows)

    return lhs

  def load(self) -> None:
    """The producer."""
    plgpu.set_max_registers(self.run.config.producer_registers, action="decrease")
    self.pipeline.produce(self._load)

  def _load(self, n):
    run, ins, b, h = self.run, self.gmem.inputs, self.b, self.h
    C, H = run.chunk, run.heads
    tokens, chunk = pl.ds(self.chunk_of(n) * C, C), self.chunk_of(n)
    none = lambda of: lambda ref: None if ref is None else of(ref)
    of_tokens = none(lambda ref: ref.at[b, tokens, shared_head(h, H, ref)])
    of_pairs = none(lambda ref: ref.at[b, shared_head(h, H, ref, axis=1), tokens])
    of_chunk = none(lambda ref: ref.at[b, shared_head(h, H, ref, axis=1), chunk])
    sources = Stage(
      erase_key=of_tokens(ins.erase_key),
      inverse=of_pairs(ins.inverse),
      k=of_tokens(ins.k),
      q=of_tokens(ins.q),
      v=None,
      tables=of_chunk(ins.tables),
      segment_ids=None if ins.segment_ids is None else ins.segment_ids.at[b, tokens],
      pairs=of_pairs(ins.pairs),
      decay=of_chunk(ins.decay),
      write_key=of_tokens(ins.write_key),
      write_scores=of_pairs(ins.write_scores),
      write_lower=of_pairs(ins.write_lower),
    )
    targets, barrier = self.stage_of(n), self.pipeline.loaded_barrier(n)
    for source, target in zip(sources, targets, strict=True):
      if source is not None:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    K = ins.k.shape[-1]
    for number in range(run.consumers):
      column = self.first_column + number * TILE_WIDTH
      columns = pl.ds(jnp.maximum(column - K, 0) if run.maps else column, TILE_WIDTH)
      source = ins.v.at[b, tokens, shared_head(h, H, ins.v), columns]
      plgpu.copy_gmem_to_smem(source, targets.v.at[number], barrier)

  def consume(self, step: Callable[[_Consumer, jax.Array], jax.Array], number) -> None:
    """The consumer of this number: the state of 64 columns, along all chunks."""
    run, smem, K = self.run, self.smem, self.run.inputs.k.shape[-1]
    plgpu.set_max_registers(run.config.consumer_registers, action="increase")
    rows = pl.ds(number * TILE_WIDTH, TILE_WIDTH)
    column = self.first_column + number * TILE_WIDTH
    columns = pl.ds(column, TILE_WIDTH)

    def give(tile, barrier):
      def fill(value, start=0):
        columns = pl.ds(start, value.shape[1])
        tile.at[rows, columns][...] = value.astype(jnp.bfloat16)
        if start + value.shape[1] == tile.shape[1]:
          plgpu.commit_smem()
          plgpu.barrier_arrive(barrier)

      return fill

    wait = lambda barrier: lambda: plgpu.barrier_wait(barrier)
    gives, waits = _HandOver(*[lambda *_: None] * 2), _HandOver(*[lambda: None] * 2)
    if run.handed:
      tiles = smem.tiles.states, smem.tiles.corrections
      gives = _HandOver(*map(give, tiles, smem.filled))
      waits = _HandOver(*map(wait, smem.free))
    keep = jnp.where(column < K, 0.0, 1.0) if run.maps else None

    def mainloop(n, state):
      self.pipeline.wait_loaded(n)
      stage = self.stage_of(n)

      def scores():
        if stage.pairs is not None:
          return stage.pairs
        slot = self.pipeline.slot(n)
        plgpu.barrier_wait(smem.scores_barrier.at[slot])
        return smem.tiles.scores.at[slot]

      stage = stage._replace(v=stage.v.at[number])
      state = step(_Consumer(stage, gives, waits, scores, self.lhs_of(number), keep), state)
      if not run.handed:
        plgpu.commit_smem()  # behind the last reading of the stage
      self.pipeline.release(n)
      return state

    start = zero_accumulator(TILE_WIDTH, K)
    if run.maps:
      diagonal = iota(start.shape, 1) == iota(start.shape, 0) + column
      start = jnp.where(diagonal, 1.0, start)
    if self.gmem.initial is not None:
      source = self.gmem.initial.at[self.b, self.h, self.split, columns]
      start = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
    last = lax.fori_loop(0, run.num_chunks, mainloop, start)
    self.outs.last_state.at[self.b, self.h, self.split, columns][...] = last
    for wait_free in waits:  # barriers outlive their users
      wait_free()

  def finish(self, epilogue: Callable[[_Epilogue], None]) -> None:
    """The epilogue."""
    run, smem, outs, b, h = self.run, self.smem, self.outs, self.b, self.h
    if run.config.epilogue_registers > 65536 // (128 * (run.consumers + 2)):
      plgpu.set_max_registers(run.config.epilogue_registers, action="increase")
    C, values = run.chunk, pl.ds(self.first_column, run.config.value_tile)
    wait = lambda barrier: lambda: plgpu.barrier_wait(barrier)
    release = lambda barrier: lambda: plgpu.barrier_arrive(barrier)

    def store(source_smem, target_of_chunk):
      def start(n):
        plgpu.copy_smem_to_gmem(source_smem, target_of_chunk(self.chunk_of(n)))

      return start

    stores = Results(
      store(smem.tiles.out, lambda n: outs.out.at[b, pl.ds(n * C, C), h, values]),
      store(smem.tiles.states, lambda n: outs.states.at[b, h, n, values]),
      store(smem.tiles.corrections, lambda n: outs.corrections.at[b, h, n, values]),
    )

    def give_scores(n, value):
      slot = self.pipeline.slot(n)
      smem.tiles.scores.at[slot][...] = value.astype(jnp.bfloat16)
      plgpu.commit_smem()
      plgpu.barrier_arrive(smem.scores_barrier.at[slot])

    for barrier in smem.free or ():
      plgpu.barrier_arrive(barrier)
    epilogue(
      _Epilogue(
        self.pipeline,
        self.stage_of,
        smem.tiles,
        _HandOver(*map(wait, smem.filled)) if run.handed else None,
        _HandOver(*map(release, smem.free)) if run.handed else None,
        stores,
        give_scores,
        self.lhs_of(run.consumers),
      )
    )
    plgpu.wait_smem_to_gmem(0)
