"""Gradients inside each chunk, all chunks at once, given what the walks leave.

With S the state that enters the chunk, A the adjoint of the one that leaves it, G the cotangent of
out, x and y as in `walks.py`, m = beta y, weight_ij the decay between steps j and i:

    dP_ij = weight_ij G_i . x_j    j <= i        dL_ij = -weight_ij m_i . x_j     j < i
    dq_i  = before_i S G_i + sum_j dP_ij k_j     de_i  = -before_i S m_i + sum_j dL_ij k_j
    dk_j  = after_j A x_j + sum_i (dP_ij q_i + dL_ij e_i)      dv_i = m_i
    dbeta_i = y_i . (v_i - before_i S^T e_i) - sum_j L_ij y_i . x_j
"""

import jax.numpy as jnp

from pallas_kernels.delta_rule.tables import AFTER, BEFORE, CUMULATIVE, RATE
from pallas_kernels.linear_attention.chunk import (
  all_chunks,
  rows_to,
  same_segment,
  scores_of,
  state_of,
  steps_of,
)
from pallas_kernels.linear_attention.outputs import row_decay
from pallas_kernels.tensor_core import (
  CHUNK,
  across,
  columns_of,
  down,
  iota,
  load,
  multiply,
  rows_of,
  stage_for,
  staged,
  tile,
  turned,
)


def query_gradient(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  erase_key,  # [B, T, H, K] bfloat16, or None for k
  v,  # [B, T, H, V] bfloat16
  d_out,  # [B, T, H, V] bfloat16: G
  x,  # [B, T, H, V] bfloat16
  y,  # [B, T, H, V] bfloat16
  scores,  # [B, H, T, C] bfloat16
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
  B, T, H, K = q.shape
  C, shared = CHUNK, erase_key is None

  def chunk(at, ins, s, put):
    rows = ins["vectors"].at[at.b, at.h, at.n]
    erase = s["k" if shared else "erase_key"]
    d_scores, d_gram, gram = multiply(
      ((C, C), [(s["d_out"], turned(s["x"]))]),
      ((C, C), [(s["y"], turned(s["x"]))]),
      ((C, C), [(erase, turned(s["k"]))]),
      interpret=interpret,
    )
    mask = iota((C, C), 0) >= iota((C, C), 1)
    strictly = iota((C, C), 0) > iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = jnp.where(mask, row_decay(rows.at[CUMULATIVE]), 0.0)
    lower = jnp.where(strictly, weight, 0.0)
    rate = rows_of(rows.at[RATE])
    met = gram * lower * d_gram  # L_ij y_i . x_j
    d_rate = -jnp.sum(met, axis=1)
    if decays:
      crossing = load(s["scores"]) * d_scores - met * across(rate, (C, C))
      crossing = jnp.where(strictly, crossing, 0.0)
      put("later", jnp.sum(crossing, axis=1))
      put("earlier", jnp.sum(crossing, axis=0))
    left_q = staged(d_scores * weight, s["left q"], interpret)
    left_e = staged(d_gram * lower * across(-rate, (C, C)), s["left e"], interpret)

    from_out, from_y = multiply(
      ((C, K), [(s["d_out"], turned(s["state"]))]),
      ((C, K), [(s["y"], turned(s["state"]))]),
      interpret=interpret,
    )
    before = rows_of(rows.at[BEFORE])
    read = jnp.sum(load(erase) * from_y, axis=1)
    put("rate", d_rate - before * read + jnp.sum(load(s["y"]) * load(s["v"]), axis=1))
    if decays:
      put("before", jnp.sum(load(s["q"]) * from_out, axis=1) - rate * read)
    d_q, d_e = multiply(
      (from_out * across(before, (C, K)), [(left_q, s["k"])]),
      (from_y * across(-before * rate, (C, K)), [(left_e, s["k"])]),
      interpret=interpret,
    )
    put("q", d_q * scale)
    put("erase_key", d_e * scale)

  outputs = {"q": steps_of(q), "erase_key": steps_of(k), "rate": rows_to(B, H, T)}
  tiles = {"k": steps_of(k), "v": steps_of(v), "d_out": steps_of(d_out)}
  tiles |= {"x": steps_of(x), "y": steps_of(y), "state": state_of(states)}
  if decays:
    outputs |= {name: rows_to(B, H, T) for name in ("before", "later", "earlier")}
    tiles |= {"q": steps_of(q), "scores": scores_of(scores)}
  if not shared:
    tiles["erase_key"] = steps_of(erase_key)
  scratch = {name: stage_for(C, C, interpret) for name in ("left q", "left e")}
  scratch |= {name: tile(C, K) for name in ("out q", "out e")}
  return all_chunks(
    chunk,
    tiles,
    {"vectors": vectors, "segments": segments},
    outputs,
    scratch=scratch,
    reuse={"q": "out q", "erase_key": "out e"},
    interpret=interpret,
  )


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

  def chunk(at, ins, s, put):
    rows = ins["vectors"].at[at.b, at.h, at.n]
    erase = s["k" if erase_key is None else "erase_key"]
    mask = iota((C, C), 0) <= iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = jnp.where(mask, row_decay(rows.at[CUMULATIVE], turned=True), 0.0)
    d_scores, d_gram, from_state = multiply(
      ((C, C), [(s["x"], turned(s["d_out"]))]),
      ((C, C), [(s["x"], turned(s["y"]))]),
      ((C, K), [(s["x"], turned(s["state"]))]),
      interpret=interpret,
    )
    left_q = staged(d_scores * weight, s["left q"], interpret)
    upper = jnp.where(iota((C, C), 0) < iota((C, C), 1), weight, 0.0)
    rate = columns_of(rows.at[RATE])
    left_e = staged(d_gram * upper * down(-rate, (C, C)), s["left e"], interpret)
    after = rows_of(rows.at[AFTER])
    if decays:
      put("after", jnp.sum(load(s["k"]) * from_state, axis=1))
    (d_k,) = multiply(
      (from_state * across(after, (C, K)), [(left_q, s["q"]), (left_e, erase)]),
      interpret=interpret,
    )
    d_k = d_k * scale
    if d_erase_key is not None:
      d_k = d_k + load(s["d_erase_key"])
    put("k", d_k)
    put("v", load(s["y"]) * across(rows_of(rows.at[RATE]) * scale, (C, V)))

  outputs = {"k": steps_of(k), "v": steps_of(x)}
  if decays:
    outputs["after"] = rows_to(B, H, T)
  tiles = {"q": steps_of(q), "d_out": steps_of(d_out), "x": steps_of(x), "y": steps_of(y)}
  tiles["state"] = state_of(adjoints)
  if erase_key is not None:
    tiles["erase_key"] = steps_of(erase_key)
  if decays or erase_key is None:
    tiles["k"] = steps_of(k)
  if d_erase_key is not None:
    tiles["d_erase_key"] = steps_of(d_erase_key)
  return all_chunks(
    chunk,
    tiles,
    {"vectors": vectors, "segments": segments},
    outputs,
    scratch={name: stage_for(C, C, interpret) for name in ("left q", "left e")},
    reuse={"k": "q", "v": "x"},
    interpret=interpret,
  )
