"""Runs whose layers are a table: mixers side by side, a shared block, two channel mixers."""

import jax
import numpy as np
import pytest

from train import load_model, trainer
from train.runs.run_folder import RunFolder

PARTS = {"lrn": {}, "softmax_attention": {"num_kv_heads": 1, "max_length": 64}}
TABLE = {
  "model__num_layers": 4,
  "model__mixer": ("parallel", "none", "after_shared"),
  "model__mixer_options": {
    "parallel": {"mixers": PARTS, "output_scales": {"lrn": 0.5}},
    "after_shared": {"mixers": {"lrn": {}}, "hidden": 16, "rank": 2, "max_length": 64},
  },
  "model__channel_mixer": ("none", "moe", "swiglu"),
  "model__channel_hidden": 16,
  "model__channel_mixer_options": {"moe": {"num_experts": 4, "hidden": 8, "balance_bias": True}},
  "model__norm_place": ("before", "after", "before"),
  "model__norm": "rms",
}


@pytest.mark.slow
def test_run_of_a_layer_table_learns_and_resumes_bit_exact(tiny, fit_and_kill, tmp_path):
  """Four layers of a pattern of three: the last is of the first kind again."""
  whole = tiny(**TABLE, run_dir=str(tmp_path / "whole"))
  trainer.fit(whole)
  rows = RunFolder(whole.run_dir).read_rows()
  losses = [row["loss"] for row in rows if row["kind"] == "train"]
  assert np.mean(losses[-3:]) < losses[0] - 0.1
  first = next(row for row in rows if row["kind"] == "train")
  assert [of["layer"] for of in first["aux"]] == [1] and len(first["aux"][0]["share"]) == 4
  parts = tiny(**TABLE, run_dir=str(tmp_path / "parts"))
  fit_and_kill(parts, at=8)
  trainer.fit(parts)
  want, got = (load_model(cfg.run_dir) for cfg in (whole, parts))
  jax.tree.map(np.testing.assert_array_equal, want.model, got.model)
  text = want.generate("the ", max_tokens=4, temperature=0)
  assert text == "".join(want.stream("the ", want.options(max_tokens=4, temperature=0)))
