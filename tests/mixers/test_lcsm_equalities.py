"""The tables of docs/lcsm.md: codes that are other mixers, and parameters next to the paper's."""

import pytest

from tests.mixers import lcsm_page
from tests.mixers.lcsm_equalities import ROWS, same


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.code}-{row.mixer}")
def test_code_equals_the_mixer_in_float64(row):
  errors = same(row)
  assert errors.keys() >= (set() if row.shared == "layer" else set(row.shared.split()))
  assert ("layer" in errors) == (row.shared == "layer")
  for name, error in errors.items():
    assert error < 1e-14, name


def test_a_wrong_parameter_is_seen():
  """So that the rows above can fail: the keys of GFW in place of its queries."""
  gfw = next(row for row in ROWS if row.mixer == "gfw")
  wrong = lambda r, p: gfw.parameters(r, p) | {"s_proj": {"kernel": p["k_proj"]["kernel"]}}
  errors = same(type(gfw)(**vars(gfw) | {"parameters": wrong}))
  assert errors["s"] > 0.1 and errors["layer"] > 0.1 and errors["e"] < 1e-14


@pytest.mark.parametrize("name", lcsm_page.TABLES)
def test_page_has_the_computed_table(name):
  """If not: python -m tests.mixers.lcsm_page"""
  found = lcsm_page.section(name).findall(lcsm_page.PAGE.read_text())
  assert found == [lcsm_page.TABLES[name]()]


def test_every_printed_parameter_count_is_met_by_its_row():
  """At a width of the channel mixers of its own, which the paper does not give."""
  for row in lcsm_page.counted_rows():
    assert f"{lcsm_page.count(*row.settings) / 1e6:.2f}" == f"{row.millions:.2f}", row.options
  assert lcsm_page.count() == 46_067_200


def test_sweep_has_every_code_activation_and_normalizer_of_the_paper():
  options = [row.options for row in lcsm_page.sweep()]
  codes = {row["code"] for row in options}
  assert {f"1-{o}-1-0" for o in range(1, 12)} | {"0"} <= codes
  assert {f"1-{o}-1-{a}" for o in (1, 10) for a in range(8)} <= codes
  normalizers = {row.get("gate_logit_normalizer", 16.0) for row in options}
  assert normalizers == {1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0}
