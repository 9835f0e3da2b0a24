"""Commands of README and docs/ run in the order of their page, on small models and texts."""

import io
import json
import lzma
import random
import shlex
import shutil
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from backports import zstd

from experiments import command as experiments
from tests.pages import blocks_of, commands_of
from tests.train.conftest import WORDS
from train.cli import main as train
from train.data.tokenizers import train_bpe

ROOT = Path(__file__).parents[2]
# Text, unless a command names its own; settings that make a config small, also those of a command.
TEXT = "data.sources.train=corpus.jsonl data.sources.validation=held.jsonl"
# By default they are those of `tiny` in conftest.py, whose programs they share.
TINY = (
  "model.mixer=lrn model.channel_mixer=none model.dim=32 model.num_layers=1 model.num_heads=2"
  " seq_len=32 global_batch=4 mesh.data=1 optimizer.logit_penalty=1e-4 sample.tokens=4"
)
SHORT = " steps=12 checkpoint_every=6 eval_every=6 log_every=6"
SMALL = {
  "configs/quickstart.py": TINY,
  "mine.py": TINY + SHORT,
  "finetune.py": "steps=2 checkpoint_every=2 seq_len=48",
  "experiments/configs/vision.py:vil-digits": "model.dim=8 model.num_layers=1 epochs=1"
  " warmup_epochs=0 global_batch=8 augment.repeats=1",
  "experiments/configs/mqar.py": "model.mixer_options={} model.mixer=lrn model.dim=16"
  " model.vocab_size=600 model.num_layers=1 global_batch=4 steps=2",
}
# Options that make a task small.
FEW = {
  "mqar": "--train-rows 8 --test-rows 4 --pairs 2",
  "listops": "--train-rows 8 --test-rows 4",
  "image": "--train-rows 8",
  "babilong": "--limit 2 --max-tokens 2",
  "babilong-samples": "--tasks qa1 --samples 20 --lengths 0 1000",
  "niah": "--samples 1",
}
# What they need is not here: images, large models, packages, several devices, a model
# with a chat template (its page has a test of its own).
LEFT_OUT = (
  "chat.py",
  "vil-tiny",
  "configs/longhorn",
  "configs/lnssm",
  "experiments rouge",
  "task lm-eval",
)
PROGRAMS = {"train": train.main, "experiments": experiments.main}
STORIES = "".join("1 Al went home.\n2 Where is Al? \thome\t1\n" for _ in range(40))


def commands(page: str) -> list[str]:
  text = (ROOT / page).read_text()
  return [line for line in commands_of(text) if not any(word in line for word in LEFT_OUT)]


def write_inputs() -> None:
  """Writes the files that the commands name: text of several kinds, a tokenizer, images."""
  rng = random.Random(0)
  texts = [" ".join(rng.choices(WORDS, k=40)) for _ in range(60)]
  rows = lambda *texts, **keys: "".join(
    json.dumps({key: text[:cut] for key, cut in keys.items()}) + "\n" for text in texts
  )
  for folder in ("dumps", "notes", "src", "tokenizers/gpt2", "babi/en", "samples"):
    Path(folder).mkdir(parents=True)
  for folder in ("configs", "experiments/configs", "experiments/sweeps"):
    shutil.copytree(ROOT / folder, folder)
  Path("corpus.jsonl").write_text(rows(*texts, text=None))
  Path("rows.jsonl").write_text(rows(*texts, text=None))
  Path("held.jsonl").write_text(rows(*texts, text=100))
  Path("chat.jsonl").write_text(rows(*texts, prompt=10, completion=20))
  Path("prompts.jsonl").write_text(rows(*texts[:2], prompt=10))
  Path("dumps/a.jsonl.zst").write_bytes(zstd.compress(rows(*texts, content=None).encode()))
  Path("wiki.jsonl.zst").write_bytes(zstd.compress(rows(*texts, text=None).encode()))
  Path("books.jsonl.xz").write_bytes(lzma.compress(rows(*texts, text=None).encode()))
  Path("lambada.jsonl.xz").write_bytes(
    lzma.compress(rows(*texts[:2], context=20, continuation=3).encode())
  )
  Path("arc_easy.jsonl").write_text(
    json.dumps({"query": "Where?", "choices": ["here", "there"], "gold": 1}) + "\n"
  )
  for name in ("fda.jsonl", "swde.jsonl"):
    Path(name).write_text(rows(*texts[:2], text=60, key=4, value=4))
  Path("samples/qa1_4k.jsonl").write_text(rows(*texts[:2], input=40, question=9, target=4))
  for split in ("test", "train"):
    Path(f"babi/en/qa1_one-fact_{split}.txt").write_text(STORIES)
  for name in ("TEXT...", "notes.txt", "notes/a.txt", "essays.txt"):
    Path(name).write_text(". ".join(texts[:8]))
  Path("notes.jsonl").write_text(rows(*(" ".join(texts[n : n + 4]) for n in range(6)), text=None))
  Path("src/a.py").write_text(f"# {texts[1]}\n")
  train_bpe("bpe:280", "tokenizers/gpt2", texts)
  train_bpe("bpe:257", ".", texts)
  shutil.move("tokenizer.json", "20B_tokenizer.json")
  arrays = {"x": np.zeros((40, 28, 28), np.uint8), "y": np.arange(40) % 10}
  np.savez(
    "mnist.npz", **{f"{s}_{name}": a for s in ("train", "test") for name, a in arrays.items()}
  )


def small(words: list[str]) -> list[str]:
  """The words of a command, with settings that make its config and its task small."""
  if "--config" in words:
    place = words.index("--config") + 2
    name = words[place - 1]
    sets = lambda text: [word for setting in text.split() for word in ("--set", setting)]
    first = sets(TEXT) if SMALL.get(name, "").startswith("model.mixer=") else []
    last = sets(SMALL.get(name) or SMALL[name.partition(":")[0]])
    words = [*words[:place], *first, *words[place:], *last]
  return [*words, *FEW.get(words[1], "").split()]


def run(line: str, monkeypatch, capsys) -> str:
  """Runs a command with less of everything, and returns its name."""
  words = shlex.split(line.partition("  # ")[0])
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the river")))
  program, *words = small(words)
  assert PROGRAMS[program](words) == 0, (line, capsys.readouterr().err)
  return words[1] if words[0] == "task" else words[0]


def test_commands_of_the_first_pages_run_in_their_order(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  write_inputs()
  monkeypatch.setitem(SMALL, "configs/quickstart.py", TINY + SHORT)
  first = "train fit --config configs/quickstart.py"  # of `make train`
  lines = [line.replace("--compare 120", "--compare 6") for line in commands("README.md")]
  done = [run(line, monkeypatch, capsys) for line in (first, *lines)]
  assert done == ["fit", "fit", "evaluate", "generate", "tokenize", "inspect", "export"]
  shutil.rmtree("exported")
  done = [run(line, monkeypatch, capsys) for line in commands("docs/quickstart.md")]
  assert done == ["init", "fit", "evaluate", "generate", "export"]


@pytest.mark.slow
def test_commands_and_program_of_the_training_page_run(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  write_inputs()
  memory = fsspec.filesystem("memory", skip_instance_cache=True)
  monkeypatch.setattr(fsspec, "filesystem", lambda *_, **__: memory)  # in place of gs://
  done = set()
  for line in commands("docs/training.md"):
    if line.startswith("train fit") and "--dry-run" not in line and "run_dir" not in line:
      shutil.rmtree("runs/quickstart", ignore_errors=True)  # each is a run of its own
    done.add(run(line, monkeypatch, capsys))
  assert {"fit", "doctor", "tokenize", "evaluate", "export", "import"} <= done
  (notebook,) = blocks_of((ROOT / "docs/training.md").read_text(), "py")
  exec(compile(notebook, "docs/training.md", "exec"), found := {})
  assert found["loaded"].step == 240


@pytest.mark.slow
def test_commands_of_the_pages_of_tasks_and_sweeps_run(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  write_inputs()
  settings = TINY.replace("mixer=lrn", "mixer=lnssm") + " steps=20"  # a mixer with scores
  monkeypatch.setitem(SMALL, "configs/quickstart.py", settings)
  for line in ("fit --config configs/quickstart.py", "export runs/quickstart --out exported"):
    run(f"train {line}", monkeypatch, capsys)
  page = (ROOT / "experiments/README.md").read_text()
  (data,) = (block for block in blocks_of(page) if "Optimizer(" in block)
  Path("finetune.py").write_text(
    data.replace('"20B_tokenizer.json"', '"bytes"')
    + "\n\nimport dataclasses\nfrom train.config import apply_overrides, load_config\n\n\n"
    "def get_config():\n"
    f"  cfg = apply_overrides(load_config('configs/quickstart.py'), {settings.split()})\n"
    "  parts = {'optimizer': optimizer, 'data': data, 'run_dir': 'runs/finetuned'}\n"
    "  return dataclasses.replace(cfg, **parts)\n"
  )
  done, later = set(), []
  for line in [*commands("docs/scoring.md"), *commands("experiments/README.md")]:
    if "runs/finetuned" in line:
      later.append(line)  # the page has it before the run that it scores
      continue
    done.add(run(line, monkeypatch, capsys))
  for line in [*later, "train sweep experiments/sweeps/mqar_dsf.py --dry-run"]:
    done.add(run(line, monkeypatch, capsys))
  assert {"mqar", "lm", "choice", "babilong", "import", "niah", "recall", "states", "cost"} <= done
  assert "classify" in done
