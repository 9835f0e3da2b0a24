"""Gradients for decays that all key channels share, all chunks at once.

With G the cotangent of S^T q (and d that of the normaliser's sum), S and z the state and the sum
that enter the chunk, A and y the adjoints of those that leave it, weight_ij the decay between steps
j and i:

    dP_ij = G_i . v_j + d_i                                              i >= j
    dq_i  = before_i (S G_i + d_i z) + sum_j weight_ij dP_ij k_j
    dk_j  = after_j (A v_j + y)      + sum_i weight_ij dP_ij q_i
    dv_j  = after_j A^T k_j          + sum_i weight_ij (q_i . k_j) G_i
"""

import jax.numpy as jnp

from pallas_kernels.linear_attention.chunk import (
  all_chunks,
  rows_to,
  same_segment,
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
  turned,
)


def query_gradient(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  d_out,  # [B, T, H, V] bfloat16: G
  d_sum,  # [B, H, T] float32: d; or None
  borders,  # [B, H, N, K, V] bfloat16: S
  entering_sum,  # [B, H, N, K] float32: z; or None
  cumulative,  # [B|1, H, T|C] float32
  before,  # [B|1, H, T|C] float32
  segments,  # [B, T] int32 or None
  *,
  scale,
  decays,
  interpret=None,
):
  """Returns {"q": dq} and, if `decays`, what the decay is due, without `scale`, each [B, H, T]
  float32:

  "before" (for `before`), "later" and "earlier" (for `cumulative` at i and, negative, at j).
  """

  def chunk(at, ins, s, wait, put):
    C, K = CHUNK, q.shape[-1]
    mask = iota((C, C), 0) >= iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = row_decay(at.rows(ins["cumulative"]))
    before_rows = rows_of(at.rows(ins["before"]))
    if d_sum is not None:
      d_rows = rows_of(ins["d_sum"].at[at.b, at.h, at.steps])
      z = columns_of(ins["entering_sum"].at[at.b, at.h, at.n])
    wait()

    parts = [((C, C), [(s["d_out"], turned(s["v"]))]), ((C, K), [(s["d_out"], turned(s["state"]))])]
    if decays:
      parts.append(((C, C), [(s["q"], turned(s["k"]))]))
    d_scores, from_state, *scores = multiply(*parts, interpret=interpret)
    if d_sum is not None:
      d_scores = d_scores + across(d_rows, (C, C))
      from_state = from_state + across(d_rows, (C, K)) * down(z, (C, K))
    d_scores = jnp.where(mask, d_scores * weight, 0.0)
    if decays:
      strictly = iota((C, C), 0) > iota((C, C), 1)
      crossing = jnp.where(strictly, scores[0] * d_scores, 0.0)
      put("later", jnp.sum(crossing, axis=1))
      put("earlier", jnp.sum(crossing, axis=0))
      put("before", jnp.sum(load(s["q"]) * from_state, axis=1))
    left = staged(d_scores, s["left"], interpret)
    (d_q,) = multiply(
      (from_state * across(before_rows, (C, K)), [(left, s["k"])]), interpret=interpret
    )
    put("q", d_q * scale)

  B, T, H, _ = q.shape
  outputs = {"q": steps_of(q)}
  tiles = {"k": steps_of(k), "v": steps_of(v), "d_out": steps_of(d_out), "state": state_of(borders)}
  if decays:
    outputs |= {name: rows_to(B, H, T) for name in ("before", "later", "earlier")}
    tiles["q"] = steps_of(q)
  vectors = {"cumulative": cumulative, "before": before, "d_sum": d_sum}
  vectors |= {"entering_sum": entering_sum, "segments": segments}
  scratch = {"left": stage_for(CHUNK, CHUNK, interpret)}
  return all_chunks(
    chunk, tiles, vectors, outputs, scratch=scratch, reuse={"q": "k"}, interpret=interpret
  )


def key_value_gradient(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  d_out,  # [B, T, H, V] bfloat16: G
  d_sum,  # [B, H, T] float32: d; or None
  adjoints,  # [B, H, N, K, V] bfloat16: A
  leaving_sum,  # [B, H, N, K] float32: y; or None
  cumulative,  # [B|1, H, T|C] float32
  after,  # [B|1, H, T|C] float32
  segments,  # [B, T] int32 or None
  *,
  scale,
  decays,
  interpret=None,
):
  """Returns {"k": dk, "v": dv} and, if `decays`, "after" [B, H, T] float32, without `scale`.

  Rows are the steps j here: scores and dP are made transposed.
  """

  def chunk(at, ins, s, wait, put):
    C, K, V = CHUNK, q.shape[-1], v.shape[-1]
    mask = iota((C, C), 0) <= iota((C, C), 1)
    if segments is not None:
      mask = mask & same_segment(ins, at)
    weight = jnp.where(mask, row_decay(at.rows(ins["cumulative"]), turned=True), 0.0)
    after_rows = rows_of(at.rows(ins["after"]))
    if d_sum is not None:
      d_columns = columns_of(ins["d_sum"].at[at.b, at.h, at.steps])
      y = columns_of(ins["leaving_sum"].at[at.b, at.h, at.n])
    wait()

    scores, from_state = multiply(
      ((C, C), [(s["k"], turned(s["q"]))]),
      ((C, V), [(s["k"], s["state"])]),
      interpret=interpret,
    )
    left = staged(scores * weight, s["left"], interpret)
    (d_v,) = multiply(
      (from_state * across(after_rows, (C, V)), [(left, s["d_out"])]), interpret=interpret
    )
    d_scores, from_state = multiply(
      ((C, C), [(s["v"], turned(s["d_out"]))]),
      ((C, K), [(s["v"], turned(s["state"]))]),
      interpret=interpret,
    )
    put("v", d_v * scale)
    if d_sum is not None:
      d_scores = d_scores + down(d_columns, (C, C))
      from_state = from_state + down(y, (C, K))
    if decays:
      put("after", jnp.sum(load(s["k"]) * from_state, axis=1))
    left = staged(d_scores * weight, s["left"], interpret)
    (d_k,) = multiply(
      (from_state * across(after_rows, (C, K)), [(left, s["q"])]), interpret=interpret
    )
    put("k", d_k * scale)

  B, T, H, _ = q.shape
  outputs = {"k": steps_of(k), "v": steps_of(v)}
  if decays:
    outputs["after"] = rows_to(B, H, T)
  tiles = {"q": steps_of(q), "k": steps_of(k), "v": steps_of(v), "d_out": steps_of(d_out)}
  tiles["state"] = state_of(adjoints)
  vectors = {"cumulative": cumulative, "after": after, "d_sum": d_sum}
  vectors |= {"leaving_sum": leaving_sum, "segments": segments}
  scratch = {"left": stage_for(CHUNK, CHUNK, interpret)}
  reuse = {"k": "k", "v": "v"}
  return all_chunks(
    chunk, tiles, vectors, outputs, scratch=scratch, reuse=reuse, interpret=interpret
  )
