"""docs/training.md: its commands run in their order, on a small model, and so does its notebook."""

import io
import json
import random
import re
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from backports import zstd

from tests.train.conftest import WORDS
from train.cli.main import main
from train.data.tokenizers import train_bpe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
SMALL = {
  "configs/quickstart.py": "model.dim=16 model.num_layers=1 model.num_heads=2 seq_len=32"
  " global_batch=2 sample.tokens=4 data.sources.train=corpus.jsonl"
  " data.sources.validation=held.jsonl",
  "configs/vision.py:vil-digits": "model.dim=8 model.num_layers=1 epochs=1 warmup_epochs=0"
  " global_batch=8 augment.repeats=1",
}
# Their images and text are not here, and their models are large.
LEFT_OUT = ("vil-tiny", "configs/longhorn")


def commands() -> list[str]:
  """The page's commands, without what is before a pipe."""
  text = re.sub(r" \\\n\s*", " ", PAGE)
  lines = re.findall(r"^    (?:.*\| )?python -m train (.*)$", text, re.MULTILINE)
  return [line for line in lines if not any(word in line for word in LEFT_OUT)]


def write_inputs() -> None:
  """Writes the files that the commands name: text of several kinds, a tokenizer, images."""
  rng = random.Random(0)
  texts = [" ".join(rng.choices(WORDS, k=40)) for _ in range(60)]
  rows = lambda **keys: "".join(
    json.dumps({key: text[:cut] for key, cut in keys.items()}) + "\n" for text in texts
  )
  for folder in ("dumps", "notes", "src", "configs", "tokenizers/gpt2"):
    Path(folder).mkdir(parents=True)
  for name in ("quickstart.py", "vision.py"):
    shutil.copy(ROOT / "configs" / name, "configs")
  Path("corpus.jsonl").write_text(rows(text=None))
  Path("held.jsonl").write_text(rows(text=100))
  Path("chat.jsonl").write_text(rows(prompt=40, completion=80))
  Path("dumps/a.jsonl.zst").write_bytes(zstd.compress(rows(content=None).encode()))
  Path("wiki.jsonl.zst").write_bytes(zstd.compress(rows(text=None).encode()))
  Path("notes/a.txt").write_text(texts[0])
  Path("src/a.py").write_text(f"# {texts[1]}\n")
  train_bpe("bpe:280", "tokenizers/gpt2", texts)
  arrays = {"x": np.zeros((40, 28, 28), np.uint8), "y": np.arange(40) % 10}
  np.savez(
    "mnist.npz", **{f"{s}_{name}": a for s in ("train", "test") for name, a in arrays.items()}
  )


@pytest.mark.slow
def test_commands_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  write_inputs()
  done = []
  for line in commands():
    words = shlex.split(line)
    if words[0] == "fit" and "--dry-run" not in words and "run_dir" not in line:
      shutil.rmtree("runs/quickstart", ignore_errors=True)  # each is a run of its own
    if words[0] in ("fit", "classify", "import"):
      small = SMALL[words[words.index("--config") + 1]].split()
      words[1:1] = [word for setting in small for word in ("--set", setting)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the river")))
    assert main(words) == 0, (line, capsys.readouterr().err)
    done.append(words[0])
  assert {"fit", "doctor", "tokenize", "classify", "evaluate", "export", "import"} <= set(done)
  (notebook,) = re.findall(r"^    (import train\n(?:    .*\n)*)", PAGE, re.MULTILINE)
  exec(compile(notebook.replace("\n    ", "\n"), "docs/training.md", "exec"), found := {})
  assert found["loaded"].step == 240
