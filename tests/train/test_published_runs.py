"""Published models as runs, and runs as folders of other projects."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

import lnssm_jax
import train
from lnssm_jax.pretrained import ExportError, hugging_face, safetensors
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from tests.pretrained.published import recorded, write
from train import config, trainer
from train.cli.main import main
from train.cluster import device_mesh
from train.data.tokenizers import train_bpe
from train.runs.importing import import_model
from train.step.model import build_model, model_graph, params_of
from train.step.train_step import make_eval_step


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
    # Dense models of Qwen3-Next, of which none is published, are written as Qwen3.5.
    pytest.param("qwen3_5_text", "hf", marks=pytest.mark.slow),
    pytest.param("fla_gla_attn", "fla", marks=pytest.mark.slow),
    pytest.param("llama_yarn", "hf", marks=pytest.mark.slow),
  ],
)
def test_published_model_as_a_run_exports_the_bytes_that_it_had(case, layout, tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", case)
  model = config.published_model(folder, dtype="float32", remat="full")
  layers = recorded(case).config["num_hidden_layers"]
  assert (model.dim, model.num_layers, model.dtype) == (8, layers, "float32")
  # Of fla the average, which begins at the model.
  ema = layout == "fla"
  cfg = dataclasses.replace(tiny(**{"optimizer__ema_decay": 0.9} if ema else {}), model=model)
  assert import_model(folder, cfg) == 0
  out = tmp_path / "ours"
  command = ["export", cfg.run_dir, "--out", str(out), "--layout", layout]
  assert main([*command, *["--ema"] * ema]) == 0
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
  found = f"{lnssm_jax.score(loaded, 'some text').perplexity:.4f}"
  assert found in capsys.readouterr().out
  assert main(["evaluate", "--run-dir", str(folder), "--input", str(text)]) == 0
  assert found in capsys.readouterr().out
  with pytest.raises(ExportError, match=r"has the model of step 0, not of step 3"):
    train.load_model(folder, step=3)


def test_import_of_a_published_model_that_the_config_does_not_describe_raises(tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", "llama")
  model = dataclasses.replace(config.published_model(folder), norm_eps=1e-5)
  with pytest.raises(ExportError, match=r"norm_eps: 1e-06, 1e-05; use model=published_model\('"):
    import_model(folder, dataclasses.replace(tiny(), model=model))
  train_bpe("bpe:257", folder, ["a b"])
  of_bytes = dataclasses.replace(tiny(), model=config.published_model(folder))
  with pytest.raises(ExportError, match=rf"use --set data\.tokenizer={folder}, and text tokenized"):
    import_model(folder, of_bytes)
  (tmp_path / "adapter").mkdir()
  (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
  with pytest.raises(ExportError, match="is an adapter, of corrections alone: add it to its model"):
    import_model(tmp_path / "adapter", of_bytes)
  assert not (tmp_path / "run").exists()


def test_published_model_takes_another_length(tmp_path):
  folder = write(tmp_path / "llama", "llama", dtype=np.float32)
  model = config.published_model(folder, max_length=64)
  assert model.mixer_options["max_length"] == 64


def test_recurrent_gemma_trains_on_the_loss_of_its_logits(tiny, tmp_path):
  """With the scale of its embedding and the soft cap of its logits."""
  folder = with_bytes(tmp_path / "theirs", "recurrent_gemma")
  model = config.published_model(folder, dtype="float32")
  assert model.embedding_scale is not None and model.logit_soft_cap == 2
  cfg = dataclasses.replace(tiny(), model=model)
  params = params_of(build_model(model, jax.random.key(0)))
  mesh, graph = device_mesh.make_mesh(cfg), model_graph(model)
  tokens = np.random.default_rng(0).integers(0, 257, (2, 9))
  params["embedding"] = params["embedding"] * 40  # logits that the cap bounds
  batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch |= {"segment_ids": np.zeros((2, 8), int), "weights": np.ones((2, 8), np.float32)}
  sums = make_eval_step(cfg, graph, mesh)(params, batch)
  logits, _ = jax.jit(lambda params: nnx.merge(graph, params)(batch["tokens"]))(params)
  assert 1.5 < np.abs(logits).max() <= 2
  log_probs = jax.nn.log_softmax(np.float64(logits))
  want = -np.take_along_axis(np.asarray(log_probs), batch["targets"][..., None], -1).sum()
  np.testing.assert_allclose(sums.nats, want, rtol=1e-5)


@pytest.mark.slow
def test_import_trains_on_longer_rows_and_leaves_frozen_parts_as_they_were(tiny, tmp_path):
  folder = with_bytes(tmp_path / "theirs", "llama")
  model = config.published_model(folder, dtype="float32", max_length=128)
  cfg = tiny(seq_len=96, steps=2, eval_every=2, checkpoint_every=2)
  optimizer = dataclasses.replace(cfg.optimizer, lr_factors={"blocks.mixer.*": 0.0})
  cfg = dataclasses.replace(cfg, model=model, optimizer=optimizer)
  assert import_model(folder, cfg) == 0
  assert trainer.fit(cfg).step == 2
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
