"""jax-linear-attention's models of the sizes of `benchmarks.model_step`, by its own trainer.

    python -m benchmarks.model_jla gla [--no-documents]

Where the package (0.1.0) and equinox and wadler-lindig are installed. Its step is compiled for two
minutes. Everything but sizes and data is its default, bfloat16 products over float32 parameters
among them; documents have 500 tokens. Nothing of it is imported here.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.model_peers import LENGTH, ROWS

LAYERS, WIDTH = 24, 1024
LONGEST = 420  # seconds of a process
_STEPS, _LOG_EVERY, _WARM_LOGS = 60, 10, 2
_COMMON = {
  "model": {
    "vocab_size": 32_000, "d_model": WIDTH, "n_layers": LAYERS, "d_ff": 2816,
    "tie_embeddings": False,
  },
  "train": {
    "seq_len": LENGTH, "micro_batch_per_replica": ROWS, "max_steps": _STEPS,
    "log_every": _LOG_EVERY, "save_final": False, "final_eval": False, "output_dir": "out",
  },
  "data": {"source": "synthetic", "synthetic_kind": "uniform"},
}  # fmt: skip
_DOCUMENTS = {"synthetic_doc_length": 500, "eos_id": 1, "document_masking": True}


def _linear(
  kind: str, heads: int, key_width: int, value_width: int, **options: bool | int
) -> dict[str, Any]:
  names = {"num_k_heads": heads, "num_v_heads": heads}
  widths = {"head_k_dim": key_width, "head_v_dim": value_width}
  settings = names | widths | options
  return _attention(8) | {"layer_types": [kind] * LAYERS, "linear_attention": settings}


def _attention(heads: int, **options: int) -> dict[str, Any]:
  width = WIDTH // heads
  sizes = {"num_heads": heads, "num_kv_heads": heads, "head_dim": width}
  return {"attention": sizes | options}


# Its settings of `[model]` beyond the common sizes, by the name of our body.
MODELS: dict[str, dict[str, Any]] = {
  "gla": _linear("gla", 4, 128, 256),
  "delta_net": _linear("deltanet", 8, 128, 128),
  "gated_delta_net": _linear("gated_deltanet", 6, 128, 256),
  "kda": _linear("kda", 8, 128, 128),
  "gated_delta_net2": _linear("gdn2", 8, 128, 128),
  # The chunks of its kernels have 32 tokens.
  "rwkv7": _linear("rwkv7", 16, 64, 64, conv_size=0, qk_l2norm=False, chunk_size=32),
  "mlstm": _linear("mlstm", 4, 128, 256, conv_size=0, qk_l2norm=False),
  "mamba3": _attention(8) | {"layer_types": ["mamba3"] * LAYERS, "ssm": {"expand": 2}},
  "mamba3_mimo": _attention(8)
  | {"layer_types": ["mamba3"] * LAYERS, "ssm": {"expand": 2, "mimo_rank": 4}},
  "softmax_attention": _attention(8),
  "sliding_window_attention": _attention(8, sliding_window=1024),
}


def missing() -> str | None:
  """Why there is nothing to measure, or None. Imports nothing."""
  absent = [x for x in ("jla", "equinox") if not importlib.util.find_spec(x)]
  return f"{' and '.join(absent)} not installed" if absent else None


def configuration(body: str, *, documents: bool) -> str:
  """The TOML file of its trainer."""
  settings = {name: dict(section) for name, section in _COMMON.items()}
  settings["model"] |= MODELS[body]
  settings["data"] |= _DOCUMENTS if documents else {}
  return f"name = {json.dumps(body)}\n" + "".join(_toml(settings, ()))


def _toml(settings: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
  """Lines of a table and of those inside. JSON's strings, numbers and lists are TOML's too."""
  if path:
    yield f"[{'.'.join(path)}]\n"
  inner = {name: value for name, value in settings.items() if isinstance(value, dict)}
  for name in settings.keys() - inner.keys():
    yield f"{name} = {json.dumps(settings[name])}\n"
  for name, table in inner.items():
    yield from _toml(table, (*path, name))


def measure(body: str, *, documents: bool) -> Iterator[dict[str, Any]]:
  """The row of its model; one with a note where it cannot be measured."""
  if body not in MODELS:
    return
  row = {"who": "jax-linear-attention", "documents": documents}
  if reason := missing():
    yield row | {"note": reason}
    return
  with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.toml"
    config.write_text(configuration(body, documents=documents))
    command = [sys.executable, "-m", "jla.cli", "train", "--config", str(config)]
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "cwd": folder}
    try:
      ended = subprocess.run(command, timeout=LONGEST, **how)
    except subprocess.TimeoutExpired:
      yield row | {"note": f"not finished after {LONGEST} s"}
      return
    if ended.returncode:
      yield row | {"note": " ".join(ended.stderr.split())[-300:]}
      return
    yield row | results(Path(folder) / "out")


def results(folder: Path) -> dict[str, Any]:
  """The columns that its trainer's files have.

  Raises:
    FloatingPointError: it skipped a step, or a loss is not finite.
  """
  lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  logs = [line["metrics"] for line in lines if line["event"] == "train"]
  losses = [float(log["loss"]) for log in logs]
  if any(log["skipped_steps"] for log in logs) or not all(abs(x) < float("inf") for x in losses):
    raise FloatingPointError(f"losses {losses}: a wrong result has no time.")
  seconds = statistics.median(log["step_time"] for log in logs[_WARM_LOGS:])
  memory = json.loads((folder / "compile_preflight.json").read_text())["memory"]
  return {
    "parameters": json.loads((folder / "run.json").read_text())["parameters"],
    "step_ms": round(1e3 * seconds, 2),
    "tokens_per_second": round(ROWS * LENGTH / seconds),
    "peak_gib": round(memory["total_size_gib"], 1),
    "note": "GiB as compiled",
  }


if __name__ == "__main__":
  for _row in measure(sys.argv[1], documents="--no-documents" not in sys.argv[2:]):
    print(json.dumps({"body": sys.argv[1]} | _row))
