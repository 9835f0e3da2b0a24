"""Fingerprints of token files: what they see, and that nothing is made again without a word."""

import json

import numpy as np
import pytest

from train.data import fingerprints
from train.data.errors import DataError
from train.data.indexed import IndexedWriter
from train.data.tokenize import prepare, sidecar_path


def flip(path, offset):
  raw = bytearray(path.read_bytes())
  raw[offset] ^= 1
  path.write_bytes(raw)


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_sample_of_small_pair_sees_every_byte(tmp_path, end):
  rng = np.random.default_rng(0)
  with IndexedWriter(tmp_path / "a", np.uint16) as writer:
    for _ in range(9000):  # more than one block of either file
      writer.add_document(rng.integers(0, 99, 8))
  before, path = fingerprints.sample(tmp_path / "a"), tmp_path / f"a{end}"
  size = path.stat().st_size
  assert size > fingerprints.BYTES
  for offset in (0, size - 1, *map(int, rng.integers(0, size, 20))):
    flip(path, offset)
    assert fingerprints.sample(tmp_path / "a") != before
    flip(path, offset)
  assert fingerprints.sample(tmp_path / "a") == before
  path.write_bytes(path.read_bytes() + b"\0")
  assert fingerprints.sample(tmp_path / "a") != before


def test_changed_token_files_rejected_and_left_alone(corpus):
  data = corpus.settings()
  sidecars = prepare(data)
  name, sidecar = next(iter(sidecars.items()))
  path = sidecar_path(f"{data.folder}/{name}").with_suffix(".bin")
  flip(path, path.stat().st_size // 2)
  harmed = path.read_bytes()
  with pytest.raises(DataError, match=rf"{name} are not as they were written.*tokenize --force"):
    prepare(data)
  assert path.read_bytes() == harmed
  # A sidecar of an older version has no sample: only a complete pass detects it.
  old = {key: value for key, value in sidecar.items() if key != "sample"}
  sidecar_path(f"{data.folder}/{name}").write_text(json.dumps(old))
  assert prepare(data)[name] == old
  with pytest.raises(DataError, match=rf"the content of {name}\.bin has changed"):
    prepare(data, whole=True)
  assert prepare(data, force=True) == sidecars
  assert prepare(data, whole=True) == sidecars


def test_checksums_that_have_changed_rejected(corpus):
  data = corpus.settings()
  sidecar = prepare(data)["a"]
  path = sidecar_path(f"{data.folder}/a").with_suffix(".crc32")
  flip(path, 0)
  with pytest.raises(DataError, match=r"a are not as .*: the content of a\.crc32 has changed"):
    prepare(data)
  path.unlink()
  assert fingerprints.change(f"{data.folder}/a", sidecar) == "a.crc32 is missing"
  old = {key: value for key, value in sidecar.items() if key != "crc32_sha256"}
  sidecar_path(f"{data.folder}/a").write_text(json.dumps(old))
  assert prepare(data)["a"] == old  # of an older version, without checksums
