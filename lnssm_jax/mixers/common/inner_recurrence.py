"""The recurrence inside a mixer that routes, GLA or the gated delta rule, with its gates."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common.activations import log_gate
from lnssm_jax.mixers.common.checks import check_choice, check_normalizer, check_positive
from lnssm_jax.mixers.common.initializers import decay_rate, step_size_bias
from lnssm_jax.mixers.common.norms import unit_norm
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.routing import of_selected
from lnssm_jax.ops import DeltaRuleState, LinearAttentionState, delta_rule, linear_attention
from lnssm_jax.ops.core.precision import wide

INNER = ("gla", "gated_delta_rule")


class InnerRecurrence(nnx.Module):
  r"""log decay, and rates beta, of one memory or of several; the recurrence of one.

      "gla":               a = sigmoid(W_2 W_1 x + b)^(1 / tau)                  per key channel
      "gated_delta_rule":  a = exp(-exp(log_rate) softplus(W_a x + b_a)), beta = sigmoid(W_b x)

  Decay and rate of the delta rule are per head; they start as those of `GatedDeltaNet`.

  Args:
    memories: their number, each with its own W_2, b and rates; W_1 has their ranks side by side.
  """

  def __init__(
    self,
    dim: int,
    *,
    inner: str,
    num_heads: int,
    key_dim: int,
    gate_rank: int,
    gate_logit_normalizer: float,
    memories: int = 1,
    kernel_init,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    self.inner, self.num_heads, self.memories = inner, num_heads, memories
    self.key_dim, self.dtype = key_dim, jnp.dtype(dtype)
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    check_positive("gate_rank", gate_rank)

    def linear(outputs):
      dtypes = {"dtype": dtype, "param_dtype": param_dtype}
      return Linear(dim, outputs, kernel_init=kernel_init, **dtypes, rngs=rngs)

    if check_choice("inner", inner, INNER) == "gla":
      keys = num_heads * key_dim
      self.down_proj = linear(memories * gate_rank)
      shape = (memories, gate_rank, keys)
      self.up_kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
      self.up_bias = nnx.Param(jnp.zeros(memories * keys, param_dtype))
    else:
      self.a_proj, self.b_proj = linear(memories * num_heads), linear(memories * num_heads)
      self.log_rate = nnx.Param(decay_rate(rngs.params(), (memories * num_heads,), param_dtype))
      self.a_proj.draw_bias(step_size_bias, rngs)

  def __call__(
    self, x: jax.Array, indices: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array | None]:
    """(log decay [B, T, (S,) H, K] or [B, T, (S,) H], beta [B, T, (S,) H] or None); float32.

    Args:
      indices: [B, T, S], the memories whose gates are wanted; None if there is one memory.
    """
    M, H = self.memories, self.num_heads
    choose = lambda parts: parts[0] if indices is None else of_selected(indices, parts)
    if self.inner == "gla":
      ranks = jnp.split(self.down_proj(x), M, axis=-1)
      kernels, biases = (
        self.up_kernel[...].astype(self.dtype),
        jnp.split(wide(self.up_bias[...]), M),
      )
      z = choose([wide(ranks[m] @ kernels[m]) + biases[m] for m in range(M)])
      z = log_gate(z, self.gate_logit_normalizer)
      return z.reshape(*z.shape[:-1], H, self.key_dim), None
    rate = jnp.exp(wide(self.log_rate[...]))
    log_decay = choose(jnp.split(-rate * jax.nn.softplus(wide(self.a_proj(x))), M, axis=-1))
    return log_decay, jax.nn.sigmoid(wide(choose(jnp.split(self.b_proj(x), M, axis=-1))))

  def feature(self, x: jax.Array) -> jax.Array:
    """Queries or keys [..., K]: of length 1 for the delta rule, for GLA as given. In `dtype`."""
    return x.astype(self.dtype) if self.inner == "gla" else unit_norm(x, dtype=self.dtype)

  def init_state(self, batch: int, value_dim: int) -> LinearAttentionState | DeltaRuleState:
    """The state of one memory before the first token."""
    sizes = {"batch": batch, "heads": self.num_heads, "key_dim": self.key_dim}
    op = linear_attention if self.inner == "gla" else delta_rule
    return op.init_state(**sizes, value_dim=value_dim)

  def recur(self, q: jax.Array, k: jax.Array, v: jax.Array, gates, **options: Any):
    """(y [B, T, H, V], state) of one memory with these gates; `options` are those of the op."""
    log_decay, beta = gates
    if beta is None:
      return linear_attention(q, k, v, log_decay=log_decay, **options)
    return delta_rule(q, k, v, beta, log_decay=log_decay, **options)
