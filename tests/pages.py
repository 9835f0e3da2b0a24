"""Programs of the pages: their blocks, and names of this project in them that do not exist."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import types
import typing
from typing import Any, NamedTuple

OURS = ("lnssm_jax", "train", "experiments")


class Instance(NamedTuple):
  """A value of a known class."""

  cls: type


def blocks_of(text: str, language: str = "python") -> list[str]:
  """The code of a page's fenced blocks; `language` is a regular expression."""
  return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands_of(text: str) -> list[str]:
  """Each command of ours in a page's lines of commands, those of a pipe too.

  They begin with the name of their package: "train fit ...", also for `lnssm-train fit ...`.
  """
  text = re.sub(r" \\\n\s*", " ", text).replace("lnssm-train ", "python -m train ")
  lines = re.findall(
    r"^(?: {4})?(?:[^`\n]*\| )?python -m (train|experiments) +(.*)$", text, re.MULTILINE
  )
  return [" ".join(line) for line in lines]


def wrong_names(code: str) -> list[str]:
  """Modules, attributes and arguments in `code` that do not exist in this project.

  Follows imports, assignments to names, and what calls return by their annotations. What comes from
  elsewhere, or has no annotation, is unknown: None, and not judged.

  Raises:
    SyntaxError: `code` is not Python.
  """
  reader = _Reader()
  reader.visit(ast.parse(code))
  return reader.wrong


class _Reader(ast.NodeVisitor):
  """Visits statements in order; the visit of an expression returns its value or `Instance`."""

  def __init__(self):
    self.names: dict[str, Any] = {}
    self.wrong: list[str] = []

  def visit_Import(self, node):
    for alias in node.names:
      module = self._module(alias.name)
      root = alias.name.partition(".")[0]
      self.names[alias.asname or root] = module if alias.asname else self._module(root)

  def visit_ImportFrom(self, node):
    module = self._module(node.module)
    for alias in node.names:
      self.names[alias.asname or alias.name] = module and self._attribute(module, alias.name)

  def visit_Assign(self, node):
    value = self.visit(node.value)
    for target in node.targets:
      self.visit(target)
      if isinstance(target, ast.Name):
        self.names[target.id] = value

  def visit_arg(self, node):
    self.names[node.arg] = None

  def visit_Name(self, node):
    if isinstance(node.ctx, ast.Store):
      self.names[node.id] = None
    return self.names.get(node.id)

  def visit_Attribute(self, node):
    owner = self.visit(node.value)
    return None if owner is None else self._attribute(owner, node.attr)

  def visit_Call(self, node):
    function = self.visit(node.func)
    for part in (*node.args, *node.keywords):
      self.visit(part)
    if isinstance(function, Instance):
      function = functools.partial(function.cls.__call__, None)
    keywords = {word.arg: None for word in node.keywords if word.arg}
    if function is None or any(isinstance(arg, ast.Starred) for arg in node.args):
      return None
    try:
      _signature(function).bind_partial(*node.args, **keywords)
    except TypeError as error:
      self.wrong.append(f"{ast.unparse(node.func)}: {error}")
    if isinstance(function, type):
      return Instance(function)
    of = function.func if isinstance(function, functools.partial) else function
    result = typing.get_type_hints(of).get("return")
    return Instance(result) if isinstance(result, type) else None

  def _module(self, name):
    if name.partition(".")[0] not in OURS:
      return None
    try:
      return importlib.import_module(name)
    except ModuleNotFoundError:
      self.wrong.append(name)

  def _attribute(self, owner, name):
    if isinstance(owner, types.ModuleType) and not hasattr(owner, name):
      return self._module(f"{owner.__name__}.{name}")
    if not isinstance(owner, Instance):
      if not hasattr(owner, name):
        self.wrong.append(f"{owner!r}.{name}")
      return getattr(owner, name, None)
    found = inspect.getattr_static(owner.cls, name, None)
    closed = dataclasses.is_dataclass(owner.cls) or hasattr(owner.cls, "_fields")
    if found is None and closed and name not in owner.cls.__annotations__:
      self.wrong.append(f"{owner.cls.__name__}.{name}")
    return functools.partial(found, None) if isinstance(found, types.FunctionType) else None


def _signature(function) -> inspect.Signature:
  """Of a class that of its `__init__`, or the fields of a dataclass."""
  if not isinstance(function, type) or hasattr(function, "_fields"):
    return inspect.signature(function)
  if not dataclasses.is_dataclass(function):
    return inspect.signature(functools.partial(function.__init__, None))
  keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
  fields = [field.name for field in dataclasses.fields(function) if field.init]
  return inspect.Signature([inspect.Parameter(name, keyword) for name in fields])
