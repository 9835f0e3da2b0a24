"""Hook of MkDocs: adds the pages of experiments/ and of each notebook, and the README to the first.

A notebook's page has its outputs once `make notebooks` has run.

`make notebooks` writes build/notebooks/NAME.md and the plots, in NAME_files/. Without them a page
has the notebook's prose and code only, so that the documentation builds without executing it.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
EXECUTED = ROOT / "build" / "notebooks"


def on_files(files: "Files", config: Any) -> "Files":
  """Adds experiments/*.md and notebooks/NAME.md, with what they show, to the files of the site."""
  from mkdocs.structure.files import File

  for page in sorted((ROOT / "experiments").rglob("*.*")):
    if page.suffix in (".md", ".png", ".csv"):
      name = page.relative_to(ROOT).as_posix()
      files.append(File.generated(config, name, abs_src_path=str(page)))
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


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """`markdown` with the links of the site (`within_site`), on the first page after the README's."""
  if page.file.src_uri == "index.md":
    markdown = with_readme(markdown)
  return within_site(markdown, page.file.src_uri)


def with_readme(markdown: str) -> str:
  """The first page with the README's beginning in it, so that each number is written once.

  It begins after the title and ends before the table of modules, which the page has as questions.
  """
  text = (ROOT / "README.md").read_text()
  begin, end = text.index("\n"), text.index("| module |")
  return markdown.replace("<!-- README -->", text[begin:end].replace("](docs/", "](").strip())


def within_site(markdown: str, name: str) -> str:
  """The text of page `name`, whose links between docs/ and experiments/ are those of the project.

  There the folders are side by side; in the site docs/ is the root, with experiments/ inside.
  """
  if name.startswith("experiments/"):
    return re.sub(r"\]\(((?:\.\./)+)docs/", r"](\1", markdown)
  return re.sub(r"\]\(((?:\.\./)*)\.\./experiments/", r"](\1experiments/", markdown)


def without_outputs(notebook: Path) -> str:
  """The notebook's prose and code as Markdown."""
  cells = json.loads(notebook.read_text())["cells"]
  text = lambda cell: "".join(cell["source"])
  fenced = lambda cell: f"```python\n{text(cell)}\n```"
  return "\n\n".join(fenced(x) if x["cell_type"] == "code" else text(x) for x in cells) + "\n"
