"""Memory of the compiled training step, against that of its devices."""

import jax
from jax.sharding import Mesh

from train import config
from train.messages import Say

TIGHT = 0.9  # of the memory of a device; beyond, evaluation and fragments may not fit


def sizes(compiled: jax.stages.Compiled) -> dict[str, int]:
  """Bytes per device of a compiled step, by purpose; empty if the backend does not report them.

  Arguments are parameters, optimizer and batch; new results are those that do not reuse arguments.
  """
  plan = compiled.memory_analysis()
  if plan is None:
    return {}
  found = {
    "arguments": plan.argument_size_in_bytes,
    "new results": plan.output_size_in_bytes - plan.alias_size_in_bytes,
    "temporary": plan.temp_size_in_bytes,
    "code": plan.generated_code_size_in_bytes,
  }
  return {name: size for name, size in found.items() if size}


def describe(of: dict[str, int]) -> str:
  """One line for the result of `sizes`."""
  if not of:
    return "not reported by this backend"
  parts = ", ".join(f"{name} {amount(size)}" for name, size in of.items())
  return f"{amount(sum(of.values()))} per device: {parts}"


def available(mesh: Mesh) -> int | None:
  """Bytes that a program may use on each local device; None where it is not known, as on a CPU."""
  limits = [(device.memory_stats() or {}).get("bytes_limit") for device in mesh.local_devices]
  known = [limit for limit in limits if limit]
  return min(known) if known else None


def check(of: dict[str, int], mesh: Mesh, cfg: config.Train, say: Say) -> None:
  """Compares the result of `sizes` with the memory of the devices; says so where it is tight.

  Raises:
    ValueError: the step needs more; the message has both and what helps.
  """
  limit, needed = available(mesh), sum(of.values())
  if limit is None or needed <= TIGHT * limit:
    return
  both = f"the training step needs {amount(needed)} per device of {amount(limit)} available"
  if needed > limit:
    raise ValueError(f"{both}; {_remedies(cfg, mesh)}.")
  say(f"memory is tight: {both}, and evaluation and saving need some more; {_remedies(cfg, mesh)}")


def amount(size: int) -> str:
  """A number of bytes in MiB or GiB."""
  return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.2f} MiB"


def _remedies(cfg: config.Train, mesh: Mesh) -> str:
  """The settings that would lower it, without those that are set already."""
  shards = mesh.shape["data"] * mesh.shape["fsdp"]
  rows = cfg.global_batch // cfg.accumulate // shards
  found = [] if cfg.model.remat == "full" else ["model.remat=full"]
  if rows > 1:
    now = f"now {cfg.accumulate}: {rows} sequences per device at once"
    found.append(f"a larger accumulate ({now})")
    found.append(f"a smaller global_batch than {cfg.global_batch}")
  found.append(f"a smaller seq_len than {cfg.seq_len}")
  found.append("more devices, with mesh.fsdp for the parameters, mesh.sequence for the sequence")
  return f"use {', '.join(found[:-1])}, or {found[-1]}"
