"""Random corruption of bytes and JSON."""

import copy
import json
import random
import struct
from typing import Any

ODD: tuple[Any, ...] = (
  None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, -0.5, float("nan"), float("inf"), "",
  "..", "../../etc/passwd", "/etc/passwd", "\x00", "\ud800", "x" * 100_000, [], {}, [[]], [None],
  {"a": {}}, [1] * 10_000,
)  # fmt: skip


def corrupt_bytes(raw: bytes, rng: random.Random) -> bytes:
  """Flips bits, overwrites, truncates, inserts, repeats or replaces bytes."""
  data = bytearray(raw)
  kind = rng.randrange(7)
  at = rng.randrange(max(len(data), 1))
  if kind == 0:
    for _ in range(rng.choice((1, 1, 10))):
      data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  elif kind == 1:
    data[at : at + rng.choice((1, 4, 8, 100))] = rng.randbytes(rng.choice((1, 4, 8, 100)))
  elif kind == 2:
    del data[at:]
  elif kind == 3:
    data[at:at] = rng.randbytes(rng.randrange(1, 200))
  elif kind == 4:
    data[at:at] = data[: rng.randrange(len(data))]
  elif kind == 5:
    number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1))
    data[at : at + 8] = struct.pack("<Q", number)
  else:
    data = bytearray(rng.randbytes(rng.randrange(2000)))
  return bytes(data)


def corrupt_json(raw: bytes, rng: random.Random) -> bytes:
  """Corrupts bytes, or one value in the tree: replaced by an unusual one, removed or duplicated."""
  kind = rng.randrange(10)
  if kind < 2:
    return corrupt_bytes(raw, rng)
  if kind == 2:
    depth = rng.choice((100, 10_000, 200_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    return (opening * depth + "1" + closing * depth).encode()
  values = json.loads(raw)
  for _ in range(rng.choice((1, 1, 3))):
    values = corrupt_value(values, rng)
  return json.dumps(values).encode(errors="surrogatepass")


def corrupt_value(values: Any, rng: random.Random) -> Any:
  """Returns `values` with one node changed, at any depth."""
  if rng.random() < 0.02 or not isinstance(values, dict | list) or not values:
    return copy.deepcopy(rng.choice(ODD))
  keys = list(values) if isinstance(values, dict) else list(range(len(values)))
  key = rng.choice(keys)
  if rng.random() < 0.1:
    del values[key]
  elif rng.random() < 0.1 and isinstance(values, dict):
    values[rng.choice(("../x", "", "__class__", "x" * 1000))] = values[key]
  else:
    values[key] = corrupt_value(values[key], rng)
  return values
