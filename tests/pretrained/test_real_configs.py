"""Real config.json files: what they compute, what they leave out, and what contradicts itself."""

import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from lnssm_jax.pretrained import ExportError, exports, folders, hugging_face, safetensors
from lnssm_jax.pretrained.families import FAMILIES, common, family_of, layers
from lnssm_jax.pretrained.families.fields import Field, Fixed, Free, Same
from tests.pretrained.published import GOLDEN, REAL, real, recorded, write_folder

LAYOUTS = {"hf", "fla", "mamba_ssm"}
# Those of families whose logits and bytes other default tests compare.
SLOW = ("nemotron", "jamba", "kimi", "ling", "olmo", "falcon-h1", "granite", "lfm2.5", "qwen3-next")
SLOW += ("zamba2", "qwen2.5-7b-instruct-1m", "rwkv7", "rwkv-4-converted", "bamba-9b-4.57", "flame")
_logits = jax.jit(lambda model, tokens: model(tokens)[0])


@pytest.mark.parametrize(
  "case", [pytest.param(x, marks=[pytest.mark.slow] * x.startswith(SLOW)) for x in REAL]
)
def test_real_config_gives_the_recorded_logits_and_the_same_bytes(case, tmp_path):
  found = real(case)
  arrays = dict(found.tensors)
  with jax.enable_x64(True):
    loaded = hugging_face.load(write_folder(tmp_path / "theirs", found.config, arrays))
    logits = np.asarray(_logits(loaded.model, found.tokens))
  # Logits are float32.
  assert np.abs(logits - found.logits).max() < 1e-6 * np.abs(found.logits).max()
  settings = loaded.settings["model"]
  family = family_of(found.config)
  which = {"layout": found.layout, "model_type": family.name}
  hugging_face.save(tmp_path / "ours", loaded.model, settings, **which)
  ours = safetensors.Tensors(tmp_path / "ours" / folders.TENSORS)
  assert {n: ours[n].tobytes() for n in ours} == {
    n: x.tobytes() for n, x in arrays.items() if not re.fullmatch(family.skipped, n)
  }
  assert not hugging_face.differences(settings, hugging_face.settings_of(tmp_path / "ours"))


def test_real_configs_are_of_six_families_or_more():
  kinds = {family_of(real(case).config).name for case in REAL}
  assert len(REAL) >= 16 and len(kinds) >= 6
  assert {real(case).layout for case in REAL} == LAYOUTS


@pytest.mark.parametrize("case", REAL)
def test_every_setting_of_a_real_config_is_read_or_checked_or_named_as_free(case):
  config = folders.plain(real(case).config)
  family = family_of(config)
  usual, fields = family.settings(config), common.COMMON | dict(family.fields)
  for name in config.keys() - family.renamed.keys():
    try:
      changed = family.settings(config | {name: {"a": 1}})
    except ExportError as error:
      option = name == "ssm_cfg" and family.layout == "mamba_ssm"
      assert ("a=1" if option else name) in str(error)
      continue
    assert changed == usual, name
    # Of an MLP whose width is given, of convolutions that are not there, of heads of head_dim.
    unread = ("hidden_ratio", "conv_size", *["num_heads"] * (family.name == "rwkv7"))
    assert isinstance(fields.get(name), Free) or name in unread, name
  with pytest.raises(ExportError, match="another_setting=1 is not a known setting"):
    family.settings(config | {"another_setting": 1})
  assert family.settings(config | {"another_setting": None}) == usual


def test_settings_of_yarn_llama_2_and_falcon_3_are_read():
  """Fields that their config.json files have besides those of transformers."""
  config = folders.plain(real("llama-2-7b-hf").config)
  family = family_of(config)
  rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
  changes = {"rope_scaling": rope, "max_position_embeddings": 65536}
  usual = family.settings(config | changes)
  rope = rope | {"finetuned": True}
  assert family.settings(config | changes | {"rope_scaling": rope, "activation": "swiglu"}) == usual
  rope = {"type": "dynamic", "factor": 2.0}
  original = {"original_max_position_embeddings": 2048}
  usual = family.settings(config | {"rope_scaling": rope})
  for change in ({"rope_scaling": rope, **original}, {"rope_scaling": rope | original}):
    assert family.settings(config | change) == usual
  with pytest.raises(ExportError, match="activation='gelu'"):
    family.settings(config | {"activation": "gelu"})


def test_settings_of_qwen_2_5_falcon_h1_and_nemotron_h_that_repeat_the_class_are_read():
  """Fields of their published config.json files that no class of transformers has."""
  for case, name, value, other in (
    ("qwen2", "use_mrope", False, True),
    ("falcon_h1", "mamba_use_mlp", True, False),
    ("nemotron_h", "rms_norm_eps", 1e-5, 1e-6),
    ("nemotron_h", "num_query_groups", recorded("nemotron_h").config["num_key_value_heads"], 3),
  ):
    config = folders.plain(recorded(case).config)
    family = family_of(config)
    assert family.settings(config | {name: value}) == family.settings(config)
    with pytest.raises(ExportError, match=f"{name}={other}"):
      family.settings(config | {name: other})


@functools.cache
def defaults() -> dict[str, list[dict]]:
  return json.loads((GOLDEN / "defaults.json").read_text())


def recorded_classes():
  for layout, rows in defaults().items():
    for row in rows:
      if "given" in row:
        yield pytest.param(layout, row, id=row["given"]["model_type"])


def test_every_family_has_recorded_defaults():
  recorded = {row.id for row in recorded_classes()}
  # Layers of mamba-ssm have a test of their own; a model with pictures has its text model's.
  others = {"mamba_ssm", "mamba2_ssm", "qwen3_5", "qwen3_5_moe"}
  assert {family.name for family in FAMILIES} - others == recorded


def settings_or_reason(config):
  try:
    return family_of(config).settings(folders.plain(config))
  except ExportError as error:
    return str(error)


@pytest.mark.parametrize(("layout", "row"), list(recorded_classes()))
def test_settings_left_out_have_the_defaults_of_the_class(layout, row):
  """By what the class itself makes of them, also of the settings that others follow from."""
  given, full = row["given"], row["full"]
  want = settings_or_reason(full)
  assert isinstance(want, dict) and settings_or_reason(given) == want
  for name, changed in row["without"].items():
    got = settings_or_reason({x: value for x, value in given.items() if x != name})
    if got == f"{name} is missing." or changed is None:  # an error there too
      continue
    assert got == settings_or_reason(full | changed), name
  for name, changed in row["null"].items():
    # Which has no rotations, by the files that transformers up to 5.8 saved.
    kept = (given["model_type"], name) == ("olmo_hybrid", "rope_parameters")
    if changed is not None and not kept:
      got, want = settings_or_reason(given | {name: None}), settings_or_reason(full | changed)
      assert got == want or (isinstance(got, str) and name in got), name
  for dim, ratio, width in row.get("widths", ()):
    sizes = {"hidden_size": dim, "hidden_ratio": ratio, "expand_ratio": None}
    sizes = {x: v for x, v in sizes.items() if x != "expand_ratio" or x in full}
    config = full | sizes | {"num_heads": 2 if dim < 300 else 4}
    assert settings_or_reason(config)["channel_hidden"] == width, (dim, ratio)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2"])
def test_settings_of_mamba_ssm_left_out_have_the_defaults_of_its_layer(layer):
  (classes,) = defaults()["mamba_ssm"]
  sizes = {"d_model": 72, "n_layer": 2, "vocab_size": 11}
  unused = ("device", "dtype", "layer_idx")
  options = {x: v for x, v in classes[layer].items() if x not in unused}
  options |= {"headdim": 48} if layer == "Mamba2" else {}
  few = {"layer": layer} | {x: v for x, v in options.items() if x == "headdim"}
  full = classes["model"] | sizes | {"ssm_cfg": options | {"layer": layer}}
  want = settings_or_reason(full)
  assert isinstance(want, dict)
  assert settings_or_reason(sizes | {"ssm_cfg": few}) == want
  if layer == "Mamba1":  # the class rounds d_model / 16 up
    given = {"ssm_cfg": options | {"layer": layer, "dt_rank": 5}}
    assert settings_or_reason(full | given) == want
  if layer == "Mamba2":  # 64 channels per head
    wide = sizes | {"d_model": 64}
    assert settings_or_reason(wide | {"ssm_cfg": {"layer": layer}}) == settings_or_reason(
      full | wide | {"ssm_cfg": options | {"layer": layer, "headdim": classes[layer]["headdim"]}}
    )


YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0}
YARN["original_max_position_embeddings"] = 16

# (case, changes, settings that are left out, with the values of the class)
LEFT_OUT = [
  ("lfm2", {"intermediate_size": 150}, {"block_multiple_of": 256}),
  ("bamba", {"hidden_size": 64, "mamba_d_head": "auto"}, {"mamba_n_heads": 128}),
  ("qwen2_window", {"layer_types": None}, {"max_window_layers": 28}),
  (
    "llama_yarn",
    {"rope_parameters": YARN},
    {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1}},
  ),
  (
    "fla_gla_attn",
    {"attn": {"layers": [1], "num_heads": 4}},
    {"attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 4, "rope_theta": 10000.0}},
  ),
]


@pytest.mark.parametrize(("case", "change", "values"), LEFT_OUT)
def test_settings_that_others_follow_from_have_the_defaults_of_the_class(case, change, values):
  config = recorded(case).config | change
  given = {name: value for name, value in config.items() if name not in values or name in change}
  want = settings_or_reason(config | values)
  assert isinstance(want, dict)
  assert settings_or_reason(given) == want


CONTRADICTIONS = [
  ("mamba-130m-hf", {"d_inner": 24}, "d_inner=24 is not .*expand hidden_size, = 16"),
  ("mamba-130m-hf", {"d_model": 9}, "d_model=9 is not hidden_size = 8"),
  ("mamba-130m-hf", {"n_layer": 3}, "n_layer=3 is not num_hidden_layers = 2"),
  ("mamba-130m-hf", {"rms_norm": False}, "rms_norm=False is not implemented; only True"),
  ("mamba-130m-hf", {"ssm_cfg": {"d_state": 4}}, "ssm_cfg=.*4.* is not what .* say = .*3"),
  ("mamba-130m-hf", {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg=.*2.* is not what .* say = .*1"),
  ("mamba-130m-hf", {"ssm_cfg": {"d_conv": 3, "a": 1}}, "ssm_cfg=.*3.* is not what"),
  ("mamba-130m-hf", {"is_encoder_decoder": True}, "is_encoder_decoder=True is not implemented"),
  ("mamba-130m-hf", {"pruned_heads": {"0": [1]}}, "pruned_heads=.* is not implemented"),
  ("mamba-codestral-7b", {"intermediate_size": 24}, "=24 is not expand hidden_size = 16"),
  ("falcon-mamba-7b", {"intermediate_size": 20}, "=20 must be a multiple of hidden_size=8"),
  ("falcon-mamba-7b", {"intermediate_size": 24}, "in_proj.weight: found|A_log: found"),
  ("falcon-mamba-7b", {"intermediate_size": 0}, "intermediate_size=0 must be a whole number"),
  ("rwkv-4-pile", {"attention_hidden_size": 16}, "attention_hidden_size=16 is not hidden_size = 8"),
  (
    "recurrentgemma-2b",
    {"_block_types": ["recurrent", "attention"]},
    "_block_types=.* is not what",
  ),
  ("recurrentgemma-2b", {"_block_types": "attention"}, "_block_types=.* is not what"),
  ("recurrentgemma-2b", {"layer_types": ["sliding_attention"] * 5}, "layer_types=.* is not what"),
  ("recurrentgemma-2b", {"embeddings_scale_by_sqrt_dim": False}, "only True"),
  ("recurrentgemma-2b", {"sliding_window": 8}, "sliding_window=8 is not attention_window_size"),
  ("bamba-9b", {"attn_rotary_emb": 4}, "attn_rotary_emb=4 is not head_dim / 2 = 2"),
  ("bamba-9b", {"layers_block_type": ["mamba"] * 5}, "layers_block_type=.* is not what attn_"),
  ("bamba-9b", {"partial_rotary_factor": 0.25}, "=0.25 is not the share of transformers = 0.5"),
  ("llama-3.1-5.23", {"rope_theta": 10000.0}, r"=10000.0 is not rope_parameters.rope_theta = 500"),
  ("llama-3.1-5.23", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "two descriptions"),
  ("llama-3.1-8b", {"rope_interleaved": True}, "rope_interleaved=True is not implemented"),
  (
    "qwen2.5-7b-instruct",
    {"use_sliding_window": True, "max_window_layers": 1},
    "max_window_layers=1: layers with a window next to others without are not implemented",
  ),
  ("qwen2.5-7b-instruct", {"use_sliding_window": 1}, "use_sliding_window=1 must be a boolean"),
  ("qwen3-0.6b", {"layer_types": ["sliding_attention"] * 2}, "but use_sliding_window is false"),
  (
    "qwen3-0.6b",
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8782488562869419}},
    "attn_factor=0.878.*transformers does not read it.*write attention_factor=1 in its place",
  ),
  ("qwen3-0.6b", {"layer_types": ["full_attention"]}, "layer_types=.* only all or none"),
  ("qwen3.5-0.8b", {"tie_word_embeddings": False}, "=False is not text_config.that = True"),
  ("qwen3.5-0.8b", {"vocab_size": 17}, "vocab_size=17 is not text_config.vocab_size = 16"),
  ("qwen3.5-0.8b", {"text_config": {"model_type": "qwen3"}}, "text_config=.*'qwen3_5_text'"),
  ("gla-2024", {"norm_eps": 1e-5}, "rms_norm_eps=1e-06 is not norm_eps, .* = 1e-05"),
  (
    "qwen2.5-7b-instruct-1m",
    {"dual_chunk_attention_config": {"chunk_size": 4, "local_size": 4}},
    "needs a chunk_size above its local_size",
  ),
  ("ling-3.0-tiny", {"use_nGPT": True}, "use_nGPT=True is not implemented"),
  ("ling-3.0-tiny", {"expert_swiglu_limit_list": [-1.0]}, "must be a list of numbers, 0 or more"),
  ("ling-3.0-tiny", {"expert_swiglu_limit_list": [1.0]}, "has 1 numbers, but num_hidden_layers"),
  (
    "ling-3.0-tiny",
    {"architectures": ["BailingMoeV2_5ForCausalLM"]},
    "Ling 2.5 and 2.6, which have this model_type too, are not implemented",
  ),
  ("ling-edge0-8b", {"pregate_enabled": True}, "pregate_enabled=True is not a known setting"),
  ("ling-3.0-tiny", {"linear_head_dim": 16}, "=0.5 is not qk_rope_head_dim / head_dim = 0.25"),
  ("ling-3.0-tiny", {"partial_rotary_factor": 0.25}, "=0.25 is not qk_rope_head_dim"),
  ("gla-2024", {"use_gv": True}, "use_gv=True is not implemented; only False"),
  ("hgrn2-2025", {"num_heads": 4}, "expand_ratio=4 is not hidden_size / num_heads = 8 / 4"),
  ("mamba2-130m", {"ssm_cfg": {"layer": "Mamba3"}}, "layer='Mamba3' is not the layer of this fam"),
  ("mamba2-130m", {"ssm_cfg": {"layer": "Mamba2", "d_ssm": 8}}, "d_ssm=8 is not expand d_model"),
  ("mamba2-130m", {"rms_norm": False}, "rms_norm=False is not implemented"),
]


@pytest.mark.parametrize(("case", "change", "expected"), CONTRADICTIONS)
def test_setting_that_contradicts_the_others_raises(case, change, expected, tmp_path):
  found = real(case)
  arrays = {name: x.astype(np.float32) for name, x in found.tensors.items()}
  folder = write_folder(tmp_path, found.config | change, arrays)
  with pytest.raises(ExportError, match=expected) as error:
    hugging_face.load(folder)
  assert str(error.value).startswith(f"{folder}") and "\n" not in str(error.value)


@pytest.mark.parametrize("version", ["4.57.6", "5.23.0"])
def test_file_that_transformers_opened_and_saved_has_the_settings_of_the_original(version):
  """From which 5.23.0 computes the same; 4.57.6 only wrote them."""
  cases = json.loads((GOLDEN / "resaved.json").read_text())[version]
  assert len(cases) >= 28
  for case, change in cases.items():
    config = real(case).config
    kept = {x: v for x, v in config.items() if x not in change["gone"]}
    settings = settings_or_reason(kept | change["changed"])
    assert isinstance(settings, dict) and settings == settings_or_reason(config), case


REDUNDANT = [
  ("mamba-130m-hf", {"ssm_cfg": {"d_state": 3, "expand": 2, "dt_rank": 1}}),
  ("mamba-130m-hf", {"ssm_cfg": {"layer": "Mamba1"}}),
  ("mamba2-4.49", {"ssm_cfg": {"layer": "Mamba2"}}),
  ("mamba-130m-hf", {"id2label": {"0": "LABEL_0"}, "quantization_config": None}),
  ("mamba-130m-hf", {"rms_norm": None, "d_inner": None, "is_encoder_decoder": None}),
  ("llama-3.1-8b", {"partial_rotary_factor": None, "head_dim": None, "hidden_act": "swish"}),
  ("falcon-mamba-7b", {"expand": 2, "d_inner": 16}),
  ("recurrentgemma-2b", {"_block_types": ["recurrent", "recurrent", "attention"] * 2}),
  ("recurrentgemma-2b", {"layer_types": ["linear_attention"] * 2 + ["sliding_attention"]}),
  ("recurrentgemma-2b", {"sliding_window": 4, "lru_width": None}),
  ("bamba-9b", {"layers_block_type": ["mamba", "attention", "mamba", "mamba", "attention"]}),
  ("qwen3-0.6b", {"layer_types": ["full_attention"] * 2, "sliding_window": 4}),
  ("qwen3.5-0.8b", {"tie_word_embeddings": None, "rms_norm_eps": 1e-6}),
  ("mistral-7b-v0.1", {"head_dim": 4, "rope_scaling": None}),
  ("llama-3.1-5.23", {"rope_theta": 500000.0, "rope_scaling": None}),
  ("olmo-hybrid-7b", {"rope_parameters": None}),  # as files saved by transformers up to 5.8
  ("olmo-hybrid-7b", {"rope_parameters": None, "rope_theta": None}),
  ("qwen2.5-7b-instruct-1m", {"max_position_embeddings": 16}),
  ("ling-3.0-tiny", {"rope_parameters": {"rope_theta": 6e6, "partial_rotary_factor": 0.5}}),
  ("gla-2024", {"norm_eps": 1e-6, "num_attention_heads": 2, "num_kv_heads": None}),
  ("rwkv6-2025", {"fuse_norm": False}),
  ("delta-net-2024", {"fuse_norm": False}),
]


@pytest.mark.parametrize(("case", "change"), REDUNDANT)
def test_setting_that_repeats_the_others_changes_nothing(case, change):
  config = real(case).config
  if change.get("_block_types"):
    change = {"_block_types": change["_block_types"][:5]}  # of all layers
  assert settings_or_reason(config | change) == settings_or_reason(config)


def test_length_from_which_chunks_change_attention_is_the_longest():
  config = real("qwen2.5-7b-instruct-1m").config
  assert settings_or_reason(config)["mixer_options"]["max_length"] == 16  # of 20 - 4 and 77
  arguments = (Path("model"), config)
  assert hugging_face._of_config(*arguments, 8)[1]["mixer_options"]["max_length"] == 8
  with pytest.raises(ExportError, match="max_length=17 is more than 16, from which on"):
    hugging_face._of_config(*arguments, 17)


def test_older_name_of_a_tensor_is_read(tmp_path):
  found = real("mamba-130m-hf")
  arrays = {name: x.astype(np.float32) for name, x in found.tensors.items()}
  older = {name.replace("embeddings.", "embedding."): x for name, x in arrays.items()}
  loaded = hugging_face.load(write_folder(tmp_path / "older", found.config, older))
  np.testing.assert_array_equal(loaded.model.embedding, arrays["backbone.embeddings.weight"])
  both = older | arrays
  with pytest.raises(ExportError, match="two names of one tensor"):
    hugging_face.load(write_folder(tmp_path / "both", found.config, both))


def test_every_setting_is_of_one_kind_and_free_ones_say_why():
  for family in FAMILIES:
    for name, field in (common.COMMON | dict(family.fields)).items():
      assert isinstance(field, Field | Fixed | Same | Free), name
      assert not isinstance(field, Free) or len(field.reason) > 8, name
    assert not family.renamed.keys() & family.fields.keys(), family.name


def numbers_of(config, path=()):
  for name, value in config.items():
    if isinstance(value, dict):
      yield from numbers_of(value, (*path, name))
    elif isinstance(value, int | float) and not isinstance(value, bool):
      yield (*path, name)


def built(config, shapes):
  """Does all that `load` does before it reads a tensor."""
  family = family_of(config)
  settings = family.settings(folders.plain(config))
  hugging_face._check_sizes(family, settings, shapes)
  graph, abstract = exports.abstract_model(settings | {"param_dtype": "float32"})
  found = {name: leaf.shape for name, leaf in exports.flat(abstract).items()}
  layers.check_covered(list(layers.parameters(family, settings, found)), shapes)
  return graph


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_any_number_in_a_real_config_is_an_error_in_a_line_or_makes_a_model(case):
  found = real(case)
  shapes = {name: x.shape for name, x in found.tensors.items()}
  for path in numbers_of(found.config):
    for value in (-1, 0.5, 1e14, 2**47, 10**30):
      config = json.loads(json.dumps(found.config))
      place = functools.reduce(lambda inner, name: inner[name], path[:-1], config)
      place[path[-1]] = value
      try:
        built(config, shapes)
      except ExportError as error:
        assert "\n" not in str(error) and len(str(error)) < 600, (path, value)


ODD = (0, -1, True, 0.5, 1e308, "", "auto", [], [None], [1.5], ["full_attention"] * 3, {}, {"a": 1})


@pytest.mark.slow
@pytest.mark.parametrize("case", REAL)
def test_any_value_of_a_known_setting_is_an_error_in_a_line_or_read(case):
  config = folders.plain(real(case).config)
  family = family_of(config)
  for name in {*config, *family.fields, *family.renamed, "layer_types", "rope_parameters", "attn"}:
    for value in ODD:
      try:
        family_of(config | {name: value}).settings(config | {name: value})
      except ExportError as error:
        assert "\n" not in str(error) and len(str(error)) < 1400, (name, value)
