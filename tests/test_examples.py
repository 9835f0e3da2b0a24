"""The scripts of examples/ run, and do what they say."""

import runpy
import sys
from pathlib import Path

import jax
import pytest
import tokenizers
from flax import nnx

from lnssm_jax import models, pretrained

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
  """Runs a script as a command; returns what it prints."""

  def run(name, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out

  return run


def losses(printed):
  return [float(line.split()[2]) for line in printed.splitlines() if "nats per" in line]


def test_every_example_is_run_and_listed():
  tested = Path(__file__).read_text()
  page = (EXAMPLES / "README.md").read_text()
  for path in EXAMPLES.glob("*.py"):
    assert f'run("{path.name}"' in tested and f"`{path.name}" in page


@pytest.mark.slow
def test_own_training_loop_lowers_the_loss(run):
  first, *_, last = losses(run("own_training_loop.py", "--steps", 21, "--rows", 2, "--dim", 32))
  assert last < first - 1


@pytest.mark.slow
def test_mixer_in_a_flax_model_recalls_the_mark(run):
  printed = run("mixer_in_a_flax_model.py")
  assert float(printed.split("accuracy ")[1].split(",")[0]) > 0.9


@pytest.mark.slow
def test_finetune_published_trains_kernels_of_layers_only(run, tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("one fish two fish red fish blue fish " * 40)
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False
  )
  tokenizer.train_from_iterator([text.read_text()], trainer)
  settings = {
    "dim": 32,
    "num_layers": 2,
    "mixer": "mamba",
    "channel_mixer": "none",
    "embedding_norm": False,
    "norm": "rms",
  }
  settings |= {"vocab_size": tokenizer.get_vocab_size(), "tie_embeddings": True}
  model = jax.jit(lambda: models.LanguageModel(**settings, rngs=nnx.Rngs(0)))()
  before, after = tmp_path / "before", tmp_path / "after"
  pretrained.save(before, model, settings, layout="hf")
  tokenizer.save(str(before / "tokenizer.json"))

  sizes = ("--steps", 11, "--rows", 2, "--length", 16, "--learning-rate", 3e-3)
  first, last = losses(run("finetune_published.py", before, text, "--out", after, *sizes))
  assert last < first
  old, new = (
    dict(jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(pretrained.load(x).model))))
    for x in (before, after)
  )
  changed = {jax.tree_util.keystr(path) for path in old if (old[path] != new[path]).any()}
  assert changed and all("blocks" in path and "kernel" in path for path in changed)
