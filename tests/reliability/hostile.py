"""Opens corrupted and malicious files, and parses invalid settings.

    python -m tests.reliability.hostile --trials 2000

Each trial corrupts one file (or one setting), at random, and opens it as the project does:

    rejected   with a one-line error, as on the command line
    unharmed   reads as the original
    valid      reads as another valid file: another tokenizer, another seed
    FAULT      any other exception, more than 10 seconds, or access to a file outside

Links and names that lead out of a folder are `SCENARIOS`, each run once.
"""

import argparse
import collections
import json
import random
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lnssm_jax.files.reading import digest_of
from lnssm_jax.pretrained import exports
from tests.reliability import tiny_run
from tests.reliability.corruption import ODD, corrupt_bytes, corrupt_json, corrupt_value
from tests.reliability.escapes import SCENARIOS
from train import config
from train.cli.errors import exit_code
from train.config import apply_overrides
from train.data import IndexedDataset, IndexedWriter, windows
from train.data.sidecars import read_sidecar
from train.data.tokenizers import FileTokenizer, load_tokenizer, train_bpe
from train.logging import plot
from train.runs import export
from train.runs.run_folder import RunFolder

TEXT = "the slow river moves\nover 12 bright stones, \u00e9t\u00e9 \u4f60 \x00"
TOO_LONG = 10.0  # seconds


class Target:
  """A kind of file: creation, corruption and opening; `open` returns comparable values."""

  def __init__(self, root: Path):
    self.root = root
    self.file = root / "file"

  def corrupt(self, rng: random.Random) -> None:
    self.file.write_bytes(corrupt_bytes(self.good, rng))

  good = b""

  def open(self) -> Any:
    raise NotImplementedError


class TokenizerFile(Target):
  """tokenizer.json: loaded, and used."""

  def __init__(self, root: Path):
    super().__init__(root)
    train_bpe("bpe:280", root, [TEXT * 3, "the river the river over the stones " * 5])
    self.file = root / "tokenizer.json"
    self.good = self.file.read_bytes()

  def corrupt(self, rng: random.Random) -> None:
    self.file.write_bytes(corrupt_json(self.good, rng))

  def open(self) -> Any:
    tokenizer = FileTokenizer(self.file)
    ids = tokenizer.encode(TEXT)
    return ids.tolist(), tokenizer.decode(ids), tokenizer.vocab_size, tokenizer.end_of_text


class TokenFiles(Target):
  """A pair of .bin and .idx: opened, every window read, with its sidecar."""

  def __init__(self, root: Path):
    super().__init__(root)
    rng = np.random.default_rng(0)
    with IndexedWriter(root / "pair", "uint16") as writer:
      for length in (3, 1, 40, 7, 90):
        writer.add_document(rng.integers(0, 257, length))
    (root / "pair.json").write_text(json.dumps({"tokens": 141, "bytes": 200, "sha256": "0"}))
    self.whole = {end: (root / f"pair.{end}").read_bytes() for end in ("bin", "idx", "json")}

  def corrupt(self, rng: random.Random) -> None:
    for end, raw in self.whole.items():
      (self.root / f"pair.{end}").write_bytes(raw)
    end = rng.choice(("bin", "idx", "idx", "idx", "json"))
    change = corrupt_json if end == "json" else corrupt_bytes
    (self.root / f"pair.{end}").write_bytes(change(self.whole[end], rng))

  def open(self) -> Any:
    prefix = self.root / "pair"
    note = read_sidecar(prefix)
    IndexedDataset(prefix).check_tokens(257)
    source = windows.TokenWindows([str(prefix)], 16, 257)
    rows = [source[i]["tokens"].tolist() for i in range(len(source))]
    return rows, note and (note["tokens"], note["bytes"])


class SettingsFile(Target):
  """config.json of a run."""

  def __init__(self, root: Path):
    super().__init__(root)
    self.run = RunFolder(root / "run")
    self.run.path.mkdir()
    self.run.write_config(tiny_run.settings(root, "run"))
    self.file = self.run.config_file
    self.good = self.file.read_bytes()

  def corrupt(self, rng: random.Random) -> None:
    self.file.write_bytes(corrupt_json(self.good, rng))

  def open(self) -> Any:
    return config.to_dict(self.run.load_config())


class Overrides(Target):
  """Settings of the command line: --set NAME=VALUE."""

  values = (
    "", "=", "1", "-1", "1e400", "nan", "inf", "none", "true", "[1", "(" * 5000, "[" * 200, "'a'",
    "{'a': 1}", "{1: 2}", "[1, [2]]", "b'x'", "1j", "9" * 5000, "0x10", "1_0", "\x00", "..", "a,b",
    "../x,y", "{[]: 1}", "x" * 10_000, "-" * 10_000 + "1",
  )  # fmt: skip

  def __init__(self, root: Path):
    super().__init__(root)
    self.config = tiny_run.settings(root, "run")
    groups = config.to_dict(self.config)
    inside = [f"{g}.{n}" for g, v in groups.items() if isinstance(v, dict) for n in v]
    self.names = [*groups, *inside, "model.mixer_options.a", "data.sources.train", "data.sources.",
                  "model.dim.x", "", ".", "a.b.c", "model..dim", "\u00e9", "__class__"]  # fmt: skip
    self.assignments: list[str] = []

  def corrupt(self, rng: random.Random) -> None:
    name = lambda: rng.choice(self.names) + rng.choice(("", "", "", "", ".x", " ", "x"))
    self.assignments = [f"{name()}={rng.choice(self.values)}" for _ in range(rng.choice((1, 1, 2)))]

  def open(self) -> Any:
    return config.to_dict(apply_overrides(self.config, self.assignments))


class ConfigFile(Target):
  """A config file (Python), as if half edited."""

  good = (
    b"from tests.reliability import tiny_run\nfrom pathlib import Path\nimport os\n\n\n"
    b"def get_config():\n  return tiny_run.settings(Path('ROOT'), 'run', steps=7, seed=1)\n"
  )

  def __init__(self, root: Path):
    super().__init__(root)
    self.good = self.good.replace(b"ROOT", str(root).encode())
    self.file.write_bytes(self.good)

  def corrupt(self, rng: random.Random) -> None:
    odd = repr(rng.choice(ODD[:10] + ODD[12:18])).encode()
    self.file.write_bytes(
      rng.choice(
        (
          self.good.replace(b"steps=7", b"steps=" + odd),
          self.good.replace(b"seed=1", b"sede=1"),
          self.good.replace(b"return ", b"return None and "),
          self.good.replace(b"get_config", b"config"),
          self.good.replace(b"get_config()", b"get_config(a)"),
          self.good.replace(b"  return", b"  raise SystemExit('x')\n  return"),
          self.good.replace(b"  return", b"  1 / 0\n  return"),
          self.good.replace(b"  return", b"  return get_config()"),
          self.good.replace(b"import os", b"import no_such_module"),
          self.good[: rng.randrange(len(self.good))],
          rng.randbytes(50),
        )
      )
    )

  def open(self) -> Any:
    return config.to_dict(config.load_config(self.file))


class Metrics(Target):
  """metrics.jsonl, read to resume and to plot."""

  def __init__(self, root: Path):
    super().__init__(root)
    self.run = RunFolder(root)
    self.run.say = lambda line: None
    rows: list[dict] = [{"kind": "train", "step": s, "loss": 1.0 / s} for s in range(1, 9)]
    values = {"set": "a", "val_loss": 1.0, "bits_per_byte": None}
    rows += [{"kind": "eval", "step": 8, **values}, {"kind": "skipped", "step": 9, "why": "nan"}]
    self.good = "".join(json.dumps(row) + "\n" for row in rows).encode()
    self.file = self.run.metrics_file

  def corrupt(self, rng: random.Random) -> None:
    lines = self.good.splitlines(keepends=True)
    if rng.random() < 0.3:
      self.file.write_bytes(corrupt_bytes(self.good, rng))
    else:
      at = rng.randrange(len(lines))
      lines[at] = corrupt_json(lines[at], rng) + b"\n"
      self.file.write_bytes(b"".join(lines))

  def open(self) -> Any:
    drawn = plot.read(self.file)
    self.run.keep_rows_until(7)
    return drawn, self.run.read_rows(), self.run.skipped_steps(), self.run.evaluation(8, ["a"])


class Exported(Target):
  """manifest.json and model.safetensors; half of the manifests get a matching digest."""

  def __init__(self, root: Path):
    super().__init__(root)
    model = config.Model(dim=8, num_layers=1, num_heads=2, vocab_size=17)
    params = jax.tree.map(
      lambda x: np.random.default_rng(0).standard_normal(x.shape).astype(x.dtype),
      exports.abstract_params(config.to_dict(model)),
    )
    self.folder = root / "exported"
    export.write(self.folder, model, params, load_tokenizer("bytes"), 3)
    self.whole = {path: path.read_bytes() for path in self.folder.iterdir()}

  def corrupt(self, rng: random.Random) -> None:
    for path, raw in self.whole.items():
      path.write_bytes(raw)
    manifest, tensors = self.folder / exports.MANIFEST, self.folder / exports.TENSORS
    kind = rng.randrange(4)
    if kind == 0:
      manifest.write_bytes(corrupt_json(self.whole[manifest], rng))
    elif kind == 1:
      values = corrupt_value(json.loads(self.whole[manifest]), rng)
      if isinstance(values, dict):
        values.pop("sha256", None)
        values["sha256"] = digest_of(values)
      manifest.write_bytes(json.dumps(values).encode(errors="surrogatepass"))
    elif kind == 2:
      tensors.write_bytes(corrupt_bytes(self.whole[tensors], rng))
    else:
      tensors.write_bytes(self._header(self.whole[tensors], rng))

  @staticmethod
  def _header(raw: bytes, rng: random.Random) -> bytes:
    """Safetensors with an invalid header: lengths, offsets, duplicate names, paths as names."""
    (length,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + length]
    changed = rng.choice(
      (
        lambda: corrupt_json(header, rng),
        lambda: header.replace(b"norm.scale", b"../../norm"),
        lambda: header.replace(b'"norm.scale"', b'"head.kernel"'),
        lambda: header.replace(b"F32", rng.choice((b"F64", b"BF16", b"I8", b"XX"))),
        lambda: header,
      )
    )()
    number = rng.choice((len(changed), len(changed), 2**63, 2**64 - 1, 10**8, 0))
    return struct.pack("<Q", number) + changed + raw[8 + length :]

  def open(self) -> Any:
    manifest, arrays = exports.read(self.folder)
    exports.tokenizer_of(self.folder, manifest)
    return manifest, [x.tobytes() for x in jax.tree.leaves(arrays)]


TARGETS: dict[str, type[Target]] = {
  "tokenizer.json": TokenizerFile,
  ".bin, .idx and their note": TokenFiles,
  "config.json": SettingsFile,
  "--set": Overrides,
  "config file": ConfigFile,
  "metrics.jsonl": Metrics,
  "exported model": Exported,
}


def attempt(open_: Callable[[], Any], original: Any) -> tuple[str, str]:
  """Outcome of one trial, in the terms above, and the fault if any."""
  begin = time.perf_counter()
  try:
    found = open_()
    outcome = "unharmed" if same(found, original) else "valid"
  except BaseException as error:  # also those that end a program
    if not isinstance(error, Exception) or exit_code(error) is None or not str(error):
      return "FAULT", f"{type(error).__name__}: {error}"[:300]
    outcome = "rejected"
  spent = time.perf_counter() - begin
  return (outcome, "") if spent < TOO_LONG else ("FAULT", f"took {spent:.0f} s")


def same(a: Any, b: Any) -> bool:
  """Whether two results are equal; NaN is unequal to itself, as intended."""
  return type(a) is type(b) and a == b


def trials(target: type[Target], count: int, seed: int = 0) -> tuple[collections.Counter, list]:
  """Counts of outcomes, and the faults."""
  rng, outcomes, faults = random.Random(seed), collections.Counter(), []
  folder = Path(tempfile.mkdtemp())
  try:
    it = target(folder)
    if isinstance(it, Metrics):
      it.file.write_bytes(it.good)
    original = it.open()
    for number in range(count):
      it.corrupt(rng)
      outcome, why = attempt(it.open, original)
      outcomes[outcome] += 1
      if outcome == "FAULT":
        faults.append((number, why))
  finally:
    shutil.rmtree(folder)
  return outcomes, faults


def main(arguments: list[str] | None = None) -> int:
  """Prints a line per kind of file; returns 1 if there was a fault."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--trials", type=int, default=2000, help="of each kind of file")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--only", nargs="+", choices=list(TARGETS), default=list(TARGETS))
  options = parser.parse_args(arguments)
  warnings.simplefilter("ignore", SyntaxWarning)  # of what --set holds
  wrong = 0
  for name in options.only:
    outcomes, faults = trials(TARGETS[name], options.trials, options.seed)
    wrong += len(faults)
    counts = ", ".join(f"{word} {outcomes[word]}" for word in ("rejected", "unharmed", "valid"))
    print(
      f"{name}: {sum(outcomes.values())} trials, {counts}, FAULT {outcomes['FAULT']}", flush=True
    )
    for number, why in faults[:5]:
      print(f"  trial {number}: {why}")
  for scenario in SCENARIOS:
    with tempfile.TemporaryDirectory() as folder:
      why = scenario(Path(folder))
    wrong += why is not None
    print(f"{(scenario.__doc__ or '').splitlines()[0]} {'ok' if why is None else f'FAULT: {why}'}")
  return int(wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
