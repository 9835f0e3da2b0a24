"""Losses of converted models, on tiny ones."""

import numpy as np
import pytest

from experiments import conversion

pytestmark = pytest.mark.slow
PERIOD = np.random.default_rng(0).integers(97, 123, 40, np.uint8)


@pytest.mark.parametrize("name", conversion.CONVERSIONS)
def test_converted_model_is_better_than_a_new_one(name, monkeypatch):
  monkeypatch.setattr(conversion, "text", lambda: (np.tile(PERIOD, 9),) * 2)
  sizes = conversion.SIZES | {"dim": 32, "num_layers": 2, "num_heads": 2}
  monkeypatch.setattr(conversion, "SIZES", sizes)
  row, *expanded = conversion.measure([name], 40, 10, length=16, batch=8)
  assert row["before"] < row["just_after"] < 8
  assert row["after"] < row["just_after"]
  assert row["after"] < row["new"] - 0.3
  assert len(expanded) == (2 if name == "gla_to_sse" else 0)
  for wider in expanded:
    assert abs(wider["just_after"] - wider["before"]) < 1e-3
