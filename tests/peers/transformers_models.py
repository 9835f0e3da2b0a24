"""Tiny models of transformers, and how each decodes."""

import transformers

from tests.peers.record_models import cached_steps, rwkv_steps

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 11}


def cases():
  heads = {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16}
  llama = lambda **options: transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**SIZES, **heads, attn_implementation="eager", **options)
  )
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
  return {
    "llama": (llama(num_key_value_heads=1, rope_theta=500.0), cached_steps),
    "llama_biases": (
      llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
      cached_steps,
    ),
    "mamba": (mamba(), cached_steps),
    "mamba_biases": (
      mamba(use_bias=True, use_conv_bias=False, tie_word_embeddings=False, time_step_rank=2),
      cached_steps,
    ),
    "falcon_mamba": (transformers.FalconMambaForCausalLM(falcon), cached_steps),
    "mamba2": (mamba2(n_groups=1, tie_word_embeddings=True), cached_steps),
    "mamba2_groups": (mamba2(n_groups=2), cached_steps),
    "rwkv": (transformers.RwkvForCausalLM(rwkv), rwkv_steps),
    "recurrent_gemma": (transformers.RecurrentGemmaForCausalLM(gemma), None),
  }
