"""A block of attention and an MLP that several layers of a model share (Zamba2)."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import Mixer, SoftmaxAttention, shard_time
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_groups, check_heads, check_positive
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.models.channel_mixers import GeGLU
from lnssm_jax.ops import attention
from lnssm_jax.ops.core.dropout import fold
from lnssm_jax.ops.core.precision import wide

AFTER_SHARED = "after_shared"  # the name of the mixer


class Corrected(nnx.Module):
  """W x + V U x: a linear layer with a correction of low rank; float32 at least."""

  def __init__(self, layer: Any, down: Any, up: Any):
    self.layer, self.down, self.up = layer, down, up

  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., inputs] -> [..., outputs]."""
    return wide(self.layer(x)) + wide(self.up(self.down(x)))


class SharedBlock(nnx.Module):
  """The block that layers share: f of `AfterShared`, which has its equations and its arguments.

  Its modules have the names that those of a `Block` have, by which parameters are sharded.
  """

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_kv_heads: int | None,
    max_length: int,
    positions: str,
    rotary_base: float,
    attention_dropout: float,
    hidden: int | None,
    activation: str,
    use_bias: bool,
    norm_eps: float,
    num_layers: int = 1,
    dtype,
    param_dtype,
    rngs: nnx.Rngs,
  ):
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    of_norm = {"eps": norm_eps, "param_dtype": param_dtype}
    width = 2 * dim // num_heads
    self.mixer_norm = RMSNorm(2 * dim, **of_norm)
    self.mixer = SoftmaxAttention(
      2 * dim,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      max_length=max_length,
      positions=positions,
      rotary_base=rotary_base,
      scale=math.sqrt(2 / width),
      attention_dropout=attention_dropout,
      **options,
    )
    initial = nnx.initializers.normal(0.02 / math.sqrt(2 * num_layers))
    self.mixer.o_proj = Linear(num_heads * width, dim, kernel_init=initial, **options)
    self.channel_norm = RMSNorm(dim, **of_norm)
    hidden = 4 * dim if hidden is None else hidden
    self.channel_mixer = GeGLU(
      dim, hidden=hidden, activation=activation, use_bias=use_bias, **options
    )
    self.dtype = jnp.dtype(dtype)

  def __call__(self, x, embedding, state, segment_ids, *, dropout_key, corrections):
    """(f [B, T, D], the cache); `corrections` are {name of a linear layer: (U, V)}."""
    parts = jax.tree.map(lambda leaf: leaf, self)  # the block keeps its layers
    for name, pair in corrections.items():
      owner = parts.channel_mixer if hasattr(parts.channel_mixer, name) else parts.mixer
      setattr(owner, name, Corrected(getattr(owner, name), *pair))
    both = jnp.concatenate([x, embedding.astype(x.dtype)], axis=-1)
    y = self.mixer_norm(both, dtype=self.dtype)
    y, state = parts.mixer(y, state, segment_ids, dropout_key=dropout_key)
    y = self.channel_norm(y, dtype=self.dtype)
    mlp = parts.channel_mixer
    return mlp.output(mlp.gate(y), mlp.up(y)), state  # corrected layers have no kernels to stack


class AfterShared(Mixer[tuple[Any, Any]]):
  r"""A mixer whose input also has what a block computes that several layers of a model share.

      y = mixer(norm(x + W_s f)),     f = W_down (activation(W_gate n) * W_up n)
      n = norm(attention(norm([x, e])))        [x, e]: x next to the input e of the first layer

  The residual stream becomes x + y. Attention has H heads of 2 D / H channels, and scores of the
  scale (D / H)^(-1/2). The model has `num_blocks` blocks that compute f, and the layers use them in
  turn; a layer's own are W_s, the norm of its mixer, and corrections W + V U of low rank.

  A model's mixer "after_shared" has in `mixer_options` the constructor's arguments, with the
  options of the mixer in place of the mixer: {"mixers": {"mamba2": {}}, "num_blocks": 2}. All norms
  are RMSNorm. It needs a `LanguageModel`, which has the blocks and gives them to its layers.

  Args:
    dim: D.
    mixers: {name: the mixer}, one of width D.
    num_heads, num_kv_heads, max_length, positions, rotary_base, attention_dropout: of the blocks'
      `SoftmaxAttention`, whose width is 2 D.
    num_blocks: how many blocks there are.
    block: the number of this layer's.
    hidden, activation, use_bias: of the blocks' MLPs; hidden None means 4 D.
    rank: of the corrections of W_gate and W_up, which share U; None for none.
    attention_rank: of those of queries, keys and values; None for none.
    norm_eps: eps of the norms, under the root.
    num_layers: of the model, for the initial W_s.

  Raises:
    ValueError: a size is not positive or does not fit, or the layer is called without its model.

  Source: Zamba2 (Glorioso et al. 2024), section II, and its published code.
  """

  set_by_model = ("num_heads", "layer", "num_layers")

  def __init__(
    self,
    dim: int,
    *,
    mixers: Mapping[str, Any],
    num_heads: int,
    num_blocks: int = 1,
    block: int = 0,
    num_kv_heads: int | None = None,
    max_length: int = 2048,
    positions: str = "rotary",
    rotary_base: float = 10000.0,
    attention_dropout: float = 0.0,
    hidden: int | None = None,
    activation: str = "gelu",
    use_bias: bool = False,
    rank: int | None = None,
    attention_rank: int | None = None,
    norm_eps: float = 1e-5,
    layer: int | jax.Array = 0,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    del positions, rotary_base, activation, use_bias, layer, num_blocks  # of the blocks
    (self.mixer,) = mixers.values()
    self.dim, self.block, self.num_heads, self.dtype = dim, block, num_heads, jnp.dtype(dtype)
    # Of the mixer's own attention, too.
    own_length = getattr(self.mixer, "max_length", None) or max_length
    self.reach, self.max_length = max_length, min(max_length, own_length)
    self.attention_dropout = max(attention_dropout, self.mixer.attention_dropout)
    self.head_dim = check_heads(2 * dim, num_heads)
    self.num_kv_heads = check_groups("num_kv_heads", num_kv_heads, num_heads)

    def linear(inputs, outputs, std=0.02):
      options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
      return Linear(inputs, outputs, kernel_init=nnx.initializers.normal(std), **options)

    self.norm = RMSNorm(dim, eps=norm_eps, param_dtype=param_dtype)
    self.shared_proj = linear(dim, dim, 0.02 / math.sqrt(2 * num_layers))
    self.corrected: tuple[tuple[str, str, str], ...] = ()  # (a layer of the block, its U, its V)
    if rank is not None:
      hidden = 4 * dim if hidden is None else hidden
      self.mlp_down_proj = linear(dim, check_positive("rank", rank))
      self.gate_up_proj, self.up_up_proj = linear(rank, hidden, 0.0), linear(rank, hidden, 0.0)
      self.corrected += tuple((x, "mlp_down_proj", f"{x}_up_proj") for x in ("gate", "up"))
    if attention_rank is not None:
      check_positive("attention_rank", attention_rank)
      for x, heads in (("q", num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads)):
        setattr(self, f"{x}_down_proj", linear(2 * dim, attention_rank))
        setattr(self, f"{x}_up_proj", linear(attention_rank, heads * self.head_dim, 0.0))
        self.corrected += ((f"{x}_proj", f"{x}_down_proj", f"{x}_up_proj"),)
    # A model gives them to the layer when it runs.
    self.shared: SharedBlock | None = nnx.data(None)
    self.embedding: jax.Array | None = nnx.data(None)

  def recurrence_flops(self, state: Any, length: int) -> float:
    """Those of attention and of the mixer."""
    cache, own = state
    return flops.attention(self, cache, length) + self.mixer.recurrence_flops(own, length)

  def _init_state(self, B):
    widths = {"kv_heads": self.num_kv_heads, "key_dim": self.head_dim}
    cache = attention.init_state(batch=B, **widths, window=self.reach, dtype=self.dtype)
    return cache, self.mixer.init_state(B)

  def _mix(self, x, state, segment_ids):
    return self._mix_dropping(x, state, segment_ids, None)

  def _mix_dropping(self, x, state, segment_ids, dropout_key):
    read, cache, own, key = self._read(x, state, segment_ids, dropout_key)
    y, own = self.mixer(read, own, segment_ids, dropout_key=key)
    return y, (cache, own)

  def _mix_with_aux(self, x, state, segment_ids):
    return self._mix_dropping_with_aux(x, state, segment_ids, None)

  def _mix_dropping_with_aux(self, x, state, segment_ids, dropout_key):
    read, cache, own, key = self._read(x, state, segment_ids, dropout_key)
    y, own, aux = self.mixer.with_aux(read, own, segment_ids, dropout_key=key)
    return y, (cache, own), aux

  def _read(self, x, state, segment_ids, dropout_key):
    """(the input of the mixer, the cache, the state of the mixer before, its key)."""
    if self.shared is None or self.embedding is None:
      raise ValueError(
        "AfterShared: the layer is called without its model, which has the block that layers share;"
        " call the model."
      )
    cache, own = (None, None) if state is None else state
    keys = [None if dropout_key is None else fold(dropout_key, n) for n in range(2)]
    corrections = {
      name: (getattr(self, down), getattr(self, up)) for name, down, up in self.corrected
    }
    arguments = x, self.embedding, cache, segment_ids
    f, cache = self.shared(*arguments, dropout_key=keys[0], corrections=corrections)
    return self.norm.add(x, self.shared_proj(f), self.dtype)[0], cache, own, keys[1]


def shared_blocks(
  config: Any, own: Mapping[str, Any], sequence_axis: str | None, rngs: nnx.Rngs
) -> nnx.Dict:
  """The blocks {"0": a `SharedBlock`, ...} of a model whose `AfterShared` has the options `own`."""
  listed = lambda cls: inspect.signature(cls.__init__).parameters
  given = {name: x.default for name, x in listed(AfterShared).items()}
  of_model = ("num_heads", "num_layers", "dtype", "param_dtype")
  given |= {name: getattr(config, name) for name in of_model} | dict(own)
  options = {name: given[name] for name in listed(SharedBlock).keys() - {"self", "dim", "rngs"}}
  number = check_positive("num_blocks", given["num_blocks"])
  blocks = [SharedBlock(config.dim, **options, rngs=rngs) for _ in range(number)]
  if sequence_axis is not None:
    for block in blocks:
      shard_time(block.mixer, sequence_axis)
  return nnx.Dict({str(n): block for n, block in enumerate(blocks)})


def numbers_of_blocks(pattern: Sequence[Any], num_layers: int, num_blocks: int) -> list[int]:
  """The number of the shared block of each place in a pattern of mixers; 0 of other mixers.

  Raises:
    ValueError: the layers of one place would have several.
  """
  period, used, numbers = len(pattern), 0, [set() for _ in pattern]
  for layer in range(num_layers):
    if pattern[layer % period] == AFTER_SHARED:
      numbers[layer % period].add(used % num_blocks)
      used += 1
  if any(len(found) > 1 for found in numbers):
    raise ValueError(
      f"num_blocks={num_blocks} shared blocks are used in turn, and the pattern mixer="
      f"{tuple(pattern)!r:.80} has {pattern.count(AFTER_SHARED)} layers with one: the layers of one"
      f" place would have several. Give it {num_blocks} times in a row."
    )
  return [min(found, default=0) for found in numbers]
