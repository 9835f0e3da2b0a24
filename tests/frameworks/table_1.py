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


def table() -> str:
  """The rows as Markdown."""
  lines = ["| mixer | op | e | o | form of o | s | k × d |", "|---|---|---|---|---|---|---|"]
  for name in METHODS:
    (row,) = lcsm.describe(tiny.randomized(name))
    form = "-" if row.o == "1" else FORMS.get(row.axes, row.axes)
    _, k, d = row.memory
    cells = (f"`{name}`", f"`{row.op}`", row.e, row.o, form, row.s, f"{k} × {d}")
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)


def main():
  text, found = PLACE.subn(lambda _: table(), PAGE.read_text())
  assert found == 1
  PAGE.write_text(text)


if __name__ == "__main__":
  main()
