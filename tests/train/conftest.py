"""A tiny run: 1 layer of width 32, bytes, on generated text. Seconds on a CPU.

Its mixer is the LRN, whose programs are half as long to compile as those of the LNSSM.
"""

import dataclasses
import errno
import fcntl
import os
import random
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import jax
import pytest

from lnssm_jax.models import settings
from train import trainer
from train.config import Data, Mesh, Model, Optimizer, Sample, Train, from_dict, to_dict
from train.logging.metric_reader import MetricReader
from train.runs import evaluation
from train.step import state as states_of

WORDS = ("the", "slow", "quick", "river", "stone", "moves", "over", "under", "bright", "night")


def _of_the_programs(cfg: Train, **others) -> str:
  """A key of what the programs of a run depend on; also without `others`."""
  data = Data(folder="-", tokenizer="bytes", train=("train",))
  plan = dict.fromkeys(("log_every", "eval_every", "checkpoint_every", "keep_checkpoints"), 1)
  plan |= {"eval_at_start": True, "watch": (), "sample": Sample()}
  return repr(dataclasses.replace(cfg, run_dir="-", data=data, **plan, **others))


def _of_the_state(cfg: Train) -> str:
  """A key of what the initial state of a run depends on."""
  dropout = dict.fromkeys(("embedding_dropout", "residual_dropout", "drop_path"), 0.0)
  model = dataclasses.replace(cfg.model, dtype="float32", **dropout)
  optimizer = dataclasses.replace(cfg.optimizer, logit_penalty=0.0, z_loss=0.0)
  return repr((model, optimizer, cfg.seed, cfg.skip_spikes))


@pytest.fixture(scope="session", autouse=True)
def _models_and_states_are_traced_once():
  """For their shapes, which each run asks for several times."""
  models, initializers = {}, {}
  abstract_model, initializer = settings.abstract_model, states_of.initializer

  def model_once(model, *, sequence_axis=None):
    key = repr(model), sequence_axis
    if key not in models:
      models[key] = abstract_model(model, sequence_axis=sequence_axis)
    graph, params = models[key]
    return graph, jax.tree.map(lambda x: x, params)

  def initializer_once(cfg):  # jax remembers what it traced by the function
    key = repr((cfg.model, cfg.optimizer, cfg.steps, cfg.seed, cfg.skip_spikes))
    return initializers.setdefault(key, initializer(cfg))

  with (
    mock.patch.object(settings, "abstract_model", model_once),
    mock.patch.object(states_of, "initializer", initializer_once),
  ):
    yield


@pytest.fixture(scope="session", autouse=True)
def _equal_runs_share_their_programs():
  """Runs of equal programs compile them once: most of their time is that."""
  programs, states = {}, {}
  compile_step, eval_step = trainer.compile_step, evaluation.make_eval_step
  init_state = trainer.init_state

  def step_once(cfg, graph, mesh, kernels, console):
    key = "step", _of_the_programs(cfg), repr(mesh), kernels is None
    if key not in programs:
      lines = []
      program = compile_step(cfg, graph, mesh, kernels, types.SimpleNamespace(say=lines.append))
      programs[key] = program, lines
    program, lines = programs[key]
    for line in lines:
      console.say(line)
    return program

  def eval_step_once(cfg, graph, mesh, kernels=None):
    key = "evaluation", _of_the_programs(cfg, steps=10**6), repr(mesh), kernels is None
    if key not in programs:
      programs[key] = eval_step(cfg, graph, mesh, kernels)
    return programs[key]

  def state_once(cfg, mesh, kernels=None):
    key = _of_the_state(cfg), repr(mesh), kernels is None
    if key not in states:
      state = init_state(cfg, mesh, kernels)
      states[key] = jax.device_get(state), jax.tree.map(lambda x: x.sharding, state)
    return jax.device_put(*states[key])  # a copy: steps donate the old state

  with (
    mock.patch.object(trainer, "compile_step", step_once),
    mock.patch.object(evaluation, "make_eval_step", eval_step_once),
    mock.patch.object(trainer, "init_state", state_once),
  ):
    yield


@pytest.fixture(scope="session", autouse=True)
def _key_of_these_tests(tmp_path_factory):
  """The key of compiled programs is not that of the user (`train.cluster.signatures`)."""
  with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path_factory.mktemp("cache"))):
    yield


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
  """Two text files of a few words, so that a tiny model learns something."""
  folder = tmp_path_factory.mktemp("text")
  rng = random.Random(0)
  for name, documents in (("train", 60), ("validation", 8)):
    lines = [" ".join(rng.choices(WORDS, k=40)) for _ in range(documents)]
    rows = "".join(f'{{"text": "{line}."}}\n' for line in lines)
    (folder / f"{name}.jsonl").write_text(rows)
  return folder


@pytest.fixture
def tiny(text_folder, tmp_path):
  """Returns a function that creates the config of a tiny run; a__b=value overrides a.b."""

  def make(**changes) -> Train:
    cfg = Train(
      model=Model(
        dim=32,
        num_layers=1,
        num_heads=2,
        vocab_size=257,
        dtype="float32",
        mixer="lrn",
        channel_mixer="none",
      ),
      optimizer=Optimizer(peak_lr=3e-3, final_lr=3e-4, logit_penalty=1e-4),
      data=Data(
        folder=str(text_folder / "tokens"),
        tokenizer="bytes",
        train=("train",),
        validation=("validation",),
        sources={name: str(text_folder / f"{name}.jsonl") for name in ("train", "validation")},
      ),
      mesh=Mesh(data=1),
      run_dir=str(tmp_path / "run"),
      seq_len=32,
      global_batch=4,
      steps=12,
      log_every=1,
      eval_every=6,
      checkpoint_every=5,
      sample=Sample(prompt="the ", tokens=0),
    )
    values = to_dict(cfg)
    for name, value in changes.items():
      *groups, leaf = name.split("__")
      where = values
      for group in groups:
        where = where[group]
      where[leaf] = value
    return from_dict(values)

  return make


@pytest.fixture
def fit_and_kill(monkeypatch):
  """Returns a function that trains and crashes when the metrics of step `at` are read."""

  class Killed(BaseException):
    pass

  push = MetricReader.push

  def run(cfg: Train, *, at: int) -> None:
    def push_and_die(self, step, metrics):
      push(self, step, metrics)
      if step == at:
        raise Killed

    with monkeypatch.context() as patch:
      patch.setattr(MetricReader, "push", push_and_die)
      with pytest.raises(Killed):
        trainer.fit(cfg)

  return run


@pytest.fixture
def config_file(tmp_path):
  """Returns a function that writes a config file for the command line."""

  def write(cfg: Train, name: str = "config.py") -> str:
    path = tmp_path / name
    path.write_text(
      "from train.config import from_dict\n\n\n"
      f"def get_config():\n  return from_dict({to_dict(cfg)!r})\n"
    )
    return str(path)

  return write


@pytest.fixture
def command():
  """Returns a function that starts Python on the checkout, on the CPU."""

  def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
      [sys.executable, "-W", "error", *arguments],
      cwd=Path(__file__).parents[2],
      env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  return start


@pytest.fixture
def without_flock(monkeypatch):
  """A file system without locks."""

  def flock(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", flock)
