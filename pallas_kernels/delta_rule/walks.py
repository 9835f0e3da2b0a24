"""The state along the chunks, in registers: forwards with the outputs, backwards for its adjoint.

With S the state that enters a chunk, b = before, a = after, g = the chunk's decay:

    x  = inverse beta (v - b e S)     out  = b q S + scores x     S' = g S + (a k)^T x

and with A the adjoint of S', G the cotangent of out, the transposes of these lines:

    y  = inverse^T (a k A + scores^T G)     A' = g A + (b q)^T G - (b e)^T (beta y)

where beta y is the gradient of v. A block of threads has some columns of values of one head. Three
products depend on one another in each chunk, and little else may stand between them. So the block
has three groups of threads: one copies inputs to shared memory, one carries the state along, and
one does everything that the next state does not need.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.tables import AFTER, BEFORE, DECAY, RATE, ROWS
from pallas_kernels.tensor_core import (
  CHUNK,
  COMPILER_PARAMS,
  across,
  in_32_bits,
  load,
  multiply,
  rows_of,
  turned,
  zeros,
)


def forward_walk(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  v,  # [B, T, H, V] bfloat16
  inverse,  # [B, H, T, C] bfloat16
  scores,  # [B, H, T, C] bfloat16
  vectors,  # [B, H, N, ROWS, C] float32
  initial,  # [B, H, K, V] float32 or None
  *,
  scale,
  for_gradient,
  value_tile,
  cluster,
  stages,
  slots,
  interpret=None,
):
  """Returns {"out" [B, T, H, V] bfloat16, "last" [B, H, K, V] float32} and, `for_gradient`, the
  states that enter the chunks, "states" [B, H, N, K, V], and "x" [B, T, H, V], bfloat16."""

  def carry(s, state, tiles, ready):
    shape = s["v"].shape
    decay = s["vectors"][DECAY, 0]
    (old,) = multiply((shape, [(s["erase_key"], tiles["states"])]), interpret=interpret)
    right = (load(s["v"]) - rows(s, BEFORE, shape) * old) * rows(s, RATE, shape)
    tiles["right"][...] = right.astype(jnp.bfloat16)
    plgpu.commit_smem()
    (x,) = multiply((shape, [(s["inverse"], tiles["right"])]), interpret=interpret)
    tiles["x"][...] = x.astype(jnp.bfloat16)
    tiles["left"][...] = (x * rows(s, AFTER, shape)).astype(jnp.bfloat16)
    ready("x")
    (state,) = multiply((state * decay, [(turned(s["k"]), tiles["left"])]), interpret=interpret)
    return state

  def assist(s, tiles, wait):
    shape = s["v"].shape
    wait("states")
    (out,) = multiply((shape, [(s["q"], tiles["states"])]), interpret=interpret)
    out = out * rows(s, BEFORE, shape)
    wait("x")
    (out,) = multiply((out, [(s["scores"], tiles["x"])]), interpret=interpret)
    tiles["out"][...] = (out * scale).astype(jnp.bfloat16)

  inputs = {"q": q, "k": k, "v": v, "inverse": inverse, "scores": scores, "vectors": vectors}
  return _walk(
    carry,
    assist,
    inputs if erase_key is None else inputs | {"erase_key": erase_key},
    initial,
    outputs=("out", "states", "x") if for_gradient else ("out",),
    handed=("states", "x"),
    scratch=("right", "left"),
    value_tile=value_tile,
    cluster=cluster,
    stages=stages,
    slots=slots,
    reverse=False,
    interpret=interpret,
  )


def backward_walk(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  d_out,  # [B, T, H, V] bfloat16
  inverse,  # [B, H, T, C] bfloat16
  scores,  # [B, H, T, C] bfloat16
  vectors,  # [B, H, N, ROWS, C] float32
  d_last,  # [B, H, K, V] float32 or None
  *,
  value_tile,
  cluster,
  stages,
  slots,
  interpret=None,
):
  """Returns {"y" [B, T, H, V] bfloat16, "last" [B, H, K, V] float32, the adjoint of the first
  state, "states" [B, H, N, K, V] bfloat16, the adjoints of the states that leave the chunks}.
  """

  def carry(s, adjoint, tiles, ready):
    shape = s["v"].shape
    decay = s["vectors"][DECAY, 0]
    from_state, from_out = multiply(
      (shape, [(s["k"], tiles["states"])]),
      (shape, [(turned(s["scores"]), s["v"])]),
      interpret=interpret,
    )
    tiles["right"][...] = (from_state * rows(s, AFTER, shape) + from_out).astype(jnp.bfloat16)
    before = rows(s, BEFORE, shape)
    tiles["cotangent"][...] = (load(s["v"]) * before).astype(jnp.bfloat16)
    plgpu.commit_smem()
    (y,) = multiply((shape, [(turned(s["inverse"]), tiles["right"])]), interpret=interpret)
    tiles["y"][...] = y.astype(jnp.bfloat16)
    tiles["left"][...] = (y * (-before * rows(s, RATE, shape))).astype(jnp.bfloat16)
    ready("y")
    products = [(turned(s["q"]), tiles["cotangent"]), (turned(s["erase_key"]), tiles["left"])]
    (adjoint,) = multiply((adjoint * decay, products), interpret=interpret)
    return adjoint

  def assist(s, tiles, wait):
    del s, tiles
    wait("states")
    wait("y")

  inputs = {"q": q, "k": k, "v": d_out, "inverse": inverse, "scores": scores, "vectors": vectors}
  return _walk(
    carry,
    assist,
    inputs if erase_key is None else inputs | {"erase_key": erase_key},
    d_last,
    outputs=("states", "y"),
    handed=("states", "y"),
    scratch=("right", "left", "cotangent"),
    value_tile=value_tile,
    cluster=cluster,
    stages=stages,
    slots=slots,
    reverse=True,
    interpret=interpret,
  )


def rows(s, row, shape):
  """A row of the chunk's table, along the rows of a tile."""
  return across(rows_of(s["vectors"].at[row]), shape)


@in_32_bits
def _walk(
  carry,
  assist,
  inputs,
  initial,
  *,
  outputs,
  handed,
  scratch,
  value_tile,
  cluster,
  stages,
  slots,
  reverse,
  interpret,
):
  """Walks along the chunks of each sequence and head.

  Args:
    carry: `(inputs, state, tiles, ready) -> next state` of a chunk; it finds the state in bfloat16
      in tiles["states"], and calls `ready(name)` when it has filled another tile of `handed`.
    assist: `(inputs, tiles, wait)` of a chunk, run by other threads; `wait(name)` waits for a tile
      of `handed`.
    outputs: tiles that are copied to device memory when `assist` is through. "states" is
      [K, columns], the others [C, columns].
    scratch: tiles of `carry` alone.
    value_tile: columns of values in a block.
    cluster: blocks of neighbouring columns that get their common inputs by one copy.
    stages, slots: how many chunks have their inputs, their outputs in shared memory.

  Returns the outputs by name, and "last" [B, H, K, V] float32, the last state.
  """
  (B, T, H, K), V = inputs["q"].shape, inputs["v"].shape[-1]
  C, N, BV = CHUNK, T // CHUNK, value_tile
  stages = min(stages, N)
  # Both operands of a product have the same swizzle, which the narrower one bounds.
  width = min(BV, 64)
  transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width))
  tile = lambda *shape: plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)
  shape_of = lambda name: (K, BV) if name == "states" else (C, BV)
  out_type = {"last": jax.ShapeDtypeStruct((B, H, K, V), jnp.float32)}
  for name in outputs:
    shape = (B, H, N, K, V) if name == "states" else (B, T, H, V)
    out_type[name] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  blocks = {"v": (C, BV), "inverse": (C, C), "scores": (C, C)}
  blocks = {name: blocks.get(name, (C, K)) for name in inputs}
  staged = {name: tile(stages, *shape) for name, shape in blocks.items()}
  staged["vectors"] = plgpu.SMEM((stages, ROWS, C), jnp.float32)
  tiles = {name: tile(slots, *shape_of(name)) for name in dict.fromkeys((*handed, *outputs))}
  if cluster > 1:
    axes = ("neighbour",)
    used = plgpu.ClusterBarrier(collective_axes=axes, num_arrivals=2, num_barriers=stages)
  else:
    used = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
  scratch_types = {
    "staged": staged,
    "tiles": tiles,
    "scratch": {name: tile(*shape_of(name)) for name in scratch},
    "loaded": plgpu.Barrier(num_arrivals=len(inputs), num_barriers=stages),
    "used": used,
    "ready": {name: plgpu.Barrier(num_barriers=slots) for name in handed},
    "sent": plgpu.Barrier(num_barriers=slots),
  }

  def body(refs, initial_ref, outs, scr):
    b, h = lax.axis_index("row"), lax.axis_index("head")
    tile_index = lax.axis_index("value") * cluster + lax.axis_index("neighbour")
    values = pl.ds(tile_index * BV, BV)
    role = lax.axis_index("role")
    chunk_of = lambda n: N - 1 - n if reverse else n
    stage_of, slot_of = lambda n: lax.rem(n, stages), lambda n: lax.rem(n, slots)

    def of_chunk(n):
      staged = {name: ref.at[stage_of(n)] for name, ref in scr["staged"].items()}
      return {"erase_key": staged["k"]} | staged

    def tiles_of(n):
      return {name: ref.at[slot_of(n)] for name, ref in scr["tiles"].items()}

    @pl.when(role == 0)
    def _copy():
      def step(n, _):
        stage = stage_of(n)
        pl.when(n >= stages)(lambda: plgpu.barrier_wait(scr["used"].at[stage]))
        steps = pl.ds(chunk_of(n) * C, C)
        for name, ref in refs.items():
          if name == "vectors":
            source = ref.at[b, h, chunk_of(n)]
          elif name == "v":
            source = ref.at[b, steps, h, values]
          elif name in ("inverse", "scores"):
            source = ref.at[b, h, steps]
          else:
            source = ref.at[b, steps, h]
          target = scr["staged"][name].at[stage]
          whole = name in ("v", "vectors") or cluster == 1
          to_all = {} if whole else {"collective_axes": "neighbour"}
          plgpu.copy_gmem_to_smem(source, target, scr["loaded"].at[stage], **to_all)

      lax.fori_loop(0, N, step, None)
      for n in range(N, N + stages):  # until nobody uses the barriers
        plgpu.barrier_wait(scr["used"].at[n % stages])

    @pl.when(role == 1)
    def _carry():
      def step(n, state):
        tiles = tiles_of(n)

        def ready(name):
          plgpu.commit_smem()
          plgpu.barrier_arrive(scr["ready"][name].at[slot_of(n)])

        pl.when(n >= slots)(lambda: plgpu.barrier_wait(scr["sent"].at[slot_of(n)]))
        tiles["states"][...] = state.astype(jnp.bfloat16)
        ready("states")
        plgpu.barrier_wait(scr["loaded"].at[stage_of(n)])
        state = carry(of_chunk(n), state, tiles | scr["scratch"], ready)
        plgpu.barrier_arrive(scr["used"].at[stage_of(n)])
        return state

      start = zeros(K, BV)
      if initial_ref is not None:
        source = initial_ref.at[b, h, :, values]
        start = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
      last = lax.fori_loop(0, N, step, start)
      outs["last"].at[b, h, :, values][...] = last
      for n in range(max(N, slots), N - 1 + slots):
        plgpu.barrier_wait(scr["sent"].at[n % slots])

    @pl.when(role == 2)
    def _assist():
      def step(n, _):
        tiles = tiles_of(n)
        plgpu.barrier_wait(scr["loaded"].at[stage_of(n)])
        wait = lambda name: plgpu.barrier_wait(scr["ready"][name].at[slot_of(n)])
        assist(of_chunk(n), tiles, wait)
        plgpu.commit_smem()
        plgpu.barrier_arrive(scr["used"].at[stage_of(n)])
        for name in outputs:
          if name == "states":
            target = outs[name].at[b, h, chunk_of(n), :, values]
          else:
            target = outs[name].at[b, pl.ds(chunk_of(n) * C, C), h, values]
          plgpu.copy_smem_to_gmem(tiles[name], target, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        pl.when(n >= 1)(lambda: plgpu.barrier_arrive(scr["sent"].at[slot_of(n - 1)]))

      lax.fori_loop(0, N, step, None)
      plgpu.wait_smem_to_gmem(0)

  kernel = lambda body: plgpu.kernel(
    body,
    out_type=out_type,
    scratch_types=[scratch_types],
    grid=(V // BV // cluster, H, B),
    grid_names=("value", "head", "row"),
    cluster=(cluster,),
    cluster_names=("neighbour",),
    num_threads=3,
    thread_name="role",
    interpret=interpret,
    compiler_params=COMPILER_PARAMS,
  )
  if initial is None:
    return kernel(lambda refs, outs, scr: body(refs, None, outs, scr))(inputs)
  return kernel(body)(inputs, initial)
