"""LCSM: every code against its recurrence, how codes are computed, options, start, size, errors."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from lnssm_jax import sharding
from lnssm_jax.mixers import LCSM, lcsm, lcsm_code
from lnssm_jax.models import count_parameters
from tests.mixers import plain_ops
from tests.mixers.helpers import apply, float64_params, relative_error, split
from tests.mixers.references import lcsm as reference

D, K, T = 4, 3, 6
IDS = np.array([[5, 2, 2]])  # of the last three tokens: documents of 4 and 2 tokens

# Every activation occurs with constant and with data-dependent expansion.
ALL = [
  (f"{e}-{o}-{s}-{(3 * o + 2 * e + s) % 8}", {})
  for o, e, s in itertools.product(range(12), (0, 1), (0, 1))
]
ALL += [("0", {}), ("1-m1-1-4", {}), ("1-m2-1-3", {}), ("1-m3-1-2", {})]
ALL += [(f"{e}-{o}-0-4", {"learned": False}) for o, e in itertools.product((0, 4, 5), (0, 1))]
ALL += [(f"{e}-11-1-0", {"learned": True}) for e in (0, 1)]
ALL += [(f"1-{o}-1-0", {"coloring": "exchanged"}) for o in range(2, 6)]
ALL += [("1-2-1-0", {"gate_logit_normalizer": 2.0}), ("0-9-1-0", {"gate_logit_normalizer": 2.0})]


def make(code, options, dim=D, state_dim=K, **dtypes):
  """A layer with random parameters."""
  sizes = {"dim": dim, "state_dim": state_dim}
  build = lambda: LCSM(**sizes, code=code, **options, **dtypes, rngs=nnx.Rngs(0))
  graph, params = split(jax.eval_shape(build))
  random = np.random.default_rng(0)
  return nnx.merge(
    graph, jax.tree.map(lambda p: random.normal(size=p.shape).astype(p.dtype), params)
  )


def expected(mixer, code, options, x):
  """Outputs [T, D] of the two documents."""
  names = {"gate_logit_normalizer": "tau"}
  options = {names.get(name, name): value for name, value in options.items()}
  params = float64_params(mixer)
  documents = (x[:4], x[4:])
  return np.concatenate([reference.lcsm(params, row, code=code, **options) for row in documents])


def test_every_code_equals_its_recurrence_in_float64():
  """Split after three tokens and packed from there; the ops in NumPy, float64."""
  x = np.random.default_rng(1).normal(size=(1, T, D))
  with jax.enable_x64(), plain_ops.in_place_of(lcsm):
    for code, options in ALL:
      mixer = make(code, options, dtype=jnp.float64, param_dtype=jnp.float64)
      first, state = mixer(x[:, :3])
      rest, state = mixer(x[:, 3:], state, IDS)
      want = expected(mixer, code, options, x[0])
      got = np.concatenate([first, rest], axis=1)[0]
      assert relative_error(got, want) < 1e-12, (code, options)
      chex.assert_trees_all_equal_shapes(state, mixer.init_state(1))


ONE_PER_OP = ("0-0-0-0", "1-9-0-4", "0-2-1-1", "1-11-1-3", "1-m2-1-3", "0")


@pytest.mark.parametrize(
  "codes",
  [
    [(code, {}) for code in ONE_PER_OP],
    *(pytest.param(ALL[n : n + 8], marks=pytest.mark.slow) for n in range(0, len(ALL), 8)),
  ],
  ids=lambda codes: codes[0][0],
)
def test_codes_on_their_ops_equal_their_recurrences(codes):
  """As above on the ops themselves, in float32 and in one program."""
  x = jax.random.normal(jax.random.key(1), (1, T, D))
  mixers = [make(code, options) for code, options in codes]

  def one(mixer, x):
    first, state = mixer(x[:, :3])
    return jnp.concatenate([first, mixer(x[:, 3:], state, IDS)[0]], axis=1)[0]

  results = jax.jit(lambda mixers, x: [one(mixer, x) for mixer in mixers])(mixers, x)
  for mixer, got, (code, options) in zip(mixers, results, codes, strict=True):
    assert relative_error(got, expected(mixer, code, options, np.float64(x[0]))) < 3e-6, code


LAST_OF_EACH_OP = {lcsm_code.read_code(code).op: n for n, (code, _) in enumerate(ALL)}.values()


@pytest.mark.parametrize(
  ("code", "options"),
  [
    pytest.param(*row, marks=[pytest.mark.slow] * (n not in LAST_OF_EACH_OP))
    for n, row in enumerate(ALL)
  ],
)
def test_gradients_of_every_code_equal_differences_of_its_recurrence(code, options):
  """Along one direction of all parameters and the input, in float64; packed."""
  random = np.random.default_rng(2)
  with jax.enable_x64():
    x = random.normal(size=(1, T, D))
    mixer = make(code, options, dtype=jnp.float64, param_dtype=jnp.float64)
    ids = np.array([[5, 5, 5, 5, 2, 2]])
    loss = lambda mixer, x: jnp.sum(jnp.sin(mixer(x, None, ids)[0]))
    gradients = jax.jit(jax.grad(loss, (0, 1)))(mixer, x)
    direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), (mixer, x))

    def value(step):
      moved, x_moved = jax.tree.map(lambda a, b: a + step * b, (mixer, x), direction)
      return np.sin(expected(moved, code, options, np.asarray(x_moved[0]))).sum()

    got = sum(map(np.vdot, *map(jax.tree.leaves, (gradients, direction))))
    assert got == pytest.approx((value(1e-6) - value(-1e-6)) / 2e-6, rel=1e-6)
  for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
    assert np.any(np.asarray(gradient) != 0), jax.tree_util.keystr(path)


def test_cheapest_exact_op_of_each_code():
  op = lambda code: lcsm_code.read_code(code).op
  by_key, by_value = ("1", "3", "4"), ("2", "5", "10")
  for o in lcsm_code.OSCILLATIONS.keys() - {"ssm", "m1", "m2", "m3"}:
    full = o in "06789"
    of_full = "selective_scan" if o == "0" else "elementwise_decay_scan"
    assert op(f"1-{o}-1-4") == (of_full if full else "linear_attention")
    for e, s in ((0, 0), (0, 1), (1, 0)):
      got = op(f"{e}-{o}-{s}-4")
      constant = (e, s) == (0, 0) and o in ("0", "4", "11")
      if o in by_value:
        assert got == "diagonal_scan"
      else:
        assert got == ("long_convolution" if constant else "elementwise_decay_scan")
        assert full or o in (*by_key, "11")
  assert [op(c) for c in ("0", "1-m1-1-4", "1-m2-1-3", "1-m3-1-2")] == [
    "selective_scan", "delta_rule", "delta_rule", "linear_attention",
  ]  # fmt: skip


def test_columns_with_the_same_keys_are_heads_unless_values_decay():
  """So that no head is wider than kernels allow."""
  shape = lambda code, dim: (
    jax.eval_shape(lambda: LCSM(dim, code=code, rngs=nnx.Rngs(0)).init_state(1)).recurrent.kv.shape
  )
  assert shape("1-3-1-4", 512) == (1, 4, 128, 128)
  assert shape("1-11-1-4", 192) == (1, 2, 256, 96)
  assert shape("1-10-1-4", 131) == (1, 131, 128, 1)
  assert shape("1-1-1-4", 512) == (1, 1, 128, 512)


@pytest.mark.parametrize("state_dim", [K, 64, 128])
def test_wide_columns_in_heads_equal_the_recurrence(state_dim):
  """Two heads of 65 columns, and a constant decay by key; 64 and 128 rows are the paper's."""
  mixer = make("1-4-1-4", {}, dim=130, state_dim=state_dim)
  x = jax.random.normal(jax.random.key(1), (1, T, 130))
  want = reference.lcsm(float64_params(mixer), np.float64(x[0]), code="1-4-1-4")
  assert relative_error(apply(mixer, x)[0][0], want) < 3e-6


def test_constant_decays_are_below_one_and_follow_alibi():
  """The published file has exp(+slope), a flipped sign."""
  for o, shape in (("0", (K, D)), ("4", (K,)), ("5", (D,))):
    mixer = LCSM(D, code=f"1-{o}-1-0", state_dim=K, learned=False, rngs=nnx.Rngs(0))
    decay = np.exp(mixer._constant_decay(*shape))
    np.testing.assert_allclose(decay, np.exp(-reference.slopes(np.prod(shape)).reshape(shape)))
    assert np.all((decay > 0) & (decay < 1))
    assert not {"decay_weight", "decay_logit"} & set(split(mixer)[1])


def test_states_of_the_delta_codes_stay_bounded():
  """Unit vectors, of m2 without negative entries: a thousand tokens of one direction."""
  x = jnp.ones((1, 1000, D))
  mixers = [make("1-m1-1-4", {}), make("1-m2-1-7", {})]
  states = jax.jit(lambda mixers: [mixer(x)[1].recurrent.kv for mixer in mixers])(mixers)
  bound = 1e3 * max(float(jnp.abs(m.i_proj.kernel[...]).sum()) for m in mixers)
  assert all(np.abs(state).max() <= bound for state in states)


def test_parameter_count_matches_formula():
  D, k = 64, 10
  count = lambda code, **options: count_parameters(
    jax.eval_shape(lambda: LCSM(D, code=code, state_dim=k, **options, rngs=nnx.Rngs(0)))
  )
  rest = 2 * D**2 + 2 * D + 2 * k * D  # W_i, W_o, norm, e and s, constant or not
  oscillation = {
    "0": k * D, "1": k * D + D**2, "2": D**2, "3": k * D, "4": k, "5": D, "6": 2 * k * D,
    "7": D**2 + k * D, "8": D**2 + k, "9": k * D + D, "10": 0, "11": 0,
  }  # fmt: skip
  for o, more in oscillation.items():
    assert {count(f"{e}-{o}-{s}-0") for e in (0, 1) for s in (0, 1)} == {rest + more}, o
  assert count("0", gate_rank=5) == rest + k * D + 10 * D
  assert count("1-m1-1-4") == count("1-m3-1-2") == rest
  assert count("1-m2-1-3") == rest + k * D
  assert count("1-11-1-0", learned=True) == rest + k
  assert count("1-0-1-0", learned=False) == rest
  assert count("1-4-1-0", coloring="exchanged") == rest + k * D


def test_every_parameter_of_every_code_has_a_sharding_rule():
  for code, options in ALL:
    layer = {
      "mixer": split(
        jax.eval_shape(lambda c=code, o=options: LCSM(8, code=c, **o, rngs=nnx.Rngs(0)))
      )[1]
    }
    specs = jax.tree.leaves(
      sharding.param_specs(layer, axes=("fsdp", "tensor")), is_leaf=lambda x: isinstance(x, P)
    )
    for leaf, spec in zip(jax.tree.leaves(layer), specs, strict=True):
      assert len(leaf.shape) == len(spec), (code, leaf.shape, spec)
      assert (len(spec) > 1) == any("fsdp" in (axis or ()) for axis in spec), (code, spec)


def test_constant_matrices_start_normal_and_angles_as_published():
  mixer = LCSM(64, code="0-0-0-0", rngs=nnx.Rngs(0))
  for name in ("e_weight", "s_weight", "decay_weight"):
    assert np.std(getattr(mixer, name)[...]) == pytest.approx(0.1, rel=0.05)
  theta = LCSM(8, code="1-11-1-0", state_dim=4, learned=True, rngs=nnx.Rngs(0)).theta[...]
  np.testing.assert_allclose(theta, [1, 1e-1, 1e-2, 1e-3], rtol=1e-6)
  a = np.exp(LCSM(8, code="0", state_dim=3, rngs=nnx.Rngs(0)).a_log[...])
  np.testing.assert_allclose(a, np.tile([1.0, 2.0, 3.0], (8, 1)), rtol=1e-6)
