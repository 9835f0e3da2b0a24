"""Speed of the ops' kernels on a GPU, next to XLA's forms.

    python -m benchmarks.scan_kernels --out docs/scan_kernels.csv            # all cases, minutes
    python -m benchmarks.scan_kernels --only channel-step --sizes B=1,T=32768
    python -m benchmarks.scan_kernels --only "attention documents" --implementations pallas

Linear attention by the form of its decay ("scalar-constant" to "no-decay"), then the other ops;
next to the library that has the same op where it is installed: flash-linear-attention, mamba-ssm
for the selective scan, or, in this process, jax-linear-attention for softmax attention and the
delta rule. All have the same inputs.

A time is printed only next to an error within the limit, of a corner of the output, of the state of
linear attention and of every gradient against the float64 reference. Times are medians over groups
of back-to-back calls that take turns among three sets of inputs. The floor moves every argument and
result once (with gradients: arguments, their gradients, the output and its cotangent) at the speed
of a large copy. Single steps are those of `benchmarks.decode`.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import csv_rows, scan_peers
from benchmarks.timing import compiled, copy_bandwidth, milliseconds
from lnssm_jax import ops
from lnssm_jax.mixers.common.initializers import channel_decay

# Of an error, where all inputs are float32 and where some are bfloat16: products of these give 2e-3
# to 7e-3, whoever computes them.
LIMITS = {False: 1e-4, True: 0.02}
SETS = 3  # of inputs, so that the cache does not hold the next ones
# The last of these axes are compared, and value columns all over; no other depends on them.
CORNER = {"B": 1, "D": 16, "H": 2}
COLUMNS = 16
FIELDS = (
  "scan", "sizes", "who", "forward_ms", "both_ms", "floor_ms", "floor_share", "both_floor_share",
  "compile_s", "error_out", "error_gradient", "note",
)  # fmt: skip

RIVAL = "jax-linear-attention"  # an implementation, for the cases that have it

Sizes = dict[str, int]
Arrays = dict[str, jax.Array]


class Case(NamedTuple):
  """A scan, how its arguments are drawn, and a size that models have."""

  call: Callable[..., Any]  # with arrays by name and `implementation`
  axes: Mapping[str, str]  # of each argument
  draw: Callable[[Callable[..., jax.Array], Sizes], Arrays]  # from a source of normal numbers
  sizes: Sizes
  out: str = "BTD"  # axes of the result
  rival: Callable[..., jax.Array] | None = None  # the same of jax-linear-attention, `out` alone
  documents: bool = False  # of about 500 tokens; else a row is one
  states: tuple[str, ...] = ()  # of the state that is returned: what is compared
  constants: tuple[str, ...] = ()  # arguments without a gradient


def document_ids(rows: int, length: int) -> np.ndarray:
  """Documents of about 500 tokens; the last rows are alike for every number of rows."""
  starts = [np.random.default_rng(rows - 1 - n).random(length) < 1 / 500 for n in range(rows)]
  return np.cumsum(starts, axis=1).astype(np.int32)


def retention_decay(H: int):
  """RetNet's constants: log(1 - 2^-5), log(1 - 2^-6), ..."""
  return np.log1p(-(2.0 ** (-5.0 - np.arange(H)))).astype(np.float32)


def _linear(decay, normalize, state, bonus, ordered, normal, n):
  steps = lambda last: normal(n["B"], n["T"], n["H"], n[last])
  q, k, v = steps("K"), steps("K"), steps("V")
  if normalize:  # features of the LNSSM are positive
    q, k = jnp.exp(q / 2), jnp.exp(k / 2)
  else:
    k = k * n["K"] ** -0.5
  arrays = {name: x.astype(jnp.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}
  heads = n["H"], n["K"]
  if decay == "H":
    arrays["log_decay"] = jnp.asarray(retention_decay(n["H"]))
  elif ordered:  # a layer in the middle of a model: slow heads first, then fast ones
    rates = jnp.exp(channel_decay(heads[0] * heads[1], layer=1, num_layers=3).reshape(heads))
    # Slow heads last, which are checked: gradients of queries are small where all channels forget.
    arrays["log_decay"] = jnp.roll(-rates, -CORNER["H"], axis=0)
  elif decay == "HK":  # from 1e-3 to 20 per token, slow and fast channels in every head
    arrays["log_decay"] = -jnp.exp(10 * jax.nn.sigmoid(2 * normal(*heads)) - 7)
  elif decay == "BTH":
    arrays["log_decay"] = jax.nn.log_sigmoid(normal(n["B"], n["T"], n["H"]) + 2)
  elif decay == "BTHK":
    arrays["log_decay"] = jax.nn.log_sigmoid(steps("K")) / 16
  if bonus:
    arrays["bonus"] = normal(*heads)
  if state:
    arrays["kv"] = normal(n["B"], *heads, n["V"])
    if normalize:
      arrays["key_sum"] = jnp.exp(normal(n["B"], *heads))
  return arrays


def _attend_linearly(q, k, v, *, normalize, kv=None, key_sum=None, initial_state=None, **more):
  state = initial_state if kv is None else ops.LinearAttentionState(kv, key_sum)
  scale = 1.0 if normalize else q.shape[-1] ** -0.5
  return ops.linear_attention(
    q, k, v, normalize=normalize, scale=scale, initial_state=state, **more
  )  # fmt: skip


def _linear_case(
  decay: str = "", *, normalize=False, state=False, bonus=False, ordered=False, constants=()
) -> Case:
  """A form of linear attention; `decay` names the axes of `log_decay`."""
  axes = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "kv": "BHKV", "key_sum": "BHK", "bonus": "HK"}
  return Case(
    functools.partial(_attend_linearly, normalize=normalize),
    axes | {"log_decay": decay},
    functools.partial(_linear, decay, normalize, state, bonus, ordered),
    {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128},
    "BTHV",
    states=("kv", "key_sum") if normalize else ("kv",),
    constants=constants,
  )


def _diagonal(dtype, normal, n):
  decay = jax.nn.sigmoid(normal(n["B"], n["T"], n["D"]) + 2)
  return {"decay": decay.astype(dtype), "x": normal(n["B"], n["T"], n["D"]).astype(dtype)}


def _complex(normal, n):
  radius = jax.nn.sigmoid(normal(n["B"], n["T"], n["D"]) + 2)
  angle = normal(n["B"], n["T"], n["D"])
  x = [normal(n["B"], n["T"], n["D"]) for _ in range(2)]
  return {"decay": jax.lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle)),
          "x": jax.lax.complex(*x)}  # fmt: skip


def _convolution(normal, n):
  x = normal(n["B"], n["T"], n["D"]).astype(jnp.bfloat16)
  return {"x": x, "kernel": normal(n["W"], n["D"]) / 2, "bias": normal(n["D"])}


def _silu_convolution(x, kernel, bias, *, implementation, segment_ids=None):
  """The short convolution as the Mamba block has it; the reference is XLA's form in float64."""
  form = "reference" if implementation == "chunked" else implementation
  how = {"activation": "silu", "segment_ids": segment_ids, "implementation": form}
  return ops.causal_conv1d(x, kernel, bias, **how)


def _wkv4(normal, n):
  steps = lambda: normal(n["B"], n["T"], n["D"]).astype(jnp.bfloat16)
  rate = jnp.exp(jnp.linspace(-5.0, 1.0, n["D"]))
  return {"k": steps(), "v": steps(), "decay_rate": rate, "bonus": normal(n["D"])}


def _selective(normal, n):
  steps = lambda last: normal(n["B"], n["T"], n[last])
  bf16 = lambda x: x.astype(jnp.bfloat16)
  a = -jnp.broadcast_to(jnp.arange(1.0, n["N"] + 1), (n["D"], n["N"]))
  return {
    "x": bf16(steps("D")), "dt": bf16(jax.nn.softplus(steps("D") - 4)), "a": a,
    "b": bf16(steps("N")), "c": bf16(steps("N")), "skip": normal(n["D"]),
  }  # fmt: skip


def _longhorn(normal, n):
  steps = lambda last: normal(n["B"], n["T"], n[last])
  bf16 = lambda x: x.astype(jnp.bfloat16)
  return {
    "x": bf16(steps("D")), "beta": bf16(jax.nn.sigmoid(steps("D"))),
    "k": bf16(steps("N")), "q": bf16(steps("N")), "skip": normal(n["D"]),
  }  # fmt: skip


def _delta(decay, normal, n):
  steps = lambda last: normal(n["B"], n["T"], n["H"], n[last])
  k = steps("K")
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  heads = lambda: normal(n["B"], n["T"], n["H"])
  arrays = {"q": steps("K") * n["K"] ** -0.5, "k": k, "v": steps("V")}
  arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
  arrays["beta"] = jax.nn.sigmoid(heads())
  if decay == "BTHK":
    return arrays | {"log_decay": jax.nn.log_sigmoid(steps("K") + 3)}
  return arrays | ({"log_decay": jax.nn.log_sigmoid(heads() + 3)} if decay else {})


def _rwkv7(normal, n):
  """As the layer has them; every rate is 1."""
  steps = lambda last="K": normal(n["B"], n["T"], n["H"], n[last])
  erase = steps()
  erase = erase / jnp.linalg.norm(erase, axis=-1, keepdims=True)
  arrays = {"q": steps(), "k": erase * jax.nn.sigmoid(steps()), "v": steps("V")}
  arrays |= {"erase_key": erase, "write_key": steps() * n["K"] ** -0.5}
  arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
  return arrays | {"log_decay": -0.6065 * jax.nn.sigmoid(steps() - 1)}


def _rwkv7_recall(*, q, k, v, **x):
  return ops.delta_rule(
    q, k, v, jnp.ones(q.shape[:3]), **x, erase_before_decay=True, scale=1.0
  )  # fmt: skip


def _rwkv7_rival(*, q, k, v, log_decay, erase_key, write_key, **x):
  from jla import ops as rival

  return rival.linear_attention(
    "rwkv7", q, write_key, v, w=log_decay, a=-erase_key, b=k, scale=1.0, lower_bound=-0.61, **x
  )[0]  # fmt: skip


def _attention(normal, n):
  steps = lambda last: normal(n["B"], n["T"], n["H"], n[last]).astype(jnp.bfloat16)
  return {"q": steps("K"), "k": steps("K"), "v": steps("V")}


def _attend_rival(q, k, v, *, segment_ids=None, window=None):
  from jla.ops.mosaic_gpu.attention import flash_attention

  return flash_attention(q, k, v, segment_ids=segment_ids, sliding_window=window)


def _attention_case(documents: bool, window: int | None = None) -> Case:
  return Case(
    functools.partial(ops.attention, window=window),
    {"q": "BTHK", "k": "BTHK", "v": "BTHV"},
    _attention,
    {"B": 8, "T": 2048, "H": 16, "K": 128, "V": 128},
    "BTHV",
    functools.partial(_attend_rival, window=window),
    documents,
  )


def _recall_rival(*, q, k, v, log_decay=None, **x):
  from jla import ops as rival

  gate = {} if log_decay is None else {"g": log_decay}
  name = {3: "gated_deltanet", 4: "kda"}[log_decay.ndim] if gate else "deltanet"
  return rival.linear_attention(name, q, k, v, **x, **gate, scale=1.0)[0]


def _delta_case(decay: str = "", documents: bool = False) -> Case:
  axes = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTH"}
  return Case(
    functools.partial(ops.delta_rule, scale=1.0),  # the queries are scaled
    axes | ({"log_decay": decay} if decay else {}),
    functools.partial(_delta, decay),
    {"B": 1, "T": 8192, "H": 32, "K": 128, "V": 128},
    "BTHV",
    _recall_rival,
    documents,
  )


_WIDE = {"B": 8, "T": 2048, "D": 2048}
_STATES = {"B": 8, "T": 8192, "D": 4096, "N": 16}
_SELECTIVE = {"x": "BTD", "dt": "BTD", "a": "DN", "b": "BTN", "c": "BTN", "skip": "D"}
_LONGHORN = {"x": "BTD", "beta": "BTD", "k": "BTN", "q": "BTN", "skip": "D"}
_DIAGONAL = {"decay": "BTD", "x": "BTD"}

LINEAR_ATTENTION = {
  "scalar-constant": _linear_case("H", constants=("log_decay",)),
  "scalar-step": _linear_case("BTH"),
  "scalar-step-state": _linear_case("BTH", state=True),
  "channel-constant-lnssm": _linear_case("HK", normalize=True, ordered=True),
  "channel-constant-normalized": _linear_case("HK", normalize=True),
  "channel-step": _linear_case("BTHK"),
  "channel-step-bonus": _linear_case("BTHK", bonus=True),
  "no-decay": _linear_case(),
}
CASES = LINEAR_ATTENTION | {
  "diagonal_scan": Case(
    ops.diagonal_scan, _DIAGONAL, functools.partial(_diagonal, jnp.float32), _WIDE
  ),
  "diagonal_scan bfloat16": Case(
    ops.diagonal_scan, _DIAGONAL, functools.partial(_diagonal, jnp.bfloat16), _WIDE
  ),
  "diagonal_scan reverse": Case(
    functools.partial(ops.diagonal_scan, reverse=True),
    _DIAGONAL,
    functools.partial(_diagonal, jnp.float32),
    _WIDE,
  ),
  "diagonal_scan complex": Case(ops.diagonal_scan, _DIAGONAL, _complex, _WIDE),
  "wkv4": Case(
    ops.wkv4, {"k": "BTD", "v": "BTD", "decay_rate": "D", "bonus": "D"}, _wkv4, _WIDE
  ),
  "selective_scan": Case(ops.selective_scan, _SELECTIVE, _selective, _STATES),
  "longhorn_scan": Case(ops.longhorn_scan, _LONGHORN, _longhorn, _STATES),
  "delta_rule": _delta_case(),
  "delta_rule gated": _delta_case("BTH"),
  "delta_rule gated documents": _delta_case("BTH", documents=True),
  "kda": _delta_case("BTHK"),
  "rwkv7": Case(
    _rwkv7_recall,
    {"q": "BTHK", "k": "BTHK", "v": "BTHV", "log_decay": "BTHK"}
    | {"erase_key": "BTHK", "write_key": "BTHK"},
    _rwkv7,
    {"B": 8, "T": 2048, "H": 32, "K": 64, "V": 64},
    "BTHV",
    _rwkv7_rival,
  ),
  "causal_conv1d": Case(
    _silu_convolution, {"x": "BTD", "kernel": "WD", "bias": "D"}, _convolution,
    {"B": 8, "T": 2048, "D": 4096, "W": 4},
  ),
  "attention documents": _attention_case(True),
  "attention documents window": _attention_case(True, 1024),
  "attention": _attention_case(False),
}  # fmt: skip


def make_inputs(case: Case, sizes: Sizes, seed: int) -> Arrays:
  """Arguments by name, and "cotangent" of the result."""

  @jax.jit
  def make(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 16))
    normal = lambda *shape: jax.random.normal(next(keys), shape)
    arrays = case.draw(normal, sizes)
    out = normal(*(sizes[axis] for axis in case.out))
    first = next(iter(arrays))
    dtype = arrays["v" if "v" in arrays else first].dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
      out = jax.lax.complex(out, normal(*out.shape))
    return arrays | {"cotangent": out.astype(dtype)}

  return make(seed)


def _inside(axes: str, x):
  """Where the corner of an array is."""
  columns = slice(None, None, max(1, x.shape[axes.find("V")] // COLUMNS))
  part = {axis: slice(-size, None) for axis, size in CORNER.items()} | {"V": columns}
  return tuple(part.get(axis, slice(None)) for axis in axes)


def corner(axes: str, x):
  """The part of an array that is compared."""
  return x[_inside(axes, x)]


def only_corner(axes: str, x):
  """Zero outside the corner, so that sums over rows and channels are the corner's sums."""
  inside = _inside(axes, x)
  return jnp.zeros_like(x).at[inside].set(x[inside])


def results(case: Case, arrays: Arrays, implementation: str) -> Arrays:
  """ "out", and `states` by name."""
  if case.documents:
    B, T = arrays[next(name for name, axes in case.axes.items() if axes[:2] == "BT")].shape[:2]
    arrays = arrays | {"segment_ids": jnp.asarray(document_ids(B, T))}
  if implementation == RIVAL:
    if case.rival is None:
      raise NotImplementedError(f"{RIVAL} is not compared here")
    return {"out": case.rival(**arrays)}
  out, *state = case.call(**arrays, implementation=implementation)
  return {"out": out} | {name: getattr(state[0], name) for name in case.states}


def forward(case: Case, arrays: Arrays, implementation: str):
  """`out` alone."""
  return results(case, arrays, implementation)["out"]


def gradients(case: Case, arrays: Arrays, cotangent, implementation: str):
  """(out, gradients by name), of all arguments but constants."""
  fixed = {name: arrays[name] for name in case.constants}
  free = {name: x for name, x in arrays.items() if name not in fixed}
  out, pull = jax.vjp(lambda x: forward(case, x | fixed, implementation), free)
  return out, pull(cotangent)[0]


def reference(case: Case, arrays: Arrays, cotangent) -> dict[str, np.ndarray]:
  """Results and gradients of the corner, step by step in float64."""
  cpu = jax.local_devices(backend="cpu")[0]
  with jax.enable_x64(True), jax.default_device(cpu):
    wide = lambda x: jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64
    part = lambda axes, x: jnp.asarray(np.asarray(corner(axes, x)), wide(x))
    small = {name: part(case.axes[name], x) for name, x in arrays.items()}

    @jax.jit
    def run(x, cotangent):
      _, gradient = gradients(case, x, cotangent, "reference")
      return results(case, x, "reference") | {f"d {name}": y for name, y in gradient.items()}

    return jax.tree.map(np.asarray, run(small, part(case.out, cotangent)))


def errors(case: Case, got: Mapping[str, jax.Array], want: Mapping[str, np.ndarray]):
  """Relative errors of the corners by name; infinite where anything is not finite."""
  found = {}
  for name, x in got.items():
    axes = case.axes.get(name.removeprefix("d "), case.out)
    part = np.asarray(corner(axes, x)).astype(want[name].dtype)
    norm = np.linalg.norm(want[name]) or 1.0
    finite = bool(jnp.isfinite(x).all())
    found[name] = float(np.linalg.norm(part - want[name]) / norm) if finite else float("inf")
  return found


def worst(found: Mapping[str, float]) -> str:
  """The largest error and whose it is; NaN counts as the largest."""
  name = max(found, key=lambda n: np.nan_to_num(found[n], nan=np.inf))
  return f"{found[name]:.1e} {name}"


def right(arrays: Arrays, found: Mapping[str, float]) -> bool:
  """Whether all errors are within the limit for these inputs; NaN is not."""
  limit = LIMITS[any(x.dtype == jnp.bfloat16 for x in arrays.values())]
  return all(error <= limit for error in found.values())


def measure(case: Case, sets: list[Arrays], want, who: str, calls: int, groups: int) -> dict:
  """Columns of one implementation."""
  cotangents = [arrays["cotangent"] for arrays in sets]
  inputs = [{n: x for n, x in s.items() if n != "cotangent"} for s in sets]
  program, seconds = compiled(lambda x: results(case, x, who), inputs[0])
  found = errors(case, program(inputs[0]), want)
  columns = {"error_out": worst(found), "forward_ms": "WRONG", "compile_s": f"{seconds:.1f}"}
  if right(inputs[0], found):
    columns["forward_ms"] = milliseconds(program, [(x,) for x in inputs], calls, groups)
  both = lambda x, w: gradients(case, x, w, who)
  program, took = compiled(both, inputs[0], cotangents[0])
  _, gradient = program(inputs[0], only_corner(case.out, cotangents[0]))
  found = errors(case, {f"d {n}": x for n, x in gradient.items()}, want)
  columns |= {"error_gradient": worst(found), "both_ms": "WRONG"}
  columns["compile_s"] = f"{seconds + took:.1f}"
  if right(inputs[0], found):
    arguments = list(zip(inputs, cotangents, strict=True))
    columns["both_ms"] = milliseconds(program, arguments, calls, groups)
  return columns


def measure_peer(name: str, case: Case, arrays: Arrays, want) -> dict:
  """Columns of another library on the same numbers."""
  if reason := scan_peers.missing(name):
    return {"note": reason}
  if without := scan_peers.PEERS[name].without:
    arrays = {n: x for n, x in arrays.items() if n not in without}
    given = {n: x for n, x in arrays.items() if n != "cotangent"}
    want = reference(case, given, arrays["cotangent"])
  inside = only_corner(case.out, arrays["cotangent"])
  numbers = {n: np.asarray(x) for n, x in (arrays | {"inside": inside}).items()}
  with tempfile.TemporaryDirectory() as folder:
    row = scan_peers.measure(name, numbers, Path(folder))
  out = {"out": row["results"].pop("out")}
  found, of_gradient = errors(case, out, want), errors(case, row["results"], want)
  columns = {"error_out": worst(found), "error_gradient": worst(of_gradient)}
  columns["note"] = scan_peers.PEERS[name].op
  columns["forward_ms"] = row["forward_ms"] if right(arrays, found) else "WRONG"
  return columns | {"both_ms": row["both_ms"] if right(arrays, of_gradient) else "WRONG"}


def rows_of(
  name: str,
  case: Case,
  sizes: Sizes,
  implementations,
  bandwidth: float,
  options,
  peers: bool = True,
):
  """Yields the rows of one case."""
  sets = [make_inputs(case, sizes, seed) for seed in range(SETS)]
  given = sum(x.nbytes for n, x in sets[0].items() if n != "cotangent")
  out = sets[0]["cotangent"].nbytes
  floors = [1e3 * moved / bandwidth for moved in (given + out, 2 * (given + out))]
  arrays = {n: x for n, x in sets[0].items() if n != "cotangent"}
  want = reference(case, arrays, sets[0]["cotangent"])
  peer = [scan_peers.PEERS[name].library] if peers and name in scan_peers.PEERS else []
  for who in (*implementations, *peer):
    row: dict[str, Any] = {"scan": name, "sizes": " ".join(f"{a}{n}" for a, n in sizes.items())}
    row |= {"who": who, "floor_ms": f"{floors[0]:.3f}"}
    try:
      if who in peer:
        row |= measure_peer(name, case, sets[0], want)
      else:
        row |= measure(case, sets, want, who, **options)
    except NotImplementedError as reason:
      row["note"] = str(reason)
    except Exception as reason:  # out of memory, a compiler's error: the other rows go on
      row["note"] = f"{type(reason).__name__}: {reason}"
    shares = ("forward_ms", "floor_share"), ("both_ms", "both_floor_share")
    for (of, share), floor in zip(shares, floors, strict=True):
      if isinstance(row.get(of), float):
        row[share] = f"{floor / row[of]:.2f}"
        row[of] = f"{row[of]:.4f}"
    row["note"] = " ".join(row.get("note", "").split())[:300]
    yield {field: row.get(field, "") for field in FIELDS}


def parse_sizes(text: str) -> Sizes:
  """`B=1,T=8192` as a dictionary."""
  pairs = (part.split("=") for part in text.split(","))
  return {axis: int(number) for axis, number in pairs}


def main(arguments=None):
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
  parser.add_argument("--sizes", type=parse_sizes, default={}, metavar="B=1,T=8192",
                      help="other sizes of these axes")  # fmt: skip
  parser.add_argument("--implementations", nargs="+", default=["pallas", "chunked"])
  parser.add_argument("--documents", action="store_true", help="time each case with documents too")
  parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True,
                      help="measure other libraries too, where they are installed")  # fmt: skip
  parser.add_argument("--calls", type=int, default=20, help="calls in a timed group")
  parser.add_argument("--groups", type=int, default=7)
  parser.add_argument("--copy-mib", type=int, default=2048, help="size of the copy of the floor")
  parser.add_argument("--out", type=Path, help="a CSV file")
  args = parser.parse_args(arguments)
  options = {"calls": args.calls, "groups": args.groups}
  bandwidth = copy_bandwidth(args.copy_mib, **options)
  print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}")
  print(f"copy: {bandwidth / 1e12:.3f} TB/s", "  ".join(FIELDS), sep="\n", flush=True)
  rows = []
  for name in args.only:
    case = CASES[name]
    sizes = {axis: args.sizes.get(axis, size) for axis, size in case.sizes.items()}
    cases = {name: case}
    if args.documents and not case.documents:
      cases[f"{name} documents"] = case._replace(documents=True)
    for pair in cases.items():
      for row in rows_of(*pair, sizes, args.implementations, bandwidth, options, args.peers):
        csv_rows.add(rows, row, FIELDS, args.out)
  return rows


if __name__ == "__main__":
  main()
