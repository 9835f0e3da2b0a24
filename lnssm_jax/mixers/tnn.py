"""The Toeplitz neural network's gated unit (TNN), with an exact recurrence for its kernel."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_choice, check_norm_eps, check_positive
from lnssm_jax.mixers.common.complex_state import (
  ComplexState,
  empty_state,
  from_complex,
  to_complex,
)
from lnssm_jax.mixers.common.filters import FilterNetwork
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.norms import rms_norm, rms_norm_with_floor
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.ops import long_convolution
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import positions, segments_of
from lnssm_jax.ops.core.states import register_state

# Each with its usual eps. A floor of the rms keeps its gradient finite.
FILTER_NORMS = {
  "rms": (rms_norm, 1e-5),
  "rms_plus_eps": (lambda x, eps: rms_norm_with_floor(x, None, eps=eps, floor=eps), 1e-8),
}


@register_state
class TNNState(NamedTuple):
  """Recurrent state of `TNN`."""

  waves: ComplexState  # [B, E, L / 2] float32
  position: jax.Array  # [B] int32, the number of tokens of the segment so far, modulo L + 1


class TNN(Mixer[TNNState]):
  r"""A gate times a long convolution whose kernel is a decayed function of the lag, E wide.

      u_t = silu(W_u x_t + b_u),      v_t = silu(W_v x_t + b_v)
      y_t = sum_{s <= t} gamma^(t-s) r_{t-s} v_s,      out_t = W_o (u_t y_t) + b_o
      r_l = network(l),  l = 0 ... L - 1               per channel; L = max_length

  The network is a linear layer from the number l to width `filter_dim`, then `filter_layers`
  layers, then one to E channels, with relu(RMSNorm(.)) between them.

  Calls convolve with the taps. The state has L / 2 complex numbers per channel: completed by r_L =
  -(r_0 + ... + r_{L-1}), the r_l are a sum of L / 2 waves of the periods (L + 1) / s, s = 1 ... L /
  2, without a constant, so that

      h_t,s = gamma e^(2 pi i s / (L + 1)) h_{t-1,s} + v_t,      y_t = Re sum_s w_s h_t,s

  is the same convolution, exactly, at all lags below L. Beyond, the recurrence defines the kernel:
  r_l continues with period L + 1 (and gamma^l with it), whether or not a state is passed. The state
  holds e^(-2 pi i s p / (L + 1)) h_s with the position p of the last token: it decays but does not
  rotate, and every angle is computed from integers, so that errors of angles do not accumulate.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    max_length: L, even: the number of lags of the network.
    decay: gamma, in (0, 1]; a constant, 0.99 to 0.999 in the paper. Rounded to float32.
    filter_dim, filter_layers: width and number of the network's hidden layers.
    filter_norm: its RMSNorm: "rms", x / sqrt(mean(x^2) + eps), or "rms_plus_eps", x / (rms(x) +
      eps), as in the published network.
    norm_eps: eps of this norm; None means 1e-5 for "rms", 1e-8 for "rms_plus_eps".
    dtype: of the projections and of v; the kernel, the gate, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, `max_length` is odd, or `decay` is not in (0, 1].

  Source: TNN (Qin et al. 2023), sections 3.2 and 3.3; the recurrence, Qin and Zhong 2023
  (exponential-time-to-space conversion), section 3. All layers start uniform within
  1 / sqrt(inputs). The kernel depends on lags only, never on the length of a sequence.
  """

  name = "tnn"
  can_shard_time = False
  needs_length = True
  recurrence_flops = flops.long_convolution

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 3,
    max_length: int = 512,
    decay: float = 0.99,
    filter_dim: int = 32,
    filter_layers: int = 3,
    filter_norm: str = "rms",
    norm_eps: float | None = None,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_positive("expand", expand) * dim
    self.num_lags = check_positive("max_length", max_length)
    if max_length % 2:
      raise ValueError(
        f"max_length={max_length} is odd; its waves come in pairs; use an even length."
      )
    if not 0 < decay <= 1:
      raise ValueError(f"decay={decay} must be greater than 0 and at most 1.")
    self.decay_per_token = float(np.float32(decay))
    check_positive("filter_dim", filter_dim), check_positive("filter_layers", filter_layers)

    self.filter_norm = check_choice("filter_norm", filter_norm, FILTER_NORMS)
    usual_eps = FILTER_NORMS[filter_norm][1]
    self.norm_eps = check_norm_eps(usual_eps if norm_eps is None else norm_eps)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}

    def linear(inputs, outputs):
      init = uniform_fan_in(inputs)
      return Linear(inputs, outputs, kernel_init=init, bias_init=init, **options)

    self.u_proj, self.v_proj = linear(dim, E), linear(dim, E)
    sizes = (1, *[filter_dim] * (filter_layers + 1), E)
    self.filter = FilterNetwork(sizes, param_dtype=param_dtype, rngs=rngs)
    self.o_proj = linear(E, dim)

  def _init_state(self, B):
    waves = empty_state(B, self.inner_dim, self.num_lags // 2)
    return TNNState(waves, jnp.zeros(B, jnp.int32))

  def _mix(self, x, state, segment_ids):
    B, T, _ = x.shape
    segments = segments_of("TNN", segment_ids, B, T)
    before = None if state is None else state.position
    position = positions(segments, B, T, before)[:, -1]
    u = jax.nn.silu(self.u_proj(x))
    v = jax.nn.silu(self.v_proj(x)).astype(self.dtype)

    period, lag = self.num_lags + 1, np.arange(T)
    r = self._undecayed()
    # "chunked": no output depends on a later token, not even in its last digit.
    y, _ = long_convolution(
      wide(v),
      r[lag % period] * self._decays(lag),
      segment_ids=segment_ids,
      implementation="chunked",
    )
    turn_back = self._wave(-position)[:, None]
    h = turn_back * self._last_waves(wide(v), segments)
    if state is not None:
      waves = to_complex(state.waves)
      entering = self._wave(state.position - 1)[:, None] * self._weights(r) * waves
      read = self._wave(lag + 1) * self._decays(lag + 1)
      product = lambda a, b: jnp.einsum("bes,ls->ble", a, b, precision="highest")
      carried = product(entering.real, read.real) - product(entering.imag, read.imag)
      kept = self.decay_per_token**T * waves
      if segments is not None:
        carried = jnp.where((segments.index == 0)[..., None], carried, 0)
        kept = jnp.where(segments.several()[..., None], 0, kept)
      y, h = y + carried, h + kept
    out = self.o_proj((u * y).astype(self.dtype))
    return out.astype(self.dtype), TNNState(from_complex(h), (position + 1) % period)

  def _log_decays(self, x, state, segment_ids):
    return [jnp.full((1, 1), math.log(self.decay_per_token), jnp.float32)]

  def _undecayed(self) -> jax.Array:
    """One period of r_l, [L + 1, E]: the network's values, then minus their sum."""
    lags = jnp.arange(self.num_lags, dtype=jnp.float32)[:, None]
    norm = FILTER_NORMS[self.filter_norm][0]
    r = self.filter(lags, lambda z: jax.nn.relu(norm(z, eps=self.norm_eps)))
    return jnp.concatenate([r, -r.sum(0, keepdims=True)])

  def _decays(self, lag: np.ndarray) -> np.ndarray:
    """gamma^l, [len(lag), 1] float32."""
    return np.float32(self.decay_per_token ** np.float64(lag))[:, None]

  def _wave(self, step) -> jax.Array:
    """exp(2 pi i s p / (L + 1)) for p in `step` [P] and s = 1 ... L / 2: [P, L / 2].

    Whole turns of s p are subtracted as integers; the rest is at most half a turn. Products with
    these are Fourier transforms; as matrix products they cost little next to the projections.
    """
    period = self.num_lags + 1
    half = self.num_lags // 2
    turns = (step[:, None] % period * np.arange(1, half + 1) + half) % period - half
    angle = (2 * math.pi / period) * jnp.asarray(turns, jnp.float32)
    return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))

  def _weights(self, r: jax.Array) -> jax.Array:
    """Weights w [E, L / 2] of the waves whose sum is r [L + 1, E]."""
    waves = self._wave(np.arange(len(r)))
    product = lambda waves: jnp.einsum("le,ls->es", r, waves, precision="highest")
    return (2 / len(r)) * jax.lax.complex(product(waves.real), -product(waves.imag))

  def _last_waves(self, v: jax.Array, segments) -> jax.Array:
    """h [B, E, L / 2] after the tokens v [B, T, E] of the last segment, from zero."""
    lag = np.arange(v.shape[1])
    v = jnp.flip(v, 1) * self._decays(lag)
    if segments is not None:
      v = jnp.where(jnp.flip(segments.in_last(), 1)[..., None], v, 0)
    waves = self._wave(lag)
    product = lambda waves: jnp.einsum("ble,ls->bes", v, waves, precision="highest")
    return jax.lax.complex(product(waves.real), product(waves.imag))
