"""Records, and compares with the records."""

import argparse
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from tests.oracle import __doc__ as ABOUT
from tests.oracle import programs, values

ROOT = Path(__file__).resolve().parents[2]
RECORDS = Path(__file__).with_name("records.json")
KINDS = {
  "losses": values.losses,
  "mixers": values.mixers,
  "configs": values.configs,
  "programs": programs.programs,
}


# Results like others, which only `--all` or their names choose.
LIKE_OTHERS = {
  "configs": r"-1b3|original|mqar|transformer|llama|-h-|n4k2|s6$|qlstm$|gla-600m|vi[lm]-small|vim-",
  "programs": r"normalized|kernels/channel.*H32K64|train_step/|model_step/(?!gla$|softmax_att)",
}


def chosen(kind: str, match: str, *, whole: bool) -> list[str]:
  """Names of results of a kind that contain `match`; without it, and not `whole`, the usual."""
  names = [name for name in KINDS[kind]() if match in name]
  if whole or match or kind not in LIKE_OTHERS:
    return names
  return [name for name in names if not re.search(LIKE_OTHERS[kind], name)]


def environment() -> dict[str, str]:
  """Versions and the kind of CPU, which bits may depend on."""
  info = Path("/proc/cpuinfo")
  text = info.read_text() if info.exists() else ""
  model = re.findall(r"model name\s*: (.*)", text)[:1] or [platform.processor()]
  vectors = re.findall(r"\b(?:avx|amx|fma)\w*", (re.findall(r"flags\s*: (.*)", text) or [""])[0])
  return {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "cpu": " ".join([*model, *sorted(vectors)]),
  }


def skipped(kind: str, recorded: dict[str, str], now: dict[str, str]) -> str | None:
  """Why records of this kind say nothing here, or None."""
  needs = {"losses": "python", "programs": "jax"}.get(kind)
  if needs is None or recorded[needs] == now[needs]:
    return None
  return f"{kind}: recorded with {needs} {recorded[needs]}, not compared with {now[needs]}"


def exact(kind: str, recorded: dict[str, str], now: dict[str, str]) -> bool:
  """Whether results must be equal to the bit."""
  return kind == "programs" or all(recorded[name] == now[name] for name in ("jax", "cpu"))


def differences(name: str, want: Any, got: Any, equal: bool) -> list[str]:
  """A line for each result that is not as recorded."""
  if want is None:
    return [f"{name}: nothing is recorded"]
  if isinstance(got, dict) and isinstance(want, dict):
    parts = dict.fromkeys((*got, *want))
    lines = [differences(f"{name} {key}", want.get(key), got.get(key), equal) for key in parts]
    return [line for some in lines for line in some]
  if got is not None and (got == want or (not equal and values.close(got, want))):
    return []
  return [f"{name}: {got}, recorded {want}"]


def compare(kind: str, names: list[str], records: dict[str, Any]) -> tuple[list[str], list[str]]:
  """(lines of differences, notes) of these results of a kind."""
  recorded, now = records[kind]["environment"], environment()
  if reason := skipped(kind, recorded, now):
    return [], [reason]
  equal, known, notes = exact(kind, recorded, now), records[kind]["values"], []
  if not equal:
    other = next(name for name in ("jax", "cpu") if recorded[name] != now[name])
    notes.append(f"{kind}: recorded with another {other}, compared within {values.RELATIVE}")
  makers, lines = KINDS[kind](), []
  for name in names:
    lines += differences(f"{kind} {name}", known.get(name), makers[name](), equal)
  later = sum(name in records[kind].get("later", {}) for name in names)
  but = f", {later} of them recorded again later" if later else ""
  notes.append(f"{kind}: {len(names)} compared with commit {records[kind]['commit']}{but}")
  return lines, notes


def record(kind: str, names: list[str], records: dict[str, Any], commit: str) -> None:
  """Replaces these records of a kind. Those of results that no longer exist are removed.

  A part of a kind keeps the commit of the others, and "later" has its own, by name.
  """
  makers, now = KINDS[kind](), environment()
  old = records.get(kind, {}) if len(names) < len(makers) else {}
  if old and (skipped(kind, old["environment"], now) or not exact(kind, old["environment"], now)):
    raise SystemExit(f"{kind}: recorded with {old['environment']}; record all of them, or there.")
  kept = {name: value for name, value in old.get("values", {}).items() if name in makers}
  later = {name: of for name, of in old.get("later", {}).items() if name in makers}
  for name in names:
    value = makers[name]()
    if old and kept.get(name) != value:
      later[name] = commit
    kept[name] = value
    print(kind, name, file=sys.stderr, flush=True)
  head = {"commit": old.get("commit", commit), "environment": old.get("environment", now)}
  records[kind] = head | ({"later": later} if later else {}) | {"values": kept}


def read() -> dict[str, Any]:
  return json.loads(RECORDS.read_text())


def written(records: dict[str, Any]) -> str:
  """The text of the file: a line for each name."""
  kinds = []
  for kind, record in records.items():
    rows = ",\n".join(f"   {json.dumps(n)}: {json.dumps(x)}" for n, x in record["values"].items())
    rest = {name: value for name, value in record.items() if name != "values"}
    head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in rest.items())
    kinds.append(f' {json.dumps(kind)}: {{\n{head},\n  "values": {{\n{rows}\n  }}\n }}')
  return "{\n" + ",\n".join(kinds) + "\n}\n"


def main() -> int:
  parser = argparse.ArgumentParser(description=ABOUT, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument("mode", choices=("record", "compare"))
  parser.add_argument("kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
  parser.add_argument("--match", default="", help="only results whose name contains this")
  parser.add_argument("--all", action="store_true", help="also the programs like others")
  args = parser.parse_args()
  records, found = read() if RECORDS.exists() else {}, []
  for kind in args.kinds:
    names = chosen(kind, args.match, whole=args.all or args.mode == "record")
    if args.mode == "record":
      head = ["git", "rev-parse", "--short", "HEAD"]
      record(kind, names, records, subprocess.check_output(head, cwd=ROOT, text=True).strip())
      RECORDS.write_text(written(records))
      continue
    lines, notes = compare(kind, names, records)
    print(*lines, *notes, sep="\n", flush=True)
    found += lines
  return bool(found)
