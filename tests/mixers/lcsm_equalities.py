"""Which code of LCSM is which other mixer: the same arrays reach the recurrence, in float64.

A row maps the parameters of a mixer to those of a code and says what the two share: the streams of
the recurrence (e, o, s, i), or the whole layer. `same` runs both and finds out.
`table` writes them down, for docs/lcsm.md.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers import LCSM, MIXERS
from tests.mixers import plain_ops
from tests.mixers.helpers import relative_error, split

D, T, TAU = 6, 5, 16

kernel = lambda p, name: p[f"{name}_proj"]["kernel"]
logit = lambda a: np.log(a) - np.log1p(-a)
silu = lambda z: z / (1 + np.exp(-z))


def linear(p, **names):
  """{"e": "k"} -> {"e_proj": {"kernel": that of k_proj}}."""
  return {f"{ours}_proj": {"kernel": kernel(p, theirs)} for ours, theirs in names.items()}


def exponentials(recorded, _):
  """Code 0-0-0 of a convolution with real poles: E S is the coefficient."""
  poles = np.broadcast_to(recorded["o"], recorded["s"].shape).T
  return {
    "i_proj": {"kernel": np.eye(D)},
    "e_weight": recorded["s"].T,
    "s_weight": np.ones_like(poles),
    "decay_weight": logit(np.exp(TAU * poles)),
  }


def selective(recorded, p):
  """Code 0 of a selective scan, with its step sizes and keys from one projection."""
  width = recorded["x"].shape[1]
  N = recorded["e"].shape[1]
  rate, e, s = np.split(kernel(p, "x"), [-2 * N, -N], axis=1)
  names = {"i": np.eye(width), "rate": rate, "dt": kernel(p, "dt"), "e": e, "s": s}
  return {f"{n}_proj": {"kernel": w} for n, w in names.items()} | {"a_log": p["a_log"]}


@dataclasses.dataclass(frozen=True)
class Row:
  """A code and a mixer. `shared` names streams, or "layer": all streams and the layer's output."""

  code: str
  mixer: str
  shared: str
  adds: str  # what the mixer has in place of the code, or further
  parameters: Callable[[Mapping[str, Any], Any], Mapping[str, Any]]  # (recorded, its) -> the code's
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  code_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  change: Callable[[Any], Mapping[str, Any]] = lambda p: {}  # of its parameters
  # The code's input, from the mixer's and what it gives to its op.
  inputs: Callable[[np.ndarray, Mapping[str, Any]], np.ndarray] = lambda x, recorded: x


ONE_HEAD = {"num_heads": 1}
_norm = lambda p: {"norm": p["norm"], "o_proj": p["o_proj"]}
_zero_biases = lambda *names: (
  lambda p: {f"{n}_proj": p[f"{n}_proj"] | {"bias": 0 * p[f"{n}_proj"]["bias"]} for n in names}
)
# A convolution that sees its own token only; its silu stays.
_own_token = lambda *names: (
  lambda p: {
    n: {"kernel": np.eye(len(p[n]["kernel"]))[-1][:, None] + 0 * p[n]["kernel"]} for n in names
  }
)
_real = lambda p: {
  n: (0.2 * np.abs(x) + 0.01 if n == "log_dt" else 0 * x)
  for n, x in p.items()
  if n in ("a_imag", "pole_imag", "c_imag")
}

ROWS = (
  Row(
    "1-10-1-0", "linear_attention", "e o s i", "no norm",
    lambda r, p: linear(p, e="k", s="q", i="v"),
    ONE_HEAD | {"feature_map": "identity", "use_bias": False}, {"state_dim": D},
  ),
  Row(
    "1-10-1-3", "linear_attention", "e o i", "divided by its own output for i = 1; no norm",
    lambda r, p: linear(p, e="k", s="q", i="v"),
    ONE_HEAD | {"use_bias": False}, {"state_dim": D},
  ),
  Row(
    "1-10-1-0", "normalized_attention", "e o s i", "divided by a function of the token; no norm",
    lambda r, p: linear(p, e="k", s="q", i="v"),
    ONE_HEAD | {"use_bias": False, "head_dim": 3},
  ),
  Row(
    "1-1-1-0", "gfw", "layer", "",
    lambda r, p: linear(p, e="k", s="q", i="v", a="a", c="c") | _norm(p),
    ONE_HEAD | {"head_dim": 3},
  ),
  Row(
    "1-3-1-0", "gla", "e o s i", "a gate of low rank; another norm, and an output gate",
    lambda r, p: linear(p, e="k", i="v") | {
      "s_proj": {"kernel": kernel(p, "q") * 3**-0.5},
      "a_proj": {"kernel": kernel(p, "decay_down") @ kernel(p, "decay_up")},
    },
    ONE_HEAD | {"gate_rank": 2}, change=_zero_biases("decay_up"),
  ),
  Row(
    "1-m3-1-2", "hgrn2", "e o s", "biases, silu of i, a lower bound of o",
    lambda r, p: linear(p, s="q", i="v") | {"e_proj": {"kernel": -kernel(p, "f")}},
    ONE_HEAD | {"lower_bound": "none"}, {"state_dim": D}, _zero_biases("q", "v", "f"),
  ),
  Row(
    "1-m3-1-2", "metala", "e o i",
    "a convolution before, linear s, a term of the token itself, an output gate",
    lambda r, p: linear(p, s="q", i="v") | {"e_proj": {"kernel": -kernel(p, "a")}},
    ONE_HEAD | {"gate_logit_normalizer": 1.0}, {},
    _own_token("conv"), lambda x, r: silu(x),
  ),
  Row(
    "1-11-1-0", "lrpe", "layer", "",
    lambda r, p: linear(p, e="k", s="q", i="v") | _norm(p) | {"theta": p["theta"]},
    ONE_HEAD, {"learned": True, "state_dim": D},
  ),
  Row(
    "1-11-1-1", "cosformer", "e o s", "one angle, divided by its own output for i = 1; no norm",
    lambda r, p: linear(p, e="k", s="q", i="v") | {"theta": np.full(D, math.pi / 80)},
    ONE_HEAD | {"max_length": 40}, {"learned": True, "state_dim": D},
  ),
  Row(
    "1-4-1-0", "retnet", "o i", "e and s rotate; another norm, and an output gate",
    lambda r, p: linear(p, e="k", s="q", i="v") | {
      "decay_logit": np.full(D, logit(np.exp(TAU * r["o"][0, 0, 0])))
    },
    ONE_HEAD | {"expand_v": 1}, {"state_dim": D},
  ),
  Row(
    "1-m1-1-4", "delta_net", "e", "a rate, convolutions, unit s, silu of i; another norm",
    lambda r, p: linear(p, e="k", s="q", i="v"),
    ONE_HEAD, {"state_dim": D}, _own_token("q_conv", "k_conv", "v_conv"),
  ),
  Row(
    "0-0-0-0", "dss", "o s i", "complex poles; a skip, gelu and a gated layer for norm and W_o",
    exponentials, {"state_dim": 3}, change=_real,
  ),
  Row(
    "0-0-0-0", "s4d", "o s i", "complex poles; a skip, gelu and a gated layer for norm and W_o",
    exponentials, {"state_dim": 6}, change=_real,
  ),
  Row(
    "0-2-0-0", "lrn", "o", "biases, i times 1 - o, an output gate for the norm",
    lambda r, p: linear(p, c="f", i="i"),
    {}, {"gate_logit_normalizer": 1.0}, _zero_biases("f", "i", "g"),
  ),
  Row(
    "0", "mamba", "e o s i", "a block around it: twice as wide, a convolution, a skip and a gate",
    selective, {"state_dim": 3, "gate_rank": 2}, {"gate_rank": 2},
    _zero_biases("dt"), lambda x, r: r["x"][None],
  ),
  Row(
    "0", "s6", "e o s i", "a bias of the step sizes, a skip, no norm",
    selective, {"state_dim": 3, "gate_rank": 2}, {"gate_rank": 2}, _zero_biases("dt"),
  ),
)  # fmt: skip


def streams(op, arguments, options):
  """The streams of a call of an op, of its first row and head; o as a log decay, `s` by weights."""
  first = lambda x: np.asarray(x)[0, :, 0]

  def log_decay(name):
    """[T, K or V, or 1]"""
    decay = np.asarray(options.get(name, np.zeros((1, 1))))
    decay = decay[:, None] if decay.ndim == 1 else decay
    return first(decay) if decay.ndim == 4 else decay

  if op == "linear_attention":
    q, k, v = map(first, arguments)
    scale = options.get("scale")
    scale = (1 if options.get("normalize") else k.shape[1] ** -0.5) if scale is None else scale
    options = {name: x for name, x in options.items() if x is not None}
    by_key, by_value = log_decay("log_decay"), log_decay("value_log_decay")
    o = np.broadcast_to(by_key[:, :, None] + by_value[:, None], (T, k.shape[1], by_value.shape[1]))
    return {"e": k, "s": scale * q, "i": v, "o": o}
  if op == "delta_rule":
    q, k, v = map(first, arguments[:3])
    return {"e": k, "s": q, "i": v}
  if op == "diagonal_scan":
    return {"o": np.asarray(arguments[0])[0], "i": np.asarray(arguments[1])[0]}
  if op == "long_convolution":
    x, kernel = arguments
    real = lambda z: np.real(np.asarray(z))
    return {"o": real(kernel.log_pole), "s": real(kernel.coefficient), "i": np.asarray(x)[0]}
  x, dt, a, b, c = (np.asarray(z) for z in arguments)
  dt = plain_ops.step_sizes(dt, options.get("dt_bias"), options.get("dt_softplus"))
  return {"x": x[0], "o": dt[0][..., None] * a, "e": b[0], "s": c[0], "i": (dt * x)[0]}


def run(mixer, x):
  """(output, the streams that reach the op) of a mixer, in float64 on the plain ops."""
  recorded = {}

  def recording(name, function):
    def call(*arguments, **options):
      recorded.update(streams(name, arguments, options))
      return function(*arguments, **options)

    call.init_state = function.init_state
    return call

  modules = [
    sys.modules[cls.__module__] for cls in type(mixer).__mro__ if "mixers" in cls.__module__
  ]
  plain = {name: recording(name, function) for name, function in plain_ops.PLAIN.items()}
  with plain_ops.in_place_of(*modules, functions=plain):
    out, _ = mixer(jnp.asarray(x))
  return np.asarray(out), recorded


def random_parameters(cls, dim, options):
  """(graph, parameters) of a mixer, random and float64."""
  dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
  graph, params = split(jax.eval_shape(lambda: cls(dim, **options, **dtypes, rngs=nnx.Rngs(0))))
  random = np.random.default_rng(0)
  return graph, jax.tree.map(lambda p: 0.5 * random.normal(size=p.shape), params)


def same(row: Row) -> dict[str, float]:
  """The relative error of each shared stream, and of the layer's output if that is shared."""
  with jax.enable_x64():
    graph, theirs = random_parameters(MIXERS[row.mixer], D, row.options)
    theirs = {**theirs, **row.change(theirs)}
    x = np.random.default_rng(1).normal(size=(1, T, D))
    want, recorded = run(nnx.merge(graph, theirs), x)
    ours = dict(row.parameters(recorded, theirs))
    x = row.inputs(x, recorded)
    e = ours["e_weight"].T if "e_weight" in ours else ours.get("e_proj", {"kernel": x[0]})["kernel"]
    sizes = {"state_dim": e.shape[1]} | row.code_options
    graph, params = random_parameters(LCSM, x.shape[2], {"code": row.code} | sizes)
    assert ours.keys() <= params.keys()
    got, mine = run(nnx.merge(graph, {**params, **ours}), x)
  layer = row.shared == "layer"
  names = sorted(set(recorded) & set(mine) - {"x"}) if layer else row.shared.split()
  norm = lambda z: float(np.linalg.norm(z))
  errors = {n: norm(mine[n] - recorded[n]) / max(norm(recorded[n]), 1e-30) for n in names}
  return errors | ({"layer": relative_error(got, want)} if layer else {})


# Sizes, which a table of codes need not say.
_SIZES = ("num_heads", "state_dim", "head_dim", "gate_rank", "max_length", "expand_v")


def table() -> str:
  """The rows as Markdown."""
  lines = ["| code | mixer | options | the same | instead, or further, the mixer has |"]
  lines.append("|---|---|---|---|---|")
  for row in ROWS:
    ours = [f"`{n}={v!r}` of the code" for n, v in row.code_options.items() if n not in _SIZES]
    theirs = [f"`{n}={v!r}`" for n, v in row.options.items() if n not in _SIZES]
    shared = "the whole layer" if row.shared == "layer" else ", ".join(row.shared.split())
    cells = (
      f"`{row.code}`",
      f"`{row.mixer}`",
      ", ".join(theirs + ours),
      shared,
      row.adds or "nothing",
    )
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines)
