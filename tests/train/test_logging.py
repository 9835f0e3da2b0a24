"""Loggers, profiler traces, the dry run, the compilation cache and the summary of a run."""

import os
import re
import struct
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto import event_pb2

from lnssm_jax.files import user_cache
from lnssm_jax.mixers import LNSSM, Mixer
from train import trainer
from train.cli.main import main
from train.config import ConfigError
from train.logging import loggers, profiles, run_summary, tracing
from train.logging.console import Console
from train.loop import Moment
from train.runs.run_folder import RunFolder

ROWS = [
  {"kind": "train", "step": 3, "loss": 2.5, "mfu": None, "skipped": 0},
  {"kind": "eval", "step": 3, "set": "a", "val_loss": 2.0},
  {"kind": "skipped", "step": 4, "why": "loss is nan", "loss": None, "grad_norm": 1.0},
]


class FakeWandB(types.ModuleType):
  """Stand-in for the package wandb that fails on request."""

  def __init__(self, fails=()):
    super().__init__("wandb")
    self.fails, self.options, self.rows, self.finished = fails, [], [], 0

  def init(self, **options):
    self._fail("init")
    self.options.append(options)
    return self

  def define_metric(self, name, step_metric):
    assert (name, step_metric) == ("*", "step")

  def log(self, values):
    self._fail("log")
    self.rows.append(values)

  def finish(self):
    self._fail("finish")
    self.finished += 1

  def _fail(self, name):
    if name in self.fails:
      raise ConnectionError(f"no network at {name}\nand more")


@pytest.fixture
def wandb(monkeypatch):
  def put(*fails):
    module = FakeWandB(fails)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module

  return put


def events(folder):
  """{(name, step): value} of the event files in a folder; a record is length, crc, data, crc."""
  found = {}
  for file in sorted(folder.iterdir()):
    raw, at = file.read_bytes(), 0
    while at < len(raw):
      (length,) = struct.unpack_from("<Q", raw, at)
      event = event_pb2.Event.FromString(raw[at + 12 : at + 12 + length])
      found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
      at += 16 + length
  return found


def test_loggers_receive_rows(tiny, tmp_path, wandb):
  fake, said = wandb(), []
  cfg = tiny(watch=("tensorboard", "wandb"))
  for start in (0, 3):
    with loggers.Loggers(cfg, tmp_path, start, said.append) as sender:
      sender.write(ROWS)
  assert said == []
  names = {("train/loss", 3): 2.5, ("eval/a/val_loss", 3): 2.0, ("skipped/grad_norm", 4): 1.0}
  found = events(tmp_path / "tensorboard")
  assert found == names | {("train/skipped", 3): 0.0}
  assert fake.rows[:2] == [
    {"train/loss": 2.5, "train/skipped": 0, "step": 3},
    {"eval/a/val_loss": 2.0, "step": 3},
  ]
  assert (len(fake.rows), fake.finished) == (6, 2)
  first, second = fake.options
  assert first == second and first["resume"] == "allow"  # the same run resumes
  assert first["config"]["steps"] == 12
  assert (first["name"], first["group"], first["tags"]) == (tmp_path.name, None, None)


def test_loggers_know_the_name_group_and_tags_of_a_run(tiny, tmp_path, wandb):
  fake, names = wandb(), {"run_name": "a", "run_group": "b", "run_tags": ("c", "d")}
  with loggers.Loggers(tiny(watch=("tensorboard", "wandb"), **names), tmp_path, 0, print):
    pass
  (options,) = fake.options
  assert (options["name"], options["group"], options["tags"]) == ("a", "b", ("c", "d"))
  (file,) = (tmp_path / "tensorboard").iterdir()
  assert all(text in file.read_bytes() for text in (b"run/name", b"run/group", b"c, d"))


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_loggers_failure_reported_once_others_continue(where, tiny, tmp_path, wandb):
  wandb(where)
  said = []
  cfg = tiny(watch=("wandb", "tensorboard"))
  with loggers.Loggers(cfg, tmp_path, 0, said.append) as sender:
    sender.write(ROWS)
  assert said == [
    f"watch=wandb failed (ConnectionError: no network at {where}); training continues without it"
  ]
  assert len(events(tmp_path / "tensorboard")) == 4


def test_loggers_hanging_one_does_not_block(tiny, tmp_path, wandb, monkeypatch):
  fake, said, hanging = wandb(), [], threading.Event()
  fake.log = lambda values: hanging.wait(60)
  monkeypatch.setattr(loggers, "_PATIENCE", 0.1)
  monkeypatch.setattr(loggers, "_MAX_WAITING", 5)
  with loggers.Loggers(tiny(watch=("wandb",)), tmp_path, 0, said.append) as sender:
    for _ in range(20):
      sender.write(ROWS)
  hanging.set()
  assert len(said) == 2
  assert "is too slow" in said[0] and "not all rows were sent" in said[1]


def test_loggers_missing_package_named_first(tiny, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  cfg = tiny(watch=("wandb",))
  with pytest.raises(ConfigError, match=r"needs the package wandb.*pip install wandb$"):
    trainer.fit(cfg)
  assert not os.path.exists(cfg.run_dir)
  with pytest.raises(ConfigError, match=r"watch\[0\]='tensorbord' is not a choice; did you mean"):
    tiny(watch=("tensorbord",))
  with pytest.raises(ConfigError, match="names one twice"):
    tiny(watch=("wandb", "wandb"))


@pytest.mark.slow
def test_run_with_loggers_and_trace(tiny, wandb, capsys):
  fake = wandb("log")
  cfg = tiny(
    watch=("tensorboard", "wandb"),
    data__validation=(),
    data__sources={},
    model__channel_mixer="swiglu",
  )
  trainer.prepare(tiny().data)
  trainer.fit(cfg, profile=range(3, 5))
  run = RunFolder(cfg.run_dir)
  rows = run.read_rows()
  found = events(run.path / "tensorboard")
  losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
  assert {step: found["train/loss", step] for step in losses} == pytest.approx(losses)
  assert ("train/grad_norm", 12) in found
  assert all(0 <= row["data_wait"] <= 1 for row in rows if row["kind"] == "train")
  assert fake.rows == []
  out = capsys.readouterr().out
  assert out.count("watch=wandb failed") == 1
  assert f"traced steps 3 to 4: {run.path}/traces/3-4" in out
  assert list((run.path / "traces/3-4").rglob("*.xplane.pb"))
  parts = re.findall(r"^ *([\d.]+) ms +([\d.]+)%  (.*)$", out, re.MULTILINE)
  times, shares, names = zip(*parts, strict=True)
  assert {"optimizer", "loss and head", "channel mixer"} < set(names)
  assert sorted(map(float, times), reverse=True) == list(map(float, times))
  assert sum(map(float, shares)) == pytest.approx(100, abs=0.5)


def test_profile_summed_by_part_of_the_model():
  program = """
    %fusion.1 = f32[2] fusion(%a), metadata={op_name="jit(step)/optimizer/mul"}
    %dot-2 = f32[2] dot(%a), metadata={op_name="jit(step)/mixer/dot_general"}
    %dot.3 = f32[2] dot(%a), metadata={op_name="jit(step)/mixer/transpose(jvp(delta_rule))/dot"}
    %dot.4 = f32[2] dot(%a), metadata={op_name="jit(step)/mixer/attention/dot_general"}
  """
  event = profiles.Event
  events = [
    event("loop_fusion", "fusion.1", 1e-3),
    event("dot_2", "a_graph", 4e-3),  # of a CUDA graph
    event("dot_2", "a_graph", 2e-3),
    event("Memcpy D2D", "copy", 1e-3),
    event("gemm", "dot.3", 1e-2),
    event("gemm", "dot.4", 2e-3),
  ]
  assert profiles.summary(events, program, steps=2) == [
    "     5.000 ms   50.0%  delta rule",
    "     3.000 ms   30.0%  mixer (rest)",
    "     1.000 ms   10.0%  attention",
    "     0.500 ms    5.0%  optimizer",
    "     0.500 ms    5.0%  copies",
  ]


def test_profile_has_the_body_of_a_loop_but_not_the_loop():
  run = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x @ x, x))
  events = profiles.traced(lambda: run(jnp.ones((64, 64))))
  assert events and all(event.seconds >= 0 for event in events)
  assert not any(event.instruction.startswith("while") for event in events)


@pytest.fixture
def profiler(monkeypatch):
  """Replaces the profiler; returns the list of its calls."""
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(folder))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
  monkeypatch.setattr(tracing, "_LOOK_EVERY", 0.0)
  return calls


def steps(tracer, numbers):
  for step in numbers:
    tracer.before_step(Moment(step - 1, {}))
    tracer.after_step(Moment(step, {}, metrics={}))


def test_tracing_requested_by_file(profiler, tmp_path):
  said = []
  tracer = tracing.Tracer(tmp_path, None, said.append, str)
  steps(tracer, [1, 2])
  assert profiler == []
  (tmp_path / "profile").write_text("")  # still being written
  steps(tracer, [3])
  (tmp_path / "profile").write_text("2\n")
  steps(tracer, [4])
  assert profiler == [str(tmp_path / "traces/4-5")]
  steps(tracer, [5, 6])
  assert profiler[1:] == ["stop"] and not (tmp_path / "profile").exists()
  assert said[1].startswith("no summary of the trace (FileNotFoundError: ")
  for text in ("many", "0", "-1", "99999", "1001"):
    (tmp_path / "profile").write_text(text)
    steps(tracer, [7])
    assert text in said[-1] and "1 to 1000" in said[-1]
  assert len(profiler) == 2 and not (tmp_path / "profile").exists()


def test_tracing_failure_reported(profiler, tmp_path, monkeypatch):
  said = []
  tracer = tracing.Tracer(tmp_path, range(2, 10), said.append, str)
  steps(tracer, [5, 6])  # a run resumed in the middle of them
  tracer.close()
  assert profiler == [str(tmp_path / "traces/5-9"), "stop"]

  def fail(folder):
    raise RuntimeError("another profiler runs")

  monkeypatch.setattr(jax.profiler, "start_trace", fail)
  tracer = tracing.Tracer(tmp_path, range(2, 10), said.append, str)
  steps(tracer, range(1, 12))
  assert said[-1] == "no trace (RuntimeError: another profiler runs); training continues"


@pytest.mark.parametrize("text", ["5", "5:", "0:3", "4:3", "1:1001", "a:b", "-1:2", "1:2:3"])
def test_tracing_invalid_steps_rejected(text):
  with pytest.raises(ConfigError, match="must be START:STOP"):
    tracing.steps_of(text)
  assert tracing.steps_of("5:5") == range(5, 6)


@pytest.mark.slow
def test_dry_run_reports_memory_and_flops(tiny, config_file, capsys):
  cfg = tiny(model__mixer="lnssm")
  assert main(["fit", "--config", config_file(cfg), "--dry-run"]) == 0
  lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
  assert lines["model"].startswith("lnssm, 21,952 parameters")
  assert lines["memory"].startswith(tuple("123456789")) and "MiB per device" in lines["memory"]
  assert "per step of 128 tokens" in lines["FLOPs"]
  assert "decay" not in lines
  assert not os.path.exists(cfg.run_dir)
  kept = [path.name for path in user_cache.folder().glob("dry_run/*/programs/*-cache")]
  assert main(["fit", "--config", config_file(cfg)]) == 0
  names = [path.name for path in Path(cfg.run_dir, "programs").glob("*-cache")]
  of_step = [name for name in names if name.rpartition("-")[0].rpartition("-")[0] in kept[0]]
  assert kept == of_step  # compiled once
  too_many = ["--set", "mesh.data=3"]
  assert main(["fit", "--config", config_file(cfg), "--dry-run", *too_many]) == 2


@pytest.mark.slow
def test_dry_run_names_what_does_not_decay_and_unknown_flops(
  tiny, config_file, capsys, monkeypatch
):
  monkeypatch.setattr(LNSSM, "recurrence_flops", Mixer.recurrence_flops)  # as of one's own
  cfg = tiny(optimizer__weight_decay=0.1, model__mixer="lnssm")
  assert main(["fit", "--config", config_file(cfg), "--dry-run"]) == 0
  output = capsys.readouterr().out
  assert "FLOPs       unknown: the class of lnssm does not state recurrence_flops" in output
  (line,) = [x for x in output.splitlines() if x.startswith("decay")]
  assert line.startswith("decay       weight decay 0.1 of ")
  names = line.rpartition("not of ")[2].split(", ")
  assert {"w", "gamma", "mixer_norm/scale", "norm/bias"} <= set(names)
  assert "kernel" not in names


def test_run_summary_several_processes_explains_missing_text(tiny, monkeypatch, capsys):
  monkeypatch.setattr(run_summary.distributed, "count", lambda: 2)
  monkeypatch.setattr(run_summary.distributed, "is_first", lambda: True)
  cfg = tiny(sample__tokens=8)
  run_summary.finished(Console(), cfg, RunFolder(cfg.run_dir), None, None, 1)
  out = capsys.readouterr().out
  assert "no text sample: no process has all parameters of the model" in out
  assert "lnssm-train generate --run-dir" in out


def test_validation_on_the_default_text_is_said_where_training_is_not(tiny):
  data = tiny().data
  data.sources.update(train="mine.txt", validation="python-stdlib")
  assert run_summary.other_validation(data) == [
    "on python-stdlib, not on your text: --set data.sources.validation=TEXT takes another"
  ]
  data.sources.update(train="python-stdlib")
  assert run_summary.other_validation(data) == []
