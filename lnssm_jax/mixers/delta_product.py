"""Gated DeltaProduct: several steps of the delta rule for each token."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.initializers import decay_rate, step_size_bias
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.delta_net import DeltaBlock, DeltaNetState, value_widths
from lnssm_jax.ops import delta_rule


class DeltaProduct(DeltaBlock):
  r"""Gated DeltaProduct: a token's transition is a product of n generalized Householder matrices.

      S <- a_t S_{t-1},   then for each of n keys, values and rates of the token
      S <- (I - beta k k^T) S + beta k v^T                                                per head
      y_t = K^(-1/2) S_t^T q_t,      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  with q, each k and v, the norm and the decay a of `GatedDeltaNet`, which n = 1 is, and beta =
  2 sigmoid(W_b x_t). The n steps are tokens of the op's sequence, of which each n-th is read.
  Initially kernels are normal with a standard deviation of 0.02. The defaults are those of fla's
  layer `GatedDeltaProduct`, but for head_dim, which is 256 there; its models have norm_eps=1e-6.

  Args:
    dim: D, the width of input and output.
    num_heads: H, of queries and keys.
    num_value_heads: a multiple of H; a, beta and the state belong to these. None means H.
    head_dim: K; None means D / H.
    expand_v: V / K.
    num_householder: n, the steps of a token.
    allow_neg_eigval: without, beta = sigmoid(W_b x_t).
    use_forget_gate: whether there is the decay a; without it the layer is DeltaProduct.
    use_gate: whether there is the output gate.
    conv_size: W, the tokens that a convolution sees; None leaves the three convolutions out.
    conv_bias: whether the convolutions have a bias.
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of q, k, v; decays, beta, norms, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: as `GatedDeltaNet`, or `num_householder` is not positive.

  Source: DeltaProduct (Siems et al. 2025, arXiv 2502.10297), section 3; initial values as in fla's
  layer and models.
  """

  name = "delta_product"

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_value_heads: int | None = None,
    head_dim: int | None = None,
    expand_v: float = 2.0,
    num_householder: int = 2,
    allow_neg_eigval: bool = True,
    use_forget_gate: bool = True,
    use_gate: bool = True,
    conv_size: int | None = 4,
    conv_bias: bool = False,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.num_householder = check_positive("num_householder", num_householder)
    widths = value_widths(dim, num_heads, num_value_heads, head_dim, expand_v)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    init = nnx.initializers.normal(0.02)
    self._build(
      dim,
      num_heads,
      widths,
      conv_size=conv_size,
      conv_bias=conv_bias,
      allow_neg_eigval=allow_neg_eigval,
      steps=num_householder,
      norm_eps=norm_eps,
      kernel_init=init,
      options=options,
    )
    linear, (values, _, value_dim) = functools.partial(Linear, kernel_init=init, **options), widths
    self.g_proj = linear(dim, values * value_dim) if use_gate else None
    self.a_proj = linear(dim, values) if use_forget_gate else None
    rate = lambda: nnx.Param(decay_rate(rngs.params(), (values,), param_dtype))
    self.log_rate = rate() if use_forget_gate else None
    if self.a_proj is not None:
      self.a_proj.draw_bias(step_size_bias, rngs)

  def recurrence_flops(self, state, length):
    """Those of n delta rules, of which one decays the state and one is read."""
    return flops.delta_rule(
      self, state, length, decays=int(self.a_proj is not None), steps=self.num_householder
    )

  def _steps(self, z: jax.Array, heads: int) -> jax.Array:
    """[B, T, n heads, ...], each token's steps one after another -> [B, n T, heads, ...]."""
    B, T = z.shape[:2]
    return z.reshape(B, self.num_householder * T, heads, *z.shape[3:])

  def _mix(self, x, state, segment_ids):
    n, H, values = self.num_householder, self.num_heads, self.num_value_heads
    q, k, v, convs = self._streams(x, state, segment_ids)
    log_decay = None
    if self.a_proj is not None:
      decay = self._decay_of_heads(x)
      none = jnp.zeros((*decay.shape[:2], (n - 1) * values), decay.dtype)
      log_decay = self._steps(jnp.concatenate([decay, none], axis=-1), values)
    place = self._place(state, None if segment_ids is None else jnp.repeat(segment_ids, n, axis=1))
    y, recurrent = delta_rule(
      jnp.repeat(self._queries_or_keys(q), n, axis=1),
      self._steps(self._queries_or_keys(k), H),
      self._steps(v.astype(self.dtype), values),
      self._steps(self._rate(x), values),
      log_decay=log_decay,
      **place,
    )
    y = y[:, n - 1 :: n]  # after the last step of each token
    gate = None if self.g_proj is None else self.g_proj(x)
    return self._silu_gated(y, gate), DeltaNetState(*convs, recurrent)
