"""Checks of arguments that mixers and models share."""

import difflib
from collections.abc import Iterable
from numbers import Integral


def check_choice(what: str, value: str, choices: Iterable[str]) -> str:
  """Returns `value` if it is one of `choices`.

  Raises:
    ValueError: it is not; the message gives the nearest choice and all of them.
  """
  choices = list(choices)
  if value in choices:
    return value
  near = difflib.get_close_matches(str(value), choices, n=1)
  hint = f"; did you mean {near[0]!r}?" if near else "."
  listed = ", ".join(repr(choice) for choice in choices) or "(there are none)"
  raise ValueError(f"{what}={value!r} is unknown{hint} Use one of: {listed}.")


def check_positive(name: str, value: int) -> int:
  """Returns `value` if it is an integer of at least 1, else raises `ValueError`."""
  if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
    raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
  return int(value)


def check_heads(dim: int, num_heads: int) -> int:
  """Returns the width of a head, dim / num_heads, or raises `ValueError` if it is no integer."""
  check_positive("dim", dim)
  check_positive("num_heads", num_heads)
  if dim % num_heads:
    below = dim - dim % num_heads
    near = f"{below} or {below + num_heads}" if below else f"{num_heads}"
    raise ValueError(
      f"dim={dim} is not a multiple of num_heads={num_heads}; use dim={near}, or another num_heads."
    )
  return dim // num_heads
