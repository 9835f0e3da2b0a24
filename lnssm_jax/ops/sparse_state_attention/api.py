"""`sparse_state_attention`: public API, argument checks, choice of method and dispatch."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import typing as ty
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import (
  check_chunk_size,
  check_floating,
  check_log_decay,
  check_shape,
  checked_integers,
  checked_scale,
  checked_state,
  has_known_values,
  is_integer,
)
from lnssm_jax.ops.core.precision import accumulation_dtype
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.sparse_state_attention import facts
from lnssm_jax.ops.sparse_state_attention.gather import gather
from lnssm_jax.ops.sparse_state_attention.mask import mask
from lnssm_jax.ops.sparse_state_attention.types import (
  Inputs,
  Method,
  Options,
  SparseState,
  init_state,
)
from lnssm_jax.ops.sparse_state_attention.varlen import chunk_count, run_chunk_size, varlen
from pallas_kernels.core import device

_NAME = "sparse_state_attention"

# Rows that "varlen" may process per row of "mask" and still be faster: measured, see README.md.
_MOST_ROWS = 0.75
# Rows of "mask" from which "varlen" trains faster on a GPU, where small calls cost their launches.
_MASKED_ROWS = 1024


def choose_method(T: int, S: int, N: int, *, fresh: bool, on_gpu: bool, chunk_size=None) -> Method:
  """The method that `method=None` takes for T tokens that use S of N partitions each."""
  if T == 1:
    return "gather"
  rows = S * T
  if not fresh:
    size = run_chunk_size(T, S, N, chunk_size)
    rows = chunk_count(T, S, N, size) * size
  masked = T * N
  return "mask" if rows > _MOST_ROWS * masked or (on_gpu and masked < _MASKED_ROWS) else "varlen"


def _run(form, inputs: Inputs, options: Options):
  method = options.method
  if method is None:
    sizes = (*inputs.indices.shape[1:], inputs.state.kv.shape[1])
    on_gpu = device.default_device().platform == "gpu"
    rest = {"fresh": options.fresh, "on_gpu": on_gpu, "chunk_size": options.chunk_size}
    method = "gather" if form == "reference" else choose_method(*sizes, **rest)
  dtype = inputs.v.dtype
  # float16 is narrower than what the partitions' outputs may reach before they are summed.
  wide = inputs.v.astype(jnp.float32) if dtype == jnp.float16 else inputs.v
  run = {"mask": mask, "varlen": varlen, "gather": gather}[method]
  inside = None if form == "pallas" else form
  out, state = run(inputs._replace(v=wide), options._replace(implementation=inside))
  return out.astype(dtype), state


def _no_kernels(inputs: Inputs, options: Options) -> str | None:
  """Why the kernels have nothing to do; the recurrence inside knows their other limits."""
  if options.method == "gather":
    return "method='gather' runs token by token, without a kernel."
  if options.chunk_size is not None:
    return f"chunk_size={options.chunk_size}, and the kernels choose their own."
  return device.unsupported(device.EVERY)


def _not_gather(inputs: Inputs, options: Options) -> str | None:
  if options.method == "gather":
    return "method='gather' runs token by token; use 'reference' or None."
  return None


IMPLEMENTATIONS = {
  "pallas": dispatch.Form(functools.partial(_run, "pallas"), _no_kernels),
  "chunked": dispatch.Form(functools.partial(_run, "chunked"), _not_gather),
  "reference": dispatch.Form(functools.partial(_run, "reference")),
  "associative": dispatch.Form(functools.partial(_run, "associative"), _not_gather),
}


@dispatch.op(
  init_state,
  log_decay=facts.log_decay,
  query_key=None,
  recurrence=facts.recurrence,
  decodes=False,
)
def sparse_state_attention(
  q: ty.BTHK,
  k: jax.Array,  # [B, T, H, K] or [B, T, S, H, K]
  v: jax.Array,  # [B, T, H, V] or [B, T, S, H, V]
  indices: jax.Array,  # [B, T, S] integer, from 0 to num_partitions - 1, distinct per token
  gates: jax.Array,  # [B, T, S]
  *,
  num_partitions: int,
  read_gates: jax.Array | None = None,  # [B, T, S]
  log_decay: jax.Array | None = None,  # [H], [H, K], [B, T, H], ...: see below; values <= 0
  beta: jax.Array | None = None,  # [B, T, H] or [B, T, S, H]
  scale: float | None = None,
  method: Method | None = None,
  initial_state: SparseState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: Literal["pallas", "chunked", "associative", "reference"] | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, SparseState]:
  r"""Linear attention with N states ("partitions"), of which each token uses S.

      S^i_t = diag(a_t) S^i_{t-1} + (gates_t^i k_t) v_t^T   for the partitions i in indices_t
      S^i_t = S^i_{t-1}                                     for all others: no decay either
      out_t = scale * sum over i in indices_t of (S^i_t)^T (read_gates_t^i q_t)

  with a = exp(log_decay). Heads share the selection. A k or v with an axis S has its own key or
  value for each selected partition, in the order of `indices`. With `beta` the first line is the
  delta rule, whose rates the gates multiply; `log_decay` is then per token and head:

      S^i_t = a_t (I - b k_t k_t^T) S^i_{t-1} + b k_t v_t^T,     b = gates_t^i beta_t

  The rank of `log_decay` says what it means, as in `linear_attention`: `[H]`, `[H, K]`,
  `[B, T, H]`; and at rank 4 the rank of k decides, since `[B, T, H, K]` and `[B, T, S, H]` cannot
  be told apart otherwise:

      k [B, T, H, K]:     [B, T, H, K]
      k [B, T, S, H, K]:  [B, T, S, H] or [B, T, S, H, K], one per selected partition

  So a decay per token and key channel needs the axis S if k has it: repeat it if it is the same.

  Three methods give the same result:

      "mask"    partitions as heads of one linear attention: N times the work and memory
      "varlen"  tokens sorted by partition: work and memory of S T tokens, whatever N
      "gather"  token by token, on S states; the form for decoding
      None      "gather" if T = 1 or implementation="reference"; else "mask" or "varlen",
                whichever processes fewer rows (`README.md` has the rule)

  States, decays and sums are float32 (float64 if q, k or v is); gated keys are rounded to the dtype
  of `k`, `out` has that of `v`. At a document boundary all partitions are reset; one that the last
  document does not use is empty in the returned state. Gradients flow to every floating-point
  argument, to `initial_state` and from the returned state; in reverse mode only.

  Args:
    indices: checked where their values are known. Under `jit` they are not: there an index that is
      out of range selects nothing, and the result is unspecified for tokens that select a partition
      twice.
    gates: factors of the keys, or of the rates, when a token writes.
    read_gates: factors of the queries, when it reads; None means those of `gates`.
    beta: rates of the delta rule, with unit keys from 0 (nothing changes) to 1 (replaced).
    scale: multiplies the output; a Python number. None means K**-0.5.
    initial_state: the states before the first token; None means zeros.
    segment_ids: `[B, T]` integers; all partitions are reset where they change.
    axis_name: must be None; this op needs the whole sequence.
    implementation: the form of the linear attention, or delta rule, inside "mask" and "varlen", as
      named there: "chunked", "associative" or "reference"; "pallas" takes the kernels where they
      support it, and is the default on Hopper. With method=None, "reference" is "gather", the
      oracle; "gather" itself has no other form. `ops.supported` lists the forms that the given
      `method` supports.
    chunk_size: tokens per chunk, a power of two; None means the default. With an initial state,
      "varlen" pads the tokens of each partition to a multiple of it.

  Returns:
    `out` [B, T, H, V] and the `SparseState` after the last token.

  Raises:
    ValueError: shapes or dtypes do not agree, or an index is out of range or repeated in a token;
      the message names the argument, and the index and its position.
    NotImplementedError: method="gather" does not support `implementation`; or `axis_name`.

  Sources: sparse state expansion (SSE; there gates = 1/S and read_gates = 1, in its official code
  both are the softmax of the router); mixture of memories (MoM, Du et al. 2025: gates = 1,
  read_gates = the router's weights, one key per memory).
  """
  q, k, v, gates = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(gates)
  read_gates = gates if read_gates is None else jnp.asarray(read_gates)
  floating = {"q": q, "k": k, "v": v, "gates": gates, "read_gates": read_gates}
  for name, x in floating.items():
    check_floating(_NAME, name, x)
  check_shape(_NAME, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
  N = _checked_count(num_partitions)
  indices = _checked_indices(indices, B, T, N)
  S = indices.shape[-1]
  by_selection = k.ndim == 5
  for name, x, X in (("k", k, K), ("v", v, None)):
    if x.ndim == 5:
      check_shape(_NAME, name, x, (B, T, S, H, X), f"[B, T, S, H, {'V' if X is None else 'K'}]")
    else:
      axes = "[B, T, H] of q, then V" if X is None else "the shape of q, [B, T, H, K]"
      check_shape(_NAME, name, x, (B, T, H, X), axes)
  V = v.shape[-1]
  if 0 in (T, K, V, H, S):
    raise ValueError(
      f"{_NAME}: q {q.shape}, v {v.shape} and indices {indices.shape} have an empty axis; at least "
      "one of T, H, K, V, S each is needed."
    )
  for name in ("gates", "read_gates"):
    check_shape(_NAME, name, floating[name], (B, T, S), "the shape of indices, [B, T, S]")
  scale = checked_scale(_NAME, scale, K**-0.5)
  check_chunk_size(_NAME, chunk_size)
  if method not in (None, *get_args(Method)):
    names = ", ".join(repr(name) for name in get_args(Method))
    raise ValueError(f"{_NAME}: method={method!r} is unknown; use one of {names}, or None.")

  acc = accumulation_dtype(q, k, v)
  shape = (B, N, H, K, V)
  state = checked_state(_NAME, SparseState, initial_state, shape, "[B, N, H, K, V]", acc)
  log_decay = _canonical_decay(log_decay, (B, T, S, H, K), acc, by_selection)
  if beta is not None:
    beta = _checked_rates(beta, (B, T, S, H), log_decay).astype(acc)
  return dispatch.run(
    _NAME,
    IMPLEMENTATIONS,
    Inputs(
      q,
      k if k.ndim == 5 else k[:, :, None],
      v if v.ndim == 5 else v[:, :, None],
      indices,
      gates,
      read_gates,
      log_decay,
      beta,
      state,
      segments_of(_NAME, segment_ids, B, T),
    ),
    Options(scale, method, chunk_size, fresh=initial_state is None),
    implementation=implementation,
    axis_name=axis_name,
  )


def _checked_count(num_partitions):
  if not is_integer(num_partitions) or num_partitions < 1:
    raise ValueError(
      f"{_NAME}: num_partitions={num_partitions!r} must be an integer of at least 1."
    )
  return int(num_partitions)


def _checked_indices(indices, B, T, N):
  """int32, and N wherever an index is out of range."""
  check_shape(_NAME, "indices", indices, (B, T, None), "[B, T] of q, then S")
  indices = checked_integers(_NAME, "indices", indices)
  S = jnp.shape(indices)[-1]
  if S > N:
    raise ValueError(
      f"{_NAME}: indices {jnp.shape(indices)} select S={S} partitions per token, but "
      f"num_partitions={N}; a token can use each only once."
    )
  if has_known_values(indices):
    _check_values(np.asarray(indices), N)
  indices = jnp.asarray(indices)
  return jnp.where((indices >= 0) & (indices < N), indices, N).astype(jnp.int32)


def _check_values(indices, N):
  outside = (indices < 0) | (indices >= N)
  if outside.any():
    at = tuple(int(i) for i in np.argwhere(outside)[0])
    raise ValueError(
      f"{_NAME}: indices[{', '.join(map(str, at))}]={indices[at]} is out of range; "
      f"with num_partitions={N} it must be from 0 to {N - 1}."
    )
  ordered = np.sort(indices, axis=-1)
  repeated = ordered[..., 1:] == ordered[..., :-1]
  if repeated.any():
    b, t, s = (int(i) for i in np.argwhere(repeated)[0])
    raise ValueError(
      f"{_NAME}: indices[{b}, {t}]={indices[b, t].tolist()} repeats {ordered[b, t, s]}; the "
      "partitions of a token must be distinct."
    )


def _canonical_decay(decay, shape, dtype, by_selection):
  """Five axes, [B|1, T|1, S|1, H, K|1]."""
  if decay is None:
    return None
  check_log_decay(_NAME, "log_decay", decay)
  decay = jnp.asarray(decay, dtype)
  B, T, S, H, K = shape
  layouts = {(H,): (1, 1, 1, H, 1), (H, K): (1, 1, 1, H, K), (B, T, H): (B, T, 1, H, 1)}
  if by_selection:
    layouts |= {(B, T, S, H): (B, T, S, H, 1), (B, T, S, H, K): (B, T, S, H, K)}
  else:
    layouts |= {(B, T, H, K): (B, T, 1, H, K)}
  if decay.shape not in layouts:
    allowed = ", ".join(str(list(layout)) for layout in sorted(layouts, key=len))
    raise ValueError(
      f"{_NAME}: log_decay has shape {decay.shape}, but one of {allowed} is needed, k being "
      f"{'[B, T, S, H, K]' if by_selection else '[B, T, H, K]'}."
    )
  return decay.reshape(layouts[decay.shape])


def _checked_rates(beta, shape, log_decay):
  """[B, T, S|1, H, 1]."""
  B, T, S, H = shape
  check_floating(_NAME, "beta", beta)
  beta = jnp.asarray(beta)
  if beta.shape not in ((B, T, H), (B, T, S, H)):
    raise ValueError(
      f"{_NAME}: beta has shape {beta.shape}, but {[B, T, H]} or {[B, T, S, H]} is needed."
    )
  if log_decay is not None and log_decay.shape[-1] > 1:
    raise ValueError(
      f"{_NAME}: beta is given, and the delta rule has one log_decay per head, not one for each of "
      f"{log_decay.shape[-1]} key channels; give [B, T, H] or [B, T, S, H]."
    )
  return beta.reshape(B, T, -1, H, 1)
