"""The content of a folder as one JSON object."""

import contextlib
import fnmatch
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from lnssm_jax.files.buckets import local
from lnssm_jax.files.reading import DataError, read_json
from lnssm_jax.pretrained.manifest import MANIFEST, TENSORS, is_exported, read_manifest
from train.checkpoint import step_folders
from train.config.checked import did_you_mean
from train.inspection.arrays import Arrays, OrbaxArrays, SafetensorsArrays, orbax_tree
from train.inspection.statistics import difference, statistics
from train.logging.plot import read as read_curves
from train.runs.config_file import CONFIG, read

Report = dict[str, Any]
CURVE_POINTS = 400
_PART = 16  # arrays that a thread reads, one after the other
_TRIES = 20  # where a run in training deletes what is read


class Opened(NamedTuple):
  """A folder that was recognized: what is known about it, and its arrays."""

  about: Report  # folder, kind, step, settings, steps, data, curves
  arrays: Arrays


def report(
  folder: str | Path,
  *,
  step: int | None = None,
  select: str = "*",
  values: bool = True,
  compare: str | Path | int | None = None,
  half_lives: str | None = None,
) -> Report:
  """Describes a run folder, an exported model, or a folder of Orbax or safetensors arrays.

  Reads the parameters that `select` names, one after another, and nothing else of that size.

  Args:
    step: checkpoint of a run; None means the newest.
    select: names of parameters, with wildcards: "blocks.mixer.*".
    values: whether to read parameters at all; without, only names, shapes and dtypes.
    compare: another folder, or a step of the same run.
    half_lives: adds the half-lives of the state while the model reads this text, "" where decays
      are constants of the layer. That part imports JAX and builds the model.

  Raises:
    DataError: the folder is none of these, an array cannot be read, or `select` fits no parameter.
    FileNotFoundError: the run has no checkpoint (of that step).
    ValueError: the config, the manifest, or the metrics are damaged.
  """
  options = (select, values, compare, half_lives)
  for _ in range(_TRIES):
    with contextlib.ExitStack() as holding:
      opened = open_folder(Path(folder), step, holding)
      try:
        return _described(opened, *options, holding)
      except DataError:
        # Where files have no locks, a run in training may have deleted the newest step meanwhile.
        read = opened.arrays.folder if isinstance(opened.arrays, OrbaxArrays) else Path(folder)
        if step is not None or read.exists():
          raise
  raise DataError(f"{folder} deletes its checkpoints too soon; give --step, or try again.")


def _described(
  opened: Opened,
  select: str,
  values: bool,
  compare: str | Path | int | None,
  half_lives: str | None,
  holding: contextlib.ExitStack,
) -> Report:
  (about, arrays), folder = opened, opened.about["folder"]
  is_chosen = re.compile(fnmatch.translate(select)).match
  names = [name for name in arrays if is_chosen(name)]
  if not len(list(arrays)):
    raise DataError(f"{folder} has no arrays, so there is nothing to show; use another.")
  if not names:
    raise DataError(f"no parameter fits select={select!r}{did_you_mean(select, arrays)}")
  rows = _in_threads(lambda name: _row(arrays, name, values), names)
  found = about | {"total": sum(row["size"] for row in rows), "parameters": rows}
  if compare is not None:
    found["difference"] = _compared(opened, names, compare, holding)
  if half_lives is not None:
    if found["kind"] not in ("run", "exported model"):
      raise DataError(
        f"{folder} has arrays, but no model with half-lives; give a run or an export."
      )
    from train.inspection import half_lives as of_state

    found["half_lives"] = of_state.half_lives(folder, found["step"], half_lives)
  return found


def open_folder(
  folder: Path, step: int | None = None, holding: contextlib.ExitStack | None = None
) -> Opened:
  """Recognizes a folder; arguments and errors as in `report`.

  A run in training does not delete the checkpoint until `holding` is closed, where files have
  locks.
  """
  if is_exported(folder):
    return _export(folder, step)
  files = [folder] if folder.suffix == ".safetensors" else sorted(folder.glob("*.safetensors"))
  published = files and not (folder / "checkpoints").exists()
  if (folder / CONFIG).is_file() and not published:
    return _run(folder, step, holding or contextlib.ExitStack())
  tree = orbax_tree(folder)
  about = {"folder": str(folder), "step": None, "settings": None}
  if tree is not None:
    return Opened(about | {"kind": "Orbax checkpoint"}, OrbaxArrays(tree))
  if files and all(path.is_file() for path in files):
    return Opened(about | {"kind": "safetensors"}, SafetensorsArrays(files))
  raise DataError(
    f"{folder} holds nothing to inspect: it was searched for {CONFIG} (a run), {MANIFEST} (an "
    "exported model), _METADATA (an Orbax checkpoint, also in params, state, pytree or default) "
    f"and *.safetensors; {_content(folder)}."
  )


def _run(folder: Path, step: int | None, holding: contextlib.ExitStack) -> Opened:
  # As stored: any run will do, also one of images.
  settings, directory = read(folder, dict), folder / "checkpoints"
  steps = step_folders.steps_in(directory)
  if not steps:
    from train.runs.run_folder import RunFolder  # imports JAX

    raise RunFolder(folder).without_checkpoint()
  if step is not None and step not in steps:
    listing = ", ".join(map(str, steps))
    raise FileNotFoundError(f"no checkpoint of step {step} in {directory}; there are {listing}.")
  # The parameters shown are checked byte by byte, all else by the sizes of its files:
  # `lnssm-train verify` reads every byte.
  damage: dict[int, str | None] = {}
  chosen = None
  for candidate in reversed(steps):
    with contextlib.ExitStack() as held:
      found = held.enter_context(step_folders.held(directory, candidate))
      try:
        wrong = found.damage(content=False)
        if chosen is None and step in (None, candidate):
          wrong = wrong or found.damage(["params"])
          chosen = None if wrong else candidate
      except step_folders.DeletedError:  # by a run in training, which has newer ones by now
        if chosen is None:
          return _run(folder, step, holding)
        continue
      damage[candidate] = wrong
      if chosen == candidate:
        holding.push(held.pop_all())
  if chosen is None:
    wrong = "; ".join(f"step {s}: {line}" for s, line in sorted(damage.items()) if line)
    raise DataError(f"no checkpoint to show in {directory}: {wrong}. Use another with --step.")
  good = lambda s: "parameters intact" if s == chosen else "complete"
  about = {
    "folder": str(folder),
    "kind": "run",
    "step": chosen,
    "settings": settings,
    "steps": [
      {"step": s, "state": f"DAMAGED: {line}" if line else good(s)}
      for s, line in sorted(damage.items())
    ],
    "data": _token_sets(settings.get("data")),
    "curves": _curves(folder),
  }
  return Opened(about, OrbaxArrays(directory / str(chosen) / "params"))


def _export(folder: Path, step: int | None) -> Opened:
  manifest = read_manifest(folder)
  if step not in (None, manifest.step):
    raise DataError(f"{folder} has the model of step {manifest.step}, not of step {step}.")
  about = {
    "folder": str(folder),
    "kind": "exported model",
    "step": manifest.step,
    "settings": {"model": manifest.model, **manifest.settings},
    "metrics": manifest.metrics,
  }
  return Opened(about, SafetensorsArrays([folder / TENSORS]))


def _in_threads(function: Callable[[str], Report], names: Sequence[str]) -> list[Report]:
  """Results of all names in their order; a thread takes many at once, as a folder has 10**5."""
  parts = [names[start : start + _PART] for start in range(0, len(names), _PART)]
  with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
    return [row for rows in pool.map(lambda part: list(map(function, part)), parts) for row in rows]


def _row(arrays: Arrays, name: str, values: bool) -> Report:
  dtype, shape = arrays.kind(name)
  size = 1
  for length in shape:
    size *= length
  row = {"name": name, "dtype": dtype, "shape": list(shape), "size": size}
  return row | statistics(arrays[name]) if values else row


def _compared(
  opened: Opened, names: list[str], other: str | Path | int, holding: contextlib.ExitStack
) -> Report:
  """The difference to another folder, or another step of the run."""
  (about, arrays), folder = opened, Path(opened.about["folder"])
  place = Path(str(other))
  is_step = place.name.isdecimal() and not place.exists()
  where = (folder, int(place.name)) if is_step else (place, None)
  there, others = open_folder(*where, holding)
  ours, theirs = _flat(about["settings"]), _flat(there["settings"])
  known = set(others)
  common = [name for name in names if name in known]
  same = [name for name in common if arrays.kind(name)[1] == others.kind(name)[1]]
  rows = _in_threads(lambda name: difference(arrays[name], others[name]), same)
  return {
    "to": {name: there[name] for name in ("folder", "kind", "step")},
    "settings": {
      name: [ours[name], theirs[name]]
      for name in ours
      if name in theirs and ours[name] != theirs[name]
    },
    "parameters": [{"name": name, **row} for name, row in zip(same, rows, strict=True)],
    "other_shape": sorted(set(common) - set(same)),
    "only_here": sorted(set(names) - set(common)),
    "only_there": sorted(set(others) - set(arrays)),
  }


def _flat(settings: Mapping[str, Any] | None, prefix: str = "") -> Report:
  """{"model.dim": 512} of nested settings."""
  flat = {}
  for name, value in (settings or {}).items():
    if isinstance(value, Mapping) and value:
      flat |= _flat(value, f"{prefix}{name}.")
    else:
      flat[f"{prefix}{name}"] = value
  return flat


def _token_sets(data: Any) -> Report:
  """Counts of each set of tokens by its name; None if its files are elsewhere."""
  found = {}
  groups = [data.get(group) for group in ("train", "validation")] if isinstance(data, dict) else []
  for name in (name for names in groups if isinstance(names, list) for name in names):
    try:
      values = read_json(local(data["folder"]) / f"{name}.json", 1 << 24)
      found[name] = {key: values.get(key) for key in ("documents", "tokens", "bytes")}
    except (OSError, ValueError, LookupError):
      found[name] = None
  return found


def _curves(folder: Path) -> Report:
  """Training loss and validation sets as [step, value], thinned to CURVE_POINTS points.

  `not_finite` counts the training losses that are left out, as they are no number.
  """
  if not (folder / "metrics.jsonl").is_file():
    return {"loss": [], "validation": {}, "not_finite": 0}
  training, validation = read_curves(folder)
  finite = lambda points: [[x, y] for x, y in zip(*points, strict=True) if math.isfinite(y)]
  sets = {name: _thinned(finite(points)) for name, points in validation.items()}
  loss = finite(training)
  return {
    "loss": _thinned(loss),
    "validation": {name: x for name, x in sets.items() if x},
    "not_finite": len(training[1]) - len(loss),
  }


def _thinned(points: list[list[float]]) -> list[list[float]]:
  """At most CURVE_POINTS points: the first and the last, and of equal parts least and largest."""
  if len(points) <= CURVE_POINTS:
    return points
  parts = CURVE_POINTS // 2 - 1
  kept = {0, len(points) - 1}
  for part in range(parts):
    places = range(part * len(points) // parts, (part + 1) * len(points) // parts)
    value = lambda place: points[place][1]
    kept |= {min(places, key=value), max(places, key=value)}
  return [points[place] for place in sorted(kept)]


def _content(folder: Path) -> str:
  if not folder.exists():
    return "it does not exist"
  if not folder.is_dir():
    return "it is a file"
  names = sorted(path.name for path in folder.iterdir())[:8]
  return f"it has {', '.join(names) or 'nothing'}"


def to_json(found: Report) -> str:
  """The report as JSON; null stands for numbers that JSON does not have."""
  return json.dumps(_finite(found), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: _finite(x) for name, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(x) for x in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
