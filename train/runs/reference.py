"""Log-probabilities of answers under the model before the first step, in the folder of a run.

A loss of pairs (`train.step.preference`) compares the model with that one. What is stored is the
weighted negative log-likelihood of each token of each window, float32, in reference.npz: four
bytes per token, and no second copy of the parameters. A set is found by its windows' fingerprint.
"""

import io
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lnssm_jax.files.atomic import replace_file
from lnssm_jax.files.reading import read_bytes
from train import config
from train.cluster import compile_cache, device_mesh, distributed
from train.data.errors import DataError
from train.data.windows import Mixture, RandomCrops, TokenWindows, eval_batches
from train.messages import Say
from train.step.train_step import make_reference_step

FILE = "reference.npz"
_MOST_BYTES = 1 << 40
_DAMAGED = zipfile.BadZipFile, zlib.error


def pairs_of(sources: Iterable[Any]) -> list[TokenWindows]:
  """The windows of pairs among what `trainer.training_set` and `evaluation.open_sets` return."""
  found = []
  for source in sources:
    if isinstance(source, Mixture):
      found += pairs_of(source.sets.values())
    elif isinstance(source, RandomCrops):
      found += pairs_of([source.windows])
    elif isinstance(source, TokenWindows) and source.has_pairs:
      found.append(source)
  return found


def compute(
  cfg: config.Train,
  graph: Any,
  mesh: Mesh,
  params: Any,
  sources: Sequence[TokenWindows],
  folder: Path,
  kernels: Path | None,
  say: Say,
) -> None:
  """Gives `sources` their references under `params`, and writes them into the folder of the run."""
  step = make_reference_step(cfg, graph, mesh, kernels)
  step = compile_cache.found_by_trace(step, mesh, config.to_dict(cfg))
  where, size = device_mesh.batch_sharding(mesh), cfg.global_batch // cfg.accumulate
  rows = distributed.local_rows(where, size)
  known: dict[str, Any] = {}
  for source in sources:
    say(f"reference   log-probabilities of {len(source):,} windows under the initial model")
    source.reference = None  # what the windows have before is no argument
    batches = eval_batches(source, size, rows)
    parts = [step(params, distributed.to_devices(x, where, size)) for x in batches]
    found = np.concatenate([np.asarray(part) for part in parts])[: len(source)]
    if not np.isfinite(found).all():
      raise DataError(f"{source!r}: the initial model gives tokens a probability of 0 or none.")
    source.reference = known[source.fingerprint] = found
  if distributed.is_first():
    buffer = io.BytesIO()
    np.savez(buffer, **known)
    replace_file(folder / FILE, buffer.getvalue())


def load(sources: Sequence[TokenWindows], folder: Path) -> None:
  """Gives `sources` the references that `compute` has written.

  Raises:
    DataError: they are missing, damaged, or of other text or windows.
  """
  if not sources:
    return
  path = folder / FILE
  try:
    with np.load(io.BytesIO(read_bytes(path, _MOST_BYTES))) as file:
      for source in sources:
        source.reference = file.get(source.fingerprint)
  # RuntimeError: a method of compression that Python lacks, a password.
  except (OSError, ValueError, EOFError, TypeError, RuntimeError, *_DAMAGED) as error:
    raise DataError(
      f"{path} has the log-probabilities of the initial model, and cannot be read ({error!s:.100});"
      " restore it, or start again with another run_dir."
    ) from None
  for source in sources:
    found = source.reference
    kind = None if found is None else (found.shape, found.dtype)
    if kind != ((len(source), source.seq_len), np.float32):
      raise DataError(
        f"{path} has no log-probabilities of the initial model for {source!r}: its text, seq_len or"
        " data.pack_rows are not those with which the run began; restore them, or start again with"
        " another run_dir."
      )
