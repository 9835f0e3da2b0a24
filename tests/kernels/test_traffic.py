"""The bytes that layers of three models read and write, as docs/performance.md promises."""

import re
from pathlib import Path

import jax
import pytest

from benchmarks import described, passes
from benchmarks.model_step import Sizes
from tests.kernels.lowered import kernel_launches, layer_of, total

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
TABLE = PAGE.partition("## Traffic of a layer")[2].partition("\n## ")[0]
PROMISED = {
  name: (float(kernels), float(others))
  for name, kernels, others in re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", TABLE, re.M)
}

PROGRAM = """HloModule jit_step

%body.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x.1 = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %i.1 = s32[] get-tuple-element(%p), index=0
  %twice = bf16[4,8]{1,0} fusion(%x.1, %x.1), kind=kLoop, calls=%f, metadata={op_name="a/mixer/add"}
  ROOT %out = (s32[], bf16[4,8]{1,0}) tuple(%i.1, %twice)
}

%sliced (p: bf16[9,4,8]) -> bf16[9,4,8] {
  %p = bf16[9,4,8]{2,1,0} parameter(0)
  %slice.1 = bf16[1,4,8]{2,1,0} slice(%p), slice={[2:3], [0:4], [0:8]}
  ROOT %kernel.1 = bf16[4,8]{1,0} custom-call(%slice.1), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: bf16[4,8]) -> f32[4] {
  %a = bf16[4,8]{1,0} parameter(0)
  %kernel.2 = (f32[4]{0}, pred[8]{0}) custom-call(%a), custom_call_target="mosaic_gpu_v2"
  %of_slice = bf16[4,8]{1,0} fusion(%all), kind=kCustom, calls=%sliced, SLICED
  %first = (s32[], bf16[4,8]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[4,8]{1,0}) while(%first), condition=%c, body=%body.1, TRIPS
  %product = f32[4,4]{1,0} custom-call(%a, %a), custom_call_target="__cublas$gemm"
  ROOT %sum = f32[4]{0} fusion(%product), kind=kInput, calls=%g
}
"""
PROGRAM = PROGRAM.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"3"}}')
PROGRAM = PROGRAM.replace("SLICED", 'backend_config={"kind":"__custom_fusion"}')


def test_passes_of_a_compiled_program():
  """Arguments count once, passes in loops as often as these run, slices as what is read of them."""
  found = [(x.kind, x.name, x.read, x.written) for x in passes.passes(PROGRAM)]
  assert found == [
    ("kernels", "kernel.2", 64, 24),
    ("kernels", "kernel.1", 64, 64),
    ("rest", "twice", 3 * 64, 3 * 64),
    ("products", "product", 64, 64),
    ("rest", "sum", 64, 16),
  ]
  assert passes.passes(PROGRAM)[2].path == "a/mixer/add"


@pytest.mark.parametrize("name", ["gla", "gated_delta_net", "lnssm"])
def test_kernels_of_a_layer_move_what_the_page_says(name, hopper):
  """Arguments and results of both directions, in arrays of [tokens, width] in bfloat16."""
  run, (params, x, ids) = layer_of(name, 16, 2048)
  gradient = jax.grad(lambda *of: total(run(*of)), argnums=(0, 1))
  traced = jax.jit(gradient).trace(params, x, ids)
  moved = sum(
    value.aval.size * value.aval.dtype.itemsize
    for launch in kernel_launches(traced.jaxpr.jaxpr)
    for value in (*launch.invars, *launch.outvars)
  )
  assert moved / (x.size * x.dtype.itemsize) == pytest.approx(PROMISED[name][0], abs=0.05)


@pytest.mark.slow
@pytest.mark.skipif(bool(described.missing()), reason=f"needs {described.missing()}")
@pytest.mark.parametrize("name", ["gla", "gated_delta_net", "lnssm"])
def test_all_passes_of_a_layer_move_at_most_what_the_page_says(name):
  """XLA's passes and products included: of two layers, less those of one."""
  sizes = [Sizes(num_layers=number) for number in (1, 2)]
  programs = [passes.compiled(name, x, described.GPUS["H100"]).as_text() for x in sizes]
  one, two = (sum(x.read + x.written for x in passes.passes(text)) for text in programs)
  array = 2 * sizes[0].rows * sizes[0].length * sizes[0].dim
  assert 0 < (two - one) / array < PROMISED[name][0] + PROMISED[name][1] + 1
