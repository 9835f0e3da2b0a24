"""`task cost`: the printed tables, and whole models by direct sums."""

from fractions import Fraction

import pytest

from tests.train.test_copies import settings
from train import config
from train.cli.main import main
from train.scoring import cost
from train.step import flops

PAPER = config.Model(dim=512, num_layers=6, num_heads=4, vocab_size=50277)


def test_published_scope_gives_the_printed_digits():
  rows = cost.run(PAPER).tables["published scope, GMAC"]
  for row in rows:
    for name, printed in (("attention, cache", "printed, cache"), ("state", "printed, state")):
      assert f"{row[name]:.2f}" == f"{row[printed]:.2f}", row
  assert [row["printed, cache"] for row in rows] == [1.41, 3.22, 8.06]


def test_attention_without_a_cache_repeats_all_tokens():
  model = config.Model(mixer="lrn", dim=16, num_layers=2, num_heads=2, vocab_size=31)
  (row,) = cost.run(model, [5]).tables["whole model, GFLOP"]
  head = 2 * 16 * 31
  twin = config.Model(
    **config.to_dict(model) | {"mixer": "softmax_attention", "mixer_options": {"max_length": 5}}
  )
  per_token = [flops.model_flops_per_token(twin, n) - head for n in range(1, 6)]
  again = sum(n * each + head for n, each in enumerate(per_token, 1))
  assert row["attention"] == pytest.approx(again / 1e9, rel=1e-6)
  assert row["model"] == pytest.approx(5 * flops.model_flops_per_token(model, 5) / 1e9)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 100])
def test_closed_forms_are_the_sums_over_all_tokens(length):
  tables = cost.run(PAPER, [length]).tables
  tokens = range(1, length + 1)
  cached = [6 * (3 * 512**2 * n + 512 * n * (n + 1)) for n in tokens]
  assert tables["published scope, GMAC"][0]["attention"] == sum(cached) / 10**9
  attention = cost._with_attention(PAPER, length)
  first, mean = (flops.model_flops_per_token(attention, n) for n in (1, length))
  head, rise = 2 * 512 * 50277, Fraction(mean - first, max(1, length - 1))
  again = sum(n * (first + (n - 1) * rise - head) + head for n in tokens)
  assert tables["whole model, GFLOP"][0]["attention"] == float(again / 10**9)


def test_length_of_any_size_ends():
  tables = cost.run(PAPER, [10**15]).tables
  assert tables["published scope, GMAC"][0]["attention"] == pytest.approx(6 * 512 / 3 * 1e36)
  assert tables["whole model, GFLOP"][0]["attention"] > 2 * 6 * 512 / 3 * 1e36


def test_memory_is_that_of_parameters_state_and_cache():
  rows = cost.run(PAPER, [1024, 7]).tables["memory of one sequence, MB"]
  assert rows[0]["state"] == rows[1]["state"] == 6 * (65536 + 512 + 512) * 4 / 1e6
  assert rows[0]["parameters"] == 71_963_648 * 4 / 1e6
  # Keys and values of bfloat16, and a position of 4 bytes per layer.
  assert rows[0]["cache of attention"] == pytest.approx(6 * 2 * 1024 * 512 * 2 / 1e6, rel=1e-2)
  assert rows[0]["printed, state"] == 500 and rows[1]["printed, state"] is None
  other = config.Model(**config.to_dict(PAPER) | {"num_layers": 1})
  assert cost.run(other, [1024]).tables["published scope, GMAC"][0]["printed"] is None


def test_length_beyond_the_positions_of_a_model_raises():
  model = config.Model(**config.to_dict(PAPER) | {"learned_positions": 100})
  with pytest.raises(config.ConfigError, match=r"lengths=101 is more than .*positions=100; use"):
    cost.run(model, [101, 100])


def test_command_prints_the_tables_of_a_config(tmp_path, capsys):
  config_file = tmp_path / "tiny.py"
  config_file.write_text(
    "from tests.train.test_copies import settings\n\n\ndef get_config():\n  return settings()\n"
  )
  assert main(["task", "cost", "--config", str(config_file), "--lengths", "9"]) == 0
  assert capsys.readouterr().out.startswith(f"cost, mixer {settings().model.mixer}, layers")
  assert main(["task", "cost"]) == 2
  assert "use either --run-dir" in capsys.readouterr().err
