"""Checkpoints: what comes back, what is refused, and what lies in the way."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.checkpoint import (
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


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def saved(tmp_path):
  """A folder with checkpoints of steps 3 and 7, and the states."""
  states = {step: make_state(step) for step in (3, 7)}
  with Checkpoints(tmp_path / "ck", keep=5) as checkpoints:
    for step, state in states.items():
      checkpoints.save(step, state, {"data_position": step})
  return tmp_path / "ck", states


def test_state_and_metadata_come_back_bit_for_bit(saved):
  folder, states = saved
  with Checkpoints(folder, keep=5) as checkpoints:
    assert checkpoints.latest() == 7
    state, metadata = checkpoints.restore(abstract(states[7]))
  assert_same_bits(state, states[7])
  assert metadata == {"data_position": 7}


def test_saving_copies_before_the_state_is_donated(tmp_path):
  grow = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
  state = {**make_state(), "params": {"big": jnp.zeros((512, 512))}}
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in range(1, 6):
      state = grow(state)
      checkpoints.save(step, state, {})
      for _ in range(20):  # overwrites the buffers while the save is still running
        state = grow(state)
      expected = 21 * (step - 1) + 1
      checkpoints.wait()
      restored, _ = checkpoints.restore(abstract(state))
      assert (np.asarray(restored["params"]["big"]) == expected).all()


def test_only_the_newest_are_kept(tmp_path):
  with Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in (1, 2, 3, 10):
      checkpoints.save(step, make_state(step), {})
  assert sorted(int(p.name) for p in tmp_path.iterdir()) == [3, 10]


def test_parameters_can_be_read_alone(saved):
  folder, states = saved
  trees, step, _ = load(folder, {"params": abstract(states[7]["params"])})
  assert step == 7
  assert_same_bits(trees["params"], states[7]["params"])


def test_folders_that_are_no_checkpoints_do_not_count(saved):
  folder, states = saved
  (folder / "15").mkdir()
  shutil.copytree(folder / "3", folder / "20")
  (folder / "20" / "_CHECKPOINT_METADATA").unlink()
  (folder / "notes").mkdir()
  (folder / "99").write_text("a file")
  assert newest_step(folder) == 7
  with Checkpoints(folder, keep=5) as checkpoints:
    state, _ = checkpoints.restore(abstract(states[7]))
    assert_same_bits(state, states[7])
    checkpoints.save(15, make_state(15), {})  # their names are free again
  assert newest_step(folder) == 15
  assert (folder / "20.incomplete" / "params").is_dir()  # put aside, not deleted


def test_no_checkpoint_is_said(tmp_path):
  assert newest_step(tmp_path / "nowhere") is None
  with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*train first"):
    load(tmp_path, {"params": {}})


def test_another_structure_is_refused_path_by_path(saved):
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


def test_long_listings_are_cut():
  with pytest.raises(StructureError, match=r"\.\.\. and 30 more"):
    check_structure("x", {}, {str(i): jnp.zeros(1) for i in range(50)})


def test_damaged_checkpoint_is_named(saved):
  folder, states = saved
  for path in (folder / "7" / "params").rglob("*"):
    if path.is_file() and path.name == "manifest.ocdbt":
      path.write_bytes(b"x")
  message = r"ck/7 cannot be read .*move that folder away"
  with Checkpoints(folder, keep=5) as checkpoints, pytest.raises(CheckpointError, match=message):
    checkpoints.restore(abstract(states[7]))


def test_failed_save_is_an_error_and_leaves_the_older_ones(saved, monkeypatch):
  folder, states = saved
  with Checkpoints(folder, keep=5) as checkpoints:

    def full(*_, **__):
      raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._orbax, "save_checkpointables_async", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*intact"):
      checkpoints.save(9, states[7], {})
  assert newest_step(folder) == 7
