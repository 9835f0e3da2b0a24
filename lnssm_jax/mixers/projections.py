"""What attention-like mixers share: projections to queries, keys and values by heads, and back."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.checks import check_heads, check_positive
from lnssm_jax.mixers.layers import linear, merge_heads, split_heads, wide
from lnssm_jax.ops import LinearAttentionState


class Projections(nnx.Module):
  """q_t = W_q x_t + b_q, likewise k and v; out_t = W_o y_t + b_o. Biases are there on request.

  Kernels start normal with standard deviation 0.02, that of W_o divided by sqrt(2 num_layers);
  biases start at zero. Source: GPT-2 (Radford et al. 2019), section 2.3, and its published code,
  which the code of the models built on this follows.
  """

  def _build(
    self,
    dim: int,
    num_heads: int,
    *,
    key_dim: int | None = None,
    kv_heads: int | None = None,
    use_bias: bool = False,
    num_layers: int = 1,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    """`key_dim` is K of a head, None for D / H; `kv_heads` the number of key and value heads."""
    self.value_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    self.key_dim = self.value_dim if key_dim is None else check_positive("key_dim", key_dim)
    self.kv_heads = num_heads if kv_heads is None else check_positive("kv_heads", kv_heads)
    if num_heads % self.kv_heads:
      raise ValueError(
        f"kv_heads={kv_heads} does not divide num_heads={num_heads}: each key and value head "
        "serves equally many query heads."
      )
    check_positive("num_layers", num_layers)

    def projection(outputs, std=0.02, inputs=dim):
      init = nnx.initializers.normal(std)
      return linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    bias = lambda size: nnx.Param(jnp.zeros(size, param_dtype)) if use_bias else None
    queries, keys = num_heads * self.key_dim, self.kv_heads * self.key_dim
    values = self.kv_heads * self.value_dim
    self.q_proj, self.q_bias = projection(queries), bias(queries)
    self.k_proj, self.k_bias = projection(keys), bias(keys)
    self.v_proj, self.v_bias = projection(values), bias(values)
    self.o_proj, self.o_bias = projection(dim, 0.02 / math.sqrt(2 * num_layers)), bias(dim)

  def _empty_memory(
    self, batch_size: int, keys: int, *, normalize: bool = False
  ) -> LinearAttentionState:
    """Zeros: kv [B, H, keys, V] and, to `normalize`, key_sum [B, H, keys]."""
    B, H = check_positive("batch_size", batch_size), self.num_heads
    key_sum = jnp.zeros((B, H, keys), jnp.float32) if normalize else None
    return LinearAttentionState(jnp.zeros((B, H, keys, self.value_dim), jnp.float32), key_sum)

  def _queries_keys_values(self, x: jax.Array):
    """q [B, T, H, K], k [B, T, kv_heads, K], v [B, T, kv_heads, V]; float32 at least."""
    q = _affine(x, self.q_proj, self.q_bias)
    k, v = _affine(x, self.k_proj, self.k_bias), _affine(x, self.v_proj, self.v_bias)
    return split_heads(q, self.num_heads), *(split_heads(z, self.kv_heads) for z in (k, v))

  def _output(self, y: jax.Array) -> jax.Array:
    """[B, T, H, V] -> [B, T, D] in `dtype`."""
    return _affine(merge_heads(y).astype(self.dtype), self.o_proj, self.o_bias).astype(self.dtype)


def _affine(x, projection, bias):
  """W x + b, in float32 at least."""
  z = wide(projection(x))
  return z if bias is None else z + wide(bias[...])


def feature_dtype(dtype):
  """The dtype of features that grow like exp or a square: float32 for float16, which is too narrow.

  bfloat16 has the range of float32.
  """
  return jnp.dtype(jnp.float32) if jnp.dtype(dtype) == jnp.float16 else jnp.dtype(dtype)
