"""Softmax attention, over the whole sequence or a sliding window, with a cache as its state."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.common.checks import check_choice, check_positive, check_soft_cap
from lnssm_jax.mixers.common.latents import Latents
from lnssm_jax.mixers.common.norms import RMSNorm, RMSNormFromZero
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.qkv import QKVMixer
from lnssm_jax.ops import AttentionState, attention, rotary_embedding
from lnssm_jax.ops.attention.cache import advance
from lnssm_jax.ops.attention.rotary import check_scaling
from lnssm_jax.ops.attention.types import Mask, Tokens
from lnssm_jax.ops.core.dropout import check_rate
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import segments_of

POSITIONS = ("rotary", "none")
QK_NORMS: dict[Any, Any] = {
  False: None,
  True: RMSNorm,
  "rms": RMSNorm,
  "rms_from_zero": RMSNormFromZero,
  "rms_of_all": RMSNorm,
}


class SoftmaxAttention(QKVMixer[AttentionState]):
  r"""Causal softmax attention over all earlier tokens, or over the last `window` tokens.

      q_t = R_t W_q x_t,  k_t = R_t W_k x_t,  v_t = W_v x_t       R_t rotates pairs of channels by t
      y_t = sum_{t - window < j <= t} p_tj v_j                                     per head
      p_t = softmax_j(scale q_t . k_j),      out_t = W_o y_t,      scale = K^(-1/2)

  The defaults are LLaMA's layer. With num_kv_heads it is that of Llama 3 and Mistral, Llama 3.1 has
  `rotary_scaling`; Qwen2 has use_bias="qkv", Qwen3 qk_norm=True and norm_eps=1e-6, Qwen3-Next
  qk_norm="rms_from_zero", use_gate=True and rotary_width=K / 4, Gemma 2 `scale` and `soft_cap`,
  gpt-oss `sinks`, Griffin's models (RecurrentGemma) num_kv_heads=1, rotary_width=K / 2 and
  use_bias="o".

  With kv_rank it is multi-head latent attention (MLA): keys and values of all heads come from one
  vector c_t of a token, and `rotary_width` channels of the keys, which all heads share, from x_t:

      [r_t, c_t] = W_dkv x_t,      k_t = [R_t r_t, W_uk c_t],  v_t = W_uv c_t     c_t with RMSNorm
      q_t = [R_t ., .] = W_q x_t, or with q_rank W_uq RMSNorm(W_dq x_t)

  DeepSeek-V2 and V3: kv_rank=512, q_rank=1536, head_dim=192, rotary_width=64, value_head_dim=128
  for kv_lora_rank, q_lora_rank, qk_nope_head_dim + qk_rope_head_dim, qk_rope_head_dim and
  v_head_dim; their kernels have rotated channels last, in neighboring pairs. Kimi Linear has
  positions="none" besides. The cache has [R_t r_t, c_t] alone, as k. One token reads it as it is,
  with queries W_uk^T q_t; more tokens compute its keys and values.

  The state is the cache of the last `window` - 1 keys and values, in `dtype`. With window=None it
  is that of all `max_length` - 1 earlier tokens, and longer sequences are rejected: with an error
  where the length is known when the layer is called (no segments, and a state outside of `jit`);
  elsewhere the outputs from token `max_length` of the sequence on are NaN.

  Args:
    dim: D, the width; a multiple of `num_heads` where a head's width is D / H.
    num_heads: H.
    head_dim: K, the width of a head's queries and keys; None means D / H.
    value_head_dim: V, the width of a head's values; None means D / H.
    window: the number of tokens that a token sees, the current one included; None means all. A
      window that is described by the w tokens before the current one, as in Griffin's and Zoology's
      code, is window = w + 1.
    max_length: without a window, the maximum number of tokens of one sequence, over all calls that
      carry a state.
    num_kv_heads: the number of key and value heads, a divisor of H: each serves equally many query
      heads. None means H.
    positions: "rotary", for which K must be even, or "none".
    rotary_base: the slowest pair of channels rotates by about 1 / rotary_base per token.
    rotary_width: how many of the first channels of a head rotate, an even number; None means K.
    rotary_scaling: slower rotations for longer sequences, a rule and its numbers: `scaling` of
      `lnssm_jax.ops.rotary_embedding`. None for none. "dynamic" needs a `max_length` of at most its
      original_length.
    qk_norm: RMSNorm of each head's queries and keys before the rotation, with a scale [K] for each:
      True or "rms", or "rms_from_zero" with 1 + scale; "rms_of_all" norms those of all heads
      together, with scales [H K] and [kv heads K] (OLMo 2); False for none.
    norm_eps: eps of these norms, under the root.
    scale: of the scores; None means K^(-1/2).
    soft_cap: c, with which a score s becomes c tanh(s / c) before the softmax; None for none.
    sinks: whether the denominator of each head's softmax has a learned exp(b_h), too (gpt-oss).
    kv_rank, q_rank: the widths of c_t and of the vector before W_uq; None for neither.
    use_bias: whether projections have a bias: all four, none, "qkv" or "o". With `kv_rank`, "qkv"
      are W_dkv and W_dq.
    use_gate: whether sigmoid(W_g x_t) multiplies y_t, with a bias as that of q; "heads" has one
      number per head (Ling 3.0).
    attention_dropout: the rate at which probabilities p_tj are dropped in a call with `dropout_key`
      (GPT-2 and Zoology: 0.1).
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    dtype: of the projections, of q, k, v and of the cache; scores, softmax and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, a size is not positive or does not fit, or
      `positions` is unknown.

  Sources: Vaswani et al. 2017, eq. 1; rotations, RoFormer (Su et al. 2021), eq. 15; grouped heads,
  Ainslie et al. 2023; windows, Longformer (Beltagy et al. 2020), section 3.1.
  """

  name = "softmax_attention"
  sharding = (
    (r"latents/\w+_down_proj/kernel", ("fsdp", None)),
    (r"latents/\w+_up_proj/kernel", (None, ("tensor", "fsdp"))),
    (r"latents/\w+_proj/bias", (None,)),
    (r"mixer/sinks", (None,)),
  )
  recurrence_flops = flops.attention

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    window: int | None = None,
    max_length: int = 2048,
    num_kv_heads: int | None = None,
    positions: str = "rotary",
    rotary_base: float = 10000.0,
    rotary_width: int | None = None,
    rotary_scaling: Mapping[str, Any] | None = None,
    qk_norm: bool | str = False,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    kv_rank: int | None = None,
    q_rank: int | None = None,
    use_bias: bool | str = False,
    use_gate: bool | str = False,
    attention_dropout: float = 0.0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.window = None if window is None else check_positive("window", window)
    check_positive("max_length", max_length)
    self.max_length = max_length if window is None else None
    self.reach = max_length if window is None else window  # tokens that one sees, with itself
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(
      dim,
      num_heads=num_heads,
      head_dim=head_dim,
      value_head_dim=value_head_dim,
      num_kv_heads=num_kv_heads,
      use_bias=use_bias,
      projected="qkv" if kv_rank is None else "q" * (q_rank is None),
      num_layers=num_layers,
      **options,
    )
    self.rotary_base = rotary_base
    self.positions = check_choice("positions", positions, POSITIONS)
    self.rotary_width = rotary_width
    if rotary_width is not None and (rotary_width % 2 or not 0 < rotary_width <= self.key_dim):
      raise ValueError(
        f"rotary_width={rotary_width} must be even, and at least 2 and at most K={self.key_dim}."
      )
    if positions == "rotary" and rotary_width is None and self.key_dim % 2:
      raise ValueError(
        f"dim={dim}, num_heads={num_heads} and head_dim={head_dim} give keys of odd width "
        f"{self.key_dim}, but pairs of channels rotate; change one of them, give rotary_width, or "
        "use positions='none'."
      )
    if not rotary_base > 0:
      raise ValueError(f"rotary_base={rotary_base} must be positive.")
    self.scale, self.soft_cap = scale, check_soft_cap("soft_cap", soft_cap)
    initial = nnx.initializers.normal(0.02)
    self.sinks = nnx.Param(initial(rngs.params(), (num_heads,), param_dtype)) if sinks else None
    self.attention_dropout = check_rate("attention_dropout", attention_dropout)
    scaling = None if rotary_scaling is None else tuple(check_scaling(rotary_scaling).items())
    self.rotary_scaling = scaling  # hashable, as Flax needs it
    if rotary_scaling is not None and rotary_scaling["rule"] == "dynamic":
      longest = rotary_scaling["original_length"]
      if self.max_length is None or self.max_length > longest:
        raise ValueError(
          f"max_length={self.max_length}, window={window}: with the 'dynamic' rotary_scaling "
          f"max_length must be at most {longest}, its original_length, and window None: "
          "in longer sequences every rotation depends on their length."
        )
    check_choice("qk_norm", qk_norm, QK_NORMS)
    heads = (num_heads, self.num_kv_heads) if qk_norm == "rms_of_all" else (1, 1)
    norm = lambda n: QK_NORMS[qk_norm](n * self.key_dim, eps=norm_eps, param_dtype=param_dtype)
    self.q_norm, self.k_norm = map(norm, heads) if qk_norm else (None, None)
    self.norms_all = qk_norm == "rms_of_all"
    check_choice("use_gate", use_gate, (False, True, "heads"))
    gate = lambda: Linear(
      dim,
      num_heads if use_gate == "heads" else num_heads * self.value_dim,
      kernel_init=nnx.initializers.normal(0.02),
      bias_init="zeros" if use_bias in (True, "qkv") else None,
      **options,
    )
    self.g_proj = gate() if use_gate else None
    self.latents = (
      None
      if kv_rank is None and q_rank is None
      else self._latents(
        kv_rank, q_rank, qk_norm, num_kv_heads, use_bias in (True, "qkv"), norm_eps, options
      )
    )

  def _latents(self, kv_rank, q_rank, qk_norm, num_kv_heads, use_bias, eps, options) -> Latents:
    """The projections of latent attention."""
    width, heads = self.rotary_width, self.num_heads
    if kv_rank is None or width is None or qk_norm or num_kv_heads not in (None, heads):
      raise ValueError(
        f"kv_rank={kv_rank}, q_rank={q_rank}, rotary_width={width}, qk_norm={qk_norm} and "
        f"num_kv_heads={num_kv_heads}: latent attention needs kv_rank and rotary_width, and has "
        "neither qk_norm nor num_kv_heads."
      )
    return Latents(
      self.dim,
      num_heads=heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
      shared=width,
      kv_rank=check_positive("kv_rank", kv_rank),
      q_rank=None if q_rank is None else check_positive("q_rank", q_rank),
      use_bias=use_bias,
      eps=eps,
      **options,
    )

  def _init_state(self, B):
    widths = {"kv_heads": self.num_kv_heads, "key_dim": self.key_dim, "value_dim": self.value_dim}
    if self.latents is not None:
      widths = {"kv_heads": 1, "key_dim": self.latents.cached_dim, "value_dim": 0}
    return attention.init_state(batch=B, **widths, window=self.reach, dtype=self.dtype)

  def _mix(self, x, state, segment_ids):
    return self._mix_dropping(x, state, segment_ids, None)

  def _mix_dropping(self, x, state, segment_ids, dropout_key) -> tuple[jax.Array, Any]:
    B, T, _ = x.shape
    before, axis = None if state is None else state.position, self.sequence_axis
    if self.max_length is not None:
      check_capacity(type(self).__name__, T, before, segment_ids, self.max_length, axis)
    positions, _ = step_positions(B, T, segment_ids, before, axis_name=axis)
    run = functools.partial(
      attention,
      window=self.reach,
      scale=self.key_dim**-0.5 if self.scale is None else self.scale,
      soft_cap=self.soft_cap,
      sinks=None if self.sinks is None else self.sinks[...],
      dropout=self.attention_dropout,
      dropout_key=dropout_key,
      axis_name=axis,
      segment_ids=segment_ids,
    )
    if self.latents is None:
      q, k, v = self._queries_keys_values(x)
      if self.q_norm is not None and self.k_norm is not None:
        of_all = lambda norm, x: norm(merge_heads(x)).reshape(x.shape)
        normed = of_all if self.norms_all else lambda norm, x: norm(x)
        q, k = normed(self.q_norm, q), normed(self.k_norm, k)
      q, k = self._rotated(q, positions), self._rotated(k, positions)
      y, cache = run(*(z.astype(self.dtype) for z in (q, k, v)), initial_state=state)
    else:
      y, cache = self._read(self.latents, run, x, positions, state, segment_ids)
    if self.g_proj is not None:
      gate = jax.nn.sigmoid(split_heads(wide(self.g_proj(x)), self.num_heads))
      y = wide(y) * gate  # [B, T, H, V], or one per head
    out = self._output(y)
    return out if self.max_length is None else nan_beyond(out, positions, self.max_length), cache

  def _rotated(self, x, positions):
    if self.positions == "none":
      return x
    scaling = None if self.rotary_scaling is None else dict(self.rotary_scaling)
    width = self.rotary_width
    return rotary_embedding(x, positions, self.rotary_base, width=width, scaling=scaling)

  def _read(self, latents: Latents, run, x, positions, state, segment_ids):
    """(y [B, T, H, V], the cache) of latent attention."""
    q = latents.queries(x) if latents.q_up_proj else split_heads(self.q_proj(x), self.num_heads)
    q = self._rotated(wide(q), positions)
    shared, latent = latents.down(x)
    cached = jnp.concatenate([self._rotated(shared, positions), latent], axis=-1).astype(self.dtype)
    if x.shape[1] == 1 or self.sequence_axis is not None:
      if state is not None:
        state = state._replace(v=latents.of_values(state.k))
      q = latents.absorbed(q).astype(self.dtype)
      y, state = run(q, cached, latents.of_values(cached), initial_state=state)
      return latents.values(y), state._replace(v=state.v[..., :0])
    B, T, _ = x.shape
    segments = segments_of(type(self).__name__, segment_ids, B, T)
    document = jnp.zeros_like(positions) if segments is None else segments.index
    mask, tokens = Mask(self.reach, None, True), Tokens(positions, document)
    last = advance(mask, state, cached, cached[..., :0], tokens)
    if state is not None:
      keys, values = latents.expanded(state.k)
      state = state._replace(k=keys, v=values)
    y, _ = run(q.astype(self.dtype), *latents.expanded(cached), initial_state=state)
    return y, last


class SlidingWindowAttention(SoftmaxAttention):
  """`SoftmaxAttention` with a window of 1,024 tokens unless another is given.

  Args:
    window: as in `SoftmaxAttention`, but not None; the other arguments are the same.

  Raises:
    ValueError: as in `SoftmaxAttention`.

  Sources: Longformer (Beltagy et al. 2020), section 3.1; Griffin (De et al. 2024), section 2.3,
  with num_kv_heads=1 and rotary_width=K / 2.
  """

  name = "sliding_window_attention"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    window: int = 1024,
    num_kv_heads: int | None = None,
    positions: str = "rotary",
    rotary_base: float = 10000.0,
    rotary_width: int | None = None,
    rotary_scaling: Mapping[str, Any] | None = None,
    qk_norm: bool | str = False,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: bool = False,
    kv_rank: int | None = None,
    q_rank: int | None = None,
    use_bias: bool | str = False,
    use_gate: bool = False,
    attention_dropout: float = 0.0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    super().__init__(
      dim,
      num_heads=num_heads,
      head_dim=head_dim,
      value_head_dim=value_head_dim,
      window=check_positive("window", window),
      num_kv_heads=num_kv_heads,
      positions=positions,
      rotary_base=rotary_base,
      rotary_width=rotary_width,
      rotary_scaling=rotary_scaling,
      qk_norm=qk_norm,
      norm_eps=norm_eps,
      scale=scale,
      soft_cap=soft_cap,
      sinks=sinks,
      kv_rank=kv_rank,
      q_rank=q_rank,
      use_bias=use_bias,
      use_gate=use_gate,
      attention_dropout=attention_dropout,
      num_layers=num_layers,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
