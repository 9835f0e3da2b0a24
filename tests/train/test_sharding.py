"""The same training on four devices, however they are arranged, as on one."""

import json

import numpy as np

SCRIPT = """
import dataclasses, json, sys
import jax
import numpy as np
from train import mesh as meshes
from train.config import Mesh, load_config
from train.optimizer import make_optimizer
from train.step import init_state, make_train_step, model_graph

cfg = load_config(sys.argv[1])
rng = np.random.default_rng(0)
shape = (4, cfg.global_batch, cfg.seq_len + 1)
tokens = rng.integers(0, cfg.model.vocab_size, shape).astype("int32")
segments = np.cumsum(rng.random(tokens[..., 1:].shape) < 0.1, axis=-1).astype("int32")
weights = (rng.random(segments.shape) < 0.8).astype("float32")

def bits(tree):
  return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)).hex()

def run(data, fsdp, sequence=1):
  this = dataclasses.replace(cfg, mesh=Mesh(data=data, fsdp=fsdp, sequence=sequence))
  mesh = meshes.make_mesh(this)
  state = init_state(this, mesh)
  start, kernel = bits(state), state["opt_state"][1].mu["blocks"]["mixer"]["q_proj"]["kernel"]
  share = kernel.addressable_shards[0].data.size / kernel.size
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps)
  step = make_train_step(this, model_graph(cfg.model), tx, mesh)
  rows = []
  for t, s, w in zip(tokens, segments, weights):
    batch = {"tokens": t[:, :-1], "targets": t[:, 1:], "segment_ids": s, "weights": w}
    state, metrics = step(state, jax.device_put(batch, meshes.batch_sharding(mesh)))
    rows.append([float(metrics["loss"]), float(metrics["grad_norm"]), float(metrics["param_norm"])])
  return {"start": start, "share": share, "rows": rows, "compilations": step._cache_size()}

arrangements = (1, 1), (2, 2), (2, 1, 2), (1, 2, 2)
print(json.dumps({"x".join(map(str, sizes)): run(*sizes) for sizes in arrangements}))
"""


def test_every_arrangement_trains_alike(tiny, config_file, command):
  cfg = tiny(global_batch=8, accumulate=2, optimizer__clip_norm=1.0)
  flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  process = command("-c", SCRIPT, config_file(cfg), **flags)
  out, errors = process.communicate(timeout=300)
  assert process.returncode == 0, errors
  results = json.loads(out.splitlines()[-1])
  one = results.pop("1x1")
  assert {name: result["share"] for name, result in results.items()} == {
    "2x2": 1 / 2, "2x1x2": 1, "1x2x2": 1 / 2,
  }  # fmt: skip
  for name, result in results.items():
    assert result["start"] == one["start"], f"{name}: the initial state differs"
    # Sums over devices are taken in another order, nothing else may differ.
    np.testing.assert_allclose(result["rows"], one["rows"], rtol=2e-5, err_msg=name)
    assert result["compilations"] == 1
