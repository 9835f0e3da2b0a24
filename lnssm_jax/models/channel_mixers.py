"""Channel mixers: the part of a block that acts on each token separately, [..., D] -> [..., D].

Those of RWKV also read the previous token, and so are `Mixer`s with a state. All take `hidden`, the
number of hidden channels, in place of their default, but `Identity`; some have options. One with
experts also has `with_aux`, as mixers do.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.activations import exact_gelu
from lnssm_jax.mixers.common.checks import (
  check_choice,
  check_finite,
  check_layer,
  check_options,
  check_positive,
  check_soft_cap,
)
from lnssm_jax.mixers.common.initializers import orthogonal, shift_weight
from lnssm_jax.mixers.common.routing import Aux, check_coefficient, check_selected
from lnssm_jax.mixers.common.token_shift import interpolated, last_input
from lnssm_jax.models.experts import NUM_EXPERTS, Router, mixture, product_of
from lnssm_jax.ops.core.checks import check_floating
from lnssm_jax.ops.core.precision import wide


def _width(dim: int, hidden: int | None, usual: Callable[[int], int]) -> int:
  """Hidden channels: `hidden`, or the default for `dim`."""
  check_positive("dim", dim)
  return usual(dim) if hidden is None else check_positive("hidden", hidden)


def swiglu_width(dim: int) -> int:
  """Hidden channels of `SwiGLU`: 256 ceil(8 D / 768)."""
  return 256 * -(-8 * dim // 768)


def rwkv6_width(dim: int) -> int:
  """Hidden channels of `RWKV6ChannelMix`: 32 floor(3.5 D / 32), and at least 32."""
  return max(32, 32 * (7 * dim // 64))


MU_OF = ("present", "previous")
ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": exact_gelu,
  "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
  "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),  # Primer (So et al. 2021)
}


class _OfTokens(nnx.Module):
  """A channel mixer that reads each token by itself. `_check` is for its input."""

  dim: int

  def __new__(cls, *args: Any, **options: Any):
    check_options(cls, options)
    return super().__new__(cls)

  def _check(self, x: Any) -> None:
    name = type(self).__name__
    if not hasattr(x, "shape"):
      raise ValueError(f"{name}: x is a {type(x).__name__}; give an array, jnp.asarray(x).")
    if x.shape[-1:] != (self.dim,):
      raise ValueError(
        f"{name}: x has shape {x.shape}; its last axis must have {self.dim} channels."
      )
    check_floating(name, "x", x)


class GPT2MLP(_OfTokens):
  """W_down gelu(W_up x) with the exact (erf) GELU, a hidden width of 4 D, and no biases.

  GPT-2's own code has use_bias=True and activation="gelu_tanh", Nemotron-H
  activation="squared_relu".

  Args:
    dim: D.
    hidden: the number of hidden channels; None means 4 D.
    use_bias: whether the projections have biases, zero at first.
    activation: a name in `ACTIVATIONS`.

  Both kernels start orthogonal, with gain sqrt(out / in) where the output is the wider side.
  Sources: GPT-2 (Radford et al. 2019); without biases and with this initialization, the LNSSM's
  published code.
  """

  def __init__(
    self,
    dim: int,
    *,
    hidden: int | None = None,
    use_bias: bool = False,
    activation: str = "gelu",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, hidden = dim, _width(dim, hidden, lambda dim: 4 * dim)
    self.activation = check_choice("activation", activation, ACTIVATIONS)

    def linear(inputs, outputs):
      gain = math.sqrt(max(1.0, outputs / inputs))
      return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        kernel_init=orthogonal(gain),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
      )

    self.up, self.down = linear(dim, hidden), linear(hidden, dim)

  def __call__(self, x: jax.Array) -> jax.Array:
    self._check(x)
    return self.down(ACTIVATIONS[self.activation](self.up(x)))


class GatedMLP(_OfTokens):
  """W_down (activation(W_gate x) * W_up x): `SwiGLU` and `GeGLU`.

  Args:
    dim: D.
    hidden: the number of hidden channels; None takes the class's own.
    use_bias: whether the three projections have biases, zero at first.
    activation: a name in `ACTIVATIONS`; None takes the class's own.
    gate_scale, output_scale: factors of W_gate x, with its bias, and of the output (Falcon-H1).
    limit: the largest activation(W_gate x), and the largest modulus of W_up x; None for none. Of a
      model it may be a list with that of each layer, 0 for none.
  """

  usual_width: Callable[[int], int]
  usual_activation: str
  kernel_init: jax.nn.initializers.Initializer

  def __init__(
    self,
    dim: int,
    *,
    hidden: int | None = None,
    use_bias: bool = False,
    activation: str | None = None,
    gate_scale: float = 1.0,
    output_scale: float = 1.0,
    limit: float | Sequence[float] | None = None,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.gate_scale, self.output_scale = gate_scale, output_scale
    self.limit = check_soft_cap("limit", limit)
    self.dim, hidden = dim, _width(dim, hidden, self.usual_width)
    activation = self.usual_activation if activation is None else activation
    self.activation = check_choice("activation", activation, ACTIVATIONS)
    linear = functools.partial(
      nnx.Linear,
      use_bias=use_bias,
      kernel_init=self.kernel_init,
      dtype=dtype,
      param_dtype=param_dtype,
      rngs=rngs,
    )
    self.gate, self.up, self.down = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)
    self.dtype = jnp.dtype(dtype)

  def __call__(self, x: jax.Array) -> jax.Array:
    self._check(x)
    if x.shape[-2:-1] in ((), (1,)):  # a single token: the kernels would be copied each time
      gate, up = self.gate(x), self.up(x)
    else:
      # One product, whose columns alternate: one pass over memory makes the gradients of both.
      kernel = jnp.stack([self.gate.kernel[...], self.up.kernel[...]], axis=-1).astype(self.dtype)
      dims = ((x.ndim - 1,), (0,)), ((), ())
      both = self.gate.dot_general(x.astype(self.dtype), kernel, dims)
      gate, up = both[..., 0], both[..., 1]
      if self.gate.bias is not None:
        gate, up = (y + layer.bias[...] for y, layer in ((gate, self.gate), (up, self.up)))
    return self.output(gate, up)

  def output(self, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The output [..., D] of W_gate x and W_up x, [..., hidden] with their biases."""
    gate = gate if self.gate_scale == 1 else gate * self.gate_scale
    hidden = product_of(ACTIVATIONS[self.activation], gate, up, self.limit)
    y = self.down(hidden.astype(self.dtype))
    return y if self.output_scale == 1 else y * self.output_scale


class SwiGLU(GatedMLP):
  """W_down (silu(W_gate x) * W_up x) with 8/3 D hidden channels, rounded up to a multiple of 256.

  Kernels start normal with a standard deviation of 0.02, as in GPT-2.
  Sources: Shazeer 2020; the width, LLaMA (Touvron et al. 2023).
  """

  usual_width = staticmethod(swiglu_width)
  usual_activation = "silu"
  kernel_init = staticmethod(nnx.initializers.normal(0.02))


class GeGLU(GatedMLP):
  """W_down (gelu(W_gate x) * W_up x) with 3 D hidden channels and the exact (erf) GELU.

  RecurrentGemma's has use_bias=True and activation="gelu_tanh". Kernels start normal with a
  variance of 1 / inputs. Sources: Shazeer 2020; the width, Griffin (De et al. 2024).
  """

  usual_width = staticmethod(lambda dim: 3 * dim)
  usual_activation = "gelu"
  kernel_init = staticmethod(nnx.initializers.variance_scaling(1.0, "fan_in", "normal"))


class MixtureOfExperts(_OfTokens):
  """The sum of a few gated MLPs, which a router selects for each token, and of a shared one.

      y = scale * sum_j w_j W_down^j (activation(W_gate^j x) * W_up^j x) + shared(x)

  over the `experts_per_token` experts j of the largest score. The router is computed in float32. No
  token is dropped (`lnssm_jax.models.experts`). Documents and the order of tokens change nothing.

  Args:
    dim: D.
    hidden: hidden channels of each expert; None takes those of `SwiGLU`.
    num_experts: E.
    experts_per_token: k.
    gated: False leaves W_gate out, W_down^j activation(W_up^j x), as in Nemotron 3.
    latent: the width of what experts read and write, projected from x and back, all experts'
      together, without a bias (Nemotron 3 Super); None means D.
    shared_hidden: hidden channels of an expert of all tokens; None for none.
    shared_gate: whether its output is multiplied by sigmoid(w x).
    router: "softmax" or "sigmoid", of the scores W_router x: the score of an expert.
    normalize_weights: whether w are the scores over their sum plus `weight_eps`, or the scores.
    weight_scale: the scale.
    num_groups, groups_per_token: experts are in this many groups of equal size, and those of a
      token in the groups whose two largest scores have the largest sum.
    balance: coefficient of the balance loss (`mixers.common.routing.balance`); 0 leaves it out.
    balance_bias: whether a bias per expert, float32 and zero at first, is added to scores for the
      selection only. The optimizer moves it by a constant rate against the load of its expert.
    limit, shared_limit: `limit` of the gated MLPs of the experts, and of that of all tokens.
    activation: a name in `ACTIVATIONS`.

  Kernels start as those of `SwiGLU`.
  Sources: Switch Transformer (Fedus et al. 2021); shared experts, DeepSeekMoE (Dai et al. 2024);
  sigmoid, groups and bias, DeepSeek-V3 (2024), whose published code has router="sigmoid",
  weight_scale=2.5, num_groups=8, groups_per_token=4, balance_bias=True. Qwen3-Next's has 512
  experts, experts_per_token=10, and shared_gate=True.
  """

  usual_width = staticmethod(swiglu_width)
  usual_activation = "silu"

  def __init__(
    self,
    dim: int,
    *,
    hidden: int | None = None,
    num_experts: int = NUM_EXPERTS,
    experts_per_token: int = 2,
    gated: bool = True,
    latent: int | None = None,
    shared_hidden: int | None = None,
    shared_gate: bool = False,
    router: str = "softmax",
    normalize_weights: bool = True,
    weight_eps: float = 1e-20,
    weight_scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
    balance: float = 0.01,
    balance_bias: bool = False,
    limit: float | Sequence[float] | None = None,
    shared_limit: float | Sequence[float] | None = None,
    activation: str | None = None,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, hidden = dim, _width(dim, hidden, self.usual_width)
    check_selected("experts_per_token", experts_per_token, "num_experts", num_experts)
    check_selected("groups_per_token", groups_per_token, "num_groups", num_groups)
    size, rest = divmod(num_experts, num_groups)
    if rest or experts_per_token > groups_per_token * size:
      raise ValueError(
        f"num_groups={num_groups} must divide num_experts={num_experts}, and groups_per_token="
        f"{groups_per_token} groups must have experts_per_token={experts_per_token} experts."
      )
    if shared_gate and shared_hidden is None:
      raise ValueError(
        "shared_gate=True needs shared_hidden, the hidden channels of what it gates."
      )
    if not gated and (limit, shared_limit) != (None, None):
      raise ValueError(f"limit={limit} and shared_limit={shared_limit} are of gated experts only.")
    self.limit = check_soft_cap("limit", limit)
    self.num_experts, self.dtype = num_experts, jnp.dtype(dtype)
    kind = check_choice("router", router, ("softmax", "sigmoid"))
    eps = check_finite("weight_eps", weight_eps, least=0) if normalize_weights else None
    selection = experts_per_token, eps, weight_scale, num_groups, groups_per_token
    self.route = Router(kind, *selection, check_coefficient("balance", balance))
    own = {} if activation is None else {"activation": activation}
    dtypes = {"dtype": dtype, "param_dtype": param_dtype}
    mlp = functools.partial(SwiGLU if gated else GPT2MLP, **own, **dtypes)
    new = lambda key: mlp(latent or dim, hidden=hidden, rngs=nnx.Rngs(key))
    self.experts: Any = jax.vmap(new)(jax.random.split(rngs.params(), num_experts))
    linear = functools.partial(
      nnx.Linear, use_bias=False, kernel_init=SwiGLU.kernel_init, rngs=rngs
    )
    self.router = linear(dim, num_experts)
    inner = None if latent is None else check_positive("latent", latent)
    self.latent_down = None if inner is None else linear(dim, inner, **dtypes)
    self.latent_up = None if inner is None else linear(inner, dim, **dtypes)
    self.router_bias = nnx.Param(jnp.zeros(num_experts)) if balance_bias else None
    of_shared: dict[str, Any] = {"limit": shared_limit} if gated else {}
    new_shared = lambda: mlp(dim, hidden=shared_hidden, **of_shared, rngs=rngs)
    self.shared = None if shared_hidden is None else new_shared()
    self.shared_gate = linear(dim, 1, param_dtype=param_dtype) if shared_gate else None

  @property
  def idle_entries(self) -> int:
    """Entries of the experts' kernels that do not multiply a token."""
    entries = sum(math.prod(layer.kernel.shape) for layer in self._layers)
    return entries * (self.num_experts - self.route.experts_per_token) // self.num_experts

  @property
  def _layers(self):
    gate = getattr(self.experts, "gate", None)
    return (*(() if gate is None else (gate,)), self.experts.up, self.experts.down)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.with_aux(x)[0]

  def with_aux(self, x: jax.Array) -> tuple[jax.Array, Aux]:
    """(y, the balance loss and the share of the tokens that select each expert)."""
    self._check(x)
    if 0 in x.shape:
      raise ValueError(f"{type(self).__name__}: x has shape {x.shape}; give at least one token.")
    tokens = x.reshape(-1, x.shape[-1])
    kernel = wide(self.router.kernel[...])
    logits = jnp.matmul(tokens.astype(kernel.dtype), kernel, precision="highest")
    bias = None if self.router_bias is None else self.router_bias[...]
    weights, indices, aux = self.route(logits, bias)
    kernels = tuple(layer.kernel[...].astype(self.dtype) for layer in self._layers)
    activation = ACTIVATIONS[self.experts.activation]
    tokens = tokens if self.latent_down is None else self.latent_down(tokens)
    routed = tokens, weights, indices, self.num_experts, self.limit
    y = mixture(kernels, activation, *routed)
    y = (y if self.latent_up is None else self.latent_up(y)).reshape(x.shape)
    if self.shared is not None:
      shared = self.shared(x)
      if self.shared_gate is not None:
        gate = jnp.matmul(wide(x), wide(self.shared_gate.kernel[...]), precision="highest")
        shared = (jax.nn.sigmoid(gate) * shared).astype(self.dtype)
      y = y + shared
    return y, aux


class RWKVChannelMix(Mixer[jax.Array]):
  r"""sigmoid(W_r x^r) * W_v relu(W_k x^k)^2, where x^s = mu_s * x_t + (1 - mu_s) * x_{t-1}.

  `RWKV4ChannelMix`, `RWKV6ChannelMix` and `RWKV7ChannelMix` say the widths and the initial mu. W_r
  and W_v start as zero, W_k orthogonal with gain sqrt(hidden / D). The state is the last input,
  [B, D] float32.

  With mu_of="previous" mu weights the previous token, and starts at 1 minus that: the same
  function, with the numbers of RWKV-6's published code.
  """

  usual_width: Callable[[int], int]
  initial_mu: Callable[..., jax.Array]  # [D], initial weight of the present token
  has_gate = True

  def __init__(
    self,
    dim: int,
    *,
    hidden: int | None = None,
    mu_of: str = "present",
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    hidden = _width(dim, hidden, self.usual_width)
    check_layer(layer, num_layers)
    self.mu_of = check_choice("mu_of", mu_of, MU_OF)
    mu = self.initial_mu(dim, layer=layer, num_layers=num_layers)
    mu = mu if mu_of == "present" else 1 - mu
    self.dim, self.dtype = dim, jnp.dtype(dtype)
    self.mu_k = nnx.Param(mu.astype(param_dtype))
    self.mu_r = nnx.Param(mu.astype(param_dtype)) if self.has_gate else None
    linear = functools.partial(
      nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
    )
    zeros = nnx.initializers.zeros_init()
    gain = math.sqrt(max(1.0, hidden / dim))
    self.up = linear(dim, hidden, kernel_init=orthogonal(gain))
    self.gate = linear(dim, dim, kernel_init=zeros) if self.has_gate else None
    self.down = linear(hidden, dim, kernel_init=zeros)

  def _init_state(self, B):
    return jnp.zeros((B, self.dim), jnp.float32)

  def _mix(self, x, state, segment_ids):
    place = {"axis_name": self.sequence_axis, "dtype": self.dtype}
    weights = [self.mu_k] if self.mu_r is None else [self.mu_k, self.mu_r]
    if self.mu_of == "previous":
      weights = [1 - wide(mu[...]) for mu in weights]
    of_k, *of_r = interpolated(x, weights, state, segment_ids, **place)
    y = self.down(jnp.square(jax.nn.relu(self.up(of_k))))
    y = y if self.gate is None else jax.nn.sigmoid(self.gate(*of_r)) * y
    return y, last_input(x, self.sequence_axis)


class RWKV4ChannelMix(RWKVChannelMix):
  """`RWKVChannelMix` with 4 D hidden channels and mu_i = (i / D)^rho, rho = 1 - layer / num_layers.

  Source: RWKV-4 (Peng et al. 2023), eqs. 16-18, and its published code.
  """

  usual_width = staticmethod(lambda dim: 4 * dim)
  initial_mu = staticmethod(shift_weight)


class RWKV6ChannelMix(RWKVChannelMix):
  """`RWKVChannelMix` with 3.5 D hidden channels, in whole 32s, and mu_i = (i / D)^(rho^3).

  The published mu weights the previous token: mu_of="previous".
  Source: RWKV-6 (Peng et al. 2024) and its published code.
  """

  usual_width = staticmethod(rwkv6_width)
  power = 3

  @classmethod
  def initial_mu(cls, dim, *, layer, num_layers):
    """[D] float32, initial weight of the present token in its streams."""
    rho = 1.0 - jnp.asarray(layer, jnp.float32) / num_layers
    return (jnp.arange(dim, dtype=jnp.float32) / dim) ** (rho**cls.power)


class RWKV7ChannelMix(RWKV6ChannelMix):
  """W_v relu(W_k x^k)^2 with 4 D hidden channels and mu_i = (i / D)^(rho^4): no gate.

  The published mu weights the previous token: mu_of="previous".
  Source: RWKV-7 (Peng et al. 2025) and its published code.
  """

  usual_width = staticmethod(lambda dim: 4 * dim)
  power, has_gate = 4, False


class Identity(_OfTokens):
  """The input itself, so that a block adds the norm of its stream to it: x + norm(x).

  It has no parameters and no hidden channels. Source: `nn.Identity` as the state mixer of Zoology's
  blocks (Arora et al. 2023, its published code), whose norm stays; so are most models of its recall
  experiments.
  """

  usual_width = staticmethod(lambda dim: None)

  def __init__(self, dim: int, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs: nnx.Rngs):
    del dim, dtype, param_dtype, rngs

  def __call__(self, x: jax.Array) -> jax.Array:
    return x


# "none": the block has no channel mixer and no norm for one, as in models of Mamba's kind.
CHANNEL_MIXERS: dict[str, type[Any] | None] = {
  "gpt2": GPT2MLP,
  "swiglu": SwiGLU,
  "geglu": GeGLU,
  "moe": MixtureOfExperts,
  "rwkv4_channel_mix": RWKV4ChannelMix,
  "rwkv6_channel_mix": RWKV6ChannelMix,
  "rwkv7_channel_mix": RWKV7ChannelMix,
  "identity": Identity,
  "none": None,
}
