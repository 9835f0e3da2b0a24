"""Flax Linen faces of every mixer and model: the same names, numbers and calls.

    from lnssm_jax import linen

    layer = linen.LNSSM(512, num_heads=4)           # arguments of the NNX class, without rngs
    variables = layer.init(key, x)
    y, state = layer.apply(variables, x, layer.init_state(B), segment_ids)

`variables["params"]` is the nested dictionary that `nnx.to_pure_dict` gives for the NNX module, so
parameters go from one to the other as they are. `layer.apply(variables, x, mutable=["aux"])` also
returns the auxiliary outputs of mixers that route, as `with_aux` of the NNX module does: the
collection's entry "aux" is a tuple with one of them. Faces are ordinary Linen modules: `nn.scan`,
`nn.remat` and `nn.vmap` lift them. A face has the name of its class; `MIXERS` has those of mixers
by the mixer's name. `layer.apply(variables, x, rngs={"dropout": key})` is the call with the
`dropout_key` that Linen's `make_rng` derives from the key. `face.module()` is the NNX module with
the face's parameters, for its other methods; `generate` takes a bound face, `lm.bind(variables)`.
Type checkers and editors read the fields from `linen.pyi`, which `scripts/linen_stub.py` writes.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax import nnx

from lnssm_jax.mixers import MIXERS as _NNX_MIXERS
from lnssm_jax.mixers import Mixer, shard_time
from lnssm_jax.models import Backbone as _NNXBackbone
from lnssm_jax.models import LanguageModel as _NNXLanguageModel
from lnssm_jax.models import VisionModel as _NNXVisionModel
from lnssm_jax.ops.core.checks import check_names


class Face(nn.Module):
  """Base class of all faces; `wrapped` is the NNX class, whose arguments are the fields."""

  wrapped: ClassVar[Any] = nnx.Module

  def __new__(cls, *args: Any, **given: Any):
    check_names(f"linen.{cls.__name__}", given, cls.__dataclass_fields__)
    return super().__new__(cls)

  def _arguments(self) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(self)]
    return {name: getattr(self, name) for name in names if name not in ("parent", "name")}

  def _split(self, key):
    """(static part, nested dictionary of parameters) of a new NNX module."""
    arguments = self._arguments()
    axis_name = arguments.pop("sequence_axis", None) if _shards_time(self.wrapped) else None
    module = self.wrapped(**arguments, rngs=nnx.Rngs(params=key))
    if axis_name is not None:
      shard_time(module, axis_name)
    graph, params = nnx.split(module, nnx.Param)
    return graph, nnx.to_pure_dict(params)

  def _abstract(self):
    """`_split` with abstract parameters: every call of the face rebuilds the static part."""
    made = []

    def params(key):
      graph, tree = self._split(key)
      made.append(graph)
      return tree

    shapes = jax.eval_shape(params, jax.random.key(0))
    return made[0], shapes

  def module(self) -> Any:
    """Returns the NNX module with the parameters of this face, for its other methods.

        states, _ = self.lm.module().hidden_states(tokens)                   # in a Linen method
        model = linen.LanguageModel(...).bind(variables).module()            # outside of one

    Raises:
      ValueError: the face has no parameters: it is outside of a Linen method, and not bound.
    """
    if self.scope is None:
      raise ValueError(
        f"linen.{type(self).__name__}: this face has no parameters; bind it to them first: "
        "face.bind(variables)."
      )
    return self._module()

  @nn.compact
  def _module(self):
    graph, shapes = self._abstract()
    key = self.make_rng("params") if self.is_initializing() else jax.random.key(0)
    made = functools.cache(lambda: self._split(key)[1])  # all parameters from one key, at once
    params = {name: self.param(name, lambda _, name=name: made()[name]) for name in shapes}
    return nnx.merge(graph, params)

  def __call__(self, *args, **kwargs):
    """Calls the NNX module."""
    module = self.module()
    if self.has_rng("dropout") and not self.is_initializing():
      kwargs.setdefault("dropout_key", self.make_rng("dropout"))
    collects = self.is_mutable_collection("aux") and not self.is_initializing()
    if not collects or not hasattr(module, "with_aux"):
      return module(*args, **kwargs)
    *results, aux = module.with_aux(*args, **kwargs)
    self.sow("aux", "aux", aux)
    return tuple(results)

  def init_state(self, batch_size: int):
    """Returns the state before the first token, as the NNX module does."""
    graph, shapes = self._abstract()
    module: Any = nnx.merge(graph, shapes)
    return module.init_state(batch_size)


@functools.cache
def face(module: type[nnx.Module]) -> type[Face]:
  """Returns the Linen face of an NNX class `module(..., rngs)`, always the same one.

  Its fields are the arguments of the constructor without `rngs`, by position where the constructor
  takes them by position. A mixer that `shard_time` accepts also has `sequence_axis`; its parameters
  are those of the face without it, which initializes them outside `jax.shard_map`.
  """
  arguments = dict(inspect.signature(module.__init__).parameters)
  if "rngs" not in arguments:
    raise ValueError(f"face: {module.__name__} has no argument rngs, from which parameters start.")
  del arguments["self"], arguments["rngs"]
  body: dict[str, Any] = {"wrapped": module, "__annotations__": {}, "__doc__": module.__doc__}
  body["__module__"] = __name__
  by_keyword = False
  for name, argument in arguments.items():
    if argument.kind is argument.KEYWORD_ONLY and not by_keyword:
      body["__annotations__"]["_"], by_keyword = dataclasses.KW_ONLY, True
    body["__annotations__"][name] = Any
    if argument.default is not argument.empty:
      body[name] = argument.default
  if _shards_time(module):
    body["__annotations__"]["sequence_axis"], body["sequence_axis"] = Any, None
  return types.new_class(module.__name__, (Face,), exec_body=lambda names: names.update(body))


def _shards_time(module: type[nnx.Module]) -> bool:
  return issubclass(module, Mixer) and module.can_shard_time


class _Faces(Mapping[str, type[Face]]):
  """The faces of all mixers by name, also of those that are registered later."""

  def __getitem__(self, name: str) -> type[Face]:
    return face(_NNX_MIXERS[name])

  def __iter__(self) -> Iterator[str]:
    return iter(_NNX_MIXERS)

  def __len__(self) -> int:
    return len(_NNX_MIXERS)


MIXERS: Mapping[str, type[Face]] = _Faces()
Backbone = face(_NNXBackbone)
LanguageModel = face(_NNXLanguageModel)
VisionModel = face(_NNXVisionModel)

__all__ = ["MIXERS", "Backbone", "Face", "LanguageModel", "VisionModel", "face"]
__all__ += sorted(mixer.__name__ for mixer in _NNX_MIXERS.values())


def __getattr__(name: str) -> type[Face]:
  for mixer in _NNX_MIXERS.values():
    if mixer.__name__ == name:
      return face(mixer)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
