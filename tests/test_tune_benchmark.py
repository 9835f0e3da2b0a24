"""`benchmarks.tune`: what it compares, what it keeps, and the table that it writes."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest

from benchmarks import scan_kernels, tune
from pallas_kernels.core import device, tuning
from pallas_kernels.norms import config as norms

SMALL = ["--sizes", "B=1,T=8,M=64"]
ONE = [*SMALL, "--one"]  # in this process


@pytest.fixture(autouse=True)
def empty_table(tmp_path, monkeypatch):
  monkeypatch.setattr(tune.sys, "stdin", io.StringIO())
  monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
  tuning.table.cache_clear()
  yield
  tuning.table.cache_clear()


def test_tune_interpreted_compares_every_configuration_with_float64(capsys):
  assert tune.main(["norms", "--interpret", "--most", "2", *ONE]) == {"D64": {}}
  lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("{")]
  assert [line.split(":")[0] for line in lines[1:]] == [
    "norms, D64, default",
    "  forward.vector=1",
    "  forward.vector=3",
  ]
  assert all("error" in line for line in lines[1:3])
  assert " ms," not in lines[1]
  assert "vector=3 must be 1, 2, 4 or 8" in lines[3]
  assert not tuning.FOLDER.exists()


def test_tune_does_not_time_a_wrong_kernel(monkeypatch, capsys):
  monkeypatch.setattr(scan_kernels, "right", lambda arrays, found: False)
  monkeypatch.setattr(tune, "milliseconds", lambda *args: pytest.fail("timed"))
  tune.main(["norms", "--interpret", "--most", "0", *ONE])
  assert "WRONG" in capsys.readouterr().out


def test_tune_keeps_what_is_faster_and_the_default_choice_reads_it(monkeypatch):
  """Two fields are faster by themselves, and together; a gain below the least is none."""
  shape = norms.Shape(64, 8)
  default = norms.default(shape)
  assert default.backward.ctas_per_sm == 8

  def attempt(op, case, sets, want, changes, who, timing):
    assert timing == (20, 7)
    try:
      config = tuning.replaced(default, changes, op)
    except ValueError as reason:
      return tune.Trial(None, str(reason))
    slow = abs(config.backward.ctas_per_sm - 4) + (config.forward.vector != 1)
    return tune.Trial(10.0 + slow + 0.001 * config.forward.ctas_per_sm, "error 1e-3 out")

  monkeypatch.setattr(tune, "attempt", attempt)
  monkeypatch.setattr(device, "unsupported", lambda *_: None)
  found = tune.main(["norms", "--write", *ONE])
  want = {"D64": {"backward": {"ctas_per_sm": 4}, "forward": {"vector": 1}}}
  assert found == want
  assert json.loads((tuning.FOLDER / "nvidia-h100.json").read_text()) == {"norms": want}
  chosen = norms.default(shape)
  assert (chosen.backward.ctas_per_sm, chosen.forward.vector) == (4, 1)
  assert chosen.forward.tiles == default.forward.tiles
  tune.write("wkv4", "k2-v2-bytes", {"forward": {"stages": 3}})
  tune.write("norms", "D64", {})
  assert json.loads((tuning.FOLDER / "nvidia-h100.json").read_text()) == {
    "norms": {},
    "wkv4": {"k2-v2-bytes": {"forward": {"stages": 3}}},
  }


HANGS = """
import os, sys, time
from pathlib import Path
from benchmarks import tune
from pallas_kernels.core import device, tuning

def attempt(op, case, sets, want, changes, who, timing):
  vector = changes.get("forward", {}).get("vector", 2)
  if vector == 1:
    time.sleep(600)
  if vector == 3:
    os._exit(9)
  return tune.Trial(10.0 - vector, "error 1e-3 out")

tune.attempt, device.unsupported, tuning.FOLDER = attempt, lambda *_: None, Path(sys.argv[1])
tune.main(["norms", "--sizes", "B=1,T=8,M=64", "--most", "3", "--write", "--one"])
"""


@pytest.mark.slow  # it starts JAX three times; the next test has the kills
def test_tune_kills_what_hangs_or_ends_its_process_and_writes_the_rest(capsys):
  found = tune.watched([sys.executable, "-c", HANGS, str(tuning.FOLDER)], 2.0)
  assert found == {"D64": {"forward": {"vector": 4}}}
  said = capsys.readouterr().out
  assert "  forward.vector=1: not finished after 2 s\n" in said
  assert "  forward.vector=3: ended its process with 9\n" in said
  assert said.count("default: 8.0000 ms") == 1  # what is known is not tried again
  (table,) = tuning.FOLDER.glob("*.json")
  assert json.loads(table.read_text()) == {"norms": found}


TRIALS = """
import json, os, sys, time
known = json.loads(sys.stdin.readline())
for name in ("good", "hangs", "ends", "last"):
  if name not in known:
    print(json.dumps({"begin": name, "changes": name}), flush=True)
    if name == "hangs":
      time.sleep(600)
    if name == "ends":
      os._exit(9)
    print(json.dumps({"end": name, "trial": [1.0, "right"]}), flush=True)
    print("tried", name, flush=True)
print(json.dumps({"found": known}))
"""


def test_trial_that_hangs_or_ends_its_process_has_failed_and_the_others_are_tried_once(capsys):
  found = tune.watched([sys.executable, "-c", TRIALS], 0.5)
  assert found == {
    "good": [1.0, "right"],
    "hangs": [None, "not finished after 0.5 s"],
    "ends": [None, "ended its process with 9"],
  }
  assert capsys.readouterr().out.splitlines() == [
    "tried good",
    "hangs: not finished after 0.5 s",
    "ends: ended its process with 9",
    "tried last",
  ]
  with pytest.raises(SystemExit, match="7"):
    tune.watched([sys.executable, "-c", "raise SystemExit(7)"], 0.5)


def test_tune_does_not_try_what_is_known_again(monkeypatch, capsys):
  known = {"{}": [8.0, "known"], json.dumps({"forward": {"vector": 3}}): [None, "hangs"]}
  monkeypatch.setattr(tune.sys, "stdin", io.StringIO(json.dumps(known)))
  monkeypatch.setattr(tune, "attempt", lambda *given, **more: tune.Trial(4.0, "right"))
  found = tune.main(["norms", "--interpret", "--most", "2", *ONE])
  assert found == {"D64": {"forward": {"vector": 1}}}
  said = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[0] == "{"]
  changes = json.dumps({"forward": {"vector": 1}})
  assert [x.get("changes", x.get("end")) for x in said[:-1]] == [changes] * 2


def test_neighbors_of_a_configuration_change_one_field_each():
  @dataclasses.dataclass(frozen=True)
  class Inner:
    stages: int = 3

  @dataclasses.dataclass(frozen=True)
  class Config:
    inner: Inner = Inner()
    joined: bool = False

  assert list(tune.neighbors(Config())) == [
    *((("inner", "stages"), n) for n in (1, 2, 4, 6)),
    (("joined",), True),
  ]
  changes = tune.with_change({"inner": {"slots": 2}}, ("inner", "stages"), 4)
  assert changes == {"inner": {"slots": 2, "stages": 4}}


def test_every_folder_of_kernels_can_be_tuned():
  kernels = Path(tuning.__file__).parents[1]
  assert set(tune.CASES) == {path.parent.name for path in kernels.glob("*/config.py")}


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["norms", "--one"], "kernels need a Hopper GPU; with --interpret kernels run on a CPU"),
    (["norms", "--limit", "0"], "--limit 0 must be more than 0 seconds, such as --limit 180"),
    (["norms", "--interpret", "--write"], "an interpreted kernel has no time"),
    (["norms", "--interpret", "--cases", "nrom"], "norms has no case 'nrom'; use one of norm"),
  ],
)
def test_tune_with_a_wrong_argument_says_what_to_do(arguments, message, capsys):
  with pytest.raises(SystemExit, match="2"):
    tune.main(arguments)
  assert message in capsys.readouterr().err
