"""The fields of published config.json files, with sizes that are tiny: facts, no code.

A case is the file of one model as its authors saved it, or as the version of the library in
`source` writes one. Widths, depths and vocabularies are shrunk in the proportions of the model;
every other field has the published value, or what follows from the sizes.

Compared with copies of the published files in public repositories on 2026-11-27, without a field
that differs: Qwen2.5-7B-Instruct, Qwen3-0.6B, Mistral-7B-v0.1, Mistral-7B-Instruct-v0.3, and the
text model of Qwen3.5-0.8B.
"""

from typing import Any, NamedTuple

INF = float("inf")


class Published(NamedTuple):
  """One config.json."""

  source: str  # whose file it is, and what wrote it
  config: dict[str, Any]
  layout: str = "hf"  # or "fla", "mamba_ssm"


_GENERATION_4 = {
  "add_cross_attention": False,
  "bad_words_ids": None,
  "begin_suppress_tokens": None,
  "chunk_size_feed_forward": 0,
  "cross_attention_hidden_size": None,
  "decoder_start_token_id": None,
  "diversity_penalty": 0.0,
  "do_sample": False,
  "early_stopping": False,
  "encoder_no_repeat_ngram_size": 0,
  "exponential_decay_length_penalty": None,
  "finetuning_task": None,
  "forced_bos_token_id": None,
  "forced_eos_token_id": None,
  "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
  "is_decoder": False,
  "is_encoder_decoder": False,
  "label2id": {"LABEL_0": 0, "LABEL_1": 1},
  "length_penalty": 1.0,
  "max_length": 20,
  "min_length": 0,
  "no_repeat_ngram_size": 0,
  "num_beam_groups": 1,
  "num_beams": 1,
  "num_return_sequences": 1,
  "output_attentions": False,
  "output_hidden_states": False,
  "output_scores": False,
  "prefix": None,
  "problem_type": None,
  "pruned_heads": {},
  "remove_invalid_values": False,
  "repetition_penalty": 1.0,
  "return_dict": True,
  "return_dict_in_generate": False,
  "sep_token_id": None,
  "suppress_tokens": None,
  "task_specific_params": None,
  "temperature": 1.0,
  "tf_legacy_loss": False,
  "tie_encoder_decoder": False,
  "tokenizer_class": None,
  "top_k": 50,
  "top_p": 1.0,
  "torchscript": False,
  "typical_p": 1.0,
  "use_bfloat16": False,
}

_MAMBA = {
  "architectures": ["MambaForCausalLM"],
  "bos_token_id": 0,
  "conv_kernel": 4,
  "eos_token_id": 0,
  "expand": 2,
  "hidden_act": "silu",
  "hidden_size": 8,
  "initializer_range": 0.1,
  "intermediate_size": 16,
  "layer_norm_epsilon": 1e-05,
  "model_type": "mamba",
  "num_hidden_layers": 2,
  "pad_token_id": 0,
  "rescale_prenorm_residual": False,
  "residual_in_fp32": True,
  "state_size": 3,
  "time_step_floor": 0.0001,
  "time_step_init_scheme": "random",
  "time_step_max": 0.1,
  "time_step_min": 0.001,
  "time_step_rank": 1,
  "time_step_scale": 1.0,
  "use_bias": False,
  "use_cache": True,
  "use_conv_bias": True,
  "vocab_size": 16,
}
_FROM_MAMBA_SSM = {
  "_name_or_path": "state-spaces/mamba-130m-hf",
  "d_inner": 16,
  "d_model": 8,
  "fused_add_norm": True,
  "n_layer": 2,
  "pad_vocab_size_multiple": 8,
  "rms_norm": True,
  "ssm_cfg": {},
  "torch_dtype": "float32",
  "transformers_version": "4.39.0.dev0",
}
_FALCON = _MAMBA | {
  "_name_or_path": "./",
  "architectures": ["FalconMambaForCausalLM"],
  "eos_token_id": 11,
  "expand": 16,
  "model_type": "falcon_mamba",
  "pad_token_id": 11,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0",
}

_MAMBA2 = {
  "architectures": ["Mamba2ForCausalLM"],
  "bos_token_id": 0,
  "chunk_size": 256,
  "conv_kernel": 4,
  "eos_token_id": 0,
  "expand": 2,
  "head_dim": 4,
  "hidden_act": "silu",
  "hidden_size": 8,
  "initializer_range": 0.1,
  "layer_norm_epsilon": 1e-05,
  "model_type": "mamba2",
  "n_groups": 2,
  "num_heads": 4,
  "num_hidden_layers": 2,
  "pad_token_id": 0,
  "rescale_prenorm_residual": False,
  "residual_in_fp32": True,
  "rms_norm": True,
  "state_size": 3,
  "tie_word_embeddings": False,
  "time_step_floor": 0.0001,
  "time_step_limit": [0.0, INF],
  "time_step_max": 0.1,
  "time_step_min": 0.001,
  "time_step_rank": 1,
  "use_bias": False,
  "use_cache": True,
  "use_conv_bias": True,
  "vocab_size": 16,
}

_LLAMA = {
  "architectures": ["LlamaForCausalLM"],
  "bos_token_id": 1,
  "eos_token_id": 2,
  "hidden_act": "silu",
  "hidden_size": 8,
  "initializer_range": 0.02,
  "intermediate_size": 12,
  "max_position_embeddings": 16,
  "model_type": "llama",
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "tie_word_embeddings": False,
  "use_cache": True,
  "vocab_size": 16,
}
_LLAMA_3 = {
  "attention_bias": False,
  "attention_dropout": 0.0,
  "mlp_bias": False,
  "num_key_value_heads": 1,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "torch_dtype": "bfloat16",
}

_DENSE = {
  "attention_dropout": 0.0,
  "hidden_act": "silu",
  "hidden_size": 8,
  "initializer_range": 0.02,
  "intermediate_size": 12,
  "max_position_embeddings": 16,
  "num_attention_heads": 2,
  "num_hidden_layers": 2,
  "num_key_value_heads": 1,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "vocab_size": 16,
}
_QWEN = _DENSE | {
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "max_window_layers": 28,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "use_sliding_window": False,
}
_QWEN3 = _QWEN | {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "head_dim": 6,
  "max_window_layers": 2,
  "model_type": "qwen3",
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "transformers_version": "4.51.0",
}
_QWEN3_5 = {
  "architectures": ["Qwen3_5ForConditionalGeneration"],
  "image_token_id": 13,
  "model_type": "qwen3_5",
  "text_config": {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 15,
    "full_attention_interval": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 4,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 32,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
      "mrope_interleaved": True,
      "mrope_section": [1, 0, 0],
      "partial_rotary_factor": 0.25,
      "rope_theta": 10000000,
      "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 16,
  },
  "tie_word_embeddings": True,
  "video_token_id": 14,
  "vision_config": {
    "deepstack_visual_indexes": [],
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 8,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 8,
    "model_type": "qwen3_5",
    "num_heads": 2,
    "num_position_embeddings": 4,
    "out_hidden_size": 8,
    "patch_size": 2,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
  },
  "vision_end_token_id": 12,
  "vision_start_token_id": 11,
}
_MISTRAL = _DENSE | {
  "architectures": ["MistralForCausalLM"],
  "bos_token_id": 1,
  "eos_token_id": 2,
  "model_type": "mistral",
  "rms_norm_eps": 1e-05,
  "tie_word_embeddings": False,
}

_GEMMA = {
  "architectures": ["RecurrentGemmaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attention_window_size": 4,
  "bos_token_id": 2,
  "conv1d_width": 4,
  "eos_token_id": 1,
  "head_dim": 4,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 8,
  "intermediate_size": 48,
  "logits_soft_cap": 30.0,
  "lru_width": 8,
  "model_type": "recurrent_gemma",
  "num_attention_heads": 2,
  "num_hidden_layers": 5,
  "num_key_value_heads": 1,
  "pad_token_id": 0,
  "partial_rotary_factor": 0.5,
  "rms_norm_eps": 1e-06,
  "rope_theta": 10000.0,
  "torch_dtype": "bfloat16",
  "use_cache": True,
  "vocab_size": 16,
  "w_init_variance_scale": 0.01,
}

HUGGING_FACE = {
  "mamba-130m-hf": Published(
    "state-spaces/mamba-130m-hf, transformers 4.39.0.dev0", _MAMBA | _FROM_MAMBA_SSM
  ),
  "mamba-4.44": Published(
    "MambaConfig of transformers 4.44.2, all of its dictionary",
    _GENERATION_4
    | _MAMBA
    | {
      "tie_word_embeddings": True,
      "torch_dtype": "float32",
      "transformers_version": "4.44.2",
      "use_mambapy": False,
    },
  ),
  "mamba-5.23": Published(
    "MambaConfig of transformers 5.23.0",
    _MAMBA
    | {
      "dtype": "float32",
      "tie_word_embeddings": True,
      "transformers_version": "5.23.0",
      "use_associative_scan": True,
      "use_mambapy": False,
    },
  ),
  "mamba-codestral-7b": Published(
    "mistralai/Mamba-Codestral-7B-v0.1, transformers 4.44.0.dev0",
    _MAMBA2
    | {
      "_name_or_path": "/raid/codestral-hf-good/",
      "intermediate_size": 16,
      "norm_before_gate": True,
      "time_step_init_scheme": "random",
      "time_step_scale": 1.0,
      "torch_dtype": "bfloat16",
      "transformers_version": "4.44.0.dev0",
    },
  ),
  "mamba2-4.49": Published(
    "Mamba2Config of transformers 4.49.0",
    _MAMBA2 | {"n_groups": 1, "torch_dtype": "float32", "transformers_version": "4.49.0"},
  ),
  "falcon-mamba-7b": Published("tiiuae/falcon-mamba-7b, transformers 4.43.0.dev0", _FALCON),
  "falcon-mamba-4.57": Published(
    "tiiuae/falcon-mamba-7b opened and saved by transformers 4.57.1",
    _FALCON
    | {
      "_name_or_path": ...,
      "dtype": "bfloat16",
      "mixer_rms_eps": 1e-06,
      "torch_dtype": ...,
      "transformers_version": "4.57.1",
      "use_falcon_mambapy": False,
    },
  ),
  "llama-2-7b-hf": Published(
    "meta-llama/Llama-2-7b-hf, transformers 4.31.0.dev0",
    _LLAMA
    | {
      "_name_or_path": "meta-llama/Llama-2-7b-hf",
      "num_key_value_heads": 2,
      "rope_scaling": None,
      "torch_dtype": "float16",
      "transformers_version": "4.31.0.dev0",
    },
  ),
  "llama-3.1-8b": Published(
    "meta-llama/Llama-3.1-8B, transformers 4.43.0.dev0",
    _LLAMA | _LLAMA_3 | {"transformers_version": "4.43.0.dev0"},
  ),
  "llama-3.1-5.23": Published(
    "meta-llama/Llama-3.1-8B opened and saved by transformers 5.23.0",
    _LLAMA
    | _LLAMA_3
    | {
      "dtype": "bfloat16",
      "head_dim": 4,
      "pad_token_id": None,
      "rope_parameters": _LLAMA_3["rope_scaling"] | {"rope_theta": 500000.0},
      "rope_scaling": ...,
      "rope_theta": ...,
      "torch_dtype": ...,
      "transformers_version": "5.23.0",
    },
  ),
  "smollm2": Published(
    "HuggingFaceTB/SmolLM2-135M, transformers 4.40.1",
    _LLAMA
    | {
      "attention_bias": False,
      "attention_dropout": 0.0,
      "bos_token_id": 0,
      "eos_token_id": 0,
      "initializer_range": 0.041666666666666664,
      "is_llama_config": True,
      "num_key_value_heads": 1,
      "rope_interleaved": False,
      "rope_scaling": None,
      "rope_theta": 100000,
      "tie_word_embeddings": True,
      "torch_dtype": "bfloat16",
      "transformers_version": "4.40.1",
    },
  ),
  "qwen2.5-7b-instruct": Published(
    "Qwen/Qwen2.5-7B-Instruct, transformers 4.43.1",
    _QWEN
    | {
      "architectures": ["Qwen2ForCausalLM"],
      "model_type": "qwen2",
      "sliding_window": 131072,
      "tie_word_embeddings": False,
      "transformers_version": "4.43.1",
    },
  ),
  "qwen3-0.6b": Published("Qwen/Qwen3-0.6B, transformers 4.51.0", _QWEN3),
  "mistral-7b-v0.1": Published(
    "mistralai/Mistral-7B-v0.1, transformers 4.34.0.dev0",
    _MISTRAL
    | {
      "attention_dropout": ...,
      "rope_theta": 10000.0,
      "sliding_window": 4,
      "transformers_version": "4.34.0.dev0",
    },
  ),
  "mistral-7b-instruct-v0.3": Published(
    "mistralai/Mistral-7B-Instruct-v0.3, transformers 4.42.0.dev0",
    _MISTRAL
    | {"rope_theta": 1000000.0, "sliding_window": None, "transformers_version": "4.42.0.dev0"},
  ),
  "qwen3.5-0.8b": Published("Qwen/Qwen3.5-0.8B", _QWEN3_5),
  "recurrentgemma-2b": Published(
    "google/recurrentgemma-2b, with the fields of RecurrentGemmaConfig of transformers 4.41.2",
    _GEMMA
    | {
      "_block_types": ["recurrent", "recurrent", "attention"],
      "embeddings_scale_by_sqrt_dim": True,
      "final_w_init_variance_scale": 0.4,
      "transformers_version": "4.41.2",
    },
  ),
  "recurrentgemma-4.49": Published(
    "google/recurrentgemma-2b opened and saved by transformers 4.49.0",
    _GEMMA
    | {
      "_block_types": ["recurrent", "recurrent", "attention"],
      "block_types": ["recurrent", "recurrent", "attention"],
      "embeddings_scale_by_sqrt_dim": True,
      "final_w_init_variance_scale": 0.4,
      "transformers_version": "4.49.0",
    },
  ),
  "rwkv-4-pile": Published(
    "RwkvConfig of transformers 4.30.2, as of the RWKV-4 models of the Pile",
    {
      "architectures": ["RwkvForCausalLM"],
      "attention_hidden_size": 8,
      "bos_token_id": 0,
      "context_length": 1024,
      "eos_token_id": 0,
      "hidden_size": 8,
      "intermediate_size": 32,
      "layer_norm_epsilon": 1e-05,
      "model_type": "rwkv",
      "num_hidden_layers": 2,
      "rescale_every": 6,
      "tie_word_embeddings": False,
      "torch_dtype": "float32",
      "transformers_version": "4.30.2",
      "use_cache": True,
      "vocab_size": 16,
    },
  ),
}
