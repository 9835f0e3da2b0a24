"""The tables of docs/lcsm.md that are computed.

python -m tests.mixers.lcsm_page   # writes them again
"""

import functools
import re
import runpy
from pathlib import Path

import jax

from lnssm_jax.mixers.lcsm_code import read_code
from lnssm_jax.models import count_parameters
from tests.mixers import lcsm_equalities
from train.config import apply_overrides, load_config
from train.step.model import build_model

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "lcsm.md"
CONFIG = ROOT / "configs" / "lcsm_wikitext103.py"


def sweep():
  """The rows of the paper's sweep."""
  return runpy.run_path(str(CONFIG))["SWEEP"]


@functools.cache
def count(*settings: str) -> int:
  """Parameters of the config's model with these settings."""
  model = apply_overrides(load_config(CONFIG), settings).model
  return count_parameters(jax.eval_shape(functools.partial(build_model, model), jax.random.key(0)))


def counted_rows():
  """The first row of each code (with activation 0) that the paper prints a count of."""
  rows = {row.options["code"]: row for row in reversed(sweep()) if row.millions is not None}
  return [row for code, row in reversed(rows.items()) if read_code(code).activation == 0]


def parameter_table() -> str:
  """Counts at one width of the channel mixers, and the width that gives the printed count."""
  lines = [
    "| code | op | printed, M | here at 1,344, M | width for the printed | here at that, M |"
  ]
  lines.append("|---|---|---|---|---|---|")
  for row in counted_rows():
    code = row.options["code"]
    options = [f"model.mixer_options.code={code}"]
    same = count(*options, "model.channel_hidden=1344") / 1e6
    cells = (
      f"`{code}`", f"`{read_code(code).op}`", f"{row.millions:.2f}", f"{same:.2f}",
      f"{row.channel_hidden:,}", f"{count(*row.settings) / 1e6:.2f}",
    )  # fmt: skip
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)


TABLES = {"parameters": parameter_table, "equalities": lcsm_equalities.table}


def section(name: str) -> re.Pattern:
  """A pattern of the text between the marks of a table."""
  return re.compile(rf"(?<=<!-- {name} -->\n\n).*?(?=\n\n<!-- end of {name} -->)", re.DOTALL)


def main():
  text = PAGE.read_text()
  for name, table in TABLES.items():
    text, found = section(name).subn(lambda _, table=table: table(), text)
    assert found == 1, name
  PAGE.write_text(text)


if __name__ == "__main__":
  main()
