"""FLOPs and memory of generating N tokens, in the scopes of LNSSM's tables 5 and 6 and for a model.

The published numbers are multiply-adds, of the following parts only, for L layers of width d with H
heads of width K:

    attention with cache    L (3 d^2 N + d N (N + 1))          q, k, v; scores and their products
    without                 the same for all tokens so far, at each new token
    state                   N (3 L H K^2 + d^2)                no projections of the layers

The first and the last give the printed digits at L = 6, d = 512, H = 4. The rest of this module
counts a whole model, two per multiply-add, by `train.step.flops`: all projections, channel mixers
and the head, from an empty state. Long convolutions count as one pass over N tokens, although
generation is dearer.

Source: LNSSM, tables 5 and 6. Table 6 is the memory that a framework had reserved, which no formula
gives; here are the bytes of parameters, of the state of one sequence and of a cache.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax

from train import config
from train.scoring.report import Report
from train.step import flops
from train.step.model import build_model, check_length

LENGTHS = (256, 512, 1024)
# By length: GFLOPs of attention without and with a cache and of LNSSM (table 5), GB likewise (6).
PRINTED = {
  256: (291.25, 1.41, 0.37, 1.0, 1.7, 0.5),
  512: (1312.16, 3.22, 0.74, 1.8, 3.8, 0.5),
  1024: (6329.43, 8.06, 1.48, 5.0, 13.2, 0.5),
}
PRINTED_SHAPE = (6, 512, 4)  # layers, dim, heads


def run(model: config.Model, lengths: Sequence[int] = LENGTHS) -> Report:
  """The three tables of a model's architecture; no parameter is computed.

  Raises:
    ConfigError: a length is more than the model's positions or cache hold.
  """
  check_length(model, "lengths", max(lengths))
  shape = (model.num_layers, model.dim, model.num_heads or 1)
  printed = {n: PRINTED[n] if shape == PRINTED_SHAPE else None for n in lengths if n in PRINTED}
  tables = {
    "published scope, GMAC": [_published(*shape, n, printed.get(n)) for n in lengths],
    "whole model, GFLOP": [_flops(model, n) for n in lengths],
    "memory of one sequence, MB": [_memory(model, n, printed.get(n)) for n in lengths],
  }
  layers, dim, heads = shape
  settings = {"mixer": model.mixer, "layers": layers, "dim": dim, "heads": heads}
  return Report("cost", settings | {"dtype": model.dtype}, tables)


def _published(layers: int, dim: int, heads: int, length: int, printed) -> dict[str, float | None]:
  cached = lambda n: layers * (3 * dim**2 * n + dim * n * (n + 1))
  width = dim // heads
  state = length * (3 * layers * heads * width**2 + dim**2)
  # Sums over n = 1 to N: N (N + 1) / 2 of n, N (N + 1) (N + 2) / 3 of n (n + 1).
  pairs = length * (length + 1) // 2
  again = layers * (3 * dim**2 * pairs + dim * (2 * pairs * (length + 2) // 3))
  without, with_cache, of_state = printed[:3] if printed else (None, None, None)
  return {
    "tokens": length,
    "attention": again / 10**9,
    "printed": without,
    "attention, cache": cached(length) / 1e9,
    "printed, cache": with_cache,
    "state": state / 1e9,
    "printed, state": of_state,
  }


def _flops(model: config.Model, length: int) -> dict[str, float | None]:
  attention = _with_attention(model, length)
  per_token = lambda each, n: flops.model_flops_per_token(each, n)
  own, first, mean = (
    per_token(model, length),
    per_token(attention, 1),
    per_token(attention, length),
  )
  assert first is not None and mean is not None  # attention has a formula
  # Each of n tokens sees (n + 1) / 2 keys on average, so that its FLOPs are first + (n - 1) times
  # (mean - first) / (N - 1); the head reads the last token only. The sum over n = 1 to N, times 3:
  head = 2 * model.dim * model.vocab_size
  pairs = length * (length + 1) // 2
  again = pairs * (3 * (first - head) + 2 * (mean - first)) + 3 * length * head
  return {
    "tokens": length,
    "model": None if own is None else own * length / 1e9,
    "attention, cache": mean * length / 1e9,
    "attention": again / (3 * 10**9),
  }


def _memory(model: config.Model, length: int, printed) -> dict[str, float | None]:
  parameters, state = _bytes(model)
  cached_parameters, cache = _bytes(_with_attention(model, length))
  rows = {
    "tokens": length,
    "parameters": parameters / 1e6,
    "state": state / 1e6,
    "parameters of attention": cached_parameters / 1e6,
    "cache of attention": cache / 1e6,
  }
  names = ("printed, attention", "printed, cache", "printed, state")
  values = [1e3 * gigabytes for gigabytes in printed[3:]] if printed else [None] * 3
  return rows | dict(zip(names, values, strict=True))


def _bytes(model: config.Model) -> tuple[int, int]:
  """Of the parameters, and of the state of one sequence."""
  built = jax.eval_shape(lambda: build_model(model, jax.random.key(0)))
  size = lambda tree: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
  return size(built), size(jax.eval_shape(lambda: built.init_state(1)))


def _with_attention(model: config.Model, length: int) -> config.Model:
  """The same model whose every mixer is softmax attention."""
  changes = {"mixer": "softmax_attention", "mixer_options": {"max_length": length}}
  return dataclasses.replace(model, **changes, num_heads=model.num_heads or 1)
