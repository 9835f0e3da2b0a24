"""Configurations of kernels: SMEM that they need, tables of devices, those given by a caller."""

import dataclasses
import importlib
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.cross_entropy import pallas as loss_kernel
from lnssm_jax.ops.cross_entropy import types as loss
from lnssm_jax.ops.linear_attention import pallas
from lnssm_jax.ops.linear_attention.types import Inputs, Options
from pallas_kernels.attention import config as attention
from pallas_kernels.channel_states import config as channel_states
from pallas_kernels.core import device, tuning
from pallas_kernels.cross_entropy import config as cross_entropy
from pallas_kernels.delta_rule import config as delta_rule
from pallas_kernels.diagonal_scan import config as diagonal_scan
from pallas_kernels.linear_attention import config as linear_attention
from pallas_kernels.linear_attention.config import ChunkConfig
from pallas_kernels.wkv4 import config as wkv4
from tests.kernels.lowered import kernel_launches, total
from tests.ops import contract
from tests.ops.cases.linear_attention import LINEAR_ATTENTION, Case

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
B, T, H, D, N = 2, 300, 4, 256, 16
PCIE = dataclasses.replace(device.HOPPER, kind="NVIDIA H100 PCIe", sm_count=114)


def scratch_bytes(launch) -> int:
  """Bytes of SMEM that a kernel allocates, without barriers."""

  def allocated(jaxpr):
    found = 0
    for equation in jaxpr.eqns:
      inner = jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr"))
      inner = [getattr(x, "jaxpr", x) for x in inner]
      inner = [x for x in inner if hasattr(x, "eqns")]
      if equation.primitive.name == "run_scoped":
        for ref in inner[0].invars:
          space, dtype = getattr(ref.aval, "memory_space", None), ref.aval.dtype
          if str(space) == "smem" and isinstance(
            dtype, np.dtype
          ):  # barriers have types of their own
            found += math.prod(ref.aval.shape) * dtype.itemsize
      found += max(map(allocated, inner), default=0)
    return found

  reductions = launch.params["compiler_params"].reduction_scratch_bytes
  return allocated(launch.params["jaxprs"][0]) + reductions


def array(*shape, dtype=BF16):
  return jax.ShapeDtypeStruct(shape, dtype)


def heads(K, V, **more):
  return {"q": array(B, T, H, K), "k": array(B, T, H, K), "v": array(B, T, H, V), **more}


def attention_inputs(decay, K, V, *, shared=False):
  sizes = {"B": B, "T": T, "H": H, "K": K}
  inputs = heads(K, V, log_decay=array(*(sizes[axis] for axis in decay), dtype=F32))
  if shared:
    inputs |= {"q": array(B, T, 1, K), "k": array(B, T, 1, K)}
  return inputs


SCAN = {"x": array(B, T, D), "skip": array(D, dtype=F32)}
SELECTIVE = {
  "dt": array(B, T, D),
  "a": array(D, N, dtype=F32),
  "b": array(B, T, N),
  "c": array(B, T, N),
}
LONGHORN = {"beta": array(B, T, D), "k": array(B, T, N), "q": array(B, T, N)}
# (op, its arguments, options; the configurations and their shape; the kernel of each name).
GRADIENTS = {"query_gradient": "query_gradient", "key_gradient": "key_gradient"}
BOTH = {"forward": "forward", "backward": "backward"}
LINEAR = {"scores": "scores", "outputs": "outputs", "states_reverse": "states", **GRADIENTS}
SCALAR = {**LINEAR, "key_value_gradient": "key_gradient", "division_gradient": "division_gradient"}
AMPERE = linear_attention.Shape(B, T, H, H, 128, 64, "BTHK", True)
PROGRAMS = {
  "scalar": ("linear_attention", attention_inputs("BTH", 128, 128), {"normalize": True}, SCALAR),
  "shared": ("linear_attention", attention_inputs("BTH", 128, 64, shared=True), {}, SCALAR),
  "constant": ("linear_attention", attention_inputs("HK", 128, 128), {"normalize": True}, LINEAR),
  "per token": (
    "linear_attention",
    attention_inputs("BTHK", 128, 64),
    {},
    LINEAR | {"value_gradient": "value_gradient"},
  ),
  "ampere": (
    "linear_attention",
    attention_inputs("BTHK", 128, 64),
    {"normalize": True, "implementation": "pallas_ampere"},
    {x: x for x in linear_attention.AmpereConfig().smem(AMPERE)} | {"ampere_states": "states"},
  ),
  "delta": (
    "delta_rule",
    heads(128, 128, beta=array(B, T, H, dtype=F32), log_decay=array(B, T, H, dtype=F32)),
    {},
    {
      "recurrence_forward": "forward",
      "recurrence_reverse": "reverse",
      "gradients": "gradients",
    },
  ),
  "delta wide": (
    "delta_rule",
    heads(256, 256, beta=array(B, T, H, dtype=F32), log_decay=array(B, T, H, 256, dtype=F32))
    | {"erase_key": array(B, T, H, 256)},
    {},
    {
      "decayed_chunks": "chunks",
      "recurrence_forward": "forward",
      "recurrence_reverse": "reverse",
      "gradients": "gradients",
    },
  ),
  "delta ampere": (
    "delta_rule",
    heads(128, 128, beta=array(B, T, H, dtype=F32), log_decay=array(B, T, H, 128, dtype=F32)),
    {"implementation": "pallas_ampere"},
    {"forward": "recurrence", "reverse": "recurrence", "inverses": "inverses"},
  ),
  "attention": ("attention", heads(128, 64), {}, GRADIENTS | {"outputs": "forward"}),
  "attention ampere": (
    "attention",
    heads(128, 64),
    {"implementation": "pallas_ampere"},
    GRADIENTS | {"outputs": "outputs"},
  ),
  "selective": ("selective_scan", SCAN | SELECTIVE, {}, BOTH),
  "longhorn": ("longhorn_scan", SCAN | LONGHORN, {}, BOTH),
  "diagonal": (
    "diagonal_scan",
    {"decay": array(B, T, D, dtype=F32), "x": array(B, T, D, dtype=F32)},
    {},
    BOTH,
  ),
  "wkv4": (
    "wkv4",
    {n: array(B, T, D) for n in "kv"} | {n: array(D, dtype=F32) for n in ("decay_rate", "bonus")},
    {},
    BOTH,
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_estimated_smem_is_what_kernels_allocate(name, hopper, monkeypatch):
  """To 2 KiB, in which the estimates have barriers and flags, of which there may be fewer."""
  op, inputs, options, kernels = PROGRAMS[name]
  estimates = {}

  def remember(_, smem):
    estimates.update(smem)

  monkeypatch.setattr(tuning, "check_smem", remember)
  documents = jnp.zeros((B, T), jnp.int32)
  options = {"segment_ids": documents, "implementation": "pallas"} | options
  run = lambda x: getattr(ops, op)(**x, **options)
  loss = lambda x: total(run(x))
  launches = list(kernel_launches(jax.jit(jax.grad(loss)).trace(inputs).jaxpr.jaxpr))
  found = set()
  for launch in launches:
    suffix = launch.params["name"].removeprefix("linear_attention_").removeprefix("delta_rule_")
    kernel = next((y for x, y in kernels.items() if suffix.endswith(x)), None)
    if kernel is not None:
      found.add(kernel)
      allocated = scratch_bytes(launch)
      assert allocated <= estimates[kernel] <= allocated + 2048, (kernel, allocated, estimates)
  assert found == set(kernels.values()) - ({"scores", "division_gradient"} - set(estimates))


FOLDERS = (
  (linear_attention, linear_attention.Shape(B, 512, H, H, 128, 128, "BTHK", False)),
  (delta_rule, delta_rule.Shape(B * H, 128, 128, True)),
  (attention, attention.Shape(256, 256, 1)),
  (channel_states, channel_states.Shape("selective_scan", 256, 16, 2, 2, 2)),
  (diagonal_scan, diagonal_scan.Shape(4, 4, 4)),
  (wkv4, wkv4.Shape(2, 2)),
  (cross_entropy, cross_entropy.Shape(2)),
)
ALONE = ("causal_conv1d", "norms", "rotations")
EVERY = (*ALONE, *(module.__name__.split(".")[1] for module, _ in FOLDERS))


def test_every_folder_of_kernels_has_a_default_configuration():
  folders = {path.parent.name for path in tuning.FOLDER.parent.glob("*/config.py")}
  assert folders == set(EVERY)
  for folder in folders:
    module = importlib.import_module(f"pallas_kernels.{folder}.config")
    assert callable(module.default) and issubclass(module.Shape, tuple)


@pytest.mark.parametrize(("module", "shape"), FOLDERS, ids=lambda x: getattr(x, "__name__", ""))
def test_configurations_beyond_the_smem_of_a_device_raise(module, shape, monkeypatch):
  module.default(shape).check(shape)
  assert all(tuning.ctas_per_sm(size) >= 1 for size in module.default(shape).smem(shape).values())
  chosen = module.default(shape)
  least = max(chosen.smem(shape).values())
  monkeypatch.setattr(device, "HOPPER", dataclasses.replace(device.HOPPER, smem=least - 1))
  with pytest.raises(ValueError, match=f"needs {least} bytes of SMEM per CTA"):
    chosen.check(shape)


GLA = linear_attention.Shape(8, 2048, 16, 16, 128, 128, "BTHK", False)


def changed(**fields):
  return dataclasses.replace(linear_attention.default(GLA), **fields)


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (changed(query_gradient=ChunkConfig(blocks_per_cta=3)), "query_gradient.blocks_per_cta=3 must"),
    (
      changed(key_gradient=ChunkConfig(heads_per_cta=2)),
      "key_gradient.heads_per_cta=2 must divide",
    ),
    (changed(key_gradient=ChunkConfig(value_parts=4)), "key_gradient.value_parts=4 must divide 2"),
    (changed(separate_values=False), "separate_values=False needs constant decays"),
    (changed(chunk=128), "chunk=128 needs scalar decays and whole chunks"),
  ],
  ids=["blocks", "heads", "parts", "values", "chunk"],
)
def test_linear_attention_configurations_that_do_not_fit_a_shape_raise(config, message):
  with pytest.raises(ValueError, match=message):
    config.check(GLA)


def test_gradients_of_gla_with_a_given_configuration_equal_the_reference(monkeypatch):
  """One CTA for both blocks of key channels, two stages, a CTA per chunk of scores."""
  default = linear_attention.default

  def given(shape):
    both = ChunkConfig(blocks_per_cta=shape.blocks)
    pipeline = dataclasses.replace(default(shape).outputs, num_stages=2)
    changes = {"outputs": pipeline, "query_gradient": both, "key_gradient": both}
    config = dataclasses.replace(default(shape), **changes)
    config.check(shape)
    return config

  monkeypatch.setattr(linear_attention, "default", given)
  monkeypatch.setattr("pallas_kernels.linear_attention.op.default", given)
  case = Case(T=70, K=72, V=24, decay="BTHK", H=1, chunk=None)
  contract.assert_case(LINEAR_ATTENTION, case, BF16, "pallas_interpret")


@pytest.mark.slow
def test_linear_attention_in_chunks_of_128_tokens_equals_the_reference(monkeypatch):
  """Two chunks, the second of which begins inside a document and ends with padding."""
  default = linear_attention.default

  def given(shape):
    two_stages = dataclasses.replace(default(shape).outputs, num_stages=2)
    return dataclasses.replace(default(shape), chunk=128, outputs=two_stages, states=two_stages)

  monkeypatch.setattr("pallas_kernels.linear_attention.op.default", given)
  case = Case(T=230, K=16, V=24, decay="BTH", H=1, segments=True, chunk=None)
  contract.assert_case(LINEAR_ATTENTION, case, BF16, "pallas_interpret")


def test_a_given_configuration_is_that_of_the_launched_kernel():
  inputs = attention_inputs("BTHK", 128, 128)
  state = ops.LinearAttentionState(array(B, H, 128, 128, dtype=F32), array(B, H, 128, dtype=F32))

  def grid(blocks):
    config = changed(query_gradient=ChunkConfig(blocks_per_cta=blocks))

    def loss(x, state):
      arguments = Inputs(**x, value_log_decay=None, bonus=None, state=state, segments=None)
      return total(pallas.run(arguments, Options(False, scale=0.5), sizes=config))

    launches = kernel_launches(jax.jit(jax.grad(loss)).trace(inputs, state).jaxpr.jaxpr)
    (mesh,) = [x.params["meshes"][0] for x in launches if "query_gradient" in x.params["name"]]
    return mesh.shape["block"]

  assert (grid(1), grid(2)) == (2, 1)


@pytest.fixture
def tables(tmp_path, monkeypatch):
  """Writes the table of the described device."""
  monkeypatch.setattr(tuning, "FOLDER", tmp_path)

  def write(entries):
    tuning.table.cache_clear()
    tuning.table_path(device.HOPPER.kind).write_text(json.dumps(entries))

  yield write
  tuning.table.cache_clear()


def test_the_table_of_a_device_changes_its_fields_of_one_shape_class_only(tables):
  want = linear_attention.default(GLA)
  tables({"linear_attention": {GLA.shape_class: {"query_gradient": {"blocks_per_cta": 2}}}})
  assert linear_attention.default(GLA) == dataclasses.replace(
    want, query_gradient=dataclasses.replace(want.query_gradient, blocks_per_cta=2)
  )
  other = GLA._replace(value_width=64)
  assert linear_attention.default(other).query_gradient.blocks_per_cta == 1
  longer = GLA._replace(length=8192, batch=1)
  assert linear_attention.default(longer).query_gradient.blocks_per_cta == 2
  tables({"linear_attention": {GLA.shape_class: {"query_gradient": {"block": 2}}}})
  with pytest.raises(ValueError, match="no field is named 'block'; use one of heads_per_cta"):
    linear_attention.default(GLA)


def test_device_facts_are_those_of_the_gpu(monkeypatch):
  """An H100 with PCIe has fewer SMs: other grids, and a table of its own."""
  gpu = types.SimpleNamespace(
    platform="gpu", device_kind=PCIE.kind, compute_capability="9.0", core_count=114,
    shared_memory_per_block_optin=227 * 1024,
  )  # fmt: skip
  assert cross_entropy_ctas() == 132
  monkeypatch.setattr(device, "default_device", lambda: gpu)
  assert device.current() == PCIE
  assert cross_entropy_ctas() == 114
  assert tuning.table_path(PCIE.kind).name == "nvidia-h100-pcie.json"
  assert (PCIE.smem_of_each(1), PCIE.smem_of_each(2)) == (227 * 1024, 113 * 1024)


def cross_entropy_ctas():
  numbers = array(1, 500, dtype=F32)
  inputs = loss.Inputs(array(1, 500, 4096, dtype=F32), array(1, 500, dtype=jnp.int32), numbers)
  options = loss.Options(4096, 0.0, 0.0, BF16, None)
  run = lambda x: loss_kernel.run(x, options)
  (launch,) = kernel_launches(jax.jit(run).trace(inputs).jaxpr.jaxpr)
  return launch.params["meshes"][0].shape["cta"]
