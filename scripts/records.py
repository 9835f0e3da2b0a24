"""Records what must not change while code moves, and compares with it: losses to the bit, programs.

    python scripts/records.py compare                   # both, with scripts/records.json
    python scripts/records.py compare --only losses
    python scripts/records.py compare --only programs --match linear_attention
    python scripts/records.py record                    # replaces what --only and --match name

"losses" are those of the first 20 steps of `make train` on the CPU, as hexadecimal floats. Their
bits depend on the jax version, the Python version (whose standard library is the text) and perhaps
the kind of CPU; all three are stored, and a comparison that differs in one of them says so.

"programs" are hashes of the lowered text of what the benchmarks time, without debug information,
locations, and the names of functions, arguments and results: renaming and moving change no hash. A
program with kernels, lowered for CUDA, is one hash of the text around them and one per kernel. Any
other order of the same operations gives another hash, so a difference asks for a look, not for
blame. No program runs, and no device is needed.
"""

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "scripts" / "records.json"
STEPS = 20
sys.path.insert(0, str(ROOT))


CONFIG = """
import dataclasses, runpy

def get_config():
  cfg = runpy.run_path("configs/quickstart.py")["get_config"]()
  data = {"folder": "FOLDER/data", "validation": (), "sources": {"train": "python-stdlib"}}
  return dataclasses.replace(
    cfg,
    data=dataclasses.replace(cfg.data, **data),
    run_dir="FOLDER/run",
    steps=STEPS,
    log_every=1,
    sample=dataclasses.replace(cfg.sample, tokens=0),
  )
"""


def losses() -> dict[str, str]:
  """Loss of each of the first steps of `make train`, whose validation costs more than they do."""
  with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.py"
    config.write_text(CONFIG.replace("FOLDER", folder).replace("STEPS", str(STEPS)))
    command = [sys.executable, "-m", "train", "fit", "--config", str(config)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
    return {str(row["step"]): row["loss"].hex() for row in rows if row["kind"] == "train"}


def programs(match: str = "") -> dict[str, str | dict]:
  """Hashes of every benchmark program whose name contains `match`."""
  found = {}
  for name, lower in builders().items():
    if match in name:
      try:
        found[name] = hashes(lower())
      except NotImplementedError as reason:
        found[name] = f"no such form: {reason}"
      print(name, found[name], file=sys.stderr, flush=True)
  return found


def builders():
  """Functions that lower one program each, by name."""
  return {**attention_kernels(), **scan_kernels(), **scan_forms(), **train_steps()}


def attention_kernels():
  """`benchmarks.kernels`: linear attention, XLA's form and the kernels."""
  import jax

  from benchmarks import kernel_cases as cases

  def lower(case, shape, form, gradient):
    arrays = jax.eval_shape(functools.partial(cases.make_inputs, case, shape), 0)
    cotangent = jax.ShapeDtypeStruct(arrays["v"].shape, arrays["v"].dtype)
    if gradient:
      return lowered(lambda x, y: cases.gradients(case, x, y, form), form, arrays, cotangent)
    return lowered(lambda x: cases.call(case, x, form), form, arrays)

  table = {}
  for label, case in cases.CASES.items():
    for shape in (cases.SHAPES[0], cases.SHAPES[3], cases.SHAPES[4]):
      if shape.T == 1 and not case.decodes:
        continue
      for form in ("pallas", "chunked"):
        gradient = shape.T > 1
        name = f"kernels/{label}/{str(shape).replace(' ', '')}/{form}"
        table[name] = functools.partial(lower, case, shape, form, gradient)
  return table


def scan_kernels():
  """`benchmarks.scan_kernels`: the other ops at the sizes of models, forward and gradient."""
  import jax

  from benchmarks import scan_kernels as cases

  def lower(case, form):
    arrays = jax.eval_shape(lambda: cases.make_inputs(case, case.sizes, 0))
    inputs = {name: x for name, x in arrays.items() if name != "cotangent"}
    call = lambda x, y: cases.gradients(case, x, y, form)
    return lowered(call, form, inputs, arrays["cotangent"])

  return {
    f"scan_kernels/{label}/{form}": functools.partial(lower, case, form)
    for label, case in cases.CASES.items()
    for form in ("pallas", "chunked")
  }


def scan_forms():
  """`benchmarks.scans`: every form of every op, forward and gradient, T = 1024."""
  import jax
  import jax.numpy as jnp

  from benchmarks import scans
  from lnssm_jax.ops.core import accuracy

  def lower(scan, case, form):
    inputs = {
      name: jax.ShapeDtypeStruct(x.shape, jnp.float32) for name, x in scan.inputs(case).items()
    }
    call = lambda x: scan.compared(*scan(case, x, implementation=form))
    return lowered(accuracy.with_gradients(call), form, inputs)

  return {
    f"scans/{name}/{number}/{form}": functools.partial(lower, scan, case, form)
    for name, scan in scans.SCANS.items()
    for number, (case, forms) in enumerate(scans.cases_of(name, 1024, 16))
    for form in forms
    if form != "reference"
  }


def train_steps():
  """`benchmarks.mixers`: the training step of the 72M model with every mixer, on the CPU."""
  from lnssm_jax.mixers import MIXERS
  from train.cluster import device_mesh
  from train.config import apply_overrides, load_config
  from train.step.model import model_graph
  from train.step.optimizer import make_optimizer
  from train.step.state import abstract_batch, abstract_state
  from train.step.train_step import make_train_step

  def lower(mixer):
    settings = [f"model.mixer={mixer}", "model.num_layers=2", "model.unroll=2", "mesh.data=1"]
    cfg = apply_overrides(load_config("configs/lnssm_72m.py"), settings)
    mesh = device_mesh.make_mesh(cfg)
    step = make_train_step(cfg, model_graph(cfg.model), make_optimizer(cfg.optimizer, 100)[0], mesh)
    return step.lower(abstract_state(cfg, mesh), abstract_batch(cfg, mesh))

  return {f"train_step/{mixer}": functools.partial(lower, mixer) for mixer in sorted(MIXERS)}


def lowered(function, form, *shapes):
  """`function` lowered: for CUDA if `form` has kernels, on a CPU that passes for a Hopper GPU."""
  import jax

  traced = lambda: jax.jit(function).trace(*shapes)
  if form != "pallas":
    return traced().lower(lowering_platforms=("cpu",))
  hopper = types.SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
  with mock.patch.object(jax, "local_devices", lambda **_: [hopper]):
    return traced().lower(lowering_platforms=("cuda",))


def hashes(lowered) -> str | dict[str, str | list[str]]:
  """Of the program's text; with kernels, of the text around them and of each."""
  kernels = []

  def kernel(match):
    module = mlir_bytes(match.group(1))
    kernels.append(digest(kernel_text(module)))
    return "kernel"

  text = lowered.as_text()
  text = re.sub(r'kernel_hash = "(?:[^"\\]|\\.)*", ', "", text)
  text = re.sub(r'module = "((?:[^"\\]|\\.)*)"', kernel, text)
  program = digest(anonymous(text))
  return {"program": program, "kernels": kernels} if kernels else program


def anonymous(text: str) -> str:
  """StableHLO without the names of functions, arguments and results."""
  text = re.sub(r'jax\.result_info = "(?:[^"\\]|\\.)*"', "", text)
  text = re.sub(r" loc\(.*?\)", "", text)
  names: dict[str, str] = {}
  return re.sub(r"@[\w.$-]+", lambda m: names.setdefault(m.group(), f"@{len(names)}"), text)


def mlir_bytes(text: str) -> bytes:
  r"""The bytes of an MLIR string, which writes what is not printable as \XX."""
  raw = text.encode("utf-8", "surrogateescape")
  simple = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}
  return re.sub(
    rb"\\([0-9A-F]{2}|[nt\"\\])",
    lambda m: simple[m.group(1)] if m.group(1) in simple else bytes([int(m.group(1), 16)]),
    raw,
  )


def kernel_text(module: bytes) -> str:
  """A Mosaic GPU kernel's code without its name and locations."""
  from jax._src.interpreters import mlir
  from jax._src.lib.mlir import ir

  context = mlir.make_ir_context()
  context.allow_unregistered_dialects = True
  with context:
    text = ir.Module.parse(module, context=context).operation.get_asm(enable_debug_info=False)
  name = re.search(r"^module @(\S+)", text, re.MULTILINE).group(1)
  text = re.sub(r'mosaic_gpu\.dump_basename = "[^"]*"', "", text)
  return re.sub(rf"\b{re.escape(name)}(?=\b|_kernel)", "kernel", text)


def digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment() -> dict[str, str]:
  """Versions and settings that the bits may depend on."""
  import jax

  info = Path("/proc/cpuinfo")
  models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
  return {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "cpu": models[0] if models else platform.processor(),
  }


def differences(kind: str, want: dict, got: dict) -> list[str]:
  """A line for every entry of `got` that is not as recorded."""
  return [
    f"{kind} {name}: {value}, recorded {want.get(name, 'nothing')}"
    for name, value in got.items()
    if value != want.get(name)
  ]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("mode", choices=("record", "compare"))
  parser.add_argument("--only", choices=("losses", "programs"))
  parser.add_argument("--match", default="", help="part of the programs' names")
  parser.add_argument("--commit", help="what `record` stores as the commit; default: HEAD's")
  args = parser.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"
  records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
  made = {"losses": losses, "programs": functools.partial(programs, args.match)}
  now, lines = environment(), []
  for kind, make in made.items():
    if args.only not in (None, kind):
      continue
    old, got = records.get(kind, {}), make()
    if args.mode == "compare":
      lines += differences(kind, old.get("values", {}), got)
      lines += [f"note: {kind}: {line}" for line in differences("with", old["environment"], now)]
      print(f"{kind}: {len(got)} compared with commit {old['commit']}")
    else:
      kept = old.get("values", {}) if kind == "programs" and args.match else {}
      command = ["git", "rev-parse", "--short", "HEAD"]
      commit = args.commit or subprocess.check_output(command, cwd=ROOT, text=True).strip()
      records[kind] = {"commit": commit, "environment": now, "values": kept | got}
  if args.mode == "record":
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")
  for line in lines:
    print(line)
  return any(not line.startswith("note:") for line in lines)


if __name__ == "__main__":
  sys.exit(main())
