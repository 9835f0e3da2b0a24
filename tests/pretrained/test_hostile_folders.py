"""Folders made to mislead: one line says what is wrong, and no memory is taken for it."""

import ast
import json
import re
import shlex
import subprocess
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from lnssm_jax.pretrained import DataError, ExportError, chat, folders, hugging_face, safetensors
from lnssm_jax.pretrained.families import family_of
from tests.pretrained.published import CASES, recorded, write

MOST = 30_000_000  # bytes, of Python and NumPy


def message(folder) -> str:
  """The error of a folder: one line, and for little memory."""
  tracemalloc.start()
  try:
    with pytest.raises(ExportError) as error:
      hugging_face.load(folder)
    assert tracemalloc.get_traced_memory()[1] < MOST
  finally:
    tracemalloc.stop()
  text = str(error.value)
  assert "\n" not in text
  assert len(text) < 600
  return text


CONFIGS = [
  ("llama", {"num_hidden_layers": 100_000}, "100000 layers, but there are 21 tensors"),
  ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
  ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1 must be at least 1"),
  ("llama", {"num_hidden_layers": "two"}, "num_hidden_layers='two' must be int"),
  ("llama", {"num_hidden_layers": True}, "num_hidden_layers=True must be int"),
  ("llama", {"num_hidden_layers": 1}, "the tensors are not those of config.json"),
  ("llama", {"num_hidden_layers": ...}, "num_hidden_layers is missing"),
  ("llama", {"vocab_size": 10**12}, "the two do not belong together"),
  ("llama", {"intermediate_size": 10**12}, "channel_hidden=1000000000000 is more than"),
  ("llama", {"intermediate_size": 13}, r"mlp.down_proj.weight: found \(8, 12\), the model needs"),
  ("llama", {"intermediate_size": 2**70}, "must be at least 1 and below 2"),
  ("llama", {"num_key_value_heads": 2}, r"k_proj.weight: found \(4, 8\), the model needs \(8, 8\)"),
  ("llama", {"num_attention_heads": 3, "head_dim": ...}, "=8 is not a multiple of num_attention_"),
  ("llama", {"head_dim": 8}, r"self_attn.q_proj.weight: found \(8, 8\), the model needs \(16, 8\)"),
  ("llama", {"head_dim": -4}, "head_dim=-4 must be at least 1"),
  ("llama", {"hidden_act": "relu"}, "hidden_act='relu' is not implemented; only 'silu'"),
  ("llama", {"hidden_act": ["silu"]}, "hidden_act=.'silu'. is not implemented"),
  ("llama", {"rope_scaling": {"factor": 8.0}}, "rope_parameters and rope_scaling are two"),
  ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "='longrope' is not implemented"),
  ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor='4' of the ru"),
  ("llama_dynamic", {"rope_parameters": {"rope_type": "dynamic"}}, "must have exactly 'rule', 'fa"),
  (
    "llama",
    {"rope_parameters": {"rope_type": "llama3"}},
    "rope_parameters: scaling=.* must have ex",
  ),
  (
    "llama_linear",
    {"rope_parameters": {"type": "linear", "factor": "4"}},
    "factor='4' must be a p",
  ),
  (
    "llama_linear",
    {"rope_parameters": {"factor": 2.0}},
    "rope_parameters.factor=2.0 is not a know",
  ),
  ("llama", {"rope_parameters": 3}, "rope_parameters=3 is not an object"),
  ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be float"),
  ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be"),
  ("llama", {"attention_bias": True}, "q_proj.bias: found nothing, the model needs"),
  (
    "llama",
    {"quantization_config": {"bits": 4}},
    "quantization_config={'bits': 4}: quantized models are not",
  ),
  ("llama", {"model_type": "gpt_neox"}, "model_type='gpt_neox' is not implemented; the families"),
  ("llama", {"model_type": ["llama"]}, "model_type=.'llama'. is not implemented"),
  ("mamba", {"time_step_rank": 10**9}, "gate_rank=1000000000 is more than"),
  ("mamba", {"intermediate_size": 17}, "intermediate_size=17 must be a multiple of hidden_size=8"),
  ("mamba2_groups", {"time_step_limit": [2, 1.0]}, r"time_step_limit=\[2, 1.0\] is no range"),
  ("mamba2_groups", {"time_step_limit": [0.1]}, r"time_step_limit=\[0.1\] must be two numbers"),
  ("mamba2_groups", {"num_heads": 3}, "num_heads=3 times head_dim=4 is not expand hidden_size"),
  ("rwkv", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06 is not implemented"),
  ("rwkv", {"attention_hidden_size": 16}, "attention_hidden_size=16 is not hidden_size = 8"),
  ("recurrent_gemma", {"block_types": ["recurrent"] * 9}, "at least the 9 block_types"),
  ("recurrent_gemma", {"block_types": [[]]}, "block_types=.* must be a list of recurrent, atten"),
  ("recurrent_gemma", {"intermediate_size": 25}, "intermediate_size=25 must be even"),
  ("recurrent_gemma", {"head_dim": 8}, "head_dim=8 is not implemented"),
  ("bamba", {"attn_layer_indices": [99]}, "attn_layer_indices=.99. must be a list"),
  ("bamba", {"attn_layer_indices": []}, "layer_types=.* must be full_attention and linear"),
  ("bamba", {"attn_layer_indices": [1]}, "the tensors are not those of config.json"),
  ("bamba", {"mamba_n_heads": 3}, "mamba_n_heads=3 mamba_d_head=4 is not mamba_expand hidden_size"),
  ("bamba", {"time_step_limit": "all"}, "time_step_limit='all' must be two numbers"),
  ("bamba", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 10,000"),
  ("qwen3_next", {"num_experts": 4}, "experts_per_token=10 is more than num_experts=4"),
  ("qwen3_next", {"linear_num_key_heads": 4}, "in_proj_qkvz.weight: found"),
  (
    "qwen3_next",
    {"layer_types": ["linear_attention"] * 5},
    "layer_types=.* must be full_attention and linear",
  ),
  ("fla_gla", {"attn": {"layers": [1], "num_heads": 2}}, "attn.o_proj.weight: found|attn.g_proj"),
  ("fla_gla", {"attn": 3}, "attn=3 is not implemented; only one object"),
  ("fla_gla", {"attn": {"layers": [2], "num_heads": 2}}, "attn.layers=.2. must be a list, of num"),
  (
    "fla_gla",
    {"attn": {"layers": [0, 1], "num_heads": 2}},
    "must be some of the layers, each once",
  ),
  ("fla_gla", {"attn": {"layers": [1]}}, "num_heads is missing"),
  (
    "fla_gla",
    {"attn": {"layers": [1], "num_heads": 2, "qk_norm": True}},
    "attn.qk_norm=True is not",
  ),
  ("fla_hgrn2", {"attn": {"layers": [1], "num_heads": 2}}, "use_lower_bound=True is not implemen"),
  ("fla_transformer", {"attn": {"layers": [1], "num_heads": 2}}, "attn="),
  ("fla_gla", {"fuse_norm": False}, "fuse_norm=False is not implemented; only True"),
  ("fla_gla", {"hidden_ratio": 10**9, "intermediate_size": None}, "hidden_ratio=1000000000 must"),
  ("fla_hgrn2", {"expand_ratio": 3}, "expand_ratio=3 is not hidden_size / num_heads"),
  ("fla_rwkv6", {"norm_first": False}, "norm_first=False is not implemented"),
]


@pytest.mark.parametrize(("case", "config", "expected"), CONFIGS)
def test_config_that_is_wrong_or_not_implemented_raises(case, config, expected, tmp_path):
  folder = write(tmp_path, case, config=config, dtype=np.float32)
  assert re.search(expected, message(folder)), message(folder)


@pytest.mark.parametrize("case", CASES)
def test_every_setting_of_a_recorded_config_is_checked(case, tmp_path):
  """Whatever a setting is, another kind of value is an error, or it is declared to be free."""
  config = folders.plain(recorded(case).config)
  family = family_of(config)
  for name in config:
    try:
      settings = family.settings(config | {name: {"a": 1}})
    except ExportError as error:
      assert name in str(error)
      continue
    assert settings == family.settings(config), name
  with pytest.raises(ExportError, match="another_setting=1 is not a known setting"):
    family.settings(config | {"another_setting": 1})


def test_tensor_that_is_missing_or_not_used_raises(tmp_path):
  name = "model.layers.1.mlp.up_proj.weight"
  text = message(write(tmp_path, "llama", tensors={name: ...}, dtype="f4"))
  assert f"{name}: found nothing, the model needs (12, 8)" in text
  text = message(
    write(tmp_path, "llama", tensors={"model.layers.0.adapter": np.zeros(3)}, dtype="f4")
  )
  assert "model.layers.0.adapter: found (3,), the model needs nothing" in text
  buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2)}
  hugging_face.load(write(tmp_path, "llama", tensors=buffer, dtype="f4"))  # follows from the config


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickle_is_not_read_and_the_error_says_how_to_convert_it(name, tmp_path):
  folder = write(tmp_path, "llama")
  (folder / "model.safetensors").rename(folder / name)
  text = message(folder)
  assert f"{name} is a pickle" in text
  assert f'torch.load("{name}", weights_only=True)' in text


HOSTILE_NAMES = ["$(touch x).bin", "a'b.pt", 'a"b`id`.bin', "a;b .pth", "\\$HOME.bin"]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_command_to_convert_a_pickle_is_quoted_for_the_shell(name, tmp_path):
  folder = write(tmp_path, "llama")
  (folder / "model.safetensors").rename(folder / name)
  command = message(folder).split("in its folder: ")[1]
  python, option, program = shlex.split(command)
  assert (python, option) == ("python", "-c")
  constants = [x.value for x in ast.walk(ast.parse(program)) if isinstance(x, ast.Constant)]
  assert name in constants
  command = command.replace("python -c", "printf %s", 1)
  options = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
  assert subprocess.run(["sh", "-c", command], **options).stdout == program
  assert not (tmp_path / "x").exists()


def test_one_file_is_read_before_an_index(tmp_path):
  """As transformers does; shards next to it may be of another model."""
  folder = write(tmp_path, "llama", dtype=np.float32)
  (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
  hugging_face.load(folder)
  (folder / "model.safetensors").unlink()
  assert "gone.safetensors cannot be read" in message(folder)


def shards(folder, index):
  (write(folder, "llama") / "model.safetensors").rename(folder / "model-1.safetensors")
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return folder


ELSEWHERE = ("../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "x\0.safetensors", "")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_index_that_points_elsewhere_raises(name, tmp_path):
  assert "is no file of this folder" in message(shards(tmp_path, {"weight_map": {"a": name}}))


def test_index_that_does_not_describe_its_files_raises(tmp_path):
  index = {"weight_map": {"a": "model-1.safetensors"}}
  assert "disagree about the tensor a" in message(shards(tmp_path, index))
  index = {"weight_map": {"a": "gone.safetensors"}}
  assert "gone.safetensors cannot be read" in message(shards(tmp_path, index))
  assert "has no weight_map" in message(shards(tmp_path, {"weight_map": {"a": 3}}))
  many = {f"t{n}": f"s{n}.safetensors" for n in range(20_000)}
  assert "names 20,000 files" in message(shards(tmp_path, {"weight_map": many}))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_link_is_not_followed(name, tmp_path):
  folder = write(tmp_path / "folder", "llama", dtype="f4")
  outside = tmp_path / "outside"
  outside.write_text("{}")
  if (folder / name).exists():
    (folder / name).rename(outside)
  (folder / name).symlink_to(outside)
  assert f"{name} is a link; links are not followed" in message(folder)


def test_link_to_nothing_is_not_as_if_there_were_no_file(tmp_path):
  """As in a cache that has lost files: greedy models would sample."""
  folder = write(tmp_path / "folder", "llama", dtype="f4")
  (folder / "generation_config.json").symlink_to(tmp_path / "gone")
  assert "generation_config.json is a link; links are not followed" in message(folder)
  (folder / "chat_template.jinja").symlink_to(tmp_path / "gone")
  with pytest.raises(DataError, match="jinja cannot be read"):
    chat._source(folder, {"chat_template": "{{ messages }}"})


def test_folder_without_a_model_raises(tmp_path):
  assert "there is no folder" in message(tmp_path / "gone")
  assert "has no config.json" in message(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  assert "has no model.safetensors" in message(tmp_path)
  write(tmp_path, "llama")
  for text in ("[" * 100_000, "[]", "{", '{"a": 1, "a": 2}', ""):
    (tmp_path / "config.json").write_text(text)
    assert "config.json cannot be read" in message(tmp_path)


def test_fuzzed_header_raises_or_gives_the_tensors(tmp_path):
  """One byte of the header at a time becomes another."""
  folder = write(tmp_path, "mamba", dtype=np.float32)
  path = folder / "model.safetensors"
  content = path.read_bytes()
  length = 8 + int.from_bytes(content[:8], "little")
  words = np.random.default_rng(0).integers(0, [[length], [256]], (2, 60)).T
  for place, byte in words.tolist():
    path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
    try:
      hugging_face.load(folder)
    except ExportError as error:
      assert "\n" not in str(error)


def header(path, change):
  content = path.read_bytes()
  length = int.from_bytes(content[:8], "little")
  values = json.loads(content[8 : 8 + length])
  change(values)
  text = json.dumps(values).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


NAME, OTHER = "backbone.norm_f.weight", "backbone.layers.0.norm.weight"
HEADERS = {
  "overlapping": lambda v: v[NAME].update(data_offsets=v[OTHER]["data_offsets"]),
  "overflowing": lambda v: v[NAME].update(shape=[2**40, 2**40]),
  "wrapping": lambda v: v[NAME].update(shape=[2**32, 2**32, 8]),
  "negative": lambda v: v[NAME].update(shape=[-8]),
  "backwards": lambda v: v[NAME].update(data_offsets=v[NAME]["data_offsets"][::-1]),
  "beyond": lambda v: v[NAME].update(data_offsets=[10**9, 10**9 + 32]),
  "nameless": lambda v: v[NAME].update(dtype="F8_E4M3"),
}


@pytest.mark.parametrize("change", HEADERS)
def test_header_that_lies_raises(change, tmp_path):
  folder = write(tmp_path, "mamba", dtype=np.float32)
  header(folder / "model.safetensors", HEADERS[change])
  assert "model.safetensors" in message(folder)


def test_quantized_or_float64_tensors_raise(tmp_path):
  norm = {"model.norm.weight": np.zeros(8)}
  folder = write(tmp_path, "llama", tensors=norm, dtype="i1")
  assert "has dtype int8; quantized models are not implemented" in message(folder)
  assert "jax_enable_x64 only; or give param_dtype" in message(write(tmp_path, "llama"))


@pytest.mark.parametrize("text", ['"all"', "-0.5", "1e300", "true", "NaN", "281474976710656"])
def test_generation_settings_that_are_no_numbers_raise(text, tmp_path):
  folder = write(tmp_path, "llama", dtype=np.float32)
  for name in ("top_p", "max_new_tokens"):
    (folder / "generation_config.json").write_text(f'{{"{name}": {text}}}')
    assert re.search(f"{name}=.* is no number for it, which is one of 0 to", message(folder))


LENGTHS = [
  ("llama", "max_position_embeddings"),
  ("fla_transformer", "max_position_embeddings"),
  ("fla_transformer", "window_size"),
  ("fla_gla_attn", "max_position_embeddings"),
  ("bamba", "max_position_embeddings"),
  ("qwen3_next", "max_position_embeddings"),
  ("recurrent_gemma", "attention_window_size"),
]


@pytest.mark.parametrize(("case", "name"), LENGTHS)
def test_length_that_no_memory_holds_raises(case, name, tmp_path):
  """Before a cache of that length is asked for."""
  folder = write(tmp_path, case, config={name: 2**47}, dtype=np.float32)
  found = message(folder)
  assert "=140737488355328 is more than 16,777,216 tokens" in found and "max_length" in found
  if name == "max_position_embeddings":
    length = hugging_face.load(folder, max_length=8).model.max_length
    assert length == (None if "transformer" in case else 8)  # a window needs no more than itself
    with pytest.raises(ExportError, match="more than 16,777,216 tokens"):
      hugging_face.load(folder, max_length=2**40)


def test_length_of_the_original_model_is_bounded_too(tmp_path):
  for length in (2**47, 1e15):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_theta": 9.0, "original_max_position_embeddings": length}
    text = message(write(tmp_path, "llama", config={"rope_parameters": rope}, dtype=np.float32))
    assert "original_length" in text and "is more than 16,777,216 tokens" in text


NUMBERS = (np.nan, np.inf, -np.inf)


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_tensor_with_a_number_that_is_not_finite_is_named(dtype, tmp_path):
  name, said = "model.layers.1.mlp.up_proj.weight", np.dtype(dtype)
  matrix = recorded("llama").tensors[name]
  hugging_face.load(write(tmp_path, "llama", dtype=dtype))
  for number, place in zip(NUMBERS, [(0, 0), (5, 3), (-1, -1)], strict=True):
    changed = matrix.copy()
    changed[place] = number
    text = message(write(tmp_path, "llama", tensors={name: changed}, dtype=dtype))
    assert f"{name} has numbers that are NaN or infinite as {said}; the file is damaged" in text
  embedding = {"model.embed_tokens.weight": np.full((11, 8), np.nan)}
  text = message(write(tmp_path, "llama", tensors=embedding, dtype=dtype))
  assert "model.embed_tokens.weight has numbers that are NaN or infinite" in text


def test_generation_settings_with_ends_that_are_no_tokens_raise(tmp_path):
  folder = write(tmp_path, "llama", dtype=np.float32)
  for ends in ([1, -1], [2**60], ["a"], [True], -1, "a", 1.5, {}):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert "eos_token_id=" in message(folder) and "is no token" in message(folder)


def test_number_beyond_the_dtype_of_parameters_is_named(tmp_path):
  large = {"model.norm.weight": np.full(8, 1e6)}
  folder = write(tmp_path, "llama", tensors=large, dtype=np.float32)
  hugging_face.load(folder, param_dtype="bfloat16")
  with pytest.raises(ExportError, match=r"model\.norm\.weight .* as float16; .*wider param_dtype"):
    hugging_face.load(folder, param_dtype="float16")


def test_numbers_are_finite_up_to_the_largest_of_each_dtype():
  for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
    limits, signs = ml_dtypes.finfo(dtype), np.array([1, -1], dtype)
    kinds = (limits.max, limits.smallest_subnormal, 0)
    assert safetensors.is_finite(np.concatenate([signs * dtype(x) for x in kinds]))
    for bad in (*NUMBERS, -np.nan):
      assert not safetensors.is_finite(np.array([[1, 2], [bad, 3]], dtype))
  assert safetensors.is_finite(np.zeros((0, 3), np.float32))
