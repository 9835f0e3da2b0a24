"""Time and memory to load a published model, next to reading the bytes of its files.

    python -m benchmarks.load_pretrained --folder /tmp/llama-1b3
    python -m benchmarks.load_pretrained --folder /tmp/mamba-1b3 --model mamba-1b3
    python -m benchmarks.load_pretrained --folder /tmp/llama-7b --model llama-7b --only generate

Writes a random checkpoint of the size to the folder unless there is one. Each measurement is a
process of its own, with JAX imported before its clock starts; reading and loading alternate, in
both orders, with the files dropped from the page cache ("cold"), then with them in it ("warm").
Reading is `np.fromfile` of every file. Loading includes checks of the folder and tracing, and with
`--only generate` 32 tokens follow, whose time includes compilation. Times are the least of several.
Before its clock starts, each process takes and frees as much memory as the
files have bytes: a virtual machine may first have to get it from its host. Memory is the most
resident memory above that after the imports; pages of a memory-mapped file, which belong to the
page cache, are counted apart. `load_peak_ratio` and, with generation, `peak_ratio` are the most of
both, of the whole process, over the bytes of the files; on a CPU the parameters, which stay there,
are among it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from lnssm_jax.models.settings import abstract_params
from lnssm_jax.pretrained import exports
from lnssm_jax.pretrained.families import family_of, layers

MODELS = {
  "llama-1b3": {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "torch_dtype": "bfloat16",
  },
  "llama-7b": {  # the sizes of Llama 2
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
  },
  "mamba-1b3": {
    "model_type": "mamba",
    "vocab_size": 50_280,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
  },
}
SHARD = 5_000_000_000  # bytes of a file


def write(folder: Path, config: dict) -> None:
  """Writes a folder with random bfloat16 tensors, layer by layer as transformers does."""
  family = family_of(config)
  settings = family.settings(config) | {"dtype": "bfloat16", "param_dtype": "bfloat16"}
  shapes = {name: x.shape for name, x in exports.flat(abstract_params(settings)).items()}
  found = layers.parameters(family, settings, shapes)
  pieces = [piece for parameter in found for some in parameter.layers for piece in some]
  tensors = {piece.theirs: piece.shape for piece in pieces}
  # The upper halves of float32 numbers are bfloat16.
  numbers = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
  block = (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
  folder.mkdir(parents=True)
  shards: list[dict] = [{}]
  for name in sorted(tensors):
    end = max((x["data_offsets"][1] for x in shards[-1].values()), default=0)
    size = 2 * math.prod(tensors[name])
    if end and end + size > SHARD:
      shards.append({})
      end = 0
    offsets = [end, end + size]
    shards[-1][name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": offsets}
  names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
  names = names if len(shards) > 1 else ["model.safetensors"]
  for file_name, header in zip(names, shards, strict=True):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    end = max(x["data_offsets"][1] for x in header.values())
    with (folder / file_name).open("wb") as file:
      file.write(len(text).to_bytes(8, "little") + text)
      for begin in range(0, end, len(block)):
        file.write(block[: end - begin])
      file.flush()
      os.fsync(file.fileno())
  if len(shards) > 1:
    homes = {name: file for file, header in zip(names, shards, strict=True) for name in header}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
  (folder / "config.json").write_text(json.dumps(config))


def drop(folder: Path) -> None:
  """Drops the folder's files from the page cache."""
  for path in folder.glob("*.safetensors"):
    with path.open("rb") as file:
      os.fsync(file.fileno())
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident() -> tuple[float, float]:
  """GB of this process: (of its own, of mapped files)."""
  lines = Path("/proc/self/status").read_text().splitlines()
  fields = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
  return int(fields["RssAnon"]) / 1e6, int(fields["RssFile"]) / 1e6


def measure(what: str, folder: Path) -> dict[str, Any]:
  """Runs in a process of its own."""
  import jax

  from lnssm_jax import pretrained
  from lnssm_jax.generate import SamplingOptions, generate
  from lnssm_jax.models.settings import params_of

  jax.block_until_ready(jax.numpy.zeros(1))
  pretrained.load  # noqa: B018
  size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
  np.full(size, 1, np.uint8)
  before, most, done = resident(), [0.0] * 3, threading.Event()

  def watch():
    while not done.wait(0.02):
      now = resident()
      most[:] = map(max, most, (*now, sum(now)))

  watcher = threading.Thread(target=watch)
  watcher.start()
  begin = time.perf_counter()
  if what == "read":
    kept = [np.fromfile(path, np.uint8) for path in sorted(folder.glob("*.safetensors"))]
  else:
    kept = pretrained.load(folder)
    jax.block_until_ready(params_of(kept.model))
  seconds = {"seconds": time.perf_counter() - begin, "load_peak_ratio": 1e9 * most[2] / size}
  if what == "generate":
    options = SamplingOptions(max_tokens=32, temperature=0.0)
    seconds["tokens"] = [int(x) for x in generate(kept.model, [[1, 2, 3, 4]], options)[0]]
    seconds["generated_s"] = time.perf_counter() - begin - seconds["seconds"]
  done.set()
  watcher.join()
  del kept
  own, mapped = (a - b for a, b in zip(most, before, strict=False))
  peak = {"file_gb": size / 1e9, "peak_ratio": 1e9 * most[2] / size}
  return seconds | {"own_gb": own, "mapped_gb": mapped} | peak


def apart(what: str, folder: Path) -> dict[str, Any]:
  """`measure` in a new process."""
  command = [sys.executable, "-m", "benchmarks.load_pretrained", "--folder", str(folder)]
  done = subprocess.run([*command, "--only", what], check=True, capture_output=True, text=True)
  return json.loads(done.stdout.splitlines()[-1])


def main(arguments=None) -> None:
  """Prints a line of JSON per state of the page cache."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--folder", type=Path, required=True)
  parser.add_argument("--model", choices=MODELS, default="llama-1b3")
  parser.add_argument("--repeats", type=int, default=5)
  parser.add_argument(
    "--only", choices=["read", "load", "generate"], help="one measurement, in this process"
  )
  args = parser.parse_args(arguments)
  if not args.folder.exists():
    write(args.folder, MODELS[args.model])
  if args.only:
    print(json.dumps(measure(args.only, args.folder)))
    return
  size = sum(path.stat().st_size for path in args.folder.glob("*.safetensors")) / 1e9
  for state in ("cold", "warm"):
    rows = {"read": [], "load": []}
    for number in range(args.repeats):
      for what in sorted(rows, reverse=number % 2 == 0):
        if state == "cold":
          drop(args.folder)
        rows[what].append(apart(what, args.folder))
    seconds = {what: min(x["seconds"] for x in found) for what, found in rows.items()}
    line = {
      "state": state,
      "file_gb": round(size, 2),
      "read_s": round(seconds["read"], 2),
      "load_s": round(seconds["load"], 2),
      "ratio": round(seconds["load"] / seconds["read"], 2),
      "own_gb": round(max(x["own_gb"] for x in rows["load"]), 2),
      "mapped_gb": round(max(x["mapped_gb"] for x in rows["load"]), 2),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
  main()
