"""The parameters of a model by layer, and their rows in a family's table."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lnssm_jax.pretrained.families.table import Family, Row, View
from lnssm_jax.pretrained.manifest import ExportError


class Piece(NamedTuple):
  """A tensor of theirs, or a view of it, that is one of our arrays, or a part of it."""

  theirs: str
  view: Callable[[Any], Any]  # of their tensor
  part: Callable[[Any], Any] | None  # the view of ours
  shape: tuple[int, ...]  # of their tensor


class Parameter(NamedTuple):
  """One of our parameters: its pieces, for each layer if it is stacked."""

  name: str
  shape: tuple[int, ...]
  stacked: bool
  layers: Sequence[list[Piece]]  # of a single one, if it is not stacked; none: it is 0


def parameters(
  family: Family, settings: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Parameter]:
  """Each parameter with the tensors that it is in.

  Args:
    shapes: of our parameters, by their names, such as "blocks.mixer.q_proj.kernel".

  Raises:
    ExportError: the family has no tensor for a parameter.
  """
  mixer = settings["mixer"]
  pattern = [mixer] if isinstance(mixer, str) else list(mixer)
  for name, shape in shapes.items():
    if not name.startswith("blocks."):
      first, *keys = name.split(".")
      number = int(keys.pop(0)) if first == "shared" else 0
      row = ".".join([first, *keys])
      yield Parameter(name, shape, False, [_pieces(family, settings, name, row, shape, number)])
      continue
    _, *keys = name.split(".")
    place = int(keys.pop(0)) if len(pattern) > 1 else 0
    generic = ".".join(["blocks", *keys])
    own = ".".join(["blocks", pattern[place], *keys[keys[0] == "mixer" :]])
    row = own if own in family.rows else generic
    layers = range(place, settings["num_layers"], len(pattern))
    pieces = [_pieces(family, settings, name, row, shape[1:], layer) for layer in layers]
    yield Parameter(name, shape, True, pieces)


def _pieces(family, settings, name, row, shape, layer) -> list[Piece]:
  rows = family.rows.get(row)
  if rows is None:
    raise ExportError(f"a model of {family.name!r} has no parameter like {name}.")
  pieces = []
  for found in rows if isinstance(rows, list) else [rows]:
    if layer < found.since:
      continue
    for one in _of_experts(found, shape[0]) if found.theirs.count("{}") > 1 else [found]:
      piece = _piece(one, settings, shape, layer, row.startswith("blocks."))
      pieces.append(piece._replace(theirs=family.tensor(settings, piece.theirs)))
  return pieces


def _of_experts(row: Row, count: int) -> Iterator[Row]:
  """The rows of a parameter with a leading axis of experts, each of which has its own tensor."""
  layer, expert = row.theirs.rsplit("{}", 1)
  for number in range(count):
    yield row._replace(theirs=f"{layer}{number}{expert}", part=lambda x, n=number: x[n])


def _piece(row: Row, settings, shape, layer, stacked) -> Piece:
  chosen = row.view if isinstance(row.view, View) else row.view(settings)
  part = row.part or chosen.ours
  like = shape if part is None else part(np.broadcast_to(np.int8(0), shape)).shape
  theirs, view = chosen.shape(like), chosen.of
  if stacked and "{}" not in row.theirs:
    return Piece(row.theirs, lambda x: view(x[layer]), part, (settings["num_layers"], *theirs))
  return Piece(row.theirs.format(layer), view, part, theirs)


def check_covered(found: Sequence[Parameter], shapes: Mapping[str, tuple[int, ...]]) -> None:
  """Raises ExportError unless the rows read every number of every tensor of `shapes` once."""
  read: dict[str, int] = dict.fromkeys(shapes, 0)
  wanted: dict[str, tuple[int, ...]] = {}
  for parameter in found:
    for pieces in parameter.layers:
      for piece in pieces:
        wanted[piece.theirs] = piece.shape
        if shapes.get(piece.theirs) == piece.shape:
          seen = piece.view(np.broadcast_to(np.int8(0), piece.shape))
          read[piece.theirs] += math.prod(seen.shape)
  lines = [
    f"{name}: found {_said(shapes.get(name))}, the model needs {_said(wanted.get(name))}"
    for name in sorted(shapes.keys() | wanted.keys())
    if shapes.get(name) != wanted.get(name) or read[name] != math.prod(shapes[name])
  ]
  if lines:
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    raise ExportError("the tensors are not those of config.json: " + "; ".join(lines[:3]) + more)


def _said(shape: tuple[int, ...] | None) -> str:
  return "nothing" if shape is None else str(shape)
