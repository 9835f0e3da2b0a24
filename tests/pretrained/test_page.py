"""docs/pretrained.md: its program runs, and it lists every family and every recorded model."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from lnssm_jax import pretrained
from lnssm_jax.pretrained.families import FAMILIES
from tests.pages import blocks_of
from tests.pretrained import settings_page
from tests.pretrained.published import CASES, REAL, recorded, write
from train.cli.main import main
from train.data.tokenizers import train_bpe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pretrained.md").read_text()
SMALL = ["seq_len=8", "global_batch=2", "steps=2", "sample.tokens=0", "eval_tokens=16"]
SMALL += ["eval_every=2", "checkpoint_every=2", "compile_cache=None"]


def test_page_lists_every_family_and_recorded_model():
  (table,) = re.findall(r"^## Families\n.*?---\|\n(.*?)\n\n", PAGE, re.DOTALL | re.MULTILINE)
  rows = [row.split("|") for row in table.splitlines()]
  names = {re.findall(r"`(\w+)`", row[1])[0] for row in rows if row[1].startswith(" `")}
  assert names == {family.name for family in FAMILIES if not family.name.endswith("_ssm")}
  assert "`ssm_cfg`" in table
  cases = {case for row in rows for case in re.findall(r"`(\w+)`", row[4])}
  hybrids = {case for case in CASES if case.endswith("_attn")}
  assert cases | hybrids == set(CASES)
  count = len(names)
  assert f"| {count} families" in (ROOT / "docs" / "comparison.md").read_text()


def test_page_has_what_becomes_of_every_setting():
  lines = PAGE.splitlines()
  assert [row for row in settings_page.rows() if row not in lines and row] == []
  tables = PAGE.split("## What is checked")[1].split("## ")[0]
  told = [line for line in tables.splitlines() if line.startswith(("| `", "| all"))]
  assert told == [row for row in settings_page.rows() if row]
  assert f"those of {len(REAL)} models and versions" in PAGE
  tried = PAGE.split("## Published settings ")[1].split("---|\n")[1].split("\n\n")[0]
  rows = [row.split("|") for row in tried.splitlines()]
  assert sorted(x for row in rows for x in re.findall(r"`([^`/]+)`", row[2])) == REAL
  families = {x for row in rows for x in re.findall(r"`(\w+)`", row[1])}
  others = {"qwen3_5_text", "qwen3_5_moe_text", "mamba_ssm", "mamba2_ssm"}
  of_fla = {x.name for x in FAMILIES if x.layout == "fla" and x.name != "rwkv7"}
  assert families == {family.name for family in FAMILIES} - others - of_fla


def folder_of_bytes(path: Path, case: str, **config) -> None:
  """A recorded model with a vocabulary of bytes, a tokenizer and settings of generation."""
  tensors = recorded(case).tensors
  ends = {name: np.resize(x, (257, 8)) for name, x in tensors.items() if x.shape == (11, 8)}
  if config.get("num_hidden_layers") == 4:  # of 2 that are recorded
    ends |= {
      re.sub(r"layers\.([01])\.", lambda m: f"layers.{int(m[1]) + 2}.", x): tensors[x]
      for x in tensors
      if "layers." in x
    }
  write(path, case, dtype=np.float32, config={"vocab_size": 257, **config}, tensors=ends)
  train_bpe("bpe:257", path, ["the capital of the river"] * 3)
  (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.5}))


@pytest.mark.slow
def test_program_and_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").mkdir()
  shutil.copy(ROOT / "configs" / "quickstart.py", "configs")
  folder_of_bytes(tmp_path / "mamba-130m-hf", "mamba")
  folder_of_bytes(tmp_path / "llama", "llama")
  twice = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
  folder_of_bytes(tmp_path / "qwen3", "qwen3", **twice)
  program = {}
  blocks = blocks_of(PAGE)
  for block in blocks:
    exec(compile(block, "docs/pretrained.md", "exec"), program)
  assert program["sampling"]["temperature"] == 0.5
  assert pretrained.load("copy", dtype="bfloat16").settings["model"] == program["settings"]
  (shown,) = re.findall(r"len\(not_kept\[1\]\)\)  # (.*)", PAGE)
  *_, last, of_kda = capsys.readouterr().out.splitlines()
  assert last.endswith(shown)
  (listed,) = re.findall(r"^print\(\*sorted.*\n((?:# .*\n)+)", PAGE, re.MULTILINE)
  assert of_kda.split() == listed.replace("#", "").split()

  (config,) = (block for block in blocks if "get_config" in block)
  Path("more.py").write_text(config)
  (commands,) = re.findall(r"((?:^    lnssm-train .*\n)+)", PAGE, re.MULTILINE)
  ran = [line.split()[1:] for line in commands.splitlines()]
  assert [words[0] for words in ran] == ["import", "fit", "export"]
  small = [word for setting in SMALL for word in ("--set", setting)]
  for words in ran:
    assert main([*words, *(small if "--config" in words else [])]) == 0, capsys.readouterr().err
  exported = pretrained.load("folder").settings["model"]
  assert exported["mixer_options"]["max_length"] == 4096
