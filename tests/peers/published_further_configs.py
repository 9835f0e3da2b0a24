"""As `published_configs`: further files of families of which that one or `..._hybrid_...` has one.

Seen whole: Edge0-8B-A1B, a model trained from Ling-3.0-tiny, here without the settings and tensors
of its own router and of its quantization, and RWKV-4 and Olmo-Hybrid as the programs write them
that converted the published models. Of Kimi-Linear-48B an exported copy was seen but for its end,
and of Jamba Reasoning 3B and Falcon-H1-Tiny-90M several copies of parts. Those of Zamba2 have the
fields that its class of transformers 4.57 writes, and use_shared_mlp_adapter, which copies of parts
have besides; their sizes and flags are of those copies, and give the published numbers of
parameters. Of Ling-3.0-flash parts were seen: what it has other than Ling-3.0-tiny, among them the
bounds of activations, here smaller ones, which tiny random numbers reach.

Searched for without a file: another one of Bamba (names of all its models, its class, its settings)
and of RWKV-4 (Pile, Raven and World in all sizes), in code, documentation, issues and pages of
models and their mirrors. The same for Olmo-Hybrid's Instruct and Think models, Jamba 1.6 and 1.7,
Kimi-Linear Base, and Falcon-H1 of 1.5B and more.
"""

from tests.peers.published_configs import HUGGING_FACE, Published
from tests.peers.published_hybrid_configs import HYBRIDS

_OLMO = {
  x: v
  for x, v in HYBRIDS["olmo-hybrid-7b"].config.items()
  if x not in ("dtype", "rope_parameters", "transformers_version")
}
_NOT_IN_JAMBA_V0_1 = ("num_logits_to_keep", "torch_dtype", "transformers_version")
_ZAMBA2 = {
  "adapter_rank": 3,
  "add_bias_linear": False,
  "architectures": ["Zamba2ForCausalLM"],
  "attention_dropout": 0.0,
  "attention_head_dim": 8,
  "attention_hidden_size": 16,
  "bos_token_id": 1,
  "chunk_size": 256,
  "eos_token_id": 2,
  "hidden_act": "gelu",
  "hidden_size": 8,
  "hybrid_layer_ids": [2, 4, 5],
  "initializer_range": 0.02,
  "intermediate_size": 12,
  "kv_channels": 4,
  "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "hybrid"],
  "mamba_d_conv": 4,
  "mamba_d_state": 3,
  "mamba_expand": 2,
  "mamba_headdim": 4,
  "mamba_ngroups": 1,
  "max_position_embeddings": 16,
  "model_type": "zamba2",
  "n_mamba_heads": 4,
  "num_attention_heads": 2,
  "num_hidden_layers": 6,
  "num_key_value_heads": 2,
  "num_logits_to_keep": 1,
  "num_mem_blocks": 2,
  "num_query_groups": 2,
  "pad_token_id": 0,
  "rms_norm_eps": 1e-05,
  "rope_theta": 10000,
  "time_step_floor": 0.0001,
  "time_step_limit": None,
  "time_step_max": 0.1,
  "time_step_min": 0.001,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "use_conv_bias": True,
  "use_long_context": False,
  "use_mem_eff_path": False,
  "use_mem_rope": False,
  "use_shared_attention_adapter": False,
  "use_shared_mlp_adapter": True,
  "vocab_size": 16,
}
_MOONSHOT = ("configuration_kimi", "modeling_kimi")

FURTHER = {
  "rwkv-4-converted": Published(
    "the program of transformers 4.29.2 that converted the RWKV-4 models",
    HUGGING_FACE["rwkv-4-pile"].config
    | {"architectures": ..., "torch_dtype": ..., "transformers_version": "4.29.2"},
  ),
  "jamba-v0.1": Published(
    "ai21labs/Jamba-v0.1, of the authors' class",
    HYBRIDS["jamba-1.5-mini"].config
    | dict.fromkeys(_NOT_IN_JAMBA_V0_1, ...)
    | {
      "calc_logits_for_entire_prompt": False,
      "eos_token_id": 2,
      "mamba_inner_layernorms": True,
      "max_position_embeddings": ...,
      "n_ctx": 16,
    },
  ),
  "jamba-reasoning-3b": Published(
    "ai21labs/AI21-Jamba-Reasoning-3B",
    HYBRIDS["jamba-1.5-mini"].config
    | {
      "attn_layer_offset": 1,
      "attn_layer_period": 3,
      "num_attention_heads": 4,
      "num_experts": 1,
      "num_hidden_layers": 6,
      "transformers_version": ...,
    },
  ),
  "kimi-linear-48b-a3b-instruct": Published(
    "Firworks/Kimi-Linear-48B-A3B-Instruct-nvfp4, without its quantization",
    HYBRIDS["kimi-linear-48b-a3b"].config
    | {
      "auto_map": {
        "AutoConfig": f"{_MOONSHOT[0]}.KimiLinearConfig",
        "AutoModel": f"{_MOONSHOT[1]}.KimiLinearModel",
        "AutoModelForCausalLM": f"{_MOONSHOT[1]}.KimiLinearForCausalLM",
      },
      "linear_attn_config": {
        "full_attn_layers": [3, 5],
        "head_dim": 4,
        "kda_layers": [1, 2, 4],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
      },
      "num_hidden_layers": 5,
    },
  ),
  "ling-3.0-flash": Published(
    "inclusionAI/Ling-3.0-flash",
    HYBRIDS["ling-3.0-tiny"].config
    | {
      "expert_swiglu_limit_list": [0, 0, 0, 0.25],
      "first_k_dense_replace": 2,
      "num_nextn_predict_layers": 1,
      "q_lora_rank": None,
      "share_expert_swiglu_limit_list": [0, 0, 0.25, 0.5],
    },
  ),
  "ling-edge0-8b": Published(
    "Edge0/Edge0-8B-A1B-preview, transformers 5.8.1, without its own router and quantization",
    HYBRIDS["ling-3.0-tiny"].config
    | {
      "rope_parameters": {
        "partial_rotary_factor": 0.5,
        "rope_theta": 6000000,
        "rope_type": "default",
      },
      "rope_scaling": ...,
      "transformers_version": "5.8.1",
      "use_cache": False,
    },
  ),
  "olmo-hybrid-converted": Published(
    "OLMo-core's program that converts Olmo-Hybrid models without rotations",
    _OLMO | {"rope_theta": None},
  ),
  "olmo-hybrid-converted-rope": Published(
    "OLMo-core's program that converts Olmo-Hybrid models, of one with rotations",
    _OLMO | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
  ),
  "zamba2-2.7b": Published("Zyphra/Zamba2-2.7B", _ZAMBA2),
  "zamba2-1.2b": Published(
    "Zyphra/Zamba2-1.2B",
    _ZAMBA2
    | {
      "hybrid_layer_ids": [2, 5],
      "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
      "num_mem_blocks": 1,
      "use_mem_rope": True,
      "use_shared_attention_adapter": True,
    },
  ),
  "falcon-h1-tiny-90m": Published(
    "tiiuae/Falcon-H1-Tiny-90M-Instruct",
    HYBRIDS["falcon-h1-0.5b"].config
    | {
      "attention_out_multiplier": 1.0,
      "attn_layer_indices": ...,
      "embedding_multiplier": 0.11083984375,
      "eos_token_id": [228, 11],
      "head_dim": 4,
      "key_multiplier": 1.0,
      "lm_head_multiplier": 0.078125,
      "mlp_expansion_factor": ...,
      "mlp_multipliers": [1.0, 1.0],
      "ssm_in_multiplier": 1.0,
      "ssm_multipliers": [1.0] * 5,
      "ssm_out_multiplier": 1.0,
      "tie_word_embeddings": True,
    },
  ),
}
