"""Checkpoints with paths that lead out of their folder, by links or names.

Each scenario gets an empty folder and returns what went wrong, or None.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lnssm_jax.files.reading import digest_of
from tests.reliability.faults import make_state
from train.checkpoint import digests, step_folders, store, verify
from train.checkpoint.store import CheckpointError, Checkpoints


def _saved(root: Path, steps: tuple[int, ...] = (10, 20)) -> Path:
  """Saves checkpoints in `root`; returns their folder."""
  folder = root / "run" / "checkpoints"
  with Checkpoints(folder, keep=9, say=lambda line: None) as checkpoints:
    for step in steps:
      checkpoints.save(step, make_state(step), {"data_position": step, "data": None})
      checkpoints.wait()
  return folder


def _outside(root: Path, folder: Path, step: int) -> Path:
  """Moves the checkpoint of `step` out of the run and leaves a link in its place."""
  outside = root / "outside"
  shutil.move(folder / str(step), outside)
  (folder / str(step)).symlink_to(outside)
  return outside


def _listing(folder: Path) -> dict[str, bytes]:
  return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _restored(folder: Path) -> tuple[int, list[str]]:
  """The step that a run would resume from, and its messages."""
  said: list[str] = []
  with Checkpoints(folder, keep=1, say=said.append) as checkpoints:
    restored = checkpoints.restore(make_state(0))
    if restored is None:
      raise AssertionError("nothing was restored")
    state, metadata = restored
    expected = make_state(metadata["data_position"])["params"]["head"]
    if not np.array_equal(np.asarray(state["params"]["head"]), np.asarray(expected)):
      raise AssertionError("numbers that were never saved")
    checkpoints.save(99, make_state(99), {"data_position": 99})  # removes all others
    checkpoints.wait()
  return metadata["data_position"], said


def _expect(folder: Path, outside: Path, what: str) -> str | None:
  """Whether a run resumes from step 10, prints `what`, and leaves `outside` as it was."""
  before = _listing(outside)
  step, said = _restored(folder)
  if step != 10:
    return f"went on from step {step}"
  if not any(what in line for line in said):
    return f"said {said}"
  return None if _listing(outside) == before else "a folder outside was changed"


def linked_step(root: Path) -> str | None:
  """A checkpoint that is a link to a folder elsewhere."""
  folder = _saved(root)
  outside = _outside(root, folder, 20)
  return _expect(folder, outside, "the folder is a link")


def linked_tree(root: Path) -> str | None:
  """A tree inside a checkpoint that is a link to a folder elsewhere."""
  folder = _saved(root)
  outside = root / "outside"
  shutil.move(folder / "20" / "params", outside)
  (folder / "20" / "params").symlink_to(outside)
  return _expect(folder, outside, "params is a link")


def linked_file(root: Path) -> str | None:
  """A file inside a checkpoint that is a link to a file elsewhere."""
  folder = _saved(root)
  outside = root / "outside"
  outside.mkdir()
  shutil.move(folder / "20" / "params" / "_METADATA", outside / "x")
  (folder / "20" / "params" / "_METADATA").symlink_to(outside / "x")
  return _expect(folder, outside, "params/_METADATA is a link")


def linked_digests(root: Path) -> str | None:
  """digests.json that is a link."""
  folder = _saved(root)
  outside = root / "outside"
  outside.mkdir()
  shutil.move(folder / "20" / digests.FILE, outside / "x")
  (folder / "20" / digests.FILE).symlink_to(outside / "x")
  return _expect(folder, outside, "is a link")


def names_that_climb(root: Path) -> str | None:
  """A valid digests.json that names files outside: ../, absolute, ./."""
  secret = root / "secret"
  secret.write_bytes(b"s")
  folder = _saved(root)
  path = folder / "20" / digests.FILE
  entry = {"bytes": 1, "sha256": digests.hashlib.sha256(b"s").hexdigest()}
  for name in ("../../../secret", str(secret), "./x", "a//b", "a/../../x"):
    content = {"folder": "20", "files": {name: entry}}
    path.write_text(json.dumps(content | {"sha256": digest_of(content)}))
    wrong = digests.damage(folder / "20")
    if wrong is None or "is not inside the folder" not in wrong:
      return f"{name}: {wrong}"
  return None


def odd_digests(root: Path) -> str | None:
  """A valid digests.json with wrong content."""
  folder = _saved(root, (20,))
  path = folder / "20" / digests.FILE
  for files in ([], {"a": []}, {"a": None}, {"a": {"bytes": "1", "sha256": ""}}, {"a": {}}, 3):
    content = {"folder": "20", "files": files}
    path.write_text(json.dumps(content | {"sha256": digest_of(content)}))
    if digests.damage(folder / "20") is None:
      return f"{files} passed"
  for text in ("[]", "[" * 100_000, '{"a": 1, "a": 1}', "\x00", ""):
    path.write_text(text)
    if digests.damage(folder / "20") is None:
      return f"{text[:20]} passed"
  return None


def odd_names(root: Path) -> str | None:
  """Folders whose names are almost numbers: ignored and kept."""
  folder = _saved(root)
  names = ("-5", "030", "1e9", "٣٠", "30.", " 30", "30 ", "+30", "0x30", "..30")
  for name in names:
    shutil.copytree(folder / "20", folder / name)
  step, _ = _restored(folder)
  gone = [name for name in names if not (folder / name).exists()]
  return f"step {step}, gone {gone}" if step != 20 or gone else None


def leftovers_that_are_links(root: Path) -> str | None:
  """Links in place of leftovers: the links are removed, their targets kept."""
  folder = _saved(root)
  outside = root / "outside"
  outside.mkdir()
  (outside / "x").write_text("mine")
  for name in ("30.saving", "5.deleting", "7.saving.x"):
    (folder / name).symlink_to(outside)
  (folder / "10" / "more").symlink_to(outside)
  step, _ = _restored(folder)
  left = [p.name for p in folder.iterdir() if p.is_symlink()]
  return None if (step, left, _listing(outside)) == (20, [], {"x": b"mine"}) else f"{step}, {left}"


def adopted_link(root: Path) -> str | None:
  """`verify --adopt` of a link is rejected and writes nothing to its target."""
  folder = _saved(root)
  outside = _outside(root, folder, 20)
  (outside / digests.FILE).unlink()
  before = _listing(outside)
  try:
    verify.adopt(folder, 20)
  except CheckpointError:
    return None if _listing(outside) == before else "it was written to"
  return "it was adopted"


def reader_of_a_link(root: Path) -> str | None:
  """A reader given the step of a link, and one that finds only links."""
  folder = _saved(root, (20,))
  _outside(root, folder, 20)
  for step in (20, None):
    try:
      store.load(folder, {"params": make_state(0)["params"]}, step=step)
      return f"loaded with step={step}"
    except CheckpointError:
      pass
  return None


def pipes_and_devices(root: Path) -> str | None:
  """A pipe among the files of a checkpoint: nothing blocks on it."""
  folder = _saved(root)
  (folder / "20" / "_CHECKPOINT_METADATA").unlink()
  os.mkfifo(folder / "20" / "_CHECKPOINT_METADATA")
  wrong = digests.damage(folder / "20")
  if wrong is None or "not a regular file" not in wrong:
    return str(wrong)
  said: list[str] = []
  return None if step_folders.newest_intact(folder, said.append) == 10 else f"{said}"


SCENARIOS: tuple[Callable[[Path], str | None], ...] = (
  linked_step, linked_tree, linked_file, linked_digests, names_that_climb, odd_digests, odd_names,
  leftovers_that_are_links, adopted_link, reader_of_a_link, pipes_and_devices,
)  # fmt: skip
