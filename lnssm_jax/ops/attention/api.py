"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import numbers

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch
from lnssm_jax.ops.attention import fused, reference, xla
from lnssm_jax.ops.attention.state import AttentionState, Rule, advance, steps_of
from lnssm_jax.ops.checks import (
  check_floating,
  check_scale,
  check_shape,
  segment_index,
  vary_alike,
)

_NAME = "attention"


def attention(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, G, K]
  v: jax.Array,  # [B, T, G, V]
  *,
  window: int | None = None,
  block: int | None = None,
  causal: bool = True,
  scale: float | None = None,
  initial_state: AttentionState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, AttentionState | None]:
  """Softmax attention: full, in a sliding window, or in blocks.

      out_t = sum_j p_tj v_j        p_t = softmax over the visible steps j of scale * q_t . k_j

  Visible are the steps j <= t of the same segment (with causal=False also the later ones), and
  * with `window`, those less than `window` steps away: `window` keys with the present one. A window
    that is described by the w keys before the present one is window = w + 1;
  * with `block`, those in the same block of `block` steps, counted from the start of the segment;
    the last block may be shorter.

  H is a multiple of G, the number of key and value heads: query head h reads head h // (H / G).

  The state is the key-value cache, in the dtypes of k and v. With a window or blocks it has a fixed
  size (window - 1 or block - 1 steps), also as `initial_state=None` and across jit and
  `lax.scan`. Without, it holds every step and grows with each call, which compiles anew for each
  size. For decoding at a fixed size give the greatest length as `window`: up to there the window
  shows everything, and beyond it the oldest steps are forgotten. Cutting a sequence anywhere and
  passing the state on gives the same result as one call; so does packing several sequences with
  `segment_ids` (`initial_state` belongs to the first segment, the returned state to the last).
  Gradients flow to q, k, v and to the keys and values in `initial_state`, and from those in the
  returned state.

  Scores, softmax and sums are float32 (float64 if an input is) whatever the dtype of q, k, v; `out`
  has the dtype of `v`.

  Args:
    scale: multiplies the scores; a Python number. None means K^(-1/2).
    initial_state: the cache before the first step; None means empty. Only with causal=True.
    implementation: "fused" (the kernel of cuDNN; bfloat16 or float16 on an NVIDIA GPU, without
      state, segments and blocks), "chunked" (tiles of scores, memory linear in T; reverse mode
      only) or "reference" (all scores in memory). None takes the first of these that can run.
    chunk_size: steps in a block of the chunked form; None means the default.

  Returns:
    `out` [B, T, H, V] and the `AttentionState` after the last step; None with causal=False.

  Raises:
    ValueError: arguments do not agree; the message names the argument.
    NotImplementedError: the named implementation cannot run these arguments.

  Sources: Vaswani et al. 2017, eq. 1; grouped heads, Ainslie et al. 2023; running softmax,
  Milakov and Gimelshein 2018; backward pass, FlashAttention (Dao et al. 2022); blocks, Nahshan et
  al. 2023, section 4.
  """
  args, kwargs = _checked(
    q,
    k,
    v,
    window=window,
    block=block,
    causal=causal,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  rule = kwargs["rule"]
  if initial_state is None and window is not None and window >= args[0].shape[1]:
    # It hides nothing here, and bounds the cache only; without it there are faster kernels.
    kwargs["rule"] = rule._replace(window=None)
  with jax.named_scope(_NAME):
    out = dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)
    if not causal:
      return out, None
    _, k, v, state, steps = args
    return out, advance(rule, state, k, v, steps)


def _checked(
  q,
  k,
  v,
  *,
  window=None,
  block=None,
  causal=True,
  scale=None,
  initial_state=None,
  segment_ids=None,
  chunk_size=None,
):
  """Checks the arguments of `attention` and gives them the implementations' form."""
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  for name, x in (("q", q), ("k", k), ("v", v)):
    check_floating(_NAME, name, x)
  check_shape(_NAME, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
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
    if value is not None and (
      isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1
    ):
      raise ValueError(f"{_NAME}: {name}={value!r} must be None or a Python integer, at least 1.")
  if window is not None and block is not None:
    raise ValueError(f"{_NAME}: window={window} and block={block} exclude each other; set one.")
  if not isinstance(causal, bool):
    raise ValueError(f"{_NAME}: causal={causal!r} must be True or False.")
  if scale is not None:
    check_scale(_NAME, scale)

  state = None
  if initial_state is not None:
    state = _checked_state(initial_state, k, v, window, block, causal)
  segments = segment_index(_NAME, segment_ids, B, T)
  steps = steps_of(B, T, segments, None if state is None else state.position)
  return vary_alike((q, k, v, state, steps)), {
    "rule": Rule(window, block, causal),
    "scale": K**-0.5 if scale is None else float(scale),
    "segmented": segments is not None,
    "chunk_size": chunk_size,
  }


def _checked_state(state, k, v, window, block, causal):
  if not causal:
    raise ValueError(
      f"{_NAME}: initial_state has no meaning with causal=False, where earlier steps would have to "
      "see later ones; leave one of the two out."
    )
  state = AttentionState(*(jnp.asarray(x) for x in state))
  B, _, G, K = k.shape
  room = (window or block) - 1 if window or block else state.k.shape[1]
  axes = "[B, window - 1 or block - 1, G, width]" if window or block else "[B, any, G, width]"
  check_shape(_NAME, "initial_state.k", state.k, (B, room, G, K), axes)
  check_shape(_NAME, "initial_state.v", state.v, (B, room, G, v.shape[-1]), axes)
  check_shape(_NAME, "initial_state.position", state.position, (B,), "[B]")
  for name, kept, new in (("k", state.k, k), ("v", state.v, v)):
    if kept.dtype != new.dtype:
      raise ValueError(
        f"{_NAME}: initial_state.{name} has dtype {kept.dtype}, but {name} has {new.dtype}; make "
        f"the empty state with init_attention_state(..., dtype={name}.dtype)."
      )
  return state


dispatch.register(
  _NAME,
  _checked,
  dispatch.Implementation("fused", fused.fused, fused.obstacle),
  dispatch.Implementation("chunked", xla.chunked),
  dispatch.Implementation("reference", reference.reference),
)
