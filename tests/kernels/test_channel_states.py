"""Kernels of the selective and the Longhorn scan: splits, groups, lowering for CUDA, support.

(Values and gradients: `KERNELS` in tests/ops/cases/channel_states.py.)
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core import dispatch
from lnssm_jax.ops.longhorn_scan import pallas as longhorn
from lnssm_jax.ops.selective_scan import pallas as selective
from pallas_kernels.channel_states import config, op
from pallas_kernels.channel_states.recurrence import Keys
from tests.kernels.interpreted import documents_begin_at
from tests.kernels.lowered import (
  DATA,
  REPLICATED,
  assert_shard_map_keeps_shapes,
  kernel_launches,
  kernels_in,
  kernels_traced,
  recomputed_for_several,
  recomputed_in_a_scan,
  total,
)
from tests.ops import contract
from tests.ops.cases.channel_states import LONGHORN_SCAN, SELECTIVE_SCAN, Case

SCANS = {"selective_scan": (SELECTIVE_SCAN, selective), "longhorn_scan": (LONGHORN_SCAN, longhorn)}
F32, BF16 = jnp.float32, jnp.bfloat16
NARROW = BF16, BF16
BOTH = pytest.mark.parametrize("name", SCANS)


def dtypes_of(scan, inputs, dtypes):
  """`dtypes`: of x and keys, and of rates (dt or beta); all else is float32."""
  narrow, rates = dtypes
  own = {"dt": rates, "beta": rates}
  return {n: own.get(n, narrow) if n in scan.narrow else F32 for n in inputs}


def drawn(name, case, dtypes=(F32, F32)):
  """The arguments of the public function."""
  scan, _ = SCANS[name]
  inputs = scan.inputs(case)
  return scan.bind(case, jax.tree.map(jnp.asarray, inputs, dtypes_of(scan, inputs, dtypes)))


def check(name, case, dtypes, monkeypatch, **options):
  """Values and all gradients, as the contract has it, of the kernels with `options`."""
  scan, module = SCANS[name]
  monkeypatch.setattr(module, "run", functools.partial(module.run, **options))
  inputs = scan.inputs(case)
  call = lambda x, form: scan.compared(*scan(case, x, implementation=form))
  given = dtypes_of(scan, inputs, dtypes)
  errors = contract.errors_against_reference(call, inputs, given, "pallas_interpret")
  contract.assert_small(errors, dtypes[0], case.T)


class Rows:
  """Tiles of the kernels as whole arrays: channels [B, D], and [B, D, N]."""

  broadcast_channels = staticmethod(lambda vector: vector[..., None])
  dot = staticmethod(lambda a, b: jnp.sum(a * b, axis=-1))


def plain_scan(static, inputs, first):
  """Results of the kernels for a sequence, or for one of its splits, by `jax.lax.scan`."""
  recurrence = static.recurrence
  inputs = recurrence.prepare(inputs)

  def step(h, token):
    x, rate, write, read, others, norm, is_first = token
    along_states = lambda key: None if key is None else key[:, None]
    keys = Keys(*map(along_states, (write, read, others, write * write)))
    gates = recurrence.gates(x, rate, along_states(norm))
    h = h if is_first is None else jnp.where(is_first[:, None, None], 0, h)
    decay = recurrence.decay(Rows, gates, inputs.a, keys)
    h = decay.update(h, gates.write[..., None] * keys.write)
    return h, Rows.dot(h, keys.read) + inputs.skip * x

  names = ("x", "rate", "write_key", "read_key", "other_squares", "key_norm")
  tokens = (*(getattr(inputs, name) for name in names), first)
  by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0).astype(jnp.float32), tokens)
  last, out = jax.lax.scan(step, inputs.initial, by_token)
  return jnp.moveaxis(out, 0, 1).astype(static.out_dtype), last


@BOTH
def test_channel_states_in_splits_and_groups_match_reference(name, monkeypatch):
  """Three splits of a sequence and three groups of states, without the kernels, which know of
  neither. Documents begin where a split does, and inside of one that a state enters."""
  monkeypatch.setattr(op, "_scan", plain_scan)
  documents_begin_at(monkeypatch, (16,), (20, 32))
  case = Case(40, "weak", segments=True, D=3, N=37, chunk=None)
  check(name, case, (F32, F32), monkeypatch, num_splits=3)


def test_longhorn_in_groups_is_exact(monkeypatch):
  """A group's states are not all that the norm of a key is made of."""
  scans = []
  monkeypatch.setattr(op, "scan", lambda static, *args: scans.append(static))
  for N in (16, 17):
    args, _ = drawn("longhorn_scan", Case(2, N=N, chunk=None), NARROW)
    with pytest.raises(TypeError):  # nothing was computed
      run_of("longhorn_scan", *args)
  assert [static.recurrence.exact for static in scans] == [False, True]


@pytest.mark.slow
@BOTH
def test_channel_states_in_groups_match_reference(name, monkeypatch):
  check(name, Case(2, D=2, N=17, state=False, chunk=None), NARROW, monkeypatch)


@pytest.mark.parametrize(
  "name", ["selective_scan", pytest.param("longhorn_scan", marks=pytest.mark.slow)]
)
def test_channel_states_with_float32_rates_match_reference(name, monkeypatch):
  """As S6 passes them: rates in float32, all else in bfloat16."""
  check(name, Case(17, D=2, segments=True, chunk=None), (BF16, F32), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("segments", [False, True], ids=["whole", "segments"])
@BOTH
def test_channel_states_in_splits_match_reference(name, segments, monkeypatch):
  case = Case(40, D=2, segments=segments, strength="extreme", chunk=None)
  check(name, case, (F32, F32), monkeypatch, num_splits=2)


def test_channel_states_num_splits_fills_every_sm():
  assert config.num_splits(32, 2048, 4096, 4) == 1
  assert config.num_splits(1, 65536, 4096, 4) == 8
  assert config.num_splits(1, 512, 4096, 4) == 4
  assert config.num_splits(1, 511, 4096, 4) == 1
  assert config.num_splits(2, 65536, 4096, 8) == 1


# Scan, dtypes, N, segments, channels, splits.
DTYPES = {"bfloat16": NARROW, "float32": (F32, F32), "wide rates": (BF16, F32)}
ALL = list(itertools.product(SCANS, DTYPES, (5, 16, 40), (False, True), (100, 512), (1, 4)))
SOME = [
  ("selective_scan", "wide rates", 40, True, 100, 1),
  ("longhorn_scan", "float32", 16, False, 100, 1),
  ("selective_scan", "bfloat16", 16, True, 128, 1, True),
  ("longhorn_scan", "bfloat16", 16, True, 128, 4, True),
]


def run_of(name, *args, num_splits=None, **kwargs):
  """The kernels on the public function's arguments."""
  call = dispatch.check(name, *args, **kwargs)
  return SCANS[name][1].run(call.inputs, call.options, num_splits=num_splits)


def lowers(name, dtypes, N, segments, D, splits, activated=False):
  case = Case(256, D=D, N=N, segments=segments, chunk=None, activated=activated)
  args, kwargs = drawn(name, case, DTYPES[dtypes])
  segment_ids = kwargs.pop("segment_ids")
  flags = {n: x for n, x in kwargs.items() if isinstance(x, bool)}
  arrays = args, {n: x for n, x in kwargs.items() if n not in (*flags, "chunk_size")}

  def run(arrays):
    args, options = arrays
    return run_of(name, *args, **options, **flags, segment_ids=segment_ids, num_splits=splits)

  forward = len(kernels_traced(run, arrays))
  assert forward >= (1 if splits == 1 else 2)
  # The forward kernel may be needed once more, for the states that it keeps.
  assert kernels_in(jax.grad(lambda arrays: total(run(arrays))), arrays) >= 2 * forward


@pytest.mark.parametrize("configuration", SOME, ids=str)
def test_channel_states_kernels_lower_for_cuda(configuration):
  lowers(*configuration)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ALL, ids=str)
def test_channel_states_kernels_in_every_configuration_lower_for_cuda(configuration):
  lowers(*configuration)


@pytest.mark.parametrize(
  "transformed",
  [
    pytest.param(recomputed_for_several, id="vmap"),
    pytest.param(recomputed_in_a_scan, id="scan"),
  ],
)
@pytest.mark.slow
def test_channel_states_kernels_transformed_lower_for_cuda(transformed):
  """vmap and scan with recomputed activations, in 64 bits."""
  with jax.enable_x64(True):
    args, kwargs = drawn("longhorn_scan", Case(40, D=130, N=16, chunk=None), NARROW)

    def loss(x):
      return total(run_of("longhorn_scan", x, *args[1:], skip=kwargs["skip"]))

    assert kernels_in(transformed(loss), jnp.stack([args[0]] * 3)) >= 2


@pytest.mark.parametrize("dtypes", [NARROW, (F32, F32)], ids=["bfloat16", "float32"])
@BOTH
def test_backward_kernel_writes_gradients_of_narrow_logits(name, dtypes):
  """They are rounded once, and the only array of their shape that it writes with that of x."""
  case = Case(32, D=128, N=16, chunk=None, activated=True)
  args, kwargs = drawn(name, case, dtypes)
  gradient = jax.grad(lambda *args: total(run_of(name, *args, **kwargs)[0]), argnums=(0, 1))
  *_, backward = kernel_launches(jax.jit(gradient).trace(*args).jaxpr.jaxpr)
  written = [x.aval.dtype for x in backward.outvars if x.aval.shape == args[1].shape]
  assert written == [args[0].dtype] * 2
  assert "backward" in backward.params["name"]
  sums = [x for x in backward.outvars if x.aval.shape == args[1].shape[::2]]
  assert len(sums) == (2 if dtypes is NARROW else 1)  # of the skip's gradient, and of the bias's


@BOTH
def test_channel_states_kernels_under_shard_map_keep_shapes(name):
  """Every array's type says along which axes of the mesh it varies; with splits too."""
  bias = {"selective_scan": "dt_bias", "longhorn_scan": "beta_bias"}[name]
  args, kwargs = drawn(name, Case(40, D=130, N=16, chunk=None, activated=True), NARROW)
  flags = {n: x for n, x in kwargs.items() if isinstance(x, bool)}

  def loss(arrays, num_splits):
    *args, skip, own = arrays
    return total(run_of(name, *args, skip=skip, num_splits=num_splits, **flags, **{bias: own}))

  inputs = (*args, kwargs["skip"], kwargs[bias])
  specs = tuple(DATA if x.ndim == 3 else REPLICATED for x in inputs)
  for splits in (1, 4):
    gradient = jax.grad(functools.partial(loss, num_splits=splits))
    assert_shard_map_keeps_shapes(gradient, inputs, specs)


@BOTH
def test_channel_states_kernels_with_unsupported_arguments_raise(name):
  args, kwargs = drawn(name, Case(5, D=2, N=4, chunk=None))
  function = SCANS[name][0].function
  with pytest.raises(NotImplementedError, match="x has dtype float16"):
    function(args[0].astype(jnp.float16), *args[1:], implementation="pallas_interpret")
  wide, options = drawn(name, Case(5, D=2, N=257, chunk=None))
  with pytest.raises(NotImplementedError, match="257 states, and at most 256"):
    function(*wide, **options, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="chunk_size=4, and the kernels choose"):
    function(*args, **kwargs | {"chunk_size": 4}, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="need an NVIDIA GPU since Ampere"):
    function(*args, **kwargs, implementation="pallas")
  assert ops.supported(function, *args, **kwargs)[0] == "chunked"


@BOTH
def test_channel_states_kernels_are_preferred_by_size(name, hopper):
  function = SCANS[name][0].function
  sizes = [(2, 64, 4, True), (2, 63, 4, False)]
  # A single token: without padding, which would copy the state; up to 64 states per channel.
  sizes += [(1, 128, 4, True), (1, 64, 4, False), (1, 32, 64, True), (1, 32, 66, False)]
  for T, D, N, worth in sizes:
    args, kwargs = drawn(name, Case(T, D=D, N=N, chunk=None))
    first = ops.supported(function, *args, **kwargs)[0]
    assert first == ("pallas" if worth else "chunked")
