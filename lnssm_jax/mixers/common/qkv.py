"""The base class of attention-like mixers: projections to queries, keys and values, and back."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common.checks import check_groups, check_heads, check_positive
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.ops import LinearAttentionState
from lnssm_jax.ops.core.precision import wide


class QKVMixer[State](Mixer[State]):
  """q_t = W_q x_t + b_q, likewise k and v; out_t = W_o y_t + b_o.

  Kernels start normal with standard deviation 0.02, that of W_o divided by sqrt(2 num_layers);
  biases start at zero. Source: GPT-2 (Radford et al. 2019), section 2.3, and its published code,
  which the code of the models built on this follows.

  Args:
    dim: D, the width; a multiple of `num_heads` where a head's width is D / H.
    num_heads: H.
    head_dim: K, the width of a head's queries and keys; None means D / H.
    value_head_dim: V, the width of a head's values; None means D / H.
    num_kv_heads: the number of key and value heads, a divisor of H; None means H.
    use_bias: whether projections have a bias: all four, none, "qkv" or "o".
    projected: which of W_q, W_k and W_v the layer has; a subclass makes the others' results.
    num_layers: of the model, for the initial W_o.
  """

  set_by_model = ("num_heads", "num_layers")

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    num_kv_heads: int | None = None,
    use_bias: bool | str = False,
    projected: str = "qkv",
    num_layers: int = 1,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    widths = {"head_dim": head_dim, "value_head_dim": value_head_dim}
    self.key_dim, self.value_dim = (
      check_heads(dim, num_heads) if width is None else check_positive(name, width)
      for name, width in widths.items()
    )
    self.num_kv_heads = check_groups("num_kv_heads", num_kv_heads, num_heads)
    check_positive("num_layers", num_layers)

    if use_bias not in (True, False, "qkv", "o"):
      raise ValueError(f"use_bias={use_bias!r} must be True, False, 'qkv' or 'o'.")

    def projection(inputs, outputs, std=0.02, part="qkv"):
      return Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.normal(std),
        bias_init="zeros" if use_bias in (True, part) else None,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
      )

    if "q" in projected:
      self.q_proj = projection(dim, num_heads * self.key_dim)
    if "k" in projected:
      self.k_proj = projection(dim, self.num_kv_heads * self.key_dim)
    if "v" in projected:
      self.v_proj = projection(dim, self.num_kv_heads * self.value_dim)
    self.o_proj = projection(num_heads * self.value_dim, dim, 0.02 / math.sqrt(2 * num_layers), "o")

  def _empty_recurrent(
    self, B: int, keys: int | None = None, *, normalize: bool = False
  ) -> LinearAttentionState:
    """Zeros: kv [B, H, keys, V], keys = K unless given, and with `normalize` key_sum."""
    H, keys = self.num_heads, self.key_dim if keys is None else keys
    key_sum = jnp.zeros((B, H, keys), jnp.float32) if normalize else None
    return LinearAttentionState(jnp.zeros((B, H, keys, self.value_dim), jnp.float32), key_sum)

  def _queries_keys_values(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [B, T, H, K], k [B, T, kv heads, K], v [B, T, kv heads, V]; float32 at least."""
    heads = lambda projection, number: split_heads(wide(projection(x)), number)
    q = heads(self.q_proj, self.num_heads)
    return q, heads(self.k_proj, self.num_kv_heads), heads(self.v_proj, self.num_kv_heads)

  def _output(self, y: jax.Array) -> jax.Array:
    """[B, T, H, V] -> [B, T, D] in `dtype`."""
    return self.o_proj(merge_heads(y).astype(self.dtype)).astype(self.dtype)
