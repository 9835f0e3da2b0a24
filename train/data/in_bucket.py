"""Token files in a bucket: `data.folder` there has a local copy, from which they are read."""

from collections.abc import Iterable
from pathlib import Path

from lnssm_jax.files import buckets
from lnssm_jax.files.buckets import Bucket, local
from train.data.indexed import CHECKSUMS, WEIGHTS
from train.data.tokenizers import bpe_path

_PARTS, _LAST = (".bin", ".idx", CHECKSUMS, WEIGHTS), ".json"  # the sidecar


def fetch(folder: str, names: Iterable[str]) -> None:
  """Brings the copies of the sets and of the tokenizer up to date; nothing for a local folder.

  Raises:
    BucketError: the bucket cannot be read.
  """
  if buckets.is_bucket(folder):
    bucket, place = Bucket(folder), local(folder)
    files = bucket.files()
    for name in (bpe_path("").name, *names):
      others, last = _files(name, files)
      if last and not _same(bucket, place, files, others, last):
        bucket.download(place, others, last)


def publish(folder: str, names: Iterable[str]) -> None:
  """Uploads the sets and the tokenizer that the bucket lacks or has otherwise.

  Raises:
    BucketError: the bucket cannot be written.
  """
  if buckets.is_bucket(folder):
    bucket, place = Bucket(folder), local(folder)
    here = {x.name: x.stat().st_size for x in place.iterdir() if x.is_file()}
    there = bucket.files()
    for name in (bpe_path("").name, *names):
      others, last = _files(name, here)
      if last and not _same(bucket, place, there, others, last):
        bucket.remove(set(_files(name, there)[1]))
        bucket.upload(place, others, last)


def _files(name: str, files: Iterable[str]) -> tuple[list[str], list[str]]:
  """The files of a set that exist, and apart the last one; of a tokenizer only that."""
  if name == bpe_path("").name:
    return [], [x for x in files if x == name]
  found = [name + end for end in _PARTS if name + end in files]
  last = [name + _LAST] if name + _LAST in files else found[:1]  # a pair of others has none
  return [x for x in found if x not in last], last


def _same(
  bucket: Bucket, place: Path, there: dict[str, int], others: list[str], last: list[str]
) -> bool:
  sizes = lambda x: (place / x).stat().st_size if (place / x).is_file() else -1
  if any(there.get(x) != sizes(x) for x in (*others, *last)):
    return False
  return last[0].endswith(".bin") or bucket.read(last[0]) == (place / last[0]).read_bytes()
