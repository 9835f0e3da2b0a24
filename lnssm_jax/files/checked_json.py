"""JSON from elsewhere: parsed within bounds, and compared with the shape that its reader expects.

    values = parse(content)                                   # ValueError: why it is unusable
    check_shape(values, {"tokens": int, "sets?": [str]})      # ValueError: where it differs

Python's parser raises RecursionError for deep nesting and stops at numbers of 4,300 digits, but
takes NaN, the last of two equal keys, and numbers that no float holds.
"""

import itertools
import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 100  # of objects and lists, which recursive readers go through
_MAX_DIGITS = 300  # of a whole number: every number is finite as a float
_SHORT = reprlib.Repr(maxstring=40, maxother=40, maxdict=4, maxlist=4, maxlevel=2)
_NAMES = {
  str: "a string",
  int: "a whole number",
  float: "a number",
  bool: "true or false",
  None: "null",
}

# A type of `_NAMES`; a list of one shape; an object, {"key": shape, "optional key?": shape}, or
# {str: shape} if its keys are any; Any; or alternatives as a tuple.
type Shape = Any


class SyntaxProblem(ValueError):
  """A text that is no JSON, and the line where it is not."""

  def __init__(self, message: str, line: int):
    super().__init__(message)
    self.line = line


def parse(content: bytes | str, *, strict: bool = True) -> Any:
  """The value of a JSON text in UTF-8.

  Args:
    strict: rejects NaN, Infinity and halves of surrogate pairs. False: for files of other programs,
      which write them where nothing of ours reads, or where it is checked.

  Raises:
    ValueError: it is not JSON or not UTF-8, is nested too deeply, or has a duplicate key or a
      number that no float holds.
  """
  try:
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    value = json.loads(
      text,
      object_pairs_hook=_object,
      parse_int=_whole,
      parse_float=_finite,
      parse_constant=_constant if strict else None,
    )
  except UnicodeDecodeError as error:
    raise ValueError(
      f"not UTF-8 at byte {error.start} (0x{error.object[error.start]:02x})"
    ) from None
  except json.JSONDecodeError as error:
    line = f"line {error.lineno}, " if "\n" in error.doc else ""
    raise SyntaxProblem(
      f"not JSON: {error.msg} at {line}column {error.colno}", error.lineno
    ) from None
  except RecursionError:
    raise ValueError("nested too deeply") from None
  if _depth(value) > MAX_DEPTH:
    raise ValueError(f"nested too deeply, in more than {MAX_DEPTH} objects and lists")
  if strict and "\\ud" in text.lower():
    _check_pairs(value)
  return value


def check_shape(value: Any, shape: Shape, name: str = "it") -> None:
  """Raises ValueError, which names the place, unless a JSON value has a shape."""
  if shape is Any:
    return
  if isinstance(shape, tuple):
    if not any(_fits(value, option) for option in shape):
      raise _other(value, " or ".join(map(_described, shape)), name)
    inner = next(option for option in shape if _fits(value, option))
    check_shape(value, inner, name)
    return
  if not _fits(value, shape):
    raise _other(value, _described(shape), name)
  if isinstance(shape, list):
    for number, item in enumerate(value):
      check_shape(item, shape[0], f"{name}[{number}]")
  elif isinstance(shape, Mapping):
    _check_object(value, shape, name)


def _check_object(value: dict[str, Any], shape: Mapping[Any, Shape], name: str) -> None:
  if str in shape:
    for key, item in value.items():
      check_shape(item, shape[str], f"{name}.{key!r:.60}")
    return
  for key, inner in shape.items():
    plain = key.removesuffix("?")
    if plain in value:
      check_shape(value[plain], inner, plain if name == "it" else f"{name}.{plain}")
    elif plain == key:
      raise ValueError(f"{name} has no {plain!r}, {_described(inner)}")


def _fits(value: Any, shape: Shape) -> bool:
  """Whether the value itself, not what is in it, is of a shape."""
  if shape is None:
    return value is None
  if isinstance(shape, list | Mapping):
    return isinstance(value, list if isinstance(shape, list) else dict)
  return type(value) in ((int, float) if shape is float else (shape,))


def _described(shape: Shape) -> str:
  if isinstance(shape, tuple):
    return " or ".join(map(_described, shape))
  if isinstance(shape, list | Mapping):
    return "a list" if isinstance(shape, list) else "an object"
  return "anything" if shape is Any else _NAMES[shape]


def _other(value: Any, expected: str, name: str) -> ValueError:
  return ValueError(f"{name} is {_SHORT.repr(value)}, expected {expected}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  values = dict(pairs)
  if len(values) != len(pairs):
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))
    raise ValueError(f"an object has a duplicate key, {twice!r:.80}")
  return values


def _whole(digits: str) -> int:
  if len(digits) > _MAX_DIGITS:
    raise ValueError(f"a number has {len(digits):,} digits")
  return int(digits)


def _finite(digits: str) -> float:
  value = float(digits)
  if not math.isfinite(value):
    raise ValueError(f"the number {digits:.40} is too large")
  return value


def _constant(name: str) -> float:
  raise ValueError(f"{name} is no number of JSON")


def _depth(value: Any) -> int:
  """How many objects and lists are inside of each other, without recursion."""
  depth, level = 0, [value]
  while level := [x for x in level if isinstance(x, dict | list)]:
    depth += 1
    level = [
      inner
      for x in level
      for inner in (x.values() if isinstance(x, dict) else x)
      if isinstance(inner, dict | list)
    ]
  return depth


def _check_pairs(value: Any) -> None:
  """Raises ValueError if a string has half of a surrogate pair."""
  level = [value]
  while level:
    for text in level:
      if isinstance(text, str):
        _check_pair(text)
    level = [
      inner
      for x in level
      if isinstance(x, dict | list)
      for inner in (itertools.chain(*x.items()) if isinstance(x, dict) else x)
    ]


def _check_pair(text: str) -> None:
  try:
    text.encode()
  except UnicodeEncodeError as error:
    raise ValueError(
      f"a string has an unpaired surrogate at character {error.start}, which cannot be encoded"
    ) from None
