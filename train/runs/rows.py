"""Rows of metrics.jsonl: one JSON object per line."""

from typing import Any

Row = dict[str, Any]  # one object of metrics.jsonl


def wrong_row(row: Any) -> str | None:
  """Describes what is wrong with `row`, as read from a file; None if it is valid.

  Every row has a `kind` and a `step`; training rows have a `loss`, evaluation rows a `set`, its
  `val_loss` and optionally `bits_per_byte`.
  """
  if not isinstance(row, dict):
    return "not a JSON object"
  kind, step = row.get("kind"), row.get("step")
  if not isinstance(kind, str) or type(step) is not int or not 0 <= step < 2**53:
    return f"kind {kind!r:.50} and step {step!r:.50}"
  numbers = {"train": ["loss"], "eval": ["val_loss", "bits_per_byte"]}.get(kind, [])
  for name in numbers:
    value = row.get(name)
    if type(value) not in (int, float) and (name != "bits_per_byte" or value is not None):
      return f"{name} {value!r:.50}"
    if type(value) is int and abs(value) >= 2**53:
      return f"{name} is too large"
  return (
    f"set {row.get('set')!r:.50}" if kind == "eval" and type(row.get("set")) is not str else None
  )
