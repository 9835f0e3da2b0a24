"""Layers of transformers: each case is a layer and how it is called."""

import inspect

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
  DeepseekV3Attention,
  DeepseekV3Config,
  DeepseekV3RotaryEmbedding,
)
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Config, FalconH1Mixer
from transformers.models.falcon_mamba.modeling_falcon_mamba import (
  FalconMambaConfig,
  FalconMambaMixer,
)
from transformers.models.gemma2.modeling_gemma2 import (
  Gemma2Attention,
  Gemma2Config,
  Gemma2RotaryEmbedding,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config
from transformers.models.jamba.modeling_jamba import JambaConfig, JambaMambaMixer
from transformers.models.kimi_linear.modeling_kimi_linear import (
  KimiLinearAttention,
  KimiLinearConfig,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv
from transformers.models.llama.modeling_llama import (
  LlamaAttention,
  LlamaConfig,
  LlamaMLP,
  LlamaRotaryEmbedding,
)
from transformers.models.mamba.modeling_mamba import MambaConfig, MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Mixer
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Config
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import (
  RecurrentGemmaAttention,
  RecurrentGemmaConfig,
  RecurrentGemmaMlp,
  RecurrentGemmaRecurrentBlock,
)
from transformers.models.rwkv.modeling_rwkv import RwkvConfig, RwkvSelfAttention
from transformers.models.xlstm.modeling_xlstm import xLSTMConfig, xLSTMLayer

from tests.peers.numbers import DIM, T

_POSITIONS = torch.arange(T)[None]


def _plain(module, x):
  out = module(x)
  return out[0] if isinstance(out, tuple) else out


def _attention(rotary):
  """A call of an attention layer with rotary positions and a causal mask."""
  mask = torch.triu(torch.full((T, T), -torch.inf), 1)[None, None]

  def call(module, x):
    return module(x, position_embeddings=rotary(x, _POSITIONS), attention_mask=mask)[0]

  return call


def _mamba(**options):
  sizes = {"hidden_size": DIM, "state_size": 3, "time_step_rank": 2, "num_hidden_layers": 1}
  return MambaMixer(MambaConfig(**sizes, **options), 0)


def _falcon_mamba():
  sizes = {"hidden_size": DIM, "state_size": 3, "time_step_rank": 2, "num_hidden_layers": 1}
  return FalconMambaMixer(FalconMambaConfig(**sizes), 0, initialize_mixer_weights=False)


def _jamba():
  sizes = {"hidden_size": DIM, "mamba_d_state": 3, "mamba_dt_rank": 2, "num_hidden_layers": 1}
  return JambaMambaMixer(JambaConfig(**sizes), 0)


def _mamba2(**options):
  sizes = {"hidden_size": DIM, "state_size": 3, "head_dim": 4, "num_heads": 4, "chunk_size": 4}
  return Mamba2Mixer(Mamba2Config(**sizes | options, num_hidden_layers=1), 0)


def _falcon_h1(**options):
  sizes = {"mamba_d_ssm": 16, "mamba_d_head": 4, "mamba_n_heads": 4, "mamba_d_state": 3}
  config = FalconH1Config(
    hidden_size=DIM, mamba_chunk_size=4, num_hidden_layers=1, **sizes, **options
  )
  layer = FalconH1Mixer(config, 0)
  layer.mup_vector = torch.ones(1)  # the model sets it
  return layer


def _recurrent_gemma(**options):
  return RecurrentGemmaConfig(
    hidden_size=DIM,
    num_attention_heads=2,
    num_hidden_layers=3,
    intermediate_size=24,
    attn_implementation="eager",
    **{"lru_width": DIM} | options,
  )


def _griffin_attention():
  config = _recurrent_gemma(attention_window_size=4)
  mask = torch.triu(torch.full((T, T), -torch.inf), 1)[None, None]
  call = lambda module, x: module(x, position_ids=_POSITIONS, attention_mask=mask)[0]
  return RecurrentGemmaAttention(config, 2), call


def _griffin_block(**options):
  call = lambda module, x: module(x, _POSITIONS, None, use_cache=False)[0]
  return RecurrentGemmaRecurrentBlock(_recurrent_gemma(**options), 0), call


def _qwen3_next():
  # Where fla is installed they call its kernels, which need a GPU.
  torch_only = inspect.unwrap(qwen3_next.torch_chunk_gated_delta_rule)
  qwen3_next.torch_chunk_gated_delta_rule = torch_only
  config = qwen3_next.Qwen3NextConfig(
    hidden_size=DIM,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=3,
    num_hidden_layers=1,
  )
  return qwen3_next.Qwen3NextGatedDeltaNet(config, 0)


def _lfm2(**options):
  return Lfm2ShortConv(Lfm2Config(hidden_size=DIM, num_hidden_layers=1, **options), 0)


def _xlstm(**options):
  sizes = {"hidden_size": DIM, "num_heads": 2, "num_hidden_layers": 1}
  return xLSTMLayer(xLSTMConfig(**sizes, autocast_kernel_dtype="float32", **options))


def _kimi(**options):
  sizes = {"hidden_size": DIM, "num_attention_heads": 2, "num_hidden_layers": 1}
  config = KimiLinearConfig(**sizes, attn_implementation="eager", **options)
  mask = torch.triu(torch.full((T, T), -torch.inf), 1)[None, None]
  return KimiLinearAttention(config, 0), lambda module, x: module(x, attention_mask=mask)[0]


def _softmax(config_class, layer_class, rotary_class, **options):
  config = config_class(
    hidden_size=DIM,
    num_attention_heads=2,
    num_hidden_layers=1,
    attn_implementation="eager",
    **options,
  )
  return layer_class(config, 0), _attention(rotary_class(config))


def cases():
  grouped = {"num_key_value_heads": 1, "head_dim": 4}
  rotary = LlamaRotaryEmbedding
  latent = {"q_lora_rank": 5, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3}
  latent |= {"v_head_dim": 2, "num_key_value_heads": 2}
  biases = {"attention_bias": True}
  soft_cap = {"attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 4}
  mlp = lambda **options: LlamaMLP(
    LlamaConfig(hidden_size=DIM, intermediate_size=12, num_attention_heads=2, **options)
  )
  rwkv = RwkvConfig(hidden_size=DIM, attention_hidden_size=DIM, num_hidden_layers=1)
  return {
    "mamba": (_mamba(), _plain),
    "mamba_biases": (_mamba(use_bias=True, use_conv_bias=False), _plain),
    "falcon_mamba": (_falcon_mamba(), _plain),
    "jamba": (_jamba(), _plain),
    "mamba_sizes": (_mamba(expand=1, conv_kernel=3), _plain),
    "mamba2": (_mamba2(n_groups=1), _plain),
    "mamba2_sizes": (_mamba2(n_groups=1, expand=1, num_heads=2, conv_kernel=2), _plain),
    "mamba2_clipped": (_mamba2(n_groups=1, time_step_limit=(0.6, 0.9)), _plain),
    "mamba2_groups": (_mamba2(n_groups=2, use_bias=True, use_conv_bias=False), _plain),
    "falcon_h1": (
      _falcon_h1(mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=True),
      _plain,
    ),
    "falcon_h1_gate_first": (
      _falcon_h1(mamba_n_groups=2, mamba_rms_norm=True, mamba_norm_before_gate=False),
      _plain,
    ),
    "falcon_h1_no_norm": (_falcon_h1(mamba_n_groups=2, mamba_rms_norm=False), _plain),
    "recurrent_gemma_block": _griffin_block(),
    "recurrent_gemma_sizes": _griffin_block(lru_width=16, conv1d_width=3),
    "recurrent_gemma_attention": _griffin_attention(),
    "recurrent_gemma_mlp": (RecurrentGemmaMlp(_recurrent_gemma()), _plain),
    "qwen3_next": (_qwen3_next(), _plain),
    "lfm2_short_conv": (_lfm2(), _plain),
    "lfm2_short_conv_biases": (_lfm2(conv_L_cache=4, conv_bias=True), _plain),
    "xlstm": (_xlstm(), _plain),
    "xlstm_biases": (
      _xlstm(
        qk_dim_factor=1.0,
        v_dim_factor=2.0,
        gate_soft_cap=1.5,
        eps=0.1,
        use_bias=True,
        norm_eps=1e-3,
      ),
      _plain,
    ),
    "llama": _softmax(LlamaConfig, LlamaAttention, rotary, **grouped),
    "llama_mlp": (mlp(mlp_bias=True), _plain),
    "llama_mlp_gelu": (mlp(hidden_act="gelu"), _plain),
    "gpt2_mlp": (GPT2MLP(12, GPT2Config(n_embd=DIM)), _plain),
    "qwen2": _softmax(Qwen2Config, Qwen2Attention, rotary, num_key_value_heads=1),
    "qwen3": _softmax(Qwen3Config, Qwen3Attention, rotary, **grouped),
    "deepseek_v3": _softmax(
      DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding, **latent, **biases
    ),
    "deepseek_v2_lite": _softmax(
      DeepseekV3Config,
      DeepseekV3Attention,
      DeepseekV3RotaryEmbedding,
      **latent | {"q_lora_rank": None},
    ),
    "kimi_linear_mla": _kimi(**latent),
    "gemma2": _softmax(Gemma2Config, Gemma2Attention, Gemma2RotaryEmbedding, **grouped, **soft_cap),
    "rwkv": (RwkvSelfAttention(rwkv), _plain),
  }
