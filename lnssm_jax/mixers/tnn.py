"""The Toeplitz neural network's gated unit (TNN), with an exact recurrence for its kernel."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers.checks import check_call, check_positive
from lnssm_jax.mixers.complex_state import ComplexState, empty_state, from_complex, to_complex
from lnssm_jax.mixers.implicit_filters import FilterNetwork
from lnssm_jax.mixers.initializers import uniform_fan_in
from lnssm_jax.mixers.layers import linear, smooth_rms_norm, wide
from lnssm_jax.ops import long_convolution
from lnssm_jax.ops.attention.state import steps_of
from lnssm_jax.ops.checks import segment_index


class TNNState(NamedTuple):
  """What a layer remembers of a sequence."""

  waves: ComplexState  # [B, E, L / 2] float32
  position: jax.Array  # [B] int32, the number of tokens of the segment so far, modulo L + 1


class TNN(nnx.Module):
  r"""A gate times a long convolution whose kernel is a decayed function of the lag, E wide.

      u_t = silu(W_u x_t + b_u),      v_t = silu(W_v x_t + b_v)
      y_t = sum_{s <= t} gamma^(t-s) r_{t-s} v_s,      out_t = W_o (u_t y_t) + b_o
      r_l = network(l),  l = 0 ... L - 1               per channel; L = max_length

  The network is a linear layer from the number l to width `filter_dim`, then `filter_layers`
  layers, then one to E channels, with relu(RMSNorm(.)) between them.

  Calls convolve with the taps. What a sequence leaves behind is a state of L / 2 complex numbers a
  channel: filled up with r_L = -(r_0 + ... + r_{L-1}), the r_l are a sum of L / 2 waves of the
  periods (L + 1) / s, s = 1 ... L / 2, without a constant, so that

      h_t,s = gamma e^(2 pi i s / (L + 1)) h_{t-1,s} + v_t,      y_t = Re sum_s w_s h_t,s

  is the same convolution, exactly, at all lags below L. Beyond, the recurrence defines the kernel:
  r_l goes on with period L + 1 (and gamma^l with it), whether or not a state is passed. The state
  holds e^(-2 pi i s p / (L + 1)) h_s with the position p of the last token: it decays but does not
  turn, and every angle is made from whole numbers, so that no error of an angle adds up.

  Args:
    dim: D, the width of input and output.
    expand: E / D.
    max_length: L, even: the lags that the network is asked for.
    decay: gamma, in (0, 1]; a constant, 0.99 to 0.999 in the paper. Rounded to float32.
    filter_dim, filter_layers: width and number of the network's hidden layers.
    dtype: of the projections and of v; the kernel, the gate, the state and sums are float32.
    param_dtype: of the parameters.

  Cutting a sequence anywhere and passing the state on gives the same result as one call.

  Raises:
    ValueError: a size is not positive, `max_length` is odd, or `decay` is not in (0, 1].

  Source: TNN (Qin et al. 2023), sections 3.2 and 3.3; the recurrence, Qin and Zhong 2023
  (exponential-time-to-space conversion), section 3. All layers start uniform within
  1 / sqrt(inputs). The kernel depends on lags only, never on the length of a sequence.
  """

  def __init__(
    self,
    dim: int,
    *,
    expand: int = 3,
    max_length: int = 512,
    decay: float = 0.99,
    filter_dim: int = 32,
    filter_layers: int = 3,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.inner_dim = E = check_positive("expand", expand) * dim
    self.num_lags = check_positive("max_length", max_length)
    if max_length % 2:
      raise ValueError(f"max_length={max_length} is odd; its waves come in pairs, so use an even.")
    if not 0 < decay <= 1:
      raise ValueError(f"decay={decay} must be greater than 0 and at most 1.")
    self.decay = float(np.float32(decay))
    check_positive("filter_dim", filter_dim), check_positive("filter_layers", filter_layers)

    def projection(inputs, outputs):
      init = uniform_fan_in(inputs)
      kernel = linear(inputs, outputs, init, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
      return kernel, nnx.Param(init(rngs.params(), (outputs,), param_dtype))

    self.u_proj, self.u_bias = projection(dim, E)
    self.v_proj, self.v_bias = projection(dim, E)
    sizes = (1, *[filter_dim] * (filter_layers + 1), E)
    self.filter = FilterNetwork(sizes, param_dtype=param_dtype, rngs=rngs)
    self.o_proj, self.o_bias = projection(E, dim)

  def init_state(self, batch_size: int) -> TNNState:
    """The state before the first token: zeros."""
    B = check_positive("batch_size", batch_size)
    waves = empty_state(B, self.inner_dim, self.num_lags // 2)
    return TNNState(waves, jnp.zeros(B, jnp.int32))

  def __call__(
    self,
    x: jax.Array,  # [B, T, D]
    state: TNNState | None = None,
    segment_ids: jax.Array | None = None,  # [B, T] integer
  ) -> tuple[jax.Array, TNNState]:
    """Returns (out [B, T, D] in `dtype`, the state after the last token).

    `state` belongs to the first segment; the layer starts afresh wherever `segment_ids` changes.

    Raises:
      ValueError: a shape or dtype is wrong; the message names the argument.
    """
    check_call(self, x, state, segment_ids)
    B, T, _ = x.shape
    segments = segment_index("TNN", segment_ids, B, T)
    before = None if state is None else state.position
    position = steps_of(B, T, segments, before).position[:, -1]
    u = jax.nn.silu(wide(self.u_proj(x)) + wide(self.u_bias[...]))
    v = jax.nn.silu(wide(self.v_proj(x)) + wide(self.v_bias[...])).astype(self.dtype)

    period, lag = self.num_lags + 1, np.arange(T)
    r = self._undecayed()
    # "blocks": no output depends on a later token, not even in its last digit.
    y, _ = long_convolution(
      wide(v), r[lag % period] * self._decays(lag), segment_ids=segment_ids, implementation="blocks"
    )
    turn_back = self._wave(-position)[:, None]
    h = turn_back * self._left_behind(wide(v), segments)
    if state is not None:
      waves = to_complex(state.waves)
      entering = self._wave(state.position - 1)[:, None] * self._weights(r) * waves
      read = self._wave(lag + 1) * self._decays(lag + 1)
      product = lambda a, b: jnp.einsum("bes,ls->ble", a, b, precision="highest")
      carried = product(entering.real, read.real) - product(entering.imag, read.imag)
      kept = self.decay**T * waves
      if segments is not None:
        carried = jnp.where((segments == 0)[..., None], carried, 0)
        kept = jnp.where((segments[:, -1] == 0)[:, None, None], kept, 0)
      y, h = y + carried, h + kept
    out = wide(self.o_proj((u * y).astype(self.dtype))) + wide(self.o_bias[...])
    return out.astype(self.dtype), TNNState(from_complex(h), (position + 1) % period)

  def _undecayed(self) -> jax.Array:
    """One period of r_l, [L + 1, E]: the network's values, then what makes their sum 0."""
    lags = jnp.arange(self.num_lags, dtype=jnp.float32)[:, None]
    r = self.filter(lags, lambda z: jax.nn.relu(smooth_rms_norm(z)))
    return jnp.concatenate([r, -r.sum(0, keepdims=True)])

  def _decays(self, lag: np.ndarray) -> np.ndarray:
    """gamma^l, [len(lag), 1] float32."""
    return np.float32(self.decay ** np.float64(lag))[:, None]

  def _wave(self, step) -> jax.Array:
    """exp(2 pi i s p / (L + 1)) for p in `step` [P] and s = 1 ... L / 2: [P, L / 2].

    Whole turns are taken off s p as integers; what is left is half a turn at most. Products with
    these are Fourier transforms; as matrix products they cost little next to the projections.
    """
    period = self.num_lags + 1
    half = self.num_lags // 2
    turns = (step[:, None] % period * np.arange(1, half + 1) + half) % period - half
    angle = (2 * math.pi / period) * jnp.asarray(turns, jnp.float32)
    return jax.lax.complex(jnp.cos(angle), jnp.sin(angle))

  def _weights(self, r: jax.Array) -> jax.Array:
    """w [E, L / 2] of the waves that r [L + 1, E] is the sum of."""
    waves = self._wave(np.arange(len(r)))
    product = lambda waves: jnp.einsum("le,ls->es", r, waves, precision="highest")
    return (2 / len(r)) * jax.lax.complex(product(waves.real), -product(waves.imag))

  def _left_behind(self, v: jax.Array, segments) -> jax.Array:
    """h [B, E, L / 2] after the steps v [B, T, E] from nothing, of their last segment only."""
    lag = np.arange(v.shape[1])
    v = jnp.flip(v, 1) * self._decays(lag)
    if segments is not None:
      v = jnp.where(jnp.flip(segments == segments[:, -1:], 1)[..., None], v, 0)
    waves = self._wave(lag)
    product = lambda waves: jnp.einsum("ble,ls->bes", v, waves, precision="highest")
    return jax.lax.complex(product(waves.real), product(waves.imag))
