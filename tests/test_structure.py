"""The shape of the project: who may import whom, file lengths, docstrings, the cost of an import.

Each rule is one test that lists every offender.
"""

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "lnssm_jax", "train", "configs", "benchmarks", "experiments", "tests")

# From the bottom up. A file may import from its own layer and from those below it.
LAYERS = (
  "pallas_kernels",
  "lnssm_jax.files",
  "lnssm_jax.lazy",
  "lnssm_jax.typing",
  "lnssm_jax.ops",
  "lnssm_jax.mixers",
  "lnssm_jax.models",
  "lnssm_jax",  # built on models: generate, linen, sharding, pretrained, frameworks, analysis
  "train",
  "configs",
  "benchmarks",
  "experiments",
  "tests",
)
MAX_LINES = {"pallas_kernels": 900}  # a kernel is read in one file
MAX_LINES_ELSEWHERE = 600

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
# Decorators of functions with a backward pass of their own, and the one place that has ours.
GRADIENT_RULES, HOME_OF_GRADIENT_RULES = (
  {"custom_vjp", "custom_gradient"},
  "pallas_kernels.core.gradients",
)
# A config file is Python that is run, as its loader's documentation says.
MAY_RUN_CODE = {("train.config.loading", "exec")}


def module_name(path: Path) -> str:
  name = str(path.relative_to(ROOT)).removesuffix(".py").replace("/", ".")
  return name.removesuffix(".__init__")


FILES = {
  module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
}


@functools.cache
def tree_of(name: str) -> ast.Module:
  return ast.parse(FILES[name].read_text())


def trees(*packages: str) -> dict[str, ast.Module]:
  """The trees of all files, or of those of some packages."""
  return {n: tree_of(n) for n in FILES if not packages or n.partition(".")[0] in packages}


@functools.cache  # several tests look at every node of every file
def nodes_of(tree: ast.AST) -> list[ast.AST]:
  return list(ast.walk(tree))


_COMMANDS = re.compile(
  r"(?:lnssm-train|python -[mc]|\bxprof|\bhf download|\brm|\bmv|\bchmod) [^`]*$"
)


def unquoted(tree: ast.Module) -> list[str]:
  """Values within a command that a text prints for a shell, other than quoted ones."""
  quote = lambda node: isinstance(node, ast.Call) and ast.unparse(node.func) in QUOTES
  names: set[str] = set()
  for node in nodes_of(tree):
    if isinstance(node, ast.Assign):
      targets, values = [
        x.elts if isinstance(x, ast.Tuple) else [x] for x in (node.targets[0], node.value)
      ]
      names |= {ast.unparse(x) for x, y in zip(targets, values, strict=False) if quote(y)}
  found = []
  for node in nodes_of(tree):
    said = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else []:
      if isinstance(part, ast.Constant):
        said += str(part.value)
      elif isinstance(part, ast.FormattedValue):
        if (
          _COMMANDS.search(said) and not quote(part.value) and ast.unparse(part.value) not in names
        ):
          found.append(f"{ast.unparse(part.value)} in line {node.lineno}")
        said += "{}"
  return found


def sources():
  """Tests and benchmarks run code on purpose, and their helpers are named for what they do."""
  return trees(*(set(PACKAGES) - {"benchmarks", "tests"}))


def imported_modules(tree: ast.AST, module: str) -> set[str]:
  """Names of all modules imported anywhere in `tree`, the source of `module` (its dotted path)."""
  found = set()
  for node in nodes_of(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      above = module.split(".")[: -node.level] if node.level else []
      base = ".".join([*above, node.module] if node.module else above)
      # `from lnssm_jax import ops` imports lnssm_jax.ops, which is a layer of its own.
      found |= {f"{base}.{alias.name}" for alias in node.names}
  return found


def layer_of(module: str) -> int | None:
  """The index in LAYERS of the longest prefix of `module`; None if it is not ours."""
  above = [layer for layer in LAYERS if f"{module}.".startswith(f"{layer}.")]
  return LAYERS.index(max(above, key=len)) if above else None


def upward_imports(tree: ast.AST, module: str) -> list[str]:
  own = layer_of(module)
  assert own is not None
  layers = {name: layer_of(name) for name in imported_modules(tree, module)}
  return sorted(name for name, layer in layers.items() if layer is not None and layer > own)


def code_execution(tree: ast.AST, module: str = "lnssm_jax.x") -> set[str]:
  """Names in `tree` that could run code from data."""
  found = {name.split(".")[0] for name in imported_modules(tree, module)} & FORBIDDEN_MODULES
  for node in nodes_of(tree):
    if isinstance(node, ast.Name) and node.id in FORBIDDEN_CALLS:
      found.add(node.id)
    elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
      found.add(node.arg)
  return {name for name in found if (module, name) not in MAY_RUN_CODE}


def foreign_gradient_rules(tree: ast.AST) -> set[str]:
  """Decorators in `tree` whose gradients are wrong under `jax.vmap` with shared arguments."""
  found = set()
  for node in nodes_of(tree):
    if isinstance(node, ast.Attribute) and node.attr in GRADIENT_RULES:
      found.add(ast.unparse(node))
    elif isinstance(node, ast.ImportFrom) and node.module != HOME_OF_GRADIENT_RULES:
      found |= {alias.name for alias in node.names} & GRADIENT_RULES
  return found


def methods_of(node: ast.stmt) -> list[ast.FunctionDef]:
  """Public methods of a class; none of anything else."""
  body = node.body if isinstance(node, ast.ClassDef) else []
  return [n for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def protocol_methods(module: str) -> set[str]:
  """Methods that a `Protocol` in the folder of `module` documents for its implementations."""
  folder = module.rpartition(".")[0]
  siblings = [tree_of(name) for name in FILES if name.rpartition(".")[0] == folder]
  protocols = [
    node
    for tree in siblings
    for node in tree.body
    if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)
  ]
  return {m.name for node in protocols for m in methods_of(node) if ast.get_docstring(m)}


def undocumented(tree: ast.Module, module: str) -> list[str]:
  """Public functions, classes and their public methods that have no docstring.

  An overload is documented by its function, a method of a protocol in the protocol.
  """
  missing = []
  for node in tree.body:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
      continue
    for item in (node, *methods_of(node)):
      marks = {ast.unparse(mark).split(".")[-1] for mark in item.decorator_list}
      if ast.get_docstring(item) is None and "overload" not in marks:
        missing.append(item)
  elsewhere = protocol_methods(module) if missing else set()
  methods = {id(m) for node in tree.body for m in methods_of(node)}
  return [m.name for m in missing if not (id(m) in methods and m.name in elsewhere)]


def test_imports_everywhere_point_downwards_only():
  assert {name: up for name, tree in trees().items() if (up := upward_imports(tree, name))} == {}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
  """The modules of each circle of imports."""
  found, left = [], dict(imports)
  while left:
    ends = {name for name, into in left.items() if not into & left.keys()}
    ends |= {name for name in left if not any(name in into for into in left.values())}
    if not ends:
      found.append(sorted(left))
      break
    left = {name: into for name, into in left.items() if name not in ends}
  return found


def test_no_module_imports_itself_in_a_circle():
  """Also for types only; a package's lazy names are types to it."""
  imports = {}
  for name, tree in trees().items():
    if FILES[name].name == "__init__.py":
      tree = ast.Module([node for node in tree.body if not isinstance(node, ast.If)], [])
    modules = imported_modules(tree, name)
    ours = {m if m in FILES else m.rpartition(".")[0] for m in modules} & FILES.keys()
    imports[name] = ours - {name}
  assert circles(imports) == []


@pytest.mark.parametrize(
  ("imports", "found"),
  [
    ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
    ({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}, [["b", "c"]]),
  ],
)
def test_circle_is_found(imports, found):
  assert circles(imports) == found


@pytest.mark.parametrize(
  ("module", "source", "found"),
  [
    ("lnssm_jax.ops.scan.api", "from lnssm_jax.mixers import LNSSM", ["lnssm_jax.mixers.LNSSM"]),
    ("lnssm_jax.ops.scan.api", "from lnssm_jax import models", ["lnssm_jax.models"]),
    ("lnssm_jax.ops.scan.api", "from ...models import x", ["lnssm_jax.models.x"]),
    ("lnssm_jax.ops.scan.api", "from . import xla\nfrom ..checks import axes", []),
    ("lnssm_jax.mixers.gla", "from lnssm_jax import generate", ["lnssm_jax.generate"]),
    ("lnssm_jax.models.lm", "import lnssm_jax.pretrained.hf", ["lnssm_jax.pretrained.hf"]),
    ("lnssm_jax.mixers.gla", "def f():\n  import train.loop", ["train.loop"]),
    ("lnssm_jax.mixers.gla", "from lnssm_jax import ops\nimport pallas_kernels", []),
    ("lnssm_jax.analysis.spectra", "from lnssm_jax import generate", []),
    ("pallas_kernels.scan", "import lnssm_jax.ops", ["lnssm_jax.ops"]),
    ("pallas_kernels.scan", "import jax\nfrom pallas_kernels import products", []),
    ("train.loop", "from lnssm_jax.models import LanguageModel\nimport training", []),
    ("train.loop", "import configs.quickstart", ["configs.quickstart"]),
    ("train.sweeps.spec", "from experiments import mqar", ["experiments.mqar"]),
    ("benchmarks.copies", "from experiments.mqar import MQAR", ["experiments.mqar.MQAR"]),
    ("benchmarks.scan_kernels", "from tests.ops import scans", ["tests.ops.scans"]),
  ],
)
def test_upward_import_is_found(module, source, found):
  assert upward_imports(ast.parse(source), module) == found


def test_files_everywhere_are_short():
  lines = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
  limit = lambda name: MAX_LINES.get(name.split(".")[0], MAX_LINES_ELSEWHERE)
  assert {name: count for name, count in lines.items() if count > limit(name)} == {}


def test_data_in_sources_is_never_run_as_code():
  assert {
    name: bad for name, tree in sources().items() if (bad := code_execution(tree, name))
  } == {}


@pytest.mark.parametrize(
  "source",
  ["import pickle", "from pickle import loads", "eval(x)", "np.load(f, allow_pickle=True)"],
)
def test_code_execution_is_found(source):
  assert code_execution(ast.parse(source))


def test_every_backward_pass_is_right_under_vmap():
  ours = {name: tree for name, tree in sources().items() if name != HOME_OF_GRADIENT_RULES}
  assert {name: bad for name, tree in ours.items() if (bad := foreign_gradient_rules(tree))} == {}


@pytest.mark.parametrize(
  ("source", "found"),
  [
    ("@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))\ndef f(x, y): ...", True),
    ("from jax import custom_vjp", True),
    ("from jax import numpy, custom_gradient as gradient", True),
    ("f = nnx.custom_vjp(g)", True),
    ("from pallas_kernels.core.gradients import custom_vjp\n@custom_vjp\ndef f(x): ...", False),
  ],
)
def test_backward_pass_of_another_decorator_is_found(source, found):
  assert bool(foreign_gradient_rules(ast.parse(source))) == found


# What this process, or another of its run, has written just now.
OWN_JSON = {"train.cluster.distributed", "train.sweeps.tables", "train.step.copies"}


def test_json_from_elsewhere_has_one_reader():
  parsed = {
    name
    for name, tree in sources().items()
    if name.split(".")[0] in ("lnssm_jax", "train", "experiments")
    for node in nodes_of(tree)
    if isinstance(node, ast.Attribute)
    and ast.unparse(node) in ("json.load", "json.loads", "json.JSONDecoder", "json.JSONDecodeError")
  }
  assert parsed - OWN_JSON == {"lnssm_jax.files.checked_json"}


def test_text_reaches_the_terminal_by_one_module():
  """Which makes it printable: names and values from elsewhere may be anywhere in it."""
  printing = {
    name
    for name, tree in trees("lnssm_jax", "train").items()
    for node in nodes_of(tree)
    if isinstance(node, ast.Name) and node.id == "print"
  }
  assert printing == {"train.messages"}


def test_modules_and_public_names_have_docstrings():
  library = lambda name: name.startswith(("lnssm_jax", "pallas_kernels"))
  missing = {name: ["(module)"] for name, tree in sources().items() if not ast.get_docstring(tree)}
  for name, tree in sources().items():
    if library(name) and (names := undocumented(tree, name)):
      missing[name] = [*missing.get(name, []), *names]
  assert missing == {}


# Files of a user, patterns, and pages that are made.
OTHER_FILES = {"FILE.py", "NAME.py", "finetune.py", "mine.py", "more.py", "pairs.py", "table.md"}
OTHER_FILES |= {"train.py"}
_FILE_NAME = re.compile(r"(?<![\w/.*-])((?:[\w-]+/)*[\w-]+\.(?:py|pyi|md))\b(?![\w(])")
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
TEXTS += [path for name in (*PACKAGES, "examples") for path in (ROOT / name).rglob("README.md")]


def test_files_that_docstrings_and_pages_name_exist():
  """By the end of their path."""
  rooms = [ROOT / name for name in (*PACKAGES, "docs", "examples", "scripts")]
  paths = [f"/{path.relative_to(ROOT)}" for room in rooms for path in room.rglob("*.*")]
  known = {path.rpartition("/")[2] for path in paths} | OTHER_FILES
  known |= {path.name for path in ROOT.glob("*.md")}
  texts = {str(path.relative_to(ROOT)): path.read_text() for path in TEXTS}
  for name, tree in trees().items():
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts[name] = "\n".join(
      ast.get_docstring(node) or "" for node in nodes_of(tree) if isinstance(node, nodes)
    )
  missing = {}
  for where, text in texts.items():
    for name in _FILE_NAME.findall(text):
      exists = name in known if "/" not in name else any(x.endswith(f"/{name}") for x in paths)
      if not exists and not name.startswith("notebooks/"):  # pages that `make docs` makes
        missing.setdefault(where, set()).add(name)
  assert missing == {}


def test_file_name_is_found():
  found = _FILE_NAME.findall("`op.py`, core/op.py; x.py(), *.py, config.json")
  assert found == ["op.py", "core/op.py"]


def run_python(code: str, **environment: str) -> str:
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    timeout=300,
    cwd=ROOT,
    env=os.environ | environment,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


IMPORT_ALL = """
import sys, time
begin = time.process_time()
import jax, jax.numpy, jax.experimental.pallas, flax.nnx
theirs = time.process_time() - begin
sys.modules["jaxtyping"] = None  # as if it were not installed: it is for tests only
before = set(sys.modules)
start = time.process_time()
import importlib, pkgutil
import lnssm_jax
names = [m.name for m in pkgutil.walk_packages(lnssm_jax.__path__, "lnssm_jax.")]
for name in names:
  importlib.import_module(name)
print((time.process_time() - start) / theirs)
print(len(names))
roots = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(roots - set(sys.stdlib_module_names)))
# The number of devices can be set only before a backend has started.
jax.config.update('jax_num_cpu_devices', 3)
print(jax.device_count('cpu'))
"""


def test_import_of_everything_is_quick_and_starts_no_backend():
  """In less CPU time than 0.6 of what jax and flax take, which are imported first.

  Like an installed package it is compiled only once, also where Python is told to write nothing.
  """
  shares = []
  for _ in range(6):  # the best: a busy machine has cold caches
    share, modules, roots, devices = run_python(IMPORT_ALL, PYTHONDONTWRITEBYTECODE="").splitlines()
    assert int(modules) > 5
    assert set(roots.split()) <= {"lnssm_jax", "pallas_kernels", "jax", "jaxlib", "flax", "numpy"}
    assert devices == "3"
    shares.append(float(share))
    if min(shares) < 0.6:
      break
  assert min(shares) < 0.6


LAZY = """
import sys
import lnssm_jax
print(*sorted(name for name in sys.modules if name.startswith(("lnssm_jax.", "jax"))))
print(*dir(lnssm_jax))
print(lnssm_jax.ops.linear_attention.__name__)
from lnssm_jax import *
print(mixers.GLA.__name__, models.LanguageModel.__name__, linen.GLA.__name__)
print(sharding.param_specs.__name__, generate.generate.__name__)
"""


def test_package_exports_are_lazy_and_listed():
  loaded, names, *used = run_python(LAZY).splitlines()
  assert loaded == "lnssm_jax.lazy"
  assert {"generate", "linen", "mixers", "models", "ops", "sharding"} <= set(names.split())
  assert used == ["linear_attention", "GLA LanguageModel GLA", "param_specs generate"]


@pytest.mark.parametrize("name", ["analysis", "linen", "pretrained"])
def test_lazy_names_are_listed_for_suggestions(name):
  """Python takes "Did you mean" from `dir`."""
  module = importlib.import_module(f"lnssm_jax.{name}")
  assert set(module.__all__) <= set(dir(module))


def test_unknown_attribute_of_the_package_raises():
  assert run_python("import lnssm_jax; print(hasattr(lnssm_jax, 'opps'))").strip() == "False"


QUOTES = ("shlex.quote", "shell_word")
# Names that are ours, not a user's or a file's.
QUOTED_BY_ITSELF = {"train.cli.main": ["name"]}


def test_commands_that_texts_print_are_quoted_for_the_shell():
  """Pasted, a file's name must not run."""
  found = {name: lines for name, tree in sources().items() if (lines := unquoted(tree))}
  allowed = {name: QUOTED_BY_ITSELF.get(name, []) for name in found}
  assert {n: x for n, x in found.items() if {y.split(" in ")[0] for y in x} - {*allowed[n]}} == {}
  text = "f'{a}: lnssm-train fit --run-dir {folder} and {shlex.quote(b)} {shell_word(c)}'"
  assert unquoted(ast.parse(text)) == ["folder in line 1"]
