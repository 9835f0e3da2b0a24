"""Runs with the data protocols of papers: what is trained on, what a validation loss is."""

import json
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

from train import trainer
from train.cli.main import main
from train.cluster.device_mesh import make_mesh
from train.config import ConfigError, Data
from train.config.changes import differences, is_free
from train.data import IndexedDataset, IndexedWriter
from train.data.windows import RandomCrops, TokenWindows, train_batches
from train.runs import evaluation
from train.runs.evaluation import Evaluator
from train.runs.run_folder import RunFolder
from train.step.model import model_graph

PROTOCOL = {"data__boundaries": "ignore", "data__order": "random_crops"}


def test_document_loss_is_mean_over_documents(tiny, write_documents):
  """Documents of 1 to 60 tokens, cut to 20, each through the model alone."""
  cfg = tiny(data__weighting="documents", data__document_length=20, data__folder=write_documents)
  mesh, graph = make_mesh(cfg), model_graph(cfg.model)
  params = trainer.init_state(cfg, mesh)["params"]
  (row,) = Evaluator(cfg, graph, mesh)(7, params)

  model = nnx.merge(graph, params)
  call = jax.jit(lambda ids: jax.nn.log_softmax(model(ids)[0]))
  means, count, pair = [], 0, IndexedDataset(f"{write_documents}/validation")
  for number in range(pair.num_sequences):
    ids = pair.sequence(number)[:20].astype(np.int32)
    if len(ids) > 1:
      padded = np.pad(ids, (0, 20 - len(ids)))  # causal: one program for all lengths
      log_p = np.asarray(call(padded[None])[0], np.float64)
      means.append(-np.mean(log_p[np.arange(len(ids) - 1), ids[1:]]))
      count += len(ids) - 1
  assert row["val_loss"] == pytest.approx(np.mean(means), rel=1e-6)
  assert np.std(means) > 0.01
  assert (row["tokens"], row["documents"], row["bits_per_byte"]) == (count, len(means), None)


def test_loss_of_random_crops_is_that_of_each_crop(tiny):
  cfg = tiny(data__weighting="crops", eval_tokens=75, data__boundaries="ignore")
  trainer.prepare(cfg.data)
  mesh, graph = make_mesh(cfg), model_graph(cfg.model)
  params = trainer.init_state(cfg, mesh)["params"]
  evaluator = Evaluator(cfg, graph, mesh)
  (row,), (again,) = evaluator(7, params), evaluator(8, params)
  assert again == row | {"step": 8}

  T, V = cfg.seq_len, cfg.model.vocab_size
  crops = RandomCrops(TokenWindows(f"{cfg.data.folder}/validation", T, V, "ignore"), cfg.seed)
  crops = [crops[i] for i in range(-(-75 // T))]
  assert row["tokens"] == len(crops) * T
  model = nnx.merge(graph, params)
  log_p = jax.nn.log_softmax(model(np.stack([crop["tokens"] for crop in crops]))[0])
  targets = np.stack([crop["targets"] for crop in crops])
  mean = -np.take_along_axis(np.asarray(log_p, np.float64), targets[..., None], axis=-1).mean()
  assert row["val_loss"] == pytest.approx(mean, rel=1e-6)


def test_random_crops_of_evaluation_are_drawn_by_the_seed_of_the_run(tiny):
  trainer.prepare(tiny().data)
  drawn = []
  for seed in (0, 3):
    cfg = tiny(data__weighting="crops", eval_tokens=75, seed=seed)
    source = evaluation.open_sets(cfg)["validation"]
    windows = TokenWindows(f"{cfg.data.folder}/validation", cfg.seq_len, 257)
    for i in range(9):
      np.testing.assert_array_equal(source[i]["tokens"], RandomCrops(windows, seed)[i]["tokens"])
    drawn.append([source[i]["tokens"].tolist() for i in range(9)])
  assert drawn[0] != drawn[1]


def test_sets_are_opened_as_the_settings_say(tiny):
  """Rows of prompts whole, alone in their windows or not; a mixture in the order of the config."""
  opened = []

  def watched(prefixes, *how, **options):
    opened.append((prefixes, how, options))

  train = {"b": 1.0, "a": 3.0}
  fields, targets = {"a": ("prompt", "completion")}, {"d": "last"}
  for packed in (True, False):
    data = {"train": ("b", "a", "d"), "fields": fields, "targets": targets, "pack_rows": packed}
    data |= {"folder": "f", "tokenizer": "bytes", "boundaries": "ignore"}
    with mock.patch.object(trainer, "TokenWindows", watched):
      trainer.training_set(tiny(data=data))
    assert opened.pop() == (
      ["f/b", "f/a", "f/d"],
      (32, 257, "ignore"),
      {"whole": [False, True, True], "packed": packed},
    )
  with mock.patch.object(trainer, "TokenWindows", watched):
    mixture = trainer.training_set(tiny(data=data | {"train": train, "targets": {}}))
  assert [prefixes for prefixes, *_ in opened] == [["f/b"], ["f/a"]]
  assert mixture.shares == {"b": 0.25, "a": 0.75} and list(mixture.sets) == ["b", "a"]


def test_loss_of_random_crops_needs_a_number_of_tokens(tiny):
  with pytest.raises(ConfigError, match=r"data\.weighting='crops' has no end; give eval_tokens"):
    tiny(data__weighting="crops")


@pytest.fixture
def write_documents(tmp_path):
  """The folder of a validation set whose documents have many lengths."""
  rng = np.random.default_rng(0)
  with IndexedWriter(tmp_path / "validation", "uint16") as writer:
    for size in (1, 2, 3, 20, 21, 60, 5):
      writer.add_document(rng.integers(0, 257, size))
  return str(tmp_path)


@pytest.mark.slow
def test_run_reads_its_protocol_and_evaluates_by_another(tiny, capsys):
  cfg = tiny(steps=2, log_every=1, **PROTOCOL)
  seen = []

  def watched(windows, **options):
    seen.append((windows, options))
    return train_batches(windows, **options)

  with mock.patch.object(trainer, "train_batches", watched):
    (row,) = trainer.fit(cfg).validation
  ((windows, options),) = seen
  assert options["order"] == "random_crops"
  assert all((windows[i]["weights"] == 1).all() for i in range(len(windows)))
  assert "epochs of random crops in 2 steps" in capsys.readouterr().out
  # Every target of the validation windows counts, those across boundaries too.
  tokens = IndexedDataset(f"{cfg.data.folder}/validation").num_tokens
  assert row["tokens"] == (tokens - 1) // cfg.seq_len * cfg.seq_len

  by_documents = ("--set", "data.weighting=documents", "--set", "data.document_length=10")
  assert main(["evaluate", "--run-dir", cfg.run_dir, "--json", *by_documents]) == 0
  (found,) = json.loads(capsys.readouterr().out)
  assert (found["documents"], found["tokens"]) == (8, 8 * 9)
  assert found["val_loss"] != row["val_loss"]
  assert main(["evaluate", "--run-dir", cfg.run_dir, *by_documents]) == 0
  assert capsys.readouterr().out.splitlines()[1].split()[2] == "-"


def test_other_protocol_is_another_run(tiny):
  """A run keeps its protocol; the folder of a run from before the choice has the default."""
  cfg, run = tiny(), RunFolder(tiny().run_dir)
  changed = differences(cfg, tiny(**PROTOCOL))
  assert changed.keys() == {"data.boundaries", "data.order"} and not any(map(is_free, changed))
  run.path.mkdir()
  run.write_config(cfg)
  file = run.config_file
  values = json.loads(file.read_text())
  for name in ("boundaries", "order", "weighting", "document_length"):
    del values["data"][name]
  for name in ("embedding_dropout", "residual_dropout", "drop_path"):
    del values["model"][name]
  file.write_text(json.dumps(values))
  assert run.load_config() == cfg


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"order": "sorted"}, "data.order='sorted' is not a choice"),
    ({"document_length": 9}, "data.document_length=9 belongs to data.weighting='documents'"),
    ({"weighting": "documents", "document_length": 1}, "data.document_length=1 must be at least 2"),
  ],
)
def test_wrong_protocol_rejected(changes, message):
  with pytest.raises(ConfigError, match=message):
    Data(folder="-", tokenizer="bytes", train=("a",), **changes)


def test_document_length_must_be_divisible_like_a_sequence(tiny, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: [mock.Mock(device_kind="cpu")] * 4)
  cfg = tiny(data__weighting="documents", data__document_length=30, mesh__sequence=4)
  with pytest.raises(ValueError, match=r"data\.document_length=30 cannot .*_length=28, or another"):
    make_mesh(cfg)
