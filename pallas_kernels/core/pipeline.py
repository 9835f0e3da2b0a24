"""Warp-specialized pipeline along the chunks of a sequence.

One CTA has a producer warpgroup and one or more consumer warpgroups, which share a ring of stages
in SMEM. A stage holds what one chunk reads.

* Producer (`Pipeline.produce`): fills all stages by TMA, then refills each as soon as the consumers
  have released it. It may also have a prologue per chunk: work on the loaded stage that all
  consumers need once, such as decaying queries and keys.
* Consumer: waits until the stage is loaded (and its prologue done), works, releases the stage. Its
  mainloop carries the recurrent state in registers; the epilogue stores outputs.

Two kernels are built on it, and their consumers differ:

* `linear_attention.state_pipeline`: one consumer warpgroup per 64 value columns. All do the same,
  on columns of their own, which they load themselves.
* `delta_rule.recurrence`: each chunk has three products that depend on one another. So consumers
  have nothing but these, and one more warpgroup everything that the next state does not need:
  scores, outputs, and their stores.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.wgmma import Backend, Ref, map_refs

Chunk = jax.Array  # the index of a chunk in the order of the pipeline


class Prologue(NamedTuple):
  """Work of the producer on every chunk, for all consumers."""

  begin: Callable[[], Any]  # -> what does not change from chunk to chunk
  fetch: Callable[[Chunk], Any]  # loads vectors from GMEM, of the next chunk during each step
  # (n, what `begin` returned, what `fetch` did, wait) -> None, or a function of work that may run
  # while the consumers use the chunk. `wait()` returns when the stage is loaded.
  step: Callable[[Chunk, Any, Any, Callable[[], None]], Callable[[], None] | None]
  end: Callable[[], None]
  barrier: Ref  # on which the consumers wait, one per stage


class PipelineBarriers(NamedTuple):
  """SMEM barriers of a pipeline, one per stage."""

  loaded: Any  # arrivals: copies of a stage
  consumed: Any  # arrivals: consumers


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A ring of `num_stages` SMEM stages through which `num_chunks` chunks pass."""

  num_chunks: int
  num_stages: int
  barriers: PipelineBarriers

  def slot(self, n: Chunk) -> jax.Array:
    """The stage of chunk n."""
    return lax.rem(n, self.num_stages)

  def stage(self, n: Chunk, buffers_smem: Any) -> Any:
    """The stage of chunk n of every buffer of a NamedTuple."""
    slot = self.slot(n)
    return map_refs(lambda ref: ref.at[slot], buffers_smem)

  def loaded_barrier(self, n: Chunk) -> Ref:
    """The barrier on which the copies for chunk n arrive."""
    return self.barriers.loaded.at[self.slot(n)]

  def wait_loaded(self, n: Chunk) -> None:
    """Waits until the copies for chunk n have arrived."""
    plgpu.barrier_wait(self.loaded_barrier(n))

  def release(self, n: Chunk) -> None:
    """A consumer does not read the stage of chunk n any more."""
    plgpu.barrier_arrive(self.barriers.consumed.at[self.slot(n)])

  def _wait_consumed(self, n: Chunk) -> None:
    plgpu.barrier_wait(self.barriers.consumed.at[self.slot(n)])

  def fill(self, load: Callable[[Chunk], None]) -> None:
    """Loads the first chunks, one per stage."""
    lax.fori_loop(0, self.num_stages, lambda n, _: load(n), None)  # one copy of the code

  def produce(self, load: Callable[[Chunk], None], prologue: Prologue | None = None) -> None:
    """The producer warpgroup: `load(n)` starts the copies for chunk n."""
    self.fill(load)

    def refill(n):
      self._wait_consumed(n)
      load(n + self.num_stages)

    def step(n, fetched):
      if prologue is not None:
        overlapped = prologue.step(n, fixed, fetched, lambda: self.wait_loaded(n))
        plgpu.commit_smem()
        plgpu.barrier_arrive(prologue.barrier.at[self.slot(n)])
        fetched = prologue.fetch(jnp.minimum(n + 1, self.num_chunks - 1))
        if overlapped is not None:
          overlapped()
      more = (n >= 1) & (n - 1 + self.num_stages < self.num_chunks)
      pl.when(more)(lambda: refill(n - 1))
      return fetched

    fetched = None
    if prologue is not None:
      fixed, fetched = prologue.begin(), prologue.fetch(jnp.int32(0))
    lax.fori_loop(0, self.num_chunks, step, fetched)
    if prologue is not None:
      prologue.end()
    # Drain: every consumer has released every stage before the producer exits.
    drain = lambda n, _: self._wait_consumed(n)
    lax.fori_loop(self.num_chunks - self.num_stages, self.num_chunks, drain, None)


def launch_pipeline(
  body: Callable[..., None],
  arrays: Any,
  out_type: Any,
  scratch: Any,
  *,
  grid: tuple[int, int, int],
  num_warpgroups: int,
  name: str,
  backend: Backend,
  compiler_params: plgpu.CompilerParams,
):
  """Runs `body(arrays_gmem, outs_gmem, scratch)` in every warpgroup of every CTA.

  The axes of the grid are "value" (columns), "head", "row"; `lax.axis_index("warpgroup")` is 0 for
  the producer. `name`: of the kernel in profiles.
  """
  (results,) = plgpu.kernel(
    body,
    out_type=[out_type],  # a tuple would be several results
    scratch_types=[scratch],
    grid=grid,
    grid_names=("value", "head", "row"),
    num_threads=num_warpgroups,
    thread_name="warpgroup",
    interpret=backend.interpret,
    kernel_name=name,
    compiler_params=compiler_params,
  )(arrays)
  return results
