"""Gated fast weights: a memory that decays along its keys and along its values."""

import functools

import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import log_gate
from lnssm_jax.mixers.common.checks import check_normalizer
from lnssm_jax.mixers.common.norms import LayerNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.qkv import QKVMixer
from lnssm_jax.ops import LinearAttentionState, linear_attention


class GFW(QKVMixer[LinearAttentionState]):
  r"""Linear attention with a gate for each entry of the memory, the outer product of two gates.

      q_t = W_q x_t,  k_t = W_k x_t,  v_t = W_v x_t
      a_t = sigmoid(W_a x_t)^(1 / tau),  c_t = sigmoid(W_c x_t)^(1 / tau)    for keys and for values
      S_t = (a_t c_t^T) * S_{t-1} + k_t v_t^T,      y_t = S_t^T q_t                per head
      out_t = W_o LayerNorm(y_t)

  There is no feature map and no normalizer. The norm is over all D channels, with scale and bias.
  This is the form that the linear complexity sequence model gives to gated fast weights and to the
  decaying update rule (DUR). The original, a convex mixture of memory and written matrix, which the
  compared code does not run, is not offered.

  Args:
    dim: D, the width; a multiple of `num_heads`. V = D / H.
    num_heads: H.
    head_dim: K, the width of a head's queries and keys; None means D / H.
    gate_logit_normalizer: tau; larger values move the decays towards 1.
    num_layers: of the model, for the initial W_o (see `QKVMixer`).
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: `dim` is not a multiple of `num_heads`, or a size is not positive.

  Sources: gated fast weights, Schlag and Schmidhuber 2017; decaying fast weights, Mao 2022; the
  form here, the linear complexity sequence model (Qin et al. 2024), table 1, and its published
  code. W_a and W_c start as W_q does.
  """

  name = "gfw"
  recurrence_flops = functools.partialmethod(flops.linear_attention, decays=2)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    gate_logit_normalizer: float = 16.0,
    num_layers: int = 1,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    super().__init__(dim, num_heads=num_heads, head_dim=head_dim, num_layers=num_layers, **options)
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    linear = functools.partial(Linear, kernel_init=nnx.initializers.normal(0.02), **options)
    self.a_proj, self.c_proj = linear(dim, num_heads * self.key_dim), linear(dim, dim)
    self.norm = LayerNorm(dim, eps=norm_eps, param_dtype=param_dtype)

  def _init_state(self, B):
    return self._empty_recurrent(B)

  def _mix(self, x, state, segment_ids):
    heads = lambda z: split_heads(z, self.num_heads)
    q, k, v = (z.astype(self.dtype) for z in self._queries_keys_values(x))
    y, state = linear_attention(
      q,
      k,
      v,
      log_decay=heads(log_gate(self.a_proj(x), self.gate_logit_normalizer)),
      value_log_decay=heads(log_gate(self.c_proj(x), self.gate_logit_normalizer)),
      scale=1.0,
      **self._place(state, segment_ids),
    )
    return self._output(heads(self.norm(merge_heads(y)))), state
