"""Forward and backward pass of the delta rule on the kernels for Ampere.

The delta rule is linear attention over its corrections x, read twice: by the queries, and by the
erase keys, which read all tokens but their own (L and r in `lnssm_jax/ops/delta_rule/README.md`):

    x = beta (v - r S - L x)            out = b q S + P x

So scores, decays inside a chunk and their gradients are linear attention's, called once for the
queries and once for the erase keys. What is new is the inverse of I + diag(beta) L and the
recurrence with it (`recurrence.py`). In the backward pass y, the cotangent of beta v - beta r S -
beta L x - x, is to the reading by -beta e what G, the cotangent of out, is to that by q. A write
key is one more key, with beta v in place of x, that both read inside a chunk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core.boundaries import DocumentBoundaries
from pallas_kernels.core.chunk_grid import launch_per_chunk, sum_of_groups
from pallas_kernels.core.mma import Mma, store_tile
from pallas_kernels.core.wgmma import (
  TILE_WIDTH,
  broadcast_rows,
  load_row_vector,
  smem_tile,
  with_int32_indices,
)
from pallas_kernels.delta_rule.ampere import recurrence
from pallas_kernels.delta_rule.ampere.recurrence import recurrence as run_recurrence
from pallas_kernels.delta_rule.triangular_inverse import (
  InverseTiles,
  diagonal_blocks,
  lhs_scratch,
  triangular_inverse,
)
from pallas_kernels.delta_rule.types import Inputs, Options
from pallas_kernels.linear_attention.ampere.gradients import (
  GradientInputs,
  ValueInputs,
  query_key_gradients,
  value_gradients,
)
from pallas_kernels.linear_attention.ampere.passes import (
  decay_tables,
  gradient_of_tables,
  total_decay,
)
from pallas_kernels.linear_attention.ampere.scores import ScoreInputs, chunk_scores

C = TILE_WIDTH  # tokens of a chunk


class Residuals(NamedTuple):
  """Results of the forward pass that the backward pass needs, besides the arguments."""

  inputs: recurrence.Inputs  # of the recurrence; v and initial are None
  states: jax.Array  # [B, H, N, K, V] bfloat16, that enter the chunks
  corrections: jax.Array  # [B, T, H, V] bfloat16: x
  write: recurrence.Write | None


def forward(
  options: Options, inputs: Inputs, segments: jax.Array | None, *, for_gradient: bool
) -> tuple[tuple[jax.Array, jax.Array], Residuals | None]:
  """The results of `op.delta_rule`, and what the backward pass needs of this one."""
  q, k, erase_key, v, beta, log_decay, kv, write_key = inputs
  H, T, channels = inputs.heads, q.shape[1], inputs.channels
  backend, documents = Mma(options.interpret), DocumentBoundaries.of(segments)
  tables: Any = None if channels else decay_tables(options, documents, T)(_of_heads(log_decay, H))
  reads = ScoreInputs(
    q,
    k,
    log_decay if channels else None,
    None if channels else tables.cumulative,
    None,
    documents if channels else documents.mask_only,
  )
  how: Any = {"heads": H, "length": options.length, "backend": backend}
  by_query = chunk_scores(reads, **how)
  erases = reads._replace(q=k if erase_key is None else erase_key)
  if options.erase_before_decay:
    erases = erases._replace(bonus=_no_bonus(H, k))
  by_erase_key = chunk_scores(erases, erase_keys=True, **how)
  write: Any = None
  if write_key is not None:
    read, erased = (x._replace(k=write_key) for x in (reads, erases))
    of_write, lower = chunk_scores(read, **how), chunk_scores(erased, erase_keys=True, **how).scores
    write = recurrence.Write(of_write.k, of_write.scores, lower.astype(jnp.bfloat16))
  rate = jnp.pad(_of_heads(beta, H).swapaxes(1, 2), ((0, 0), (0, 0), (0, T - beta.shape[1])))
  prepared = recurrence.Inputs(
    q,
    k,
    erase_key,
    None,
    chunk_inverses(by_erase_key.scores, rate, backend),
    by_query.scores,
    rate,
    None,
  )
  if channels:
    decay = total_decay(options, log_decay, by_query.log2_total, documents, T)
    prepared = prepared._replace(q=by_query.q, k=by_query.k, erase_key=by_erase_key.q, decay=decay)
  else:
    decays = {"before": tables.before, "after": tables.after, "decay": tables.total}
    prepared = prepared._replace(**decays)
  results = run_recurrence(
    prepared._replace(v=v, initial=kv, write=write),
    heads=H,
    store=for_gradient,
    scale=options.scale,
    backend=backend,
  )
  kept = None
  if for_gradient:
    kept = Residuals(prepared, results.states, results.corrections, write)
  return (results.out, results.last), kept


def backward(
  options: Options,
  inputs: Inputs,
  segments: jax.Array | None,
  kept: Any,  # `Residuals`
  cotangents: Sequence[jax.Array | None],  # of the results of `op.delta_rule`; None: zeros
  decays: bool,  # whether the decay wants a gradient
) -> Inputs:
  """Gradients of the inputs."""
  q, k, erase_key, v, beta, log_decay, kv, write_key = inputs
  H, T, channels, scale = inputs.heads, q.shape[1], inputs.channels, options.scale
  backend, documents = Mma(options.interpret), DocumentBoundaries.of(segments)
  masks = documents if channels else documents.mask_only
  d_out, d_last = cotangents
  d_out = jnp.zeros((*v.shape[:2], H, v.shape[3]), v.dtype) if d_out is None else d_out
  # `scale` multiplies the results.
  d_last = None if d_last is None else d_last / scale
  adjoints = run_recurrence(
    kept.inputs._replace(v=d_out, initial=d_last),
    heads=H,
    store=True,
    reverse=True,
    backend=backend,
  )
  y, rate = adjoints.corrections, kept.inputs.rate.swapaxes(1, 2)[..., None]  # [B, T, H, 1]
  tables: Any = None
  tables_vjp: Any = None
  of_decays: dict[str, Any] = {"log_decay": log_decay}
  if channels:
    if decays:
      of_decays["total"] = kept.inputs.decay
  else:
    tables, tables_vjp = jax.vjp(
      lambda x: decay_tables(options, documents, T)(_of_heads(x, H)), log_decay
    )
    of_decays = {x: getattr(tables, x) for x in ("cumulative", "before", "after")}
  erase = _of_heads(k if erase_key is None else erase_key, H)
  by_query = GradientInputs(
    q, k, kept.corrections, d_out, kept.states, adjoints.states, masks, **of_decays
  )
  by_erase_key = by_query._replace(
    q=(-rate * erase).astype(k.dtype),
    d_out=y,
    adjoints=None,
    bonus=_no_bonus(H, k) if options.erase_before_decay else None,
  )

  def gradients(**keys):
    """Of what queries and erase keys read, from k and x or from `keys`."""
    how: Any = {"heads": H, "length": options.length, "decays": decays, "backend": backend}
    both = (x._replace(**keys) for x in (by_query, by_erase_key))
    return [query_key_gradients(x, scale=scale, **how) for x in both]

  reads, erases = gradients()
  f32 = lambda x: x.astype(jnp.float32)
  d_q, d_read, d_k = f32(reads.q), f32(erases.q), f32(reads.k) + f32(erases.k)
  d_v = scale * rate * f32(y)
  d_write_key: Any = None
  d_log_decay: Any = [reads.log_decay, erases.log_decay]
  if write_key is None:
    of_values = scale * (f32(y) * f32(_of_heads(v, H))).sum(3)
  else:
    of_values = 0.0
    of_reads, of_erases = gradients(k=write_key, v=v, states=None, total=None)
    d_q, d_read = d_q + f32(of_reads.q), d_read + f32(of_erases.q)
    d_write_key = f32(of_reads.k) + f32(of_erases.k)
    d_log_decay += [of_reads.log_decay, of_erases.log_decay]
    d_v = _written_values(kept.write, d_out, adjoints.states, d_v, scale, backend)
  of_rate = of_values - (d_read * f32(erase)).sum(3)
  d_erase_key = -rate * d_read
  if erase_key is None:
    d_k = d_k + d_erase_key
  of_groups = lambda d, like: sum_of_groups(d, like).astype(like.dtype)
  if not decays:
    d_log_decay = jnp.zeros_like(log_decay)
  elif channels:
    d_log_decay = of_groups(scale * sum(d_log_decay), log_decay)
  else:
    tables_of = ("later", "earlier", "before")
    both = {x: getattr(reads, x) + getattr(erases, x) for x in tables_of}
    d_log_decay = scale * gradient_of_tables(reads._replace(**both), tables, tables_vjp)
  return Inputs(
    of_groups(d_q, q),
    of_groups(d_k, k),
    None if erase_key is None else of_groups(d_erase_key, erase_key),
    of_groups(d_v, v),
    of_groups(of_rate[:, : beta.shape[1], :, None], beta[..., None])[..., 0],
    d_log_decay,
    None if kv is None else scale * adjoints.last,
    None if write_key is None else of_groups(d_write_key, write_key),
  )


def _written_values(write, d_out, adjoints, corrections, scale: float, backend: Mma) -> jax.Array:
  """[B, T, H, V] float32: the gradient of what the write key stores, beta v.

  `corrections`: [B, T, H, V] float32, `scale` beta y, of the systems that subtract L^w beta v.
  """
  B, T, H, V = d_out.shape
  of_reads = ValueInputs(write.key, d_out, write.scores, adjoints, None)
  read = value_gradients(of_reads, heads=H, scale=scale, backend=backend).astype(jnp.float32)
  lower = write.lower.reshape(B, H, T // C, C, C)
  chunks = corrections.astype(lower.dtype).reshape(B, T // C, C, H, V)
  sums = "bhnij,bnihv->bnjhv"
  erased = jnp.einsum(sums, lower, chunks, preferred_element_type=jnp.float32)
  return read - erased.reshape(B, T, H, V)


def _of_heads(x: jax.Array, heads: int) -> jax.Array:
  """x [B, T, H or fewer, ...], of which groups of neighbors share one, for each of `heads`."""
  return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _no_bonus(heads: int, k: jax.Array) -> jax.Array:
  """With it queries read the state before the decay of their own token, and nothing of that."""
  return jnp.zeros((heads, k.shape[3]), jnp.float32)


class _Buffers(NamedTuple):
  blocks: Any  # of `triangular_inverse`
  tiles: InverseTiles
  lhs: Any  # of `triangular_inverse`
  out: Any  # [C, C]


@with_int32_indices
def chunk_inverses(lower: jax.Array, rate: jax.Array, backend: Mma) -> jax.Array:
  """[B, H, T, C] bfloat16: the inverse of each chunk's triangular system, I + diag(beta) L.

  Args:
    lower: [B, H, T, C] float32: L.
    rate: [B, H, T] float32: beta.
  """
  B, H, T, _ = lower.shape

  def body(at, gmem, out_gmem, smem: _Buffers):
    lower_gmem, rate_gmem = gmem
    rows = at.batch, at.head, at.tokens
    lower = plgpu.load(lower_gmem.at[rows], layout=plgpu.Layout.WGMMA, optimized=False)
    lower = lower * broadcast_rows(load_row_vector(rate_gmem.at[rows]), (C, C))
    inverse = triangular_inverse(lower, smem.blocks, smem.tiles, smem.lhs, backend)
    store_tile(out_gmem.at[rows], inverse, smem.out)

  return launch_per_chunk(
    body,
    [lower, rate],
    jax.ShapeDtypeStruct((B, H, T, C), jnp.bfloat16),
    _Buffers(diagonal_blocks(), InverseTiles.of(), lhs_scratch(backend), smem_tile(C, C)),
    sizes=(1, T // C, H, B),
    chunk=C,
    name="delta_rule_ampere_inverses",
    backend=backend,
  )
