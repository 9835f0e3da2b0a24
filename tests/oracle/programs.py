"""Programs: hashes of what the benchmarks lower, for any device, without one.

A hash is that of the lowered text without debug information, locations, and the names of functions,
arguments and results: renaming and moving change none. A program with kernels, lowered for CUDA, is
one hash of the text around them and one per kernel. Another order of the same operations gives
another hash, so a difference asks for a look, not for blame.
"""

import functools
import hashlib
import re
import types
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import model_step, scan_kernels, scans
from lnssm_jax import ops
from lnssm_jax.mixers import MIXERS
from lnssm_jax.ops.core import accuracy
from lnssm_jax.ops.cross_entropy.api import cross_entropy
from train.cluster import device_mesh
from train.config import apply_overrides, load_config
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import abstract_batch, abstract_state
from train.step.train_step import make_train_step

ROOT = Path(__file__).resolve().parents[2]

# Facts about an H100 that a program may depend on, by their names in JAX.
HOPPER = types.SimpleNamespace(
  platform="gpu",
  device_kind="NVIDIA H100 80GB HBM3",
  compute_capability="9.0",
  core_count=132,
  shared_memory_per_block_optin=227 * 1024,
)

# Cases of `benchmarks.scan_kernels`.
FORWARD = (
  *("attention documents window", "causal_conv1d", "delta_rule", "diagonal_scan"),
  *("selective_scan", "wkv4"),
)

# Cases of linear attention that decode.
SINGLE_STEPS = ("channel-constant-lnssm", "channel-constant-normalized", "channel-step")

Hashes = str | dict[str, str | list[str]]


def programs() -> dict[str, Callable[[], Hashes]]:
  """Functions that make the hashes of one program each, by its name."""
  makers = {**linear_attention(), **other_ops(), **forms(), **layers(), **models(), **train_steps()}
  return {name: functools.partial(_hashes, make) for name, make in makers.items()}


def _hashes(make) -> Hashes:
  try:
    return hashes(make())
  except NotImplementedError as reason:
    return f"no such form: {reason}"


def inputs_of(case, sizes, state=False):
  """(arguments of a case of `benchmarks.scan_kernels` by name, the cotangent), as shapes."""
  arrays = dict(jax.eval_shape(lambda: scan_kernels.make_inputs(case, sizes, 0)))
  cotangent = arrays.pop("cotangent")
  for name in case.states if state else ():
    shape = tuple(sizes[axis] for axis in case.axes[name])
    arrays[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
  return arrays, cotangent


def gradient_of(case, sizes, form):
  """Forward and gradient, lowered."""
  call = lambda x, y: scan_kernels.gradients(case, x, y, form)
  return lowered(call, form, *inputs_of(case, sizes))


def linear_attention():
  """`benchmarks.scan_kernels`: linear attention, XLA's form and the kernels."""

  def forward(case, sizes, form):
    arrays, _ = inputs_of(case, sizes, state=sizes["T"] == 1)
    return lowered(lambda x: case.call(**x, implementation=form), form, arrays)

  table = {}
  for label, case in scan_kernels.LINEAR_ATTENTION.items():
    for more in ({}, {"H": 32, "K": 64, "V": 64}, {"B": 1, "T": 1}):
      if "T" in more and label not in SINGLE_STEPS:
        continue
      sizes = case.sizes | more
      for form in ("pallas", "chunked"):
        name = "".join(f"{axis}{size}" for axis, size in sizes.items())
        lower = forward if "T" in more else gradient_of
        table[f"kernels/{label}/{name}/{form}"] = functools.partial(lower, case, sizes, form)
  case = scan_kernels.LINEAR_ATTENTION["scalar-step"]
  table["forward/linear_attention"] = functools.partial(forward, case, case.sizes, "pallas")
  return table


def other_ops():
  """`benchmarks.scan_kernels`: the other ops at the sizes of models.

  Forward and gradient; of "forward" alone, which is quicker, one for each family of kernels.
  """
  cases = scan_kernels

  def forward(case, form):
    arrays, _ = inputs_of(case, case.sizes)
    return lowered(lambda x: cases.forward(case, x, form), form, arrays)

  table = {}
  for label, case in cases.CASES.items():
    for form in ("pallas", "chunked") if label not in cases.LINEAR_ATTENTION else ():
      table[f"scan_kernels/{label}/{form}"] = functools.partial(gradient_of, case, case.sizes, form)
  for label in FORWARD:
    table[f"forward/{label}"] = functools.partial(forward, cases.CASES[label], "pallas")
  return table


def forms():
  """`benchmarks.scans`: every form of every op, forward and gradient, T = 1024."""

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


def layers():
  """The kernels between the mixers: norms, and the loss of a vocabulary, at the sizes of models."""
  f32, bf16, T, D = jnp.float32, jnp.bfloat16, 2048, 1024
  shape = jax.ShapeDtypeStruct

  def norm(form, center, gated):
    of = {"x": shape((16, T, D), bf16), "added": shape((16, T, D), bf16), "scale": shape((D,), f32)}
    of |= {"bias": shape((D,), f32)} if center else {}
    of |= {"gate": shape((16, T, D), bf16)} if gated else {}
    call = lambda x: ops.normalize(
      x["x"], x["scale"], x.get("bias"), added=x["added"], gate=x.get("gate"), center=center,
      dtype=bf16, implementation=form,
    )  # fmt: skip

    def both(x, y):
      out, pull = jax.vjp(call, x)
      return out, pull(y)

    return lowered(both, form, of, (of["x"], of["x"]))

  def loss(form):
    logits, ids = shape((1, 4096, 32_000), f32), shape((1, 4096), jnp.int32)
    call = lambda x, targets, weights: cross_entropy(
      x, targets, weights, logit_penalty=1e-4, z_loss=1e-4, gradient_dtype=bf16, implementation=form
    )
    return lowered(call, form, logits, ids, shape((1, 4096), f32))

  table = {}
  for form in ("pallas", "reference"):
    table[f"norms/rms gated/{form}"] = functools.partial(norm, form, False, True)
    table[f"norms/layer/{form}"] = functools.partial(norm, form, True, False)
    table[f"cross_entropy/{form}"] = functools.partial(loss, form)
  return table


def models():
  """`benchmarks.model_step`: the training step of each body, of one layer, with documents."""

  def lower(name):
    body = model_step.BODIES[name]
    pattern = 1 if isinstance(body.mixer, str) else len(body.mixer)
    cfg = apply_overrides(model_step.settings(body), [f"model.num_layers={pattern}", "mesh.data=1"])
    return step_of(cfg, "pallas")

  return {f"model_step/{name}": functools.partial(lower, name) for name in model_step.BODIES}


def train_steps():
  """`benchmarks.mixers`: the training step of the 72M model with every mixer, on the CPU."""

  def lower(mixer):
    settings = [f"model.mixer={mixer}", "model.num_layers=2", "model.unroll=2", "mesh.data=1"]
    return step_of(apply_overrides(load_config(ROOT / "configs/lnssm_72m.py"), settings), "chunked")

  return {f"train_step/{mixer}": functools.partial(lower, mixer) for mixer in sorted(MIXERS)}


def step_of(cfg, form: str):
  """The training step of a config, lowered."""
  mesh = device_mesh.make_mesh(cfg)
  arguments = abstract_state(cfg, mesh), abstract_batch(cfg, mesh)
  transform = make_optimizer(cfg.optimizer, cfg.steps)[0]
  return lowered(make_train_step(cfg, model_graph(cfg.model), transform, mesh), form, *arguments)


def lowered(function, form, *shapes):
  """`function` lowered: for CUDA if `form` has kernels, on a CPU that passes for a Hopper GPU."""
  program = function if hasattr(function, "trace") else jax.jit(function)
  if form != "pallas":
    return program.trace(*shapes).lower(lowering_platforms=("cpu",))
  devices = dict.fromkeys(("devices", "local_devices"), lambda *_, **__: [HOPPER])
  with mock.patch.multiple(jax, **devices):
    return program.trace(*shapes).lower(lowering_platforms=("cuda",))


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
  from jax._src.lib import mosaic_gpu_dialect
  from jax._src.lib.mlir import ir

  context = mlir.make_ir_context()
  context.allow_unregistered_dialects = True
  mosaic_gpu_dialect.register_dialect(context)  # types of kernels of JAX's own
  with context:
    text = ir.Module.parse(module, context=context).operation.get_asm(enable_debug_info=False)
  name = re.search(r"^module @(\S+)", text, re.MULTILINE).group(1)
  text = re.sub(r'mosaic_gpu\.dump_basename = "[^"]*"', "", text)
  return re.sub(rf"\b{re.escape(name)}(?=\b|_kernel)", "kernel", text)


def digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:16]
