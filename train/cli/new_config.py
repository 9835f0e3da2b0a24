"""`lnssm-train init FILE`: a config file with every setting and its meaning."""

from pathlib import Path

from lnssm_jax.files.printable import shell_word
from train import config
from train.config.listing import Entry, groups

# What has no default, as in configs/quickstart.py.
_REQUIRED = {
  "model.dim": 128,
  "model.num_layers": 4,
  "model.num_heads": 4,
  "model.vocab_size": 257,
  "optimizer.peak_lr": 3e-3,
  "optimizer.final_lr": 3e-4,
  "data.folder": "data/python-stdlib",
  "data.tokenizer": "bytes",
  "data.train": ("train",),
  "run_dir": "runs/{name}",
  "steps": 240,
  "seq_len": 256,
  "global_batch": 8,
  "checkpoint_every": 120,
  "eval_every": 120,
}
# What makes the file train at once, unlike the default.
_CHANGED = {
  "model.dtype": "float32",
  "data.validation": ("validation",),
  "data.sources": {"train": "python-stdlib", "validation": "python-stdlib"},
}


def write(path: Path) -> Path:
  """Writes the new file `path`, to which a missing .py is added, and its folder; returns the path.

  Raises:
    ValueError: it exists, or ends in something else.
  """
  path = path if path.suffix else path.with_suffix(".py")
  if path.suffix != ".py":
    raise ValueError(f"{str(path)!r} must end in .py: a config is a Python file.")
  about = f"A training run: lnssm-train fit --config {shell_word(path)}."
  about = about.replace("\\", "\\\\").replace('"', '\\"')
  lines = [
    f'"""{about}"""',
    "",
    "from train.config import Data, Mesh, Model, Optimizer, Preference, Sample, Train",
    "",
    "",
    "def get_config() -> Train:",
    '  """The settings; those after a # have their default."""',
    "  return Train(",
  ]
  for group, entries in groups(config.Train):
    outside = group is config.Train
    indent = "    " if outside else "      "
    if not outside:
      lines.append(f"    {entries[0].name.partition('.')[0]}={group.__name__}(")
    lines += [indent + _line(entry, path.stem) for entry in entries]
    if not outside:
      lines.append("    ),")
  text = "\n".join([*lines, "  )"]) + "\n"
  path.parent.mkdir(parents=True, exist_ok=True)
  try:
    with path.open("x", encoding="utf-8") as file:
      file.write(text)
  except FileExistsError:
    raise ValueError(f"{path} exists; give another name.") from None
  return path


def _line(entry: Entry, name: str) -> str:
  value = (_REQUIRED | _CHANGED).get(entry.name)
  if isinstance(value, str):
    value = value.format(name=name)
  key = entry.name.rpartition(".")[2]
  shown = f"{key}={value!r}," if value is not None else f"# {key}={entry.default},"
  return f"{shown}  # {entry.meaning}"
