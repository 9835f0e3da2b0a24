"""Settings as published models have them, in their full sizes: the parameters that they give."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lnssm_jax.models import count_parameters
from lnssm_jax.models.settings import abstract_params
from lnssm_jax.pretrained import ExportError, hugging_face
from lnssm_jax.pretrained.families import family_of

ROOT = Path(__file__).parents[2]

QWEN3_NEXT = {"decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256}
QWEN3_NEXT |= {"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120}
QWEN3_NEXT |= {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16}
QWEN3_NEXT |= {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "mlp_only_layers": []}
QWEN3_NEXT |= {"max_position_embeddings": 262144, "model_type": "qwen3_next"}
QWEN3_NEXT |= {"moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16}
QWEN3_NEXT |= {"num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48}
QWEN3_NEXT |= {"num_key_value_heads": 2, "output_router_logits": False, "rms_norm_eps": 1e-06}
QWEN3_NEXT |= {"partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000}
QWEN3_NEXT |= {"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512}
QWEN3_NEXT |= {"tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936}

LFM2 = {"conv_L_cache": 3, "conv_bias": False, "hidden_size": 2048, "intermediate_size": 7168}
LFM2 |= {"max_position_embeddings": 128000, "model_type": "lfm2_moe", "norm_eps": 1e-05}
LFM2 |= {
  "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]
}
LFM2 |= {"moe_intermediate_size": 1792, "norm_topk_prob": True, "num_attention_heads": 32}
LFM2 |= {
  "num_dense_layers": 2,
  "num_experts": 32,
  "num_experts_per_tok": 4,
  "rope_theta": 1000000.0,
}
LFM2 |= {"num_hidden_layers": 24, "num_key_value_heads": 8, "routed_scaling_factor": 1.0}
LFM2 |= {"use_cache": True, "use_expert_bias": True, "vocab_size": 65536}

JAMBA = {"attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8}
JAMBA |= {"calc_logits_for_entire_prompt": False, "expert_layer_offset": 1, "hidden_act": "silu"}
JAMBA |= {"expert_layer_period": 2, "hidden_size": 4096, "intermediate_size": 14336}
JAMBA |= {"mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256}
JAMBA |= {"mamba_expand": 2, "mamba_inner_layernorms": True, "mamba_proj_bias": False}
JAMBA |= {"model_type": "jamba", "n_ctx": 262144, "num_attention_heads": 32, "num_experts": 16}
JAMBA |= {"num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8}
JAMBA |= {"output_router_logits": False, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001}
JAMBA |= {"sliding_window": None, "tie_word_embeddings": False, "use_mamba_kernels": True}
JAMBA |= {"vocab_size": 65536}

NEMOTRON = {"attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2}
NEMOTRON |= {"head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "n_groups": 8}
NEMOTRON |= {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}
NEMOTRON |= {"layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_num_heads": 64}
NEMOTRON |= {"max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2"}
NEMOTRON |= {"model_type": "nemotron_h", "moe_intermediate_size": 1856, "n_group": 1}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128}
NEMOTRON |= {"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32}
NEMOTRON |= {"num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2}
NEMOTRON |= {"routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": False}
NEMOTRON |= {"time_step_limit": [0.0, float("inf")], "topk_group": 1, "use_bias": False}
NEMOTRON |= {"use_conv_bias": True, "vocab_size": 131072}

KIMI = {"first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304}
KIMI |= {"intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True}
FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI["linear_attn_config"] = {
  "full_attn_layers": FULL,
  "head_dim": 128,
  "kda_layers": [i for i in range(1, 28) if i not in FULL],
  "num_heads": 32,
  "short_conv_kernel_size": 4,
}
KIMI |= {"model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024}
KIMI |= {"moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}
KIMI |= {"num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256}
KIMI |= {"num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32}
KIMI |= {"num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": None}
KIMI |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05}
KIMI |= {"rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446}
KIMI |= {"tie_word_embeddings": False, "topk_group": 1, "use_grouped_topk": True}
KIMI |= {"v_head_dim": 128, "vocab_size": 163840}

# The defaults of the class of transformers: Ling-3.0-flash; the bounds are those of its file.
LING = {"first_k_dense_replace": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560}
LING |= {"intermediate_size": 6144, "kda_lower_bound": -5.0, "kda_safe_gate": True}
LING |= {"kv_lora_rank": 512, "layer_group_size": 6, "max_position_embeddings": 262144}
LING |= {"model_type": "bailing_hybrid", "moe_intermediate_size": 768, "n_group": 8}
LING |= {"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32}
LING |= {"num_experts": 512, "num_experts_per_tok": 8, "num_hidden_layers": 42}
LING |= {"num_key_value_heads": 32, "num_nextn_predict_layers": 1, "qk_nope_head_dim": 128}
LING |= {"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 6000000.0}
LING |= {"routed_scaling_factor": 2.5, "short_conv_kernel_size": 4, "topk_group": 4}
LING |= {"v_head_dim": 128, "vocab_size": 157184}
LING["expert_swiglu_limit_list"] = [0] * 35 + [4] * 7
LING["share_expert_swiglu_limit_list"] = [0] * 34 + [5] * 6 + [7] * 2

BAMBA = {"attn_layer_indices": [9, 18, 27], "hidden_size": 4096, "intermediate_size": 14336}
BAMBA |= {"mamba_d_state": 128, "mamba_n_heads": 128, "model_type": "bamba", "vocab_size": 128256}
BAMBA |= {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}

FALCON_H1 = {"head_dim": 64, "hidden_size": 512, "intermediate_size": 768, "mamba_conv_bias": True}
FALCON_H1 |= {"mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_ssm": 768, "mamba_d_state": 64}
FALCON_H1 |= {"mamba_n_groups": 1, "mamba_n_heads": 24, "model_type": "falcon_h1"}
FALCON_H1 |= {"num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2}
FALCON_H1 |= {"tie_word_embeddings": True, "vocab_size": 32768}
LARGER = {"hidden_size": 1024, "intermediate_size": 2048, "mamba_d_head": 64, "mamba_d_ssm": 1536}
LARGER |= {"mamba_d_state": 128, "num_hidden_layers": 36, "tie_word_embeddings": False}
LARGER |= {"vocab_size": 32784}

ZAMBA2 = {"mamba_d_state": 64, "mamba_ngroups": 1, "model_type": "zamba2", "num_mem_blocks": 2}
HYBRID = [6, 12, 18, 24, 30, 36, 42, 47, 51]
OF_2_7B = {"hidden_size": 2560, "n_mamba_heads": 80, "num_hidden_layers": 54}
OF_2_7B["layers_block_type"] = ["hybrid" if i in HYBRID else "mamba" for i in range(54)]
OF_1_2B = {"hidden_size": 2048, "mamba_d_state": 128, "n_mamba_heads": 64, "num_hidden_layers": 38}
OF_1_2B |= {"num_mem_blocks": 1, "use_mem_rope": True, "use_shared_attention_adapter": True}
OF_1_2B["layers_block_type"] = ["mamba" if (i + 1) % 6 else "hybrid" for i in range(38)]
OF_7B = {"hidden_size": 3584, "mamba_ngroups": 2, "n_mamba_heads": 112, "num_hidden_layers": 81}
OF_7B |= {"use_mem_rope": True}
OF_7B["layers_block_type"] = [
  "hybrid" if i == 6 or (i > 6 and i % 6 == 5) else "mamba" for i in range(81)
]

RWKV = {"hidden_size": 768, "model_type": "rwkv", "num_hidden_layers": 12, "vocab_size": 50277}

# {model: (its settings, its parameters / 1e9 without heads of further tokens)}
SIZES = {
  "Qwen3-Next-80B-A3B": (QWEN3_NEXT, "79.7"),
  "LFM2-8B-A1B": (LFM2, "8.3"),
  "Jamba-v0.1": (JAMBA, "51.6"),
  "Nemotron-3-Nano-30B-A3B": (NEMOTRON, "31.6"),
  "Kimi-Linear-48B-A3B": (KIMI, "49.1"),
  "Ling-3.0-flash": (LING, "124.4"),
  "Bamba-9B": (BAMBA, "9.78"),
  "Falcon-H1-Tiny-90M": (FALCON_H1, "0.091"),
  "Falcon-H1-0.5B": (FALCON_H1 | LARGER, "0.521"),
  "Zamba2-1.2B": (ZAMBA2 | OF_1_2B, "1.215"),
  "Zamba2-2.7B": (ZAMBA2 | OF_2_7B, "2.662"),
  "Zamba2-7B": (ZAMBA2 | OF_7B, "7.36"),
  "rwkv-4-169m-pile": (RWKV, "0.169"),
  "rwkv-4-430m-pile": (RWKV | {"hidden_size": 1024, "num_hidden_layers": 24}, "0.430"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_published_settings_have_the_parameters_of_their_model(name):
  config, billions = SIZES[name]
  settings = family_of(config).settings(config)
  digits = len(billions.partition(".")[2])
  assert f"{count_parameters(abstract_params(settings)) / 1e9:.{digits}f}" == billions


def test_published_settings_are_those_of_tables_written_again():
  """Also of what several settings say together: patterns, periods, counts of dense layers."""
  for name, (config, _) in SIZES.items():
    family = family_of(config)
    settings = family.settings(config)
    again = family.config(settings)
    assert family_of(again) is family and family.settings(again) == settings, name
    assert hugging_face.exportable(settings)["hf"] == family.name, name
  assert family_of(JAMBA | {"num_experts": 1}).settings(JAMBA | {"num_experts": 1})["mixer"] == (
    ["mamba"] * 4 + ["softmax_attention"] + ["mamba"] * 3
  )


@pytest.mark.parametrize(
  ("config", "change", "message"),
  [
    (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset=8 must be below attn_layer_period=8"),
    (
      JAMBA,
      {"expert_layer_period": 1, "expert_layer_offset": 0},
      "all 32 layers have one of channel",
    ),
    (JAMBA, {"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False is not implemented"),
    (JAMBA, {"num_hidden_layers": 3}, "all 3 layers have one of mixers, mamba; only models with t"),
    (LFM2, {"num_dense_layers": 25}, "num_dense_layers=25 must be at most num_hidden_layers=24"),
    (LFM2, {"num_dense_layers": 0}, "all 24 layers have one of channel mixers, moe"),
    (
      NEMOTRON,
      {"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4},
      "either mlp or moe; it",
    ),
    (LING, {"expert_swiglu_limit_list": [4]}, "limit_list has 1 numbers, but num_hidden_layers=42"),
    (LING, {"share_expert_swiglu_limit_list": 4}, "limit_list=4 must be a list of numbers, 0 or"),
    (QWEN3_NEXT, {"decoder_sparse_step": 0}, "decoder_sparse_step=0: layers with experts next"),
    (LING, {"rotary_dim": 128}, "rotary_dim=128 is not qk_rope_head_dim = 64"),
    (KIMI, {"quantization_config": {"bits": 4}}, "quantized models are not implemented; load the"),
    (
      KIMI,
      {"linear_attn_config": {"kda_layers": [1]}},
      r"kda_layers=\[1\] are not the layers without",
    ),
    (
      LING,
      {"rope_scaling": {"type": "linear", "factor": 2.0}},
      "rope_scaling={.*is not implemented",
    ),
    (ZAMBA2 | OF_2_7B, {"use_long_context": True}, "use_long_context=True is not implemented"),
    (ZAMBA2 | OF_2_7B, {"hybrid_layer_ids": HYBRID[1:]}, "hybrid_layer_ids=.* is not the layers"),
    (ZAMBA2 | OF_2_7B, {"num_mem_blocks": 10}, "num_mem_blocks=10 is more than the 9 layers that"),
    (NEMOTRON, {"mlp_bias": True}, "mlp_bias=True is not implemented"),
  ],
)
def test_settings_that_are_not_implemented_are_named(config, change, message):
  with pytest.raises(ExportError, match=message):
    family_of(config | change).settings(config | change)


PLAN = """
from train.config import Data, Mesh, Optimizer, Sample, Train, published_model


def get_config():
  return Train(
    model=published_model("Kimi-Linear-48B-A3B", max_length=4096, dtype="bfloat16", remat="full"),
    optimizer=Optimizer(peak_lr=1e-5, final_lr=1e-6, schedule="cosine"),
    data=Data(folder="data/text", tokenizer="bytes", train=("train",)),
    mesh=Mesh(data=1, fsdp=8, expert=8),
    run_dir="runs/kimi",
    seq_len=4096,
    global_batch=64,
    steps=100,
    eval_every=100,
    checkpoint_every=100,
    sample=Sample(tokens=0),
  )
"""


@pytest.mark.slow
def test_dry_run_of_kimi_linear_on_64_devices_prints_their_state_before_it_compiles(tmp_path):
  """The command of docs/sharding.md, in a process with as many devices, up to its compiler."""
  folder = tmp_path / "Kimi-Linear-48B-A3B"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(KIMI))
  (tmp_path / "kimi.py").write_text(PLAN)
  flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=64", "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-u", "-m", "train", "fit", "--config", "kimi.py", "--dry-run"]
  command += ["--set", "compile_cache=None"]
  environment = os.environ | flags | {"PYTHONPATH": str(ROOT)}
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
  with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) as process:
    lines = []
    for line in process.stdout:
      lines.append(line)
      if line.startswith("state"):
        break
    process.kill()
  output = "".join(lines)
  assert "49,122,681,728 parameters, of which a token uses 3,484,459,904" in output
  assert "exportable  by --layout hf (kimi_linear)" in output
  # Parameters and two moments in float32; `fsdp` shards all, `expert` the experts of 26 layers.
  experts = 26 * KIMI["num_experts"] * 3 * KIMI["hidden_size"] * KIMI["moe_intermediate_size"]
  want = 12 * (experts / 64 + (49_122_681_728 - experts) / 8) / 2**30
  found = re.search(r"state +([0-9.]+) GiB per device", output)
  assert found and abs(float(found[1]) - want) < 0.02
