"""wkv4: what is particular to it, next to the tests that all scans share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops import WKV4State, wkv4
from lnssm_jax.ops.wkv4.chunked import accelerator_chunk_size
from tests.ops import contract
from tests.ops.promises import close

B, D = 2, 3
FORMS = ["chunked", "associative", "reference"]


def inputs(T, seed=0, size=1.0):
  rng = np.random.default_rng(seed)
  k, v = (jnp.asarray(scale * rng.normal(size=(B, T, D)), jnp.float32) for scale in (size, 1))
  return k, v, jnp.asarray([0.01, 0.5, 20.0]), jnp.asarray(rng.normal(size=D), jnp.float32)


def scan(*args, **kwargs):
  return wkv4(*args, **({"chunk_size": 4} | kwargs))


def meaning(state):
  """The meaning of a state: its scale may differ."""
  return state.max + jnp.log(state.denominator), state.numerator / state.denominator


def naive(k, v, w, u):
  """The two sums as the paper writes them (eq. 16), in float64 numpy and without any scale."""
  k, v, w, u = (np.asarray(x, np.float64) for x in (k, v, w, u))
  outs = []
  for t in range(k.shape[1]):
    lag = (t - 1 - np.arange(t))[:, None]
    weight = np.exp(k[:, :t] - lag * w)
    own = np.exp(u + k[:, t])
    outs.append(((weight * v[:, :t]).sum(1) + own * v[:, t]) / (weight.sum(1) + own))
  return np.stack(outs, axis=1)


@pytest.mark.parametrize(
  ("implementation", "size"), [(form, 100.0) for form in FORMS] + [("reference", 1.0)]
)
def test_output_equals_the_naive_sum_in_float64(implementation, size):
  """Keys of +-200 too: their exponentials fit float64, and float32 not by a factor of 1e48."""
  arguments = inputs(40, size=size)
  if size > 1:
    arguments = (jnp.clip(arguments[0], -200, 200), *arguments[1:])
  call = jax.jit(lambda *x: scan(*x, implementation=implementation)[0])
  close(call(*arguments), naive(*arguments))


@pytest.mark.slow
def test_huge_keys_choose_one_value():
  """Steps of 1e4 up and down: the weight of all but one value is 0."""
  k = jnp.asarray([0.0, 1e4, 0.0, -1e4, 2e4, 3e4])[None, :, None]
  v = jnp.arange(6.0)[None, :, None]

  @jax.jit
  def both(*at):
    out, vjp = jax.vjp(lambda *x: scan(*x, jnp.ones(1), jnp.zeros(1))[0], *at)
    return out, *vjp(jnp.ones_like(out))

  out, d_k, d_v = both(k, v)
  np.testing.assert_array_equal(out[0, :, 0], [0, 1, 1, 1, 4, 5])
  np.testing.assert_array_equal(d_k, jnp.zeros_like(k))
  np.testing.assert_array_equal(d_v[0, :, 0], [1, 3, 0, 0, 1, 1])


@pytest.mark.parametrize("implementation", FORMS)
def test_key_of_minus_infinity_leaves_its_token_out(implementation):
  k, v, w, u = inputs(12)
  k = k.at[:, 5:7].set(-jnp.inf)

  @jax.jit
  def both(*at):
    out, vjp = jax.vjp(lambda *x: scan(*x, w, u, implementation=implementation)[0], *at)
    return out, *vjp(jnp.ones_like(out))

  out, d_k, d_v = both(k, v)
  close(out, naive(k, v, w, u))
  assert jnp.isfinite(d_k).all() and jnp.isfinite(d_v).all()
  assert not jnp.any(d_k[:, 5:7]) and not jnp.any(d_v[:, 5:7])


@pytest.mark.parametrize("implementation", FORMS)
def test_infinite_decay_rate_keeps_only_the_last_token(implementation):
  k, v, _, u = inputs(8)

  @jax.jit
  def both(*at):
    out, vjp = jax.vjp(lambda *x: scan(*x, u, implementation=implementation)[0], *at)
    return out, *vjp(jnp.ones_like(out))

  out, *gradients = both(k, v, jnp.full(D, jnp.inf))
  weight = jax.nn.sigmoid(k[:, :-1] - k[:, 1:] - u)
  close(out[:, 1:], weight * v[:, :-1] + (1 - weight) * v[:, 1:])
  assert all(jnp.isfinite(g).all() for g in gradients)
  assert not jnp.any(gradients[2])


def test_second_derivatives_through_the_state_equal_those_of_the_reference():
  """The scale is as fixed in the derivative of the gradient as in the gradient."""
  arguments = inputs(3)

  def second(form):
    def loss(*arguments):
      out, state = scan(*arguments, implementation=form)
      return sum(jnp.sum(x**2) for x in (out, *meaning(state)))

    along = lambda *x: jax.jvp(jax.grad(loss, range(4)), x, x)[1]
    return jax.jit(along)(*arguments)

  close(second("chunked"), second("reference"))


@pytest.mark.slow
def test_outputs_are_between_the_values_so_far():
  k, v, w, u = inputs(300, size=30.0)
  out, _ = jax.jit(lambda *x: wkv4(*x))(k, v, w, u)
  slack = 1e-6
  assert (out <= jax.lax.cummax(v, axis=1) + slack).all()
  assert (out >= jax.lax.cummin(v, axis=1) - slack).all()


@pytest.mark.slow
def test_tiny_gradients_are_accurate_relative_to_themselves():
  """Where one weight is nearly 1, gradients of keys are tiny differences, 1e-6 next to 1."""
  k = jnp.asarray([15.0, 0.0, 1.0, -3.0, 2.0, 0.0])[None, :, None]
  v = jnp.asarray([1.0, -2.0, 0.5, 3.0, 1.5, 0.25])[None, :, None]
  w, u = jnp.asarray([0.1]), jnp.asarray([0.3])
  loss = lambda k, form: jnp.sum(
    scan(k, v.astype(k.dtype), w, u, implementation=form)[0] * (1 + jnp.arange(6)[:, None])
  )
  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  got = gradient(k, "chunked")
  with jax.enable_x64(True):
    want = gradient(jnp.asarray(k, jnp.float64), "reference")
  np.testing.assert_allclose(got, want, rtol=contract.tolerance(jnp.float32, 6))
  assert 0 < np.abs(want).max() < 1e-4


@pytest.mark.slow
def test_state_with_another_scale_gives_the_same_output():
  """exp(max) numerator and exp(max) denominator are the state; outputs and gradients agree."""
  k, v, w, u = inputs(4)
  state = WKV4State(jnp.full((B, D), 1.5), jnp.ones((B, D)), jnp.full((B, D), 2.0))
  scaled = WKV4State(state.max + 3, *(jnp.exp(-3.0) * x for x in state[1:]))

  @jax.jit
  def run(state):
    def loss(state):
      out, last = scan(k, v, w, u, initial_state=state)
      return jnp.sum(out**2), (out, meaning(last))

    return jax.grad(loss, has_aux=True)(state)

  (gradient, values), (gradient_scaled, values_scaled) = run(state), run(scaled)
  close(values_scaled, values)
  close(gradient_scaled.numerator, jnp.exp(3.0) * gradient.numerator)
  close(gradient_scaled.max, gradient.max)


@pytest.mark.slow
def test_memory_of_the_backward_pass_holds_states_between_chunks():
  T, width = 4096, 32
  x = jax.ShapeDtypeStruct((1, T, width), jnp.float32)
  parameter = jax.ShapeDtypeStruct((width,), jnp.float32)

  def memory(form):
    loss = lambda *args: jnp.sum(wkv4(*args, implementation=form)[0] ** 2)
    compiled = jax.jit(jax.grad(loss, argnums=range(4))).lower(x, x, parameter, parameter).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (T * width * 4)

  # The output, its cotangent, and three states of every 8th step; autodiff keeps every step's.
  assert memory("chunked") < 2.5
  assert memory("reference") > 7


def test_chunks_on_accelerators_have_fewer_tokens_where_arrays_are_large():
  sizes = (
    accelerator_chunk_size(*of) for of in ((1, 64), (1, 2048), (8, 1024), (8, 2048), (64, 4096))
  )
  assert list(sizes) == [512, 512, 128, 64, 64]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"v": (B, 5, D)}, r"v has shape \(2, 5, 3\).*\[2, 6, 3\]"),
    ({"k": (B, 6)}, r"k has shape \(2, 6\), but \[B, T, D\]"),
    ({"k": (B, 0, D), "v": (B, 0, D)}, "T >= 1"),
    ({"decay_rate": (B, D)}, r"decay_rate has shape \(2, 3\), but \[D\] = \[3\]"),
    ({"bonus": (4,)}, r"bonus has shape \(4,\)"),
    ({"initial_state": wkv4.init_state(batch=B, dim=4)}, r"initial_state.max has shape \(2, 4\)"),
    ({"k": jnp.zeros((B, 6, D), jnp.int32)}, "k has dtype int32; it must be floating point"),
  ],
)
def test_bad_argument_raises_and_is_named(change, message):
  arguments = {"k": (B, 6, D), "v": (B, 6, D), "decay_rate": (D,), "bonus": (D,)} | change
  arguments = {n: jnp.zeros(x) if type(x) is tuple else x for n, x in arguments.items()}
  with pytest.raises(ValueError, match=message):
    wkv4(**arguments)
