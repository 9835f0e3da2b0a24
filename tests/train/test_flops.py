"""FLOPs against a count by hand of the 72M model, and utilisation."""

import types

import pytest

from train import flops
from train.config import Model

PAPER = Model(dim=512, num_layers=6, num_heads=4, vocab_size=50_277)


def test_the_72m_model_counted_by_hand():
  projections = 5 * 2 * 512 * 512  # q, k, v, gate, output: 2,621,440
  update = 4 * 128 * 128 * 3  # 4 heads: decay, multiply, add: 196,608
  read = 4 * 128 * 128 * 2
  key_sum = 4 * 128 * 4  # decay and add; multiply and add of the read
  mlp = 2 * 512 * 2048 + 2 * 2048 * 512  # 4,194,304
  head = 2 * 512 * 50_277  # 51,483,648
  by_hand = 6 * (projections + update + read + key_sum + mlp) + head
  assert by_hand == 94_356_480
  assert flops.model_flops_per_token(PAPER) == by_hand


def test_utilization_is_three_forward_passes_over_the_peak_of_all_devices():
  h200 = types.SimpleNamespace(device_kind="NVIDIA H200")
  assert flops.utilization(PAPER, 1e6, [h200]) == pytest.approx(3 * 94_356_480e6 / 989.4e12)
  assert flops.utilization(PAPER, 1e6, [h200] * 2) == pytest.approx(3 * 94_356_480e6 / 1978.8e12)


def test_unknown_devices_and_mixers_have_none():
  assert flops.utilization(PAPER, 1e6, [types.SimpleNamespace(device_kind="cpu")]) is None
  other = Model(dim=8, num_layers=1, num_heads=1, vocab_size=3, mixer="not counted")
  assert flops.model_flops_per_token(other) is None


@pytest.mark.parametrize(
  ("kind", "peak"),
  [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("TPU v4", None)],
)
def test_peak_is_that_of_the_longest_matching_name(kind, peak):
  assert flops.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak
