"""Scripts that start several processes, and exit codes under the rules of schedulers."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from train.cli import main as cli
from train.logging.metric_reader import DivergedError

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "train" / "launch"
STOPPED = 75


def program(path: Path, script: str) -> str:
  path.write_text(f"#!/bin/bash\n{script}\n")
  path.chmod(0o755)
  return str(path)


@pytest.fixture
def by_hand(tmp_path):
  """Returns a function that starts two fake processes, which run the lines given for each."""

  def start(first: str, second: str, grace: int = 60) -> subprocess.Popen[str]:
    python = program(
      tmp_path / "python",
      f"cd {tmp_path}; echo $$ >>pids\nif ((JAX_PROCESS_ID == 0)); then {first}; else {second}; fi",
    )
    return subprocess.Popen(
      ["bash", str(LAUNCH / "by_hand.sh"), "localhost:1", "2", "0", "2", "fit"],
      env=os.environ | {"PYTHON": python, "GRACE": str(grace)},
      text=True,
      stderr=subprocess.PIPE,
    )

  return start


def wait_until(true, seconds: float = 20) -> None:
  deadline = time.monotonic() + seconds
  while not true():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def alive(folder: Path) -> list[str]:
  """Processes that have noted their numbers in `folder` and still run."""
  pids = (folder / "pids").read_text().split() if (folder / "pids").exists() else []
  return [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


def is_zombie(pid: str) -> bool:
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
  except OSError:
    return True


ASLEEP = "sleep 60 & echo $! >>pids; trap 'touch asked; exit 0' TERM; touch asleep; wait"
WHEN_ASLEEP = "while [ ! -e asleep ]; do sleep 0.05; done;"
DEAF = "trap '' TERM; touch asleep; while true; do sleep 0.1; done"


@pytest.mark.parametrize(
  ("first", "second", "code", "asked"),
  [
    (ASLEEP, f"{WHEN_ASLEEP} exit 3", 3, True),  # the later process ends first
    (ASLEEP, f"{WHEN_ASLEEP} kill -KILL $$", 137, True),
    ("sleep 0.3", "exit 0", 0, False),
    ("sleep 0.3; exit 75", "exit 75", STOPPED, False),  # all are ending by themselves
  ],
)
def test_by_hand_any_process_that_fails_ends_the_others(
  first, second, code, asked, by_hand, tmp_path
):
  begin = time.monotonic()
  process = by_hand(first, second)
  assert process.wait(timeout=30) == code
  assert time.monotonic() - begin < 20
  assert (tmp_path / "asked").exists() == asked
  process.stderr.close()
  wait_until(lambda: not alive(tmp_path))  # also what the processes had started


def test_by_hand_process_that_ignores_sigterm_is_killed(by_hand, tmp_path):
  process = by_hand(DEAF, f"{WHEN_ASLEEP} exit 1", grace=0)
  assert process.wait(timeout=30) == 1
  process.stderr.close()
  assert not alive(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_by_hand_script_that_is_ended_leaves_no_process(number, by_hand, tmp_path):
  if number == signal.SIGKILL and not shutil.which("setpriv"):
    pytest.skip("util-linux has no setpriv here")
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would stay ignored
  try:
    noting = "trap 'echo TERM >>got; exit 75' TERM; trap 'echo HUP >>got; exit 129' HUP;"
    process = by_hand(*[f"{noting} echo >>ready; while true; do sleep 0.05; done"] * 2)
  finally:
    signal.signal(signal.SIGHUP, before)
  ready = tmp_path / "ready"
  wait_until(lambda: ready.exists() and len(ready.read_text().split("\n")) == 3)
  process.send_signal(number)
  expected = {signal.SIGTERM: STOPPED, signal.SIGHUP: 129, signal.SIGKILL: -signal.SIGKILL}
  assert process.wait(timeout=30) == expected[number]
  process.stderr.close()
  wait_until(lambda: not alive(tmp_path))
  got = (tmp_path / "got").read_text()
  assert got.count("\n") == 2  # each of them was asked to save
  assert ("HUP" in got) == (number == signal.SIGHUP)


def job() -> dict:
  _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
  return job["spec"]


def decide(spec: dict, code: int, conditions: tuple[str, ...] = ()) -> str:
  """The action of Kubernetes for a pod that failed: that of the first rule that matches.

  https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
  """
  for rule in spec["podFailurePolicy"]["rules"]:
    exits, pods = rule.get("onExitCodes"), rule.get("onPodConditions", [])
    if exits is not None and code != 0 and (code in exits["values"]) == (exits["operator"] == "In"):
      return rule["action"]
    if any(pod["type"] in conditions and pod.get("status", "True") == "True" for pod in pods):
      return rule["action"]
  return "Count"


def simulate(spec: dict, codes: list[int | str]) -> tuple[str, int]:
  """State of a Job, and how many of the pods of one index it has started, given how they end."""
  counted = 0
  for number, code in enumerate(codes, 1):
    if code == 0:
      return "Complete", number
    evicted = code == "evicted"
    action = decide(spec, 137 if evicted else int(code), ("DisruptionTarget",) if evicted else ())
    counted += action == "Count"
    if action == "FailJob" or counted > spec["backoffLimit"]:
      return "Failed", number
  return "Running", len(codes)


@pytest.mark.parametrize(
  ("codes", "state", "pods"),
  [
    ([0], "Complete", 1),
    ([STOPPED] * 300 + [0], "Complete", 301),  # deleted or stopped, as often as they like
    (["evicted"] * 300 + [0], "Complete", 301),
    ([137, 134, 1, 129, 0], "Complete", 5),  # out of memory, a peer lost, a disk, a hangup
    ([2] * 9, "Failed", 1),  # wrong settings
    ([STOPPED, 3, 0], "Failed", 2),  # diverged
    ([1] * 300, "Failed", 101),
  ],
)
def test_kubernetes_exit_codes_restart_or_end_the_job(codes, state, pods):
  assert simulate(job(), codes) == (state, pods)


def test_kubernetes_job_is_valid_and_its_command_stops_with_the_code_of_a_rule():
  spec = job()
  pod = spec["template"]["spec"]
  (container,) = pod["containers"]
  assert pod["restartPolicy"] == "Never"  # or the API rejects the policy
  for rule in spec["podFailurePolicy"]["rules"]:
    exits = rule.get("onExitCodes")
    assert exits is None or (exits["containerName"], 0 in exits["values"]) == ("train", False)
  options = cli._parser().parse_args([*container["command"][3:], *container["args"]])
  assert options.stopped_code == STOPPED and len(options.set) == 2
  assert decide(spec, STOPPED) == "Ignore"
  assert decide(spec, DivergedError.exit_code) == decide(spec, 2) == "FailJob"


@pytest.mark.parametrize(
  ("code", "state", "requeued"),
  [
    (0, "RUNNING", False),
    (STOPPED, "RUNNING", True),
    (STOPPED, "CANCELLED", False),  # scancel
    (2, "RUNNING", False),
    (3, "RUNNING", False),
    (1, "RUNNING", False),
  ],
)
def test_slurm_only_a_stopped_run_is_queued_again(code, state, requeued, tmp_path):
  """Slurm queues a batch job again if `scontrol requeue` asks for it, whatever its exit code."""
  program(tmp_path / "srun", f"echo srun $* >>{tmp_path}/calls; exit {code}")
  program(
    tmp_path / "scontrol", f"echo scontrol $* >>{tmp_path}/calls; echo '   JobState={state} x'"
  )
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PYTHON": "py"}
  done = subprocess.run(
    ["bash", str(LAUNCH / "slurm.sh"), "fit", "--config", "c.py"],
    env=environment,
    cwd=tmp_path,
    timeout=30,
  )
  assert done.returncode == code
  calls = (tmp_path / "calls").read_text().splitlines()
  assert calls[0] == "srun --kill-on-bad-exit=1 py -m train fit --config c.py --stopped-code 75"
  assert ("scontrol requeue 7" in calls) == requeued


def test_slurm_script_survives_the_signal_that_ends_its_processes(tmp_path):
  """Preemption signals the batch shell too, which must still ask for another turn."""
  program(tmp_path / "srun", f"touch {tmp_path}/started; sleep 0.5; exit 75")
  program(tmp_path / "scontrol", f"echo $* >>{tmp_path}/calls; echo JobState=RUNNING")
  environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
  process = subprocess.Popen(
    ["bash", str(LAUNCH / "slurm.sh"), "fit"], env=environment, cwd=tmp_path
  )
  wait_until((tmp_path / "started").exists)
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=30) == STOPPED
  assert "requeue 7" in (tmp_path / "calls").read_text()
