"""Scores inside each chunk when the decay differs from one key channel to the next.

    scores_ij = sum_k q_ik k_jk exp(sum of the log decays of channel k over the steps between)

All chunks at once, one block of threads for each. Also returned: the queries decayed from the
chunk's start, the keys decayed to its end, which `outputs.gated_outputs` needs.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention import gates
from pallas_kernels.linear_attention.chunk import (
  each_chunk,
  fetch,
  gate_scratch,
  make_gate,
  same_segment,
  send,
)
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
  scaled,
  stage_for,
  staged,
  tile,
  turned,
)


@in_32_bits
def chunk_scores(
  q,  # [B, T, H, K] bfloat16, T a multiple of the chunk
  k,  # [B, T, H, K] bfloat16
  log_decay,  # [H, K] or [B, T, H, K] float32
  bonus,  # [H, K] float32 or None
  segments,  # [B, T] int32 or None
  reach,  # [2, B, T] float32: whether a step sees the entering state, reaches the leaving; or None
  *,
  length,  # steps before padding
  sums=False,
  interpret=None,
):
  """Returns a dictionary of

  scores [B, H, T, C] bfloat16; q, k [B, T, H, K] bfloat16, decayed; with `sums` also score_sum [B,
  H, T] float32, of rows, and key_sum [B, H, N, K] float32, of the decayed keys; and for decays a
  step decay [B, H, N, K] float32, of whole chunks.
  """
  B, T, H, K = q.shape
  C, N = CHUNK, T // CHUNK
  per_step = log_decay.ndim == 4
  f32, bf16 = jnp.float32, jnp.bfloat16
  out_type = {
    "scores": jax.ShapeDtypeStruct((B, H, T, C), bf16),
    "q": jax.ShapeDtypeStruct(q.shape, bf16),
    "k": jax.ShapeDtypeStruct(k.shape, bf16),
  }
  if sums:
    out_type["score_sum"] = jax.ShapeDtypeStruct((B, H, T), f32)
    out_type["key_sum"] = jax.ShapeDtypeStruct((B, H, N, K), f32)
  if per_step:
    out_type["decay"] = jax.ShapeDtypeStruct((B, H, N, K), f32)
  scratch = {
    "q": tile(C, K),
    "k": tile(C, K),
    "right": tile(C, K),
    "scores": tile(C, C),
    "left": stage_for(C, K, interpret),
    "arrived": plgpu.Barrier(num_barriers=2),
    "rows": plgpu.SMEM((C,), f32),
    "columns": plgpu.SMEM((2, K), f32),
    **gate_scratch(log_decay, K),
  }

  def body(at, ins, outs, s):
    b, h, n = at.b, at.h, at.n
    fetch({name: (ins[name].at[b, at.steps, h], s[name]) for name in ("q", "k")}, s["arrived"])

    groups = [pl.ds(start, GROUP) for start in range(0, K, GROUP)]
    signs = gates.Signs(s["signs"], bonus is not None) if per_step else None
    made = [
      make_gate(
        *(ins["log_decay"], {x: s[x].at[:, channels] for x in ("high", "low") if x in s}),
        *(b, h, n, channels),
        length=length,
        read_first=bonus is not None,
        interpret=interpret,
        signs=signs,
      )
      for channels in groups
    ]

    def met(factors):
      """[C, C]: queries times keys, each with its factor."""
      products = []
      for channels, factor in zip(groups, factors, strict=True):
        left, right = factor()
        right_s = s["right"].at[:, channels]
        right_s[...] = scaled(s["k"].at[:, channels], right)
        left_s = s["left"].at[:, channels] if interpret is not None else s["left"]
        left = staged(scaled(s["q"].at[:, channels], left), left_s, interpret)
        products.append((left, turned(right_s)))
      plgpu.commit_smem()
      return multiply(((C, C), products), interpret=interpret)[0]

    scores = jnp.where(iota((C, C), 0) == iota((C, C), 1), _same_step(ins, s, h), 0.0)
    scores = jnp.where(gates.pairs(0), met([gate.in_block for gate in made]), scores)
    for size in gates.MERGES:
      both = [lambda gate=gate, size=size: (gate.merged(size),) * 2 for gate in made]
      scores = jnp.where(gates.pairs(size), met(both), scores)
    for channels, gate in zip(groups, made, strict=True):
      q_s, k_s = s["q"].at[:, channels], s["k"].at[:, channels]
      q_out, k_out = load(q_s) * gate.before(), load(k_s) * gate.after()
      if "reach" in ins:
        sees, reaches = (rows_of(ins["reach"].at[x, b, at.steps]) for x in (0, 1))
        q_out = jnp.where(across(sees, (C, GROUP)) > 0, q_out, 0.0)
        k_out = jnp.where(across(reaches, (C, GROUP)) > 0, k_out, 0.0)
      q_s[...] = q_out.astype(bf16)
      k_s[...] = k_out.astype(bf16)
      if sums:
        s["columns"].at[0, channels][...] = jnp.sum(k_out, axis=0)
      if per_step:
        s["columns"].at[1, channels][...] = jnp.exp2(jnp.sum(gate.log2_decay, axis=0))

    if "segments" in ins:
      scores = jnp.where(same_segment(ins, at), scores, 0.0)
    s["scores"][...] = scores.astype(bf16)
    copies = [
      (s["scores"], outs["scores"].at[b, h, at.steps]),
      (s["q"], outs["q"].at[b, at.steps, h]),
      (s["k"], outs["k"].at[b, at.steps, h]),
    ]
    if sums:
      s["rows"][...] = jnp.sum(scores, axis=1)
      copies.append((s["rows"], outs["score_sum"].at[b, h, at.steps]))
      copies.append((s["columns"].at[0], outs["key_sum"].at[b, h, n]))
    if per_step:
      copies.append((s["columns"].at[1], outs["decay"].at[b, h, n]))
    send(copies)

  inputs = {"q": q, "k": k, "log_decay": log_decay}
  optional = {"bonus": bonus, "segments": segments, "reach": reach}
  inputs |= {name: x for name, x in optional.items() if x is not None}
  return each_chunk(body, inputs, out_type, scratch, sizes=(1, N, H, B), interpret=interpret)


def _same_step(ins, s, h):
  """[C, C], the same in every column: q_i k_i, weighted by the bonus if there is one."""
  total = None
  for start in range(0, s["q"].shape[-1], GROUP):
    channels = pl.ds(start, GROUP)
    product = load(s["q"].at[:, channels]) * load(s["k"].at[:, channels])
    if "bonus" in ins:
      product = product * down(columns_of(ins["bonus"].at[h, channels]), product.shape)
    added = jnp.sum(product, axis=1)
    total = added if total is None else total + added
  return across(total, (CHUNK, CHUNK))
