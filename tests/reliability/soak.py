"""Trains a small model again and again under random faults, and compares every number.

    python -m tests.reliability.soak --minutes 30 --seed 1
    python -m tests.reliability.soak --minutes 10 --seed 1 --platform gpu  # on two GPUs

An undisturbed run comes first, of one process and of two. Then runs with the same settings are
started, disturbed, ended and resumed until they are complete, and begin again. One fault at a time:
signals, a killed process of two, readers that exit, a full disk, a read-only one, syncs that fail,
no free descriptors, a clock that jumps, other processes that create the same token files, and
damage to any file of the run or of its data, between two starts or during training. Per fault the
table has

    trials     times that it was caused
    rows       rows of metrics.jsonl compared with those of the undisturbed run, bit for bit
    lost       steps trained again afterwards: the mean, and the most
    reported   times that the run continued without the damaged file, and said so
    rejected   times that it ended with an error that names the damaged file
    wrong      errors without damage, errors that do not name it, wrong exit codes, and hanging
    silent     numbers that differ, damage that `train verify` does not report, false success

and the command returns 1 if any of the last two is not 0. Every row and, when a run is complete,
every bit of its last parameters and moments are compared.
"""

import argparse
import collections
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.reliability import platforms
from tests.reliability.soak_campaign import OF_ONE, OF_TWO, Campaign, Count

STEPS = 1000  # of a run


def soak(root: Path, seconds: float, seed: int, steps: int, only: str = "") -> dict[str, Count]:
  """Disturbs runs for about `seconds`; returns the table."""
  rng = random.Random(seed)
  table: dict[str, Count] = collections.defaultdict(Count)
  kinds = {1: [f for f in OF_ONE if only in f], 2: [f for f in OF_TWO if only in f]}
  campaigns = []
  for processes in (1, 2):
    if kinds[processes]:
      campaigns.append(Campaign(root, processes, steps // processes**2, table, rng))
      rate = campaigns[-1].prepare()
      print(f"{processes} process(es), undisturbed: {rate:.0f} steps/s", flush=True)
  begin, waiting = time.monotonic(), {}
  while time.monotonic() - begin < seconds:
    campaign = campaigns[0] if rng.random() < 0.85 else campaigns[-1]
    bag = waiting.setdefault(campaign.processes, [])
    if not bag:  # each fault once, in random order
      bag += rng.sample(kinds[campaign.processes], len(kinds[campaign.processes]))
    fault = bag.pop()
    campaign.say = lambda line, fault=fault: print(f"[{fault}] {line}", flush=True)
    campaign.trial(fault)
  return table


def show(table: dict[str, Count]) -> str:
  """The table in Markdown."""
  lines = ["| fault | trials | rows | lost: mean, most | reported | rejected | wrong | silent |",
           "|---|---|---|---|---|---|---|---|"]  # fmt: skip
  whole = Count()
  for fault in sorted(table):
    count = table[fault]
    for name in ("trials", "rows", "reported", "rejected", "wrong", "silent"):
      setattr(whole, name, getattr(whole, name) + getattr(count, name))
    whole.lost += count.lost
    lines.append(_line(fault, count))
  return "\n".join([*lines, _line("all", whole)]) + "\n"


def _line(name: str, count: Count) -> str:
  lost = f"{sum(count.lost) / len(count.lost):.1f}, {max(count.lost)}" if count.lost else "-"
  numbers = map(str, (count.reported, count.rejected, count.wrong, count.silent))
  return f"| {name} | {count.trials} | {count.rows:,} | {lost} | {' | '.join(numbers)} |"


def main(arguments: list[str] | None = None) -> int:
  """Prints the table; returns 1 if anything was wrong or silent."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--minutes", type=float, default=60.0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
  parser.add_argument("--only", default="", help="faults whose names contain this")
  parser.add_argument("--out", type=Path, help="a file for the table")
  platforms.add_option(parser)
  options = parser.parse_args(arguments)
  platforms.use(options.platform)
  import train.trainer  # noqa: F401  so that the children need not

  with tempfile.TemporaryDirectory() as root:
    table = soak(Path(root), 60 * options.minutes, options.seed, options.steps, options.only)
  print(show(table))
  if options.out:
    options.out.write_text(show(table))
  return int(any(count.wrong or count.silent for count in table.values()))


if __name__ == "__main__":
  sys.exit(main())
