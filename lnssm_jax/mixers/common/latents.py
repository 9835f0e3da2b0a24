"""Multi-head latent attention: keys and values of all heads from one vector per token."""

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, split_heads
from lnssm_jax.ops.core.precision import product, wide


class Latents(nnx.Module):
  """Projections through vectors of low rank: c_t of keys and values, c'_t of queries.

      [r_t, c_t] = W_dkv x_t,  c_t = RMSNorm(c_t)              r_t: shared by all heads
      k_t = [rotated r_t, W_uk c_t],  v_t = W_uv c_t           per head
      q_t = [rotated, unrotated] = W_uq RMSNorm(W_dq x_t)      with q_rank

  What is cached of a token is [rotated r_t, c_t]. Scores of a query read it directly as well: q_t .
  (W_uk c_t) = (W_uk^T q_t) . c_t, and a sum of values is W_uv times the sum of c_t.

  Args:
    dim: D.
    num_heads, key_dim, value_dim: H, K, V.
    shared: the width of r_t.
    kv_rank, q_rank: of c_t and c'_t; no q_rank: queries are W_q x_t.
    use_bias: whether W_dkv and W_dq have biases.
    eps: of the norms.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    shared: int,
    kv_rank: int,
    q_rank: int | None,
    use_bias: bool,
    eps: float,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    self.num_heads, self.shared, self.dtype = num_heads, shared, dtype

    def linear(inputs, outputs, bias=False):
      init, bias_init = nnx.initializers.normal(0.02), "zeros" if bias else None
      options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
      return Linear(inputs, outputs, kernel_init=init, bias_init=bias_init, **options)

    norm = lambda width: RMSNorm(width, eps=eps, param_dtype=param_dtype)
    self.kv_down_proj = linear(dim, shared + kv_rank, use_bias)
    self.kv_norm = norm(kv_rank)
    self.k_up_proj = linear(kv_rank, num_heads * (key_dim - shared))
    self.v_up_proj = linear(kv_rank, num_heads * value_dim)
    has_rank = q_rank is not None
    self.q_down_proj = linear(dim, q_rank, use_bias) if has_rank else None
    self.q_norm = norm(q_rank) if has_rank else None
    self.q_up_proj = linear(q_rank, num_heads * key_dim) if has_rank else None

  @property
  def cached_dim(self) -> int:
    """The width of what is cached."""
    return self.kv_down_proj.out_features

  def of_values(self, cached: jax.Array) -> jax.Array:
    """c_t of what is cached."""
    return cached[..., self.shared :]

  def queries(self, x: jax.Array) -> jax.Array:
    """[B, T, D] -> [B, T, H, K], with `q_rank`."""
    assert self.q_down_proj is not None and self.q_norm is not None and self.q_up_proj is not None
    return split_heads(wide(self.q_up_proj(self.q_norm(self.q_down_proj(x)))), self.num_heads)

  def down(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(r_t [B, T, 1, width], c_t [B, T, 1, kv_rank]), float32 at least."""
    shared, latent = jnp.split(wide(self.kv_down_proj(x))[:, :, None], [self.shared], axis=-1)
    return shared, self.kv_norm(latent)

  def expanded(self, cached: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [B, T, H, K] and values [B, T, H, V] of what is cached [B, T, 1, width + kv_rank]."""
    shared, latent = cached[..., : self.shared], cached[:, :, 0, self.shared :]
    heads = lambda up: split_heads(up(latent).astype(self.dtype), self.num_heads)
    keys = heads(self.k_up_proj)
    shared = jnp.broadcast_to(shared, (*keys.shape[:3], self.shared)).astype(self.dtype)
    return jnp.concatenate([shared, keys], axis=-1), heads(self.v_up_proj)

  def absorbed(self, q: jax.Array) -> jax.Array:
    """Queries [B, T, H, K] of keys -> queries [B, T, H, width + kv_rank] of what is cached."""
    shared, rest = jnp.split(q, [self.shared], axis=-1)
    up = self._by_head(self.k_up_proj)
    return jnp.concatenate([wide(shared), product("bthk,rhk->bthr", rest, up, self.dtype)], axis=-1)

  def values(self, latents: jax.Array) -> jax.Array:
    """Sums of c_t [B, T, H, kv_rank] -> sums of values [B, T, H, V]."""
    return product("bthr,rhv->bthv", latents, self._by_head(self.v_up_proj), self.dtype)

  def _by_head(self, up: Linear) -> jax.Array:
    return split_heads(up.kernel[...], self.num_heads)
