"""Settings as `--help` lists and `init` writes them, and names that other libraries use."""

import re
from pathlib import Path

import pytest

from experiments import command as experiments
from experiments.vision.settings import Vision
from train import config
from train.cli.main import main
from train.config import apply_overrides, checked, loading
from train.config.listing import groups, listing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", [config.Train, Vision])
def test_listing_every_setting_has_a_meaning(kind):
  entries = [entry for _, entries in groups(kind) for entry in entries]
  assert [entry.name for entry in entries if not entry.meaning] == []
  text = listing(kind)
  assert all(f"\n  {entry.name}  (" in text for entry in entries)


def test_listing_has_types_defaults_and_comments_of_settings():
  entries = {entry.name: entry for _, entries in groups(config.Train) for entry in entries}
  assert entries["model.tie_embeddings"][1:] == (
    "bool",
    "False",
    "the output head is the transposed embedding",
  )
  assert entries["steps"].default is None
  assert entries["compile_cache"].meaning.startswith("Folder of compiled programs; runs may share")
  assert entries["optimizer.schedule"].default == "'exponential'"  # over several lines
  assert entries["optimizer.schedule"].meaning == "From peak_lr to final_lr."


def test_help_of_fit_and_classify_lists_their_settings(capsys):
  for run, command, name in (
    (main, "fit", "data.boundaries"),
    (experiments.main, "classify", "augment.repeats"),
  ):
    with pytest.raises(SystemExit):
      run([command, "--help"])
    assert f"\n  {name}  (" in capsys.readouterr().out


def test_init_writes_a_config_with_all_settings(tmp_path, capsys):
  path = tmp_path / "mine.py"
  assert main(["init", str(path)]) == 0
  written = config.load_config(path)
  assert (written.run_dir, written.model.vocab_size) == ("runs/mine", 257)
  assert written.data.sources["train"] == "python-stdlib"
  # A line for each setting, which needs only its # taken away.
  text = path.read_text()
  active = tmp_path / "active.py"
  active.write_text(re.sub(r"^( +)# (\w+=)", r"\1\2", text, flags=re.M))
  assert config.load_config(active) == written
  assert active.read_text() != text
  assert main(["init", str(path)]) == 2
  assert "mine.py exists; give another name" in capsys.readouterr().err
  assert path.read_text() == text
  assert main(["init", str(tmp_path / "mine.txt")]) == 2
  assert "must end in .py" in capsys.readouterr().err
  assert main(["init", str(tmp_path / "configs" / "other")]) == 0
  other = tmp_path / "configs" / "other.py"
  assert capsys.readouterr().out == f"{other}\n"
  assert config.load_config(other).run_dir == "runs/other"


def test_names_of_other_libraries_are_answered_with_ours(tiny):
  with pytest.raises(config.ConfigError, match=r"no setting 'lr'; here it is 'optimizer.peak_lr'"):
    apply_overrides(tiny(), ["lr=1e-3"])
  with pytest.raises(config.ConfigError, match=r"'model.d_model'; here it is 'model.dim'"):
    apply_overrides(tiny(), ["model.d_model=8"])
  entries = {entry.name for _, entries in groups(config.Train) for entry in entries}
  for ours in checked._ELSEWHERE.values():
    assert re.findall(r"'([\w.]+)'", ours)[0] in entries, ours
  assert not checked._ELSEWHERE.keys() & entries


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    ("num_epochs=3", "no setting 'num_epochs' in Vision; did you mean 'epochs'?"),
    ("total_steps=3", "no setting 'total_steps' in Vision; known are model, "),
    ("dropout=0.1", "no setting 'dropout'; here it is 'model.residual_dropout' (also embedding"),
    ("model.dropout=0.1", "no setting 'model.dropout'; here it is 'model.residual_dropout' (also"),
    ("lr=1e-3", "no setting 'lr'; here it is 'optimizer.peak_lr'."),
    ("model.n_layers=3", "no setting 'model.n_layers'; here it is 'model.num_layers'."),
  ],
)
def test_settings_that_classifiers_lack_are_never_the_answer(assignment, message):
  cfg = loading.load(ROOT / "experiments" / "configs" / "vision.py:vil-digits", Vision)
  with pytest.raises(config.ConfigError) as caught:
    apply_overrides(cfg, [assignment])
  assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["fit", "--confg", "a.py"], "no option --confg; did you mean '--config'?"),
    (["task", "cost", "--cofig=a.py"], "no option --cofig; did you mean '--config'?"),
    (["--verson"], "no option --verson; did you mean '--version'?"),
  ],
)
def test_misspelled_option_is_named(arguments, message, capsys):
  with pytest.raises(SystemExit) as caught:
    main(arguments)
  assert caught.value.code == 2
  assert message in capsys.readouterr().err


def test_version_is_printed(capsys):
  with pytest.raises(SystemExit) as caught:
    main(["--version"])
  assert caught.value.code == 0
  assert re.fullmatch(r"lnssm_jax \d+\.\d+\.\d+\n", capsys.readouterr().out)
