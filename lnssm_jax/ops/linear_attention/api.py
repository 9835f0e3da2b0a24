"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch, per_device
from lnssm_jax.ops.checks import (
  accumulation_dtype,
  check_chunk_size,
  check_floating,
  check_scale,
  check_shape,
  segment_index,
  vary_alike,
)
from lnssm_jax.ops.linear_attention import reference, xla
from lnssm_jax.ops.linear_attention.state import LinearAttentionState

_NAME = "linear_attention"


def linear_attention(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  *,
  log_decay: jax.Array | None = None,  # [H], [H, K], [B, T, H] or [B, T, H, K], values <= 0
  value_log_decay: jax.Array | None = None,  # [H, V] or [B, T, H, V], values <= 0
  bonus: jax.Array | None = None,  # [H, K]
  normalize: bool = False,
  scale: float = 1.0,
  initial_state: LinearAttentionState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, LinearAttentionState]:
  r"""Attention without softmax, in time linear in T, with decay of keys, values or both.

      S_t = diag(a_t) S_{t-1} diag(c_t) + k_t v_t^T            a = exp(log_decay)
                                                               c = exp(value_log_decay)
      out_t = scale * S_t^T q_t                                without `bonus`
      out_t = scale * (S_{t-1} + diag(bonus) k_t v_t^T)^T q_t  with `bonus`: read before the update

  With `normalize`, out_t is divided by q_t^T z_t, where z is the same recurrence for v = 1 and is
  read the same way.

  The rank of `log_decay` says what it means: `[H]` one constant per head (RetNet), `[H, K]` one
  constant per key channel (LNSSM, RWKV-5), `[B, T, H]` one per step and head (Mamba-2),
  `[B, T, H, K]` one per step and key channel (GLA, RWKV-6). Any value from 0 down to -inf is exact
  to the dtype: no difference of decays is exponentiated that is above zero. None means no decay.

  States, decays, sums and denominators are float32 (float64 if an input is) whatever the dtype of
  q, k, v; `out` has the dtype of `v`. Cutting a sequence anywhere and passing the state on gives
  the same result as one call; so does packing several sequences with `segment_ids` (the state is
  reset where the id changes; `initial_state` belongs to the first segment, the returned state to
  the last). Gradients flow to every array argument, to `initial_state` and from the returned state.
  Reverse mode only: the chunked form defines its own backward pass.

  Args:
    normalize: divide by q_t^T z_t. The caller's features must keep that sum away from 0: nothing is
      added to it.
    scale: multiplies the result; a Python number.
    initial_state: the state before the first step; None means zeros.
    implementation: "pallas" (kernels; a Hopper GPU, no `value_log_decay`, no float64; T = 1:
      bfloat16 or float32, K <= 256; T > 1: bfloat16, V <= 256, K <= 256, with `normalize` K <=
      128), "chunked" (matrix products inside chunks; any device and arguments), "reference" (one
      step at a time), "associative" (`lax.associative_scan`), or "pallas_interpret" (the kernels on
      a CPU, slowly, to test them). None takes "pallas" where it can run and is known to be faster
      (T = 1: K and V multiples of 16; T > 1: both at least 32; with several devices inside
      `shard_map`, or with a mesh that `per_device` knows), otherwise "chunked".
    chunk_size: steps in a chunk, a power of two; None means the default. The kernels have 64.

  Returns:
    `out` [B, T, H, V] and the `LinearAttentionState` after the last step.

  Raises:
    ValueError: shapes or dtypes do not agree, or `normalize` together with `value_log_decay`, for
      which no denominator is defined; the message names the argument.
    NotImplementedError: the named implementation cannot run these arguments.

  Sources: linear attention, Katharopoulos et al. 2020; per-channel decay, GLA (Yang et al. 2024),
  eq. 3; normalised constant decay, LNSSM, eqs. 14 and 19; read before update, RWKV-5/6 (Peng et al.
  2024), eqs. 16-19.
  """
  args, kwargs = _checked(
    q,
    k,
    v,
    log_decay=log_decay,
    value_log_decay=value_log_decay,
    bonus=bonus,
    normalize=normalize,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(
  q,
  k,
  v,
  *,
  log_decay=None,
  value_log_decay=None,
  bonus=None,
  normalize=False,
  scale=1.0,
  initial_state=None,
  segment_ids=None,
  chunk_size=None,
):
  """Checks the arguments of `linear_attention` and gives them the implementations' form."""
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  for name, x in (("q", q), ("k", k), ("v", v)):
    check_floating(_NAME, name, x)
  check_shape(_NAME, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
  check_shape(_NAME, "k", k, (B, T, H, K), "the shape of q, [B, T, H, K]")
  check_shape(_NAME, "v", v, (B, T, H, None), "[B, T, H] of q, then V")
  V = v.shape[-1]
  if 0 in (T, K, V, H):
    raise ValueError(f"{_NAME}: q {q.shape} and v {v.shape} have an empty axis; T >= 1 is needed.")
  acc = accumulation_dtype(q, k, v)

  log_decay = _canonical_decay("log_decay", log_decay, (B, T, H, K), acc, per_head=True)
  if normalize and value_log_decay is not None:
    raise ValueError(
      f"{_NAME}: normalize=True has no meaning together with value_log_decay, because the "
      "denominator would differ from one value column to the next. Divide the result yourself, "
      "or leave one of the two out."
    )
  if value_log_decay is not None:
    value_log_decay = _canonical_decay(
      "value_log_decay", value_log_decay, (B, T, H, V), acc, per_head=False
    )
  if bonus is not None:
    check_floating(_NAME, "bonus", bonus)
    check_shape(_NAME, "bonus", bonus, (H, K), "[H, K]")
    bonus = jnp.asarray(bonus)
  check_scale(_NAME, scale)
  check_chunk_size(_NAME, chunk_size)

  state = LinearAttentionState(jnp.zeros((B, H, K, V), acc), jnp.zeros((B, H, K), acc))
  if initial_state is not None:
    check_shape(_NAME, "initial_state.kv", initial_state.kv, (B, H, K, V), "[B, H, K, V]")
    state = state._replace(kv=jnp.asarray(initial_state.kv, acc))
    if normalize:
      if initial_state.key_sum is None:
        raise ValueError(
          f"{_NAME}: normalize=True needs initial_state.key_sum [B, H, K], but it is None; "
          "pass on the state that a call with normalize=True returned."
        )
      check_shape(_NAME, "initial_state.key_sum", initial_state.key_sum, (B, H, K), "[B, H, K]")
      state = state._replace(key_sum=jnp.asarray(initial_state.key_sum, acc))
  segments = segment_index(_NAME, segment_ids, B, T)
  args = vary_alike((q, k, v, log_decay, value_log_decay, bonus, state, segments))
  options = {"normalize": bool(normalize), "scale": float(scale), "chunk_size": chunk_size}
  return args, options | {"fresh": initial_state is None}


def _canonical_decay(name, decay, shape, dtype, *, per_head):
  """Gives a decay four axes that broadcast to `shape` [B, T, H, X]; None becomes a zero."""
  if decay is None:
    return jnp.zeros((1, 1, 1, 1), dtype)
  check_floating(_NAME, name, decay)
  decay = jnp.asarray(decay, dtype)
  B, T, H, X = shape
  layouts = {(H, X): (1, 1, H, X), (B, T, H, X): (B, T, H, X)}
  if per_head:
    layouts |= {(H,): (1, 1, H, 1), (B, T, H): (B, T, H, 1)}
  if decay.shape not in layouts:
    allowed = ", ".join(str(list(layout)) for layout in sorted(layouts, key=len))
    raise ValueError(f"{_NAME}: {name} has shape {decay.shape}, but one of {allowed} is needed.")
  return decay.reshape(layouts[decay.shape])


_LAYOUT = per_device.Layout(
  ("BTHK", "BTHK", "BTHV", "BTHK", "BTHV", "HK", "BH", "BT"), ("BTHV", "BH")
)
_COMPILED, _INTERPRETED = dispatch.kernels(f"{__package__}.pallas", _LAYOUT)

dispatch.register(
  _NAME,
  _checked,
  _COMPILED,
  dispatch.Implementation("chunked", xla.chunked),
  dispatch.Implementation("reference", reference.reference),
  dispatch.Implementation("associative", reference.associative),
  _INTERPRETED,
)
