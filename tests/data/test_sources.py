"""Finding and reading text: every kind of source, and error messages."""

import gzip
import importlib
import json
import lzma
import os
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from train.data import DataError, compressed, sources
from train.data.sources import find_inputs, fingerprint, read_documents

COMPRESS = {
  ".gz": gzip.compress,
  ".xz": lzma.compress,
  ".zst": importlib.import_module(compressed.ZSTD).compress,
}
TEXTS = ["first\n", "second, with \u00e9 and \u4f60", "  "]


def rows(texts):
  return "".join(json.dumps({"source": "x", "text": text}) + "\n" for text in texts).encode()


def names(source, root):
  return [path.relative_to(root).as_posix() for path, _ in find_inputs(str(source))]


def test_source_text_file_is_one_document(tmp_path):
  path = tmp_path / "a.txt"
  path.write_bytes("line\r\nline \u4f60\n\n".encode())
  assert list(read_documents(str(path))) == ["line\r\nline \u4f60\n\n"]


def test_source_rows_are_documents(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(rows(TEXTS) + b"\n" + rows(["after a blank line"]))
  assert list(read_documents(str(path))) == [*TEXTS, "after a blank line"]


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.JSONL.XZ", "a.jsonl.gz", "a.jsonl.zst"])
def test_source_rows_compressed_read(tmp_path, name):
  compress = COMPRESS[Path(name).suffix.lower()]
  raw = rows(TEXTS)
  # Two frames, as tools that work in parallel write them.
  (tmp_path / name).write_bytes(compress(raw[:20]) + compress(raw[20:]))
  assert list(read_documents(str(tmp_path / name))) == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_source_text_file_compressed_read(tmp_path, suffix):
  for name in (f"a.txt{suffix}", f"without_ending{suffix}"):
    (tmp_path / name).write_bytes(COMPRESS[suffix](b"text"))
    assert list(read_documents(str(tmp_path / name))) == ["text"]


def test_source_file_without_ending_read_if_named(tmp_path):
  (tmp_path / "enwik").write_text("text")
  assert list(read_documents(str(tmp_path / "enwik"))) == ["text"]
  with pytest.raises(DataError, match="has no text"):
    read_documents(str(tmp_path))


def write_parquet(path, texts, key="text", **options):
  parquet.write_table(pyarrow.table({"id": range(len(texts)), key: texts}), path, **options)


def test_source_parquet_rows_are_documents(tmp_path):
  texts = [f"text {i}" for i in range(100)]
  write_parquet(tmp_path / "a.parquet", [*TEXTS, *texts], row_group_size=50)
  assert list(read_documents(str(tmp_path))) == [*TEXTS, *texts]
  write_parquet(tmp_path / "b.parquet", TEXTS, key="content")
  assert list(read_documents(str(tmp_path / "b.parquet"), fields=("content",))) == TEXTS


def test_source_parquet_unusable_named(tmp_path):
  path = tmp_path / "a.parquet"
  write_parquet(path, ["a", None])
  with pytest.raises(DataError, match=r'a.parquet, row 2: "text" is NoneType, expected a string'):
    list(read_documents(str(path)))
  with pytest.raises(
    DataError, match=r"a.parquet has the columns \['id', 'text'\], but not \"body\""
  ):
    list(read_documents(str(path), fields=("body",)))
  whole = path.read_bytes()
  for raw in (whole[:-20], b"PAR1 no Parquet PAR1"):
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"a.parquet is damaged or not Parquet"):
      list(read_documents(str(path)))


@pytest.mark.parametrize("dictionary", [True, False])
def test_source_parquet_that_expands_without_limit_stopped(tmp_path, dictionary, monkeypatch):
  monkeypatch.setattr(compressed, "MAX_ROW", 1 << 20)
  path = tmp_path / "a.parquet"
  write_parquet(path, ["x" * 10_000] * 300, use_dictionary=dictionary, compression="zstd")
  documents = read_documents(str(path))
  if dictionary:  # its pages are small; otherwise none is read
    next(documents)
  with pytest.raises(DataError, match=r"a.parquet expands to more than 200 times its size"):
    list(documents) if dictionary else next(documents)


@pytest.mark.parametrize(
  ("name", "package"), [("a.txt.zst", compressed.ZSTD), ("a.parquet", "pyarrow")]
)
def test_source_without_its_package_named(tmp_path, name, package, monkeypatch):
  (tmp_path / name).write_bytes(b"")
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(DataError, match=f"{name} needs the package {package}: pip install {package}"):
    list(read_documents(str(tmp_path / name)))


def test_source_byte_order_mark_ignored(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
  (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + rows(["row"]))
  assert list(read_documents(str(tmp_path / "a.txt"))) == ["text"]
  assert list(read_documents(str(tmp_path / "a.jsonl"))) == ["row"]


def test_source_folder_sorted_by_name(tmp_path):
  kept = ["a/b.py", "a.md", "a/a.txt", "z.jsonl", "b.jsonl.xz", "a/c/d.rs", "c.parquet", "e.txt.gz"]
  left_out = [".git/x.py", "a/.hidden.txt", "__pycache__/x.py", "image.png", "no_suffix", "x.xz"]
  for name in kept + left_out:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  assert names(tmp_path, tmp_path) == sorted(kept)


def test_source_glob_sorted_by_name(tmp_path):
  for name in ("b/2.txt", "a/1.txt", "a/c/3.txt", "a/1.png"):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(name)
  assert names(tmp_path / "**" / "*", tmp_path) == ["a/1.txt", "a/c/3.txt", "b/2.txt"]
  assert names(tmp_path / "a" / "*.txt", tmp_path) == ["a/1.txt"]


def test_source_file_named_like_glob_read(tmp_path):
  (tmp_path / "a[1].txt").write_text("x")
  assert names(tmp_path / "a[1].txt", tmp_path) == ["a[1].txt"]


def test_source_environment_variables_expanded(tmp_path, monkeypatch):
  (tmp_path / "a.txt").write_text("text")
  monkeypatch.setenv("SOMEWHERE", str(tmp_path))
  assert list(read_documents("$SOMEWHERE/a.txt")) == ["text"]
  monkeypatch.delenv("SOMEWHERE")
  with pytest.raises(DataError, match="environment variable SOMEWHERE, which is not set"):
    read_documents("$SOMEWHERE/a.txt")


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("", "the source is empty"),
    ("absent.txt", "there is no file or folder '.*absent.txt'"),
    ("*.txt", r"'.*\*.txt' has no text"),
    ("empty", "'.*empty' has no text"),
    ("image.png", "image.png is not a supported kind of text"),
  ],
)
def test_source_without_text_named(tmp_path, source, message):
  (tmp_path / "empty").mkdir()
  (tmp_path / "image.png").write_bytes(b"")
  with pytest.raises(DataError, match=message):
    read_documents(str(tmp_path / source) if source else "")


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (b"{not json}", "not JSON: .* at column 2"),
    (b'{"text": "cut', "not JSON: Unterminated string"),
    (b'{"body": "x", "id": 1}', r"found the keys \['body', 'id'\], expected .* key \"text\""),
    (b"[1, 2]", 'found list, expected an object with the key "text"'),
    (b'{"text": 3}', '"text" is int, expected a string'),
    (b'{"text": null}', '"text" is NoneType, expected a string'),
    (b'{"text": "a\xff"}', r"not UTF-8 at byte 11 \(0xff\)"),
    (b'{"text": "ab\\ud800"}', "an unpaired surrogate at character 2"),
    (b"[" * 200_000, "nested too deeply"),
  ],
  ids=range(9),
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_source_unreadable_row_named_by_line(tmp_path, line, message, suffix):
  path = tmp_path / f"rows{suffix}"
  raw = rows(["good"]) + b"\n" + line + b"\n"
  path.write_bytes(lzma.compress(raw) if suffix.endswith("xz") else raw)
  documents = read_documents(str(path))
  assert next(documents) == "good"
  with pytest.raises(DataError, match=rf"rows{suffix}, line 3: .*{message}"):
    next(documents)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize("cut", [0.0, 0.5, 0.99])
def test_source_damaged_compressed_file_named(tmp_path, suffix, compression, cut):
  path = tmp_path / f"a{suffix}{compression}"
  whole = COMPRESS[compression](rows([os.urandom(5000).hex()]))
  path.write_bytes(whole[: int(cut * len(whole))] if cut else b"this is not it")
  with pytest.raises(DataError, match=rf"a{suffix}{compression}.* damaged or not {compression}"):
    list(read_documents(str(path)))


def test_source_overlong_row_rejected(tmp_path, monkeypatch):
  monkeypatch.setattr(sources, "MAX_ROW", 1000)
  path = tmp_path / "a.jsonl.xz"
  path.write_bytes(lzma.compress(rows(["good"]) + b"x" * 5000))
  documents = read_documents(str(path))
  assert next(documents) == "good"
  with pytest.raises(DataError, match="line 2: longer than 1000 bytes"):
    next(documents)


def test_source_undecodable_file_named_raises_found_counted(tmp_path):
  (tmp_path / "bad.txt").write_bytes(b"abc\xff")
  (tmp_path / "good.txt").write_text("text")
  with pytest.raises(DataError, match=r"bad.txt: not UTF-8 at byte 3 \(0xff\). Convert"):
    list(read_documents(str(tmp_path / "bad.txt")))
  for found in (tmp_path, tmp_path / "*.txt"):
    skipped = Counter()
    assert list(read_documents(str(found), skipped)) == ["text"]
    assert skipped == {"undecodable": 1}


def test_source_empty_documents_counted(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"")
  (tmp_path / "b.jsonl").write_bytes(rows(["", "text", ""]))
  skipped = Counter()
  assert list(read_documents(str(tmp_path), skipped)) == ["text"]
  assert skipped == {"empty": 3}


def test_source_fingerprint_changes_with_files(tmp_path):
  path = tmp_path / "a.txt"
  path.write_text("text")
  os.utime(path, ns=(0, 0))
  seen = {fingerprint(find_inputs(str(tmp_path)))}
  assert fingerprint(find_inputs(str(tmp_path))) in seen
  os.utime(path, ns=(0, 1))
  seen.add(fingerprint(find_inputs(str(tmp_path))))
  path.write_text("texts")
  os.utime(path, ns=(0, 0))
  seen.add(fingerprint(find_inputs(str(tmp_path))))
  (tmp_path / "b.txt").write_text("")
  os.utime(tmp_path / "b.txt", ns=(0, 0))
  seen.add(fingerprint(find_inputs(str(tmp_path))))
  (tmp_path / "b.txt").rename(tmp_path / "c.txt")
  seen.add(fingerprint(find_inputs(str(tmp_path))))
  assert len(seen) == 5


@pytest.fixture(scope="module")
def stdlib():
  sets = ("python-stdlib", "python-stdlib:train", "python-stdlib:validation")
  return [[path for path, _ in find_inputs(name)] for name in sets]


def test_source_standard_library_splits_disjoint(stdlib):
  whole, train, validation = stdlib
  assert sorted(whole) == sorted(train + validation)
  assert len(set(whole)) == len(whole) > 200
  assert 0.02 < len(validation) / len(whole) < 0.10
  root = Path(sysconfig.get_path("stdlib"))
  inside = [path.relative_to(root) for path in whole]
  assert Path("argparse.py") in inside and Path("json/decoder.py") in inside
  noise = {"site-packages", "test", "tests", "__pycache__", "encodings", "idlelib"}
  assert not any(noise & set(path.parts) or path.suffix != ".py" for path in inside)


def test_source_standard_library_bounded_and_stable(stdlib, monkeypatch):
  total = sum(path.stat().st_size for path in stdlib[0])
  assert 2_000_000 < total <= sources.STDLIB_BYTES
  monkeypatch.setattr(sources, "STDLIB_BYTES", total // 2)
  whole, train, validation = ([p for p, _ in find_inputs(f"python-stdlib{part}")]
                              for part in ("", ":train", ":validation"))  # fmt: skip
  assert sum(path.stat().st_size for path in whole) <= total // 2
  assert len(whole) < len(stdlib[0])
  assert set(train) <= set(stdlib[1]) and set(validation) <= set(stdlib[2])


def test_source_standard_library_unknown_split_named():
  with pytest.raises(DataError, match="no source 'python-stdlib:test'; use one of"):
    find_inputs("python-stdlib:test")


def test_source_standard_library_missing_named(tmp_path, monkeypatch):
  monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
  with pytest.raises(DataError, match="standard library of this Python has no sources in"):
    find_inputs("python-stdlib")
