"""Token files to test with: small ones made here, and real ones where they are given."""

import os
from pathlib import Path

import pytest

from train.data import IndexedWriter


@pytest.fixture
def write_pair(tmp_path):
  """Writes documents as a pair in a temporary folder and returns its prefix."""

  def write(documents, name="pair", dtype="uint16"):
    with IndexedWriter(tmp_path / name, dtype) as writer:
      for ids in documents:
        writer.add_document(ids)
    return str(tmp_path / name)

  return write


@pytest.fixture
def given():
  """Path of a file or folder of the data that LNSSM_DATA names; skips the test without it."""

  def find(relative):
    root = os.environ.get("LNSSM_DATA")
    if not root:
      pytest.skip("the environment variable LNSSM_DATA names no folder of data")
    if not (path := Path(root) / relative).exists():
      pytest.skip(f"LNSSM_DATA holds no {relative}")
    return path

  return find
