"""Values: losses of a run, mixers and models of configs at small sizes."""

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.vision.batches import Batch
from experiments.vision.loop import make_steps
from lnssm_jax.mixers import MIXERS
from tests import small_configs
from tests.mixers.helpers import drawn, split
from tests.mixers.tiny import DIM, initial
from train.cluster import device_mesh
from train.config import apply_overrides
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import init_state
from train.step.train_step import make_train_step

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20
RELATIVE = 1e-3  # bound where bits cannot be equal: another kind of CPU or another jax

Entry = list  # digest of the bits, norm, share of the norm along a fixed direction

CONFIG = """
import dataclasses, runpy

def get_config():
  cfg = runpy.run_path("configs/quickstart.py")["get_config"]()
  data = {"folder": "FOLDER/data", "validation": (), "sources": {"train": "python-stdlib"}}
  return dataclasses.replace(
    cfg,
    data=dataclasses.replace(cfg.data, **data),
    run_dir="FOLDER/run",
    steps=STEPS,
    log_every=1,
    sample=dataclasses.replace(cfg.sample, tokens=0),
  )
"""


def losses() -> dict[str, Callable[[], list[str]]]:
  """The first losses of `make train`, whose validation costs more than they do."""
  return {"quickstart": _losses}


def _losses() -> list[str]:
  with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.py"
    config.write_text(CONFIG.replace("FOLDER", folder).replace("STEPS", str(STEPS)))
    command = [sys.executable, "-m", "train", "fit", "--config", str(config)]
    # As a user runs it, on two cores: sums that threads share depend on their number.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "NPROC": "2"}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["loss"].hex() for row in rows if row["kind"] == "train"]


def entry(x) -> Entry:
  """The record of an array: enough to see any change, and how large it is."""
  x = np.asarray(x)
  bits = hashlib.sha256(f"{x.dtype}{x.shape}".encode() + x.tobytes()).hexdigest()[:12]
  flat = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64).ravel()
  norm = float(np.linalg.norm(flat))
  assert np.isfinite(norm), "a value that is not finite is no record"
  along = float(np.real(flat @ np.cos(np.arange(flat.size) + 1.0)))
  return [bits, float(f"{norm:.6g}"), float(f"{along / norm if norm else 0.0:.6g}")]


def close(got, want) -> bool:
  """Whether entries, or losses, are equal but for rounding."""
  if isinstance(want[0], str) and want[0].startswith("0x"):
    pairs = zip(map(float.fromhex, got), map(float.fromhex, want), strict=True)
    return all(abs(x - y) <= RELATIVE * abs(y) for x, y in pairs)
  (_, norm, along), (_, other, direction) = got, want
  return abs(norm - other) <= RELATIVE * other and abs(along - direction) <= RELATIVE


def named(tree) -> dict[str, Entry]:
  """Entries of the arrays of a tree, by their paths."""
  leaves = jax.tree.leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator="/"): entry(x) for path, x in leaves}


def mixers() -> dict[str, Callable[[], dict[str, Entry]]]:
  """Output and gradients of each mixer."""
  return {name: functools.partial(_mixer, name) for name in sorted(MIXERS)}


def _mixer(name: str) -> dict[str, Entry]:
  """Of a row of two documents and one of three, longer than a chunk, and one token more."""
  graph, params = split(drawn(lambda: initial(name)))
  length = min(getattr(nnx.merge(graph, params), "max_length", None) or 71, 71)
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.normal(size=(2, length, DIM)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  starts = np.zeros(x.shape[:2], np.int32)
  starts[0, length // 2] = starts[1, 1] = starts[1, length - 3] = 1
  segments = np.cumsum(starts, 1)

  @jax.jit
  def run(params, x):
    def loss(params, x):
      mixer = nnx.merge(graph, params)
      out, state = mixer(x[:, :-1], None, segments[:, :-1])
      last, _ = mixer(x[:, -1:], state, segments[:, -1:])
      out = jnp.concatenate([out, last], 1)
      return jnp.sum(out * weights), out

    gradients, out = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    return {"out": out, "d x": gradients[1], "d": gradients[0]}

  return named(run(params, x))


def configs() -> dict[str, Callable[[], dict[str, Entry]]]:
  """Three training steps of each model of `configs/`, the first with a learning rate of 0."""
  made = {}
  for name in small_configs.distinct():
    made[name] = functools.partial(_language_model, name)
  made["lnssm_1b3.py with all parts of a step"] = functools.partial(
    _language_model,
    "lnssm_1b3.py",
    *("global_batch=4", "accumulate=2", "skip_spikes=6.0", "optimizer.ema_decay=0.9"),
    *("model.remat=dots", "model.dtype=bfloat16", "optimizer.z_loss=1e-4", "loss_chunk=16"),
  )
  return made | {n: functools.partial(_classifier, n) for n in small_configs.image_configs()}


def _language_model(name: str, *settings: str) -> dict[str, Entry]:
  """Logits at the start; losses and norms of three steps, and the parameters after them."""
  cfg = apply_overrides(small_configs.small(name), settings)
  mesh = device_mesh.make_mesh(cfg)
  graph = model_graph(cfg.model)
  step = make_train_step(cfg, graph, make_optimizer(cfg.optimizer, cfg.steps)[0], mesh)
  state = init_state(cfg, mesh)
  batch = small_configs.batch_of(cfg)
  tokens, segments = batch["tokens"], batch["segment_ids"]
  logits = jax.jit(lambda params: nnx.merge(graph, params)(tokens, None, segments)[0])
  found = {"logits": logits(state["params"])}
  for n in range(3):
    state, metrics = step(state, batch)
    found |= {f"{key} {n}": metrics[key] for key in ("loss", "grad_norm", "param_norm")}
  found |= {key: summary(state[key]) for key in ("params", "ema") if key in state}
  return named(found)


def _classifier(name: str) -> dict[str, Entry]:
  """Losses of two steps with all changes of images, and the parameters after them."""
  cfg = small_configs.small_images(name)
  initialize, step, _ = make_steps(cfg, epoch=3)
  rng, size, rows = np.random.default_rng(0), cfg.model.image_size, cfg.global_batch
  batch = Batch(
    images=rng.integers(256, size=(rows, size, size, cfg.model.channels)).astype(np.uint8),
    labels=np.arange(rows, dtype=np.int32) % cfg.model.num_classes,
    erased=np.array([[0, 0, 0, 0], [1, 2, 4, 5]] * (rows // 2), np.int32),
    pasted=np.array([2, 3, 6, 8], np.int32),
    weight=np.float32(0.7),
    label_weight=np.float32(0.6),
  )
  state = jax.jit(initialize)(jax.random.key(cfg.seed))
  found = {"start": summary(state["params"])}
  for n in range(2):
    state, metrics = step(state, batch)
    found[f"loss {n}"] = metrics["loss"]
  found |= {key: summary(state[key]) for key in ("params", "ema") if key in state}
  return named(found)


def summary(tree) -> np.ndarray:
  """All numbers of a tree, one after the other."""
  return np.concatenate([np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(tree)])
