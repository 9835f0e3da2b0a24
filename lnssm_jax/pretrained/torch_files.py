"""Reading of files that `torch.save` wrote (.pth), without torch and without running what they say.

Such a file is a ZIP of `data.pkl`, a pickle of names, shapes and numbers of storages, and of
`data/NUMBER`, the bytes of each storage as they are. A pickle is a program that calls functions by
name. Its instructions are read one by one here, and only those that tensors need: of functions
there are three, of this module, and any other name is an error.
"""

import math
import pickletools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lnssm_jax.files.reading import open_regular

_MAX_PICKLE = 1 << 26  # bytes
_STORAGES = {
  "BFloat16Storage": ml_dtypes.bfloat16,
  "HalfStorage": np.float16,
  "FloatStorage": np.float32,
  "DoubleStorage": np.float64,
}
_DAMAGED = (
  ArithmeticError,
  AttributeError,
  EOFError,
  LookupError,
  RuntimeError,
  TypeError,
  zlib.error,
)
_LOCAL_HEADER = 30  # bytes before the name in a ZIP


class _Tensor(NamedTuple):
  """A tensor of a file: numbers of one storage in rows."""

  storage: str
  dtype: np.dtype
  begin: int  # numbers
  shape: tuple[int, ...]


def _tensor(storage, begin, shape, strides, *_) -> _Tensor:
  """Stands for torch._utils._rebuild_tensor_v2."""
  rows = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
  whole = all(type(n) is int and 0 <= n < 2**48 for n in (begin, *shape, *strides))
  moved = [a for a, b, n in zip(strides, rows, shape, strict=True) if a != b and n > 1]
  if not whole or moved:
    raise ValueError("a tensor is a view of another one, or has no size")
  key, dtype, size = storage
  if begin + math.prod(shape) > size:
    raise ValueError("a tensor is larger than its storage")
  return _Tensor(key, dtype, begin, tuple(shape))


def _storage(pid: Any) -> tuple[str, np.dtype, int]:
  """(its number in the file, dtype, size) of a storage."""
  kind, dtype, key, _, size = pid
  if kind != "storage" or not isinstance(dtype, np.dtype) or not str(key).isdecimal():
    raise ValueError("a storage has no dtype or no number")
  return str(key), dtype, size


_KNOWN: dict[str, Any] = {
  "torch._utils _rebuild_tensor_v2": _tensor,
  "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
  "collections OrderedDict": dict,
  **{f"torch {name}": np.dtype(dtype) for name, dtype in _STORAGES.items()},
}
_EMPTY = {"EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "EMPTY_LIST": list}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")


def _known(name: str) -> Any:
  if name not in _KNOWN:
    raise ValueError(f"it calls {name.replace(' ', '.'):.80}, which is no part of a tensor")
  return _KNOWN[name]


def _content(pickled: bytes) -> Any:
  """The content of a pickle of tensors by name, from its few instructions alone."""
  stack: list[Any] = []
  marks: list[int] = []
  memo: dict[int, Any] = {}

  def since_mark() -> list[Any]:
    begin = marks.pop()
    found = stack[begin:]
    del stack[begin:]
    return found

  for instruction, value, _ in pickletools.genops(pickled):
    name = instruction.name
    if name in _VALUES:
      stack.append(value)
    elif name in _CONSTANTS:
      stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
      stack.append(_EMPTY[name]())
    elif name in _PUTS or name == "MEMOIZE":
      memo[len(memo) if value is None else value] = stack[-1]
    elif name in _GETS:
      stack.append(memo[value])
    elif name == "MARK":
      marks.append(len(stack))
    elif name == "TUPLE":
      stack.append(tuple(since_mark()))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
      count = int(name[-1])
      stack[-count:] = [tuple(stack[-count:])]
    elif name == "GLOBAL":
      stack.append(_known(str(value)))
    elif name == "STACK_GLOBAL":
      stack[-2:] = [_known(f"{stack[-2]} {stack[-1]}")]
    elif name == "BINPERSID":
      stack.append(_storage(stack.pop()))
    elif name == "REDUCE":
      arguments = stack.pop()
      stack.append(stack.pop()(*arguments))
    elif name in ("SETITEM", "SETITEMS"):
      items = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
      stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name == "BUILD":  # attributes of a dictionary
      stack.pop()
    elif name == "STOP":
      return stack.pop()
    elif name not in ("PROTO", "FRAME"):
      raise ValueError(f"its pickle has the instruction {name}, which tensors do not need")
  raise EOFError


class Tensors:
  """The tensors of a file by name; `mapped` and `kind` as of `safetensors.Tensors`.

  Raises:
    OSError: the file is no regular file, or cannot be read.
    ValueError: it is no file of tensors by name, or it is damaged.
  """

  def __init__(self, path: Path):
    self._path = path
    self._pages: np.ndarray | None = None
    with open_regular(path, follow_links=True) as file:
      try:
        self._read(zipfile.ZipFile(file), file)
      except zipfile.BadZipFile:
        raise ValueError("it is no ZIP; torch.save before version 1.6 wrote others") from None
      except _DAMAGED as error:
        raise ValueError(f"its pickle is damaged, {type(error).__name__}: {error}") from None

  def _read(self, archive: zipfile.ZipFile, file) -> None:
    entries = {entry.filename: entry for entry in archive.infolist()}
    (name,) = (name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl"))
    root = name.removesuffix("data.pkl")
    if entries[name].file_size > _MAX_PICKLE:
      raise ValueError(f"its pickle has more than {_MAX_PICKLE:,} bytes")
    order = entries.get(f"{root}byteorder")
    if order is not None and archive.read(order)[:8] != b"little":
      raise ValueError("its numbers are not little endian")
    found = _content(archive.read(name))
    if not isinstance(found, dict) or not all(
      isinstance(key, str) and isinstance(x, _Tensor) for key, x in found.items()
    ):
      raise ValueError("it has other things than tensors by name")
    self._tensors, self._begins = dict(found), {}
    for x in found.values():
      entry = entries[f"{root}data/{x.storage}"]
      last = (x.begin + math.prod(x.shape)) * x.dtype.itemsize
      if entry.compress_type != zipfile.ZIP_STORED or last > entry.file_size:
        raise ValueError(f"the storage {x.storage} is compressed or too short")
      file.seek(entry.header_offset + _LOCAL_HEADER - 4)
      sizes = np.frombuffer(file.read(4), "<u2").astype(int)  # of the name and of what follows it
      self._begins[x.storage] = entry.header_offset + _LOCAL_HEADER + int(sizes.sum())

  def mapped(self, name: str) -> np.ndarray:
    """A tensor as pages of the file."""
    x = self._tensors[name]
    if self._pages is None:
      with open_regular(self._path, follow_links=True) as file:
        self._pages = np.memmap(file, np.uint8, mode="r")
    begin = self._begins[x.storage] + x.begin * x.dtype.itemsize
    content = self._pages[begin : begin + math.prod(x.shape) * x.dtype.itemsize]
    return content.view(x.dtype, np.ndarray).reshape(x.shape)

  def kind(self, name: str) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of a tensor."""
    return str(self._tensors[name].dtype), self._tensors[name].shape

  def __iter__(self) -> Iterator[str]:
    return iter(self._tensors)
