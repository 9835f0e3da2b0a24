"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch
from lnssm_jax.ops.checks import (
  accumulation_dtype,
  check_chunk_size,
  check_floating,
  check_shape,
  checked_state,
  segment_index,
  vary_alike,
)
from lnssm_jax.ops.elementwise_decay_scan import reference, xla
from lnssm_jax.ops.elementwise_decay_scan.state import DecayFunction, ElementwiseDecayState

_NAME = "elementwise_decay_scan"


def elementwise_decay_scan(
  q: jax.Array,  # [B, T, H, K]
  k: jax.Array,  # [B, T, H, K]
  v: jax.Array,  # [B, T, H, V]
  log_decay: jax.Array | DecayFunction,  # [B, T, H, K, V] or [H, K, V], values <= 0
  *,
  initial_state: ElementwiseDecayState | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, ElementwiseDecayState]:
  r"""Linear attention in which every entry of the state decays by its own factor.

      S_t = A_t ⊙ S_{t-1} + k_t v_t^T        A = exp(log_decay)
      out_t = S_t^T q_t

  For decays that are not a product of a key and a value factor; `linear_attention` is much faster
  for those that are. `log_decay` is an array `[H, K, V]` (constant), an array `[B, T, H, K, V]`, or
  a `DecayFunction` that makes `[B, C, H, K, V]` for some of the steps. The chunked form then holds
  a few chunks of that size and the states between chunks, in the backward pass too, and never an
  array of `T K V` entries per head. Any value from 0 down to -inf is exact to the dtype.

  States, decays and sums are float32 (float64 if an input is) whatever the dtype of q, k, v; `out`
  has the dtype of `v`. Cutting a sequence anywhere and passing the state on gives the same result
  as one call; so does packing several sequences with `segment_ids` (the state is reset where the id
  changes; `initial_state` belongs to the first segment, the returned state to the last). Gradients
  flow to every array argument, to `initial_state` and from the returned state. Reverse mode only,
  of any order.

  Args:
    initial_state: the state before the first step; None means zeros.
    implementation: "chunked" (what None takes), "associative" (one scan of depth log T over all
      steps, which holds [B, T, H, K, V]), "reference" (one step at a time).
    chunk_size: steps in a chunk of the chunked form, a power of two; None means the default.

  Returns:
    `out` [B, T, H, V] and the `ElementwiseDecayState` after the last step.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.

  Sources: recomputation from chunk to chunk, Mamba (Gu and Dao 2023), section 3.3; systems with
  such decays, LCSM (Qin et al. 2024).
  """
  args, kwargs = _checked(
    q,
    k,
    v,
    log_decay,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(q, k, v, log_decay, *, initial_state=None, segment_ids=None, chunk_size=None):
  """Checks the arguments and gives them the implementations' form: the decay as a function."""
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  for name, x in (("q", q), ("k", k), ("v", v)):
    check_floating(_NAME, name, x)
  check_shape(_NAME, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
  check_shape(_NAME, "k", k, (B, T, H, K), "the shape of q, [B, T, H, K]")
  check_shape(_NAME, "v", v, (B, T, H, None), "[B, T, H] of q, then V")
  V = v.shape[-1]
  if 0 in (T, H, K, V):
    raise ValueError(f"{_NAME}: q {q.shape} and v {v.shape} have an empty axis; T >= 1 is needed.")
  check_chunk_size(_NAME, chunk_size)

  log_decay, made = _as_function(log_decay, (B, T, H, K, V))
  acc = accumulation_dtype(q, k, v, made)
  state = checked_state(
    _NAME, ElementwiseDecayState, initial_state, (B, H, K, V), "[B, H, K, V]", acc
  )
  segments = segment_index(_NAME, segment_ids, B, T)
  args = vary_alike((q, k, v, log_decay, state, segments))
  return args, {"chunk_size": chunk_size}


def _as_function(log_decay, shape):
  """Every kind of decay as a `DecayFunction`, and an array of the dtype that it makes."""
  B, T, H, K, V = shape
  if not isinstance(log_decay, DecayFunction):
    check_floating(_NAME, "log_decay", log_decay)
    log_decay = jnp.asarray(log_decay)
    if log_decay.shape == (H, K, V):
      return DecayFunction(_constant, (), log_decay[None, None]), log_decay
    elif log_decay.shape == shape:
      return DecayFunction(_given, log_decay), log_decay
    raise ValueError(
      f"{_NAME}: log_decay has shape {log_decay.shape}, but one of {[H, K, V]} (constant), "
      f"{list(shape)} (every step) is needed, or a DecayFunction."
    )
  steps = jax.tree.map(jnp.asarray, log_decay.steps)
  parameters = jax.tree.map(jnp.asarray, log_decay.parameters)
  for path, x in jax.tree_util.tree_leaves_with_path(steps):
    if x.shape[:2] != (B, T):
      name = "log_decay.steps" + jax.tree_util.keystr(path)
      raise ValueError(
        f"{_NAME}: {name} has shape {x.shape}; it must begin with [B, T] = {[B, T]}."
      )
  made = jax.eval_shape(log_decay.make, jax.tree.map(lambda x: x[:, :1], steps), parameters)
  check_shape(_NAME, "log_decay.make of one step", made, (B, 1, H, K, V), "[B, 1, H, K, V]")
  check_floating(_NAME, "log_decay.make of one step", made)
  return DecayFunction(log_decay.make, steps, parameters), made


def _given(steps, parameters):
  del parameters
  return steps


def _constant(steps, parameters):
  del steps
  return parameters


dispatch.register(
  _NAME,
  _checked,
  dispatch.Implementation("chunked", xla.chunked),
  dispatch.Implementation("associative", xla.associative),
  dispatch.Implementation("reference", reference.reference),
)
