"""Saves on a simulated disk that loses what was not synced when the power fails, at any moment."""

import json
import random
import shutil

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax.files import atomic
from tests.train.simulated_disk import Disk, write
from train.checkpoint import step_folders, store, verify
from train.checkpoint.store import Checkpoints
from train.runs.run_folder import RunFolder, claim

# What a failure leaves: the least, the most, names without contents, and any mixture.
LEAST = lambda durable, newest: durable
MOST = lambda durable, newest: newest


def mixture(seed):
  return random.Random(seed).randint


class Written:
  """The future of a save by a stand-in for Orbax."""

  def __init__(self, staging, step):
    self.staging, self.step = staging, step

  def result(self):
    partial = self.staging + ".orbax-checkpoint-tmp"
    for name in ("params/d", "optimizer"):
      store.Path(partial, name).mkdir(parents=True)
    for name in ("_CHECKPOINT_METADATA", "params/d/x", "params/y", "optimizer/z"):
      store.Path(partial, name).write_text(f"{name} of step {self.step}")
    store.Path(partial).rename(self.staging)


@pytest.fixture
def save_without_orbax(monkeypatch):
  def save(staging, trees, **_):
    return Written(staging, int(trees["params"]))

  monkeypatch.setattr(store.ocp, "save_checkpointables_async", save)


def run_with_saves(cfg, disk, steps, keep, state):
  """Trains, in a way: rows, saves, retention."""
  with claim(cfg) as run:
    run.write_config(cfg)
    run.keep_rows_until(-1)
    options = {"keep": keep, "before": run.before_checkpoint}
    with Checkpoints(run.checkpoints, **options) as checkpoints:
      for step in steps:
        run.append([{"kind": "train", "step": step, "loss": 1.0}])
        checkpoints.save(step, state(step), {"data_position": step})
        checkpoints.wait()
        disk.promised = step


def check(root, promised, cfg):
  """Resumes, and compares what is there with what was promised."""
  run = RunFolder(root / "run")
  said = []
  found = step_folders.newest_intact(run.checkpoints, said.append)
  assert said == []
  if promised is not None:
    assert found is not None and found >= promised
  if found is not None:
    lines, whole = verify.report(run.checkpoints)
    assert whole, lines
    assert run.load_config() == cfg
    rows = [row["step"] for row in run.read_rows()]
    assert rows == list(range(1, len(rows) + 1)) and len(rows) >= found
  return found


@pytest.mark.usefixtures("save_without_orbax")
@pytest.mark.parametrize(
  ("keep", "last", "mixtures"),
  [(1, 2, 1), *(pytest.param(keep, 4, 40, marks=pytest.mark.slow) for keep in (1, 2))],
)
def test_power_failure_at_any_moment_keeps_the_newest_complete_step(
  keep, last, mixtures, tiny, tmp_path
):
  root = tmp_path / "disk"
  root.mkdir()
  cfg = tiny(run_dir=str(root / "run"))
  with Disk(root) as disk:
    state = lambda step: {"params": step, "step": step}
    run_with_saves(cfg, disk, range(1, last + 1), keep, state)
  assert len(disk.cuts) > 30 * last
  seen, found = set(), set()
  for choose in (LEAST, MOST, *map(mixture, range(mixtures))):
    for tree, promised in disk.states(choose):
      key = hash(tuple(sorted(tree.items(), key=str))), promised
      if key not in seen:
        seen.add(key)
        write(tree, tmp_path / "after")
        found.add(check(tmp_path / "after", promised, cfg))
        shutil.rmtree(tmp_path / "after")
  assert found == {None, *range(1, last + 1)}


def test_power_failure_after_a_save_of_orbax_loads(tiny, tmp_path):
  root = tmp_path / "disk"
  root.mkdir()
  cfg = tiny(run_dir=str(root / "run"))
  array = lambda step: {"params": {"w": jnp.full(3, step)}, "step": jnp.int32(step)}
  with Disk(root) as disk:
    run_with_saves(cfg, disk, (1, 2), 1, array)
  loaded = {}
  describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
  abstract = {"params": jax.tree.map(describe, array(0)["params"])}
  for tree, promised in disk.states(LEAST):
    if promised is None or promised in loaded:
      continue
    write(tree, tmp_path / "after")
    trees, step, _ = store.load(tmp_path / "after" / "run" / "checkpoints", abstract)
    loaded[promised] = step, int(trees["params"]["w"][0])
    shutil.rmtree(tmp_path / "after")
  assert loaded == {1: (1, 1), 2: (2, 2)}


def test_power_failure_during_a_replacement_leaves_the_old_or_the_new_file(tmp_path):
  root = tmp_path / "disk"
  root.mkdir()
  old, new = ({"content": word * 100} for word in ("old", "new"))
  atomic.replace_file(root / "file", json.dumps(old).encode())
  with Disk(root) as disk:
    atomic.replace_file(root / "file", json.dumps(new).encode())
    disk.promised = new
    disk._look()
    disk._cut()
  for choose in (LEAST, MOST, *map(mixture, range(20))):
    for tree, promised in disk.states(choose):
      content = json.loads(tree["./file"] or b"null")
      assert content in ([new] if promised else [old, new])


def test_disk_loses_what_was_not_synced(tmp_path):
  """The simulation sees faults: without a sync a file is empty, or has no name."""
  root = tmp_path / "disk"
  root.mkdir()
  with Disk(root) as disk:
    (root / "a").write_text("1")
    (root / "a").rename(root / "b")
  last = lambda choose: list(disk.states(choose))[-1][0]
  assert last(LEAST) == {".": None}
  assert last(MOST) == {".": None, "./b": b"1"}
  mixed = [last(mixture(seed)) for seed in range(40)]
  assert {".": None, "./b": b""} in mixed and {".": None, "./a": b"1"} in mixed
