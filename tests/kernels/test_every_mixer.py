"""Which mixers run in kernels on a Hopper GPU: what docs/mixers.md says of each is so.

`implementation=None` takes XLA's form without a word where a kernel cannot run, so this is how a
mixer that lost its kernel is found.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.model_step import BODIES, settings
from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.models.block import make_mixer
from lnssm_jax.models.options import pattern_of
from tests.kernels.lowered import kernels_traced, lowered

PAGE = (Path(__file__).parents[2] / "docs" / "mixers.md").read_text()
WHERE = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\w ]+) \| [\d,]+(?:, a cache)? \|$", PAGE, re.M))


@pytest.mark.parametrize("to_cuda", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXERS)
def test_the_page_says_what_runs_in_kernels(name, to_cuda, hopper):
  """At the width of the page's table, in bfloat16; in the traced program, or lowered for CUDA."""
  heads = {"num_heads": 4} if "num_heads" in MIXERS[name].set_by_model else {}
  build = lambda: MIXERS[name](512, **heads, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  mixer = jax.eval_shape(build)
  layers = [layer for _, layer in nnx.iter_modules(mixer) if isinstance(layer, ShortConvolution)]
  graph, params = nnx.split(mixer, nnx.Param)
  x = jax.ShapeDtypeStruct((2, 256, 512), jnp.bfloat16)
  run = lambda arrays: nnx.merge(graph, arrays[0])(arrays[1])[0]
  if to_cuda:
    text = lowered(run, (params, x))
    convolutions = text.count("causal_conv1d_forward_mosaic_gpu")  # once in each kernel
    norms = text.count("norm_forward_mosaic_gpu")
    kernels = text.count("custom_call @mosaic_gpu") - norms
  else:
    names = [n for n in kernels_traced(run, (params, x)) if n != "norm_forward"]
    kernels, convolutions = len(names), names.count("causal_conv1d_forward")
  # All streams in one convolution; that of RWKV-6 has offsets, which are made of another one.
  shifts = {"lnssm": 1, "rwkv4": 1, "rwkv5": 1, "rwkv6": 2}.get(name, 0)
  parts = name == "mamba2"  # of x, and of b and c
  assert convolutions == len(layers) + shifts + parts
  assert (kernels > convolutions) == ("kernel" in WHERE[name])


OPS = {
  "delta_net": "delta_rule",
  "gated_delta_net": "delta_rule",
  "longhorn": "longhorn_scan",
  "mamba": "selective_scan",
  "sliding_window_attention": "attention",
  "softmax_attention": "attention",
}  # of the others linear attention


@pytest.mark.parametrize("name", BODIES)
def test_benchmark_body_on_packed_documents_runs_its_ops_in_kernels(name, hopper):
  """Widths that a mixer's own test does not have: GLA's heads of 1.3B are 256 and 512 wide."""
  model = settings(BODIES[name]).model
  place = {"num_heads": model.num_heads, "layer": 0, "num_layers": model.num_layers}
  pattern = pattern_of(model.mixer)
  by_mixer = model.mixer_options if len(pattern) > 1 else {model.mixer: model.mixer_options}
  x = jax.ShapeDtypeStruct((2, 256, model.dim), jnp.bfloat16)
  ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)
  for mixer_name in dict.fromkeys(pattern):
    options = place | dict(by_mixer.get(mixer_name, {})) | {"dtype": jnp.bfloat16}
    build = lambda name=mixer_name, options=options: make_mixer(
      name, model.dim, **options, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(jax.eval_shape(build), nnx.Param)
    run = lambda arrays, graph=graph: nnx.merge(graph, arrays[0])(arrays[1], None, arrays[2])[0]
    op = OPS.get(mixer_name, "linear_attention")
    found = kernels_traced(run, (params, x, ids))
    assert any(kernel.startswith(op) for kernel in found), mixer_name
