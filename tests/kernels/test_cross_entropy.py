"""The kernels of the cross-entropy, interpreted and lowered for CUDA.

Errors are those against float64; tests/train/test_loss.py compares XLA's form with the definition.
"""

import dataclasses
import functools
from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType

from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.cross_entropy import pallas
from lnssm_jax.ops.cross_entropy.api import cross_entropy
from lnssm_jax.ops.cross_entropy.reference import reference
from lnssm_jax.ops.cross_entropy.types import CrossEntropy, Inputs, Options
from pallas_kernels.core import device
from pallas_kernels.cross_entropy import config
from pallas_kernels.cross_entropy.config import AmpereConfig, KernelConfig
from tests.kernels.lowered import (
  DATA,
  REPLICATED,
  assert_shard_map_keeps_shapes,
  kernels_in,
  kernels_traced,
)
from tests.ops.contract import relative_error
from train.step.loss import next_token_loss

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
ROUNDING = float(jnp.finfo(F32).eps)
SMALL = KernelConfig(slots=3, chunk=8)  # of 1024 logits


@dataclass(frozen=True, kw_only=True)
class Case:
  """One set of arguments; a `config` of None is that of the table."""

  V: int
  vocab_size: int
  B: int = 1
  T: int = 7
  dtype: jnp.dtype | None = BF16
  logit_penalty: float = 0.0
  z_loss: float = 0.0
  config: KernelConfig | AmpereConfig | None = SMALL

  def options(self):
    return Options(self.vocab_size, self.logit_penalty, self.z_loss, self.dtype, None)


def drawn(case, seed=0):
  """Positions of weight 0, bad targets among them; ties of the largest logits; large logits."""
  rng = np.random.default_rng(seed)
  shape = (case.B, case.T)
  logits = (3 * rng.normal(size=(*shape, case.V))).astype(np.float32)
  targets = rng.integers(0, case.vocab_size, shape).astype(np.int32)
  weights = rng.choice(np.float32([0.5, 1, 2]), shape)
  flat = logits.reshape(-1, case.V)
  flat[0, [1, case.vocab_size - 1]] = 20.0  # ties of different consumers and chunks
  flat[1] += 1e4
  flat[2, : case.vocab_size] = -50.0  # all are tied, and less than the zeros of a padded column
  flat[2, case.vocab_size :] = 0.0
  targets.reshape(-1)[:3] = 1, case.vocab_size - 1, case.vocab_size // 2
  weights.reshape(-1)[3] = 0
  targets.reshape(-1)[3] = -(2**31)
  return Inputs(*map(jnp.asarray, (logits, targets, weights)))


def expected(case, inputs):
  """The fields of `CrossEntropy` in float64; without the padded columns."""
  z, targets, weights = (np.asarray(x) for x in inputs)
  z, w = z[..., : case.vocab_size].astype(np.float64), weights.astype(np.float64)
  largest = z.max(-1)
  p = np.exp(z - largest[..., None])
  log_sum = largest + np.log(p.sum(-1))
  p /= p.sum(-1, keepdims=True)
  onehot = np.arange(case.vocab_size) == targets[..., None]
  good = (targets >= 0) & (targets < case.vocab_size)
  nll = np.where(good, log_sum - (z * onehot).sum(-1), np.nan)
  ties = z == largest[..., None]
  d = p * (1 + 2 * case.z_loss * log_sum)[..., None] - onehot
  d += ties * (case.logit_penalty * largest / ties.sum(-1))[..., None]
  penalties = 0.5 * case.logit_penalty * largest**2 + case.z_loss * log_sum**2
  nats = np.where(w != 0, w * np.where(w != 0, nll, 0), 0)
  return CrossEntropy(nats, w * penalties, w[..., None] * d)


def check(case, got, inputs):
  """Against float64: terms within a few roundings, a bfloat16 gradient within half of one."""
  want = expected(case, inputs)
  # The float32 sum of logits of 1e4 and a logarithm: both sides of a difference are rounded.
  size = np.abs(np.asarray(inputs.logits)[..., : case.vocab_size]).max(-1)
  room = 4 * ROUNDING * np.asarray(inputs.weights) * (1 + size)
  assert np.all(np.isnan(got.nats) == np.isnan(want.nats))
  assert np.all(np.nan_to_num(np.abs(got.nats - want.nats)) <= room)
  np.testing.assert_allclose(got.penalty, want.penalty, rtol=8 * ROUNDING)
  if case.dtype is None:
    assert got.d_logits is None
    return
  assert got.d_logits.dtype == case.dtype
  d = np.asarray(got.d_logits, np.float64)
  assert not d[..., case.vocab_size :].any()
  assert not d[np.asarray(inputs.weights) == 0].any()
  limit = (0.5 if case.dtype == BF16 else 16) * float(jnp.finfo(case.dtype).eps)
  for position in np.ndindex(case.B, case.T):
    # By position: errors of one with a large gradient would hide those of the others.
    assert relative_error(d[position][: case.vocab_size], want.d_logits[position]) < limit, position


def interpreted(case, inputs):
  how = plgpu.InterpretGPUParams(detect_races=True)
  architecture = device.AMPERE if isinstance(case.config, AmpereConfig) else None
  options = {"sizes": case.config, "interpret": how, "architecture": architecture}
  return CrossEntropy(*pallas.run(inputs, case.options(), **options))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
PENALTIES = {"logit_penalty": 0.3, "z_loss": 0.2}
CASES = [
  # 21 rows: three chunks, of which the last one has 5, 4 of the first consumer and 1 of the second.
  Case(V=2688, vocab_size=2600, **PENALTIES),
  Case(V=2688, vocab_size=2600, config=KernelConfig(slots=2, chunk=8), **PENALTIES),  # loaded twice
  Case(V=2560, vocab_size=2560, dtype=F32, config=KernelConfig(slots=4, chunk=16, consumers=4)),
  Case(V=2688, vocab_size=2600, dtype=None, **PENALTIES),
  Case(V=1024, vocab_size=1000, z_loss=0.2),  # one whole chunk
  # The third chunk begins with 3 rows of the second.
  Case(V=2688, vocab_size=2600, T=4, config=AmpereConfig(chunk=8), **PENALTIES),
  slow(Case(V=2688, vocab_size=2600, dtype=None, config=AmpereConfig(chunk=8), z_loss=0.2)),
  slow(Case(V=2560, vocab_size=2560, dtype=F32, config=AmpereConfig(chunk=4))),
  slow(Case(V=896, vocab_size=800, config=AmpereConfig(), **PENALTIES)),  # 4 rows and 3 again
  slow(Case(V=512, vocab_size=500, dtype=F32, config=AmpereConfig(), logit_penalty=0.3)),
  slow(Case(V=128, vocab_size=100, dtype=F32, logit_penalty=0.3)),  # none of the second consumer
  slow(Case(V=2048, vocab_size=2048, B=2, T=5, dtype=F32, **PENALTIES)),
  slow(Case(V=2688, vocab_size=2600, config=KernelConfig(slots=5, chunk=8, consumers=1))),
  slow(Case(V=4352, vocab_size=4300, dtype=F32, config=None, **PENALTIES)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cross_entropy_kernel_matches_float64(case, monkeypatch):
  """Two CTAs have four and three positions, which share their slots."""
  monkeypatch.setattr(device, "HOPPER", dataclasses.replace(device.HOPPER, sm_count=2))
  inputs = drawn(case)
  check(case, interpreted(case, inputs), inputs)


def test_cross_entropy_kernel_with_bad_targets_gives_nan_and_no_onehot(monkeypatch):
  monkeypatch.setattr(device, "HOPPER", dataclasses.replace(device.HOPPER, sm_count=1))
  case = Case(V=256, vocab_size=200, T=6, dtype=F32)
  targets = jnp.array([[-1, 200, 255, 256, 2**31 - 1, 5]], jnp.int32)
  inputs = drawn(case)._replace(targets=targets, weights=jnp.ones((1, 6)))
  got = interpreted(case, inputs)
  assert np.isnan(got.nats).tolist() == [[True] * 5 + [False]]
  check(case, got, inputs)


def test_cross_entropy_kernel_of_weight_zero_selects_zeros(monkeypatch):
  """Logits that are not finite reach neither their own gradient nor the next position."""
  monkeypatch.setattr(device, "HOPPER", dataclasses.replace(device.HOPPER, sm_count=1))
  case = Case(V=256, vocab_size=256, T=4, dtype=F32)
  inputs = drawn(case)  # the last position has weight 0
  inputs = inputs._replace(
    logits=inputs.logits.at[0, jnp.array([1, 3])].set(jnp.nan),
    weights=inputs.weights.at[0, 1].set(0),
  )
  d = interpreted(case, inputs).d_logits
  assert not np.asarray(d[0, jnp.array([1, 3])]).any()
  assert np.isfinite(d).all()


def test_loss_with_the_kernel_matches_float64():
  """A head of 4,200 columns is padded by 24; hidden states of weight 0 are NaN."""
  B, T, D, V = 2, 3, 8, 4200
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(B, T, D))
  head = rng.normal(size=(D, V))
  targets = rng.integers(0, V, (B, T)).astype(np.int32)
  weights = np.float32([[1, 0, 2], [0.5, 1, 0]])
  case = Case(V=V, vocab_size=V, **PENALTIES)
  args = jnp.float32(hidden), jnp.float32(head)
  z = np.float64(args[0]) @ np.float64(args[1])
  want = expected(case, Inputs(z, targets, weights))
  dirty = jnp.where(weights[..., None] != 0, args[0], jnp.nan)

  def loss(hidden, head):
    options = {"chunk": 4, **PENALTIES, "implementation": "pallas_interpret"}
    sums = next_token_loss(hidden, head, targets, weights, **options)
    return sums.nats, sums

  (_, sums), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(dirty, args[1])
  assert abs(float(sums.nats) / want.nats.sum() - 1) < 2e-6
  assert abs(float(sums.penalty) / want.penalty.sum() - 1) < 2e-6
  d_hidden = want.d_logits @ np.float64(args[1]).T
  d_head = np.einsum("btd,btv->dv", np.float64(args[0]), want.d_logits)
  for got, exact in zip(gradients, (d_hidden, d_head), strict=True):
    assert relative_error(got, exact) < 2e-6
  assert not np.asarray(gradients[0])[weights == 0].any()
  alone = loss(dirty, args[1])[0]  # without a gradient the kernel stores none
  assert abs(float(alone) / want.nats.sum() - 1) < 2e-6


MODELS = [(4096, 32000, 32000), (4608, 50304, 50277), (1024, 128256, 128256)]


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=pytest.mark.slow), None], ids=str)
@pytest.mark.parametrize(
  ("size", "architecture"),
  [*((size, device.SM90) for size in MODELS), (MODELS[1], device.AMPERE)],
  ids=str,
)
def test_cross_entropy_kernel_lowers_for_cuda(size, architecture, dtype):
  R, V, vocab_size = size
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct(shape, dtype)
  inputs = Inputs(array(1, R, V), array(1, R, dtype=jnp.int32), array(1, R))
  options = Options(vocab_size, 1e-4, 1e-4, dtype, None)
  assert pallas.unsupported(inputs, options) is None
  run = lambda inputs: pallas.run(inputs, options, architecture=architecture)
  assert kernels_in(run, inputs) == 1


@pytest.mark.parametrize("dtype", [BF16, F32, None], ids=str)
def test_cross_entropy_kernel_fills_the_shared_memory_of_an_sm(dtype):
  """One more slot would not fit; the vocabularies of the configs are loaded once."""
  chosen = config.default(config.Shape(0 if dtype is None else dtype.itemsize))
  staged = 0 if dtype is None else 2 * chosen.chunk * config.LANES * dtype.itemsize
  sums = 2 * 3 * 4 * chosen.consumers * 4
  barriers = 8 * (2 * chosen.slots + 1)
  slot = chosen.chunk * config.LANES * 4
  used = chosen.slots * slot + staged + -(-sums // 1024) * 1024 + barriers
  assert used <= 227 * 1024 < used + slot
  assert (used, chosen.slots) == {
    BF16: (230616, 13),
    F32: (230600, 12),
    None: (230632, 14),
  }[dtype]
  assert chosen.resident(32000)
  assert chosen.resident(50304) == (dtype != F32)
  assert not chosen.resident(65536)


@pytest.mark.parametrize(
  "wrong", [{"slots": 1}, {"slots": 3, "chunk": 12}, {"slots": 3, "chunk": 512}], ids=str
)
def test_cross_entropy_kernel_config_of_wrong_sizes_raises(wrong):
  with pytest.raises(ValueError, match=r"slots=1|chunk="):
    KernelConfig(**wrong)


BY_NAME = {"implementation": "pallas"}


def abstract(B, T, D, V, dtype=BF16):
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct(shape, dtype)
  return (
    array(B, T, D, dtype=dtype),
    array(D, V),
    array(B, T, dtype=jnp.int32),
    array(B, T),
  )


def kernels_of_loss(args, gradient=True, **options):
  nats = lambda hidden, head, *rest: next_token_loss(hidden, head, *rest, **options).nats
  function = jax.grad(nats, (0, 1)) if gradient else nats
  return kernels_traced(function, *args)


@pytest.mark.parametrize(
  ("args", "options", "runs"),
  [
    (abstract(2, 512, 64, 32000), BY_NAME, True),
    (abstract(2, 512, 64, 50277), BY_NAME, True),
    (abstract(2, 512, 64, 32000, dtype=F32), BY_NAME, True),
    (abstract(2, 512, 64, 32000), {}, True),
    (abstract(2, 512, 64, 50277), {}, True),
    (abstract(2, 512, 64, 4000), {}, False),
    (abstract(1, 128, 64, 32000), {}, False),
    (abstract(1, 128, 64, 32000), BY_NAME, True),
    (abstract(2, 512, 64, 32000), {"vocab_axis": "tensor"}, False),
    (abstract(2, 512, 64, 32000), {"implementation": "reference"}, False),
  ],
  ids=str,
)
def test_loss_on_hopper_takes_the_kernel_for_sizes_that_fill_a_gpu(args, options, runs, hopper):
  assert kernels_of_loss(args, **options) == ["cross_entropy_gradient"] * runs
  assert kernels_of_loss(args, gradient=False, **options) == ["cross_entropy"] * runs


def test_loss_of_float16_on_hopper_takes_the_kernel_without_a_gradient(hopper):
  args = abstract(2, 512, 64, 32000, dtype=jnp.float16)
  with pytest.raises(NotImplementedError, match="gradient has dtype float16"):
    kernels_of_loss(args, **BY_NAME)
  assert kernels_of_loss(args, gradient=False, **BY_NAME) == ["cross_entropy"]


def test_loss_elsewhere_has_no_kernel():
  assert kernels_of_loss(abstract(2, 512, 64, 32000)) == []


@pytest.mark.parametrize(
  ("options", "reason"),
  [
    ({"vocab_size": 3000}, "3072 columns for a vocabulary of 3000|next multiple of 128"),
    ({"vocab_size": 2900}, "next multiple of 128"),
    ({"gradient_dtype": jnp.float16}, "gradient has dtype float16"),
    ({"vocab_axis": "tensor"}, "sharded over 'tensor'"),
    ({"implementation": "pallas_ampere_interpret", "vocab_size": 300}, "takes 512 or more"),
  ],
)
def test_cross_entropy_kernel_names_what_it_does_not_support(options, reason):
  V = {3000: 3000, 300: 384}.get(options.get("vocab_size"), 3072)
  call = functools.partial(cross_entropy, **{"implementation": "pallas_interpret"} | options)
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct(shape, dtype)
  with pytest.raises(NotImplementedError, match=reason):
    jax.eval_shape(call, array(2, 5, V), array(2, 5, dtype=jnp.int32), array(2, 5))


def test_loss_under_shard_map_keeps_shapes():
  """The gradient of the replicated head is summed over the devices."""
  hidden, head, targets, weights = abstract(4, 6, 8, 4224)
  ones = lambda like: jnp.ones(like.shape, like.dtype)[:2]

  def nats(inputs):
    rest = ones(targets), ones(weights)
    return next_token_loss(*inputs, *rest, implementation="pallas_interpret").nats

  assert_shard_map_keeps_shapes(jax.grad(nats), (hidden, head), (DATA, REPLICATED))


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_cross_entropy_kernel_gets_the_rows_of_each_device(axis, monkeypatch):
  """With a gradient and without one, as `run` sees them."""
  seen = []

  def watched(inputs, options, interpret):
    seen.append(inputs.logits.shape)
    return reference(inputs, options)

  monkeypatch.setattr(pallas, "run", watched)
  monkeypatch.setattr(dispatch, "_on_one_device", lambda x: False)
  array = lambda *shape, dtype=F32: jax.ShapeDtypeStruct(shape, dtype)
  inputs = array(4, 9, 256), array(4, 9, dtype=jnp.int32), array(4, 9)
  mesh = AbstractMesh((2,), (axis,), axis_types=(AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(mesh):
    call = functools.partial(cross_entropy, implementation="pallas_interpret")
    whole = jax.eval_shape(functools.partial(call, gradient_dtype=BF16), *inputs)
    alone = jax.eval_shape(call, *inputs)
  assert seen == [(2, 9, 256)] * 2
  assert (whole.nats.shape, whole.d_logits.shape) == ((4, 9), (4, 9, 256))
  assert alone.d_logits is None


@pytest.mark.slow
def test_loss_of_copies_with_the_kernel_equals_that_without():
  """As `train.step.copies` maps it over parameters, with the same targets for all."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), F32)
  hidden, head = normal(2, 1, 6, 8), normal(2, 8, 4224)
  targets, weights = jnp.asarray(rng.integers(0, 4224, (1, 6))), jnp.ones((1, 6))

  def nats(hidden, head, implementation):
    loss = lambda *of: next_token_loss(*of, targets, weights, implementation=implementation).nats
    return jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1))))(hidden, head)

  got, want = (nats(hidden, head, name) for name in ("pallas_interpret", "reference"))
  chex.assert_trees_all_close(got, want, rtol=1e-6, atol=1e-5)
  assert (got[0][0] != got[0][1]).all()
