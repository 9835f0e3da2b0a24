"""Puts NaN, infinity and random targets into the batches of a run and compares its losses.

    python -m tests.reliability.poison

One batch in 25 is poisoned: its weights become NaN or infinite, or its targets random tokens (a
spike). Prints the skipped steps and the final loss on clean text, of a clean run and of
poisoned runs with and without `skip_spikes`; and for comparison that `optax.apply_if_finite`, with
4 consecutive errors allowed, applies the fifth.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from tests.reliability import tiny_run

STEPS, FIRST, EVERY = 600, 200, 25
KINDS = ("NaN", "infinity", "spike")


def poisoned(train_batches, kinds: tuple[str, ...]):
  """`train_batches` with one bad batch in `EVERY`, from step `FIRST` on."""

  def batches(windows, *, start, **options):
    for step, batch in enumerate(train_batches(windows, start=start, **options), start + 1):
      if kinds and step >= FIRST and step % EVERY == 0:
        kind = kinds[step // EVERY % len(kinds)]
        if kind == "spike":
          rng = np.random.default_rng(step)
          noise = rng.integers(0, 257, batch["targets"].shape, np.int32)
          batch = batch | {"targets": noise}
        else:
          value = np.nan if kind == "NaN" else np.inf
          batch = batch | {"weights": np.full_like(batch["weights"], value)}
      yield batch

  return batches


def train(root: Path, name: str, kinds: tuple[str, ...], **changes) -> tuple[list[int], float]:
  """Steps that a run skipped, and the mean loss of its last 20 clean steps."""
  from train import trainer

  train_batches = trainer.train_batches
  trainer.train_batches = poisoned(train_batches, kinds)
  try:
    cfg = tiny_run.settings(root, name, steps=STEPS, checkpoint_every=STEPS, **changes)
    trainer.fit(cfg)
  finally:
    trainer.train_batches = train_batches
  rows = trainer.RunFolder(cfg.run_dir).read_rows()
  skipped = [row["step"] for row in rows if row["kind"] == "skipped"]
  losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
  return skipped, float(np.mean([losses[step] for step in range(STEPS - 20, STEPS)]))


def apply_if_finite(errors: int) -> bool:
  """Whether weights are finite after `errors` consecutive non-finite gradients, with 4 allowed."""
  import jax.numpy as jnp
  import optax

  tx = optax.apply_if_finite(optax.adam(1e-3), max_consecutive_errors=4)
  params = {"w": jnp.ones(3)}
  state = tx.init(params)
  for _ in range(errors):
    updates, state = tx.update({"w": jnp.full(3, jnp.nan)}, state, params)
    params = optax.apply_updates(params, updates)
  return bool(jnp.isfinite(params["w"]).all())


def main(arguments: list[str] | None = None) -> int:
  """Prints a line per run; returns 1 if a poisoned step was not skipped."""
  argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(arguments)
  bad = [step for step in range(FIRST, STEPS + 1) if step % EVERY == 0]
  finite = ("NaN", "infinity")
  ok = True
  with tempfile.TemporaryDirectory() as name:
    root = Path(name)
    for label, kinds, changes, expected in (
      ("clean", (), {}, []),
      ("NaN and infinity", finite, {}, bad),
      ("all three, no rule for spikes", KINDS, {}, [s for s in bad if s // EVERY % 3 != 2]),
      ("all three, skip_spikes=6", KINDS, {"skip_spikes": 6.0}, bad),
    ):
      skipped, loss = train(root, label.replace(" ", "_"), kinds, **changes)
      extra, missed = set(skipped) - set(expected), set(expected) - set(skipped)
      ok &= not missed
      print(f"RESULT {label}: {len(skipped)} of {len(bad) if kinds else 0} bad steps skipped, "
            f"{len(missed)} missed, {len(extra)} good ones skipped, loss {loss:.4f}")  # fmt: skip
  for errors in (4, 5):
    state = "finite" if apply_if_finite(errors) else "NaN"
    print(f"RESULT optax.apply_if_finite after {errors} bad steps in a row: weights {state}")
  return int(not ok)


if __name__ == "__main__":
  raise SystemExit(main())
