"""`attention`: public API, argument checks and dispatch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from lnssm_jax import typing as ty
from lnssm_jax.ops.attention import chunked, cudnn, reference
from lnssm_jax.ops.attention.cache import advance, tokens_of
from lnssm_jax.ops.attention.sharded import sharded
from lnssm_jax.ops.attention.types import AttentionState, Inputs, Mask, Options, init_state
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.core.checks import (
  check_floating,
  check_shape,
  checked_scale,
  has_known_values,
  is_integer,
  is_number,
)
from lnssm_jax.ops.core.dropout import check_rate, fold, row_keys, token_keys
from lnssm_jax.ops.core.segments import segments_of

_NAME = "attention"


def _without_idle_window(inputs: Inputs, options: Options) -> Options:
  """Drops a window that hides no token of this call: full attention has more kernels."""
  mask = options.mask
  length = inputs.q.shape[1]
  known = not is_symbolic_dim(length)
  if known and inputs.state is None and mask.window is not None and mask.window >= length:
    mask = mask._replace(window=None)
  return options._replace(mask=mask)


def _form(
  compute,
  unsupported=lambda inputs, options: None,
  preferred=lambda inputs, options: True,
) -> dispatch.Form:
  """The form that `compute`, which returns `out` alone, is together with the cache."""

  def run(inputs: Inputs, options: Options):
    out = compute(inputs, _without_idle_window(inputs, options))
    if not options.mask.causal:
      return out, None
    return out, advance(options.mask, inputs.state, inputs.k, inputs.v, tokens_of(inputs))

  return dispatch.Form(
    run,
    lambda inputs, options: unsupported(inputs, _without_idle_window(inputs, options)),
    lambda inputs, options: preferred(inputs, _without_idle_window(inputs, options)),
  )


def _kernel_form(form: dispatch.Form) -> dispatch.Form:
  return _form(lambda *args: form.run(*args)[0], form.unsupported, form.preferred)


_KERNELS = dispatch.Kernels(f"{__package__}.pallas", ("BTHV",), apart=True)
_FORMS = {name: _kernel_form(form) for name, form in _KERNELS.with_forms().items()}

IMPLEMENTATIONS = {
  "cudnn": _form(cudnn.cudnn, cudnn.unsupported),
  "pallas": _FORMS.pop("pallas"),
  "chunked": _form(chunked.chunked),
  "reference": _form(reference.reference),
  **_FORMS,
}
_run = functools.partial(dispatch.run, _NAME, IMPLEMENTATIONS, sharded=sharded)


_SOFTMAX = (
  "is softmax, whose state is all keys and values; `dsf.taylor_features` gives the recurrence that "
  "it is the limit of"
)


@dispatch.op(
  init_state,
  log_decay=None,
  query_key=("q", "k"),
  recurrence=_SOFTMAX,
  decodes=True,
)
def attention(
  q: ty.BTHK,
  k: ty.BTGK,
  v: ty.BTGV,
  *,
  window: int | None = None,
  block: int | None = None,
  causal: bool = True,
  scale: float | None = None,
  soft_cap: float | None = None,
  sinks: jax.Array | None = None,
  dropout: float = 0.0,
  dropout_key: jax.Array | None = None,
  initial_state: AttentionState | None = None,
  segment_ids: ty.Ids | None = None,
  axis_name: str | None = None,
  implementation: ty.Implementation | None = None,
  chunk_size: int | None = None,
) -> tuple[ty.BTHV, AttentionState | None]:
  """Softmax attention: full, in a sliding window, or in blocks.

      out_t = sum_j p_tj v_j        p_t = softmax over the visible tokens j of scale * q_t . k_j

  Visible are the tokens j <= t of the same document (with causal=False also the later ones), and
  * with `window`, those less than `window` tokens away: `window` keys with the present one. A
    window that is described by the w keys before the present one is window = w + 1;
  * with `block`, those in the same block of `block` tokens, counted from the start of the document;
    the last block may be shorter.

  H is a multiple of G, the number of key and value heads: query head h reads head h // (H / G).

  The state is the key-value cache, in the dtypes of k and v. With a window or blocks it has a fixed
  size (window - 1 or block - 1 tokens), also as `initial_state=None` and across jit and
  `lax.scan`. Without, it holds every token and grows with each call, which compiles again for each
  size. For decoding at a fixed size give the greatest length as `window`: up to there the window
  hides nothing, and beyond it the oldest tokens are dropped. Gradients flow to q, k, v and to the
  keys and values in `initial_state`, and from those in the returned state.

  Scores, softmax and sums are float32 (float64 if an input is) whatever the dtype of q, k, v; `out`
  has the dtype of `v`.

  Args:
    scale: multiplies the scores; a Python number. None means K**-0.5.
    soft_cap: c, a positive Python number: a score s becomes c tanh(s / c) before the softmax, as in
      Gemma 2. None means no cap.
    sinks: [H], logits of the heads, as in gpt-oss: the denominator of the softmax has exp(sink),
      too, so that the p_tj sum to less than 1. None for none.
    dropout: the probability with which a p_tj is dropped, that is set to 0, where the others are
      divided by 1 - dropout. Which are is a function of the key of the row, the number of the query
      in this call, the head and the position of j in its document: the same in each implementation
      and on a sharded sequence.
    dropout_key: a key (`jax.random.key(0)`), or one for each row [B]; None, as for evaluation,
      drops nothing.
    initial_state: the cache before the first token; None means empty. Only with causal=True.
    segment_ids: `[B, T]` integers; a document begins where they change.
    axis_name: mesh axis of a surrounding `shard_map` that shards T; None for the whole sequence.
      With a window or blocks that reach no further back than one shard, the exchange has the keys
      and values of that many tokens; otherwise all keys and values are gathered.
    implementation: "cudnn" (its kernel; bfloat16 or float16 on an NVIDIA GPU, without state,
      segments, blocks, cap, sinks and dropout), "pallas" (our kernels; bfloat16 on an NVIDIA GPU
      since Ampere, with dropout on Hopper's: they skip the tiles that no query sees, and for one
      token read the cache in splits), "chunked" (tiles of scores, memory linear in T; reverse mode
      only) or "reference" (all scores in memory). None takes the first that is supported. By name
      only: "pallas_ampere" (on Hopper, too, the kernels of every other GPU), and for tests on a CPU
      "pallas_interpret" and "pallas_ampere_interpret".
    chunk_size: tokens per block of the chunked form; None means the default.

  Returns:
    `out` [B, T, H, V] and the `AttentionState` after the last token; None with causal=False.

  Raises:
    ValueError: arguments do not agree; the message names the argument.
    NotImplementedError: the named implementation does not support these arguments; or `axis_name`
      with causal=False.

  Sources: Vaswani et al. 2017, eq. 1; grouped heads, Ainslie et al. 2023; running softmax,
  Milakov and Gimelshein 2018; backward pass, FlashAttention (Dao et al. 2022); blocks, Nahshan et
  al. 2023, section 4.
  """
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  for name, x in (("q", q), ("k", k), ("v", v)):
    check_floating(_NAME, name, x)
  check_shape(_NAME, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
  if k.ndim == 4 and k.shape[1] != T:
    raise ValueError(
      f"{_NAME}: k has {k.shape[1]} tokens and q {T}, but both are of one sequence;"
      " models.CrossAttention reads another one, and initial_state continues a cache."
    )
  check_shape(_NAME, "k", k, (B, T, None, K), "[B, T] of q, G key heads, K of q")
  G = k.shape[2]
  check_shape(_NAME, "v", v, (B, T, G, None), "[B, T, G] of k, then V")
  if 0 in q.shape + k.shape + v.shape:
    raise ValueError(
      f"{_NAME}: q {q.shape}, k {k.shape} and v {v.shape} must have no empty axis; "
      "T >= 1 is needed."
    )
  if H % G:
    raise ValueError(
      f"{_NAME}: q has {H} heads and k {G}; the heads of q must be a multiple of those of k."
    )
  for name, value in (("window", window), ("block", block), ("chunk_size", chunk_size)):
    if value is not None and not (is_integer(value) and value >= 1):
      raise ValueError(f"{_NAME}: {name}={value!r} must be None or a Python integer, at least 1.")
  if window is not None and block is not None:
    raise ValueError(f"{_NAME}: window={window} and block={block} exclude each other; set one.")
  if not isinstance(causal, bool):
    raise ValueError(f"{_NAME}: causal={causal!r} must be True or False.")
  scale = checked_scale(_NAME, scale, K**-0.5)
  if soft_cap is not None and not (is_number(soft_cap) and 0 < soft_cap < math.inf):
    raise ValueError(
      f"{_NAME}: soft_cap={soft_cap!r} must be None or a positive, finite Python number."
    )
  if sinks is not None:
    sinks = jnp.asarray(sinks)
    check_floating(_NAME, "sinks", sinks)
    check_shape(_NAME, "sinks", sinks, (H,), "[H], the heads of q")
    if has_known_values(sinks) and not np.isfinite(np.asarray(sinks)).all():
      raise ValueError(f"{_NAME}: sinks={sinks} must be finite logits; None has no sinks.")
  keys = None
  if check_rate(f"{_NAME}: dropout", dropout) and dropout_key is not None:
    keys = token_keys(row_keys(_NAME, dropout_key, B), T, axis_name)
    keys = fold(keys[:, :, None], jnp.arange(H))
  state = None
  if initial_state is not None:
    state = _checked_state(initial_state, k, v, window, block, causal)
  inputs = Inputs(q, k, v, state, segments_of(_NAME, segment_ids, B, T), keys, sinks)
  options = Options(Mask(window, block, causal), scale, chunk_size, soft_cap, float(dropout))
  return _run(inputs, options, implementation=implementation, axis_name=axis_name)


def _checked_state(state, k, v, window, block, causal):
  if not causal:
    raise ValueError(
      f"{_NAME}: initial_state has no meaning with causal=False, where earlier tokens would have "
      "to see later ones; leave one of the two out."
    )
  state = AttentionState(*(jnp.asarray(x) for x in state))
  B, _, G, K = k.shape
  room = (window or block) - 1 if window or block else state.k.shape[1]
  axes = "[B, window - 1 or block - 1, G, width]" if window or block else "[B, any, G, width]"
  check_shape(_NAME, "initial_state.k", state.k, (B, room, G, K), axes)
  check_shape(_NAME, "initial_state.v", state.v, (B, room, G, v.shape[-1]), axes)
  check_shape(_NAME, "initial_state.position", state.position, (B,), "[B]")
  for name, cached, new in (("k", state.k, k), ("v", state.v, v)):
    if cached.dtype != new.dtype:
      raise ValueError(
        f"{_NAME}: initial_state.{name} has dtype {cached.dtype}, but {name} has {new.dtype}; make "
        f"the empty state with attention.init_state(..., dtype={name}.dtype)."
      )
  return state
