"""Prints `lnssm_jax/linen.pyi`: the fields of every Linen face, from the NNX constructors.

python scripts/linen_stub.py > lnssm_jax/linen.pyi
"""

import dataclasses
import inspect
import re
import subprocess
import sys
import typing

import jax

from lnssm_jax import linen, mixers, ops
from lnssm_jax.mixers import Mixer

_HEAD = '''"""Types of `lnssm_jax.linen`, written by `scripts/linen_stub.py`."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from lnssm_jax import mixers, models, ops
from lnssm_jax.models.layers import LayerStates

class Face(nn.Module):
  wrapped: ClassVar[Any]
  def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
  def init_state(self, batch_size: int) -> Any: ...
  def module(self) -> Any: ...

class _MixerFace[State](Face):
  def __call__(
    self,
    x: jax.Array,
    state: State | None = ...,
    segment_ids: jax.Array | None = ...,
    *,
    lengths: jax.Array | None = ...,
  ) -> tuple[jax.Array, State]: ...
  def init_state(self, batch_size: int) -> State: ...

class LanguageModel(Face):
{language_model}
  def __call__(
    self,
    tokens: jax.Array,
    state: LayerStates | None = ...,
    segment_ids: jax.Array | None = ...,
    *,
    lengths: jax.Array | None = ...,
  ) -> tuple[jax.Array, LayerStates]: ...
  def init_state(self, batch_size: int) -> LayerStates: ...
  def module(self) -> models.LanguageModel: ...

class Backbone(Face):
{backbone}
  def __call__(
    self,
    x: jax.Array,
    state: LayerStates | None = ...,
    segment_ids: jax.Array | None = ...,
    *,
    lengths: jax.Array | None = ...,
  ) -> tuple[jax.Array, LayerStates | None]: ...
  def init_state(self, batch_size: int) -> LayerStates | None: ...
  def module(self) -> models.Backbone: ...

class VisionModel(Face):
{vision_model}
  def __call__(self, images: jax.Array) -> jax.Array: ...
  def module(self) -> models.VisionModel: ...

def face(module: type[nnx.Module]) -> type[Face]: ...

MIXERS: Mapping[str, type[Face]]
'''


def stub() -> str:
  """The text of the stub."""
  faces = sorted(linen.MIXERS.values(), key=lambda face: face.__name__)
  classes = [
    f"class {face.__name__}(_MixerFace[{_annotation(_state(face.wrapped))}]):\n{_fields(face)}"
    for face in faces
  ]
  models = {
    "language_model": linen.LanguageModel,
    "backbone": linen.Backbone,
    "vision_model": linen.VisionModel,
  }
  head = _HEAD.format(**{name: _fields(face) for name, face in models.items()})
  command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "linen.pyi", "-"]
  text = "\n\n".join([head, *classes])
  if "Literal[" in text:
    text = text.replace("import Any, ClassVar", "import Any, ClassVar, Literal", 1)
  return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _fields(face: type[linen.Face]) -> str:
  """Annotated fields of a face, those without a default first."""
  parameters = inspect.signature(face.wrapped.__init__).parameters
  lines, by_keyword = [], False
  for field in dataclasses.fields(face):
    if field.name in ("parent", "name"):
      continue
    if field.kw_only and not by_keyword:
      lines, by_keyword = [*lines, "_: KW_ONLY"], True
    parameter = parameters.get(field.name)
    kind = "str | None" if parameter is None else _annotation(parameter.annotation, field.name)
    default = "" if field.default is dataclasses.MISSING else " = ..."
    lines.append(f"{field.name}: {kind}{default}")
  return "\n".join(f"  {line}" for line in lines)


def _annotation(kind: typing.Any, name: str = "") -> str:
  """Source text of a type, with the names that the stub imports."""
  if kind is typing.Any:
    return "Any"
  if kind is inspect.Parameter.empty:
    return "DTypeLike" if name.endswith("dtype") else "Any"
  for module in (ops, mixers):
    if inspect.isclass(kind) and getattr(module, kind.__name__, None) is kind:
      return f"{module.__name__.removeprefix('lnssm_jax.')}.{kind.__name__}"
  text = "jax.Array" if kind is jax.Array else inspect.formatannotation(kind)
  text = text.replace("lnssm_jax.mixers.base.Mixer", "mixers.Mixer")
  text = re.sub(r"^(?:typing\.)?Optional\[(.*)\]$", r"\1 | None", text)
  return re.sub(r"\b(collections\.abc|typing)\.", "", text)


def _state(mixer: type[Mixer]) -> typing.Any:
  """State of `class X(Mixer[State])`, or of the nearest parent that names one; else Any."""
  for parent in mixer.__mro__:
    for base in getattr(parent, "__orig_bases__", ()):
      origin, arguments = typing.get_origin(base), typing.get_args(base)
      if inspect.isclass(origin) and issubclass(origin, Mixer) and inspect.isclass(arguments[0]):
        return arguments[0]
  return typing.Any


if __name__ == "__main__":
  print(stub(), end="")
