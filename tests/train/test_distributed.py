"""Several processes: detection of launchers, and one run in two processes."""

import errno
import os
import re
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from train import trainer
from train.checkpoint.store import newest_step
from train.cluster import agreement, distributed, doctor
from train.cluster.launcher import LaunchError, detect
from train.data.windows import TokenWindows, eval_batches, train_batches
from train.runs.run_folder import RunFolder

SLURM = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
ALONE = SLURM | {"SLURM_LOCALID": "0"}  # on its host
OMPI = {
  "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2",
  "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
HAND = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
TWENTY = ",".join(map(str, range(20)))
ONE_STEP = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
  ("environment", "expected"),
  [
    (HAND, ("by hand", 4, 1)),
    (SLURM, ("Slurm", 4, 3)),
    (OMPI, ("Open MPI", 4, 2)),
    ({"PMI_SIZE": "2", "PMI_RANK": "1", "JAX_COORDINATOR_ADDRESS": "a:1"}, ("MPICH", 2, 1)),
    (ONE_STEP | OMPI, ("Open MPI", 4, 2)),  # mpirun inside a job
    (HAND | SLURM | OMPI, ("by hand", 4, 1)),  # the first that is complete
    (SLURM | OMPI | {"OMPI_COMM_WORLD_SIZE": "9"}, ("Slurm", 4, 3)),
  ],
)
def test_launcher_environment_detected(environment, expected):
  launch = detect(environment)
  assert launch[:3] == expected
  assert (launch.arguments["num_processes"], launch.arguments["process_id"]) == expected[1:]
  address, method = (
    launch.arguments[name] for name in ("coordinator_address", "cluster_detection_method")
  )
  known = {"Slurm": "slurm", "Open MPI": "ompi"}
  assert method == ("deactivate" if address else known[launch.launcher])


@pytest.mark.parametrize(
  "environment",
  [
    {},
    ONE_STEP,  # srun with one task
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},  # a shell of a job
    {"SLURM_STEP_NUM_TASKS": "4"},  # an ssh session with half of its variables
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    HAND | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
  ],
)
def test_launcher_single_process_none(environment):
  assert detect(environment) is None


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "neither JAX_NUM_PROCESSES nor a launcher"),
    ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is not: 0 .. 1"),
    ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "COORDINATOR_ADDRESS is not: .*HOST:PORT"),
    (HAND | {"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4 must be less than JAX_NUM_PROCESSES=4"),
    (HAND | {"JAX_NUM_PROCESSES": "two"}, "'two' must be a whole number"),
    (HAND | {"JAX_COORDINATOR_ADDRESS": "node1"}, "node1 must be HOST:PORT"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "JAX_COORDINATOR_ADDRESS is not"),
  ],
)
def test_launcher_incomplete_environment_rejected(environment, message):
  with pytest.raises(LaunchError, match=message):
    detect(environment)


@pytest.mark.parametrize(
  ("environment", "devices"),
  [
    (OMPI, None),
    (OMPI | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, [0, 1]),
    (OMPI | {"CUDA_VISIBLE_DEVICES": "3"}, [0]),  # the launcher has assigned them
    (OMPI | {"CUDA_VISIBLE_DEVICES": "0,1,2"}, [0, 1, 2]),  # of no equal shares
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "0,1"}, [1]),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, [2, 3]),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "10(x2)", "CUDA_VISIBLE_DEVICES": TWENTY}, [2, 3]),
    (ALONE | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "CUDA_VISIBLE_DEVICES": "0,1"}, [0, 1]),
  ],
)
def test_launcher_processes_of_host_share_gpus(environment, devices):
  assert detect(environment).arguments["local_device_ids"] == devices


def test_batch_rows_by_process_equal_global_batch(tiny):
  cfg = tiny()
  trainer.prepare(cfg.data)
  windows = TokenWindows([f"{cfg.data.folder}/train"], 32, 257)
  count = len(windows)
  start = count // 8 - 2  # across the end of an epoch

  def read(stream):
    with stream:
      return [next(stream) for _ in range(5)]

  options = {"seed": 1, "global_batch": 8, "start": start}
  whole = read(train_batches(windows, **options))
  first, second = (
    read(train_batches(windows, rows=rows, **options)) for rows in (range(3), range(3, 8))
  )
  whole += list(eval_batches(windows, 8))
  first += list(eval_batches(windows, 8, range(3)))
  second += list(eval_batches(windows, 8, range(3, 8)))
  assert len(whole) == len(first) == len(second)
  for batch, a, b in zip(whole, first, second, strict=True):
    for name, rows in batch.items():
      np.testing.assert_array_equal(rows, np.concatenate([a[name], b[name]]))


def test_doctor_report_complete(tiny, capsys):
  assert doctor.examine(tiny(), print)
  out = capsys.readouterr().out
  assert f"jax {jax.__version__}" in out
  xla = "kernels      XLA's forms, because the default device is a cpu"
  for line in (xla, "launcher     none: one process", "correct,", "writable,", "no problem found"):
    assert line in out
  said = []
  assert not doctor.examine(tiny(run_dir="/proc/run", mesh__data=64), said.append)
  problems = [line for line in said if line.startswith("PROBLEM")]
  assert len(problems) == 2
  assert "mesh.data=64" in problems[0] and "cannot be written" in problems[1]
  assert said[-1] == "2 problems found"
  assert list(Path(tiny().run_dir).iterdir()) == []  # nothing is left of the trial


def test_doctor_finds_proxies_lost_processes_and_wrong_sums(monkeypatch):
  launch = detect(HAND)
  for name in ("http_proxy", "https_proxy", "all_proxy"):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(name.upper(), raising=False)
  found = lambda of: [line for line in doctor._environment(of) if "NVIDIA" not in line]
  assert found(None) == []
  assert found(launch) == ["by hand started 4 processes, but JAX joined 1"]
  monkeypatch.setattr(jax, "process_count", lambda: 5)
  assert found(launch) == ["by hand started 4 processes, but JAX joined 5"]
  monkeypatch.setattr(jax, "process_count", lambda: 4)
  assert found(launch) == []
  monkeypatch.setenv("HTTPS_PROXY", "somewhere")
  monkeypatch.setenv("all_proxy", "somewhere")
  (line,) = found(launch)
  assert "HTTPS_PROXY" in line and "all_proxy" in line and "unset it" in line
  assert found(None) == []  # one process connects to none
  said = []
  monkeypatch.setattr(doctor.jnp, "all", lambda right: False)
  assert not doctor.examine(None, said.append)
  assert "PROBLEM      the devices cannot compute a sum: " in "\n".join(said)


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def wait_for(process, text):
  """Reads the output of `process` until a line contains `text`."""
  lines = []
  for line in process.stdout:
    lines.append(line)
    if text in line:
      return
  raise AssertionError("".join(lines) + process.stderr.read())


def two_processes(command, *configs):
  """Starts `fit` with a config file in each of two processes of one run."""
  address = f"localhost:{free_port()}"
  return [
    command(
      *("-W", "default", "-m", "train", "fit", "--config", config),
      JAX_COORDINATOR_ADDRESS=address,
      JAX_NUM_PROCESSES="2",
      JAX_PROCESS_ID=str(i),
      PYTHONUNBUFFERED="1",
    )
    for i, config in enumerate(configs)
  ]


def test_two_processes_other_settings_end_both(tiny, config_file, command):
  cfg, other = (tiny(steps=steps, mesh__data=-1) for steps in (8, 9))
  processes = two_processes(command, config_file(cfg), config_file(other, "other.py"))
  errors = [process.communicate(timeout=60)[1] for process in processes]
  assert all(process.returncode for process in processes)
  assert "settings.steps: 8 in process 0, 9 in process 1\n" in errors[0]
  assert not (Path(cfg.run_dir) / "config.json").exists()


def test_disagreement_names_process_fields_and_values():
  expected = {"seed": 1, "versions.jax": "a", "data.train": "x"} | {f"m{i}": 0 for i in range(9)}
  message = agreement.disagreement(3, expected, {"seed": 2, "versions.jax": "a"} | {"new": None})
  assert "\n  data.train: 'x' in process 0, nothing in process 3\n" in message
  assert "versions.jax" not in message
  assert "\n  ... and 4 more\nStart all of them with the same command" in message
  assert "seed: 1 in process 0, 2 in process 3" in agreement.disagreement(
    3, {"seed": 1}, {"seed": 2}
  )


def test_agreement_covers_every_source_file_and_package(monkeypatch, tmp_path):
  here = agreement.software()
  assert here == agreement.software()
  assert {"jax", "jaxlib", "flax", "git_commit"} <= here["versions"].keys()
  for package in ("lnssm_jax", "pallas_kernels"):
    (tmp_path / package).mkdir()
    (tmp_path / package / "a.py").write_text("x = 1\n")
  monkeypatch.setattr(agreement.lnssm_jax, "__file__", str(tmp_path / "lnssm_jax" / "a.py"))
  before = agreement.software()["code"]
  (tmp_path / "pallas_kernels" / "a.py").write_text("x = 2\n")
  assert here["code"] != before != agreement.software()["code"]


@pytest.mark.slow
def test_two_processes_one_run_stops_together(tiny, config_file, command, tmp_path):
  options = {"eval_every": 6, "checkpoint_every": 1000, "mesh__data": -1}
  cfg = tiny(steps=5000, **options)
  file = config_file(cfg)
  processes = two_processes(command, file, file)
  wait_for(processes[0], "step 6  validation")
  processes[1].send_signal(signal.SIGTERM)
  (out, errors), (out_of_second, errors_of_second) = (
    process.communicate(timeout=120) for process in processes
  )
  assert processes[0].returncode == processes[1].returncode == 0, errors + errors_of_second
  (step,) = re.findall(r"stopped by a signal to another process after step (\d+)", out)
  assert "step" not in out_of_second  # only process 0 prints
  step = int(step)
  run = RunFolder(cfg.run_dir)
  assert newest_step(run.checkpoints) == step < 5000

  # Resume in one process: equal to a run in one process, up to the order of summation.
  end = step + 3
  alone = tiny(steps=5000, run_dir=str(tmp_path / "alone"), **options)
  for this in (cfg, alone):
    loop_until(this, end)
  values = lambda cfg: [
    [row[name] for name in ("step", "loss", "grad_norm", "learning_rate")]
    for row in RunFolder(cfg.run_dir).read_rows()
    if row["kind"] == "train"
  ]
  assert len(values(cfg)) == end
  np.testing.assert_allclose(values(cfg), values(alone), rtol=1e-4)


@pytest.mark.slow
def test_two_processes_dead_reader_of_the_first_ends_none(tiny, config_file, command):
  cfg = tiny(steps=60, eval_every=60, checkpoint_every=60, mesh__data=-1)
  file = config_file(cfg)
  processes = two_processes(command, file, file)
  processes[0].stdout.readline()
  processes[0].stdout.close()
  assert [process.wait(timeout=120) for process in processes] == [0, 0]
  for stream in (processes[0].stderr, processes[1].stdout, processes[1].stderr):
    stream.close()
  assert newest_step(RunFolder(cfg.run_dir).checkpoints) == 60


def loop_until(cfg, step):
  """Trains up to `step` and stops there as after SIGTERM."""
  push = trainer.MetricReader.push

  def push_and_stop(self, at, metrics):
    if at == step:
      os.kill(os.getpid(), signal.SIGTERM)
    push(self, at, metrics)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer.MetricReader, "push", push_and_stop)
    assert trainer.fit(cfg).step == step


def test_processes_join_with_the_stated_heartbeat(monkeypatch):
  given = {}
  monkeypatch.setattr(distributed.launcher, "detect", lambda: detect(HAND))
  monkeypatch.setattr(jax.distributed, "initialize", lambda **options: given.update(options))
  monkeypatch.setattr(jax.config, "update", lambda *_: None)
  assert distributed.join() == detect(HAND)
  assert given == detect(HAND).arguments | {"heartbeat_timeout_seconds": distributed.HEARTBEAT}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
  ("number", "seconds"),
  [
    (signal.SIGKILL, 30),  # its connections break
    (signal.SIGSTOP, distributed.HEARTBEAT + 30),  # as a host that hangs, or a network that is gone
  ],
)
def test_two_processes_lost_peer_noticed_in_time(
  number, seconds, victim, tiny, config_file, command
):
  cfg = tiny(steps=100_000, eval_every=100_000, checkpoint_every=100_000, mesh__data=-1)
  file = config_file(cfg)
  processes = two_processes(command, file, file)
  try:
    wait_for(processes[0], "tokens/s")
    processes[victim].send_signal(number)
    begin = time.monotonic()
    processes[1 - victim].communicate(timeout=seconds)
    spent = time.monotonic() - begin
    print(f"{number.name} to process {victim}: the other ended after {spent:.1f} s")
    assert processes[1 - victim].returncode != 0
  finally:
    for process in processes:
      process.kill()
      process.communicate()


@pytest.mark.parametrize(
  ("error", "code"), [(OSError(errno.EIO, "lost"), 1), (OSError(errno.ENOSPC, "full"), 2)]
)
def test_error_of_one_process_ends_the_others_with_its_exit_code(monkeypatch, error, code):
  told = []
  monkeypatch.setattr(distributed, "first_with", lambda flag: 0)
  monkeypatch.setattr(distributed, "from_process", lambda which, value: told.append(value) or value)

  def fails():
    raise error

  with pytest.raises(OSError, match=str(error.strerror)):
    distributed.on_all(fails)
  assert [x["exit_code"] for x in told] == [code]
