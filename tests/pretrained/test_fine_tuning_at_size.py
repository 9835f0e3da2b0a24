"""docs/fine_tuning.md with the exact sizes of Qwen3.5-0.8B in bfloat16, each stage a process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lnssm_jax.pretrained import exports, folders
from lnssm_jax.pretrained.families import family_of, layers
from tests.pages import blocks_of
from tests.pretrained.test_chat import PAGE, of_qwen_0_8b

ROOT = Path(__file__).parents[2]
SMALL = ["seq_len=96", "global_batch=1", "steps=1", "eval_every=1", "checkpoint_every=1"]
SMALL += ["compile_cache=None"]
WRITE = """
from pathlib import Path
from tests.pretrained import test_fine_tuning_at_size
test_fine_tuning_at_size.write_tensors(Path("Qwen3.5-0.8B"))
"""
OPEN = """
import sys
from lnssm_jax import pretrained
adapter = {"adapter": sys.argv[2]} if len(sys.argv) > 2 else {}
loaded = pretrained.load(sys.argv[1], max_length=256, **adapter)
prompt = loaded.chat_prompt([{"role": "user", "content": "Which river is in Cologne?"}])
print(repr(loaded.generate(prompt, max_tokens=2, temperature=0)))
"""


def write_tensors(folder):
  """Writes random tensors of the text model in bfloat16."""
  config = folders.config(folder)
  family = family_of(config)
  settings = family.settings(config) | {"param_dtype": "bfloat16"}
  leaves = exports.flat(exports.abstract_params(settings))
  shapes = {name: x.shape for name, x in leaves.items()}
  pieces = [p for x in layers.parameters(family, settings, shapes) for y in x.layers for p in y]
  rng, tensors = np.random.default_rng(0), {}
  for name, shape in {piece.theirs: piece.shape for piece in pieces}.items():
    x = rng.standard_normal(shape, np.float32)
    x *= 0.02
    tensors[name] = x.astype(ml_dtypes.bfloat16)
  assert sum(x.nbytes for x in tensors.values()) == 2 * 752_393_024
  save_file(tensors, folder / folders.TENSORS)


@pytest.mark.slow
def test_commands_of_the_page_at_the_size_of_qwen3_5_0_8b_stay_below_12_gib(tmp_path):
  pytest.importorskip("jinja2", reason="the extra `chat` is not installed")
  of_qwen_0_8b(tmp_path / "Qwen3.5-0.8B")
  (tmp_path / "chat.py").write_text(blocks_of(PAGE)[-4])
  (tmp_path / "open.py").write_text(OPEN)
  answer = {"role": "assistant", "content": "The Rhine."}
  row = {"messages": [{"role": "user", "content": "Which river is in Cologne?"}, answer]}
  (tmp_path / "chats.jsonl").write_text((json.dumps(row) + "\n") * 2)
  peaks = {}

  def run(name, *words):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
      [sys.executable, *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
      output = process.stdout.read()
      _, status, usage = os.wait4(process.pid, 0)
      process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    peaks[name] = usage.ru_maxrss / 2**20
    print(f"{name:40} {peaks[name]:.1f} GiB", flush=True)

  # Not in this process, whose memory would be the least of all that it starts.
  run("write random weights", "-c", WRITE)
  run("load, generate", "open.py", "Qwen3.5-0.8B")
  small = [word for setting in SMALL for word in ("--set", setting)]
  commands = re.findall(r"^    lnssm-train (.*)", PAGE, re.MULTILINE)
  for command in commands[1:5]:  # not the dry run, which another test has
    words = command.split()
    run(command, "-m", "train", *words, *(small if "--config" in words else []))
  metrics = [
    json.loads(x) for x in (tmp_path / "runs/chats/metrics.jsonl").read_text().splitlines()
  ]
  losses = [row["loss"] for row in metrics if row["kind"] == "train"]
  assert len(losses) == 1 and abs(losses[0] - np.log(248_320)) < 0.5
  run("load with adapter, generate", "open.py", "Qwen3.5-0.8B", "adapter")
  run("load merged, generate", "open.py", "merged")
  assert (tmp_path / "merged" / folders.TENSORS).stat().st_size > 4 * 752_393_024  # float32
  assert max(peaks.values()) < 12
