"""Tests particular to diagonal_scan; the contract suite covers the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.ops.core.precision import binary_powers
from lnssm_jax.ops.diagonal_scan.api import diagonal_scan
from lnssm_jax.ops.diagonal_scan.types import DiagonalState
from tests.ops.promises import close

B, D = 2, 3
FORMS = ["chunked", "associative", "reference"]


def inputs(T, seed=0, dtype=jnp.float32, complex_=False):
  rng = np.random.default_rng(seed)
  decay = np.exp(-np.exp(rng.normal(size=(B, T, D)) - 1))
  x = rng.normal(size=(B, T, D))
  if complex_:
    decay = decay * np.exp(1j * rng.uniform(-3, 3, size=decay.shape))
    x = x + 1j * rng.normal(size=x.shape)
    return jnp.asarray(decay, jnp.complex64), jnp.asarray(x, jnp.complex64)
  return jnp.asarray(decay, dtype), jnp.asarray(x, dtype)


def scan(decay, x, **kwargs):
  return diagonal_scan(decay, x, **({"chunk_size": 8} | kwargs))


@pytest.mark.parametrize("reverse", [False, True])
def test_diagonal_scan_equals_the_explicit_sum(reverse):
  """h_i = sum_j (product of the decays after j up to i) x_j, in numpy float64."""
  T = 23
  decay, x = (np.asarray(y, np.complex128) for y in inputs(T, complex_=True))
  if reverse:
    decay, x = decay[:, ::-1], x[:, ::-1]
  want = np.stack(
    [
      sum(np.prod(decay[:, j + 1 : i + 1], axis=1) * x[:, j] for j in range(i + 1))
      for i in range(T)
    ],
    axis=1,
  )
  want = want[:, ::-1] if reverse else want
  out, state = scan(*inputs(T, complex_=True), reverse=reverse)
  parts = lambda *ys: [(np.real(y), np.imag(y)) for y in ys]
  close(parts(out, state.h), parts(want, want[:, 0 if reverse else -1]))


@pytest.mark.parametrize("complex_", ["ax", "a", "x"])
def test_diagonal_scan_complex_gradients_equal_those_of_the_reference(complex_):
  """jax.grad with respect to the complex arrays themselves: JAX's convention."""
  decay, x = inputs(11, complex_=True)
  decay, x = decay if "a" in complex_ else decay.real, x if "x" in complex_ else x.real
  initial = x[:, 0] * (1 + 2j)

  def loss(decay, x, h, implementation):
    out, state = scan(decay, x, initial_state=DiagonalState(h), implementation=implementation)
    return jnp.sum(jnp.abs(out) ** 2 * jnp.arange(11.0)[:, None]) + jnp.sum((1j * state.h).real)

  got, want = (
    jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(decay, x, initial, form)
    for form in ("chunked", "reference")
  )
  assert [g.dtype for g in got] == [decay.dtype, x.dtype, initial.dtype]
  split = lambda tree: [(np.real(y), np.imag(y)) for y in tree]
  close(split(got), split(want))


@pytest.mark.slow
def test_diagonal_scan_split_reversed_sequence_equals_one_call():
  """The state belongs to the last document, which the scan meets first."""
  decay, x = inputs(20)
  segments = jnp.asarray(np.arange(20) // 7 * np.ones((B, 1)), jnp.int32)
  run = jax.jit(lambda *y: scan(*y[:2], initial_state=y[2], segment_ids=y[3], reverse=True))
  whole = run(decay, x, None, segments)
  for cuts in ([13], list(range(1, 20))):
    state, outs = None, []
    for start, end in reversed(list(zip([0, *cuts], [*cuts, 20], strict=True))):
      if end % 7 == 0:
        state = None
      out, state = run(decay[:, start:end], x[:, start:end], state, segments[:, start:end])
      outs.append(out)
    close((jnp.concatenate(outs[::-1], 1), state), whole)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("implementation", FORMS)
def test_diagonal_scan_zero_decay_resets_exactly(implementation, constant):
  _, x = inputs(20)
  decay = jnp.zeros(D) if constant else jnp.zeros_like(x)

  @jax.jit
  def both(decay, x):
    out, vjp = jax.vjp(lambda *y: scan(*y, implementation=implementation)[0], decay, x)
    return out, *vjp(jnp.ones_like(x))

  out, d_decay, d_x = both(decay, x)
  np.testing.assert_array_equal(out, x)
  np.testing.assert_array_equal(d_x, jnp.ones_like(x))
  want = np.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
  close(d_decay, want.sum((0, 1)) if constant else want)


def test_diagonal_scan_decay_above_one_grows():
  x = inputs(12)[1]
  out, _ = scan(jnp.full(D, 2.0), x)
  close(out[:, -1], np.einsum("btd,t->bd", x, 2.0 ** np.arange(11, -1, -1)))


@pytest.mark.parametrize("complex_", [False, True])
def test_binary_powers_have_full_precision(complex_):
  """Repeated squaring in plain float32 is wrong by more than a hundred roundings here."""
  rng = np.random.default_rng(0)
  d = 1 - np.exp(rng.normal(size=32) - 7)
  d = (d * np.exp(1j * rng.uniform(-3, 3, 32))).astype(np.complex64) if complex_ else d
  d = jnp.asarray(d, jnp.complex64 if complex_ else jnp.float32)
  got = np.asarray(jax.jit(lambda d: jnp.stack(binary_powers(d, 11)))(d), np.complex128)
  want = np.asarray(d, np.complex128) ** (2.0 ** np.arange(11)[:, None])
  assert np.abs(got / want - 1).max() < 2 * np.finfo(np.float32).eps


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_diagonal_scan_narrow_inputs_have_float32_states(dtype):
  out, state = scan(*inputs(5, dtype=dtype))
  assert (out.dtype, state.h.dtype) == (dtype, jnp.float32)
  out, state = scan(inputs(5, complex_=True)[0], inputs(5, dtype=dtype)[1])
  assert (out.dtype, state.h.dtype) == (jnp.complex64, jnp.complex64)


def test_diagonal_scan_float16_large_sums_do_not_overflow():
  x = jnp.full((1, 40, 1), 30000.0, jnp.float16).at[:, 20:].multiply(-1)
  out, state = scan(jnp.ones(1), x)
  assert state.h[0, 0] == 0.0 == out[0, -1, 0]


@pytest.mark.slow
def test_diagonal_scan_second_derivatives_of_decay_equal_the_reference():
  decay, x = inputs(9)

  def directional(form):
    first = jax.grad(lambda a: jnp.sum(scan(a, x, implementation=form, chunk_size=4)[0] ** 3))
    return jax.jit(jax.grad(lambda a: jnp.sum(first(a) * x)))(decay)

  close(directional("chunked"), directional("reference"), length=2**16)


@pytest.mark.parametrize("constant", [False, True])
def test_diagonal_scan_gradient_memory_is_a_few_inputs(constant):
  T, width = 4096, 32
  x = jax.ShapeDtypeStruct((1, T, width), jnp.float32)
  decay = jax.ShapeDtypeStruct((width,), jnp.float32) if constant else x

  def memory(form):
    loss = lambda a, x: jnp.sum(diagonal_scan(a, x, implementation=form)[0] ** 2)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(decay, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (T * width * 4)

  # h, its cotangent and its adjoint; autodiff of the reference keeps more.
  assert memory("chunked") < 3.1 < memory("reference")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"decay": (B, 5, D)}, r"decay has shape \(2, 5, 3\), but \[B, T, D\] = \[2, 6, 3\] or \[D\]"),
    ({"x": (B, 6)}, r"x has shape \(2, 6\), but \[B, T, D\]"),
    ({"x": (B, 0, D), "decay": (B, 0, D)}, "T >= 1"),
    ({"initial_state": DiagonalState(jnp.zeros((B, 4)))}, r"initial_state.h has shape \(2, 4\)"),
    (
      {"initial_state": DiagonalState(jnp.zeros((B, D), complex))},
      "initial_state.h is complex, but decay and x are real",
    ),
    ({"x": jnp.zeros((B, 6, D), jnp.int32)}, "x has dtype int32; it must be floating point"),
  ],
)
def test_diagonal_scan_bad_argument_raises_naming_it(change, message):
  arguments = {"decay": (B, 6, D), "x": (B, 6, D)} | change
  arguments = {n: jnp.zeros(y) if type(y) is tuple else y for n, y in arguments.items()}
  with pytest.raises(ValueError, match=message):
    diagonal_scan(**arguments)
