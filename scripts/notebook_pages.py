"""Hook of MkDocs: adds the page of each notebook, with its outputs once `make notebooks` has run.

`make notebooks` writes build/notebooks/NAME.md and the plots, in NAME_files/. Without them a page
has the notebook's prose and code only, so that the documentation builds without executing it.
"""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
EXECUTED = ROOT / "build" / "notebooks"


def on_files(files: Files, config: Any) -> Files:
  """Adds notebooks/NAME.md, and the plots that it shows, to the files of the site."""
  for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
    executed = EXECUTED / f"{notebook.stem}.md"
    text = executed.read_text() if executed.is_file() else without_outputs(notebook)
    text = re.sub(r"(?m)^(    .*)\n\n\n(?=    )", r"\1\n", text)  # lines printed one by one
    text = text.replace("](../docs/", "](../")  # a notebook is next to docs/, its page inside
    files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
    for plot in sorted((EXECUTED / f"{notebook.stem}_files").glob("*")):
      name = f"notebooks/{plot.parent.name}/{plot.name}"
      files.append(File.generated(config, name, abs_src_path=str(plot)))
  return files


def without_outputs(notebook: Path) -> str:
  """The notebook's prose and code as Markdown."""
  cells = json.loads(notebook.read_text())["cells"]
  text = lambda cell: "".join(cell["source"])
  fenced = lambda cell: f"```python\n{text(cell)}\n```"
  return "\n\n".join(fenced(x) if x["cell_type"] == "code" else text(x) for x in cells) + "\n"
