"""A language model: embedding, a stack of blocks run by one scan, and an untied head."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.checks import check_choice, check_heads, check_positive, check_state
from lnssm_jax.mixers.initializers import orthogonal
from lnssm_jax.models.block import Block, layer_norm, mixer_arguments
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
  """Logits h W: [..., D] -> [..., vocab] float32, the product in `dtype`, its sum in float32."""

  def __init__(self, dim: int, vocab_size: int, *, dtype, param_dtype, rngs: nnx.Rngs):
    gain = 0.5 * math.sqrt(max(1.0, vocab_size / dim))
    self.kernel = nnx.Param(orthogonal(gain)(rngs.params(), (dim, vocab_size), param_dtype))
    self.dtype = dtype

  def __call__(self, hidden: jax.Array) -> jax.Array:
    return jnp.matmul(
      hidden.astype(self.dtype),
      self.kernel[...].astype(self.dtype),
      preferred_element_type=jnp.float32,
    )


class LanguageModel(nnx.Module):
  """Tokens [B, T] -> logits [B, T, vocab] float32 of the token that follows each.

      embedding -> LayerNorm -> num_layers blocks -> LayerNorm -> head

  The blocks' parameters are stacked on a leading axis L. Parameters are of `param_dtype`; matrix
  products and the residual stream are of `dtype`; norms, decays, states and logits are float32.

  Args:
    vocab_size, dim, num_layers, num_heads: the sizes. A mixer without heads needs no `num_heads`
      and does not heed it.
    mixer: a name in `lnssm_jax.mixers.MIXERS`.
    mixer_options: further keyword arguments of that mixer, such as {"shift": "kvg"}.
    channel_mixer: a name in `CHANNEL_MIXERS`.
    remat: what of a layer is kept for the backward pass: "none" recomputes nothing, "full" keeps
      the layer's input only, "dots" also keeps the outputs of the projections and of GPU kernels.
    unroll: layers in one turn of the loop over layers. What the backward pass needs is stacked from
      turn to turn: `num_layers` leaves no loop, which is faster and needs less memory with
      remat="none", and takes longer to compile.

  Raises:
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
    mixer: str = "lnssm",
    mixer_options: Mapping[str, Any] | None = None,
    channel_mixer: str = "gpt2",
    remat: str = "none",
    unroll: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.vocab_size = check_positive("vocab_size", vocab_size)
    self.num_layers = check_positive("num_layers", num_layers)
    check_positive("dim", dim)
    arguments = mixer_arguments(check_choice("mixer", mixer, MIXERS))
    if "num_heads" in arguments:
      if num_heads is not None:
        check_heads(dim, num_heads)
      elif arguments["num_heads"].default is arguments["num_heads"].empty:
        raise ValueError(f"num_heads=None: mixer {mixer!r} has heads; say how many.")
    check_choice("channel_mixer", channel_mixer, CHANNEL_MIXERS)
    self.remat = check_choice("remat", remat, REMAT_POLICIES)
    self.unroll = check_positive("unroll", unroll)
    self.dim, self.dtype = dim, dtype
    options = dict(mixer_options or {})
    allowed = arguments.keys() - _SET_BY_MODEL
    for name in options:
      check_choice(f"mixer_options of {mixer!r}: option", name, sorted(allowed))

    gain = 1e-4 * math.sqrt(max(vocab_size, dim))
    self.embedding = nnx.Param(orthogonal(gain)(rngs.params(), (vocab_size, dim), param_dtype))
    self.embedding_norm = layer_norm(dim, param_dtype=param_dtype, rngs=rngs)

    def block(key, layer):
      return Block(
        dim,
        num_heads=num_heads,
        layer=layer,
        num_layers=num_layers,
        mixer=mixer,
        mixer_options=options,
        channel_mixer=channel_mixer,
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=nnx.Rngs(key),
      )

    keys = jax.random.split(rngs.params(), num_layers)
    self.blocks = jax.vmap(block)(keys, jnp.arange(num_layers))
    self.norm = layer_norm(dim, param_dtype=param_dtype, rngs=rngs)
    self.head = Head(dim, vocab_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

  def init_state(self, batch_size: int):
    """The state before the first token: the mixer's, with a leading axis L. float32."""
    state = self.blocks.mixer.init_state(check_positive("batch_size", batch_size))
    return jax.tree.map(lambda s: jnp.broadcast_to(s, (self.num_layers, *s.shape)), state)

  def hidden(self, tokens: jax.Array, state=None, segment_ids: jax.Array | None = None):
    """(What the head reads [B, T, D], in `dtype`; the state after the last token.)

    A token id outside [0, vocab_size) cannot raise on a device: it makes NaN.

    Args:
      tokens: [B, T] integer.
      state: what an earlier call returned, or None at the start of a sequence.
      segment_ids: [B, T] integer; the model starts afresh wherever the id changes.

    Raises:
      ValueError: a rank, dtype or shape is wrong; the message names it.
    """
    self._check(tokens, state)
    x = self.embedding_norm(lookup(self.embedding[...], jnp.asarray(tokens))).astype(self.dtype)

    def layer(x, inputs):
      block, block_state = inputs
      return block(x, block_state, segment_ids)

    if (policy := REMAT_POLICIES[self.remat]) is not None:
      # The scan itself keeps forward and backward pass apart; prevent_cse would only cost time.
      layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x, state = jax.lax.scan(layer, x, (self.blocks, state), unroll=self.unroll)
    return self.norm(x).astype(self.dtype), state

  def __call__(self, tokens: jax.Array, state=None, segment_ids: jax.Array | None = None):
    """(logits [B, T, vocab] float32, the state after the last token); arguments as in `hidden`."""
    hidden, state = self.hidden(tokens, state, segment_ids)
    return self.head(hidden), state

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


def count_parameters(tree) -> int:
  """How many numbers a model, or a tree of parameters or of their shapes, holds."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
