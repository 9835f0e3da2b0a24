"""Attention from one sequence to another of its own length, as of a decoder to its encoder."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.checks import check_heads, check_positive, check_rngs
from lnssm_jax.mixers.common.lengths import checked_lengths, without_padding
from lnssm_jax.ops.core.checks import check_floating, check_shape


class CrossAttention(nnx.Module):
  """softmax(q k^T / sqrt(K)) v with q of x [B, T, D] and k, v of context [B, S, C]: [B, T, D].

      y = x + cross(norm(x), encoder(features)[0], context_lengths=lengths)

  Every token of x sees the whole context; nothing is causal, and there is no state. It runs in
  XLA's form (`jax.nn.dot_product_attention`), scores in float32 or wider.

  Args:
    context_dim: C; None: `dim`.
    head_dim: K; None: dim / num_heads.

  Raises:
    ValueError: a size is no positive number, or `num_heads` does not divide `dim`.

  Source: Attention Is All You Need (Vaswani et al. 2017), section 3.2.3.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    context_dim: int | None = None,
    head_dim: int | None = None,
    use_bias: bool = False,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    check_rngs("CrossAttention", rngs)
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.num_heads = check_positive("num_heads", num_heads)
    K = check_heads(dim, num_heads) if head_dim is None else check_positive("head_dim", head_dim)
    self.head_dim = K
    C = self.context_dim = (
      dim if context_dim is None else check_positive("context_dim", context_dim)
    )
    options = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.q_proj = nnx.Linear(dim, num_heads * K, **options)
    self.k_proj = nnx.Linear(C, num_heads * K, **options)
    self.v_proj = nnx.Linear(C, num_heads * K, **options)
    self.o_proj = nnx.Linear(num_heads * K, dim, **options)

  def __call__(
    self, x: jax.Array, context: jax.Array, *, context_lengths: jax.Array | None = None
  ) -> jax.Array:
    """Returns y [B, T, D] in `dtype`.

    Args:
      x: [B, T, D] floating point.
      context: [B, S, C] floating point, of any length S.
      context_lengths: [B] integer, 0 to S, of contexts padded on the right; padding may hold
        anything. Where it is 0, heads return 0.

    Raises:
      ValueError: a shape, dtype or length is wrong; the message names the argument.
    """
    name = "CrossAttention"
    check_shape(name, "x", x, (None, None, self.dim), "[B, T, D]")
    check_shape(name, "context", context, (len(x), None, self.context_dim), "[B, S, C]")
    check_floating(name, "x", x)
    check_floating(name, "context", context)
    mask = None
    if context_lengths is not None:
      ends = checked_lengths(name, context_lengths, context, None, None)
      context = without_padding(context, ends)
      mask = (jnp.arange(context.shape[1]) < ends[:, None])[:, None, None]  # [B, 1, 1, S]
    heads = lambda x: x.reshape(*x.shape[:2], self.num_heads, self.head_dim)
    q, k, v = heads(self.q_proj(x)), heads(self.k_proj(context)), heads(self.v_proj(context))
    out = jax.nn.dot_product_attention(q, k, v, mask=mask)
    if mask is not None:
      out = jnp.where(mask.any(-1)[..., None], out, 0)  # of no context at all
    return self.o_proj(out.reshape(*x.shape[:2], -1))
