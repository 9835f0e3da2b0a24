"""A report as text for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lnssm_jax.files.printable import printable
from train.inspection import ticks
from train.inspection.report import Report

_MAX_NAME, _MAX_VALUE = 200, 1000  # characters of a name and of a setting

# Dots of a braille character by row and column, as bits of its code point.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def lines(found: Report) -> Iterator[str]:
  """Yields the lines of a report, without control characters."""
  return map(printable, _lines(found))


def _lines(found: Report) -> Iterator[str]:
  step = "" if found["step"] is None else f", step {found['step']:,}"
  yield f"{found['kind']}  {found['folder']}{step}"
  for name, values in groups(found["settings"] or {}):
    yield from _wrapped(f"{name:<13}", values)
  for name, counts in found.get("data", {}).items():
    numbers = [f"{counts[key]:,} {key}" for key in counts if counts[key]] if counts else []
    yield f"data         {name}: {', '.join(numbers) or 'its files are elsewhere'}"
  for entry in found.get("steps", []):
    yield f"checkpoint   {entry['step']:,}: {entry['state']}"
  for row in found.get("metrics", []):
    yield f"metrics      {', '.join(f'{k} {number(v)}' for k, v in row.items())}"
  yield from _curves(found.get("curves"))
  yield ""
  yield from _table(found["parameters"], found["total"])
  if "half_lives" in found:
    yield ""
    yield from _half_lives(found["half_lives"])
  if "difference" in found:
    yield ""
    yield from _difference(found["difference"])


def groups(settings: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
  """(name, ["dim=64", ...]) of each group, those of the run last; without settings that are off."""
  is_set = lambda value: value not in (None, {}, [], (), "")
  plain = {name: x for name, x in settings.items() if not isinstance(x, Mapping)}
  named = [(name, x) for name, x in settings.items() if isinstance(x, Mapping)]
  shown = [
    (name, [f"{key}={number(value)}" for key, value in group.items() if is_set(value)])
    for name, group in [*named, ("run", plain)]
  ]
  return [(name, values) for name, values in shown if values]


def _wrapped(head: str, words: Sequence[str], width: int = 100) -> Iterator[str]:
  line = head
  for word in words:
    if len(line) + len(word) > width and line.strip():
      yield line.rstrip()
      line = " " * len(head)
    line += f"{word} "
  yield line.rstrip()


def _curves(curves: Report | None) -> Iterator[str]:
  if curves is None or not curves["loss"]:
    return
  yield ""
  yield "training loss, nats per token"
  yield from plot(curves["loss"])
  if note := left_out(curves):
    yield note
  for name, points in curves["validation"].items():
    step, value = points[-1]
    best = min(value for _, value in points)
    yield f"validation   {name}: {value:.4f} at step {step:,}, best {best:.4f}"


def left_out(curves: Report) -> str:
  """Says how many losses the curve lacks, since they are no number; "" for none."""
  count = curves.get("not_finite", 0)
  return f"not drawn: {count:,} losses that are NaN or infinite" if count else ""


def plot(points: Sequence[Sequence[float]], width: int = 64, height: int = 8) -> Iterator[str]:
  """Lines of a plot of (x, y), all of them, in braille characters, each of 2 by 4 dots.

  y is logarithmic where all are above 0. Round numbers are at the row with their dots.
  """
  xs, ys = [p[0] for p in points], [p[1] for p in points]
  low, high, scale = min(ys), max(ys), ticks.scale_of(ys, log=True)
  rows = [[0] * width for _ in range(height)]
  place = lambda value, low, high, count: round((value - low) / ((high - low) or 1) * (count - 1))
  at = lambda y, count: count - 1 - place(scale(y), scale(low), scale(high), count)
  for x, y in points:
    column, row = place(x, xs[0], xs[-1], 2 * width), at(y, 4 * height)
    rows[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
  numbers = ticks.round_numbers(low, high, log=True)
  labels = {at(y, 4 * height) // 4: f"{y:.6g}" for y in numbers}
  for number, row in enumerate(rows):
    yield f"{labels.get(number, ''):>10} ┤" + "".join(chr(0x2800 + bits) for bits in row).rstrip(
      "\u2800"
    )
  yield f"{'':>10} └{'step ' + format(int(xs[0]), ',') + ' to ' + format(int(xs[-1]), ',')}"


def _table(rows: Sequence[Report], total: int) -> Iterator[str]:
  rows = [row | {"name": printable(row["name"], _MAX_NAME)} for row in rows]
  width = max(len("parameter"), *(len(row["name"]) for row in rows))
  shapes = [" x ".join(map(str, row["shape"])) or "1" for row in rows]
  wide = max(len("shape"), *map(len, shapes))
  has_values = "rms" in rows[0]
  numbers = f"  {'norm':>9}  {'rms':>9}  {'largest':>9}  {'near zero':>9}" if has_values else ""
  yield f"{'parameter':<{width}}  {'dtype':<8}  {'shape':<{wide}}{numbers}".rstrip()
  for row, shape in zip(rows, shapes, strict=True):
    line = f"{row['name']:<{width}}  {row['dtype']:<8}  {shape:<{wide}}"
    if has_values:
      line += f"  {row['norm']:>9.3g}  {row['rms']:>9.3g}  {row['largest']:>9.3g}"
      line += f"  {100 * row['near_zero']:>7.1f} %"
      if row["non_finite"]:
        line += f"  {row['non_finite']:,} NOT FINITE"
    yield line.rstrip()
  yield f"{total:,} numbers in {len(rows)} parameters"


def _half_lives(rows: Sequence[Report]) -> Iterator[str]:
  width = max(len("mixer"), *(len(row["mixer"]) for row in rows))
  yield "half-lives of the state, tokens"
  yield f"layer  {'mixer':<{width}}  {'shortest':>9}  {'median':>9}  {'longest':>9}  slowest head"
  for row in rows:
    cells = "  ".join(f"{life(row[key]):>9}" for key in ("shortest", "median", "longest"))
    shown = f"{cells}  {row['slowest_head']:>12}" if row["channels"] else "no decay"
    yield f"{row['layer']:>5}  {row['mixer']:<{width}}  {shown}"


def life(value: float | None) -> str:
  """A half-life; None is endless."""
  return "forever" if value is None else f"{value:.3g}"


def _difference(found: Report) -> Iterator[str]:
  to = found["to"]
  step = "" if to["step"] is None else f", step {to['step']:,}"
  yield f"difference to {to['kind']} {to['folder']}{step}"
  for name, (ours, theirs) in found["settings"].items():
    yield f"setting      {name}: {number(ours)} here, {number(theirs)} there"
  rows = found["parameters"]
  for label in ("other_shape", "only_here", "only_there"):
    if found[label]:
      names = (printable(name, _MAX_NAME) for name in found[label])
      yield f"{label.replace('_', ' '):<11}  {', '.join(names)}"
  if not rows:
    return
  rows = [row | {"name": printable(row["name"], _MAX_NAME)} for row in rows]
  width = max(len("parameter"), *(len(row["name"]) for row in rows))
  yield f"{'parameter':<{width}}  {'norm':>9}  {'relative':>9}  {'largest':>9}  {'changed':>9}"
  for row in rows:
    relative = "-" if row["relative"] is None else f"{row['relative']:.3g}"
    yield (
      f"{row['name']:<{width}}  {row['norm']:>9.3g}  {relative:>9}  {row['largest']:>9.3g}"
      f"  {100 * row['changed']:>7.1f} %"
    )


def number(value: Any) -> str:
  """A setting or metric, short."""
  if type(value) is float:
    return f"{value:.6g}"
  text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
  return printable(text, _MAX_VALUE)
