"""Gradients inside each chunk, all chunks at once, given what the walks leave.

With S the state that enters the chunk, A the adjoint of the one that leaves it, G the cotangent of
out, x and y as in `walks.py`, m = beta y, weight_ij the decay between steps j and i:

    dP_ij = weight_ij G_i . x_j    j <= i        dL_ij = -weight_ij m_i . x_j     j < i
    dq_i  = before_i S G_i + sum_j dP_ij k_j     de_i  = -before_i S m_i + sum_j dL_ij k_j
    dk_j  = after_j A x_j + sum_i (dP_ij q_i + dL_ij e_i)      dv_i = m_i
    dbeta_i = y_i . (v_i - before_i S^T e_i) - sum_j L_ij y_i . x_j

Two blocks of threads are to share a multiprocessor and its memory. So what is needed late is copied
late, to where something is no longer needed, and results replace arguments.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.delta_rule.systems import send, table, vectors_scratch
from pallas_kernels.delta_rule.tables import AFTER, BEFORE, CUMULATIVE, RATE
from pallas_kernels.linear_attention.chunk import each_chunk, fetch, same_segment
from pallas_kernels.linear_attention.outputs import row_decay
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
  stage_for,
  staged,
  store_anywhere,
  tile,
  turned,
)


@in_32_bits
def query_gradient(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  v,  # [B, T, H, V] bfloat16
  d_out,  # [B, T, H, V] bfloat16: G
  x,  # [B, T, H, V] bfloat16
  y,  # [B, T, H, V] bfloat16
  states,  # [B, H, N, K, V] bfloat16: S
  vectors,  # [B, H, N, ROWS, C] float32
  segments,  # [B, T] int32 or None
  *,
  scale,
  decays,
  interpret=None,
):
  """Returns {"q": dq, "erase_key": de}, [B, T, H, K] bfloat16, and, without `scale`, [B, H, T]
  float32: "rate" (for beta) and, if `decays`, "before", "later" and "earlier" (for CUMULATIVE at i
  and, negative, at j).
  """
  (B, T, H, K), V = q.shape, v.shape[-1]
  C, shared = CHUNK, erase_key is None
  groups = [pl.ds(start, GROUP) for start in range(0, K, GROUP)]

  def body(at, ins, outs, s):
    steps = {name: (ins[name].at[at.b, at.steps, at.h], s[name]) for name in tiles}
    state_of = lambda channels: ins["states"].at[at.b, at.h, at.n, channels]
    fetch(steps | {"state": (state_of(groups[0]), s["state"])} | table(ins, s, at), s["arrived"])
    rows = s["vectors"]
    erase = s["k" if shared else "erase_key"]
    strictly = iota((C, C), 0) > iota((C, C), 1)
    mask = iota((C, C), 0) >= iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = jnp.where(mask, row_decay(rows.at[CUMULATIVE]), 0.0)
    rate, before = rows_of(rows.at[RATE]), rows_of(rows.at[BEFORE])
    put = lambda name, value: store_anywhere(outs[name].at[at.b, at.h, at.steps], value)

    products = [((C, C), [(s["d_out"], turned(s["x"]))])]
    if decays:
      products.append(((C, C), [(s["q"], turned(s["k"]))]))
    d_scores, *scores = multiply(*products, interpret=interpret)
    d_scores = d_scores * weight
    left_q = staged(d_scores, s["left q"], interpret)
    gram, d_gram = multiply(
      ((C, C), [(erase, turned(s["k"]))]),
      ((C, C), [(s["y"], turned(s["x"]))]),
      interpret=interpret,
    )
    for channels in groups[1:]:
      plgpu.copy_gmem_to_smem(state_of(channels), s["x"], s["later"].at[0])
    d_gram = jnp.where(strictly, d_gram * weight, 0.0)
    met = gram * d_gram  # L_ij y_i . x_j
    d_rate = -jnp.sum(met, axis=1)
    if decays:
      crossing = jnp.where(strictly, scores[0] * d_scores, 0.0) - met * across(rate, (C, C))
      put("later", jnp.sum(crossing, axis=1))
      put("earlier", jnp.sum(crossing, axis=0))
    left_e = staged(d_gram * across(-rate, (C, C)), s["left e"], interpret)

    read = d_before = None
    add = lambda sum, value: value if sum is None else sum + value
    shape = (C, GROUP)
    for group, channels in enumerate(groups):
      if group:
        plgpu.barrier_wait(s["later"].at[0])
      state = turned(s["x" if group else "state"])
      from_out, from_y = multiply(
        (shape, [(s["d_out"], state)]), (shape, [(s["y"], state)]), interpret=interpret
      )
      if group == len(groups) - 1:
        plgpu.copy_gmem_to_smem(ins["v"].at[at.b, at.steps, at.h], s["d_out"], s["later"].at[1])
      q_group, k_group = s["q"].at[:, channels], s["k"].at[:, channels]
      read = add(read, jnp.sum(load(erase.at[:, channels]) * from_y, axis=1))
      if decays:
        d_before = add(d_before, jnp.sum(load(q_group) * from_out, axis=1))
      d_q, d_e = multiply(
        (from_out * across(before, shape), [(left_q, k_group)]),
        (from_y * across(-before * rate, shape), [(left_e, k_group)]),
        interpret=interpret,
      )
      q_group[...] = (d_q * scale).astype(jnp.bfloat16)
      k_group[...] = (d_e * scale).astype(jnp.bfloat16)
    if decays:
      put("before", d_before - rate * read)
    plgpu.barrier_wait(s["later"].at[1])
    put("rate", d_rate - before * read + jnp.sum(load(s["y"]) * load(s["d_out"]), axis=1))
    results = {"q": s["q"], "erase_key": s["k"]}
    send([(source, outs[n].at[at.b, at.steps, at.h]) for n, source in results.items()])

  tiles = {"k": k, "d_out": d_out, "x": x, "y": y}
  if decays:
    tiles["q"] = q
  if not shared:
    tiles["erase_key"] = erase_key
  scratch = {name: tile(C, array.shape[-1]) for name, array in tiles.items()}
  scratch |= {"q": tile(C, K), "state": tile(GROUP, V), "vectors": vectors_scratch()}
  scratch |= {name: stage_for(C, C, interpret) for name in ("left q", "left e")}
  scratch["arrived"] = plgpu.Barrier(num_barriers=len(tiles) + 2)
  scratch["later"] = plgpu.Barrier(num_barriers=2)
  names = ("rate", "before", "later", "earlier") if decays else ("rate",)
  out_type = {name: jax.ShapeDtypeStruct(k.shape, k.dtype) for name in ("q", "erase_key")}
  out_type |= {name: jax.ShapeDtypeStruct((B, H, T), jnp.float32) for name in names}
  inputs = tiles | {"v": v, "states": states, "vectors": vectors}
  inputs |= {} if segments is None else {"segments": segments}
  sizes = (1, T // C, H, B)
  return each_chunk(body, inputs, out_type, scratch, sizes=sizes, interpret=interpret)


@in_32_bits
def key_value_gradient(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  d_out,  # [B, T, H, V] bfloat16: G
  x,  # [B, T, H, V] bfloat16
  y,  # [B, T, H, V] bfloat16
  d_erase_key,  # [B, T, H, K] bfloat16, to be added to dk; or None
  adjoints,  # [B, H, N, K, V] bfloat16: A
  vectors,  # [B, H, N, ROWS, C] float32
  segments,  # [B, T] int32 or None
  *,
  scale,
  decays,
  interpret=None,
):
  """Returns {"k": dk, "v": dv} and, if `decays`, "after" [B, H, T] float32, without `scale`.

  Rows are the steps j here: scores and dP are made transposed.
  """
  (B, T, H, K), V = q.shape, x.shape[-1]
  C = CHUNK
  groups = [pl.ds(start, GROUP) for start in range(0, K, GROUP)]

  def body(at, ins, outs, s):
    steps = {name: (ins[name].at[at.b, at.steps, at.h], s[name]) for name in tiles}
    state_of = lambda channels: ins["adjoints"].at[at.b, at.h, at.n, channels]
    fetch(steps | {"state": (state_of(groups[0]), s["state"])} | table(ins, s, at), s["arrived"])
    rows = s["vectors"]
    erase = s["k" if erase_key is None else "erase_key"]
    mask = iota((C, C), 0) <= iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = jnp.where(mask, row_decay(rows.at[CUMULATIVE], turned=True), 0.0)
    d_scores, d_gram = multiply(
      ((C, C), [(s["x"], turned(s["d_out"]))]),
      ((C, C), [(s["x"], turned(s["y"]))]),
      interpret=interpret,
    )
    for channels in groups[1:]:
      plgpu.copy_gmem_to_smem(state_of(channels), s["d_out"], s["later"])
    left_q = staged(d_scores * weight, s["left q"], interpret)
    upper = jnp.where(iota((C, C), 0) < iota((C, C), 1), weight, 0.0)
    rate = columns_of(rows.at[RATE])
    left_e = staged(d_gram * upper * down(-rate, (C, C)), s["left e"], interpret)
    after = rows_of(rows.at[AFTER])
    d_after = None
    shape = (C, GROUP)
    for group, channels in enumerate(groups):
      if group:
        plgpu.barrier_wait(s["later"])
      state = turned(s["d_out" if group else "state"])
      (from_state,) = multiply((shape, [(s["x"], state)]), interpret=interpret)
      if decays:
        added = jnp.sum(load(s["k"].at[:, channels]) * from_state, axis=1)
        d_after = added if d_after is None else d_after + added
      q_group = s["q"].at[:, channels]
      products = [(left_q, q_group), (left_e, erase.at[:, channels])]
      (d_k,) = multiply((from_state * across(after, shape), products), interpret=interpret)
      d_k = d_k * scale
      if d_erase_key is not None:
        d_k = d_k + load(s["d_erase_key"].at[:, channels])
      q_group[...] = d_k.astype(jnp.bfloat16)
    if decays:
      store_anywhere(outs["after"].at[at.b, at.h, at.steps], d_after)
    d_v = load(s["y"]) * across(rows_of(rows.at[RATE]) * scale, (C, V))
    s["y"][...] = d_v.astype(jnp.bfloat16)
    results = {"k": s["q"], "v": s["y"]}
    send([(source, outs[n].at[at.b, at.steps, at.h]) for n, source in results.items()])

  tiles = {"q": q, "d_out": d_out, "x": x, "y": y}
  if decays or erase_key is None:
    tiles["k"] = k
  if erase_key is not None:
    tiles["erase_key"] = erase_key
  if d_erase_key is not None:
    tiles["d_erase_key"] = d_erase_key
  scratch = {name: tile(C, array.shape[-1]) for name, array in tiles.items()}
  scratch |= {"state": tile(GROUP, V), "vectors": vectors_scratch()}
  scratch |= {name: stage_for(C, C, interpret) for name in ("left q", "left e")}
  scratch["arrived"] = plgpu.Barrier(num_barriers=len(tiles) + 2)
  scratch["later"] = plgpu.Barrier()
  out_type = {"k": jax.ShapeDtypeStruct(k.shape, k.dtype)}
  out_type["v"] = jax.ShapeDtypeStruct(x.shape, x.dtype)
  if decays:
    out_type["after"] = jax.ShapeDtypeStruct((B, H, T), jnp.float32)
  inputs = tiles | {"adjoints": adjoints, "vectors": vectors}
  inputs |= {} if segments is None else {"segments": segments}
  sizes = (1, T // C, H, B)
  return each_chunk(body, inputs, out_type, scratch, sizes=sizes, interpret=interpret)
