"""The table of docs/frameworks/lcsm.md.

python -m tests.frameworks.table_1   # writes it again
"""

from pathlib import Path

from lnssm_jax.frameworks import lcsm
from tests.mixers import tiny
from tests.mixers.lcsm_page import section

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "lcsm.md"
PLACE = section("table 1")
METHODS = (
  "linear_attention", "s4d", "dss", "s5", "tnl", "retnet", "mamba", "rwkv4", "cosformer", "lrpe",
  "gla", "gateloop", "gfw", "hgrn", "lrn",
)  # fmt: skip
FORMS = {"": "one number", "k": "by k", "d": "by d"}


HEAD = ["| mixer | op | e | o | form of o | s | k × d |", "|---|---|---|---|---|---|---|"]


def row(name: str) -> str:
  """The row of a mixer as Markdown."""
  (found,) = lcsm.describe(tiny.randomized(name))
  form = "-" if found.o == "1" else FORMS.get(found.axes, found.axes)
  _, k, d = found.memory
  cells = (f"`{name}`", f"`{found.op}`", found.e, found.o, form, found.s, f"{k} × {d}")
  return "| " + " | ".join(cells) + " |"


def table() -> str:
  """The head and the rows."""
  return "\n".join([*HEAD, *map(row, METHODS)])


def main():
  text, found = PLACE.subn(lambda _: table(), PAGE.read_text())
  assert found == 1
  PAGE.write_text(text)


if __name__ == "__main__":
  main()
