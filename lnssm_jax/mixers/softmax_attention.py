"""Softmax attention, over the whole sequence or a sliding window: the baselines, with a cache."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.checks import check_call, check_choice, check_positive
from lnssm_jax.mixers.divided import Divisible
from lnssm_jax.mixers.projections import Projections
from lnssm_jax.ops import AttentionState, init_attention_state, rotary_embedding
from lnssm_jax.ops.sequence_parallel import attention, step_positions

POSITIONS = ("rotary", "none")


class _Attention(Divisible, Projections):
  """What both share: heads, rotations, and a cache for `window` steps with the present one."""

  def _build_attention(self, dim, num_heads, window, positions, rotary_base, **options):
    self._build(dim, num_heads, **options)
    self.window, self.rotary_base = window, rotary_base
    self.positions = check_choice("positions", positions, POSITIONS)
    if positions == "rotary" and self.key_dim % 2:
      raise ValueError(
        f"dim={dim} and num_heads={num_heads} give keys of odd width {self.key_dim}, but pairs of "
        "channels rotate; change one of the two, or use positions='none'."
      )
    if not rotary_base > 0:
      raise ValueError(f"rotary_base={rotary_base} must be positive.")

  def init_state(self, batch_size: int) -> AttentionState:
    """The state before the first token: an empty cache, in `dtype`."""
    B = check_positive("batch_size", batch_size)
    size = {"window": self.window, "dtype": self.dtype}
    return init_attention_state(B, self.kv_heads, self.key_dim, self.value_dim, **size)

  def _positions(self, batch, length, state, segment_ids) -> jax.Array:
    before = None if state is None else state.position
    return step_positions(batch, length, segment_ids, before, axis_name=self.sequence_axis)[0]

  def _attend(self, x, state, segment_ids, positions) -> tuple[jax.Array, Any]:
    q, k, v = self._queries_keys_values(x)
    if self.positions == "rotary":
      q = rotary_embedding(q, positions, self.rotary_base)
      k = rotary_embedding(k, positions, self.rotary_base)
    q, k, v = (z.astype(self.dtype) for z in (q, k, v))
    return attention(
      q,
      k,
      v,
      window=self.window,
      axis_name=self.sequence_axis,
      initial_state=state,
      segment_ids=segment_ids,
    )


class SoftmaxAttention(_Attention):
  r"""Causal softmax attention over all earlier tokens of the sequence, up to `max_length`.

      q_t = R_t W_q x_t,  k_t = R_t W_k x_t,  v_t = W_v x_t       R_t rotates pairs of channels by t
      y_t = sum_{j <= t} p_tj v_j,    p_t = softmax_j(K^(-1/2) q_t . k_j)           for each head
      out_t = W_o y_t

  Its state is no recurrence's: it is the cache of all keys and values, of the fixed size of
  `max_length` - 1 steps, in `dtype`. A longer sequence has no result. Where that is known when the
  layer is called (the length of x without segments, and a state outside of `jit`), it is an error;
  elsewhere the outputs from step `max_length` of the sequence on are NaN.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    max_length: the most tokens of one sequence, over all calls that pass the state on.
    kv_heads: the number of key and value heads, a divisor of H; each serves H / kv_heads query
      heads. None means H.
    positions: "rotary", for which K must be even, or "none" (the model's business).
    rotary_base: the slowest pair of channels turns by about 1 / rotary_base a step.
    use_bias: whether the four projections have a bias.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections, of q, k, v and of the cache; scores, softmax and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Deviation: no dropout of the probabilities, which some of the compared papers have (0.1).

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive or does not fit, or
      `positions` is unknown.

  Sources: Vaswani et al. 2017, eq. 1; rotations, RoFormer (Su et al. 2021), eq. 15; grouped heads,
  Ainslie et al. 2023.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    max_length: int = 2048,
    kv_heads: int | None = None,
    positions: str = "rotary",
    rotary_base: float = 10000.0,
    use_bias: bool = False,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.max_length = check_positive("max_length", max_length)
    self._build_attention(
      dim,
      num_heads,
      max_length,
      positions,
      rotary_base,
      kv_heads=kv_heads,
      use_bias=use_bias,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: AttentionState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, AttentionState]:
    """Returns (out [B, T, D] in `dtype`, the cache after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong, or the sequence gets longer than `max_length`; the
        message names the argument.
    """
    check_call(self, x, state, segment_ids)
    B, T, _ = x.shape
    before = None if state is None else state.position
    axis = self.sequence_axis
    check_capacity("SoftmaxAttention", T, before, segment_ids, self.max_length, axis)
    positions = self._positions(B, T, state, segment_ids)
    y, state = self._attend(x, state, segment_ids, positions)
    return nan_beyond(self._output(y), positions, self.max_length), state


class SlidingWindowAttention(_Attention):
  r"""Causal softmax attention over the last `window` tokens, the present one included.

      q_t = R_t W_q x_t,  k_t = R_t W_k x_t,  v_t = W_v x_t       R_t rotates pairs of channels by t
      y_t = sum_{t - window < j <= t} p_tj v_j                                      for each head
      p_t = softmax_j(K^(-1/2) q_t . k_j),      out_t = W_o y_t

  The state is the cache of the last `window` - 1 keys and values, in `dtype`; sequences may have
  any length. A window that is described by the w tokens before the present one, as in Griffin's
  and Zoology's code, is window = w + 1.

  Args:
    dim: D, the width; a multiple of `num_heads`. K = V = D / H.
    num_heads: H.
    window: the most tokens that one token sees.
    kv_heads: the number of key and value heads, a divisor of H; each serves H / kv_heads query
      heads. None means H.
    positions: "rotary", for which K must be even, or "none" (the model's business).
    rotary_base: the slowest pair of channels turns by about 1 / rotary_base a step.
    use_bias: whether the four projections have a bias.
    num_layers: how many layers the model has, for the initial W_o (see `Projections`).
    dtype: of the projections, of q, k, v and of the cache; scores, softmax and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive or does not fit, or
      `positions` is unknown.

  Sources: Longformer (Beltagy et al. 2020), section 3.1; Griffin (De et al. 2024), section 2.3;
  without Griffin's single key head and rotation of half the channels.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    window: int = 1024,
    kv_heads: int | None = None,
    positions: str = "rotary",
    rotary_base: float = 10000.0,
    use_bias: bool = False,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self._build_attention(
      dim,
      num_heads,
      check_positive("window", window),
      positions,
      rotary_base,
      kv_heads=kv_heads,
      use_bias=use_bias,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: AttentionState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, AttentionState]:
    """Returns (out [B, T, D] in `dtype`, the cache after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    B, T, _ = x.shape
    positions = self._positions(B, T, state, segment_ids)
    y, state = self._attend(x, state, segment_ids, positions)
    return self._output(y), state
