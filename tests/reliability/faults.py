"""Damages checkpoints at random and compares what is loaded with what was saved.

    python -m tests.reliability.faults --faults 1000

Three checkpoints are saved. Each trial damages the newest one (one in ten: the two newest), then
restores the newest intact state, as a resumed run does, and for comparison the latest one by Orbax
alone. The restored state is compared bit for bit with the saved one:

    intact        the newest step, correct: the damage affected nothing that is loaded
    fell back     the step before the damage, correct, with a message that names the damage
    rejected      an error although an intact step existed
    WRONG         numbers that were never saved under that step, without an error
"""

import argparse
import collections
import logging
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp

from train.checkpoint import digests, store

STEPS = (10, 20, 30)


def make_state(seed: int):
  """Parameters and Adam's moments that depend on the seed in every element; 200 kB."""
  keys = jax.random.split(jax.random.key(seed))
  params = {
    "blocks": {"kernel": jax.random.normal(keys[0], (2, 64, 96))},
    "head": jax.random.normal(keys[1], (64, 33)).astype(jnp.bfloat16),
  }
  moments = jax.tree.map(lambda x: x.astype(jnp.float32) / 7, params)
  opt_state = optax.ScaleByAdamState(jnp.int32(seed), moments, jax.tree.map(jnp.square, moments))
  return {"params": params, "opt_state": (opt_state,), "step": jnp.int32(seed)}


def files_of(folder: Path) -> list[Path]:
  return sorted(path for path in folder.rglob("*") if path.is_file())


def some_file(folder: Path, rng: random.Random) -> Path:
  """A random file, half of the time one that contains array data."""
  files = [path for path in files_of(folder) if path.stat().st_size]
  data = [path for path in files if path.parent.name == "d"]
  return rng.choice(data if rng.random() < 0.5 else files)


def rewrite(path: Path, change: Callable[[bytearray], bytearray]) -> None:
  path.write_bytes(change(bytearray(path.read_bytes())))


def flip(folder: Path, rng: random.Random) -> None:
  def change(content):
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content

  rewrite(some_file(folder, rng), change)


def truncate(folder: Path, rng: random.Random) -> None:
  rewrite(some_file(folder, rng), lambda content: content[: rng.randrange(len(content))])


def zero_page(folder: Path, rng: random.Random) -> None:
  def change(content):
    start = rng.randrange(len(content)) // 4096 * 4096
    page = len(content[start : start + 4096])
    content[start : start + page] = bytes(page)
    return content

  rewrite(some_file(folder, rng), change)


def append(folder: Path, rng: random.Random) -> None:
  rewrite(some_file(folder, rng), lambda content: content + rng.randbytes(rng.randint(1, 64)))


def delete(folder: Path, rng: random.Random) -> None:
  rng.choice(files_of(folder)).unlink()


def delete_folder(folder: Path, rng: random.Random) -> None:
  shutil.rmtree(rng.choice(sorted(path for path in folder.rglob("*") if path.is_dir())))


def swap_inside(folder: Path, rng: random.Random) -> None:
  one, two = rng.sample(files_of(folder), 2)
  a, b = one.read_bytes(), two.read_bytes()
  one.write_bytes(b)
  two.write_bytes(a)


def take_from_other_step(folder: Path, rng: random.Random) -> None:
  """Copies a file of another checkpoint to its place: data folders have random names."""
  other = folder.with_name(str(STEPS[0]))
  path = rng.choice(files_of(other))
  name = path.relative_to(other)
  if path.parent.name == "d":
    target = rng.choice(sorted((folder / name.parent).iterdir()))
  else:
    target = folder / name
  if target.parent.is_dir():
    shutil.copyfile(path, target)


def another_step(folder: Path, rng: random.Random) -> None:
  """Replaces the checkpoint by another one under the same name."""
  shutil.rmtree(folder)
  shutil.copytree(folder.with_name(str(STEPS[0])), folder)


def stray_file(folder: Path, rng: random.Random) -> None:
  inside = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
  (rng.choice(sorted(inside)) / f".nfs{rng.randrange(10**6)}").write_bytes(rng.randbytes(100))


def stray_folder(folder: Path, rng: random.Random) -> None:
  """Adds a folder next to the checkpoints: empty, incomplete, or not named by a number."""
  name = rng.choice(["40", "041", "backup", "50"])
  path = folder.with_name(name)
  path.mkdir(exist_ok=True)
  if rng.random() < 0.5:
    shutil.copytree(folder / "params", path / "params", dirs_exist_ok=True)


FAULTS = (flip, truncate, zero_page, append, delete, delete_folder, swap_inside,
          take_from_other_step, another_step, stray_file, stray_folder)  # fmt: skip
WEIGHTS = (5, 2, 2, 1, 2, 1, 1, 1, 1, 1, 1)


def same_bits(a, b) -> bool:
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def changed(pristine: Path, folder: Path) -> set[str]:
  """Names of the files of a checkpoint that have changed."""
  names = {str(path.relative_to(pristine)): path.read_bytes() for path in files_of(pristine)}
  now = {name: folder / name for name in names}
  return {n for n, path in now.items() if not path.is_file() or path.read_bytes() != names[n]}


def ours(folder: Path, states: dict, harm: dict[int, set[str]]) -> str:
  """Outcome for a resumed run; `harm` has the changed files of each step."""
  newest = max(states)
  said: list[str] = []
  abstract = jax.eval_shape(lambda: states[newest])
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), abstract
  )
  try:
    with store.Checkpoints(folder, keep=5, say=said.append) as checkpoints:
      restored = checkpoints.restore(abstract)
  except Exception as error:
    return f"rejected ({type(error).__name__})"
  if restored is None:
    return "WRONG"  # a fresh start although there are checkpoints
  state, metadata = restored
  step = metadata["data_position"]
  if not same_bits(state, states[step]) or int(state["step"]) != step:
    return "WRONG"
  passed_over = [harm[s] for s in states if s > step]
  if harm[step] - {digests.FILE} or not all(passed_over) or len(said) < len(passed_over):
    return "WRONG"
  return "intact" if step == newest else "fell back"


def orbax_alone(folder: Path, states: dict, newest: int) -> str:
  """Outcome for Orbax's own latest checkpoint."""
  abstract = store._split(jax.eval_shape(lambda: states[newest]))
  try:
    with ocp.training.Checkpointer(str(folder)) as checkpointer:
      if checkpointer.latest is None:
        return "WRONG"
      step = checkpointer.latest.step
      loaded = checkpointer.load_checkpointables(step, abstract)
  except Exception:
    return "rejected"
  state = {"params": loaded["params"], **loaded["optimizer"]}
  if step in states and same_bits(state, states[step]):
    return "intact" if step == newest else "fell back"
  return "WRONG"


def run(faults: int, seed: int, compare: bool) -> dict[str, collections.Counter]:
  """Counts of outcomes per kind of fault, for our code and optionally Orbax alone."""
  rng = random.Random(seed)
  counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
  with tempfile.TemporaryDirectory() as root:
    pristine, folder = Path(root) / "pristine", Path(root) / "run"
    states = {step: make_state(step) for step in STEPS}
    with store.Checkpoints(pristine, keep=5) as checkpoints:
      for step, state in states.items():
        checkpoints.save(step, state, {"data_position": step})
      checkpoints.wait()
    states = jax.device_get(states)
    for trial in range(faults):
      (fault,) = rng.choices(FAULTS, WEIGHTS)
      damaged = STEPS[-2:] if trial % 10 == 9 and fault is not stray_folder else STEPS[-1:]
      shutil.copytree(pristine, folder)
      for step in damaged:
        fault(folder / str(step), rng)
      harm = {step: changed(pristine / str(step), folder / str(step)) for step in STEPS}
      if compare:
        other = Path(root) / "orbax"
        shutil.copytree(folder, other)
        counts[f"{fault.__name__}, Orbax alone"][orbax_alone(other, states, STEPS[-1])] += 1
        shutil.rmtree(other)
      counts[fault.__name__][ours(folder, states, harm)] += 1
      shutil.rmtree(folder)
  return counts


def table(counts: dict[str, collections.Counter]) -> str:
  """Formats a line per kind of fault, and the totals."""
  lines = []
  for who in ("", ", Orbax alone"):
    total: collections.Counter = collections.Counter()
    for fault in FAULTS:
      found = counts.get(fault.__name__ + who)
      if found:
        total += found
        shown = ", ".join(f"{name} {n}" for name, n in sorted(found.items()))
        lines.append(f"{fault.__name__ + who:<36} {found.total():>5}  {shown}")
    if total:
      shown = ", ".join(f"{name} {n}" for name, n in sorted(total.items()))
      lines.append(f"{'all' + who:<36} {total.total():>5}  {shown}")
  return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
  """Prints the table; returns 1 if anything was wrong or rejected."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--faults", type=int, default=1000)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--no-orbax", action="store_true", help="leave the comparison out")
  options = parser.parse_args(arguments)
  logging.disable(logging.CRITICAL)  # Orbax reports each damaged array at length
  warnings.simplefilter("ignore", RuntimeWarning)
  counts = run(options.faults, options.seed, not options.no_orbax)
  print(table(counts))
  mine = [name for name in counts if not name.endswith("alone")]
  bad = sum(n for name in mine for what, n in counts[name].items() if what[:2] in ("WR", "re"))
  return int(bad > 0)


if __name__ == "__main__":
  raise SystemExit(main())
