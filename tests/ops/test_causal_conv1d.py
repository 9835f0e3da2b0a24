"""causal_conv1d: values, state and packed documents to the last bit, argument checks, dispatch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from lnssm_jax import ops
from lnssm_jax.mixers.common.short_convolution import ShortConvolution, convolve_each

BF16, F32 = jnp.bfloat16, jnp.float32
B, T, D, W = 2, 9, 3, 4
X, KERNEL, BIAS = jnp.ones((B, T, D)), jnp.ones((W, D)), jnp.ones(D)


def drawn(*shape, seed):
  return jax.random.normal(jax.random.key(seed), shape, F32)


TAPS, SHIFT, Y = drawn(W, D, seed=1), drawn(D, seed=2), drawn(B, T, D, seed=3)


@pytest.mark.parametrize(
  ("arguments", "options", "message"),
  [
    ((X[0], KERNEL), {}, r"x has shape \(9, 3\)"),
    ((X[:, :0], KERNEL), {}, r"x \(2, 0, 3\) has an empty axis"),
    ((X.astype(int), KERNEL), {}, "x has dtype int32"),
    ((X, KERNEL[:, :2]), {}, r"kernel has shape \(4, 2\)"),
    ((X, KERNEL[:0]), {}, r"kernel \(0, 3\) has no tokens"),
    ((X, KERNEL, BIAS[:2]), {}, r"bias has shape \(2,\)"),
    (
      (X, KERNEL),
      {"initial_state": ops.ConvState(X[:, :4])},
      r"initial_state.inputs has shape \(2, 4, 3\)",
    ),
    ((X, KERNEL), {"segment_ids": jnp.ones((2, 3), int)}, r"segment_ids has shape \(2, 3\)"),
    ((X, KERNEL), {"activation": "relu"}, "activation='relu' is unknown; use 'silu' or None"),
    ((X, KERNEL), {"dtype": "int32"}, "dtype=int32 must be floating point"),
    ((X, KERNEL), {"implementation": "chunked"}, "implementation='chunked' is unknown; use one of"),
  ],
)
def test_causal_conv1d_bad_argument_raises_naming_it(arguments, options, message):
  with pytest.raises(ValueError, match=message):
    ops.causal_conv1d(*arguments, **options)


def test_causal_conv1d_narrow_output_is_rounded_once():
  x = jax.random.normal(jax.random.key(0), X.shape).astype(BF16)
  wide, state = ops.causal_conv1d(x, KERNEL, BIAS, activation="silu", dtype=F32)
  y, _ = ops.causal_conv1d(x, KERNEL, BIAS, activation="silu")
  assert (y.dtype, wide.dtype, state.inputs.dtype) == (BF16, F32, F32)
  np.testing.assert_array_equal(y, wide.astype(BF16))
  z, _ = ops.causal_conv1d(x, KERNEL, BIAS, dtype=F32)
  np.testing.assert_allclose(wide, z / (1 + np.exp(-z)), rtol=1e-6)
  with jax.enable_x64(True):
    y, state = ops.causal_conv1d(x.astype("float64"), KERNEL)
  assert y.dtype == state.inputs.dtype == jnp.float64


@pytest.mark.parametrize(
  ("shape", "width", "dtype", "expected"),
  [
    ((2, 2, 128), 4, F32, ["pallas", "reference"]),
    ((2, 2048, 2304), 2, BF16, ["pallas", "reference"]),
    ((2, 1, 128), 4, BF16, ["reference", "pallas"]),  # XLA fuses one token into one loop
    ((2, 2, 130), 4, BF16, ["reference", "pallas"]),  # padding would copy x
    ((2, 2, 128), 5, BF16, ["reference"]),
    ((2, 2, 128), 4, jnp.float16, ["reference"]),
    ((65536, 2, 128), 4, BF16, ["reference"]),
  ],
  ids=str,
)
def test_causal_conv1d_on_hopper_prefers_kernels_by_size(shape, width, dtype, expected, hopper):
  x, kernel = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((width, shape[2]), F32)
  found = []

  def trace(x, kernel):
    found.extend(ops.supported(ops.causal_conv1d, x, kernel))

  jax.eval_shape(trace, x, kernel)
  assert found == expected + ["pallas_interpret"] * ("pallas" in expected)


def test_causal_conv1d_unsupported_argument_raises_naming_it():
  x, kernel = jnp.ones((2, 9, 128)), jnp.ones((4, 128))
  run = lambda *args, **options: ops.causal_conv1d(*args, **options)
  for arguments, options, message in [
    ((x.astype("float16"), kernel), {}, "x has dtype float16"),
    ((x, kernel), {"dtype": "float16"}, "y has dtype float16"),
    ((x, jnp.ones((5, 128))), {}, "W=5"),
    ((jnp.ones((65536, 1, 3)), KERNEL), {}, "x has 65536 sequences"),
  ]:
    with pytest.raises(NotImplementedError, match=message):
      run(*arguments, **options, implementation="pallas_interpret")
  with pytest.raises(NotImplementedError, match="need an NVIDIA GPU since Ampere"):
    run(x, kernel, implementation="pallas")


def test_causal_conv1d_equals_a_loop():
  y, state = ops.causal_conv1d(Y, TAPS, SHIFT)
  padded = np.concatenate([np.zeros((B, W - 1, D)), np.float64(Y)], axis=1)
  for t in range(T):
    want = np.float64(SHIFT) + np.einsum("wd,bwd->bd", np.float64(TAPS), padded[:, t : t + W])
    np.testing.assert_allclose(y[:, t], want, rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(state.inputs, Y[:, -3:])
  _, pull = jax.vjp(lambda x: ops.causal_conv1d(x, TAPS, SHIFT)[1].inputs, Y)
  np.testing.assert_array_equal(pull(Y[:, :3])[0], jnp.pad(Y[:, :3], ((0, 0), (T - 3, 0), (0, 0))))


def test_short_convolutions_of_parts_and_of_streams_keep_their_states():
  conv = ShortConvolution(D, W, activation="silu", rngs=nnx.Rngs(0))
  others = [ShortConvolution(D, W, rngs=nnx.Rngs(n)) for n in (1, 2)]
  states = [ops.ConvState(drawn(B, W - 1, D, seed=n)) for n in (4, 5)]
  whole, last = conv(Y, states[0])
  parts, state = conv.of_parts([Y[..., :1], Y[..., 1:]], states[0])
  chex.assert_trees_all_equal((jnp.concatenate(parts, -1), state), (whole, last))
  each = convolve_each(others, [Y, Y], states, None)
  want = [other(Y, state) for other, state in zip(others, states, strict=True)]
  chex.assert_trees_all_equal(each, ([y for y, _ in want], tuple(state for _, state in want)))


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_causal_conv1d_split_sequence_has_the_same_bits(cut):
  whole, last = ops.causal_conv1d(Y, TAPS, SHIFT)
  left, state = ops.causal_conv1d(Y[:, :cut], TAPS, SHIFT)
  right, state = ops.causal_conv1d(Y[:, cut:], TAPS, SHIFT, initial_state=state)
  chex.assert_trees_all_equal((jnp.concatenate([left, right], axis=1), state), (whole, last))


def test_causal_conv1d_packed_documents_have_the_same_bits():
  """Documents shorter than the kernel, a NaN in one of them, and a state before the first."""
  before = ops.ConvState(drawn(B, W - 1, D, seed=4))
  x = Y.at[0, 1].set(jnp.nan)
  lengths = ([2, 1, 6], [1, 7, 1])
  ids = np.stack([np.repeat([5, 2, 5], row) for row in lengths])
  packed, last = ops.causal_conv1d(x, TAPS, SHIFT, initial_state=before, segment_ids=ids)
  for row in range(B):
    start = 0
    for number, length in enumerate(lengths[row]):
      piece = x[row : row + 1, start : start + length]
      state = ops.ConvState(before.inputs[row : row + 1]) if number == 0 else None
      y, state = ops.causal_conv1d(piece, TAPS, SHIFT, initial_state=state)
      np.testing.assert_array_equal(packed[row, start : start + length], y[0])
      start += length
    np.testing.assert_array_equal(last.inputs[row], state.inputs[0])
  assert np.isnan(packed[0, 1]).all() and not np.isnan(packed[0, 2:]).any()


def test_causal_conv1d_bfloat16_is_summed_in_float32():
  y, state = ops.causal_conv1d(Y.astype(BF16), TAPS, dtype=F32)
  want, _ = ops.causal_conv1d(Y.astype(BF16).astype(F32), TAPS)
  assert y.dtype == state.inputs.dtype == jnp.float32
  np.testing.assert_array_equal(y, want)


def test_token_shift_equals_convolutions_of_two_tokens():
  weights = [TAPS[0], TAPS[1]]
  state = ops.ConvState(drawn(B, 1, D, seed=4))
  ids = jnp.array([[0, 0, 1, 1, 1, 0, 0, 2, 2], [0] * 9])
  options = {"initial_state": state, "segment_ids": ids}
  streams, last = ops.token_shift(Y, weights, **options)
  for mu, stream in zip(weights, streams, strict=True):
    want, want_last = ops.causal_conv1d(Y, jnp.stack([1 - mu, mu]), **options)
    np.testing.assert_array_equal(stream, want)
    np.testing.assert_array_equal(last.inputs, want_last.inputs)
  before = np.concatenate([state.inputs[1], Y[1, :-1]])
  np.testing.assert_allclose(
    streams[0][1], TAPS[0] * Y[1] + (1 - TAPS[0]) * before, rtol=1e-5, atol=1e-6
  )


OFFSETS = drawn(B, T, 2 * D, seed=5)
DOCUMENTS = jnp.array([[0, 0, 1, 1, 1, 0, 0, 2, 2], [0] * 9])


def shifted(x, weights, offsets, before):
  """`token_shift` with offsets of two documents or more, as its formula; float64."""
  first = jnp.diff(DOCUMENTS, axis=1, prepend=DOCUMENTS[:, :1]) != 0
  earlier = jnp.where(first[..., None], 0, jnp.concatenate([before, x[:, :-1]], axis=1))
  offsets = jnp.split(offsets, len(weights), axis=-1)
  return [x + (earlier - x) * (1 - mu + m) for mu, m in zip(weights, offsets, strict=True)]


def shard(x, weights, offsets, before, ids):
  """`token_shift` on one device's shard of the sequence."""
  over_time = P(None, "time")
  mesh = jax.make_mesh((1,), ("time",), axis_types=(AxisType.Auto,))
  run = jax.shard_map(
    functools.partial(whole, axis_name="time"),
    mesh=mesh,
    in_specs=(over_time, P(), over_time, P(), over_time),
    out_specs=over_time,
  )
  return run(x, weights, offsets, before, ids)


def whole(x, weights, offsets, before, ids, axis_name=None):
  options = {"initial_state": ops.ConvState(before), "segment_ids": ids, "axis_name": axis_name}
  return ops.token_shift(x, weights, offsets=offsets, **options)[0]


@pytest.mark.parametrize("function", [whole, shard])
def test_token_shift_with_offsets_has_the_gradient_of_its_formula(function):
  before, factors = drawn(B, 1, D, seed=4), drawn(2, B, T, D, seed=6)

  def loss(streams):
    total = lambda *arrays: sum(
      jnp.sum(f * jnp.sin(y)) for f, y in zip(factors, streams(*arrays), strict=True)
    )
    arrays = Y, (TAPS[0], TAPS[1]), OFFSETS, before
    exact = jax.tree.map(lambda x: x.astype(jnp.float64), arrays)
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))(*exact)

  with jax.enable_x64(True):
    got = loss(lambda *arrays: function(*arrays, DOCUMENTS))
    chex.assert_trees_all_close(got, loss(shifted), rtol=1e-12)


@pytest.mark.parametrize("cut", [1, 4])
def test_token_shift_with_offsets_split_sequence_has_the_same_bits(cut):
  run = lambda x, offsets, state=None: ops.token_shift(
    x, [TAPS[0], TAPS[1]], offsets=offsets, initial_state=state
  )
  want, last = run(Y, OFFSETS)
  left, state = run(Y[:, :cut], OFFSETS[:, :cut])
  right, state = run(Y[:, cut:], OFFSETS[:, cut:], state)
  joined = tuple(jnp.concatenate(parts, axis=1) for parts in zip(left, right, strict=True))
  chex.assert_trees_all_equal((joined, state), (want, last))


def test_token_shift_with_offsets_is_rounded_once():
  """Results, and the gradient of the offsets, from sums in float32."""
  x, offsets = Y.astype(BF16), OFFSETS.astype(BF16)

  def run(offsets, dtype):
    return ops.token_shift(x, [TAPS[0], TAPS[1]], offsets=offsets, dtype=dtype)[0]

  wide, pull_wide = jax.vjp(lambda m: run(m, F32), offsets.astype(F32))
  narrow, pull = jax.vjp(lambda m: run(m, BF16), offsets)
  chex.assert_trees_all_equal(narrow, tuple(y.astype(BF16) for y in wide))
  (d_wide,) = pull_wide(tuple(y.astype(F32) for y in narrow))
  np.testing.assert_array_equal(pull(narrow)[0], d_wide.astype(BF16))


def test_token_shift_bad_argument_raises_naming_it():
  for offsets, message in [
    (jnp.ones((B, T, 3)), r"offsets has shape \(2, 9, 3\), but \[B, T, S D\] = \[2, 9, 6\]"),
    (jnp.ones((B, T, 6), int), "offsets has dtype int32"),
  ]:
    with pytest.raises(ValueError, match=f"token_shift: {message}"):
      ops.token_shift(X, [jnp.ones(3)] * 2, offsets=offsets)
  with pytest.raises(NotImplementedError, match="offsets has dtype float16"):
    narrow = jnp.ones((B, T, 3), "float16")
    ops.token_shift(X, [jnp.ones(3)], offsets=narrow, implementation="pallas_interpret")
  for weights, message in [
    ([], "weights is empty"),
    ([jnp.ones(2)], r"weights\[0\] has shape \(2,\)"),
    ([jnp.ones(3), jnp.ones(3, int)], r"weights\[1\] has dtype int32"),
  ]:
    with pytest.raises(ValueError, match=f"token_shift: {message}"):
      ops.token_shift(X, weights)
  with pytest.raises(NotImplementedError, match="S=7 convolutions"):
    ops.token_shift(X, [jnp.ones(3)] * 7, implementation="pallas_interpret")
