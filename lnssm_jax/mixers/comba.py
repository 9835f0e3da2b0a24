"""Comba: the delta rule that reads the state before its decay, and corrects its output."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_finite
from lnssm_jax.mixers.delta_net import DeltaBlock, DeltaNetState, value_widths
from lnssm_jax.ops.core.precision import wide


class Comba(DeltaBlock):
  r"""Comba: closed-loop control of a bilinear recurrence, a scalar decay plus a rank-one change.

      k_t = silu(conv(W_k x))_t,   p_t = sigmoid(d) k_t,   q_t = silu(conv(W_q x))_t - c p_t
      S_t = (a_t I - beta_t unit(k_t) unit(p_t)^T) S_{t-1} + beta_t unit(k_t) v_t^T
      y_t = K^(-1/2) S_t^T unit(q_t),   out_t = W_o (sigmoid(W_g x_t) * RMSNorm(y_t))

  with v, beta, unit(z) and the norm of `DeltaNet`, the decay a of `GatedDeltaNet`, and numbers d
  and c per head. The old value is read before it decays. As in the published code p is normalized
  too, so that d acts through q alone. Initially d is 1, and kernels are normal with a standard
  deviation of 0.02. The defaults are those of fla's layer `Comba`, but for head_dim, which is 256
  there; its models have norm_eps=1e-6.

  Args:
    dim: D, the width of input and output.
    num_heads: H, of queries and keys; fla's models have H K = 0.75 D.
    num_value_heads: a multiple of H; a, beta and the state belong to these. None means H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    use_inner_decay: whether there is d; without, p_t = k_t.
    use_output_correction: whether c p_t is subtracted from q_t.
    correction_factor: c at first. The authors recommend to try 0.02 for small models too.
    use_gate: whether there is the output gate.
    conv_size: W, the tokens that a convolution sees; None leaves the three convolutions out.
    conv_bias: whether the convolutions have a bias.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: as `GatedDeltaNet`, or `correction_factor` is not a finite number.

  Source: Comba (arXiv 2506.02475) as published in fla's layer; its kernels, in chunks and token by
  token, read before the decay, unlike its `naive_recurrent_comba`.
  """

  name = "comba"
  recurrence_flops = functools.partialmethod(flops.delta_rule, decays=1)

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int | None = None,
    expand_v: float = 2.0,
    use_inner_decay: bool = True,
    use_output_correction: bool = True,
    correction_factor: float = 1.0,
    use_gate: bool = True,
    conv_size: int | None = 4,
    conv_bias: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    widths = value_widths(dim, num_heads, num_value_heads, head_dim, expand_v)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    init = nnx.initializers.normal(0.02)
    self._build(
      dim,
      num_heads,
      widths,
      conv_size=conv_size,
      conv_bias=conv_bias,
      norm_eps=norm_eps,
      kernel_init=init,
      options=options,
    )
    self._build_decay_and_gate(use_gate, init, options)
    check_finite("correction_factor", correction_factor)
    per_head = lambda value: nnx.Param(jnp.full(num_heads, value, param_dtype))
    self.inner_gain = per_head(1.0) if use_inner_decay else None
    self.correction_gain = per_head(correction_factor) if use_output_correction else None

  def _mix(self, x, state, segment_ids):
    q, k, v, convs = self._streams(x, state, segment_ids)
    q, p = wide(q), wide(k)
    if self.inner_gain is not None:
      p = jax.nn.sigmoid(wide(self.inner_gain[...]))[:, None] * p
    if self.correction_gain is not None:
      q = q - wide(self.correction_gain[...])[:, None] * p
    y, recurrent = self._recur(
      *(x, q, k, v, state, segment_ids),
      log_decay=self._decay_of_heads(x),
      erase_key=self._queries_or_keys(p),
      erase_before_decay=True,
    )
    if self.g_proj is None:
      out = self._silu_gated(y, None)
    else:
      out = self._sigmoid_gated(y, self.g_proj(x))
    return out, DeltaNetState(*convs, recurrent)
