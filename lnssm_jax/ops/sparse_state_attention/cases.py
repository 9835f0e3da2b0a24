"""sparse_state_attention: its arguments and checks.

The method belongs to the case, and the implementation is that of the linear attention inside it;
"reference" is the oracle, one step at a time, whatever the method.

The partitions that a token uses do not depend on the seed: they decide which numbers are
added in which order, so that with other ones results differ by roundings. As an input they are
floating point, as all are, and have a gradient of zero.
"""

import dataclasses
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Check, Scan, log_decay


@dataclass(frozen=True)
class Case:
  """One set of arguments. `decay` names its axes: "HK", "BTSH", ..., as do `key` and `value`."""

  T: int = 37
  S: int = 2
  N: int = 5
  method: str | None = None
  decay: str | None = "BTHK"
  strength: str = "ordinary"
  key: str = "BTHK"
  value: str = "BTHV"
  read: bool = False  # gates of the queries
  rate: bool = False  # the delta rule, with keys of length 1
  segments: bool = False
  chunk: int | None = 8
  H: int = 2
  K: int = 3
  V: int = 5
  state: bool = True

  def __str__(self):
    flags = [name for name in ("read", "rate", "segments") if getattr(self, name)]
    axes = [f"{n}_{x}" for n, x in (("key", self.key), ("value", self.value)) if "S" in x]
    sizes = f"T{self.T}S{self.S}N{self.N}K{self.K}V{self.V}C{self.chunk}"
    names = [self.method or "any", self.decay or "none", self.strength]
    return "-".join([*names, *axes, *flags, sizes])


# The lengths are on both sides of a chunk boundary. Each is run by each method.
CASES = [
  Case(T=1, read=True),
  Case(T=2, decay="BTH", N=4),
  Case(T=15, S=3, N=3, decay="HK", strength="extreme", segments=True),
  Case(T=63, strength="extreme", segments=True, read=True),
  Case(T=64, S=1, N=1, decay="H", strength="weak", K=1, V=1),
  Case(T=65, key="BTSHK", decay="BTSHK", strength="extreme", segments=True, read=True),
  Case(T=65, key="BTSHK", value="BTSHV", decay="BTSH", S=1, N=9),
  Case(value="BTSHV", decay=None, segments=True, N=40),
  Case(T=1000, decay="BTH", strength="extreme", chunk=None),
  Case(T=33, decay="BTH", rate=True, segments=True, read=True),
  Case(T=33, key="BTSHK", decay="BTSH", rate=True, segments=True, state=False),
]
# "mask" is little more than linear attention: these always, the others in the sweep.
MASKED = (5,)
SLOW = (1, 2, 4, 6, 8, 10)  # of "varlen"
METHODS = ("mask", "varlen")
MANY = [
  Case(T=65, N=4, method=method, decay=decay, strength=strength, segments=segments, key=key,
       value="BTSHV" if segments else "BTHV", read=True)
  for method in METHODS
  for strength in ("weak", "ordinary", "extreme")
  for segments in (False, True)
  for key, decay in [
    ("BTHK", None),
    ("BTHK", "H"),
    ("BTHK", "HK"),
    ("BTHK", "BTHK"),
    ("BTSHK", "BTH"),
    ("BTSHK", "BTSH"),
    ("BTSHK", "BTSHK"),
  ]
]  # fmt: skip


def _by(method: str, n: int) -> Case:
  return dataclasses.replace(CASES[n], method=method)


def _draw(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
  sizes = {"B": B, "T": case.T, "S": case.S, "H": case.H, "K": case.K, "V": case.V}
  shape = lambda axes: tuple(sizes[axis] for axis in axes)
  inputs = {"q": rng.normal(size=shape("BTHK")), "k": rng.normal(size=shape(case.key))}
  inputs["v"] = rng.normal(size=shape(case.value))
  # Of five partitions or more the last one is never used.
  used = case.N - (case.N >= 5)
  order = np.random.default_rng(1).random((B, case.T, used)).argsort(-1)
  inputs["indices"] = order[..., : case.S].astype(np.float64)
  inputs["gates"] = rng.random(shape("BTS"))
  if case.read:
    inputs["read_gates"] = rng.normal(size=shape("BTS"))
  if case.rate:
    inputs["k"] /= np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    inputs["beta"] = rng.random(shape("BTH"))
  if case.decay:
    inputs["log_decay"] = log_decay(rng, shape(case.decay), case.strength)
  if case.state:
    inputs["state.kv"] = rng.normal(size=(B, case.N, *shape("HKV")))
  return inputs


def _arguments(case: Case, inputs):
  indices = jnp.round(inputs["indices"]).astype(jnp.int32)
  options = {n: inputs.get(n) for n in ("read_gates", "log_decay", "beta")}
  options |= {"num_partitions": case.N, "method": case.method, "scale": 0.7}
  return (*(inputs[n] for n in "qkv"), indices, inputs["gates"]), options


def sparse_state_attention(*args, method=None, implementation=None, **kwargs):
  """The public function; with the name "reference", the oracle."""
  method = None if implementation == "reference" else method
  return ops.sparse_state_attention(*args, method=method, implementation=implementation, **kwargs)


SPARSE_STATE_ATTENTION = Scan(
  function=sparse_state_attention,
  state=ops.SparseState,
  draw=_draw,
  arguments=_arguments,
  narrow=("q", "k", "v"),
  steps=("q", "k", "v", "indices", "gates", "read_gates", "log_decay", "beta"),
  implementations=("chunked", "reference", "associative"),
  checks=[
    *(Check(_by("varlen", n)) for n in range(len(CASES)) if n not in SLOW),
    *(Check(_by("mask", n)) for n in MASKED),
    Check(_by("varlen", 3), "associative"),
    Check(_by("varlen", 5), dtype=jnp.bfloat16),
    Check(_by("gather", 0), "reference", jnp.bfloat16),
  ],
  sweep=[
    Check(_by("gather", 5), "reference"),
    *(Check(_by("varlen", n)) for n in SLOW),
    Check(_by("mask", 5), dtype=jnp.bfloat16),
    Check(_by("varlen", 3), dtype=jnp.float16),
    *(Check(case) for case in MANY),
    *(Check(_by("mask", n)) for n in range(len(CASES)) if n not in MASKED),
    Check(_by("mask", 3), "associative"),
  ],
  small=Case(T=23, N=3, H=1, V=4, method="varlen", chunk=4, state=False),
  variants=(Case(T=23, N=3, H=1, V=4, method="mask", state=False),),
  measured=lambda T, strength: Case(T, H=1, K=8, V=8, N=4, strength=strength, chunk=None),
  isolates_documents=False,
)
