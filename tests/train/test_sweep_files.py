"""Files of sweeps: what is in one, what is wrong, and those of the papers' comparisons."""

import functools
import json
import random
import runpy
from pathlib import Path

import pytest

from experiments import small_runs
from experiments.recall_sweep import Recall
from lnssm_jax.mixers import MIXERS
from tests.pages import blocks_of
from tests.train.conftest import WORDS
from tests.train.test_copies import settings
from tests.train.test_sweeps import FILE
from train.cli.main import main
from train.config import ConfigError, to_dict
from train.sweeps import Run, plan, spec, tuning

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "experiments" / "sweeps").glob("*.py"))
PAGE = (ROOT / "docs" / "sweeps.md").read_text()
OF_PAPERS = (ROOT / "experiments" / "README.md").read_text()


@pytest.fixture(autouse=True)
def _mixers_that_files_register():
  """Are there for the test alone."""
  before = dict(MIXERS)
  yield
  for name in MIXERS.keys() - before.keys():
    del MIXERS[name]


@pytest.fixture
def file(tmp_path):
  path = tmp_path / "sizes.py"
  path.write_text(FILE)
  return path


def test_file_has_runs_labels_folders_and_overrides(file, tmp_path):
  sweep = spec.load(file, changes=["steps=9", "task.train_rows=50"], only=["size=a", "lr=0.002"])
  assert len(sweep.runs) == 3 * 4 and len(sweep.chosen) == 2 * 2
  run = sweep.chosen[-1]
  assert run.labels == {"width": 32, "size": "a"}
  assert run.cfg.run_dir == "runs/sizes/a/lrn-32-0.002-1"
  assert (run.cfg.steps, run.cfg.seed, run.task.pairs, run.task.train_rows) == (9, 1, 2, 50)
  assert (run.cfg.optimizer.peak_lr, run.cfg.optimizer.final_lr) == (2e-3, pytest.approx(2e-4))
  derived = spec.load(file, changes=["optimizer.final_lr=1e-5"]).chosen
  assert {run.cfg.optimizer.final_lr for run in derived} == {1e-5}
  alone = spec.load(file, changes=["model.dim=64"], only=["width=32"]).chosen
  assert {run.cfg.model.dim for run in alone} == {64}
  fitting = spec.load(file, changes=["seq_len=8"], only=["size=a"])  # which four pairs do not
  assert len(fitting.chosen) == 8
  assert spec.load(file, folder=tmp_path).runs[0].cfg.run_dir.startswith(str(tmp_path))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"only": ["widht=16"]}, "no such label; did you mean 'width'"),
    ({"only": ["width=17"]}, "leaves no run; width is one of 16, 32"),
    ({"changes": ["seed=3"]}, "--set seed=3: every run of a sweep has its own seed"),
    ({"changes": ["width=3"]}, "--set width=3: width is the axis width of the sweep; choose"),
    ({"changes": ["model.dim=3"]}, "model.dim is the axis width of the sweep; choose by --only wi"),
    (
      {"changes": ["task.pairs=3"]},
      "--set task.pairs=3 makes the runs {'size': 'a'} and {'size': 'b'} the same, .* --only size=",
    ),
    ({"changes": ["model=3"]}, "model is a group of settings"),
    ({"changes": ["task.pair=3"]}, "did you mean 'pairs'"),
  ],
)
def test_wrong_options_of_a_sweep_are_one_line(file, change, message):
  with pytest.raises(ConfigError, match=message):
    spec.load(file, **change)


def test_set_of_what_no_label_of_the_chosen_runs_says_is_no_error(tmp_path, monkeypatch):
  monkeypatch.setenv("LNSSM_DATA", "folder")
  longhorn = ROOT / "experiments" / "sweeps" / "lm_longhorn.py"  # whose models differ in depth
  runs = spec.load(longhorn, changes=["model.num_layers=1"]).chosen
  assert {run.cfg.model.num_layers for run in runs} == {1}
  with pytest.raises(ConfigError, match=r"^model is a group of settings"):  # and a label
    spec.load(longhorn, changes=["model=3"])
  paths = tmp_path / "paths.py"
  paths.write_text(
    "from tests.train.test_copies import settings\nfrom experiments.recall_sweep import Recall\n"
    "from train.sweeps import grid\n"
    "SWEEP = grid(settings(), {'model.dim': (16, 32), 'steps': (7, 8)}, task=Recall(pairs=2))"
  )
  runs = spec.load(paths, changes=["model.dim=64"], only=["model.dim=32"]).chosen
  assert [(run.cfg.model.dim, run.cfg.steps) for run in runs] == [(64, 7), (64, 8)]
  with pytest.raises(ConfigError, match=r"model.dim is the axis model.dim of the sweep"):
    spec.load(paths, changes=["model.dim=64"])
  file = tmp_path / "configs.py"
  file.write_text(
    "from tests.train.test_copies import settings\nfrom experiments.recall_sweep import Recall\n"
    "from train.sweeps import Run\n"
    "SWEEP = [Run(cfg=settings(steps=n, run_dir=str(n)), task=Recall(pairs=2)) for n in (7, 8)]"
  )
  with pytest.raises(ConfigError, match=r"steps=9 makes the runs 7 and 8 the same, .*; choose in"):
    spec.load(file, changes=["steps=9"])


TASK = 'Recall(pairs=2 if size == "a" else 4)'  # of FILE


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("SWEEP = 3", "has no list SWEEP"),
    ("SWEEP = []", "SWEEP of .* has no run; a grid has none if"),
    ("SWEEP = [3]", "SWEEP of .* holds 3"),
    (FILE.replace("-{seed}", ""), "two runs of .* have the folder 'runs/sizes/a/lrn-16-0.001'"),
    (FILE.replace("{size}/", "{sice}/"), r"template folder=.* cannot be filled in \('sice'\)"),
    (FILE.replace("(0, 1)", "2"), r"seeds=2 must be a sequence of values; use \(2,\), or range"),
    (FILE.replace("(1e-3, 2e-3)", "1e-3"), r"learning_rates=0.001 must .*; use \(0.001,\)\.$"),
    (FILE.replace('("a", "b")', '"ab"'), r"axis 'size'='ab' must be .*; use \('ab',\)\.$"),
    (FILE.replace("(0, 1)", "()"), "grid: seeds has no values, so there is no run; give it at"),
    (FILE.replace("(1e-3, 2e-3)", "[]"), "grid: learning_rates has no values"),
    (FILE.replace('("a", "b")', "()"), "grid: axis 'size' has no values"),
    (
      FILE.replace("{size}/", "{nope}/"),
      "'nope'.; it may have width, size, lr, seed, and settings",
    ),
    (
      "from tests.train.test_copies import settings\nfrom train.sweeps import grid\n"
      "grid(settings(), {}, folder='{nope}')",
      "it may have lr, seed, and settings",
    ),
    (FILE.replace('line="size"', 'line="sise"'), "no label of its runs; did you mean 'size'"),
    (FILE.replace('Plot(x="width", line="size")', "'width'"), "use train.sweeps.Plot"),
    (FILE.replace('line="size"', "where=3"), "plot.where wants dict.* got 3"),
    (
      FILE.replace(TASK, "'mqar'"),
      r"^task='mqar' of a/lrn-16.* must be a train\.sweeps\.Task",
    ),
    (FILE.replace(TASK, "Recall"), r"^task=<class .*Recall'> of .* must be a train\.sweeps"),
    (
      FILE.replace(TASK, "Recall(pair=4)"),
      "no setting 'recall.pair' in Recall; did you mean 'pa",
    ),
    (FILE.replace(TASK, "{'pairs': 4}"), r"^task={'pairs': 4} of .* must be a train\.sweeps\.Task"),
    (FILE + "COPIES = 'a'", "sizes.py: COPIES wants int or None, got 'a'"),
    (FILE + "COPIES = True", "sizes.py: COPIES wants int or None, got True"),
    (FILE + "COPIES = 0", "sizes.py: COPIES=0 must be at least 1"),
    (FILE + "TUNING_SEED = True", "sizes.py: TUNING_SEED wants int or None, got True"),
    (FILE.replace("else 4", "else 5"), "task of runs/sizes/b/.*length=16 must be .* pairs=20"),
    (FILE.replace("else 4", "else 4, vocab_size=301"), "301 of the task is larger than model.voc"),
    (FILE.replace("else 4", "else 4, train_rows=3"), "train_rows=3 is less than global_batch=4"),
    ("from tests.train.test_copies import settings\nSWEEP = [settings()]", "validation is empty"),
  ],
)
def test_wrong_file_of_a_sweep_is_one_line(file, text, message):
  file.write_text(text)
  with pytest.raises(ConfigError, match=message):
    spec.load(file)


def test_dry_run_prints_runs_parameters_and_flops(file, capsys, tmp_path):
  command = ["sweep", str(file), "--dry-run", "--out", str(tmp_path / "out"), "--copies", "3"]
  assert main([*command, "--only", "width=16", "--only", "size=a"]) == 0
  first, second, total = capsys.readouterr().out.splitlines()
  start = "width=16 size=a: 11,872 parameters, 3 runs (learning rates 0.001 0.002, seeds 0 1)"
  assert first.startswith(start) and "1 runs" in second
  run = spec.load(file).runs[0]
  each = plan.training_flops(run)
  assert f"{3 * each:.3g} FLOPs" in first
  assert total == (
    f"4 runs in 2 groups, 0 finished, {4 * each:.3g} model FLOPs;"
    f" {4 * each / 6e15:.3g} minutes at 100 TFLOP/s"
  )
  assert not (tmp_path / "out").exists()
  # Each query has logits; a token of two layers multiplies every kernel entry.
  without_head = 6 * 7 * 4 * 16 * plan.flops.model_flops_per_token(run.cfg.model, 16) / 2
  head = 6 * 7 * 4 * (16 - 2) * 16 * 300
  assert each == pytest.approx(without_head - head)


def test_runs_made_short_are_scored_and_saved_at_their_end():
  cfg = small_runs.shortened(settings(accumulate=2), tokens=1000, length=8, batch=6)
  assert (cfg.steps, cfg.seq_len, cfg.global_batch, cfg.accumulate) == (20, 8, 6, 1)
  assert (cfg.eval_every, cfg.checkpoint_every, cfg.log_every) == (20, 20, 20)


def test_runs_behind_a_base_convolution_have_what_lets_them_learn():
  shape = {"vocab_size": 300, "length": 16, "batch": 3, "steps": 60}
  given = small_runs.behind_base_conv(settings(), "gla", {"expand_k": 1.0}, **shape, dim=32)
  model = given.model
  assert (model.mixer, model.mixer_options) == (("base_conv", "gla"), {"gla": {"expand_k": 1.0}})
  assert (model.vocab_size, model.dim, model.channel_mixer) == (301, 32, "none")
  assert model.embedding_norm and not model.tie_embeddings and model.initialization == "lnssm"
  assert (given.steps, given.optimizer.warmup_steps) == (60, 3)
  assert (given.seq_len, given.global_batch) == (16, 3)
  tied = small_runs.behind_base_conv(settings(), "gla", {}, **shape, tie_embeddings=True)
  assert tied.model.tie_embeddings  # what is given has precedence


def test_task_that_the_function_of_a_grid_makes_is_that_of_the_run():
  make = lambda pairs: (settings(), Recall(pairs=pairs)) if pairs else settings()
  runs = spec.grid(make, {"pairs": (3, None)}, task=Recall(pairs=2))
  assert [run.task.pairs for run in runs] == [3, 2]


def test_collect_without_runs_writes_nothing(file, capsys, tmp_path):
  place = tmp_path / "new"
  assert main(["sweep", str(file), "--collect", "--out", str(place)]) == 2
  assert f"error: --collect: {place} has no run of {file}; train" in capsys.readouterr().err
  assert not place.exists()


@pytest.mark.parametrize(
  ("place", "reason"), [("taken", "it is a file"), ("taken/new", "Not a directory")]
)
def test_file_as_the_folder_of_a_sweep_is_one_line(place, reason, file, capsys, tmp_path):
  (tmp_path / "taken").touch()
  assert main(["sweep", str(file), "--out", str(tmp_path / place)]) == 2
  message = f"--out {tmp_path / place} cannot be the folder of the sweep: {reason}; name another."
  assert capsys.readouterr().err == f"error: {message}\n"


@functools.cache
def loaded(path):
  """The sweep of a file of the project, which takes a second or two."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("LNSSM_DATA", "folder")
    return spec.load(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_sweep_file_has_three_seeds_and_swept_rates_of_each_model(path):
  sweep = loaded(path)
  of_labels = {}
  for run in sweep.runs:
    key = tuple(run.labels.items())
    of_labels.setdefault(key, []).append((spec.rate_of(run), run.cfg.seed))
  assert len(of_labels) > 5
  for pairs in of_labels.values():
    rates = {rate for rate, _ in pairs}
    seeds = {seed for _, seed in pairs}
    assert len(sweep.first_rates or rates) in (3, 4) and rates >= {*(sweep.first_rates or ())}
    assert len(seeds) >= 3 and seeds == {*range(len(seeds))}
    assert len(pairs) == len(rates) * len(seeds)
  for name in (sweep.plot.x, sweep.plot.line, sweep.plot.panel):
    assert name in (None, "learning_rate", *sweep.runs[0].labels)
  text, name = path.read_text(), f"experiments/sweeps/{path.name}"
  assert f"python -m train sweep {name}" in text and "Measured: " in text
  assert f"`{name}`" in OF_PAPERS


def test_sweeps_of_language_models_train_as_many_tokens_as_they_say(monkeypatch, tmp_path):
  monkeypatch.chdir(tmp_path)  # where no run is finished
  for path in (path for path in FILES if path.stem.startswith("lm_")):
    sweep = loaded(path)
    runs = tuning.chosen(sweep, planned=True)
    tokens = sum(x.cfg.steps * x.cfg.global_batch * x.cfg.seq_len for x in runs)
    # One seed at every rate, or at the first ones, the others at the best of them.
    rates = sweep.first_rates or {spec.rate_of(x) for x in sweep.runs}
    tried = {(*x.labels.items(), spec.rate_of(x)) for x in sweep.runs if spec.rate_of(x) in rates}
    others = {(*x.labels.items(), x.cfg.seed) for x in sweep.runs if x.cfg.seed != 0}
    assert len(runs) == len(tried) + len(others)
    assert 3e8 < tokens < 1.2e9, path.stem  # 20 minutes at most at a million tokens per second
    assert f"{tokens / 1e6:.0f}M" in path.read_text(), path.stem


def test_sweep_of_lcsm_has_its_codes_in_the_order_of_the_printed_perplexities():
  rows = runpy.run_path(str(ROOT / "configs/lcsm_wikitext103.py"))["SWEEP"]
  printed = {row.options["code"]: row.perplexity[0] for row in reversed(rows)}
  codes = [x.labels["code"] for x in loaded(ROOT / "experiments/sweeps/lm_lcsm.py").runs]
  found = [printed[code] for code in dict.fromkeys(codes)]
  assert len(found) == 12 and found == sorted(found, reverse=True)


@pytest.mark.slow
def test_sweeps_of_states_compare_states_of_equal_size():
  """Rows of a head times its columns, over all partitions that a model has."""
  from flax import nnx

  sizes = {}
  path = ROOT / "experiments/sweeps/mqar_states.py"
  for run in spec.load(path, only=["seed=0", "lr=0.001"]).chosen:
    model = run.cfg.model
    _, name = model.mixer
    heads = {"num_heads": model.num_heads, **model.mixer_options[name]}
    mixer = nnx.eval_shape(lambda: MIXERS[name](model.dim, **heads, rngs=nnx.Rngs(0)))  # noqa: B023
    state = nnx.eval_shape(lambda: mixer.init_state(1))  # noqa: B023
    leaves = [x.kv for x in (state if isinstance(state, tuple) else (state,)) if hasattr(x, "kv")]
    leaves = leaves or [state.kv]
    place = (run.labels["rows"], run.labels["width"])
    sizes.setdefault(place, set()).add(sum(leaf.size for leaf in leaves))
  places = [(rows, width) for width in (64, 128) for rows in (32, 96, 160)]
  assert sizes == {(rows, width): {rows * width} for rows, width in places}


def test_page_of_sweeps_runs(monkeypatch):
  monkeypatch.chdir(ROOT)
  names = {}
  found = []
  for block in blocks_of(PAGE):
    exec(block, names)
    found.append(names["SWEEP"])
  assert [len(runs) for runs in found] == [2 * 2 * 2 * 3, 2 * 2 * 2 * 3]
  assert found[0][0].cfg.run_dir == "lnssm-64-lr0.001-seed0" and found[0][0].task is None
  assert {to_dict(run.task)["pairs"] for run in found[1]} == {4, 8}
  assert isinstance(found[1][0].task, Recall)


def test_task_beyond_the_positions_of_a_model_is_found_in_the_file(file):
  longer = "replace(cfg.model, dim=width, learned_positions=cfg.seq_len - 1)"
  file.write_text(FILE.replace("replace(cfg.model, dim=width)", longer))
  with pytest.raises(ConfigError, match=r"/a/lrn-16-0.001-0: seq_len=16 is more than model.lear"):
    spec.load(file)


def test_plain_configs_are_runs(tiny, tmp_path, config_file):
  path = tmp_path / "plain.py"
  config_file(tiny(), "one.py")
  path.write_text(
    "from train.config import load_config\nfrom pathlib import Path\n"
    "SWEEP = [load_config(Path(__file__).parent / 'one.py')]\n"
  )
  (run,) = spec.load(path, folder=tmp_path / "x").runs
  assert isinstance(run, Run) and run.labels == {} and run.task is None


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_first_model_of_a_sweep_file_trains_at_a_tiny_size(path, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("LNSSM_DATA", "folder")
  for name in ("check_axes", "check_different"):
    monkeypatch.setattr(spec, f"_{name}", lambda *_: None)  # makes axes small, too
  sweep = spec.load(path)
  first = sweep.runs[0]
  # Copies of one program: three seeds of a rate, or all rates of the seed that chooses.
  copies = "seed=0" if sweep.tuning_seed == 0 else f"lr={spec.rate_of(first)}"
  rates = {spec.rate_of(run) for run in sweep.runs if run.labels == first.labels}
  sizes = ["seq_len=16", "global_batch=2", "steps=2", "model.vocab_size=300"]
  sizes += ["optimizer.warmup_steps=1"]
  if first.task is None:
    rng, sources = random.Random(0), {}
    for name, count in (("a", 20), ("b", 4)):
      rows = [json.dumps({"text": " ".join(rng.choices(WORDS, k=30))}) for _ in range(count)]
      (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
      sources[name] = str(tmp_path / f"{name}.jsonl")
    data = {"sources": sources, "train": ("a",), "validation": ("b",), "tokenizer": "bytes"}
    data["folder"] = str(tmp_path / "tokens")
    sizes += [f"data.{name}={value}" for name, value in data.items()]
    patterns = [x.cfg.model.mixer for x in sweep.runs if not isinstance(x.cfg.model.mixer, str)]
    layers = max((len(mixer) for mixer in patterns), default=1)
    sizes += ["model.dim=128", f"model.num_layers={layers}"]
    if first.cfg.model.num_heads > 1:
      sizes += ["model.num_heads=2"]
  else:
    sizes += ["task.pairs=2", "task.train_rows=4", "task.test_rows=2", "task.vocab_size=256"]
    if first.task.validation_rows:
      sizes += ["task.validation_rows=2"]
  chosen = [f"{name}={value}" for name, value in first.labels.items()]
  changes = [x for size in sizes for x in ("--set", size)]
  only = [x for choice in (*chosen, copies) for x in ("--only", choice)]
  assert main(["sweep", str(path), "--out", str(tmp_path / "out"), *changes, *only]) == 0
  assert "group 1 of 1" in capsys.readouterr().out
  rows = [json.loads(line) for line in (tmp_path / "out" / "table.jsonl").read_text().splitlines()]
  if sweep.first_rates is not None:  # and further ones, by chance
    assert sum(row["seeds"] for row in rows) >= len(sweep.first_rates)
    return
  best = [row["seeds"] for row in rows if row["best"]]
  assert best == ([3] if sweep.tuning_seed is None else [])  # the other seeds are not chosen
  assert sum(row["seeds"] for row in rows) == (3 if sweep.tuning_seed is None else len(rates))
