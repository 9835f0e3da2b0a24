"""The notebooks run from top to bottom, and git has them without outputs.

Here their cells run in this process; `make notebooks` runs them in a kernel.
"""

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PRIVATE = ("tests", "benchmarks", "scripts", "pallas_kernels")
by_name = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook: Path, kind: str) -> list[str]:
  everything = json.loads(notebook.read_text())["cells"]
  return ["".join(cell["source"]) for cell in everything if cell["cell_type"] == kind]


def private_names(code: str) -> list[str]:
  """Names that `code` imports or reads and that are not public."""
  names: list[str] = []
  for node in ast.walk(ast.parse(code)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names += [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
      names.append(f".{node.attr}")
  parts = lambda name: name.split(".")
  hidden = lambda name: any(p.startswith("_") and not p.endswith("__") for p in parts(name))
  return [name for name in names if hidden(name) or parts(name)[0] in PRIVATE]


@by_name
def test_notebook_runs(notebook, monkeypatch):
  monkeypatch.setenv("MPLBACKEND", "Agg")
  monkeypatch.chdir(ROOT / "notebooks")
  names: dict[str, object] = {"__name__": notebook.stem}
  for number, code in enumerate(cells(notebook, "code")):
    exec(compile(code, f"{notebook.stem}, cell {number} of code", "exec"), names)


@by_name
def test_notebook_in_git_is_small_and_has_no_outputs(notebook):
  book = json.loads(notebook.read_text())
  code = cells(notebook, "code")
  fix = f"jupyter nbconvert --clear-output --inplace notebooks/{notebook.name}"
  for cell in book["cells"]:
    assert not cell.get("outputs") and cell.get("execution_count") is None, fix
  assert len(book["cells"]) <= 25
  assert sum(len(cell.splitlines()) for cell in code) <= 120
  assert cells(notebook, "markdown")[0].startswith("# ")
  assert book["cells"][0]["cell_type"] == "markdown"


@by_name
def test_notebook_uses_only_public_names(notebook):
  assert {name for code in cells(notebook, "code") for name in private_names(code)} == set()


@pytest.mark.parametrize(
  "code",
  ["import tests.devices", "layer._mix(x)", "from lnssm_jax import _x", "import lnssm_jax._x"],
)
def test_private_name_is_found(code):
  assert private_names(code)


@by_name
def test_notebook_is_in_the_documentation(notebook):
  assert f"- notebooks/{notebook.stem}.md" in (ROOT / "mkdocs.yml").read_text()
