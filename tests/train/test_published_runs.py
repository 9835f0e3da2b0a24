"""Published models as runs, and runs as folders of other projects."""

import dataclasses
import json

import numpy as np
import pytest

import lnssm_jax
import train
from lnssm_jax.pretrained import ExportError, hugging_face, safetensors
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from tests.pretrained.published import recorded, write
from train import config, loop
from train.cli.main import main
from train.runs.importing import import_model


def with_bytes(folder, case):
  """A recorded model with a vocabulary for bytes."""
  ends = [n for n in recorded(case).tensors if "embed" in n or "lm_head" in n]
  tensors = {name: np.resize(recorded(case).tensors[name], (257, 8)) for name in ends}
  config = {"vocab_size": 257, "max_position_embeddings": 64}
  return write(folder, case, dtype=np.float32, config=config, tensors=tensors)


@pytest.mark.parametrize(
  ("case", "layout"),
  [
    ("llama_scaled", "hf"),
    ("fla_gla", "fla"),
    pytest.param("bamba", "hf", marks=pytest.mark.slow),
    pytest.param("qwen3_next", "hf", marks=pytest.mark.slow),
    pytest.param("fla_gla_attn", "fla", marks=pytest.mark.slow),
    pytest.param("llama_yarn", "hf", marks=pytest.mark.slow),
  ],
)
def test_published_model_as_a_run_exports_the_bytes_that_it_had(case, layout, tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", case)
  model = config.published_model(folder, dtype="float32", remat="full")
  layers = recorded(case).config["num_hidden_layers"]
  assert (model.dim, model.num_layers, model.dtype) == (8, layers, "float32")
  cfg = dataclasses.replace(tiny(), model=model)
  assert import_model(folder, cfg) == 0
  out = tmp_path / "ours"
  assert main(["export", cfg.run_dir, "--out", str(out), "--layout", layout]) == 0
  ours, theirs = (safetensors.Tensors(f / "model.safetensors") for f in (out, folder))
  assert {n: ours[n].tobytes() for n in ours} == {n: theirs[n].tobytes() for n in theirs}
  assert not hugging_face.differences(*map(hugging_face.settings_of, (out, folder)))
  assert '"eos_token_id": 256' in (out / "config.json").read_text()


def test_published_model_is_scored_by_tasks(tmp_path, monkeypatch, capsys):
  folder, text = with_bytes(tmp_path / "theirs", "fla_gla"), tmp_path / "a.txt"
  text.write_text("some text")
  loaded = train.load_model(folder)
  monkeypatch.setattr(type(loaded), "tokenizer", ByteTokenizer())
  assert main(["task", "lm", str(folder), str(text)]) == 0
  assert f"{lnssm_jax.score(loaded, 'some text').perplexity:.4f}" in capsys.readouterr().out
  with pytest.raises(ExportError, match=r"has the model of step 0, not of step 3"):
    train.load_model(folder, step=3)


def test_import_of_a_published_model_that_the_config_does_not_describe_raises(tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", "llama")
  model = dataclasses.replace(config.published_model(folder), norm_eps=1e-5)
  with pytest.raises(ExportError, match=r"norm_eps: 1e-06, 1e-05; use model=published_model\('"):
    import_model(folder, dataclasses.replace(tiny(), model=model))
  assert not (tmp_path / "run").exists()


def test_published_model_takes_another_length_and_what_cannot_be_trained_raises(tmp_path):
  folder = write(tmp_path / "llama", "llama", dtype=np.float32)
  model = config.published_model(folder, max_length=64)
  assert model.mixer_options["max_length"] == 64
  folder = write(tmp_path / "gemma", "recurrent_gemma", dtype=np.float32)
  with pytest.raises(config.ConfigError, match="embedding_scale can be loaded, but not trained"):
    config.published_model(folder)


@pytest.mark.slow
def test_import_trains_on_longer_rows_and_leaves_frozen_parts_as_they_were(tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", "llama")
  model = config.published_model(folder, dtype="float32", max_length=128)
  cfg = tiny(seq_len=96, steps=2, eval_every=2, checkpoint_every=2)
  optimizer = dataclasses.replace(cfg.optimizer, lr_factors={"blocks.mixer.*": 0.0})
  cfg = dataclasses.replace(cfg, model=model, optimizer=optimizer)
  assert import_model(folder, cfg) == 0
  assert loop.fit(cfg).step == 2
  out = tmp_path / "ours"
  assert main(["export", cfg.run_dir, "--out", str(out), "--layout", "hf"]) == 0
  assert json.loads((out / "config.json").read_text())["max_position_embeddings"] == 128
  ours, theirs = (safetensors.Tensors(f / "model.safetensors") for f in (out, folder))
  equal = {name: ours[name].tobytes() == theirs[name].tobytes() for name in theirs}
  assert {name for name, same in equal.items() if same} == {n for n in equal if "self_attn" in n}


@pytest.mark.slow
def test_export_of_a_run_that_no_family_has_raises(tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", "llama")
  cfg = dataclasses.replace(tiny(), model=config.published_model(folder))
  import_model(folder, cfg)
  assert main(["export", cfg.run_dir, "--out", str(tmp_path / "x"), "--layout", "mamba_ssm"]) == 2
  assert not (tmp_path / "x").exists()
