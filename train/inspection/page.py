"""A report as one HTML file: tables, and plots as inline SVG; it loads nothing from elsewhere."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from train.inspection import text, ticks
from train.inspection.report import Report

_COLORS = ("#3567b0", "#c2532d", "#4c8c4a", "#8a5aa8", "#b08a1e", "#3d9aa0")
_LIVES = "tokens; 1,000,000: that many or more"
_MAX_LINES = 12  # of a plot of layers: more are thinned
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; background: #fff;
       max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 2px 10px; box-shadow: 0 1px #e3e7ee;
         white-space: nowrap }
th { color: #5b6677; font-weight: 500 } .left { text-align: left } .bad { color: #b3261e }
td.left + td.left { white-space: normal; overflow-wrap: anywhere }
code { font: 13px ui-monospace, monospace } svg { max-width: 100% }
.track { width: 80px; display: inline-block; text-align: left }
.bar { background: #3567b0; height: 8px; display: inline-block }
.scroll { overflow-x: auto }
"""


def page(found: Report) -> str:
  """The report as a page."""
  step = "" if found["step"] is None else f", step {found['step']:,}"
  title = f"{found['kind']} {found['folder']}{step}"
  parts = [f"<h1>{_text(title)}</h1>"]
  if found["settings"]:
    rows = [(name, ", ".join(values)) for name, values in text.groups(found["settings"])]
    parts.append(_section("Settings", _table(("group", "settings"), rows, left=(0, 1))))
  if found.get("steps"):
    states = [(f"{x['step']:,}", x["state"]) for x in found["steps"]]
    parts.append(_section("Checkpoints", _table(("step", "state"), states, left=(1,))))
  counts = [(name, x) for name, x in found.get("data", {}).items() if x]
  if counts:
    rows = [(name, *(f"{x[key] or 0:,}" for key in x)) for name, x in counts]
    parts.append(_section("Data", _table(("set", *counts[0][1]), rows, left=(0,))))
  if found.get("metrics"):
    rows = [
      (", ".join(f"{k} {text.number(v)}" for k, v in row.items()),) for row in found["metrics"]
    ]
    parts.append(_section("Last metrics", _table(("row",), rows, left=(0,))))
  parts.append(_curves(found.get("curves")))
  if "half_lives" in found:
    parts.append(_half_lives(found["half_lives"]))
  parts.append(_parameters(found["parameters"], found["total"]))
  if "difference" in found:
    parts.append(_difference(found["difference"]))
  head = f"<meta charset='utf-8'><title>{_text(title)}</title><style>{_STYLE}</style>"
  return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _text(value: Any) -> str:
  return html.escape(str(value))


def _section(title: str, body: str) -> str:
  return f"<h2>{_text(title)}</h2>{body}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], left: Sequence[int] = ()) -> str:
  """A table of texts, with the columns `left` aligned there. Cells that are `_Raw` are HTML."""
  css = lambda i: " class='left'" if i in left else ""
  cell = lambda x: x if isinstance(x, _Raw) else _text(x)

  def line(tag: str, cells: Sequence[Any]) -> str:
    return "".join(f"<{tag}{css(i)}>{cell(x)}</{tag}>" for i, x in enumerate(cells))

  body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
  head_and_body = f"<tr>{line('th', head)}</tr>{body}"
  return f"<div class='scroll'><table cellspacing='0'>{head_and_body}</table></div>"


class _Raw(str):
  """Text that is HTML already."""


def _curves(curves: Report | None) -> str:
  if curves is None or not curves["loss"]:
    return ""
  parts = [_section("Training loss, nats per token", lines({"training": curves["loss"]}, log=True))]
  if note := text.left_out(curves):
    parts.append(f"<p>{_text(note)}</p>")
  if curves["validation"]:
    plots = lines(curves["validation"], log=True)
    parts.append(_section("Validation, bits per byte (nats per token without bytes)", plots))
  return "".join(parts)


def _parameters(rows: Sequence[Report], total: int) -> str:
  shape = lambda row: " × ".join(map(str, row["shape"])) or "1"
  head, largest = ["parameter", "dtype", "shape"], max(row.get("rms", 0) for row in rows)
  table = []
  for row in rows:
    cells = [_Raw(f"<code>{_text(row['name'])}</code>"), row["dtype"], shape(row)]
    if "rms" in row:
      width = 80 * row["rms"] / largest if largest else 0
      bar = _Raw(f"{row['rms']:.3g} {_bar(width)}")
      wrong = _Raw(f"<b class='bad'>{row['non_finite']:,}</b>") if row["non_finite"] else "0"
      cells += [f"{row['norm']:.3g}", bar, f"{row['largest']:.3g}"]
      cells += [f"{100 * row['near_zero']:.1f} %", wrong]
    table.append(cells)
  if rows and "rms" in rows[0]:
    head += ["norm", "rms", "largest", "near zero", "not finite"]
  return _section(f"{total:,} numbers in {len(rows)} parameters", _table(head, table, left=(0,)))


def _bar(width: float) -> str:
  return f"<span class='track'><span class='bar' style='width:{width:.1f}px'></span></span>"


def _difference(found: Report) -> str:
  step = "" if found["to"]["step"] is None else f", step {found['to']['step']:,}"
  parts = [f"<p>{_text(line)}</p>" for line in _structure(found)]
  rows = [
    (
      _Raw(f"<code>{_text(row['name'])}</code>"),
      f"{row['norm']:.3g}",
      "-" if row["relative"] is None else f"{row['relative']:.3g}",
      f"{row['largest']:.3g}",
      f"{100 * row['changed']:.1f} %",
    )
    for row in found["parameters"]
  ]
  head = ("parameter", "norm", "relative", "largest", "changed")
  parts.append(_table(head, rows, left=(0,)))
  return _section(f"Difference to {found['to']['folder']}{step}", "".join(parts))


def _structure(found: Report) -> list[str]:
  listed = [
    f"{name}: {text.number(ours)} here, {text.number(theirs)} there"
    for name, (ours, theirs) in found["settings"].items()
  ]
  for label in ("other_shape", "only_here", "only_there"):
    listed += [f"{label.replace('_', ' ')}: {', '.join(found[label])}"] if found[label] else []
  return listed


def _half_lives(rows: Sequence[Report]) -> str:
  head = ("layer", "mixer", "shortest", "median", "longest", "slowest head")
  numbers = lambda row: [text.life(row[key]) for key in head[2:5]] + [row["slowest_head"]]
  table = [
    (row["layer"], row["mixer"], *(numbers(row) if row["channels"] else ["no decay", "", "", ""]))
    for row in rows
  ]
  drawn = [row for row in rows if row["channels"]]
  drawn = drawn[:: -(-len(drawn) // _MAX_LINES) or 1]
  curves = {f"layer {row['layer']}": row["quantiles"] for row in drawn}
  plot = lines(curves, log=True, labels=("share of channels, %", _LIVES)) if curves else ""
  return _section("Half-lives of the state, tokens", plot + _table(head, table, left=(1,)))


def lines(
  curves: Mapping[str, Sequence[Sequence[float]]],
  *,
  log: bool = False,
  labels: tuple[str, str] = ("step", ""),
) -> str:
  """An SVG with one line per curve of points (x, y), all of them; y is logarithmic with `log`."""
  width, height, left, bottom = 860, 260, 64, 34
  xs = [x for points in curves.values() for x, _ in points]
  ys = [y for points in curves.values() for _, y in points]
  scale = ticks.scale_of(ys, log)
  x0, dx = min(xs), (max(xs) - min(xs)) or 1
  low, dy = scale(min(ys)), (scale(max(ys)) - scale(min(ys))) or 1
  at_x = lambda x: left + (width - left - 130) * (x - x0) / dx
  at_y = lambda y: 10 + (height - bottom - 10) * (1 - (scale(y) - low) / dy)
  parts = [
    f"<line x1='{left}' x2='{width - 130}' y1='{at_y(y):.1f}' y2='{at_y(y):.1f}' "
    f"stroke='#e3e7ee'/><text x='{left - 8}' y='{at_y(y) + 4:.1f}' text-anchor='end'>{y:.6g}</text>"
    for y in ticks.round_numbers(min(ys), max(ys), log=log)
  ]
  parts += [
    f"<text x='{at_x(x):.1f}' y='{height - bottom + 18}' text-anchor='middle'>{x:,.10g}</text>"
    for x in ticks.round_numbers(x0, max(xs))
    if x == int(x)
  ]
  for number, (name, points) in enumerate(curves.items()):
    color = _COLORS[number % len(_COLORS)]
    path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
    parts.append(f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='1.5'/>")
    parts.append(
      f"<text x='{width - 120}' y='{24 + 16 * number}' fill='{color}'>{_text(name[:18])}</text>"
    )
  parts.append(
    f"<text x='{(left + width - 130) / 2}' y='{height - 2}' text-anchor='middle'>"
    f"{_text(' · '.join(filter(None, labels)))}</text>"
  )
  size = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
  return f"<svg {size} font-size='12' fill='#5b6677' role='img'>{''.join(parts)}</svg>"
