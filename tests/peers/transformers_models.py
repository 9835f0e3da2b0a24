"""Tiny models of transformers, and how each decodes."""

import inspect
import types

import torch
import transformers
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as bailing_hybrid
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.step3p7 import modeling_step3p7 as step3p7

from tests.peers.record_models import cached_steps, rwkv_steps

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 11}


def patch():
  """Models with gated DeltaNet would call fla's kernels, which need a GPU."""
  for module in (qwen3_next, qwen3_5, qwen3_5_moe, olmo_hybrid):
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
      setattr(module, name, inspect.unwrap(getattr(module, name)))
  for module in (kimi_linear, bailing_hybrid):
    for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
      setattr(module, name, inspect.unwrap(getattr(module, name)))
  bailing_hybrid.BailingHybridAttention.__init__ = _with_low_rank_queries
  bailing_hybrid.BailingHybridDecoderLayer.__init__ = _with_limits


_ATTENTION = bailing_hybrid.BailingHybridAttention.__init__
_LAYER = bailing_hybrid.BailingHybridDecoderLayer.__init__


def _with_limits(self, config, layer_idx):
  """As in the authors' server of Ling 3.0: the bounds that their class for transformers leaves out.

  They are those of Step 3.7, whose modules have the same tensors.
  """
  _LAYER(self, config, layer_idx)
  if not isinstance(self.mlp, bailing_hybrid.BailingHybridMoE):
    return
  limits = {"expert": self.mlp.experts, "share_expert": self.mlp.shared_experts}
  of_step = {"expert": step3p7.Step3p7Experts, "share_expert": step3p7.Step3p7MLP}
  for name, module in limits.items():
    of_layers = getattr(config, f"{name}_swiglu_limit_list", None)
    if of_layers and of_layers[layer_idx]:
      module.limit = of_layers[layer_idx]
      for method in ("forward", "_apply_gate"):
        if hasattr(of_step[name], method):
          setattr(module, method, types.MethodType(getattr(of_step[name], method), module))


def _with_low_rank_queries(self, config, *args, **options):
  """As in the authors' Ling 3.0 and as Kimi Linear has them here, which transformers leaves out."""
  _ATTENTION(self, config, *args, **options)
  if rank := getattr(config, "q_lora_rank", None):
    wide = self.q_proj.out_features
    del self.q_proj
    self.q_a_proj = torch.nn.Linear(config.hidden_size, rank, bias=False)
    self.q_a_layernorm = bailing_hybrid.BailingHybridRMSNorm(rank, eps=config.rms_norm_eps)
    self.q_b_proj = torch.nn.Linear(rank, wide, bias=False)
    self.q_proj = lambda x: self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def cases():
  heads = {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16}
  llama = lambda **options: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**SIZES, **heads, attn_implementation="eager", **options)
  )
  dense = lambda name, **options: (
    getattr(transformers, f"{name}ForCausalLM")(
      getattr(transformers, f"{name}Config")(
        **SIZES, **heads, num_key_value_heads=1, attn_implementation="eager", **options
      )
    ),
    cached_steps,
  )
  windowed = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
  mamba = lambda **options: transformers.MambaForCausalLM(
    transformers.MambaConfig(**SIZES, state_size=3, **options)
  )
  mamba2 = lambda **options: transformers.Mamba2ForCausalLM(
    transformers.Mamba2Config(
      **SIZES, state_size=3, num_heads=4, head_dim=4, chunk_size=4, **options
    )
  )
  falcon = transformers.FalconMambaConfig(**SIZES, state_size=3, time_step_rank=2)
  rwkv = transformers.RwkvConfig(**SIZES, rescale_every=0)
  gemma = transformers.RecurrentGemmaConfig(
    **SIZES | {"num_hidden_layers": 5},
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=24,
    attention_window_size=4,
    logits_soft_cap=2.0,
    attn_implementation="eager",
  )
  scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "rope_theta": 50.0}
  scaling |= {"high_freq_factor": 2.0, "original_max_position_embeddings": 8}
  yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0, "beta_fast": 2.0}
  yarn |= {"original_max_position_embeddings": 16, "beta_slow": 0.5}
  truncated = {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
  dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 50.0}
  bamba = transformers.BambaConfig(
    **SIZES | heads | {"num_hidden_layers": 5},
    num_key_value_heads=1,
    attn_layer_indices=[1, 4],
    mamba_n_heads=4,
    mamba_d_state=3,
    mamba_n_groups=2,
    mamba_chunk_size=4,
    attn_implementation="eager",
  )
  granite = lambda **options: transformers.GraniteMoeHybridForCausalLM(
    transformers.GraniteMoeHybridConfig(
      **SIZES | heads | {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
      num_key_value_heads=1,
      shared_intermediate_size=10,
      mamba_n_heads=4,
      mamba_d_state=3,
      mamba_n_groups=2,
      mamba_chunk_size=4,
      attention_multiplier=0.3,
      embedding_multiplier=3.0,
      residual_multiplier=0.4,
      logits_scaling=6.0,
      attn_implementation="eager",
      experts_implementation="eager",
      **options,
    )
  )
  delta = SIZES | heads | {"num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 8}
  delta |= {"linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 3}
  delta |= {"layer_types": ["linear_attention", "full_attention"] * 2 + ["linear_attention"]}
  delta |= {"attn_implementation": "eager"}
  next_ = lambda keys: transformers.Qwen3NextConfig(
    **delta, linear_num_key_heads=keys, num_experts=0
  )
  next_5 = transformers.Qwen3_5TextConfig(**delta, linear_num_key_heads=2)
  experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
  experts |= {"shared_expert_intermediate_size": 4, "experts_implementation": "eager"}
  experts |= {"linear_num_key_heads": 2, "num_hidden_layers": 3}
  experts |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
  next_moe = transformers.Qwen3NextConfig(**delta | experts, norm_topk_prob=False)
  next_5_moe = transformers.Qwen3_5MoeTextConfig(
    **{x: value for x, value in (delta | experts).items() if x != "intermediate_size"}
  )
  images = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
  images |= {"out_hidden_size": 8, "patch_size": 2, "temporal_patch_size": 1}
  images |= {"num_position_embeddings": 4, "spatial_merge_size": 1}
  nested = transformers.Qwen3_5Config(
    text_config=next_5.to_dict(), vision_config=images, attn_implementation="eager"
  )
  nested_moe = transformers.Qwen3_5MoeConfig(
    text_config=next_5_moe.to_dict(),
    vision_config=images,
    attn_implementation="eager",
    experts_implementation="eager",
  )
  lfm2 = transformers.Lfm2Config(
    **SIZES | heads | {"num_hidden_layers": 5},
    num_key_value_heads=1,
    layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
    block_multiple_of=4,
    conv_bias=True,
    attn_implementation="eager",
  )
  olmo = lambda **options: transformers.OlmoHybridForCausalLM(
    transformers.OlmoHybridConfig(
      **SIZES | heads | {"num_hidden_layers": 3},
      num_key_value_heads=1,
      layer_types=["linear_attention", "full_attention", "linear_attention"],
      linear_num_key_heads=2,
      linear_key_head_dim=4,
      linear_value_head_dim=6,
      pad_token_id=None,
      eos_token_id=2,
      attn_implementation="eager",
      **options,
    )
  )
  no_rope = {"rope_type": "default", "rope_theta": None}
  nemotron = lambda **options: transformers.NemotronHForCausalLM(
    transformers.NemotronHConfig(
      **{x: size for x, size in (SIZES | heads).items() if x != "num_hidden_layers"},
      layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp"],
      num_key_value_heads=1,
      head_dim=6,
      ssm_state_size=3,
      mamba_num_heads=4,
      mamba_head_dim=3,
      n_groups=2,
      chunk_size=4,
      attn_implementation="eager",
      **options,
    )
  )
  multipliers = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.3, "key_multiplier": 0.6}
  multipliers |= {"attention_in_multiplier": 0.7, "attention_out_multiplier": 1.2}
  multipliers |= {"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8}
  multipliers |= {"mlp_multipliers": [0.9, 0.4], "ssm_multipliers": [0.4, 1.1, 0.5, 0.6, 1.2]}
  falcon_h1 = lambda **options: transformers.FalconH1ForCausalLM(
    transformers.FalconH1Config(
      **SIZES | heads,
      num_key_value_heads=1,
      mamba_d_ssm=12,
      mamba_n_heads=4,
      mamba_d_head=3,
      mamba_d_state=3,
      mamba_n_groups=2,
      mamba_chunk_size=4,
      attn_implementation="eager",
      **options,
    )
  )
  zamba2 = lambda kinds, **options: transformers.Zamba2ForCausalLM(
    transformers.Zamba2Config(
      **SIZES | heads | {"num_hidden_layers": len(kinds)},
      layers_block_type=kinds,
      mamba_d_state=3,
      n_mamba_heads=4,
      chunk_size=4,
      adapter_rank=3,
      attn_implementation="eager",
      **options,
    )
  )
  patch()
  return experts_next_to_others() | {
    "llama": (llama(num_key_value_heads=1, rope_theta=500.0), cached_steps),
    "llama_biases": (
      llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
      cached_steps,
    ),
    "llama_scaled": (
      llama(num_key_value_heads=1, head_dim=6, rope_parameters=scaling),
      cached_steps,
    ),
    "llama_linear": (
      llama(head_dim=2, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 9.0}),
      cached_steps,
    ),
    "llama_yarn": (llama(head_dim=8, rope_parameters=yarn), cached_steps),
    "llama_yarn_options": (
      llama(head_dim=8, rope_parameters=yarn | truncated),
      cached_steps,
    ),
    "llama_dynamic": (llama(rope_parameters=dynamic), cached_steps),
    "qwen2": dense("Qwen2", rope_theta=500.0),
    "qwen2_window": dense("Qwen2", tie_word_embeddings=True, **windowed),
    "qwen3": dense("Qwen3", head_dim=6, rope_theta=500.0),
    "qwen3_biases": dense("Qwen3", head_dim=6, attention_bias=True, rope_parameters=scaling),
    "mistral": dense("Mistral", sliding_window=3, rope_theta=500.0),
    "mistral_full": dense("Mistral", sliding_window=None, head_dim=6),
    "bamba": (transformers.BambaForCausalLM(bamba), cached_steps),
    "granitemoehybrid": (
      granite(num_local_experts=0, position_embedding_type="rope", tie_word_embeddings=True),
      cached_steps,
    ),
    "granitemoehybrid_moe": (granite(num_local_experts=5), cached_steps),
    "qwen3_next": (transformers.Qwen3NextForCausalLM(next_(2)), cached_steps),
    "qwen3_5_text": (transformers.Qwen3_5ForCausalLM(next_5), cached_steps),
    "qwen3_5": (transformers.Qwen3_5ForConditionalGeneration(nested), cached_steps),
    "qwen3_next_moe": (transformers.Qwen3NextForCausalLM(next_moe), cached_steps),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeForCausalLM(next_5_moe), cached_steps),
    "qwen3_5_moe": (transformers.Qwen3_5MoeForConditionalGeneration(nested_moe), cached_steps),
    "lfm2": (transformers.Lfm2ForCausalLM(lfm2), cached_steps),
    "olmo_hybrid": (
      olmo(rope_parameters=no_rope),
      cached_steps,
    ),
    "olmo_hybrid_rope": (olmo(linear_allow_neg_eigval=False), cached_steps),
    "nemotron_h": (nemotron(), cached_steps),
    "nemotron_h_biases": (
      nemotron(use_bias=True, mlp_bias=True, use_conv_bias=False),
      cached_steps,
    ),
    "falcon_h1": (falcon_h1(head_dim=6, **multipliers), cached_steps),
    "falcon_h1_norm": (
      falcon_h1(
        mamba_rms_norm=True, tie_word_embeddings=True, projectors_bias=True, mamba_proj_bias=True
      ),
      cached_steps,
    ),
    "zamba2": (
      zamba2(["mamba", "hybrid", "mamba", "hybrid", "hybrid"], num_mem_blocks=2),
      cached_steps,
    ),
    "zamba2_adapters": (
      zamba2(
        ["mamba", "hybrid"] * 2 + ["mamba"],
        use_mem_rope=True,
        use_shared_attention_adapter=True,
        add_bias_linear=True,
        mamba_ngroups=2,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0},
      ),
      cached_steps,
    ),
    "qwen3_next_heads": (transformers.Qwen3NextForCausalLM(next_(4)), cached_steps),
    "mamba": (mamba(), cached_steps),
    "mamba_biases": (
      mamba(use_bias=True, use_conv_bias=False, tie_word_embeddings=False, time_step_rank=2),
      cached_steps,
    ),
    "falcon_mamba": (transformers.FalconMambaForCausalLM(falcon), cached_steps),
    "mamba2": (mamba2(n_groups=1, tie_word_embeddings=True), cached_steps),
    # Their cached decoding does not clip.
    "mamba2_clipped": (mamba2(n_groups=1, time_step_limit=(0.6, 0.9)), None),
    "mamba2_groups": (mamba2(n_groups=2), cached_steps),
    "rwkv": (transformers.RwkvForCausalLM(rwkv), rwkv_steps),
    "recurrent_gemma": (transformers.RecurrentGemmaForCausalLM(gemma), None),
  }


def experts_next_to_others():
  """Models whose layers have experts or a dense MLP."""
  common = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12}
  common |= {"attn_implementation": "eager", "experts_implementation": "eager"}
  lfm2 = transformers.Lfm2MoeConfig(
    **common | {"num_hidden_layers": 4},
    layer_types=["conv", "full_attention", "conv", "full_attention"],
    num_dense_layers=1,
    moe_intermediate_size=6,
    num_experts=5,
    num_experts_per_tok=2,
    routed_scaling_factor=1.5,
    max_position_embeddings=16,
  )
  jamba = transformers.JambaConfig(
    **common | {"num_hidden_layers": 4},
    attn_layer_period=4,
    attn_layer_offset=2,
    num_experts=5,
    mamba_d_state=3,
    max_position_embeddings=16,
  )
  nemotron = lambda **options: transformers.NemotronHForCausalLM(
    transformers.NemotronHConfig(
      **{x: size for x, size in common.items() if x != "num_hidden_layers"},
      layers_block_type=["mamba", "moe", "mamba", "attention", "moe"],
      head_dim=6,
      ssm_state_size=3,
      mamba_num_heads=4,
      mamba_head_dim=3,
      n_groups=2,
      chunk_size=4,
      max_position_embeddings=16,
      n_routed_experts=6,
      moe_intermediate_size=6,
      moe_shared_expert_intermediate_size=4,
      routed_scaling_factor=2.5,
      **options,
    )
  )
  kimi = transformers.KimiLinearConfig(
    **common | {"num_hidden_layers": 4, "num_key_value_heads": 2},
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    linear_head_dim=4,
    linear_num_heads=3,
    kv_lora_rank=5,
    qk_rope_head_dim=2,
    qk_nope_head_dim=3,
    v_head_dim=3,
    num_local_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    max_position_embeddings=16,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
  )
  ling = lambda **options: transformers.BailingHybridConfig(
    **common | {"num_hidden_layers": 4, "num_key_value_heads": 2} | options,
    layer_group_size=3,
    first_k_dense_replace=1,
    head_dim=4,
    q_lora_rank=3,
    kv_lora_rank=5,
    qk_rope_head_dim=4,
    qk_nope_head_dim=3,
    v_head_dim=3,
    rope_theta=50.0,
    num_local_experts=6,
    num_experts_per_tok=2,
    n_group=3,
    topk_group=2,
    moe_intermediate_size=6,
    max_position_embeddings=16,
    num_mtp_layers=0,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
  )
  return {
    "bailing_hybrid": (transformers.BailingHybridForCausalLM(ling()), cached_steps),
    "bailing_hybrid_limits": (
      transformers.BailingHybridForCausalLM(
        ling(
          expert_swiglu_limit_list=[0, 0, 0.25, 0.25],
          share_expert_swiglu_limit_list=[0, 0.25, 0.25, 0.5],
        )
      ),
      cached_steps,
    ),
    "kimi_linear": (transformers.KimiLinearForCausalLM(kimi), cached_steps),
    "lfm2_moe": (transformers.Lfm2MoeForCausalLM(lfm2), cached_steps),
    "jamba": (transformers.JambaForCausalLM(jamba), cached_steps),
    "nemotron_h_moe": (nemotron(), cached_steps),
    "nemotron_h_moe_latent": (nemotron(moe_latent_size=4, n_group=3, topk_group=2), cached_steps),
  }
