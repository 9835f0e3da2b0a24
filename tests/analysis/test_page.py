"""The examples of docs/analysis.md: three lines for a checkpoint, and what prints what it says."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from lnssm_jax.models.settings import abstract_params
from tests.pages import blocks_of
from train import config
from train.data.tokenizers import load_tokenizer
from train.runs import export

PAGE = (Path(__file__).parents[2] / "docs" / "analysis.md").read_text()
BLOCKS = blocks_of(PAGE)


def test_three_lines_find_the_slowest_head_of_an_exported_model(tmp_path, monkeypatch, capsys):
  model = config.Model(mixer="lnssm", dim=8, num_layers=3, num_heads=2, vocab_size=257)
  params = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype), abstract_params(config.to_dict(model))
  )
  params["blocks"]["mixer"]["w"][:] = 0  # a decay of exp(-1)
  params["blocks"]["mixer"]["w"][1, 4:] = -3.0
  export.write(tmp_path / "exported", model, params, load_tokenizer("bytes"), 20)
  assert len(re.findall(r"^.", BLOCKS[0], re.MULTILINE)) == 3
  monkeypatch.chdir(tmp_path)
  exec(compile(BLOCKS[0], "docs/analysis.md", "exec"), {})
  printed = capsys.readouterr().out
  assert printed.startswith("SlowestHead(layer=1, head=1, half_life=13.9")  # log 2 * exp(3)


@pytest.mark.slow
def test_example_of_the_page_prints_what_it_says(capsys):
  code = "".join(BLOCKS[1:])
  exec(compile(code, "docs/analysis.md", "exec"), {})
  printed = capsys.readouterr().out.splitlines()
  assert len(printed) == code.count("print(")
  for line in printed:
    assert f"# {line}" in code
