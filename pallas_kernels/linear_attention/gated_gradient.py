"""Gradients for decays per key channel, all chunks at once.

Symbols as in `scalar_gradient.py`; before, after and weight have one number per key channel.
Queries and keys are worked on in groups of 64 channels, each with dP made anew: it is one small
product, and the groups then fit many blocks of threads onto a multiprocessor.

The decay is owed what the factors in `gates.py` are: each is an exponential of a sum of log decays
of one sign, so no gradient is a difference of large numbers.
"""

import functools

import jax.numpy as jnp
from jax import lax
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
  COMPILER_PARAMS,
  GROUP,
  WITHOUT_SCRATCH,
  across,
  columns_of,
  down,
  iota,
  load,
  multiply,
  rows_of,
  scaled,
  staged,
  sum_of_rows,
  tile,
  turned,
  unit,
)

_SHAPE = (CHUNK, GROUP)
# log2 of how far factors of decays a step may grow, where the decays want a gradient: what pairs on
# one side of a block's middle owe its steps there cancels, the more the faster the decays are.
_LIMIT = 12.0


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

  with a bonus "bonus" [B, H, N, K]; and if `decays` "log_decay", the queries' part: [B, T, H, K],
  or [B, H, N, K] for constant decays.
  """
  read_first, per_step = bonus is not None, log_decay.ndim == 4

  def chunk(at, ins, s, wait, put):
    d_rows = None if d_sum is None else rows_of(ins["d_sum"].at[at.b, at.h, at.steps])
    wait("v")
    wait("d_out")
    (d_scores,) = multiply(((CHUNK, CHUNK), [(s["d_out"], turned(s["v"]))]), interpret=interpret)
    if d_sum is not None:
      d_scores = d_scores + across(d_rows, d_scores.shape)
    if segments is not None:
      d_scores = jnp.where(same_segment(ins, at), d_scores, 0.0)
    right_s, kept = _two_tiles(s, "v")  # v is not needed any more
    kept[...] = d_scores.astype(jnp.bfloat16)
    return lambda at, number: group(at, number, d_rows, right_s, kept, ins, s, wait, put)

  def group(at, number, d_rows, right_s, kept, ins, s, wait, put):
    gate = make_gate(
      *(ins["log_decay"], _first(ins, at), s, at.b, at.h, at.n, at.channels),
      length=length,
      read_first=read_first,
      interpret=interpret,
    )
    if per_step:
      gate.choose(s["largest"], _LIMIT if decays else gates.LARGEST_LOG2)
    z = weight = None
    if d_sum is not None:
      z = columns_of(ins["entering_sum"].at[at.b, at.h, at.n, at.channels])
    if read_first:
      weight = columns_of(ins["bonus"].at[at.h, at.channels])
    k_s, state_s = s["k"].at[number], s["state"].at[number]
    queries = lambda: load(s["q"].at[number])

    met = functools.partial(_met, k_s, right_s, kept, s.get("left"), interpret)
    wait("k", number)
    if "q" in s:
      wait("q", number)
    if read_first:
      d_q = diagonal(load(kept), _SHAPE) * load(k_s)
      put("bonus", jnp.sum(d_q * queries(), axis=0), at, number)
      d_q = d_q * down(weight, _SHAPE)
    else:
      (d_q,) = multiply(same_step(kept, k_s, s.get("left"), interpret), interpret=interpret)
    owe = functools.partial(gate.owe, x=queries, staging=right_s) if decays else None
    due = None
    left, right = gate.in_block()
    lags = gate.lags() if decays and not per_step else None
    d_left, d_lags = met(gates.in_block_pairs(gate.first), right, lags)
    d_left = d_left * left
    if decays:
      due = owe(None, d_x=d_left, which=gates.QUERIES) if per_step else d_lags * left
    d_q, due = _through_merges(gate, met, owe, d_q + d_left, due)

    wait("state", number)
    (d_before,) = multiply((_SHAPE, [(s["d_out"], turned(state_s))]), interpret=interpret)
    if d_sum is not None:
      d_before = d_before + across(d_rows, _SHAPE) * down(z, _SHAPE)
    before = gate.before()
    if reach is not None:
      sees = rows_of(ins["reach"].at[0, at.b, at.steps])
      before = jnp.where(across(sees, _SHAPE) > 0, before, 0.0)
    d_before = d_before * before
    if decays:
      due = owe(due, d_x=d_before, which=gates.BEFORE)

    if decays:
      if not per_step:  # k is not needed any more
        due = over_steps(k_s, right_s, due * queries(), interpret)
      put("log_decay", due, at, number)
    put("q", (d_q + d_before) * scale, at, number)

  (B, _, H, K), N = q.shape, q.shape[1] // CHUNK
  outputs = {"q": channels_of(q)}
  if decays:
    outputs["log_decay"] = _due(log_decay, B, H, N, K)
  if read_first:
    outputs["bonus"] = columns_to(B, H, N, K)
  tiles = {"k": channels_of(k), "v": steps_of(v), "d_out": steps_of(d_out)}
  tiles["state"] = state_channels_of(borders)
  if decays or read_first:
    tiles["q"] = channels_of(q)
  vectors = {"d_sum": d_sum, "entering_sum": entering_sum, "log_decay": log_decay, "bonus": bonus}
  vectors |= {"segments": segments, "reach": reach, "first": _first_merges(log_decay)}
  return _run(chunk, tiles, vectors, outputs, {"q": "k"}, K, interpret)


def key_gradient(
  q,
  k,
  v,
  d_out,
  d_sum,
  scores,  # [B, H, T, C] bfloat16 where `joins_values`, else None
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
  """Returns {"k": dk} and, with `scores`, "v": dv [B, T, H, V]; if `decays`, "log_decay" without
  `scale`: for decays a step the whole [B, T, H, K], for constant ones the keys' part [B, H, N, K].
  """
  per_step = log_decay.ndim == 4
  reach_of = lambda ins, at: rows_of(ins["reach"].at[1, at.b, at.steps])

  def chunk(at, ins, s, wait, put):
    d_columns = None if d_sum is None else columns_of(ins["d_sum"].at[at.b, at.h, at.steps])
    wait("v")
    wait("d_out")
    # Rows are the steps j: dP is made transposed.
    (d_scores,) = multiply(((CHUNK, CHUNK), [(s["v"], turned(s["d_out"]))]), interpret=interpret)
    if d_sum is not None:
      d_scores = d_scores + down(d_columns, d_scores.shape)
    if segments is not None:
      d_scores = jnp.where(same_segment(ins, at), d_scores, 0.0)
    if scores is None:
      right_s, kept = _two_tiles(s, "d_out")  # d_out is not needed any more
    else:
      right_s, kept = s["spare"].at[0], s["scores"]
      put("v", values(at, ins, s, wait) * scale)
    kept[...] = d_scores.astype(jnp.bfloat16)
    return lambda at, number: group(at, number, right_s, kept, ins, s, wait, put)

  def gate_of(at, ins, s):
    return make_gate(
      *(ins["log_decay"], _first(ins, at), s, at.b, at.h, at.n, at.channels),
      length=length,
      read_first=bonus is not None,
      interpret=interpret,
    )

  def values(at, ins, s, wait):
    wait("scores")
    d_v, products = s["d_out"].shape, [(turned(s["scores"]), s["d_out"])]
    for number in range(k.shape[3] // GROUP):
      after = gate_of(at._replace(group=number), ins, s).after()
      wait("k", number)
      left = scaled(s["k"].at[number], after)
      if reach is not None:
        left = jnp.where(across(reach_of(ins, at), _SHAPE) > 0, left, jnp.bfloat16(0.0))
      wait("state", number)
      left = staged(left, s["left"].at[0] if "left" in s else None, interpret)
      products.append((left, s["state"].at[number]))
      (d_v,) = multiply((d_v, products), interpret=interpret)
      products = []
    return d_v

  def group(at, number, right_s, kept, ins, s, wait, put):
    gate = gate_of(at, ins, s)
    if per_step:
      gate.choose(s["largest"], _LIMIT if decays else gates.LARGEST_LOG2)
    y = weight = due = None
    if d_sum is not None:
      y = columns_of(ins["leaving_sum"].at[at.b, at.h, at.n, at.channels])
    if bonus is not None:
      weight = columns_of(ins["bonus"].at[at.h, at.channels])
    if decays and per_step:
      ref = ins["d_log_decay"].at[at.b, at.steps, at.h, at.channels]
      due = plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
      d_whole = columns_of(ins["d_total"].at[at.b, at.h, at.n, at.channels])
      due = due + down(d_whole, _SHAPE)
    q_s, state_s = s["q"].at[number], s["state"].at[number]
    keys = lambda: load(s["k"].at[number])

    met = functools.partial(_met, q_s, right_s, kept, s.get("left"), interpret)
    wait("q", number)
    if scores is None:
      if "k" in s:
        wait("k", number)
      wait("state", number)
    own_step = [same_step(kept, q_s, s.get("left"), interpret)] if bonus is None else []
    from_state = _SHAPE, [(s["v"], turned(state_s))]
    d_after, *d_k = multiply(from_state, *own_step, interpret=interpret)
    if bonus is not None:
      d_k = [diagonal(load(kept), _SHAPE) * load(q_s) * down(weight, _SHAPE)]
    if d_sum is not None:
      d_after = d_after + down(y, _SHAPE)
    d_after = d_after * gate.after()
    if reach is not None:
      d_after = jnp.where(across(reach_of(ins, at), _SHAPE) > 0, d_after, 0.0)
    owe = functools.partial(gate.owe, x=keys, staging=right_s) if decays else None
    if decays:
      due = owe(due, d_x=d_after, which=gates.AFTER)

    left, right = gate.in_block()
    d_right = met(gates.in_block_pairs(gate.first, turned=True), left)[0] * right
    if decays and per_step:  # of pairs in a block, constant decays are paid by `query_gradient`
      due = owe(due, d_x=d_right, which=gates.KEYS)
    d_k, due = _through_merges(gate, met, owe, d_k[0] + d_after + d_right, due, turned=True)
    if decays:
      if not per_step:  # q is not needed any more
        due = over_steps(q_s, right_s, due * keys(), interpret)
      put("log_decay", due, at, number)
    put("k", d_k * scale, at, number)

  (B, _, H, K), N = q.shape, q.shape[1] // CHUNK
  outputs = {"k": channels_of(k)}
  if decays:
    outputs["log_decay"] = _due(log_decay, B, H, N, K)
  tiles = {"q": channels_of(q), "v": steps_of(v), "d_out": steps_of(d_out)}
  tiles["state"] = state_channels_of(adjoints)
  if decays or scores is not None:
    tiles["k"] = channels_of(k)
  reuse = {"k": "q"}
  if scores is not None:
    tiles["scores"] = scores_of(scores)
    outputs["v"], reuse["v"] = steps_of(v), "d_out"
  vectors = {"d_sum": d_sum, "leaving_sum": leaving_sum, "log_decay": log_decay, "bonus": bonus}
  vectors |= {"segments": segments, "reach": reach, "first": _first_merges(log_decay)}
  if decays and per_step:  # of constant decays the parts are summed outside
    vectors |= {"d_total": d_total, "d_log_decay": d_log_decay}
  return _run(chunk, tiles, vectors, outputs, reuse, K, interpret)


def joins_values(log_decay, value_width):
  """Whether `key_gradient` has all channels of a chunk, and so makes the gradient of values too.

  What every step or wider values take of shared memory leaves no room for two groups of channels.
  """
  return log_decay.ndim == 2 and value_width <= 128


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

  def chunk(at, ins, s, wait, put):
    del at, ins
    wait()
    shape = s["d_out"].shape
    products = [(turned(s["scores"]), s["d_out"]), (s["k"], s["state"])]
    (d_v,) = multiply((shape, products), interpret=interpret)
    put("v", d_v * scale)

  tiles = {"k": steps_of(k), "d_out": steps_of(d_out), "scores": scores_of(scores)}
  tiles["state"] = state_of(adjoints)
  outputs = {"v": steps_of(d_out)}
  return all_chunks(chunk, tiles, {}, outputs, reuse={"v": "d_out"}, interpret=interpret)["v"]


def _two_tiles(s, name):
  """Two tiles [C, 64]: parts of the tile `name` or, if it has one only, that and a spare one."""
  if s[name].shape[1] == GROUP:
    return s[name], s["spare"].at[0]
  return [s[name].at[:, pl.ds(start, GROUP)] for start in (0, GROUP)]


def _met(others, right_s, d_scores, left_s, interpret, pairs, factor, lags=None):
  """Two [C, 64]: what rows are due that met the rows of `others`, which `factor` multiplies, in
  these pairs, and the same times `lags`, or None. `d_scores`: a tile [C, C]; `right_s`: a tile to
  use."""
  right_s[...] = scaled(others, factor)
  d_met = jnp.where(pairs, load(d_scores), 0.0)
  scratch = lambda n: None if interpret is None else left_s.at[n]
  lefts = [staged(x, scratch(n), interpret) for n, x in enumerate(_with_lags(d_met, lags))]
  plgpu.commit_smem()
  due = multiply(*((_SHAPE, [(left, right_s)]) for left in lefts), interpret=interpret)
  return due if len(due) == 2 else (*due, None)


def _with_lags(x, lags):
  return [x] if lags is None else [x, x * lags]


def _through_merges(gate, met, owe, d_x, due, *, turned=False):
  """Adds to d_x, and with `owe` to `due`, what comes from pairs of different blocks."""

  def merge(index, carry):
    d_x, due = carry
    size = gates.half_of(index)
    factor = gate.merged(size)
    added = met(gates.merged_pairs(size, turned=turned), factor)[0] * factor
    if owe is not None:
      due = owe(due, d_x=added, which=size)
    return d_x + added, due

  return lax.fori_loop(gate.first, gates.MERGES, merge, (d_x, due))


def same_step(d_scores, other, staging, interpret):
  """Of `multiply`: the diagonal of the tile d_scores [C, C] times the rows of the tile `other`."""
  on = iota(d_scores.shape, 0) == iota(d_scores.shape, 1)
  staging = None if interpret is None else staging.at[0]
  left = staged(jnp.where(on, load(d_scores), 0.0), staging, interpret)
  return _SHAPE, [(left, other)]


def over_steps(unit_s, staging, x, interpret):
  """The sum over the rows of x [C, 64]."""
  staging[...] = x.astype(jnp.bfloat16)
  unit(unit_s)
  plgpu.commit_smem()
  return sum_of_rows([staging], unit_s, interpret)


def _first(ins, at):
  """Which merge is the first that these channels need."""
  return ins["first"][at.h, at.group] if "first" in ins else 0


def _first_merges(log_decay):
  """[H, groups] int32, of constant decays; None of decays a step, at which the kernels look."""
  if log_decay.ndim == 4:
    return None
  return gates.superfluous_merges(log_decay.reshape(log_decay.shape[0], -1, GROUP))


def _due(log_decay, B, H, N, K):
  return channels_of(log_decay) if log_decay.ndim == 4 else columns_to(B, H, N, K)


def _run(chunk, tiles, vectors, outputs, reuse, width, interpret):
  log_decay, value_width = vectors["log_decay"], tiles["v"].shape[1]
  scratch = gate_scratch(log_decay)
  if interpret is not None:  # for `staged`; on a GPU there is nothing to spare for it
    scratch["left"] = tile(2, CHUNK, CHUNK)
  if value_width == GROUP or "scores" in tiles:
    scratch["spare"] = tile(1, CHUNK, GROUP)
  groups = width // GROUP
  return all_chunks(
    *(chunk, tiles, vectors, outputs),
    groups=groups,
    together=groups if joins_values(log_decay, value_width) else 1,
    scratch=scratch,
    reuse=reuse,
    interpret=interpret,
    compiler_params=WITHOUT_SCRATCH if "scores" in tiles else COMPILER_PARAMS,
  )
