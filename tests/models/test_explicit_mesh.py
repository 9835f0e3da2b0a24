"""Meshes of `jax.make_mesh`'s default axis type, Explicit."""

import pytest

from tests import devices


@pytest.mark.parametrize(
  "names", [("op", "mixer", "model"), pytest.param(("vision",), marks=pytest.mark.slow)], ids=str
)
def test_explicit_mesh_over_the_batch_gives_equal_values_and_gradients(names):
  result = devices.result_of("-m", "tests.models.explicit_mesh", *names, devices=2)
  assert {name: error for name, error in result["errors"].items() if not error < 1e-5} == {}
  assert set(result["specs"].values()) == {"data"}
  assert "linear_attention: an argument of shape (2, 2, 2, 4) is sharded" in result["message"]
  assert "axis_types=(jax.sharding.AxisType.Auto,) * 1" in result["message"]
