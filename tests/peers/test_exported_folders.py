"""Folders that `lnssm_jax.pretrained.save` writes, opened by the projects that they are for.

`make test-peers` makes the environment of the other side; without it these tests are skipped.
"""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models import LanguageModel
from lnssm_jax.models.settings import params_of
from lnssm_jax.pretrained import hugging_face

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PEERS", ROOT / ".venv-peers")) / "bin" / "python"
TOKENS = np.array([[1, 7, 3, 3, 10, 0, 5], [1, 7, 2, 9, 4, 8, 6]])

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not PYTHON.exists(), reason="make test-peers makes its environment"),
]

SIZES = {"vocab_size": 11, "dim": 8, "num_layers": 2}
GATED = {"channel_mixer": "swiglu", "channel_hidden": 12, "norm": "rms", "embedding_norm": False}
FLA = SIZES | GATED | {"num_heads": 2, "norm_eps": 1e-6}
EPS = {"norm_eps": 1e-6}
SCALED = {"rule": "llama3", "factor": 4.0, "low_frequency_factor": 1.0}
SCALED |= {"high_frequency_factor": 2.0, "original_length": 8}
YARN = {"rule": "yarn", "factor": 4.0, "slow_turns": 0.5, "fast_turns": 2.0, "magnitude": 1.2}
YARN |= {"original_length": 16, "whole_pairs": False}
WIDE = {"head_dim": 6, "value_head_dim": 6}
NEXT = {
  "gated_delta_net": {"head_dim": 4, "expand_v": 0.75, "num_value_heads": 4, "norm_eps": 1e-5},
  "softmax_attention": WIDE | {"qk_norm": "rms_from_zero", "use_gate": True, "rotary_width": 2},
}
NEXT["softmax_attention"]["norm_eps"] = 1e-5
BAMBA = {"mamba2": {"head_dim": 4, "num_groups": 2, "state_dim": 3}}
BAMBA |= {"softmax_attention": {"rotary_width": 2, "num_kv_heads": 1}}
# transformers clips steps from below, whatever the config says.
CLIPPED = {"head_dim": 4, "num_groups": 2, "state_dim": 3, "min_step": 0.001}
SHARED = {"mixers": {"mamba2": CLIPPED}, "num_blocks": 2, "rank": 3, "norm_eps": 0.1}
MODELS = {
  "llama": ("hf", SIZES | GATED | {"mixer": "softmax_attention", "num_heads": 2}),
  "llama_scaled": (
    "hf",
    SIZES
    | GATED
    | {"mixer": "softmax_attention", "num_heads": 2}
    | {"mixer_options": WIDE | {"rotary_base": 50.0, "rotary_scaling": SCALED}},
  ),
  "llama_yarn": (
    "hf",
    SIZES
    | GATED
    | {"mixer": "softmax_attention", "num_heads": 2}
    | {"mixer_options": WIDE | {"rotary_base": 50.0, "rotary_scaling": YARN}},
  ),
  "qwen2": (
    "hf",
    SIZES
    | GATED
    | {"mixer": "softmax_attention", "num_heads": 2}
    | {"mixer_options": {"use_bias": "qkv", "num_kv_heads": 1}},
  ),
  "qwen3": (
    "hf",
    SIZES
    | GATED
    | {"mixer": "softmax_attention", "num_heads": 2, "norm_eps": 1e-6}
    | {"mixer_options": WIDE | {"qk_norm": True, "window": 3}},
  ),
  "mistral": (
    "hf",
    SIZES | GATED | {"mixer": "softmax_attention", "num_heads": 2, "mixer_options": {"window": 3}},
  ),
  "bamba": (
    "hf",
    SIZES
    | GATED
    | {"num_layers": 3, "num_heads": 2, "mixer_options": BAMBA, "mixer": tuple(BAMBA)},
  ),
  "zamba2": (
    "hf",
    SIZES
    | {"num_layers": 3, "num_heads": 2, "mixer": ("mamba2", "after_shared", "after_shared")}
    | {"mixer_options": {"mamba2": CLIPPED, "after_shared": SHARED}}
    | {"channel_mixer": "none", "norm": "rms", "norm_eps": 0.1}  # few roundings are amplified
    | {"embedding_norm": False, "tie_embeddings": True},
  ),
  "qwen3_5_text": (
    "hf",
    SIZES
    | GATED
    | {"num_layers": 3, "num_heads": 2, "mixer_options": NEXT, "mixer": tuple(NEXT)}
    | {"norm": "rms_from_zero"},
  ),
  "mamba": ("hf", SIZES | {"mixer": "mamba", "channel_mixer": "none", "norm": "rms"}),
  "mamba2": (
    "hf",
    SIZES
    | {"mixer": "mamba2", "mixer_options": {"head_dim": 4, "num_groups": 2, "state_dim": 3}}
    | {"channel_mixer": "none", "norm": "rms"},
  ),
  "rwkv4": ("hf", SIZES | {"mixer": "rwkv4", "channel_mixer": "rwkv4_channel_mix"}),
  "transformer": ("fla", FLA | {"mixer": "softmax_attention", "norm_eps": 1e-6}),
  "gla": ("fla", FLA | {"mixer": "gla", "mixer_options": EPS}),
  "retnet": ("fla", FLA | {"mixer": "retnet", "mixer_options": EPS}),
  "delta_net": ("fla", FLA | {"mixer": "delta_net", "mixer_options": EPS}),
  "gated_delta_net": ("fla", FLA | {"mixer": "gated_delta_net", "mixer_options": EPS}),
  "gsa": ("fla", FLA | {"mixer": "gsa", "mixer_options": {"num_slots": 3}}),
  "hgrn2": (
    "fla",
    FLA | {"mixer": "hgrn2", "mixer_options": {"variant": "fla", "lower_bound": "shared"}},
  ),
}
ATTENTION = {"num_heads": 2, "num_kv_heads": 1, "use_bias": "qkv", "max_length": 16}
MODELS["gla_attention"] = (
  "fla",
  FLA
  | {"mixer": ("gla", "softmax_attention"), "num_heads": 4}
  | {"mixer_options": {"gla": EPS, "softmax_attention": ATTENTION}},
)
MODELS["mamba"][1]["embedding_norm"] = MODELS["mamba2"][1]["embedding_norm"] = False


@pytest.mark.parametrize("name", MODELS)
def test_exported_folder_has_the_same_logits_in_its_own_project(name, tmp_path):
  layout, settings = MODELS[name]
  settings = {"num_heads": None, "mixer_options": {}, "channel_mixer_options": {}} | settings
  model = jax.jit(lambda: LanguageModel(**settings, rngs=nnx.Rngs(0)))()
  draw = lambda x, key: x + 0.3 * jax.random.normal(jax.random.key(key), x.shape)
  leaves, structure = jax.tree.flatten(model)
  model = jax.tree.unflatten(structure, [draw(x, n) for n, x in enumerate(leaves)])
  hugging_face.save(tmp_path / "folder", params_of(model), settings, layout=layout)
  out = tmp_path / "logits.npy"
  command = [PYTHON, "-m", "tests.peers.open_folder", tmp_path / "folder", out, layout]
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr[-2000:]
  theirs = np.load(out)
  with jax.enable_x64(True):
    wide = hugging_face.load(tmp_path / "folder", dtype="float64", param_dtype="float64").model
    ours = jax.jit(lambda model: model(TOKENS)[0])(wide)
  assert np.abs(ours - theirs).max() < 2e-5 * np.abs(theirs).max()
