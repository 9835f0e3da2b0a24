"""Config files: those of the project, variants, and files that are wrong."""

import json
import re
import runpy
from pathlib import Path

import pytest

from experiments.vision.settings import Vision
from train.config import ConfigError, Train, load, load_config, to_dict

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
OF_EXPERIMENTS = sorted((ROOT / "experiments" / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS + OF_EXPERIMENTS, ids=lambda path: path.stem)
def test_config_file_builds_and_states_command(path, monkeypatch):
  monkeypatch.setenv("LNSSM_DATA", "folder")
  kind = Vision if path.stem == "vision" else Train
  commands = {"vision": "experiments classify", "mqar": "experiments mqar"}
  command = commands.get(path.stem, "train fit")
  config = load(path, kind)
  assert kind(**json.loads(json.dumps(to_dict(config)))) == config
  text = path.read_text()
  assert f"python -m {command} --config {path.relative_to(ROOT)}" in text
  assert "Measured: " in text
  first = next(iter(runpy.run_path(str(path), run_name="config").get("VARIANTS", ())), None)
  assert config.run_dir == f"runs/{path.stem}" + (f"-{first}" if first else "")


def test_config_files_exist():
  assert {"quickstart", "lnssm_72m", "lnssm_72m_books"} <= {path.stem for path in CONFIGS}


def test_config_lnssm_72m_matches_paper():
  config = load_config(ROOT / "configs/lnssm_72m.py")
  assert config.steps * config.global_batch * config.seq_len == 500 * 9990 * 1024
  model = config.model
  assert (model.num_layers, model.dim, model.num_heads, model.vocab_size) == (6, 512, 4, 50_277)


@pytest.mark.parametrize(
  ("name", "protocol"),
  [
    ("lnssm_72m.py:rwkv4", ("ignore", "random_crops", "documents")),
    ("longhorn.py:gla-120m-4096", ("ignore", "random_crops", "crops")),
    ("sse.py:gla-600m", ("reset", "windows", "tokens")),
  ],
)
def test_configs_cut_text_as_their_papers(name, protocol):
  data = load_config(ROOT / "configs" / name).data
  assert (data.boundaries, data.order, data.weighting) == protocol


def test_config_books_without_data_names_variable(monkeypatch):
  monkeypatch.delenv("LNSSM_DATA", raising=False)
  with pytest.raises(ConfigError, match="needs the environment variable LNSSM_DATA"):
    load_config(ROOT / "configs/lnssm_72m_books.py")


def test_config_books_has_50m_tokens(monkeypatch):
  monkeypatch.setenv("LNSSM_DATA", "folder")
  config = load_config(ROOT / "configs/lnssm_72m_books.py")
  assert config.steps * config.global_batch * config.seq_len == pytest.approx(50e6, rel=0.01)
  assert config.data.sources["val_wikitext103"] == str(Path("folder/lm/val_wikitext103.jsonl.xz"))


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("x = 1", "has no function get_config()"),
    ("def get_config():\n  return 3", "returned int, not a train.config.Train"),
    ("def get_config(:", "line 1: "),
    (
      "from train.config import Mesh\ndef get_config():\n  return Mesh(dat=1)",
      "did you mean 'data'?",
    ),
  ],
)
def test_config_file_invalid_rejected(tmp_path, text, message):
  path = tmp_path / "bad.py"
  path.write_text(text)
  with pytest.raises(ConfigError, match=re.escape(message)):
    load_config(path)


VARIANTS = """
from train.config import Data, Model, Optimizer, Train
VARIANTS = {"wide": 16, "narrow": 8}
def get_config(variant):
  return Train(
    model=Model(dim=VARIANTS[variant], num_layers=1, num_heads=1, vocab_size=257),
    optimizer=Optimizer(peak_lr=1, final_lr=1),
    data=Data(folder="d", tokenizer="bytes", train=("a",)),
    run_dir=variant, steps=1, seq_len=1, global_batch=1, checkpoint_every=1, eval_every=1,
  )
"""


@pytest.mark.parametrize(("suffix", "dim"), [("", 16), (":wide", 16), (":narrow", 8)])
def test_config_variant_chosen_by_name_else_first(tmp_path, suffix, dim):
  path = tmp_path / "several.py"
  path.write_text(VARIANTS)
  assert load_config(f"{path}{suffix}").model.dim == dim


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (VARIANTS, "several.py has no variant 'tall'; it has wide, narrow."),
    ("def get_config(): pass", "no variant 'tall'; it is a single config; leave the name out."),
  ],
)
def test_config_variant_unknown_lists_names(tmp_path, text, message):
  path = tmp_path / "several.py"
  path.write_text(text)
  with pytest.raises(ConfigError, match=re.escape(message)):
    load_config(f"{path}:tall")


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("configs/sweeps/lm_sse.py", "experiments/sweeps/lm_sse.py"),
    ("configs/mqar.py", "experiments/configs/mqar.py"),
  ],
)
def test_config_file_of_an_earlier_version_is_said_to_be_elsewhere(old, new):
  root = Path(__file__).parents[2]
  message = f"no config file '{root / old}': it is now {root / new}."
  with pytest.raises(FileNotFoundError, match=re.escape(message)):
    load_config(root / old)


def test_config_file_missing_lists_folder(tmp_path):
  (tmp_path / "there.py").write_text("")
  with pytest.raises(FileNotFoundError, match=r"no config file .*not\.py.*there\.py"):
    load_config(tmp_path / "not.py")
