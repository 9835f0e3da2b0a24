"""Which mixers run in kernels on a Hopper GPU: what docs/mixers.md says of each is so.

`implementation=None` takes XLA's form without a word where a kernel cannot run, so this is how a
mixer that lost its kernel is found.
"""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.model_step import BODIES, settings
from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.common.short_convolution import ShortConvolution
from lnssm_jax.models.options import pattern_of
from lnssm_jax.ops.core.recording import choices_of_xla, lines_of
from tests.kernels.lowered import kernels_traced, layer_of, lowered
from train.config import load_config
from train.step.model import build_model

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
  shifts = {"lnssm": 1, "rwkv4": 1, "rwkv5": 1, "rwkv6": 2, "rwkv7": 1}.get(name, 0)
  parts = name in ("log_linear", "mamba2")  # of x, and of b and c
  assert convolutions == len(layers) + shifts + parts
  assert (kernels > convolutions) == ("kernel" in WHERE[name])


ROOT = Path(__file__).parents[2]
VARIANTS = [
  f"{path.stem}.py" + (f":{variant}" if variant else "")
  for path in sorted((ROOT / "configs").glob("*.py"))
  for variant in runpy.run_path(str(path)).get("VARIANTS", [""])
]
IN_XLA = {
  "dsf_wikitext103.py:linear": ["linear_attention runs in XLA's form: attention_dropout=0.1"],
  "dsf_wikitext103.py:normalized": ["linear_attention runs in XLA's form: attention_dropout=0.1"],
  "lcsm_wikitext103.py": ["linear_attention runs in XLA's form: value_log_decay is given"],
  "quickstart.py": [
    "normalize runs in XLA's form: its kernels are not preferred for these sizes",
    "linear_attention runs in XLA's form: q has dtype float32",
  ],
} | {
  name: ["normalize runs in XLA's form: x has 115 channels"]  # 7 / 6 of 96: RetNet's heads
  for name in VARIANTS
  if "retnet" in name
}  # fmt: skip

# The mixers of the others have a benchmark's body, or are those of these at other sizes.
BY_DEFAULT = {name for name in IN_XLA if "retnet" not in name}
BY_DEFAULT |= {f"dsf_wikitext103.py:{name}" for name in ("s6", "ssd")}
BY_DEFAULT |= {f"lnssm_72m.py:{name}" for name in ("rwkv4", "rwkv5")}
BY_DEFAULT |= {f"sse.py:{name}" for name in ("sse-h-600m", "mom-n4k1-800m")}
BY_DEFAULT |= {"longhorn.py:retnet-120m-1024"}


def in_xla(model, seq_len):
  """The lines about a model's training on packed documents, of a layer of each kind."""
  pattern = tuple(dict.fromkeys(pattern_of(model.mixer)))
  options = model.mixer_options
  if len(pattern) == 1 and not isinstance(model.mixer, str):
    options = options.get(pattern[0], {})
  of_each = replace(
    model,
    mixer=pattern if len(pattern) > 1 else pattern[0],
    mixer_options=options,
    num_layers=len(pattern),
  )
  graph, params = nnx.split(jax.eval_shape(lambda: build_model(of_each, jax.random.key(0))))
  ids = jax.ShapeDtypeStruct((2, seq_len), jnp.int32)
  keys = jax.ShapeDtypeStruct((2, 2), jnp.uint32)

  def run(params, tokens, ids, keys):
    model = nnx.merge(graph, params)
    return model.hidden(tokens, segment_ids=ids, dropout_key=keys if model.has_dropout else None)

  with choices_of_xla() as found:
    jax.eval_shape(run, params, ids, ids, keys)
  return lines_of(found)


# By default the widest, those with several mixers, and one for each kind of kernel; the test of the
# page has every mixer.
BODIES_BY_DEFAULT = {"gla_1b3", "hybrid", "lnssm_1b3", "mamba2", "retnet", "rwkv7", "sse"}


@pytest.mark.parametrize(
  "name",
  [pytest.param(n, marks=() if n in BODIES_BY_DEFAULT else pytest.mark.slow) for n in BODIES],
)
def test_benchmark_body_on_packed_documents_runs_in_kernels(name, hopper):
  """Widths that a mixer's own test does not have: GLA's heads of 1.3B are 256 and 512 wide."""
  cfg = settings(BODIES[name])
  found = in_xla(cfg.model, cfg.seq_len)
  assert not found


@pytest.mark.parametrize(
  "name", [pytest.param(n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in VARIANTS]
)
def test_config_on_packed_documents_runs_in_kernels_or_says_why(name, hopper, monkeypatch):
  monkeypatch.setenv("LNSSM_DATA", "folder")
  cfg = load_config(ROOT / "configs" / name)
  found = in_xla(cfg.model, cfg.seq_len)
  for line, start in zip(found, IN_XLA.get(name, []), strict=True):
    assert line.startswith(start)


@pytest.mark.parametrize("length", [1, 64])
def test_hybrid_with_states_runs_its_mixers_in_kernels(length, hopper):
  """A token, and a chunk of a prompt behind others, as `generate` reads them."""
  model = replace(
    settings(BODIES["hybrid"]).model, mixer=("gla", "softmax_attention"), num_layers=2
  )
  built = jax.eval_shape(lambda: build_model(model, jax.random.key(0)))
  graph, params = nnx.split(built)
  tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)

  def run(params, tokens):
    model = nnx.merge(graph, params)
    return model(tokens, model.init_state(2), None if length == 1 else tokens)

  with choices_of_xla() as found:
    jax.eval_shape(run, params, tokens)
  assert not {choice.op for choice in found} & {"attention", "linear_attention"}


@pytest.mark.slow
def test_sse_keeps_at_most_a_quarter_more_than_gla_for_the_backward_pass(hopper):
  """Residuals of a layer of 4 x 8,192 tokens, in kernels, at the sizes of the benchmark."""

  def kept(name):
    run, arguments = layer_of(name, 4, 8192)
    pull = lambda params, x, ids: jax.vjp(lambda *of: run(*of, ids), params, x)[1]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pull, *arguments)))

  sse, gla = kept("sse"), kept("gla")
  assert 2**30 < sse < 1.25 * gla
