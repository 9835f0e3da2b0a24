"""Rotations by running angles: their definition, and the kernels, interpreted and lowered.

Errors are those against NumPy's float64 transcription; of gradients, those against XLA's form in
float64, which is compared with it.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.mixers.common.angles import chunk_angles
from lnssm_jax.ops.core.segments import segments_of
from lnssm_jax.ops.rotations.api import rotations
from lnssm_jax.ops.rotations.reference import angles
from lnssm_jax.ops.rotations.types import Inputs, with_whole_chunks
from pallas_kernels.core import device
from pallas_kernels.rotations import config
from pallas_kernels.rotations.config import Config, KernelConfig, Shape
from tests.kernels.lowered import kernels_in
from tests.ops import contract

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def drawn(T, H, N, A, R=1, G=1, seed=0):
  """Arrays by name, float64: the arguments of `both`, and the documents of two rows."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=(2, *shape))
  arrays = {
    "keys": normal(T, R, G, N),
    "queries": normal(T, R, G, N),
    "key_offset": normal(H, R, N)[0],
    "query_offset": normal(H, R, N)[0],
    "pace": np.pi * np.tanh(normal(T, A)),
    "step": np.exp(normal(T, H)),
    "weight": np.exp(normal(T, H)),
    "start": normal(H, A),
  }
  return arrays, np.cumsum(random.random((2, T)) < 0.1, axis=1)


def both(x, ids, dtype, implementation):
  """Keys, queries and the last angle of `drawn` arrays."""
  B, T = ids.shape
  segments = segments_of("test", ids, B, T)
  found = chunk_angles(x["pace"], x["step"], x["start"], segments, None)
  arrays = {name: x[name] for name in Inputs._fields if name in x}
  inputs = Inputs(**arrays, entering=found.entering, keep=found.keep)
  k, q = rotations(inputs, dtype=dtype, implementation=implementation)
  return {"k": k, "q": q, "last": found.last, "angle": angles(with_whole_chunks(inputs))[:, :T]}


def transcription(x, ids):
  """The same token by token."""
  (B, T, R, G, N), H, A = x["keys"].shape, x["step"].shape[-1], x["pace"].shape[-1]
  k, q = np.zeros((2, B, T, R, H, N))
  of_all = np.zeros((B, T, H, A))
  for row in range(B):
    angle = x["start"][row]
    for t in range(T):
      begins = t > 0 and ids[row, t] != ids[row, t - 1]
      angle = (0 if begins else angle) + x["step"][row, t, :, None] * x["pace"][row, t]
      turn, of_all[row, t] = np.exp(1j * angle), angle
      for out, name, factor in ((k, "key", x["weight"][row, t]), (q, "query", np.ones(H))):
        of_groups = x["keys" if name == "key" else "queries"][row, t]  # [R, G, N]
        z = np.repeat(of_groups, H // G, axis=1) + x[f"{name}_offset"].swapaxes(0, 1)
        pair = (z[..., :A] + 1j * z[..., A : 2 * A]) * turn
        parts = np.concatenate([pair.real, pair.imag, z[..., 2 * A :]], axis=-1)
        out[row, t] = factor[:, None] * parts
  return {"k": k, "q": q, "last": of_all[:, -1], "angle": of_all}


@pytest.mark.parametrize(("T", "R", "G"), [(1, 1, 1), (70, 1, 1), (37, 3, 2)])
def test_rotations_equal_their_definition(T, R, G):
  x, ids = drawn(T, 4, 12, 3, R, G)
  want = transcription(x, ids)
  with jax.enable_x64(True):
    found = jax.jit(lambda x: both(x, ids, jnp.float64, "reference"))(x)
  assert np.abs(found["angle"]).max() < 3.2
  for name in ("k", "q"):
    np.testing.assert_allclose(found[name], want[name], rtol=1e-9, atol=1e-9)
  for name in ("last", "angle"):
    turns = (np.exp(1j * np.float64(z[name])) for z in (found, want))
    np.testing.assert_allclose(*turns, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class Case:
  """Sizes, and the dtype of keys, queries and results."""

  dtype: jnp.dtype
  T: int
  H: int
  N: int
  A: int
  R: int = 1
  G: int = 1


def check(case, form, compare=contract.errors_against_reference):
  x, ids = drawn(*dataclasses.astuple(case)[1:])
  ids = jnp.asarray(ids, jnp.int32)
  dtypes = {name: case.dtype if name in ("keys", "queries") else F32 for name in x}

  def call(x, form_):
    dtype = case.dtype if form_ == form else x["step"].dtype
    found = both(x, ids, dtype, form_)
    return {name: found[name] for name in ("k", "q")}

  errors = compare(call, x, dtypes, form)
  assert len(errors) == 10
  limit = 1e-2 if case.dtype == BF16 else 3e-5  # sums of angles up to 30 round to 2e-6 each
  assert all(error < limit for error in errors.values()), errors


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CASES = [
  slow(Case(F32, 20, 4, 96, 32)),
  slow(Case(F32, 37, 8, 96, 32)),
  slow(Case(BF16, 70, 8, 128, 32)),
  slow(Case(F32, 33, 4, 128, 64)),  # all channels rotate
  slow(Case(F32, 40, 16, 64, 32)),
  slow(Case(BF16, 37, 8, 96, 32, R=4)),
  slow(Case(F32, 20, 8, 64, 32, R=3, G=2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernels_equal_the_definition(case):
  check(case, "pallas_interpret")


@pytest.mark.parametrize("R", [1, slow(2)])
def test_interpreted_kernels_in_groups_of_heads_with_chunks_that_follow_one_another(monkeypatch, R):
  """CTAs of four of eight heads that share a key, or each of two, and of two chunks each."""
  monkeypatch.setattr(config, "default", lambda shape: Config(*2 * [KernelConfig(4, 8)]))
  monkeypatch.setattr(KernelConfig, "chunks", lambda self, shape: 2)
  check(Case(F32, 20, 8, 96, 32, R), "pallas_interpret")


def test_unsupported_arguments_are_named():
  x, ids = drawn(32, 4, 64, 16)
  with pytest.raises(
    NotImplementedError, match="4 heads of 64 channels share keys, 16 pairs of which"
  ):
    both({n: jnp.asarray(z, F32) for n, z in x.items()}, ids, F32, "pallas_interpret")
  config = Config(KernelConfig(8, 4), KernelConfig(6, 4))
  with pytest.raises(ValueError, match=r"rotations: backward.heads=6 must be a multiple of 4"):
    config.check(Shape(4, 16, 24, 64, 32))


def test_kernels_are_lowered_for_cuda(monkeypatch):
  monkeypatch.setattr(device, "unsupported", lambda *_: None)
  x, ids = drawn(64, 32, 128, 32)
  x = {n: jnp.asarray(z, BF16 if n in ("keys", "queries") else F32) for n, z in x.items()}

  def loss(x):
    found = both(x, ids, BF16, None)
    return jnp.sum(found["k"].astype(F32) * found["q"].astype(F32))

  assert kernels_in(jax.grad(loss), x) == 2
