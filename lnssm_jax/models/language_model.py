"""A language model: embedding, a stack of blocks run by one scan, and a head."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.checks import check_choice, check_heads, check_positive, check_state
from lnssm_jax.mixers.initializers import orthogonal
from lnssm_jax.models import layers
from lnssm_jax.models.block import NORMS, Block, mixer_arguments
from lnssm_jax.models.channel_mixers import CHANNEL_MIXERS
from lnssm_jax.models.embedding import lookup
from lnssm_jax.ops.checks import check_shape
from pallas_kernels import MADE_BY_KERNELS

# What is stored of a layer for the backward pass: everything it uses; its input only; or its input,
# the outputs of its projections, which are the matrix products without a batch axis, and what GPU
# kernels made.
REMAT_POLICIES = {
  "none": None,
  "full": jax.checkpoint_policies.nothing_saveable,
  "dots": jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(MADE_BY_KERNELS),
  ),
}

# Arguments of a mixer that the model sets itself.
_SET_BY_MODEL = {"dim", "num_heads", "layer", "num_layers", "dtype", "param_dtype", "rngs"}


class Head(nnx.Module):
  """W [D, vocab] of the logits h W."""

  def __init__(self, dim: int, vocab_size: int, *, param_dtype, rngs: nnx.Rngs):
    gain = 0.5 * math.sqrt(max(1.0, vocab_size / dim))
    self.kernel = nnx.Param(orthogonal(gain)(rngs.params(), (dim, vocab_size), param_dtype))


class LanguageModel(nnx.Module):
  """Tokens [B, T] -> logits [B, T, vocab] float32 of the token that follows each.

      embedding -> norm -> num_layers blocks -> norm -> head

  The blocks' parameters are stacked on a leading axis L. Parameters are of `param_dtype`; matrix
  products and the residual stream are of `dtype`; norms, decays, states and logits are float32.

  Args:
    vocab_size, dim, num_layers, num_heads: the sizes. A mixer without heads needs no `num_heads`
      and does not heed it.
    mixer: a name in `lnssm_jax.mixers.MIXERS`; or several, a pattern that the layers repeat: with
      ("rg_lru", "rg_lru", "sliding_window_attention") every third layer is attention.
    mixer_options: further keyword arguments of that mixer, such as {"shift": "kvg"}; for a pattern,
      a dictionary of them by the mixer's name.
    channel_mixer: a name in `CHANNEL_MIXERS`.
    channel_hidden: its number of hidden channels; None: its own choice.
    norm: "layer" (LayerNorm with bias) or "rms" (RMSNorm), for all norms of the model.
    embedding_norm: whether a norm follows the embedding.
    tie_embeddings: whether the head is the embedding's transpose. The embedding then starts normal
      with a standard deviation of 0.02, as GPT-2's.
    remat: what of a layer is kept for the backward pass: "none" recomputes nothing, "full" keeps
      the layer's input only, "dots" also keeps the outputs of the projections and of GPU kernels.
    unroll: layers in one turn of the loop over layers. What the backward pass needs is stacked from
      turn to turn: `num_layers` leaves no loop, which is faster and needs less memory with
      remat="none", and takes longer to compile.
    sequence_axis: the mesh axis over which a surrounding `jax.shard_map` divides the time axis of
      tokens, segments and logits, or None. The states, passed in and returned, are then those of
      the whole sequence, the same on all devices.

  Raises:
    NotImplementedError: `sequence_axis` is given and a mixer cannot run on a divided sequence.
    ValueError: a size is not a positive integer, `dim` is not a multiple of `num_heads`, or a name
      is unknown.

  Sources: LNSSM, section 5, and its published code: the norm after the embedding, the
  initialisation.
  """

  def __init__(
    self,
    *,
    vocab_size: int,
    dim: int,
    num_layers: int,
    num_heads: int | None = None,
    mixer: str | Sequence[str] = "lnssm",
    mixer_options: Mapping[str, Any] | None = None,
    channel_mixer: str = "gpt2",
    channel_hidden: int | None = None,
    norm: str = "layer",
    embedding_norm: bool = True,
    tie_embeddings: bool = False,
    remat: str = "none",
    unroll: int = 1,
    sequence_axis: str | None = None,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.vocab_size = check_positive("vocab_size", vocab_size)
    self.num_layers = check_positive("num_layers", num_layers)
    check_positive("dim", dim)
    pattern = (mixer,) if isinstance(mixer, str) else tuple(mixer)
    if not 1 <= len(pattern) <= num_layers:
      raise ValueError(
        f"mixer={mixer!r} is a pattern of {len(pattern)} mixers; num_layers={num_layers} needs one "
        f"of 1 to {num_layers}."
      )
    options = _options_by_mixer(pattern, dict(mixer_options or {}), dim, num_heads)
    check_choice("channel_mixer", channel_mixer, CHANNEL_MIXERS)
    if channel_hidden is not None and CHANNEL_MIXERS[channel_mixer] is None:
      raise ValueError(
        f"channel_hidden={channel_hidden} is the width of a channel mixer, and "
        f"channel_mixer={channel_mixer!r} has none; leave it out, or choose a channel mixer."
      )
    check_choice("norm", norm, NORMS)
    self.remat = check_choice("remat", remat, REMAT_POLICIES)
    self.unroll = check_positive("unroll", unroll)
    self.dim, self.dtype = dim, dtype

    init = orthogonal(1e-4 * math.sqrt(max(vocab_size, dim)))
    if tie_embeddings:
      init = nnx.initializers.normal(0.02)
    new_norm = lambda: NORMS[norm](dim, param_dtype=param_dtype, rngs=rngs)
    self.embedding = nnx.Param(init(rngs.params(), (vocab_size, dim), param_dtype))
    self.embedding_norm = new_norm() if embedding_norm else None

    def block(mixer, key, layer):
      return Block(
        dim,
        num_heads=num_heads,
        layer=layer,
        num_layers=num_layers,
        mixer=mixer,
        mixer_options=options[mixer],
        channel_mixer=channel_mixer,
        channel_hidden=channel_hidden,
        norm=norm,
        sequence_axis=sequence_axis,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(key),
      )

    self.blocks = layers.make_blocks(block, pattern, num_layers, rngs.params())
    self.norm = new_norm()
    if tie_embeddings:
      self.head = None
    else:
      self.head = Head(dim, vocab_size, param_dtype=param_dtype, rngs=rngs)

  @property
  def max_length(self) -> int | None:
    """The longest sequence, where a mixer keeps a cache of bounded length; None: any length."""
    return layers.max_length(self.blocks)

  def init_state(self, batch_size: int):
    """The state before the first token: a `BlockState` with a leading axis L. float32.

    Of a pattern of mixers, a list with the state of each place, whose axis counts its layers.
    """
    return layers.init_state(self.blocks, check_positive("batch_size", batch_size))

  def hidden(
    self,
    tokens: jax.Array,
    state=None,
    segment_ids: jax.Array | None = None,
    *,
    gather: Callable[[Block], Block] | None = None,
  ):
    """(What the head reads [B, T, D], in `dtype`; the state after the last token.)

    A token id outside [0, vocab_size) cannot raise on a device: it makes NaN.

    Args:
      tokens: [B, T] integer.
      state: what an earlier call returned, or None at the start of a sequence.
      segment_ids: [B, T] integer; the model starts afresh wherever the id changes.
      gather: makes a layer whole just before it runs, where the layers' parameters are divided over
        devices, such as `lnssm_jax.sharding.gather`.

    Raises:
      ValueError: a rank, dtype or shape is wrong; the message names it.
    """
    self._check(tokens, state)
    options = {"policy": REMAT_POLICIES[self.remat], "unroll": self.unroll, "gather": gather}
    x = self.embed(tokens)
    x, state = layers.run(self.blocks, x, state, segment_ids, **options)
    return self.norm(x).astype(self.dtype), state

  def embed(self, tokens: jax.Array) -> jax.Array:
    """What the first layer reads, [B, T, D] in `dtype`."""
    x = lookup(self.embedding[...], jnp.asarray(tokens))
    return (x if self.embedding_norm is None else self.embedding_norm(x)).astype(self.dtype)

  def head_kernel(self) -> jax.Array:
    """W [D, vocab] of the logits h W, in `param_dtype`."""
    return self.embedding[...].T if self.head is None else self.head.kernel[...]

  def logits(self, hidden: jax.Array) -> jax.Array:
    """[..., D] -> [..., vocab] float32; the product is in `dtype`, its sum in float32."""
    return jnp.matmul(
      hidden.astype(self.dtype),
      self.head_kernel().astype(self.dtype),
      preferred_element_type=jnp.float32,
    )

  def __call__(self, tokens: jax.Array, state=None, segment_ids: jax.Array | None = None):
    """(logits [B, T, vocab] float32, the state after the last token); arguments as in `hidden`."""
    hidden, state = self.hidden(tokens, state, segment_ids)
    return self.logits(hidden), state

  def _check(self, tokens, state):
    check_shape("LanguageModel", "tokens", tokens, (None, None), "[B, T]")
    if not jnp.issubdtype(jnp.result_type(tokens), jnp.integer):
      raise ValueError(
        f"LanguageModel: tokens has dtype {jnp.result_type(tokens)}; token ids must be integers."
      )
    B, T = jnp.shape(tokens)
    if not B * T:
      raise ValueError(f"LanguageModel: tokens has shape {(B, T)}; give at least one token.")
    if state is None:
      return
    expected = jax.eval_shape(lambda: self.init_state(B))
    check_state("LanguageModel", state, expected, "[L, B, ...]")


def _options_by_mixer(pattern, options, dim, num_heads) -> dict[str, dict[str, Any]]:
  """The options of each mixer of a pattern, checked."""
  if len(pattern) > 1:
    for name in options:
      check_choice("mixer_options: mixer", name, pattern)
  by_mixer = {}
  for mixer in dict.fromkeys(pattern):
    arguments = mixer_arguments(check_choice("mixer", mixer, MIXERS))
    if "num_heads" in arguments:
      if num_heads is not None:
        check_heads(dim, num_heads)
      elif arguments["num_heads"].default is arguments["num_heads"].empty:
        raise ValueError(f"num_heads=None: mixer {mixer!r} has heads; say how many.")
    own = dict(options if len(pattern) == 1 else options.get(mixer, {}))
    for name in own:
      allowed = sorted(arguments.keys() - _SET_BY_MODEL)
      check_choice(f"mixer_options of {mixer!r}: option", name, allowed)
    by_mixer[mixer] = own
  return by_mixer


def count_parameters(tree) -> int:
  """How many numbers a model, or a tree of parameters or of their shapes, holds."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
