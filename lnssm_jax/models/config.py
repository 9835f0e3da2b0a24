"""Settings of whole models: the one list of them, for models, training and published folders.

Imports no JAX, so that a trainer's settings can be read without it; making a value does.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersConfig:
  """Settings of the layers of a model, which language and vision models share.

  Attributes:
    mixer: a name in `lnssm_jax.mixers.MIXERS`, or a subclass of `lnssm_jax.mixers.Mixer`; or
      several, a pattern that the layers repeat: with ("rg_lru", "rg_lru",
      "sliding_window_attention") every third layer is attention. "none" is a layer without one,
      "parallel" the sum of several (`models.Parallel`), and "after_shared" one after a block that
      layers share (`models.AfterShared`).
    mixer_options: further keyword arguments of that mixer, such as {"shift": "kvg"}; for a pattern,
      a dictionary of them by the mixer's name, or the name of its class. A mixer's own `num_heads`
      may be among them.
    norm: "layer" (LayerNorm), "layer_without_bias" (with a scale only), "rms" (RMSNorm) or
      "rms_from_zero" (Gemma's: RMSNorm with 1 + scale), for all norms of the model.
    norm_eps: eps of these norms, under the root. Those inside mixers are options of the mixer.
    embedding_dropout: the rate at which values of the first layer's input are dropped, in a call
      with `dropout_key`: evaluation and generation, without one, drop nothing. Attention
      probabilities: `attention_dropout` in `mixer_options`.
    residual_dropout: that of the outputs of mixers and channel mixers.
    drop_path: the rate at which a row loses the output of a mixer or channel mixer as a whole, in
      the last layer; it rises linearly from 0 in the first.
    dtype: of matrix products and the residual stream, a name or a dtype; norms, decays, states and
      logits are float32.
    matmul: "dtype", or "fp8": the products of wide projections in FP8, e4m3 forward and e5m2 for
      gradients (`lnssm_jax.mixers.common.fp8`); all else, such as recurrences, embedding and head,
      in `dtype`, which is not float16 then.
    remat: the residuals of a layer: "none" recomputes nothing, "full" keeps the layer's input only,
      "dots" also keeps the outputs of the projections and of GPU kernels.

  Raises:
    ValueError: a value is of the wrong type or out of range, a name is unknown, `num_heads` is
      missing or does not divide `dim`, or an option of a mixer or channel mixer is none of its
      constructor's; the message names it.
  """

  mixer: str | type | Sequence[str | type] = "lnssm"  # several are a pattern over the layers
  dim: int  # channels of the residual stream
  num_layers: int  # blocks, each a mixer and a channel mixer
  num_heads: int | None = None  # of each mixer that has heads
  mixer_options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)  # of it
  norm: Literal["layer", "layer_without_bias", "rms", "rms_from_zero"] = "layer"  # of the blocks
  norm_eps: float = 1e-5  # of the model's norms; those of mixers have it in `mixer_options`
  # Rates in training only; that of attention probabilities is `attention_dropout` of the mixer.
  embedding_dropout: float = 0.0  # of values of the first layer's input
  residual_dropout: float = 0.0  # of values of the outputs of mixers and channel mixers
  drop_path: float = 0.0  # of whole outputs of a row: in the last layer, 0 in the first
  dtype: str = "float32"  # of activations; states are always float32
  param_dtype: str = "float32"  # of the parameters and their gradients
  matmul: Literal["dtype", "fp8"] = "dtype"  # products of projections, in `dtype` or in FP8
  remat: Literal["none", "full", "dots"] = "none"  # what the backward pass recomputes

  def __post_init__(self):
    from lnssm_jax.models import options  # imports JAX

    for name, value in options.normal(self).items():
      object.__setattr__(self, name, value)
    options.check(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(LayersConfig):
  """Settings of a `LanguageModel`.

  Attributes:
    channel_mixer: a name in `CHANNEL_MIXERS`; or a pattern of them as long as that of `mixer`.
    norm_place: where the norm of a branch stands: "before" it, x + f(norm(x)), or "after" it,
      x + norm(f(x)); or a pattern as long as that of `mixer`.
    channel_hidden: its number of hidden channels; None takes its default.
    channel_mixer_options: further keyword arguments of it, such as {"activation": "gelu_tanh"}; of
      a pattern of several kinds besides "none", a dictionary of them by name, with their `hidden`.
    embedding_norm: whether a norm follows the embedding.
    embedding_scale: multiplies the embedding, in `dtype`; None for 1.
    residual_scale: multiplies the outputs of mixers and channel mixers before they are added to the
      residual stream (Granite, IBM 2024).
    logit_scale: multiplies the logits, before their soft cap.
    logit_soft_cap: c, with which a logit z becomes c tanh(z / c); None for none.
    tie_embeddings: whether the head is the embedding's transpose.
    learned_positions: the length of a table of learned positions, added to the embedding (before
      its norm); None for none. They count from the start of each document. Longer documents are
      rejected: with an error where the length is known when the model is called, elsewhere their
      outputs from that token on are NaN. The state then counts tokens: `PositionedStates`.
    initialization: a name in `INITIALIZATIONS`. "lnssm": an orthogonal embedding of tiny numbers,
      rms 1e-4, which needs `embedding_norm`, and an orthogonal head; mixers and channel mixers
      start as their classes say. "gpt2": embedding, head and all matrices in blocks are normal with
      a standard deviation of 0.02, those that end a branch divided by sqrt(2 num_layers)
      (sqrt(num_layers) without channel mixers); but mixers and channel mixers whose papers start
      them otherwise, such as Mamba, RWKV and Griffin (`Mixer.starts_as_model` is False). None:
      "lnssm" with `embedding_norm` and a head of its own, else "gpt2".
    unroll: layers per iteration of the loop over layers. The residuals are stacked from iteration
      to iteration: `num_layers` leaves no loop, which is faster and needs less memory with
      remat="none", and takes longer to compile. None: `num_layers` on a GPU with remat="none",
      else 1.
  """

  vocab_size: int  # that of the tokenizer or more
  # "swiglu", "geglu", "rwkv6_channel_mix", "none", ...; or a pattern of them.
  channel_mixer: str | tuple[str, ...] = "gpt2"
  norm_place: str | tuple[str, ...] = "before"  # of each branch, or "after"; or a pattern of both
  channel_hidden: int | None = None  # hidden width; None: the default of `channel_mixer`
  # Further keyword arguments of `channel_mixer`.
  channel_mixer_options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  embedding_norm: bool = True  # a norm after the embedding
  embedding_scale: float | None = None  # factor of the embedding; None: 1
  residual_scale: float = 1.0  # factor of the outputs of mixers and channel mixers
  logit_scale: float = 1.0  # factor of the logits
  logit_soft_cap: float | None = None  # c of logits c tanh(z / c); None: as they are
  initialization: Literal["lnssm", "gpt2"] | None = None  # None: by `embedding_norm` and tying
  learned_positions: int | None = None  # length of a table of positions
  tie_embeddings: bool = False  # the output head is the transposed embedding
  unroll: int | None = None  # layers per iteration of the layer scan; None: all on a GPU, else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackboneConfig(LayersConfig):
  """Settings of a `Backbone`.

  Attributes:
    direction: "causal", with a state; or "both", in which each layer reads the sequence from either
      end (`Bidirectional`).
    channel_mixer, channel_hidden, channel_mixer_options, unroll: as of `ModelConfig`.
  """

  direction: Literal["causal", "both"] = "causal"
  channel_mixer: str = "gpt2"  # "swiglu", "geglu", "rwkv6_channel_mix", "none", ...
  channel_hidden: int | None = None  # hidden width; None: the default of `channel_mixer`
  # Further keyword arguments of `channel_mixer`.
  channel_mixer_options: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
  unroll: int | None = None  # layers per iteration of the layer scan; None: all on a GPU, else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(LayersConfig):
  """Settings of a `VisionModel`, with one mixer in both directions.

  ViL-T has dim=192, ViL-S 384, both 24 layers and patches of 16 in images of 224.

  Attributes:
    image_size: of both sides, or (height, width); multiples of `patch_size`.
    patch_size, channels: a patch is `patch_size`^2 `channels` numbers; there are P of them.
  """

  mixer: str | type = "longhorn"  # in both directions
  norm: Literal["layer", "layer_without_bias", "rms", "rms_from_zero"] = "rms"  # before each mixer
  image_size: int | tuple[int, ...] = 224  # pixels of a side, or (height, width)
  patch_size: int = 16  # pixels of a side of a token
  num_classes: int  # of the images
  channels: int = 3  # 1 (gray) or 3 (colors)

  def __post_init__(self):
    super().__post_init__()
    sides = self.image_size if isinstance(self.image_size, tuple) else (self.image_size,) * 2
    if len(sides) != 2:
      raise ValueError(f"image_size={sides} must be one number, or a height and a width.")
    if any(side % self.patch_size for side in sides):
      raise ValueError(
        f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; choose "
        "another."
      )
