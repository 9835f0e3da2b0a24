"""Gradients for decays per key channel, all chunks at once.

Symbols as in `scalar_gradient.py`; before, after and weight have one number per key channel.
Queries and keys are worked on in groups of 64 channels, each with dP made anew: it is one small
product, and the groups then fit many blocks of threads onto a multiprocessor.

The decay is owed what the factors in `gates.py` are: each is an exponential of a sum of log decays
of one sign, so no gradient is a difference of large numbers.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention import gates
from pallas_kernels.linear_attention.chunk import (
  all_chunks,
  channels_of,
  columns_to,
  diagonal,
  gate_scratch,
  make_gate,
  same_segment,
  scores_of,
  state_channels_of,
  state_of,
  steps_of,
)
from pallas_kernels.tensor_core import (
  CHUNK,
  GROUP,
  across,
  columns_of,
  down,
  load,
  multiply,
  rows_of,
  scaled,
  stage_for,
  staged,
  turned,
)

_SHAPE = (CHUNK, GROUP)


def query_gradient(
  q,  # [B, T, H, K] bfloat16
  k,  # [B, T, H, K] bfloat16
  v,  # [B, T, H, V] bfloat16
  d_out,  # [B, T, H, V] bfloat16: G
  d_sum,  # [B, H, T] float32: d; or None
  borders,  # [B, H, N, K, V] bfloat16: S
  entering_sum,  # [B, H, N, K] float32: z; or None
  log_decay,  # [H, K] or [B, T, H, K] float32
  bonus,  # [H, K] float32 or None
  segments,  # [B, T] int32 or None
  reach,  # [2, B, T] float32 or None
  *,
  length,
  scale,
  decays,
  interpret=None,
):
  """Returns {"q": dq} and, float32 and without `scale`,

  with `d_sum` "sum" [B, H, N, K], what the sum that enters each chunk is due; with a bonus "bonus"
  [B, H, N, K]; and if `decays` "log_decay", the queries' part: [B, T, H, K], or [B, H, N, K] for
  constant decays.
  """
  read_first = bonus is not None

  def chunk(at, ins, s, put):
    gate = make_gate(
      *(ins["log_decay"], s, at.b, at.h, at.n, at.channels),
      length=length,
      read_first=read_first,
      interpret=interpret,
    )
    (d_scores,) = multiply(((CHUNK, CHUNK), [(s["d_out"], turned(s["v"]))]), interpret=interpret)
    if d_sum is not None:
      d_rows = rows_of(ins["d_sum"].at[at.b, at.h, at.steps])
      d_scores = d_scores + across(d_rows, d_scores.shape)
    if segments is not None:
      d_scores = jnp.where(same_segment(ins, at), d_scores, 0.0)
    queries = lambda: load(s["q"])
    right_s = s["v"].at[:, pl.ds(0, GROUP)]  # v is not needed any more

    same_step = diagonal(d_scores, _SHAPE) * load(s["k"])
    if read_first:
      put("bonus", jnp.sum(same_step * queries(), axis=0))
      same_step = same_step * down(columns_of(ins["bonus"].at[at.h, at.channels]), _SHAPE)
    d_q = same_step
    for size, left, right in gate.meetings():
      right_s[...] = scaled(s["k"], right)
      d_met = staged(jnp.where(gates.pairs(size), d_scores, 0.0), s["left"], interpret)
      plgpu.commit_smem()
      (d_left,) = multiply((_SHAPE, [(d_met, right_s)]), interpret=interpret)
      d_left = d_left * left
      if decays:
        gate.owe(queries, d_left, size or gates.QUERIES, right_s)
      d_q = d_q + d_left
    (d_before,) = multiply((_SHAPE, [(s["d_out"], turned(s["state"]))]), interpret=interpret)
    if d_sum is not None:
      z = columns_of(ins["entering_sum"].at[at.b, at.h, at.n, at.channels])
      d_before = d_before + across(d_rows, _SHAPE) * down(z, _SHAPE)
    before = gate.before()
    if reach is not None:
      sees = rows_of(ins["reach"].at[0, at.b, at.steps])
      before = jnp.where(across(sees, _SHAPE) > 0, before, 0.0)
    d_before = d_before * before
    if d_sum is not None:
      put("sum", jnp.sum(across(d_rows, _SHAPE) * queries() * before, axis=0))
    if decays:
      gate.owe(queries, d_before, gates.BEFORE, right_s)
      put("log_decay", gate.due(queries))
    put("q", (d_q + d_before) * scale)

  (B, _, H, K), N = q.shape, q.shape[1] // CHUNK
  outputs = {"q": channels_of(q)}
  if decays:
    outputs["log_decay"] = _due(log_decay, B, H, N, K)
  if read_first:
    outputs["bonus"] = columns_to(B, H, N, K)
  if d_sum is not None:
    outputs["sum"] = columns_to(B, H, N, K)
  tiles = {"k": channels_of(k), "v": steps_of(v), "d_out": steps_of(d_out)}
  tiles["state"] = state_channels_of(borders)
  if decays or read_first or d_sum is not None:
    tiles["q"] = channels_of(q)
  vectors = {"d_sum": d_sum, "entering_sum": entering_sum, "log_decay": log_decay, "bonus": bonus}
  vectors |= {"segments": segments, "reach": reach}
  return _run(chunk, tiles, vectors, outputs, {"q": "k"}, K, interpret)


def key_gradient(
  q,
  k,
  v,
  d_out,
  d_sum,
  adjoints,  # [B, H, N, K, V] bfloat16: A
  leaving_sum,  # [B, H, N, K] float32: y; or None
  log_decay,
  bonus,
  segments,
  reach,
  d_total,  # [B, H, N, K] float32: of the log decay of whole chunks, without `scale`; or None
  d_log_decay,  # [B, T, H, K] float32: the queries' part, for decays a step; or None
  *,
  length,
  scale,
  decays,
  interpret=None,
):
  """Returns {"k": dk} and, if `decays`, "log_decay" without `scale`: for decays a step the whole
  [B, T, H, K], for constant ones the keys' part [B, H, N, K].
  """
  per_step = log_decay.ndim == 4

  def chunk(at, ins, s, put):
    gate = make_gate(
      *(ins["log_decay"], s, at.b, at.h, at.n, at.channels),
      length=length,
      read_first=bonus is not None,
      interpret=interpret,
    )
    # Rows are the steps j: dP is made transposed.
    (d_scores,) = multiply(((CHUNK, CHUNK), [(s["v"], turned(s["d_out"]))]), interpret=interpret)
    if d_sum is not None:
      d_columns = columns_of(ins["d_sum"].at[at.b, at.h, at.steps])
      d_scores = d_scores + down(d_columns, d_scores.shape)
    if segments is not None:
      d_scores = jnp.where(same_segment(ins, at), d_scores, 0.0)
    keys = lambda: load(s["k"])
    right_s = s["d_out"].at[:, pl.ds(0, GROUP)]  # d_out is not needed any more
    if decays and per_step:
      ref = ins["d_log_decay"].at[at.b, at.steps, at.h, at.channels]
      due = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
      d_whole = columns_of(ins["d_total"].at[at.b, at.h, at.n, at.channels])
      gate.start_due(due + down(d_whole, _SHAPE))

    d_k = diagonal(d_scores, _SHAPE) * load(s["q"])
    if bonus is not None:
      d_k = d_k * down(columns_of(ins["bonus"].at[at.h, at.channels]), _SHAPE)
    for size, left, right in gate.meetings():
      right_s[...] = scaled(s["q"], left)
      met = gates.pairs(size, turned=True)
      d_met = staged(jnp.where(met, d_scores, 0.0), s["left"], interpret)
      plgpu.commit_smem()
      (d_right,) = multiply((_SHAPE, [(d_met, right_s)]), interpret=interpret)
      d_right = d_right * right
      if decays:
        gate.owe(keys, d_right, size or gates.KEYS, right_s)
      d_k = d_k + d_right
    (d_after,) = multiply((_SHAPE, [(s["v"], turned(s["state"]))]), interpret=interpret)
    if d_sum is not None:
      y = columns_of(ins["leaving_sum"].at[at.b, at.h, at.n, at.channels])
      d_after = d_after + down(y, _SHAPE)
    d_after = d_after * gate.after()
    if reach is not None:
      reaches = rows_of(ins["reach"].at[1, at.b, at.steps])
      d_after = jnp.where(across(reaches, _SHAPE) > 0, d_after, 0.0)
    if decays:
      gate.owe(keys, d_after, gates.AFTER, right_s)
      put("log_decay", gate.due(keys))
    put("k", (d_k + d_after) * scale)

  (B, _, H, K), N = q.shape, q.shape[1] // CHUNK
  outputs = {"k": channels_of(k)}
  if decays:
    outputs["log_decay"] = _due(log_decay, B, H, N, K)
  tiles = {"q": channels_of(q), "v": steps_of(v), "d_out": steps_of(d_out)}
  tiles["state"] = state_channels_of(adjoints)
  if decays:
    tiles["k"] = channels_of(k)
  vectors = {"d_sum": d_sum, "leaving_sum": leaving_sum, "log_decay": log_decay, "bonus": bonus}
  vectors |= {"segments": segments, "reach": reach}
  if decays and per_step:  # of constant decays the parts are summed outside
    vectors |= {"d_total": d_total, "d_log_decay": d_log_decay}
  return _run(chunk, tiles, vectors, outputs, {"k": "q"}, K, interpret)


def value_gradient(
  k,  # [B, T, H, K] bfloat16, decayed to the chunk's end
  d_out,  # [B, T, H, V] bfloat16: G
  scores,  # [B, H, T, C] bfloat16
  adjoints,  # [B, H, N, K, V] bfloat16: A
  *,
  scale,
  interpret=None,
):
  """Returns dv [B, T, H, V]."""

  def chunk(at, ins, s, put):
    del at, ins
    shape = s["d_out"].shape
    products = [(turned(s["scores"]), s["d_out"]), (s["k"], s["state"])]
    (d_v,) = multiply((shape, products), interpret=interpret)
    put("v", d_v * scale)

  tiles = {"k": steps_of(k), "d_out": steps_of(d_out), "scores": scores_of(scores)}
  tiles["state"] = state_of(adjoints)
  outputs = {"v": steps_of(d_out)}
  return all_chunks(chunk, tiles, {}, outputs, reuse={"v": "d_out"}, interpret=interpret)["v"]


def _due(log_decay, B, H, N, K):
  return channels_of(log_decay) if log_decay.ndim == 4 else columns_to(B, H, N, K)


def _run(chunk, tiles, vectors, outputs, reuse, width, interpret):
  scratch = {"left": stage_for(CHUNK, CHUNK, interpret), **gate_scratch(vectors["log_decay"])}
  return all_chunks(
    *(chunk, tiles, vectors, outputs),
    groups=width // GROUP,
    scratch=scratch,
    reuse=reuse,
    interpret=interpret,
  )
