"""A token mixer with or without one short convolution of its input, and none of its own."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax import mixers
from lnssm_jax.mixers import RWKV5, Mixer
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.models.block import make_mixer
from lnssm_jax.ops import ConvState
from lnssm_jax.ops.core.states import register_state


@dataclasses.dataclass(frozen=True)
class _Ones:
  """The weights [D] of a token shift that leaves every token as it is; no parameter."""

  dim: int

  def __getitem__(self, index: Any) -> jax.Array:
    return jnp.ones(self.dim)[index]


class UnshiftedRWKV5(RWKV5):
  """`RWKV5` whose streams r, k, v and g are all the current token: mu = 1, not learned."""

  def __init__(self, dim: int, **options: Any):
    super().__init__(dim, **options)
    for name in ("mu_r", "mu_k", "mu_v", "mu_g"):
      setattr(self, name, nnx.static(_Ones(dim)))


@register_state
class ConvolvedState(NamedTuple):
  """Recurrent state of `Convolved`."""

  conv: ConvState | None  # inputs [B, W - 1, D]; None without a convolution
  inner: Any


class Convolved(Mixer[ConvolvedState]):
  """mixer(x + conv(x)): another mixer behind a causal convolution per channel of its input.

  So that mixers differ in their recurrence alone: all have the same convolution, or none. The
  kernel starts uniform within 1 / sqrt(W), and has no bias and no activation.

  Args:
    dim: D, the width of input and output.
    inner: the name of the other mixer.
    options: its own; num_heads goes before that of the model.
    conv_size: W, the tokens that the convolution sees; None leaves it out.

  Raises:
    ValueError: `conv_size` is not positive, or as the other mixer.

  Source: as the Canon layers of Allen-Zhu (2025), before a mixer.
  """

  name = "convolved"
  set_by_model = ("num_heads", "layer", "num_layers")
  can_shard_time = False

  def __init__(
    self,
    dim: int,
    *,
    inner: str,
    options: Mapping[str, Any],
    conv_size: int | None = None,
    num_heads: int | None = None,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = dim, jnp.dtype(dtype)
    dtypes = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    place: dict[str, Any] = {"num_heads": num_heads, "layer": layer, "num_layers": num_layers}
    self.mixer = make_mixer(inner, dim, **(place | dict(options)), **dtypes)
    short = functools.partial(ShortConvolution, dim, conv_size, use_bias=False, **dtypes)
    self.conv = None if conv_size is None else short()

  def recurrence_flops(self, state: Any, length: int) -> float:
    return self.mixer.recurrence_flops(state.inner, length)

  def _init_state(self, B):
    conv = None if self.conv is None else self.conv.init_state(B)
    return ConvolvedState(conv, self.mixer.init_state(B))

  def _input(self, x, conv, segment_ids):
    """(x + conv(x), the state of the convolution)."""
    if self.conv is None:
      return x, None
    y, conv = self.conv(x, conv, segment_ids)
    return x + y.astype(x.dtype), conv

  def _mix(self, x, state, segment_ids):
    conv, inner = state if state is not None else (None, None)
    x, conv = self._input(x, conv, segment_ids)
    y, inner = self.mixer(x, inner, segment_ids)
    return y, ConvolvedState(conv, inner)

  def _mix_with_aux(self, x, state, segment_ids):
    conv, inner = state if state is not None else (None, None)
    x, conv = self._input(x, conv, segment_ids)
    y, inner, aux = self.mixer.with_aux(x, inner, segment_ids)
    return y, ConvolvedState(conv, inner), aux


def register() -> None:
  """Gives both classes their names in configs, for as long as the process lasts."""
  mixers.register("convolved", Convolved)
  mixers.register("unshifted_rwkv5", UnshiftedRWKV5)
