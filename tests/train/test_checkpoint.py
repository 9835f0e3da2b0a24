"""Checkpoints: exact round trips, rejected structures, damage and leftovers."""

import os
import re
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lnssm_jax.files import atomic
from train.checkpoint import digests, store
from train.checkpoint.step_folders import newest_intact
from train.checkpoint.store import (
  CheckpointError,
  Checkpoints,
  StructureError,
  check_structure,
  load,
  newest_step,
)

TX = optax.chain(optax.identity(), optax.adam(1e-3))


def make_state(seed=0, width=5):
  keys = jax.random.split(jax.random.key(seed))
  params = {
    "blocks": {"kernel": jax.random.normal(keys[0], (2, 3, width))},
    "head": jax.random.normal(keys[1], (4,)).astype(jnp.bfloat16),
  }
  return {"params": params, "opt_state": TX.init(params), "step": jnp.int32(seed)}


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def saved(tmp_path):
  """Folder with checkpoints of steps 3 and 7, and their states."""
  states = {step: make_state(step) for step in (3, 7)}
  with Checkpoints(tmp_path / "ck", keep=5) as checkpoints:
    for step, state in states.items():
      checkpoints.save(step, state, {"data_position": step})
    checkpoints.wait()
  return tmp_path / "ck", states


def test_checkpoint_state_and_metadata_restored_bit_for_bit(saved):
  folder, states = saved
  with Checkpoints(folder, keep=5) as checkpoints:
    state, metadata = checkpoints.restore(abstract(states[7]))
  chex.assert_trees_all_equal(state, states[7], strict=True)
  assert metadata == {"data_position": 7}


def test_checkpoint_save_before_donation_copies_state(tmp_path):
  grow = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  state = {**make_state(), "params": {"big": jnp.zeros((512, 512))}}
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in range(1, 6):
      state = grow(state)
      checkpoints.save(step, state, {})
      for _ in range(20):  # overwrites the buffers while the save is running
        state = grow(state)
      expected = 21 * (step - 1) + 1
      checkpoints.wait()
      restored, _ = checkpoints.restore(abstract(state))
      assert (np.asarray(restored["params"]["big"]) == expected).all()


def test_checkpoints_beyond_keep_deleted(tmp_path):
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in (1, 2, 3, 10):
      checkpoints.save(step, make_state(step), {})
    checkpoints.wait()
  assert sorted(int(p.name) for p in tmp_path.iterdir()) == [3, 10]


def test_checkpoint_params_only_loaded(saved):
  folder, states = saved
  trees, step, _ = load(folder, {"params": abstract(states[7]["params"])})
  assert step == 7
  chex.assert_trees_all_equal(trees["params"], states[7]["params"], strict=True)


def test_checkpoint_folder_other_names_ignored(saved):
  folder, states = saved
  (folder / "15").mkdir()
  (folder / "notes").mkdir()
  (folder / "0007").mkdir()
  (folder / "99").write_text("a file")
  (folder / "7" / "stray").write_text("nobody asked for this")
  said = []
  with Checkpoints(folder, keep=5, say=said.append) as checkpoints:
    assert newest_step(folder) == 7
    state, _ = checkpoints.restore(abstract(states[7]))
    chex.assert_trees_all_equal(state, states[7], strict=True)
    checkpoints.save(15, make_state(15), {})  # its name is free again
    checkpoints.wait()
  assert newest_step(folder) == 15
  assert said == []


def test_checkpoint_leftovers_of_killed_process_removed(saved):
  folder, _ = saved
  for name in ("20.saving.orbax-checkpoint-tmp", "21.saving", "3.deleting"):
    (folder / name).mkdir()
    (folder / name / "part").write_text("x")
  (folder / "20.damaged").mkdir()
  with Checkpoints(folder, keep=5):
    assert sorted(path.name for path in folder.iterdir()) == ["20.damaged", "3", "7"]


def test_checkpoint_missing_reported(tmp_path):
  assert newest_step(tmp_path / "nowhere") is None
  with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*train first"):
    load(tmp_path, {"params": {}})


def test_checkpoint_structure_mismatch_listed_by_path(saved):
  folder, states = saved
  wanted = make_state(7, width=6)
  wanted["params"]["head"] = wanted["params"]["head"].astype(jnp.float32)
  wanted["params"]["bias"] = jnp.zeros(3)
  wanted["opt_state"] = TX.init(states[7]["params"] | {"bias": jnp.zeros(3)})
  del wanted["params"]["blocks"]
  with Checkpoints(folder, keep=5) as checkpoints, pytest.raises(StructureError) as caught:
    checkpoints.restore(abstract(wanted))
  lines = [line.strip() for line in str(caught.value).splitlines()]
  assert "params/bias: missing in the checkpoint, the model needs float32[3]" in lines
  assert "params/blocks/kernel: float32[2, 3, 5] in the checkpoint, not in the model" in lines
  assert "params/head: bfloat16[4] in the checkpoint, the model needs float32[4]" in lines
  mean = "optimizer/opt_state/1/0/mu/bias: missing in the checkpoint, the model needs float32[3]"
  assert mean in lines
  assert "config.json of its run folder" in lines[-1]


def test_checkpoint_structure_mismatch_long_listing_truncated():
  with pytest.raises(StructureError, match=r"\.\.\. and 30 more"):
    check_structure("x", {}, {str(i): jnp.zeros(1) for i in range(50)})


def flip_a_bit(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def largest_file(folder):
  files = [p for p in folder.rglob("*") if p.is_file() and p.name != digests.FILE]
  return max(files, key=lambda path: path.stat().st_size)


def test_checkpoint_one_changed_bit_falls_back_to_intact_step(saved):
  folder, states = saved
  (data,) = (folder / "7" / "params" / "d").iterdir()
  flip_a_bit(data)
  said = []
  with Checkpoints(folder, keep=5, say=said.append) as checkpoints:
    state, metadata = checkpoints.restore(abstract(states[3]))
  chex.assert_trees_all_equal(state, states[3], strict=True)
  assert metadata == {"data_position": 3}
  line, renamed = said
  assert f"checkpoint {folder / '7'} is damaged: the content of params/d/{data.name}" in line
  assert line.endswith("using step 3 instead")
  assert renamed == f"{folder / '7'} was renamed to 7.damaged"
  assert sorted(path.name for path in folder.iterdir()) == ["3", "7.damaged"]


def test_checkpoint_readers_fall_back_without_renaming(saved, capsys):
  folder, states = saved
  flip_a_bit(largest_file(folder / "7" / "optimizer"))
  assert load(folder, {"params": abstract(states[3]["params"])})[1] == 7  # that tree is not read
  assert capsys.readouterr().err == ""
  flip_a_bit(largest_file(folder / "7" / "params"))
  _, step, _ = load(folder, {"params": abstract(states[3]["params"])})
  assert step == 3
  assert "warning: checkpoint" in capsys.readouterr().err
  assert (folder / "7").is_dir()


def test_checkpoint_readers_of_one_tree_check_files_next_to_trees(saved, capsys):
  folder, states = saved
  flip_a_bit(folder / "7" / "_CHECKPOINT_METADATA")
  assert load(folder, {"params": abstract(states[3]["params"])})[1] == 3
  assert "_CHECKPOINT_METADATA" in capsys.readouterr().err


def test_checkpoint_files_synced_before_digests_and_rename(tmp_path, monkeypatch):
  """A checkpoint with digests is complete on disk, even after a power failure."""
  names = ("a", "tree/b", "tree/c/d")
  for name in names:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  events, fsync, replace = [], os.fsync, Path.replace

  def flushed(descriptor):
    events.append(os.fstat(descriptor).st_ino)
    fsync(descriptor)

  def replaced(path, target):
    events.append(Path(target).name)
    assert path.stat().st_ino in events  # what is renamed is on disk, not in a buffer
    assert path.stat().st_size > 0
    return replace(path, target)

  monkeypatch.setattr(os, "fsync", flushed)
  monkeypatch.setattr(Path, "replace", replaced)
  digests.write(tmp_path, "5")
  of_file = {(tmp_path / name).stat().st_ino for name in names}
  assert set(events[: len(names)]) == of_file
  folders = {(tmp_path / name).stat().st_ino for name in ("", "tree", "tree/c")}
  assert set(events[len(names) : -3]) == folders  # the names of the files
  assert events[-2:] == [digests.FILE, tmp_path.stat().st_ino]


def test_new_folder_synced_before_rename(tmp_path, monkeypatch):
  events, fsync, rename = [], os.fsync, Path.rename

  def flushed(descriptor):
    events.append(os.fstat(descriptor).st_ino)
    fsync(descriptor)

  def renamed(path, target):
    events.append("renamed")
    return rename(path, target)

  monkeypatch.setattr(os, "fsync", flushed)
  monkeypatch.setattr(Path, "rename", renamed)
  with atomic.new_folder(tmp_path / "export", ValueError) as folder:
    (folder / "inner").mkdir()
    for name in ("one", "inner/two"):
      (folder / name).write_text(name)
  files = {(tmp_path / "export" / name).stat().st_ino for name in ("one", "inner/two")}
  assert files <= set(events[: events.index("renamed")])
  assert events[-1] == tmp_path.stat().st_ino  # the name itself


def truncate(step):
  path = largest_file(step)
  path.write_bytes(path.read_bytes()[:-1])


def take_another_name(step):
  shutil.rmtree(step)
  shutil.copytree(step.with_name("3"), step)


def swap(step):
  a, b = step / "params" / "_METADATA", step / "optimizer" / "_METADATA"
  one, two = a.read_bytes(), b.read_bytes()
  a.write_bytes(two)
  b.write_bytes(one)


@pytest.mark.parametrize(
  ("fault", "message"),
  [
    (truncate, "bytes instead of"),
    (swap, "and 1 more"),
    (take_another_name, "its files belong to a folder called 3"),
    (lambda step: (step / "commit_success.txt").unlink(), "commit_success.txt is missing"),
    (lambda step: (step / "digests.json").unlink(), "it has no digests.json"),
    (lambda step: (step / "digests.json").write_text("{"), "digests.json cannot be read"),
    (lambda step: flip_a_bit(step / "digests.json"), "digests.json (has changed|cannot be read)"),
  ],
)
def test_checkpoint_damage_named(saved, fault, message):
  folder, _ = saved
  assert digests.damage(folder / "7") is None
  fault(folder / "7")
  assert re.search(message, digests.damage(folder / "7"))
  said = []
  assert newest_intact(folder, said.append) == 3
  assert len(said) == 1


def test_checkpoint_all_damaged_raises(saved):
  folder, states = saved
  for step in ("3", "7"):
    flip_a_bit(largest_file(folder / step))
  with Checkpoints(folder, keep=5) as checkpoints, pytest.raises(CheckpointError) as caught:
    checkpoints.restore(abstract(states[7]))
  first, seven, three, fix = str(caught.value).splitlines()
  assert first == "no checkpoint is intact:"
  assert "/7 is damaged" in seven and "/3 is damaged" in three
  assert "move all of them away" in fix and "--adopt STEP" in fix
  assert sorted(path.name for path in folder.iterdir()) == ["3", "7"]


def test_checkpoint_failed_save_reported_and_older_kept(saved, monkeypatch):
  folder, states = saved

  def full(*_, **__):
    raise OSError(28, "No space left on device")

  with Checkpoints(folder, keep=5) as checkpoints:
    assert checkpoints.failure() is None
    with monkeypatch.context() as patch:
      patch.setattr(digests, "write", full)  # in the background, after Orbax has finished
      checkpoints.save(9, states[7], {})
      with pytest.raises(CheckpointError, match=r"step 9 could not.*No space left.*intact"):
        checkpoints.wait()
      assert sorted(path.name for path in folder.iterdir()) == ["3", "7"]  # nothing partial remains
      patch.setattr(store.ocp, "save_checkpointables_async", full)  # synchronously
      checkpoints.save(10, states[7], {})
      assert "No space left" in str(checkpoints.failure())
      assert checkpoints.failure() is None  # reported once
    assert newest_step(folder) == 7
    checkpoints.save(9, make_state(9), {"data_position": 9})
    checkpoints.wait()
    state, metadata = checkpoints.restore(abstract(states[7]))
  assert metadata == {"data_position": 9}
  chex.assert_trees_all_equal(state, make_state(9), strict=True)
  assert sorted(path.name for path in folder.iterdir()) == ["3", "7", "9"]
