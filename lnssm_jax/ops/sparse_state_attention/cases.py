"""sparse_state_attention: its arguments and cases.

The method belongs to the case, and the implementation is that of the linear attention inside it;
"reference" is the oracle, one step at a time, whatever the method.

The partitions that a token uses do not depend on the seed: they decide which numbers are
added in which order, so that with other ones results differ by roundings. As an input they are
floating point, as all are, and have a gradient of zero.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core.cases import B, Scan, log_decay


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
  measured=lambda T, strength: Case(T, H=1, K=8, V=8, N=4, strength=strength, chunk=None),
)
