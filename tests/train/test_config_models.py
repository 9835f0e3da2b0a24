"""The models of the configs: their numbers of parameters, and small ones that train."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from lnssm_jax.models import count_parameters
from train.cluster import device_mesh
from train.config import apply_overrides, load_config
from train.step.model import build_model, model_graph
from train.step.optimizer import make_optimizer
from train.step.state import init_state
from train.step.train_step import make_train_step

ROOT = Path(__file__).parents[2]
SSE_SWA = "sse,sliding_window_attention,sse,sliding_window_attention,softmax_attention"
SHALLOW = ["model.num_layers=12", "model.channel_mixer=swiglu"]


@pytest.mark.parametrize(
  ("name", "changes", "count"),
  [
    ("lnssm_72m", [], 71_963_648),
    ("longhorn_128m", [], 128_563_968),
    ("longhorn_128m", ["model.num_layers=48", "model.dim=1024"], 369_968_128),
    ("longhorn_128m", ["model.mixer=mamba"], 129_153_792),
    ("longhorn_128m", [*SHALLOW, "model.mixer=gla", "model.num_heads=4"], 123_815_424),
    ("longhorn_128m", [*SHALLOW, "model.mixer=softmax_attention"], 123_587_328),
    ("lnssm_1b3", [], 1_374_658_560),
    ("sse_600m", [], 629_837_824),
    ("sse_2b", [], 2_021_294_592),
    ("sse_h_600m", [], 627_453_440),
    ("sse_h_600m", [f"model.mixer={SSE_SWA}"], 621_492_480),
    ("mom_800m", [], 846_180_352),
    ("sse_600m", ["model.mixer=gla"], 616_136_704),
    ("sse_600m", ["model.mixer=softmax_attention"], 615_531_520),
    ("sse_2b", ["model.mixer=gla"], 1_998_173_952),
    ("sse_2b", ["model.mixer=softmax_attention"], 1_997_155_584),
  ],
)
def test_config_models_parameter_counts_match_papers(name, changes, count):
  """LNSSM, section 5; Longhorn (Liu et al. 2024), table 2; SSE (Pan et al. 2025), table 1."""
  config = apply_overrides(load_config(ROOT / f"configs/{name}.py"), changes)
  model = jax.eval_shape(functools.partial(build_model, config.model), jax.random.key(0))
  assert count_parameters(model) == count


SMALL = {"dim": 16, "num_heads": 2, "vocab_size": 50, "channel_hidden": 24, "dtype": "float32"}


@pytest.mark.parametrize(
  ("name", "num_layers"),
  [
    ("mom_800m", 1),
    pytest.param("sse_600m", 2, marks=pytest.mark.slow),
    pytest.param("sse_2b", 2, marks=pytest.mark.slow),
    pytest.param("sse_h_600m", 6, marks=pytest.mark.slow),
  ],
)
def test_config_with_small_sizes_trains_three_steps(name, num_layers):
  cfg = load_config(ROOT / f"configs/{name}.py")
  model = dataclasses.replace(cfg.model, **SMALL, num_layers=num_layers)
  rest = {"seq_len": 16, "global_batch": 2, "accumulate": 1, "steps": 3}
  optimizer = dataclasses.replace(cfg.optimizer, warmup_steps=0, peak_lr=1e-2, final_lr=1e-2)
  cfg = dataclasses.replace(cfg, model=model, optimizer=optimizer, **rest)
  mesh = device_mesh.make_mesh(cfg)
  step = make_train_step(cfg, model_graph(cfg.model), make_optimizer(cfg.optimizer, 3)[0], mesh)
  state = init_state(cfg, mesh)
  tokens = np.random.default_rng(0).integers(0, 50, (2, 17)).astype(np.int32)
  batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
  batch |= {"segment_ids": np.zeros((2, 16), np.int32), "weights": np.ones((2, 16), np.float32)}
  losses = []
  for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]))
    routed = [output for output in metrics["aux"] if output is not None]
    assert len(routed) == num_layers - (name == "sse_h_600m")
    for output in routed:
      assert output.share.shape == (4,)
      assert np.isclose(output.share.sum(), 1)
      assert output.loss > 0
  assert losses[2] < losses[1] < losses[0]
