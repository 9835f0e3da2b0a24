"""Long convolutions between gates: Hyena and BaseConv. Their state is a cache of inputs."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.capacity import check_capacity, nan_beyond
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.filters import FilterNetwork, lag_features
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.ops import ConvState, long_convolution
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.segments import positions, segments_of
from lnssm_jax.ops.core.states import register_state


def _positions(name: str, x, before, segment_ids, max_length: int) -> jax.Array:
  """Returns the position of each token in its segment, [B, T]; raises beyond `max_length`."""
  B, T, _ = x.shape
  check_capacity(name, T, before, segment_ids, max_length)
  return positions(segments_of(name, segment_ids, B, T), B, T, before)


@register_state
class HyenaState(NamedTuple):
  """Recurrent state of `Hyena`."""

  conv: ConvState  # inputs [B, W - 1, (N + 1) D]
  recurrent: ConvState  # inputs [B, L - 1, (N - 1) D] float32, of the long convolutions in turn
  position: jax.Array  # [B] int32, the number of tokens of the segment so far


class Hyena(Mixer[HyenaState]):
  r"""Long convolutions between N gates, whose inputs a short convolution computes.

      [x1_t, ..., xN_t, v_t] = conv(W_in u)_t                            over W tokens, per channel
      s_t = xn_t v_t,      v_t = sum_l kernel^n_l s_{t-l} + skip^n s_t   for n = 1 ... N - 1 in turn
      out_t = W_o (xN_t v_t)                                             l = 0 ... L - 1
      kernel_l = network(l) exp(-rate l / (L - 1))                       per channel of the N - 1

  The network reads l / (L - 1) and a slow cosine and sine, has `filter_layers` hidden layers of
  width `filter_dim` with activations sin(w .), w learned, and a last layer without bias. The rates
  are constants from ln(100) / 1.5 to ln(100) / 0.3. The kernels end at L = `max_length`, on which
  they depend.

  The state holds the last L - 1 inputs of each convolution, and every decoding step computes the
  kernels again and reads all of them: the state is not small. Longer sequences are rejected: with
  an error where the length is known when the layer is called (no segments, and a state outside of
  `jit`); elsewhere the outputs from token L of the sequence on are NaN.

  Args:
    dim: D, the width.
    max_length: L, the longest sequence.
    order: N, at least 2.
    conv_size: W.
    filter_dim, filter_layers: width and number of the network's hidden layers.
    use_bias: whether W_in and W_o have biases.
    dtype: of the projections and of s; the kernel, gates, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, or `order` is below 2.

  Source: Hyena (Poli et al. 2023), sections 3 and 4 and its published code as the
  Zoology benchmark uses it: w starts at 1, skip normal, all layers uniform within 1 / sqrt(inputs).
  The published code has use_bias=True.
  """

  name = "hyena"
  can_shard_time = False
  needs_length = True
  recurrence_flops = flops.long_convolution

  def __init__(
    self,
    dim: int,
    *,
    max_length: int = 2048,
    order: int = 2,
    conv_size: int = 3,
    filter_dim: int = 64,
    filter_layers: int = 3,
    use_bias: bool = False,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.max_length = check_positive("max_length", max_length)
    check_positive("filter_dim", filter_dim), check_positive("filter_layers", filter_layers)
    if check_positive("order", order) < 2:
      raise ValueError(f"order={order} must be at least 2: gates before and after a convolution.")
    self.order, long = order, (order - 1) * dim

    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    init = uniform_fan_in(dim)
    bias_init = init if use_bias else None
    linear = lambda n: Linear(dim, n, kernel_init=init, bias_init=bias_init, **options)
    self.in_proj = linear((order + 1) * dim)
    self.conv = ShortConvolution((order + 1) * dim, conv_size, param_dtype=param_dtype, rngs=rngs)
    sizes = (3, *[filter_dim] * filter_layers, long)
    self.filter = FilterNetwork(sizes, last_bias=False, param_dtype=param_dtype, rngs=rngs)
    self.sine_gain = nnx.Param(jnp.ones(filter_dim, param_dtype))
    self.skip = nnx.Param(jax.random.normal(rngs.params(), (long,), param_dtype))
    self.o_proj = linear(dim)

  def _init_state(self, B):
    width = (self.order - 1) * self.dim
    inputs = jnp.zeros((B, self.max_length - 1, width), jnp.float32)
    return HyenaState(self.conv.init_state(B), ConvState(inputs), jnp.zeros(B, jnp.int32))

  def _mix(self, x, state, segment_ids):
    conv, recurrent, before = state if state is not None else (None, None, None)
    positions = _positions("Hyena", x, before, segment_ids, self.max_length)
    inner, conv = self.conv(self.in_proj(x), conv, segment_ids)
    *gates, y = jnp.split(inner, self.order + 1, axis=-1)
    number = self.order - 1
    taps = jnp.split(self.taps(), number, axis=-1)
    caches: list[ConvState | None] = [None] * number
    if recurrent is not None:
      caches = [ConvState(z) for z in jnp.split(recurrent.inputs, number, axis=-1)]
    inputs = []
    for gate, kernel, cache in zip(gates, taps, caches, strict=False):
      # "chunked": no output depends on a later token, not even in its last digit.
      y, (seen,) = long_convolution(
        (gate * wide(y)).astype(self.dtype),
        kernel,
        initial_state=cache,
        segment_ids=segment_ids,
        implementation="chunked",
      )
      inputs.append(seen)
    out = self.o_proj((gates[-1] * wide(y)).astype(self.dtype)).astype(self.dtype)
    inputs = jnp.concatenate(inputs, axis=-1)
    state = HyenaState(conv, ConvState(inputs), positions[:, -1] + 1)
    return nan_beyond(out, positions, self.max_length), state

  def taps(self) -> jax.Array:
    """The kernels [L, (N - 1) D] float32, with `skip` in their first tap."""
    features = lag_features(self.max_length)
    taps = self.filter(features, lambda z: jnp.sin(wide(self.sine_gain[...]) * z))
    rate = jnp.linspace(math.log(100) / 1.5, math.log(100) / 0.3, len(self.skip[...]))
    taps = taps * jnp.exp(-features[:, :1] * rate)
    return taps.at[0].add(wide(self.skip[...]))


@register_state
class BaseConvState(NamedTuple):
  """Recurrent state of `BaseConv`."""

  conv: ConvState  # inputs [B, W - 1 or L - 1, D] float32
  position: (
    jax.Array | None
  )  # [B] int32, tokens of the segment so far; None for a short convolution


class BaseConv(Mixer[BaseConvState]):
  r"""A convolution times a linear layer, and its input.

      out_t = conv(u)_t * (W u_t + b) + u_t

      conv(u)_t = bias + sum_j kernel_j u_{t-j}            j = 0 ... W - 1, without `max_length`
      conv(u)_t = sum_l network(l) u_{t-l} + u_t           l = 0 ... L - 1, with it

  The network of the long convolution reads l / (L - 1) and a slow cosine and sine, and has one
  hidden layer with ReLU; the kernel ends at L = `max_length`, on which it depends. Its state holds
  the last L - 1 inputs. Longer sequences give an error or NaN, as in `Hyena`.

  Args:
    dim: D, the width.
    conv_size: W, of the short convolution.
    max_length: L, the longest sequence, for a long convolution; None for a short one.
    filter_dim: width of the network's hidden layer.
    dtype: of the projection and of conv(u); the kernel, the product, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive.

  Source: BaseConv (Arora et al. 2023, Zoology), definition 3.1 and its published code. W, b and the
  convolutions start uniform within 1 / sqrt(inputs).
  """

  name = "base_conv"
  can_shard_time = False
  needs_length = True
  recurrence_flops = flops.long_convolution

  def __init__(
    self,
    dim: int,
    *,
    conv_size: int = 3,
    max_length: int | None = None,
    filter_dim: int = 16,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    check_positive("conv_size", conv_size), check_positive("filter_dim", filter_dim)
    self.max_length = None if max_length is None else check_positive("max_length", max_length)
    if max_length is None:
      self.conv = ShortConvolution(dim, conv_size, param_dtype=param_dtype, rngs=rngs)
      self.filter = None
    else:
      self.conv = None
      self.filter = FilterNetwork((3, filter_dim, dim), param_dtype=param_dtype, rngs=rngs)
    init = uniform_fan_in(dim)
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.g_proj = Linear(dim, dim, kernel_init=init, bias_init=init, **options)

  def _init_state(self, B):
    if self.conv is not None:
      return BaseConvState(self.conv.init_state(B), None)
    inputs = jnp.zeros((B, self._length() - 1, self.dim), jnp.float32)
    return BaseConvState(ConvState(inputs), jnp.zeros(B, jnp.int32))

  def _mix(self, x, state, segment_ids):
    conv, before = state if state is not None else (None, None)
    gate = self.g_proj(x)
    x = x.astype(self.dtype)
    if self.conv is not None:
      y, conv = self.conv(x, conv, segment_ids)
      return (y * gate + wide(x)).astype(self.dtype), BaseConvState(conv, None)
    positions = _positions("BaseConv", x, before, segment_ids, self._length())
    # "chunked": no output depends on a later token, not even in its last digit.
    y, (inputs,) = long_convolution(
      wide(x),
      self.taps(),
      initial_state=conv,
      segment_ids=segment_ids,
      implementation="chunked",
    )
    out = nan_beyond((y * gate + wide(x)).astype(self.dtype), positions, self._length())
    return out, BaseConvState(ConvState(inputs), positions[:, -1] + 1)

  def taps(self) -> jax.Array:
    """The long kernel [L, D] float32, with the input itself in its first tap.

    Raises:
      ValueError: the layer has a short kernel.
    """
    if self.filter is None:
      raise ValueError("BaseConv: max_length=None, so there is no long kernel.")
    return self.filter(lag_features(self._length()), jax.nn.relu).at[0].add(1.0)

  def _length(self) -> int:
    return 0 if self.max_length is None else self.max_length
