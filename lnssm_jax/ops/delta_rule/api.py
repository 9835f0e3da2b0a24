"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp
from jax import lax

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
from lnssm_jax.ops.delta_rule import reference, xla
from lnssm_jax.ops.delta_rule.state import DeltaRuleState

_NAME = "delta_rule"


def delta_rule(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  beta: jax.Array,  # [B, T, H] or [B, T, H, V]
  *,
  log_decay: jax.Array | None = None,  # [B, T, H], values <= 0
  erase_key: jax.Array | None = None,  # [B, T, H, K]
  scale: float = 1.0,
  initial_state: DeltaRuleState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, DeltaRuleState]:
  r"""A linear memory that moves the value of each key towards a new one, in time linear in T.

      S_t   = a_t (I - beta_t k_t e_t^T) S_{t-1} + beta_t k_t v_t^T        a = exp(log_decay)
      out_t = scale * S_t^T q_t

  e is `erase_key`, the vector that reads the old value; None means k. `beta` of shape `[B, T, H]`
  is one rate per step and head (DeltaNet, Gated DeltaNet); `[B, T, H, V]` is one per value column.
  With unit keys, beta = 0 changes nothing and beta = 1 replaces the old value. The exact Longhorn
  update is beta = b / (1 + b ||k||^2) per column, for keys of any length.

  Where I - beta k e^T makes vectors longer the state grows exponentially until it overflows, in
  every form: with e = k keep 0 <= beta ||k||^2 <= 2 (normalise k, or take Longhorn's rate). Up to 1
  the chunked form is within a few roundings of float64; near 2, with many more steps in a chunk
  than key channels, it loses up to a digit more: take chunk_size=16 (README.md has the numbers).

  States, decays, sums and the triangular systems are float32 (float64 if an input is) whatever the
  dtype of q, k, v; `out` has the dtype of `v`. A decay down to `log_decay` = -inf is exact. Cutting
  a sequence anywhere and passing the state on gives the same result as one call; so does packing
  several sequences with `segment_ids` (the state is reset where the id changes; `initial_state`
  belongs to the first segment, the returned state to the last). Gradients flow to every array
  argument, to `initial_state` and from the returned state. Reverse mode only: the chunked form
  defines its own backward pass.

  Args:
    scale: multiplies the result; a Python number.
    initial_state: the state before the first step; None means zeros.
    implementation: "pallas" (kernels; a Hopper GPU, no float64; T = 1: bfloat16 or float32, K <=
      256; T > 1: one rate per head, bfloat16, K <= 128), "chunked" (one triangular system a chunk;
      any device and arguments), "reference" (one step at a time), or "pallas_interpret" (the
      kernels on a CPU, slowly, to test them). None takes "pallas" where it can run and is known to
      be faster (T = 1: K and V multiples of 16; T > 1: both at least 32; with several devices
      inside `shard_map`, or with a mesh that `per_device` knows), otherwise "chunked".
    chunk_size: steps in a chunk, a power of two; None means the default. The kernels have 64.

  Returns:
    `out` [B, T, H, V] and the `DeltaRuleState` after the last step.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation cannot run these arguments.

  Sources: fast weight programmers, Schlag et al. 2021, eq. 24; chunks, DeltaNet (Yang et al. 2024),
  eqs. 8-11; decay, Gated DeltaNet (Yang et al. 2025), eq. 10; one rate per column, Longhorn (Liu et
  al. 2024), theorem 3.1.
  """
  args, kwargs = _checked(
    q,
    k,
    v,
    beta,
    log_decay=log_decay,
    erase_key=erase_key,
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
  beta,
  *,
  log_decay=None,
  erase_key=None,
  scale=1.0,
  initial_state=None,
  segment_ids=None,
  chunk_size=None,
):
  """Checks the arguments of `delta_rule` and gives them the implementations' form."""
  q, k, v, beta = (jnp.asarray(x) for x in (q, k, v, beta))
  for name, x in (("q", q), ("k", k), ("v", v), ("beta", beta)):
    check_floating(_NAME, name, x)
  check_shape(_NAME, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
  check_shape(_NAME, "k", k, (B, T, H, K), "the shape of q, [B, T, H, K]")
  check_shape(_NAME, "v", v, (B, T, H, None), "[B, T, H] of q, then V")
  V = v.shape[-1]
  if 0 in q.shape + v.shape:
    raise ValueError(f"{_NAME}: q {q.shape} and v {v.shape} have an empty axis; T >= 1 is needed.")
  if beta.shape not in ((B, T, H), (B, T, H, V)):
    raise ValueError(
      f"{_NAME}: beta has shape {beta.shape}, but {[B, T, H]} (one rate per step and head) or "
      f"{[B, T, H, V]} (one per value column) is needed."
    )
  acc = accumulation_dtype(q, k, v)
  beta = beta.reshape(B, T, H, -1).astype(acc)
  if log_decay is None:
    # Hidden from the compiler, which would sum the zeros itself: seconds for each program.
    log_decay = lax.optimization_barrier(jnp.zeros((B, T, H), acc))
  else:
    check_floating(_NAME, "log_decay", log_decay)
    check_shape(_NAME, "log_decay", log_decay, (B, T, H), "[B, T, H]")
    log_decay = jnp.asarray(log_decay, acc)
  if erase_key is None:
    erase_key = k
  else:
    check_floating(_NAME, "erase_key", erase_key)
    check_shape(_NAME, "erase_key", erase_key, (B, T, H, K), "the shape of k, [B, T, H, K]")
    erase_key = jnp.asarray(erase_key)
  check_scale(_NAME, scale)
  check_chunk_size(_NAME, chunk_size)

  kv = jnp.zeros((B, H, K, V), acc)
  if initial_state is not None:
    check_shape(_NAME, "initial_state.kv", initial_state.kv, (B, H, K, V), "[B, H, K, V]")
    kv = jnp.asarray(initial_state.kv, acc)
  segments = segment_index(_NAME, segment_ids, B, T)
  args = vary_alike((q, k, v, beta, log_decay, erase_key, DeltaRuleState(kv), segments))
  return args, {"scale": float(scale), "chunk_size": chunk_size}


_LAYOUT = per_device.Layout(
  ("BTHK", "BTHK", "BTHV", "BTHV", "BTH", "BTHK", "BH", "BT"), ("BTHV", "BH")
)
_COMPILED, _INTERPRETED = dispatch.kernels(f"{__package__}.pallas", _LAYOUT)

dispatch.register(
  _NAME,
  _checked,
  _COMPILED,
  dispatch.Implementation("chunked", xla.chunked),
  dispatch.Implementation("reference", reference.reference),
  _INTERPRETED,
)
