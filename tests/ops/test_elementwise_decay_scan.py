"""elementwise_decay_scan: what is particular to it, next to the tests that all scans share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops import DecayFunction, ElementwiseDecayState, elementwise_decay_scan
from tests.ops import promises
from tests.ops.promises import close

B, H, K, V = 2, 2, 3, 4


def make_decay(steps, parameters):
  """A product inside a sigmoid: no outer product of a key and a value factor (LCSM, code 6)."""
  return jax.nn.log_sigmoid(steps[..., None] * parameters)


def make_inputs(T, seed=0):
  rng = np.random.default_rng(seed)
  shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, H, V), "x": (B, T, H, K)}
  inputs = {
    name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()
  }
  return inputs | {"p": jnp.asarray(rng.normal(size=(H, K, V)), jnp.float32)}


def call(inputs, **options):
  log_decay = DecayFunction(make_decay, inputs["x"], inputs["p"])
  options = {"chunk_size": 2} | options
  return elementwise_decay_scan(inputs["q"], inputs["k"], inputs["v"], log_decay, **options)


def decays(inputs):
  return np.asarray(jnp.exp(make_decay(inputs["x"], inputs["p"])), np.float64)


@pytest.mark.slow
def test_output_equals_the_formula():
  """out_t = sum over j <= t of prod over j < i <= t of A_i, times k_j (v_j q_t), in float64."""
  inputs = make_inputs(11)
  q, k, v = (np.asarray(inputs[n], np.float64) for n in ("q", "k", "v"))
  A, want = decays(inputs), np.zeros((B, 11, H, V))
  for t in range(11):
    for j in range(t + 1):
      weight = np.prod(A[:, j + 1 : t + 1], axis=1)
      want[:, t] += np.einsum("bhk,bhkv,bhk,bhv->bhv", q[:, t], weight, k[:, j], v[:, j])
  close(call(inputs)[0], want)


@pytest.mark.slow
def test_outer_product_decays_equal_linear_attention():
  inputs = make_inputs(7)
  keys, values = (-jnp.exp(inputs[n]) for n in ("x", "v"))
  log_decay = keys[..., :, None] + values[..., None, :]
  arrays = [inputs[n] for n in ("q", "k", "v")]
  out, state = jax.jit(elementwise_decay_scan)(*arrays, log_decay)
  attention = jax.jit(functools.partial(ops.linear_attention, scale=1.0))
  want, last = attention(*arrays, log_decay=keys, value_log_decay=values)
  close((out, state.kv), (want, last.kv))


@pytest.mark.slow
def test_decay_function_equals_the_array_that_it_returns():
  inputs = make_inputs(5)

  def from_array(inputs, **options):
    arrays = (inputs["q"], inputs["k"], inputs["v"], make_decay(inputs["x"], inputs["p"]))
    return elementwise_decay_scan(*arrays, chunk_size=2, **options)

  def from_surroundings(inputs):
    log_decay = DecayFunction(lambda steps, _: make_decay(steps, inputs["p"]), inputs["x"])
    return elementwise_decay_scan(inputs["q"], inputs["k"], inputs["v"], log_decay, chunk_size=2)

  result = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sum(f(x)[0] ** 2)))(inputs)
  want = result(from_array)
  close(result(call), want)
  close(result(from_surroundings), want)


@pytest.mark.slow
def test_gradient_of_strong_decay_is_accurate_per_entry():
  """The gradient of a log decay of -20 is 1e-9 of that of a weak one: each must be right."""
  inputs = make_inputs(30)
  log_decay = jnp.broadcast_to(jnp.linspace(-20.0, -0.01, K * V).reshape(K, V), (H, K, V))
  arrays = [jnp.abs(inputs[n]) for n in ("q", "k", "v")]  # terms of one sign

  def gradient(implementation, arrays, log_decay):
    scan = functools.partial(elementwise_decay_scan, implementation=implementation, chunk_size=8)
    return np.asarray(jax.jit(jax.grad(lambda g: jnp.sum(scan(*arrays, g)[0])))(log_decay))

  with jax.enable_x64(True):
    want = gradient("reference", [x.astype(jnp.float64) for x in arrays], log_decay)
  got = gradient("chunked", arrays, log_decay)
  np.testing.assert_allclose(got, want, rtol=promises.contract.tolerance(jnp.float32, 30))
  assert np.abs(want).min() < 1e-6 < np.abs(want).max()


def test_lasting_decay_is_rounded_once_per_chunk():
  """Rounded at every token, a slowly falling number is off by 5e-6 after 16,384 tokens."""
  T = 16_384
  zeros, state = jnp.zeros((1, T, 1, 1)), jnp.linspace(0.5, 1.0, 4).reshape(1, 1, 1, 4)

  def last(state):
    decay, v = jnp.full((1, 1, 4), -1e-6), jnp.zeros((1, T, 1, 4))
    state = ElementwiseDecayState(state)
    return elementwise_decay_scan(zeros, zeros, v, decay, initial_state=state)[1].kv

  got, gradient = jax.jit(lambda x: (last(x), jax.grad(lambda y: jnp.sum(last(y) * x))(x)))(state)
  want = np.asarray(state, np.float64) * np.exp(T * np.float64(np.float32(-1e-6)))
  for x in (got, gradient):
    np.testing.assert_allclose(x, want, rtol=promises.contract.tolerance(jnp.float32, T))


@pytest.mark.slow
def test_infinite_decay_is_exact():
  inputs = make_inputs(5)
  arrays = [inputs[n] for n in ("q", "k", "v")]
  nothing_left = jnp.full((H, K, V), -jnp.inf)
  scan = lambda *x: elementwise_decay_scan(*x, chunk_size=2)
  out, _ = scan(*arrays, nothing_left)
  q, k, v = arrays
  close(out, jnp.sum(q * k, -1, keepdims=True) * v)
  gradients = jax.jit(jax.grad(lambda x: jnp.sum(scan(*x)[0])))((*arrays, nothing_left))
  assert all(jnp.isfinite(g).all() for g in gradients)
  assert (gradients[3] == 0).all()


@pytest.mark.slow
def test_gradients_of_narrow_parameters_are_summed_in_float32():
  """700 equal terms in bfloat16 would stop growing at 256."""
  T, chunk = 700, 1
  ones = jnp.ones((1, T, 1, 1), jnp.float32)

  def total(p):
    log_decay = DecayFunction(lambda steps, p: steps[..., None] * p, 0 * ones, p)
    return jnp.sum(elementwise_decay_scan(ones, ones, ones, log_decay, chunk_size=chunk)[0])

  # With decay 1 and a factor that counts the steps, the gradient is known: see below.
  def counted(p):
    log_decay = DecayFunction(lambda steps, p: jnp.log(steps)[..., None] + p, ones, p)
    reset = jnp.arange(T)[None] // 2
    return jnp.sum(
      elementwise_decay_scan(ones, ones, ones, log_decay, segment_ids=reset, chunk_size=chunk)[0]
    )

  assert jax.grad(total)(jnp.zeros((1, 1, 1), jnp.bfloat16)) == 0
  # Every document of two steps contributes exactly 1: its second step reads the first one's 1.
  assert jax.grad(counted)(jnp.zeros((1, 1, 1), jnp.bfloat16)) == jnp.bfloat16(T // 2)


def function(shape, make=make_decay, steps=(B, 6, H, K)):
  return DecayFunction(make, jnp.zeros(steps), jnp.zeros(shape))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"k": (B, 5, H, K)}, r"k has shape \(2, 5, 2, 3\).*\[2, 6, 2, 3\]"),
    ({"v": (B, 6, 3, V)}, r"v has shape \(2, 6, 3, 4\)"),
    ({"q": (B, 6, K)}, r"q has shape \(2, 6, 3\).*\[B, T, H, K\]"),
    ({"q": (B, 0, H, K), "k": (B, 0, H, K), "v": (B, 0, H, V)}, "T >= 1"),
    ({"log_decay": (H, K)}, r"log_decay has shape \(2, 3\), but one of \[2, 3, 4\]"),
    ({"log_decay": jnp.zeros((H, K, V), int)}, "log_decay has dtype int32"),
    (
      {"log_decay": function((H, K, 5))},
      r"log_decay.make of one token has shape \(2, 1, 2, 3, 5\)",
    ),
    ({"log_decay": function((), steps=(B, 5))}, r"log_decay.steps has shape \(2, 5\)"),
    ({"q": jnp.zeros((B, 6, H, K), int)}, "q has dtype int32; it must be floating point"),
    ({"initial_state": ElementwiseDecayState(jnp.zeros((B, H, V, K)))}, r"initial_state.kv has"),
    ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
  ],
)
def test_bad_argument_raises_and_is_named(change, message):
  arguments = {"q": (B, 6, H, K), "k": (B, 6, H, K), "v": (B, 6, H, V), "log_decay": (H, K, V)}
  arguments |= change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    elementwise_decay_scan(**arguments)
