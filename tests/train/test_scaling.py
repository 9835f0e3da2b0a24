"""The predicted step of several devices, against what was measured."""

import dataclasses
import math
import types
from pathlib import Path

import numpy as np
import pytest

from train.cli import dry_run
from train.cli.main import main
from train.config import apply_overrides, load_config
from train.step import scaling
from train.step.scaling import Scaling

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = load_config(CONFIGS / "lnssm_72m.py")
LARGE = apply_overrides(load_config(CONFIGS / "lnssm_1b3.py"), ["global_batch=8", "accumulate=1"])

# docs/results/training.md: GPU, config, ms per step of one; axis, devices, ms per step. The two
# fitted numbers are of the rows of two H100s; those of H200s are predictions.
MEASURED = [
  ("H100", SMALL, 18.31, [("data", 2, 19.84), ("fsdp", 2, 21.58), ("sequence", 2, 22.12)]),
  ("H100", LARGE, 332.9, [("data", 2, 351.6), ("fsdp", 2, 347.4), ("sequence", 2, 387.8)]),
  ("H100", LARGE, 325.6, [("tensor", 2, 434.6)]),
  ("H200", SMALL, 20.45, [("data", 4, 22.61), ("fsdp", 4, 24.34), ("sequence", 4, 26.27)]),
  (
    "H200",
    LARGE,
    340.2,
    [("data", 4, 363.6), ("fsdp", 4, 359.8), ("sequence", 4, 410.4), ("tensor", 2, 455.3)],
  ),
]


def test_step_seconds_within_5_percent_of_every_measured_mesh():
  errors = {}
  for gpu, cfg, alone, meshes in MEASURED:
    tokens = cfg.global_batch * cfg.seq_len
    scaled = Scaling(cfg, 1e3 * tokens / alone, f"NVIDIA {gpu}")
    for axis, count, measured in meshes:
      predicted = 1e3 * scaled.step_seconds({axis: count}, tokens)
      errors[gpu, cfg.model.dim, axis] = predicted / measured - 1
  assert len(errors) == 14
  assert max(map(abs, errors.values())) < 0.05, errors
  assert np.mean([abs(x) for x in errors.values()]) < 0.015


def test_collectives_of_sharded_parameters_match_hand_count():
  kernels = 6 * (5 * 512 * 512 + 2 * 512 * 2048)  # of layers, in bfloat16
  ends = 2 * 50_277 * 512  # embedding and head, in float32
  found = dict.fromkeys(("gather", "scatter", "sum"), 0.0)
  for sent in Scaling(SMALL, 1e6).collectives({"data": 2, "fsdp": 4}, 18_432):
    if sent.axes in (("fsdp",), ("data", "sequence", "expert")):  # of matrices
      found[sent.kind] += sent.count * sent.size
  gradients = 2 * kernels + 4 * ends
  want = {"gather": 2 * 2 * kernels + 4 * ends, "scatter": gradients, "sum": gradients / 4}
  assert found == pytest.approx(want)


@pytest.mark.parametrize("axis", scaling.ORDER)
def test_efficiency_falls_with_devices_and_slower_links(axis):
  fast, slow = (Scaling(LARGE, 5e4, interconnect=name) for name in ("nvlink", "nvlink-ethernet"))
  counts = (2, 8, 16, 64)
  found = [fast.efficiency({axis: count}, 16_384) for count in counts]
  assert found == sorted(found, reverse=True) and 1 > found[0] > found[-1] > 0
  others = [slow.efficiency({axis: count}, 16_384) for count in counts]
  assert others[:2] == found[:2]  # one host
  assert all(other < one for other, one in zip(others[2:], found[2:], strict=True))


def test_step_seconds_one_device_is_its_speed_and_microbatches_send_again():
  assert Scaling(LARGE, 5e4).step_seconds({}) == 16_384 / 5e4
  twice = Scaling(dataclasses.replace(LARGE, global_batch=16, accumulate=2), 5e4)
  sent = Scaling(LARGE, 5e4).step_seconds({"data": 8}, 16_384) - 16_384 / 5e4
  assert math.isclose(twice.step_seconds({"data": 8}, 32_768), 2 * (16_384 / 5e4 + sent))


def test_tensor_sums_gradients_of_each_token_shifted_stream():
  (sums,) = (x for x in Scaling(LARGE, 5e4).collectives({}, 1) if x.axes == ("tensor",))
  assert sums.count == 24 * 7  # forward of mixer and channel mixer; q, k, v, gate; channel mixer
  gla = apply_overrides(LARGE, ["model.mixer=gla", "model.num_heads=4"])
  (sums,) = (x for x in Scaling(gla, 5e4).collectives({}, 1) if x.axes == ("tensor",))
  assert sums.count == 24 * 4


def test_experts_are_gathered_again_where_layers_are_recomputed():
  """Tokens of 8 devices in bfloat16, outputs in float32; backward all in bfloat16."""
  options = ["model.channel_mixer=moe", "model.channel_mixer_options={}", "model.num_layers=2"]
  for remat, forward in (("none", 1), ("full", 2)):
    cfg = apply_overrides(LARGE, [*options, f"model.remat={remat}"])
    sent = list(Scaling(cfg, 5e4).collectives({"expert": 8}, 1000))
    of_experts = [(x.kind, x.count, x.size) for x in sent if x.axes == ("expert",)]
    inputs, outputs = (8 * size * 1000 * cfg.model.dim for size in (2, 4))
    assert of_experts == [
      ("gather", 2 * forward, inputs),
      ("gather", 2, inputs),
      ("scatter", 2 * forward, outputs),
      ("scatter", 2, inputs),
    ]


def test_devices_of_a_host_share_its_link():
  """Of 8 devices of a host with neighbors along `tensor`, one is in each group of `data`."""
  scaled, sent = Scaling(LARGE, 5e4), scaling.Collective("gather", ("data",), 1, 1e12)
  whole, eighth = (
    scaled._seconds(sent, dict.fromkeys(scaling.ORDER, 1) | sizes)
    for sizes in ({"data": 16}, {"data": 16, "tensor": 8})
  )
  assert whole == pytest.approx(15 / 16 * 1e12 / (0.82 * 400e9), rel=1e-3)
  assert eighth == pytest.approx(8 * whole, rel=1e-3)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"tokens_per_second": 0.0}, "tokens_per_second=0.0 must be positive"),
    ({"tokens_per_second": math.nan}, "tokens_per_second=nan must be positive"),
    ({"interconnect": "wifi"}, "interconnect='wifi' must be one of nvlink, "),
    ({"gpu": "TPU v4"}, "gpu='TPU v4' must be one of NVIDIA A100"),
  ],
)
def test_scaling_wrong_arguments_rejected(arguments, message):
  with pytest.raises(ValueError, match=message):
    Scaling(SMALL, **({"tokens_per_second": 1e6} | arguments))


def test_step_seconds_wrong_mesh_rejected():
  for sizes in ({"model": 2}, {"data": 0}):
    with pytest.raises(ValueError, match="must have axes of data, fsdp, sequence, tensor, expert"):
      Scaling(SMALL, 1e6).step_seconds(sizes)


def test_dry_run_prediction_names_what_it_assumes():
  device = types.SimpleNamespace(device_kind="NVIDIA H200")
  mesh = types.SimpleNamespace(
    size=2, shape={"data": 1, "fsdp": 2, "sequence": 1, "tensor": 1}, devices=np.array([device] * 2)
  )
  cfg = dataclasses.replace(LARGE, global_batch=16)
  lines = dry_run.prediction(cfg, mesh, None, 49_219, "nvlink")
  assert lines[0].startswith("predicted   3") and " of linear" in lines[0]
  assert "2 x NVIDIA H200, NVLink" in lines[1] and "49,219 tokens/s (given)" in lines[1]
  assert lines[3].split()[-4:] == ["8", "64", "256", "1,024"]
  assert [line.split("0.")[0].strip() for line in lines[4:]][:2] == ["fsdp", "data"]
  assert dry_run.prediction(cfg, mesh, None, None, "nvlink") == []
  assert "assumed, 40% MFU" in dry_run.prediction(cfg, mesh, 10**9, None, "pcie")[1]


def test_fit_prediction_options_need_dry_run(tiny, config_file, capsys):
  for option in (["--tokens-per-second", "9"], ["--interconnect", "pcie"]):
    assert main(["fit", "--config", config_file(tiny()), *option]) == 2
    assert f"{option[0]} is for --dry-run" in capsys.readouterr().err
