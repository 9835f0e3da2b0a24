"""Saved models, adapters and prefixes: what an error of the disk leaves, and who may read them."""

import os
import stat

import numpy as np
import pytest
import safetensors.numpy
from safetensors import SafetensorError

from lnssm_jax import pretrained
from lnssm_jax.pretrained import prefixes
from tests.pretrained.published import recorded, write
from tests.pretrained.test_prefixes import model  # noqa: F401

CASE = "mamba"
FULL = SafetensorError("Error while serializing: I/O error: No space left (os error 28)")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  return pretrained.load(write(tmp_path_factory.mktemp("base"), CASE, dtype=np.float32))


def save(folder, loaded):
  pretrained.save(folder, loaded.model, loaded.settings["model"], layout="hf")


def adapter(folder, loaded):
  rows, columns = recorded(CASE).tensors["backbone.layers.0.mixer.out_proj.weight"].shape
  factors = {"blocks.mixer.o_proj.kernel": (np.ones((2, columns, 1)), np.ones((2, 1, rows)))}
  pretrained.save_adapter(folder, factors, loaded.settings["model"], scale=1, model_type=CASE)


@pytest.mark.parametrize("write", [save, adapter])
def test_save_that_fails_names_the_file_and_can_be_tried_again(
  write, loaded, tmp_path, monkeypatch
):
  def full(arrays, path, **_):
    path.write_bytes(b"a part")
    raise FULL

  with monkeypatch.context() as patch:
    patch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*out/\w+\.safetensors'"):
      write(tmp_path / "out", loaded)
  with monkeypatch.context() as patch:
    patch.setattr("json.dumps", lambda *_, **__: {}["no text"])  # after the tensors
    with pytest.raises(KeyError):
      write(tmp_path / "out", loaded)
  assert list((tmp_path / "out").iterdir()) == []
  write(tmp_path / "out", loaded)
  assert len({stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}) == 1


def test_prefix_that_cannot_be_saved_leaves_the_one_before(model, tmp_path, monkeypatch):  # noqa: F811
  path = tmp_path / "x"
  mask = os.umask(0o022)
  try:
    pretrained.save_prefix(path, prefixes._empty(model, 1))
  finally:
    os.umask(mask)
  assert stat.S_IMODE(path.stat().st_mode) == 0o644
  before = path.read_bytes()

  def full(*_, **__):
    raise FULL

  monkeypatch.setattr(safetensors.numpy, "save_file", full)
  for name in ("x", "new"):
    with pytest.raises(OSError, match="No space left on device"):
      pretrained.save_prefix(tmp_path / name, prefixes._empty(model, 1))
  assert path.read_bytes() == before and not (tmp_path / "new").exists()
