"""Published models against what their own code computes, as recorded by `make test-peers`."""

import functools
import json
import re
import tracemalloc
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import lnssm_jax
from lnssm_jax.models import LanguageModel, count_parameters, replace_mixers
from lnssm_jax.models.settings import abstract_params, params_of
from lnssm_jax.pretrained import ExportError, folders, hugging_face, placing, safetensors
from lnssm_jax.pretrained.families import family_of, hybrids
from lnssm_jax.pretrained.families.griffin import RECURRENT_GEMMA
from tests.devices import result_of
from tests.peers.maps import rwkv6
from tests.pretrained import read_models
from tests.pretrained.published import CASES, recorded, write


@jax.jit
def evaluate(model, tokens):
  """The input of each layer and of the head, and the hidden states of one token at a time."""
  *inputs, x = model.hidden_states(tokens)[0]

  def step(state, token):
    hidden, state = model.hidden(token[:, None], state)
    return state, hidden[:, 0]

  state = jax.tree.map(
    lambda s: s.astype(x.dtype) if jnp.issubdtype(s.dtype, jnp.floating) else s,
    model.init_state(len(tokens)),
  )
  steps = jax.lax.scan(step, state, tokens.T)[1]
  return [*inputs, model.norm(x, dtype=model.dtype)], steps.swapaxes(0, 1)


# The others take most of a minute.
BY_DEFAULT = ("fla_gla", "fla_gla_attn", "fla_hgrn2", "falcon_h1", "llama_scaled", "llama_yarn")
BY_DEFAULT += ("mamba", "qwen3_next_moe", "granitemoehybrid_moe", "fla_rwkv7")


@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=[pytest.mark.slow] * (c not in BY_DEFAULT)) for c in CASES]
)
def test_published_model_in_float64_equals_the_recorded_one(case, tmp_path):
  want = recorded(case)
  with jax.enable_x64(True):
    model = hugging_face.load(write(tmp_path, case)).model
    hidden, steps = evaluate(model, want.tokens)
    # RWKV's first block has the norm after the embedding.
    pairs = list(enumerate(zip(hidden, want.hidden, strict=True)))
    for layer, (got, expected) in pairs[0 if model.embedding_norm is None else 1 :]:
      np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-11, err_msg=f"layer {layer}")
    np.testing.assert_allclose(steps, want.hidden[-1], rtol=1e-10, atol=1e-11)
    scale = np.abs(want.logits).max()
    # Logits are float32.
    assert np.abs(model.logits(hidden[-1]) - want.logits).max() < 1e-6 * scale
    expected = want.logits if want.steps is None else want.steps
    assert np.abs(model.logits(steps) - expected).max() < 1e-6 * scale


def saved_cases():
  """Hybrids of fla have one table; one of them is enough by default, as of some others."""
  for case in CASES:
    like_others = case.endswith(
      ("_attn", "_adapters", "_limits", "_norm", "_rope", "_h_biases", "_h_moe", "_latent")
    )
    like_others = like_others or case in (
      "bailing_hybrid",
      "qwen3_5_moe",
      "granitemoehybrid",
      "kimi_linear",
      "lfm2_moe",
    )
    seldom = like_others and case not in BY_DEFAULT
    yield pytest.param(case, marks=[pytest.mark.slow] * seldom)


@pytest.mark.parametrize("case", list(saved_cases()))
def test_published_model_saved_again_has_equal_bytes(case, tmp_path):
  folder = write(tmp_path / "theirs", case, dtype=np.float32)
  loaded = hugging_face.load(folder)
  assert_parameters_as_recorded(case, loaded.model)
  layout = "fla" if case.startswith("fla") else "hf"
  model, settings, kind = (
    loaded.model,
    loaded.settings["model"],
    recorded(case).config["model_type"],
  )
  hugging_face.save(tmp_path / "ours", model, settings, layout=layout, model_type=kind)
  assert folders.config(tmp_path / "ours")["model_type"] == kind
  before, after = (
    safetensors.Tensors(f / "model.safetensors") for f in (folder, tmp_path / "ours")
  )
  skipped = family_of(recorded(case).config).skipped
  assert {name for name in before if not re.fullmatch(skipped, name)} == set(after)
  for name in after:
    assert before.kind(name) == after.kind(name)
    assert before[name].tobytes() == after[name].tobytes(), name


def assert_parameters_as_recorded(case, model):
  want = read_recorded()["parameters"][case]
  assert read_models.parameters_number(model) == pytest.approx(want, rel=1e-5, abs=1e-4)


@functools.cache
def read_recorded():
  return json.loads(read_models.FILE.read_text())


def test_settings_of_every_recorded_file_are_those_of_which_values_were_compared():
  """Most values are compared by slow tests alone, of these settings and parameters."""
  found = {case: read_models.settings_number(x) for case, x in read_models.configs().items()}
  assert found == read_recorded()["settings"]


@pytest.mark.parametrize("case", ["bailing_hybrid_limits", "kimi_linear", "zamba2_adapters"])
def test_parameters_of_a_file_that_slow_tests_save_again_are_the_recorded_ones(case, tmp_path):
  model = hugging_face.load(write(tmp_path, case, dtype=np.float32)).model
  assert_parameters_as_recorded(case, model)


def test_settings_of_images_and_of_further_tokens_change_no_text_model():
  config = recorded("qwen3_5_text").config
  family = family_of(config)
  usual, rope = family.settings(config), config["rope_parameters"]
  published = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": []}
  published |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
  published["rope_parameters"] = rope | {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
  assert family.settings(config | published) == usual
  with pytest.raises(ExportError, match="attn_output_gate=False is not implemented"):
    family.settings(config | {"attn_output_gate": False})


def test_layer_of_further_tokens_of_ling_is_left_out():
  config = recorded("bailing_hybrid").config
  family, number = family_of(config), config["num_hidden_layers"]
  names = [f"model.layers.{number + n}.eh_proj.weight" for n in (-1, 0)]
  tensors = types.SimpleNamespace(shapes=dict.fromkeys(names, (2, 2)))
  kept = hugging_face._without_skipped(family, family.settings(config), tensors)
  assert list(kept) == names[:1]


def test_gate_of_ling_that_is_not_safe_has_no_bound():
  config = recorded("bailing_hybrid").config
  read = lambda **change: family_of(config).settings(config | change)["mixer_options"]["kda"]
  assert read(kda_lower_bound=-3)["lower_bound"] == -3.0
  assert read(kda_safe_gate=False)["lower_bound"] is None


def test_w_o_of_kda_in_ling_is_read_by_the_name_that_transformers_saves():
  family = family_of(recorded("bailing_hybrid").config)
  name, published = "blocks.kda.o_proj.kernel", "model.layers.{}.attention.o_proj.weight"
  assert family.rows[name].theirs == published
  for theirs in (published, published.replace("o_proj", "dense")):
    assert family.as_stored({theirs.format(0): None}).rows[name].theirs == theirs


def test_experts_of_qwen3_5_in_a_tensor_each_are_the_same_model(tmp_path):
  """As transformers saves them; the published files have one tensor for all."""
  case, apart = "qwen3_5_moe_text", {}
  for name, x in recorded(case).tensors.items():
    prefix, _, kind = name.partition("experts.")
    if not kind or "shared" in name:
      continue
    apart[name] = ...
    for number, expert in enumerate(x):
      parts = np.split(expert, 2) if kind == "gate_up_proj" else [expert]
      for which, part in zip(("gate", "up") if len(parts) > 1 else ("down",), parts, strict=True):
        apart[f"{prefix}experts.{number}.{which}_proj.weight"] = part
  assert len(apart) == 3 * (2 + 5 * 3)
  want, got = (
    hugging_face.load(write(tmp_path / name, case, dtype=np.float32, tensors=tensors)).model
    for name, tensors in (("one", {}), ("apart", apart))
  )
  jax.tree.map(np.testing.assert_array_equal, params_of(got), params_of(want))


def test_qwen3_next_with_experts_in_some_layers_only_raises():
  config = recorded("qwen3_next_moe").config
  for change in ({"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}):
    with pytest.raises(ExportError, match="next to others without are not implemented"):
      family_of(config | change).settings(config | change)


def test_fields_of_a_file_of_granite_4_are_read():
  """As in published config.json files, whose multipliers may be whole numbers."""
  config = recorded("granitemoehybrid_moe").config | {
    "time_step_limit": ...,
    "rope_parameters": ...,
  }
  config = {x: value for x, value in config.items() if value is not ...}
  config |= {"embedding_multiplier": 12, "logits_scaling": 3, "position_embedding_type": "nope"}
  config |= {"init_method": "mup", "normalization_function": "rmsnorm", "rope_scaling": None}
  config |= {"rope_theta": 10000, "layer_types": ["mamba", "attention", "mamba"]}
  family = family_of(config)
  settings = family.settings(config)
  scales = settings["embedding_scale"], settings["residual_scale"], settings["logit_scale"]
  assert scales == (12.0, 0.4, 1 / 3)
  assert settings["mixer_options"]["softmax_attention"]["positions"] == "none"
  assert family.config(settings)["logits_scaling"] == 3
  for change in ({"normalization_function": "layernorm"}, {"logits_scaling": 0}):
    with pytest.raises(ExportError, match=next(iter(change))):
      family.settings(config | change)


SSM = {"d_model": 8, "n_layer": 2, "rms_norm": True, "fused_add_norm": True, "vocab_size": 11}
SSM |= {"residual_in_fp32": True, "pad_vocab_size_multiple": 1}
SSM_CASES = {
  "mamba": {"d_state": 3},
  "mamba2": {"layer": "Mamba2", "d_state": 3, "headdim": 4},
}


def write_ssm(folder, case, **changes):
  """A recorded model as mamba-ssm stores it: other names of settings, one other of a tensor."""
  config = dict.fromkeys(recorded(case).config, ...) | SSM | {"ssm_cfg": SSM_CASES[case]} | changes
  embedding = recorded(case).tensors["backbone.embeddings.weight"]
  tensors = {"backbone.embeddings.weight": ..., "backbone.embedding.weight": embedding}
  return write(folder, case, dtype=np.float32, config=config, tensors=tensors)


@pytest.mark.parametrize("case", SSM_CASES)
def test_layout_of_mamba_ssm_equals_that_of_transformers(case, tmp_path):
  theirs = hugging_face.load(write_ssm(tmp_path / "ssm", case))
  same = hugging_face.load(write(tmp_path / "hf", case, dtype=np.float32))
  jax.tree.map(np.testing.assert_array_equal, params_of(theirs.model), params_of(same.model))
  want = recorded(case)
  logits, _ = jax.jit(lambda model, tokens: model(tokens))(theirs.model, want.tokens)
  assert np.abs(logits - want.logits).max() < 1e-5 * np.abs(want.logits).max()
  hugging_face.save(tmp_path / "ours", theirs.model, theirs.settings["model"], layout="mamba_ssm")
  before, after = (
    safetensors.Tensors(tmp_path / name / "model.safetensors") for name in ("ssm", "ours")
  )
  assert {n: x.tobytes() for n, x in before.items()} == {n: x.tobytes() for n, x in after.items()}


def test_model_with_defaults_left_out_is_saved_with_their_values(tmp_path):
  """Defaults differ: eps here is 1e-5, theirs 1e-6."""
  loaded = hugging_face.load(write(tmp_path / "theirs", "mamba2", dtype=np.float32))
  settings = dict(loaded.settings["model"])
  del settings["norm_eps"], settings["channel_mixer_options"], settings["num_heads"]
  settings["mixer_options"] = {"state_dim": 3, "head_dim": 4}
  hugging_face.save(tmp_path / "ours", loaded.model, settings, layout="hf")
  assert not hugging_face.differences(settings, hugging_face.settings_of(tmp_path / "ours"))
  config = json.loads((tmp_path / "ours" / "config.json").read_text())
  assert (config["n_groups"], config["layer_norm_epsilon"], config["num_heads"]) == (1, 1e-5, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "widths"),
  [
    ("llama", {"expand_k": 1.0}),
    ("qwen3", {"expand_k": 1.5, "expand_v": 1.5}),  # heads wider than D / H
  ],
)
def test_published_transformer_continues_as_a_hybrid(case, widths, tmp_path):
  loaded = hugging_face.load(write(tmp_path, case, dtype=np.float32))
  settings = {n: x for n, x in loaded.settings["model"].items() if not n.endswith("dtype")}
  options: dict = {"gla": {"num_kv_heads": 1, **widths}}
  options["softmax_attention"] = settings["mixer_options"]
  hybrid = settings | {"mixer": ("gla", "softmax_attention"), "mixer_options": options}
  build = lambda: LanguageModel(**hybrid, rngs=nnx.Rngs(0))
  model, new = replace_mixers(loaded.model, jax.jit(build)())
  assert new[1] == []
  assert not {"q_proj/kernel", "k_proj/kernel", "v_proj/kernel", "o_proj/kernel"} & set(new[0])
  same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, params_of(a), params_of(b))
  same(model.layer(1), loaded.model.layer(1))
  same(model.layer(0).channel_mixer, loaded.model.layer(0).channel_mixer)


def test_vocabulary_of_mamba_ssm_is_padded(tmp_path):
  embedding = np.pad(recorded("mamba").tensors["backbone.embeddings.weight"], ((0, 5), (0, 0)))
  folder = write_ssm(tmp_path, "mamba", pad_vocab_size_multiple=16)
  names = {"backbone.embeddings.weight": ..., "backbone.embedding.weight": embedding}
  config = dict.fromkeys(recorded("mamba").config, ...) | SSM | {"pad_vocab_size_multiple": 16}
  write(folder, "mamba", config=config | {"ssm_cfg": SSM_CASES["mamba"]}, tensors=names)
  assert hugging_face.load(folder, param_dtype=jnp.float32).model.vocab_size == 16


def test_sharded_files_are_read_as_one(tmp_path):
  want = hugging_face.load(write(tmp_path / "one", "llama", dtype=np.float32))
  folder = write_shards(tmp_path / "two", "llama")
  got = hugging_face.load(folder)
  jax.tree.map(np.testing.assert_array_equal, params_of(got.model), params_of(want.model))


def write_shards(folder, case, shards=2):
  folder = write(folder, case, dtype=np.float32)
  whole = safetensors.Tensors(folder / "model.safetensors")
  names, index = sorted(whole), {}
  for number in range(shards):
    file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
    held = {name: whole[name] for name in names[number::shards]}
    save_file(held, folder / file)
    index |= dict.fromkeys(held, file)
  (folder / "model.safetensors").unlink()
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
  return folder


def test_layer_of_rwkv6_has_the_parameters_of_its_own_map(tmp_path):
  """The map by which the recorded layer of tests/peers agrees, written apart from the table."""
  loaded = hugging_face.load(write(tmp_path, "fla_rwkv6", dtype=np.float32))
  prefix = "model.layers.1.attn."
  theirs = {
    name.removeprefix(prefix): x.astype(np.float32)
    for name, x in recorded("fla_rwkv6").tensors.items()
    if name.startswith(prefix)
  }
  got = jax.tree.map(lambda x: x[1], params_of(loaded.model)["blocks"]["mixer"])
  want = rwkv6(theirs)
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


def test_any_shard_of_a_parameter_is_read_by_itself(tmp_path, monkeypatch):
  """With one device there is one shard; the reader must give every other one as well."""
  shards = {}

  def keep(shape, where, read):
    whole = read(tuple(slice(0, n) for n in shape))
    cut = tuple(slice(n // 2, n) for n in shape)
    shards[shape] = (whole[cut], read(cut))
    return jnp.asarray(whole)

  monkeypatch.setattr(jax, "make_array_from_callback", keep)
  # RWKV-6 has parameters that are several tensors, and several that are one.
  for case in ("fla_rwkv6", "llama"):
    hugging_face.load(write(tmp_path / case, case, dtype=np.float32))
  assert len(shards) > 10
  for whole, part in shards.values():
    np.testing.assert_array_equal(part, whole)


@pytest.mark.parametrize(
  ("sizes", "scale", "billions"), [((2560, 10, 26), 50.5, 2), ((4096, 16, 38), 64.0, 9)]
)
def test_recurrent_gemma_of_both_sizes_has_its_parameters(sizes, scale, billions):
  """2B counts them without the embedding, 9B with it."""
  D, heads, depth = sizes
  config = {"hidden_size": D, "num_attention_heads": heads, "num_hidden_layers": depth}
  config |= {"vocab_size": 256_000, "intermediate_size": 6 * D, "num_key_value_heads": 1}
  settings = RECURRENT_GEMMA.settings(config)
  assert settings["embedding_scale"] == scale  # rounded to bfloat16
  assert settings["mixer_options"]["sliding_window_attention"]["rotary_width"] == 128
  dtypes = {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  count = count_parameters(abstract_params(settings | dtypes))
  assert round((count - (256_000 * D if billions == 2 else 0)) / 1e9) == billions


def test_layers_of_a_hybrid_have_the_shortest_pattern():
  assert hybrids.pattern("aba") == ["a", "b"]
  assert hybrids.pattern("aabaabaa") == ["a", "a", "b"]
  assert hybrids.pattern("abba") == ["a", "b", "b"]
  assert hybrids.pattern("aaab") == list("aaab")


def written_again(source, to):
  to = np.zeros_like(source, to)
  placing.copy(to, source)
  np.testing.assert_array_equal(to, source.astype(to.dtype))


def test_copy_of_any_matrix_gives_its_numbers(monkeypatch):
  numbers = np.arange(300 * 70).reshape(300, 70) / 7
  monkeypatch.setattr(placing, "_BLOCK", 1)  # 64 rows, of 300
  for dtype in (np.float32, ml_dtypes.bfloat16):
    array = numbers.astype(dtype)
    for source in (array, array.T, array[1::3].T, array.T[5:20], array[0], array[0, 0]):
      for to in (dtype, np.float64):
        written_again(source, to)


def test_load_needs_the_memory_of_the_parameters_and_no_more(tmp_path, monkeypatch):
  """Each parameter is written once, where the array keeps it; tensors are pages of the file."""
  memory, D, vocab = [], 128, 40_000
  given = placing._aligned
  monkeypatch.setattr(placing, "_aligned", lambda *args: memory.append(given(*args)) or memory[-1])
  sizes = {"hidden_size": D, "intermediate_size": 3 * D, "vocab_size": vocab, "head_dim": ...}
  shapes = {name: x.shape for name, x in recorded("llama").tensors.items()}
  wider = {8: D, 4: D // 2, 12: 3 * D, 11: vocab}
  tensors = {
    name: np.ones([wider[n] for n in shape], ml_dtypes.bfloat16) for name, shape in shapes.items()
  }
  write(tmp_path, "llama", config=sizes, tensors=tensors)
  tracemalloc.start()
  try:
    loaded = hugging_face.load(tmp_path)
    most = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  arrays = jax.tree.leaves(params_of(loaded.model))
  assert {x.unsafe_buffer_pointer() for x in arrays} == {x.ctypes.data for x in memory}
  assert most < 1.25 * sum(x.nbytes for x in arrays)


_ON_A_MESH = """
import json, sys, jax, numpy as np
from lnssm_jax.models.settings import abstract_params, params_of
from lnssm_jax.pretrained import load
mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"))
want, got = (params_of(load(sys.argv[1], mesh=m).model) for m in (None, mesh))
jax.tree.map(np.testing.assert_array_equal, got, want)
kernel = got["blocks"]["mixer"]["q_proj"]["kernel"]
print(json.dumps([list(kernel.sharding.spec), [s.data.shape for s in kernel.addressable_shards]]))
"""


@pytest.mark.slow
def test_load_on_a_mesh_places_shards_by_the_rules(tmp_path):
  write(tmp_path, "llama", dtype=np.float32)
  found = result_of("-c", _ON_A_MESH, str(tmp_path), devices=4)
  assert found == [[None, "fsdp", "tensor"], [[2, 4, 4]] * 4]


def test_load_takes_dtypes_and_a_maximum_length(tmp_path):
  folder = write(tmp_path, "llama", dtype=np.float32)
  loaded = hugging_face.load(folder, dtype=jnp.float16, param_dtype=jnp.bfloat16, max_length=4)
  assert loaded.model.max_length == 4
  assert {x.dtype for x in jax.tree.leaves(params_of(loaded.model))} == {jnp.dtype(jnp.bfloat16)}
  assert loaded.model.dtype == jnp.float16
  with pytest.raises(ExportError, match="max_length=4: this model has no cache of bounded length"):
    hugging_face.load(write(tmp_path / "mamba", "mamba"), max_length=4)


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_load_takes_dtypes_of_floating_point_only(name, tmp_path):
  for dtype in ("int8", "float17", jnp.int32):
    with pytest.raises(ValueError, match=rf"^{name}=.* must be a floating-point dtype, such as"):
      hugging_face.load(tmp_path, **{name: dtype})


def test_load_of_float16_computes_in_float32_and_saves_the_same_bytes(tmp_path):
  folder = write(tmp_path / "theirs", "mamba", dtype=np.float16)
  loaded = lnssm_jax.load_model(folder)  # also opens published models
  assert loaded.settings["model"]["dtype"] == "float32"
  hugging_face.save(tmp_path / "ours", loaded.model, loaded.settings["model"], layout="hf")
  ours = safetensors.Tensors(tmp_path / "ours" / "model.safetensors")
  theirs = safetensors.Tensors(folder / "model.safetensors")
  assert {n: ours[n].tobytes() for n in ours} == {n: theirs[n].tobytes() for n in theirs}


def test_tied_head_that_is_stored_must_equal_the_embedding(tmp_path):
  embedding = recorded("mamba").tensors["backbone.embeddings.weight"]
  hugging_face.load(write(tmp_path, "mamba", tensors={"lm_head.weight": embedding}, dtype="f4"))
  write(tmp_path, "mamba", tensors={"lm_head.weight": embedding + 1}, dtype="f4")
  with pytest.raises(ExportError, match=r"differs from backbone\.embeddings"):
    hugging_face.load(tmp_path)


def test_save_of_a_model_that_no_family_has_says_why(tmp_path):
  loaded = hugging_face.load(write(tmp_path, "llama", dtype="f4"))
  settings = dict(loaded.settings["model"])
  settings["mixer_options"] = settings["mixer_options"] | {"soft_cap": 30.0}
  with pytest.raises(ExportError, match=r"mixer_options\.0\.soft_cap: 30\.0, None"):
    hugging_face.save(tmp_path / "out", loaded.model, settings, layout="hf")
  changed = settings | {"channel_mixer": "gpt2", "embedding_norm": True}
  with pytest.raises(
    ExportError, match=r"channel_mixer: 'gpt2', 'swiglu'; .*embedding_norm: True, F"
  ):
    hugging_face.save(tmp_path / "out", loaded.model, changed, layout="hf")
  with pytest.raises(ExportError, match="no family has this mixer"):
    hugging_face.save(tmp_path / "out", loaded.model, settings | {"mixer": "s4"}, layout="hf")
  options = {"softmax_attention": settings["mixer_options"], "gla": {"norm_eps": 1e-6}}
  pattern = settings | {"mixer": ("gla", "softmax_attention"), "mixer_options": options}
  # And not of the tables of other mixers, which have no heads here.
  with pytest.raises(
    ExportError, match=r"here and there: .*mixer_options\.1\.soft_cap: 30\.0, None"
  ):
    hugging_face.save(tmp_path / "out", loaded.model, pattern, layout="fla")
  with pytest.raises(ExportError, match="no family has this mixer"):
    pattern |= {"mixer": ("kda", "softmax_attention")}
    hugging_face.save(tmp_path / "out", loaded.model, pattern, layout="fla")
  with pytest.raises(ExportError, match=r"no mixer; give those of the model: loaded\.settings"):
    hugging_face.save(tmp_path / "out", loaded.model, loaded.settings, layout="hf")
  with pytest.raises(ExportError, match="layout='gguf' is unknown"):
    hugging_face.save(tmp_path / "out", loaded.model, settings, layout="gguf")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [None, 0, 3])
def test_saved_folder_names_the_end_of_text_that_is_given(end, tmp_path):
  loaded = hugging_face.load(write(tmp_path / "theirs", "mamba", dtype=np.float32))
  settings = loaded.settings["model"]
  hugging_face.save(tmp_path / "ours", loaded.model, settings, layout="hf", end_of_text=end)
  config = json.loads((tmp_path / "ours" / "config.json").read_text())
  assert config.get("eos_token_id", "none") == ("none" if end is None else end)


def test_generation_settings_are_those_of_the_folder(tmp_path):
  folder = write(tmp_path, "llama", dtype="f4")
  text = {"do_sample": False, "max_new_tokens": 3, "eos_token_id": [2, 5], "top_k": 0, "min_p": 0.5}
  (folder / "generation_config.json").write_text(json.dumps(text))
  loaded = hugging_face.load(folder)
  assert loaded.settings["sample"] == {
    "tokens": 3,
    "temperature": 0,
    "min_p": 0.5,
    "stop_tokens": (2, 5),
  }
  # Of all tokens, where the vocabulary has fewer than the 50 that would be drawn from.
  (folder / "generation_config.json").write_text('{"do_sample": true}')
  assert "top_k" not in hugging_face.load(folder).settings["sample"]


DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ({"temperature": 0.7}, {"temperature": 0}),
    ({}, {"temperature": 0}),
    ({"do_sample": True}, DRAWN),
    ({"do_sample": True, "temperature": 0.7, "top_p": None}, DRAWN | {"temperature": 0.7}),
    ({"do_sample": True, "top_k": 20, "top_p": 0.9}, DRAWN | {"top_k": 20, "top_p": 0.9}),
    ({"do_sample": True, "top_k": 0}, {"temperature": 1.0, "top_p": 1.0}),
    ({"do_sample": True, "top_k": None}, {"temperature": 1.0, "top_p": 1.0}),
  ],
)
def test_generation_has_the_defaults_of_transformers(text, found, tmp_path):
  """Without `do_sample` it is greedy; with it nothing is left to the defaults of our own runs."""
  (tmp_path / "generation_config.json").write_text(json.dumps(text))
  assert folders.sample(tmp_path, {}) == found


@pytest.mark.parametrize(
  ("of_config", "of_generation", "stops"),
  [
    ([1, 8, 9], None, (1, 8, 9)),  # without generation_config.json
    ([1, 8, 9], {}, (1, 8, 9)),
    (1, {"eos_token_id": 7}, (7,)),
    (1, {"eos_token_id": [9, 7]}, (9, 7)),
    (None, {}, None),
  ],
)
def test_generated_text_ends_where_transformers_ends_it(of_config, of_generation, stops, tmp_path):
  if of_generation is not None:
    (tmp_path / "generation_config.json").write_text(json.dumps(of_generation))
  assert folders.sample(tmp_path, {"eos_token_id": of_config}).get("stop_tokens") == stops
