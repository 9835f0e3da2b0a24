"""A run under faults, for `tests.reliability.soak`: one at a time, and what came of it."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.reliability import platforms, soak_faults
from tests.reliability.kills import inode, parameters_differ
from tests.reliability.soak_runs import rows_of, run_command, settings
from train import config
from train.checkpoint.store import newest_step

PATIENCE = 300.0  # seconds until a process counts as hanging
PEER = 60.0  # most seconds until a process has noticed on a CPU that another was killed
STOP = 90.0  # most seconds from a signal that stops a run to its exit
ENDS = {signal.SIGTERM: 0, signal.SIGINT: 0, signal.SIGUSR1: 0, signal.SIGHUP: 129,
        signal.SIGKILL: -signal.SIGKILL}  # fmt: skip

SIGNALS = tuple(each.name for each in ENDS)
LIVE = ("SIGSTOP, SIGCONT", "full disk", "read-only disk", "syncs that fail", "no descriptors",
        "reader exits", "stdout closed", "clock jumps", "modification times",
        "shared token files")  # fmt: skip
AT_REST = tuple(f"{target}, at rest" for target in soak_faults.TARGETS)
IN_USE = tuple(f"{target}, in use" for target in soak_faults.TARGETS)
OF_ONE = (*SIGNALS, *LIVE, *AT_REST, *IN_USE)
OF_TWO = ("peer killed", *(f"{name} to a peer" for name in SIGNALS[:3]), "checkpoint, at rest",
          "token files, at rest", "SIGSTOP, SIGCONT")  # fmt: skip


@dataclasses.dataclass
class Count:
  """A row of the table."""

  trials: int = 0
  rows: int = 0
  lost: list[int] = dataclasses.field(default_factory=list)
  reported: int = 0
  rejected: int = 0
  wrong: int = 0
  silent: int = 0


class Campaign:
  """Runs of equal settings under faults, one after the other."""

  def __init__(self, root: Path, processes: int, steps: int, table: dict[str, Count], rng):
    self.root, self.processes, self.steps, self.table, self.rng = root, processes, steps, table, rng
    self.number, self.harm, self.last, self.reached = 0, None, None, 0
    self.harm_was_read = False  # by the processes that run now
    self.excused: set[tuple] = set()  # rows whose loss was reported
    self.whole: dict[Path, bytes] = {}  # token files before others created them again
    self.out, self.errors = (root / f"{which}-of-{processes}.txt" for which in ("out", "err"))
    self.shared_errors = root / "shared-err.txt"
    self.reference = settings(root, f"alone-of-{processes}", processes, steps)
    self.say: Callable[[str], None] = print

  def prepare(self) -> float:
    """Trains the undisturbed run; returns its steps per second."""
    begin = time.monotonic()
    for child in self.start(self.reference):
      child.join()
      if child.exitcode:
        raise RuntimeError(self.errors.read_text()[-3000:])
    self.expected = rows_of(self.reference)
    if len({step for kind, step, _ in self.expected if kind == "train"}) != self.steps:
      raise RuntimeError("the undisturbed run has not all of its rows")
    self.renew()
    return self.steps / (time.monotonic() - begin)

  def renew(self) -> None:
    """Begins the next run, which finds its programs compiled, and the data as it was.

    On GPUs it also has XLA's choices of kernels, without which it would round differently.
    """
    if self.harm is not None:
      self.harm.undo()
    self.number, self.reached, self.harm, self.excused = self.number + 1, 0, None, set()
    name = f"run-{self.number}-of-{self.processes}"
    self.cfg = settings(self.root, name, self.processes, self.steps)
    for kept in ("programs", "kernels"):  # the latter on GPUs only
      if (source := Path(self.reference.run_dir, kept)).exists():
        shutil.copytree(source, Path(self.cfg.run_dir, kept))

  def start(
    self, cfg: config.Train, before: Callable[[], object] = int, out: int | None = None
  ) -> list[BaseProcess]:
    """Starts `train fit` in forked processes; `before` is called there first."""
    with socket.socket() as probe:
      probe.bind(("localhost", 0))
      address = f"localhost:{probe.getsockname()[1]}"
    file = self._config_file(f"config-{self.processes}.py", cfg)
    for log in (self.out, self.errors):
      log.write_text("")
    children = []
    for index in range(self.processes):
      launch = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(self.processes),
                "JAX_PROCESS_ID": str(index)} if self.processes > 1 else {}  # fmt: skip
      launch |= platforms.of_process(index, 1)
      target = lambda launch=launch: run_command(
        ["fit", "--config", str(file)],
        launch,
        self.out if out is None else out,
        self.errors,
        before,
      )
      children.append(multiprocessing.get_context("fork").Process(target=target))
      children[-1].start()
    return children

  def _config_file(self, name: str, cfg: config.Train) -> Path:
    file = self.root / name
    code = f"def get_config(): return from_dict({config.to_dict(cfg)!r})"
    file.write_text(f"from train.config import from_dict\n{code}\n")
    return file

  def trial(self, fault: str) -> None:
    """Causes one fault, and resumes the run until it has trained and stopped as it should."""
    target, _, when = fault.rpartition(", ")
    self.last = fault
    if when == "at rest" and (self.is_new_for(target) or not self.damage(target, fault)):
      return
    if fault == "modification times":
      soak_faults.move_times(self.cfg, self.rng)
    self.table[fault].trials += 1
    before, reader, out = int, None, None
    if fault == "clock jumps":
      before = soak_faults.jumping_clock(self.rng.randrange(10**9))
    elif fault == "syncs that fail":
      before = soak_faults.failing_syncs(self.rng.randrange(10**9))
    elif fault == "stdout closed":
      before = lambda: os.close(1)
    elif fault == "reader exits":
      reader, out = os.pipe()
    others = self.share() if fault == "shared token files" else []
    children = self.resume(before, out)
    self.shared(others)
    if children is None:
      return
    if reader is not None and out is not None:
      os.close(out)
      with os.fdopen(reader) as stream:
        stream.readline()
    time.sleep(self.rng.uniform(0, 0.8))
    number = signal.SIGTERM
    if fault == "peer killed":
      number = signal.SIGKILL
    elif fault.split()[0] in SIGNALS:
      number = signal.Signals[fault.split()[0]]
    else:
      self.disturb(children[self.rng.randrange(self.processes)].pid or 0, fault, target, when)
      time.sleep(self.rng.uniform(0.2, 0.8))
    self.end(children, number)
    if self.harm is not None or self.reached != newest_step(self.checkpoints):
      children = self.resume()
      if children is not None:
        self.end(children, signal.SIGTERM)

  def share(self) -> list[BaseProcess]:
    """Starts two other processes that need the same token files, or make them again.

    Half of the times the files are missing, so that the run and both others create them.
    """
    force, folder = self.rng.random() < 0.5, Path(self.cfg.data.folder)
    if not force:
      self.whole = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
      for path in self.whole:
        path.unlink()
    file = self._config_file("shared.py", self.cfg)
    arguments = ["tokenize", "--config", str(file), *(["--force"] if force else [])]
    target = lambda: run_command(arguments, {}, self.root / "shared.txt", self.shared_errors, int)
    children = [multiprocessing.get_context("fork").Process(target=target) for _ in range(2)]
    for child in children:
      child.start()
    return children

  def shared(self, others: list[BaseProcess]) -> None:
    """Waits for the processes of `share`, which must succeed, and compares the files."""
    for child in others:
      child.join(PATIENCE)
      if child.exitcode:
        self.blame("wrong", self.last, f"tokenize: {self.shared_errors.read_text()[-1000:]}")
    for path, content in (self.whole if others else {}).items():
      if not path.exists() or (path.suffix != ".json" and path.read_bytes() != content):
        self.blame("silent", self.last, f"{path.name} is missing or has changed")
    self.whole = {}

  def resume(
    self, before: Callable[[], object] = int, out: int | None = None
  ) -> list[BaseProcess] | None:
    """Starts the run and waits until it trains; None if it ended before that."""
    previous = inode(self.metrics)
    self.harm_was_read = self.harm is not None
    children = self.start(self.cfg, before, out)
    if self.wait_for_row(children, previous):
      return children
    self.ended(children, None)
    return None

  def disturb(self, pid: int, fault: str, target: str, when: str) -> None:
    """Causes a fault during training."""
    try:
      if when == "in use":
        self.damage(target, fault)
      elif fault == "SIGSTOP, SIGCONT":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0, 1.5))
        os.kill(pid, signal.SIGCONT)
      elif fault in soak_faults.FOR_A_WHILE:
        end = soak_faults.FOR_A_WHILE[fault](pid, self.cfg, self.rng)
        time.sleep(self.rng.uniform(0.2, 2))
        end()
    except ProcessLookupError:
      pass  # the run is complete

  def is_new_for(self, target: str) -> bool:
    """Whether the run has not begun and would be bound to the damaged file as to any other."""
    return target in ("text", "tokenizer") and not Path(self.cfg.run_dir, "config.json").exists()

  def damage(self, target: str, fault: str) -> bool:
    """Damages a file; a checkpoint or token files are sometimes looked at by `train verify`."""
    done = soak_faults.damage(self.cfg, target, self.rng)
    if done is None:
      return False
    how, self.harm = done
    self.say(f"{how} {self.harm.path.relative_to(self.root)}")
    if fault.endswith("at rest") and self.harm.is_detectable() and self.rng.random() < 0.3:
      code = self.run(["verify", self.cfg.run_dir])
      told = self.out.read_text() + self.errors.read_text()
      if code not in (1, 2) or not self.harm.is_named_in(told):
        self.blame("silent", fault, f"verify ended with {code}: {told[-300:]}")
    return True

  def run(self, arguments: list[str]) -> int | None:
    """Exit code of one command in a process of its own."""
    for log in (self.out, self.errors):
      log.write_text("")
    target = lambda: run_command(arguments, {}, self.out, self.errors, int)
    child = multiprocessing.get_context("fork").Process(target=target)
    child.start()
    child.join(PATIENCE)
    return child.exitcode

  @property
  def metrics(self) -> Path:
    return Path(self.cfg.run_dir) / "metrics.jsonl"

  @property
  def checkpoints(self) -> Path:
    return Path(self.cfg.run_dir) / "checkpoints"

  def wait_for_row(self, children: list[BaseProcess], previous: int | None) -> bool:
    """Waits until the run has trained a step; False if a process has ended, or none came."""
    kept, deadline = None, time.monotonic() + PATIENCE
    while all(child.exitcode is None for child in children):
      if inode(self.metrics) not in (None, previous):
        content = self.metrics.read_bytes()
        kept = len(content) if kept is None else kept
        if b'"kind": "train"' in content[kept:]:
          return True
      if time.monotonic() > deadline:
        self.blame("wrong", self.last, "no row was written")
        return False
      time.sleep(0.005)
    return False

  def end(self, children: list[BaseProcess], number: signal.Signals) -> None:
    """Ends a run by a signal to one of its processes."""
    victim = self.rng.choice(children)
    if victim.exitcode is None:
      os.kill(victim.pid or 0, number)
    self.ended(children, (children.index(victim), number))

  def ended(self, children: list[BaseProcess], sent: tuple[int, signal.Signals] | None) -> None:
    """Compares rows, exit codes and messages after the processes have ended."""
    killed = sent is not None and sent[1] == signal.SIGKILL
    deadline = time.monotonic() + (PEER if killed else PATIENCE if sent is None else STOP)
    hanging = []
    for child in children:
      child.join(max(0, deadline - time.monotonic()))
      if child.exitcode is None:
        hanging.append(child)
        child.kill()
        child.join()
    for child in hanging:
      self.blame("wrong", self.last, f"process {children.index(child)} hangs")
    codes = [child.exitcode for child in children]
    out, errors = self.out.read_text(errors="replace"), self.errors.read_text(errors="replace")
    self.rows = rows_of(self.cfg)
    of_last = {key for key in self.expected if key[1] == self.steps}
    complete = of_last <= self.rows.keys() | self.excused
    if self.harm is not None and self.harm.target == "metrics.jsonl":  # what it lacks is said
      complete |= newest_step(self.checkpoints) == self.steps
    self.measure_loss(out)
    self.reached = max((step for kind, step, _ in self.rows if kind == "train"), default=0)
    if not hanging and not self.as_expected(codes, sent, complete):
      self.examine_error(codes, errors)
    elif self.harm is not None and self.harm_was_read:
      self.settle(out)
    self.compare()
    # Damage that no start has seen is reported by the next one, also if nothing is left to train.
    if complete and codes == [0] * len(codes) and self.harm is None:
      self.finish()

  def as_expected(self, codes, sent, complete: bool) -> bool:
    """Whether the exit codes are those of a run that was ended as it was, or is complete."""
    if codes == [0] * len(codes) and complete:
      return True
    if sent is None:
      return False
    victim, number = sent
    if number == signal.SIGKILL:
      return codes[victim] == -signal.SIGKILL and all(
        code not in (0, None) for i, code in enumerate(codes) if i != victim
      )
    wanted = [ENDS[number] if i == victim else 0 for i in range(len(codes))]
    saved = newest_step(self.checkpoints) or 0
    rows_are_whole = self.harm is None or self.harm.target != "metrics.jsonl"
    if codes == wanted and saved != self.reached and rows_are_whole:
      self.blame("silent", self.last, f"step {self.reached} is the last, but {saved} is saved")
    return codes == wanted

  def examine_error(self, codes: list[int | None], errors: str) -> None:
    """An exit code that needs a reason: the damage, named in one line."""
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    fair = all(code in (0, 1, 2) for code in codes) and lines and "Traceback" not in errors
    told = errors[errors.find("error: ") :]
    if self.harm is None or not fair or not self.harm.is_named_in(told):
      self.blame("wrong", self.last, f"exit codes {codes}, harm {self.harm and self.harm.path}: "
                 + errors[-1500:])  # fmt: skip
    else:
      self.table[self.last].rejected += 1
    if self.harm is not None:
      self.harm.undo()
      self.harm = None

  def settle(self, out: str) -> None:
    """The run went on in spite of damage: what it does not replace is repaired."""
    if self.harm.target in ("token files", "sidecar", "tokenizer", "text"):
      self.harm.undo()
    lines = [line for line in out.splitlines() if "damaged" in line or "are lost" in line]
    if any(self.harm.is_named_in(line) for line in lines):
      self.table[self.last].reported += 1
      if self.harm.target == "metrics.jsonl":
        saved = newest_step(self.checkpoints) or 0
        known = max(self.reached, saved + (saved == self.steps))
        self.excused |= {key for key in self.expected if key[1] < known} - self.rows.keys()
    self.harm = None

  def missing(self) -> set[tuple]:
    """Rows that there should be up to the last step."""
    return {key for key in self.expected if key[1] < self.reached} - self.rows.keys()

  def measure_loss(self, out: str) -> None:
    """Counts the steps that this start trained again."""
    for line in out.splitlines():
      if line.startswith("resuming    after step "):
        step = int(line.split()[3])
        self.table[self.last].lost.append(max(0, self.reached - step))
        break

  def compare(self) -> None:
    """Compares all rows; those of a file that is damaged now, after the next start."""
    if self.harm is not None and self.harm.target == "metrics.jsonl":
      return
    self.rows = rows_of(self.cfg)
    different = {key for key, values in self.rows.items() if self.expected.get(key) != values}
    self.table[self.last].rows += len(self.rows)
    missing = self.missing() - self.excused
    if different or missing:
      what = f"rows differ: {sorted(different)[:3]}, are missing: {sorted(missing)[:3]}"
      self.blame("silent", self.last, what)
      self.renew()

  def finish(self) -> None:
    """Compares a complete run as a whole, and begins the next."""
    if self.expected.keys() - self.rows.keys() - self.excused:
      self.blame("silent", self.last, "a complete run lacks rows")

    def compare() -> None:
      os.environ.update(platforms.of_process(0, 1))
      sys.exit(int(parameters_differ(self.reference, self.cfg)))

    (child := multiprocessing.get_context("fork").Process(target=compare)).start()
    child.join()
    if child.exitcode:
      self.blame("silent", self.last, "the last parameters differ")
    self.say(f"run {self.number} of {self.processes} is complete: all numbers are the same")
    shutil.rmtree(self.cfg.run_dir)
    self.renew()

  def blame(self, what: str, fault: str | None, why: str) -> None:
    """Counts something that must not happen, and says it."""
    count = self.table[fault or "start"]
    setattr(count, what, getattr(count, what) + 1)
    self.say(f"{what.upper()} after {fault}: {why}")
