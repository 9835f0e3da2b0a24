"""Cases of `benchmarks.kernels`: forms of linear attention, their inputs, their reference.

Importable without a device: nothing here runs before it is called.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.mixers.common.initializers import channel_decay
from lnssm_jax.ops.linear_attention.types import LinearAttentionState

# What is compared with the reference: the last batch row and heads, and value columns all over.
ROWS, HEADS, COLUMNS = 1, 2, 16


class Shape(NamedTuple):
  """Axes of q, k and v. T = 1 is one step of decoding."""

  B: int
  T: int
  H: int
  K: int
  V: int

  @classmethod
  def parse(cls, text: str) -> "Shape":
    return cls(*(int(number) for number in text.split(",")))

  def __str__(self):
    return " ".join(f"{name}{size}" for name, size in zip(self._fields, self, strict=True))


class Case(NamedTuple):
  """One form. `decay` names the axes of `log_decay`, as the ranks of `ops.linear_attention` do."""

  decay: str | None = None
  learned: bool = True  # the decay
  normalize: bool = False
  bonus: bool = False
  initial_state: bool = False
  ordered: bool = False  # a decay "HK" as the LNSSM starts with it; otherwise mixed among channels
  decodes: bool = False  # also measured at T = 1, from a state that is updated in place
  documents: bool = False  # of about 500 tokens; else a row is one


CASES = {
  "scalar-constant": Case("H", learned=False),
  "scalar-step": Case("BTH"),
  "scalar-step-state": Case("BTH", initial_state=True),
  "channel-constant-lnssm": Case("HK", normalize=True, ordered=True, decodes=True),
  "channel-constant-normalized": Case("HK", normalize=True, decodes=True),
  "channel-step": Case("BTHK", decodes=True),
  "channel-step-bonus": Case("BTHK", bonus=True),
  "no-decay": Case(),
}

SHAPES = (
  Shape(8, 2048, 16, 128, 128),
  Shape(1, 8192, 32, 128, 128),
  Shape(1, 32768, 16, 128, 128),
  Shape(8, 2048, 32, 64, 64),
  Shape(1, 1, 16, 128, 128),
  Shape(64, 1, 16, 128, 128),
  Shape(512, 1, 16, 128, 128),
)


def document_ids(rows: int, length: int) -> np.ndarray:
  """Documents of about 500 tokens; the last rows are alike for every number of rows."""
  starts = [np.random.default_rng(rows - 1 - n).random(length) < 1 / 500 for n in range(rows)]
  return np.cumsum(starts, axis=1).astype(np.int32)


def retention_decay(H: int):
  """RetNet's constants: log(1 - 2^-5), log(1 - 2^-6), ..."""
  return np.log1p(-(2.0 ** (-5.0 - np.arange(H)))).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def make_inputs(case: Case, shape: Shape, seed) -> dict[str, jax.Array]:
  """Arrays by name, as `call` takes them; bf16, but decays and states float32."""
  B, T, H, K, V = shape
  keys = iter(jax.random.split(jax.random.key(seed), 8))
  normal = lambda *axes: jax.random.normal(next(keys), axes)
  q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
  if case.normalize:  # features of the LNSSM are positive
    q, k = jnp.exp(q / 2), jnp.exp(k / 2)
  else:
    k = k * K**-0.5
  arrays = {name: x.astype(jnp.bfloat16) for name, x in (("q", q), ("k", k), ("v", v))}
  if case.decay == "H":
    arrays["log_decay"] = jnp.asarray(retention_decay(H))
  elif case.ordered:  # a layer in the middle of a model: slow heads first, then fast ones
    decay = -jnp.exp(channel_decay(H * K, layer=1, num_layers=3).reshape(H, K))
    # Slow heads last, which are checked: gradients of queries are small where all channels forget.
    arrays["log_decay"] = jnp.roll(decay, -HEADS, axis=0)
  elif case.decay == "HK":  # from 1e-3 to 20 per token, slow and fast channels in every head
    arrays["log_decay"] = -jnp.exp(jax.random.uniform(next(keys), (H, K), minval=-7, maxval=3))
  elif case.decay == "BTH":
    arrays["log_decay"] = jax.nn.log_sigmoid(normal(B, T, H) + 2)
  elif case.decay == "BTHK":
    arrays["log_decay"] = jax.nn.log_sigmoid(normal(B, T, H, K)) / 16
  if case.bonus:
    arrays["bonus"] = normal(H, K)
  if case.initial_state or T == 1:
    arrays["kv"] = normal(B, H, K, V)
    if case.normalize:
      arrays["key_sum"] = jnp.exp(normal(B, H, K))
  return arrays


def call(case: Case, arrays, implementation: str):
  """(out, state) of `ops.linear_attention`."""
  state = None
  if "kv" in arrays:
    state = LinearAttentionState(arrays["kv"], arrays.get("key_sum"))
  return ops.linear_attention(
    *(arrays[name] for name in "qkv"),
    log_decay=arrays.get("log_decay"),
    bonus=arrays.get("bonus"),
    normalize=case.normalize,
    scale=1.0 if case.normalize else arrays["q"].shape[-1] ** -0.5,
    initial_state=state,
    segment_ids=document_ids(*arrays["q"].shape[:2]) if case.documents else None,
    implementation=implementation,
  )


def gradients(case: Case, arrays, cotangent, implementation: str):
  """(out, gradients by name) for a gradient of `out`; of all arrays but constants."""
  fixed = {n: x for n, x in arrays.items() if n == "log_decay" and not case.learned}
  free = {n: x for n, x in arrays.items() if n not in fixed}
  out, pull = jax.vjp(lambda x: call(case, x | fixed, implementation)[0], free)
  return out, pull(cotangent.astype(out.dtype))[0]


def only_corner(cotangent):
  """Zero outside the corner's rows and columns, so that sums over them are the corner's sums."""
  B, _, _, V = cotangent.shape
  row, column = jnp.arange(B)[:, None, None, None] >= B - ROWS, jnp.arange(V) % _stride(V) == 0
  return jnp.where(row & column, cotangent, 0)


def _stride(V: int) -> int:
  return max(1, V // COLUMNS)


def part(case: Case, name: str, x):
  """The compared part of an array of this name, of any library."""
  heads, rows = slice(-HEADS, None), slice(-ROWS, None)
  if name in ("v", "out", "kv"):
    x = x[..., :: _stride(x.shape[-1])]
  if name in ("kv", "key_sum"):
    return x[rows, heads]
  if name == "bonus" or (name == "log_decay" and case.decay in ("H", "HK")):
    return x[heads]
  return x[rows, :, heads]


def corner(case: Case, name: str, x) -> np.ndarray:
  """`part` in float64."""
  return np.asarray(part(case, name, x)).astype(np.float64)


def reference(case: Case, arrays, cotangent, steps: int = 256):
  """out, final state and gradients in float64, one step at a time, of corners of the inputs.

  Segments of `steps` are computed again for the gradient, so that 32768 steps fit into memory.
  """
  cpu = jax.local_devices(backend="cpu")[0]
  with jax.enable_x64(True), jax.default_device(cpu):
    arrays = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
    run = jax.jit(functools.partial(_reference, case, steps))
    return jax.tree.map(np.asarray, run(arrays, jnp.asarray(cotangent, jnp.float64)))


def _reference(case, steps, arrays, cotangent):
  B, T, H, K = arrays["q"].shape
  steps = T if T % steps or case.documents else steps
  V = arrays["v"].shape[-1]
  long = [n for n in ("q", "k", "v") if n in arrays]
  long += ["log_decay"] if case.decay in ("BTH", "BTHK") else []

  def whole(arrays):
    cut = lambda x: jnp.moveaxis(x.reshape(B, T // steps, steps, *x.shape[2:]), 1, 0)
    constants = {n: x for n, x in arrays.items() if n in ("log_decay", "bonus") and n not in long}
    state = {
      "kv": arrays.get("kv", jnp.zeros((B, H, K, V))),
      "key_sum": arrays.get("key_sum", jnp.zeros((B, H, K))),
    }

    @jax.checkpoint
    def segment(state, xs):
      out, new = call(case, xs | constants | state, "reference")
      return {"kv": new.kv, "key_sum": new.key_sum if case.normalize else state["key_sum"]}, out

    state, out = jax.lax.scan(segment, state, {n: cut(arrays[n]) for n in long})
    return jnp.moveaxis(out, 0, 1).reshape(B, T, H, V), state

  (out, state), pull = jax.vjp(whole, arrays)
  (gradient,) = pull((cotangent, jax.tree.map(jnp.zeros_like, state)))
  return {"out": out, **state} | {f"d {name}": x for name, x in gradient.items()}


def error(got, want) -> float:
  """||got - want|| / ||want||."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  norm = np.linalg.norm(want)
  return float(np.linalg.norm(got - want) / (norm if norm > 0 else 1.0))


def bytes_moved(arrays, out, gradient: bool) -> int:
  """Every argument and the result once; with `gradient` the gradients of all of them, too."""
  given = sum(x.nbytes for x in arrays.values()) + out.nbytes
  return 2 * given if gradient else given
