"""Tests particular to long_convolution; the contract suite covers the rest."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.causal_conv1d.types import ConvState
from lnssm_jax.ops.long_convolution.api import long_convolution
from lnssm_jax.ops.long_convolution.exponentials import exponential_kernel_taps, exponentials
from lnssm_jax.ops.long_convolution.taps import fast_length
from lnssm_jax.ops.long_convolution.types import ExponentialKernel, ExponentialState
from tests.ops import contract, promises

B, D = 2, 3
TAPS = ["fft", "chunked", "reference"]
SUMS = ["chunked", "associative", "reference"]


def close(got, want, dtype=jnp.float32, length=64):
  parts = lambda tree: jax.tree.map(lambda x: (np.real(x), np.imag(x)), tree)
  promises.close(parts(got), parts(want), dtype, length)


def draw(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def exponential_kernel(N=4, seed=0):
  rng = np.random.default_rng(seed)
  log_pole = -np.exp(rng.normal(size=(D, N)) - 2) + 1j * rng.uniform(-np.pi, np.pi, (D, N))
  coefficient = rng.normal(size=(D, N)) + 1j * rng.normal(size=(D, N))
  log_pole, coefficient = (jnp.asarray(x, jnp.complex64) for x in (log_pole, coefficient))
  return ExponentialKernel(log_pole, coefficient, jnp.asarray(draw(D)))


def kernel_of(kind, L=9):
  return exponential_kernel() if kind == "sum" else jnp.asarray(draw(L, D, seed=1))


def convolve(x, taps):
  """`numpy.convolve` of every channel in float64."""
  x, taps = np.asarray(x, np.float64), np.asarray(taps, np.float64)
  channels = [
    [np.convolve(x[b, :, d], taps[:, d])[: x.shape[1]] for d in range(x.shape[2])]
    for b in range(x.shape[0])
  ]
  return np.moveaxis(np.asarray(channels), 1, 2)


@jax.jit
def both(x, kernel):
  """The taps of a sum of exponentials, and the outputs of its recurrence."""
  return exponential_kernel_taps(kernel, x.shape[1]), long_convolution(x, kernel, chunk_size=16)[0]


@pytest.mark.parametrize("L", [30, 200])
@pytest.mark.parametrize("implementation", TAPS)
def test_taps_shorter_and_longer_than_x_equal_numpy_convolve(implementation, L):
  x, taps = draw(B, 150, D), draw(L, D, seed=1)
  out, _ = jax.jit(lambda *a: long_convolution(*a, implementation=implementation))(x, taps)
  close(out, convolve(x, taps))


@pytest.mark.parametrize("implementation", SUMS)
def test_exponential_kernel_equals_its_taps(implementation):
  x, kernel = draw(B, 75, D), exponential_kernel()
  length = np.arange(75)[:, None, None]
  log_pole, coefficient = (np.asarray(a, np.complex128) for a in kernel[:2])
  taps = (coefficient * np.exp(length * log_pole)).sum(-1).real
  taps[0] += kernel.direct
  close(jax.jit(exponential_kernel_taps, static_argnums=1)(kernel, 75), taps)
  out, _ = jax.jit(lambda *a: long_convolution(*a, implementation=implementation))(x, kernel)
  close(out, convolve(x, taps))


def test_exponentials_large_lags_have_full_precision():
  """Rounding l p to float32 would give phase errors of 0.03 here."""
  rng = np.random.default_rng(0)
  log_pole = (-1e-7 * rng.random(64) + 1j * rng.uniform(-6, 6, 64)).astype(np.complex64)
  steps = (0, 1, 2, 63, 64, 1000, 131_072, 1_000_003)
  got = np.asarray(jax.jit(lambda p: exponentials(p, steps))(log_pole), np.complex128)
  want = np.exp(np.asarray(steps)[:, None] * log_pole.astype(np.complex128))
  assert np.abs(got / want - 1).max() < 2 * np.finfo(np.float32).eps


@pytest.mark.parametrize("implementation", SUMS)
def test_exponential_kernel_zero_pole_keeps_one_step(implementation):
  """Re log_pole = -inf: a tap at lag 0, and finite gradients."""
  x = jnp.asarray(draw(B, 12, D))

  @jax.jit
  def run(log_pole):
    kernel = ExponentialKernel(log_pole, jnp.ones((D, 1)))
    out, state = long_convolution(x, kernel, implementation=implementation, chunk_size=4)
    return jnp.sum(out**2), (out, state.h)

  gradient, (out, h) = jax.grad(run, has_aux=True)(jnp.full((D, 1), -jnp.inf))
  close((out, h[..., 0]), (x, x[:, -1]))
  np.testing.assert_array_equal(gradient, jnp.zeros((D, 1)))


def test_exponential_kernel_s4d_and_dss_equal_their_definitions():
  """S4D-Lin with ZOH; DSS with its row-softmax over the length."""
  N, L = 8, 60
  step = np.geomspace(1e-3, 1e-1, D)[:, None]
  pole = -0.5 + 1j * np.pi * np.arange(N)[None]
  weight = draw(D, N) + 1j * draw(D, N, seed=1)
  x = draw(B, L, D)
  l = np.arange(L)[:, None, None]
  s4d = 2 * weight * np.expm1(step * pole) / pole
  dss = weight / pole / np.exp(step * pole * l).sum(0)
  for coefficient in (s4d, dss):
    want = (coefficient * np.exp(step * pole * l)).sum(-1).real
    kernel = ExponentialKernel(*(jnp.asarray(a, jnp.complex64) for a in (step * pole, coefficient)))
    # The float32 of the poles and coefficients is part of these errors.
    close(both(x, kernel), (want, convolve(x, want)))


@pytest.mark.slow
def test_exponential_kernel_tnn_conversion_is_exact():
  """TNN's conversion: n + 1 taps under a decay gamma are n exponentials, exactly.

  With one more tap the undecayed kernel sums to 0; its inverse Fourier transform then has n terms.
  """
  n, gamma = 30, 0.99
  undecayed = draw(n, D).astype(np.float64)
  padded = np.concatenate([undecayed, -undecayed.sum(0, keepdims=True)])
  spectrum = np.fft.ifft(padded, axis=0)[1:]
  angles = -2j * np.pi * np.arange(1, n + 1) / (n + 1)
  log_pole = np.broadcast_to(np.log(gamma) + angles, (D, n))
  kernel = ExponentialKernel(*(jnp.asarray(a, jnp.complex64) for a in (log_pole, spectrum.T)))
  taps = undecayed * gamma ** np.arange(n)[:, None]
  x = draw(B, n, D)
  close(both(x, kernel), (taps, convolve(x, taps)))


@pytest.mark.parametrize("kind", ["taps", "sum"])
def test_decoding_single_tokens_equals_one_call(kind):
  x, kernel = jnp.asarray(draw(B, 40, D)), kernel_of(kind)
  call = lambda *a: long_convolution(*a[:2], initial_state=a[2])
  out, last = jax.jit(call)(x, kernel, None)
  state = (
    ConvState(jnp.zeros((B, 8, D)))
    if kind == "taps"
    else ExponentialState(jnp.zeros((B, D, 4), jnp.complex64))
  )
  state, outs = jax.jit(
    lambda x, state: jax.lax.scan(
      lambda state, x_t: call(x_t[:, None], kernel, state)[::-1], state, jnp.moveaxis(x, 1, 0)
    )
  )(x, state)
  close((jnp.moveaxis(outs[:, :, 0], 0, 1), state), (out, last))


def test_decoding_single_token_has_no_fft():
  x, kernel = jnp.zeros((B, 1, D)), jnp.zeros((50, D))
  state = ConvState(jnp.zeros((B, 49, D)))
  call = lambda *a: long_convolution(*a[:2], initial_state=a[2])
  assert "fft" not in str(jax.make_jaxpr(call)(x, kernel, state))
  assert "fft" in str(jax.make_jaxpr(call)(jnp.zeros((B, 2, D)), kernel, state))


@pytest.mark.parametrize("kind", ["taps", "sum"])
def test_packed_documents_equal_separate_calls(kind):
  """Long documents, so that several levels of the tree use FFTs; one of them is infinite."""
  lengths = [1, 150, 7, 300]
  x, kernel = draw(B, sum(lengths), D), kernel_of(kind, L=200)
  x[:, 40] = np.inf
  x[0, 155] = np.nan
  ids = jnp.asarray(np.repeat([4, 9, 4, 0], lengths)[None].repeat(B, 0), jnp.int32)
  run = jax.jit(lambda x, ids: long_convolution(x, kernel, segment_ids=ids, chunk_size=16))
  packed, last = run(x, ids)
  for n, end in zip(lengths, np.cumsum(lengths), strict=True):
    got, piece = packed[:, end - n : end], x[:, end - n : end]
    if not np.isfinite(piece).all():
      assert not np.isfinite(got).all()
      continue
    out, state = run(piece, None)
    close(got, out, length=n)
  close(last, state)


@pytest.mark.parametrize("kind", ["taps", "sum"])
def test_chunked_infinite_future_inputs_change_no_bit(kind):
  """At a step whose levels use FFTs."""
  x, kernel = draw(B, 400, D), kernel_of(kind, L=400)
  run = jax.jit(lambda x: long_convolution(x, kernel, implementation="chunked")[0])
  changed = x.copy()
  changed[:, 130:] = np.inf
  before, after = run(x), run(changed)
  np.testing.assert_array_equal(before[:, :130], after[:, :130])
  assert not np.isfinite(after[:, 130:]).any()


def test_fft_small_outputs_lose_digits_that_chunked_keeps():
  """Next to inputs of 1e6, outputs of size 1 keep two digits; "chunked" keeps all before them."""
  x, taps = draw(1, 400, D), draw(400, D, seed=1)
  x[:, 200:] *= 1e6
  want = convolve(x, taps)
  early = {}
  for implementation in ("fft", "chunked"):
    out, _ = jax.jit(lambda *a, f=implementation: long_convolution(*a, implementation=f))(x, taps)
    close(out, want, length=400)
    early[implementation] = contract.relative_error(out[:, :200], want[:, :200])
  assert early["chunked"] < contract.tolerance(jnp.float32, 200)
  assert 1e-3 < early["fft"] < 1


def test_gradients_of_a_state_that_a_short_document_sees_have_full_precision():
  """Of its last token, lags 12 and more; taps fall by e at each, so that an FFT would add noise."""
  lags, ids = np.arange(100), jnp.asarray([[0] * 12 + [1] * 68])
  taps = np.float32(np.exp(-lags) * np.cos(lags))[:, None]
  how = {"segment_ids": ids, "implementation": "chunked"}
  run = lambda past: long_convolution(draw(1, 80, 1), taps, initial_state=ConvState(past), **how)
  got = jax.jit(jax.grad(lambda past: run(past)[0][0, 11, 0]))(jnp.asarray(draw(1, 99, 1)))
  want = np.append(np.zeros(11), np.float64(taps[:11:-1, 0]))  # of distances 99 ... 1
  assert contract.relative_error(got[0, :, 0], want) < 2e-7


@pytest.mark.parametrize("implementation", TAPS)
def test_taps_gradients_to_second_order_equal_finite_differences(implementation):
  rng = np.random.default_rng(3)
  with jax.enable_x64(True):
    segments = jnp.asarray([[0] * 4 + [1] * 16, [0] * 20])
    at = [jnp.asarray(rng.normal(size=s)) for s in ((2, 20, D), (6, D), (2, 5, D))]
    direction = [jnp.asarray(rng.normal(size=a.shape)) for a in at]

    def along(step):
      x, taps, past = (a + step * d for a, d in zip(at, direction, strict=True))
      out, last = long_convolution(
        x,
        taps,
        initial_state=ConvState(past),
        segment_ids=None if implementation == "fft" else segments,
        implementation=implementation,
      )
      return jnp.sum(out**3) + jnp.sum(jnp.sin(last.inputs))

    value, slope = jax.jit(along), jax.jit(jax.grad(along))
    np.testing.assert_allclose(slope(0.0), (value(1e-5) - value(-1e-5)) / 2e-5, rtol=1e-7)
    curvature = jax.jit(jax.grad(jax.grad(along)))(0.0)
    np.testing.assert_allclose(curvature, (slope(1e-5) - slope(-1e-5)) / 2e-5, rtol=1e-7)


@pytest.mark.slow
def test_exponential_kernel_complex_gradients_equal_those_of_the_reference():
  """jax.grad with respect to the complex arrays themselves: JAX's convention."""
  x, kernel = jnp.asarray(draw(B, 11, D)), exponential_kernel()
  h = jnp.asarray(draw(B, D, 4) * (1 + 2j), jnp.complex64)

  def loss(x, kernel, h, implementation):
    out, state = long_convolution(
      x,
      kernel,
      initial_state=ExponentialState(h),
      implementation=implementation,
      chunk_size=4,
    )
    return jnp.sum(out**2) + jnp.sum((1j * state.h).real)

  got, want = (
    jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)(x, kernel, h, form)
    for form in ("chunked", "reference")
  )
  assert got[1].log_pole.dtype == got[2].dtype == jnp.complex64
  close(got, want)


@pytest.mark.parametrize("implementation", ["fft", pytest.param("chunked", marks=pytest.mark.slow)])
def test_taps_under_every_transformation_stay_the_same(implementation):
  inputs, others = ({"x": draw(B, 12, D, seed=s), "kernel": draw(7, D, seed=s + 1)} for s in (0, 5))
  call = lambda inputs, **options: long_convolution(
    inputs["x"], inputs["kernel"], **({"implementation": implementation} | options)
  )
  inputs, others = jax.tree.map(jnp.asarray, (inputs, others))
  promises.works_under_every_transformation(call, inputs, others, ["x"], [implementation])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_long_convolution_narrow_inputs_have_float32_states(dtype):
  x = jnp.asarray(draw(B, 5, D), dtype)
  results = lambda *arguments: jax.eval_shape(long_convolution, *arguments)
  out, state = results(x, jnp.asarray(draw(3, D), dtype))
  assert (out.dtype, state.inputs.dtype) == (dtype, jnp.float32)
  out, state = results(x, exponential_kernel())
  assert (out.dtype, state.h.dtype) == (dtype, jnp.complex64)
  kernel = ExponentialKernel(-jnp.ones((D, 2), dtype), jnp.ones((D, 2)) * (1 + 1j))
  out, state = results(x, kernel)
  assert (out.dtype, state.h.dtype) == (dtype, jnp.float32)


def test_float16_large_sums_do_not_overflow():
  x = jnp.full((1, 40, 1), 30000.0, jnp.float16).at[:, 20:].multiply(-1)
  for kernel in (jnp.ones((40, 1)), ExponentialKernel(jnp.zeros((1, 1)), jnp.ones((1, 1)))):
    out, _ = jax.jit(long_convolution)(x, kernel)
    assert abs(out[0, -1, 0]) < 1


@pytest.mark.parametrize(
  "implementation", ["fft", "chunked", pytest.param("packed", marks=pytest.mark.slow)]
)
def test_taps_gradient_memory_is_a_few_spectra(implementation):
  """In units of x: no array per step and tap, and one level of the tree at a time."""
  T, width, batch = 4096, 4, 4
  x = jax.ShapeDtypeStruct((batch, T, width), jnp.float32)
  taps = jax.ShapeDtypeStruct((T, width), jnp.float32)
  packed = implementation == "packed"
  segments = jnp.asarray(np.arange(batch * T).reshape(batch, T) // 300) if packed else None

  def loss(x, taps):
    form = "fft" if packed else implementation
    return jnp.sum(long_convolution(x, taps, segment_ids=segments, implementation=form)[0] ** 2)

  largest, temporary = promises.measure(jax.grad(loss, argnums=(0, 1)), x, taps)
  unit = batch * T * width
  assert largest <= 2.01 * unit
  assert temporary < 12 * 4 * unit


@pytest.mark.slow
def test_long_convolution_deep_tree_finishes():
  """FFTs that run at the same time can deadlock on CPUs: see `ordering.py`."""
  program = """if True:
    import jax, jax.numpy as jnp
    from lnssm_jax import ops
    x = jnp.ones((2, 131072, 2))
    out = lambda *args: ops.long_convolution(*args, implementation="chunked")[0]
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(out(*args) ** 2), argnums=(0, 1)))
    for _ in range(3):
      jax.block_until_ready(gradient(x, x[0]))
    """
  subprocess.run([sys.executable, "-c", program], check=True, timeout=200)


@pytest.mark.parametrize(
  ("length", "fast"), [(1, 2), (127, 128), (257, 270), (1999, 2000), (131_073, 131_220)]
)
def test_fast_length_has_small_prime_factors(length, fast):
  assert fast_length(length) == fast


def test_supported_depends_on_the_kind_of_kernel():
  x = jnp.zeros((B, 6, D))
  assert ops.supported(long_convolution, x, jnp.zeros((4, D))) == ["fft", "chunked", "reference"]
  want = ["chunked", "reference", "associative"]
  assert ops.supported(long_convolution, x, exponential_kernel()) == want
  with pytest.raises(NotImplementedError, match=r"exponential_kernel_taps\(kernel, length\)"):
    long_convolution(x, exponential_kernel(), implementation="fft")
  with pytest.raises(NotImplementedError, match="kernel is an array of taps"):
    long_convolution(x, jnp.zeros((4, D)), implementation="associative")


def bad_kernel(**change):
  return ExponentialKernel(**(exponential_kernel()._asdict() | change))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"x": (B, 6)}, r"x has shape \(2, 6\), but \[B, T, D\]"),
    ({"x": (B, 0, D)}, "T >= 1"),
    ({"x": jnp.zeros((B, 6, D), jnp.int32)}, "x has dtype int32; it must be floating point"),
    ({"kernel": (4,)}, r"kernel has shape \(4,\), but \[L, D\] = \[any, 3\]"),
    ({"kernel": (4, 5)}, r"kernel has shape \(4, 5\), but \[L, D\] = \[any, 3\]"),
    ({"kernel": (0, D)}, "L >= 1"),
    ({"kernel": jnp.zeros((4, D), jnp.complex64)}, "kernel has dtype complex64"),
    ({"initial_state": ConvState(jnp.zeros((B, 4, D)))},
     r"initial_state.inputs has shape \(2, 4, 3\), but \[B, L - 1, D\] = \[2, 3, 3\]"),
    ({"initial_state": ExponentialState(jnp.zeros((B, D, 4)))},
     "initial_state is a ExponentialState, but the kernel is an array of taps"),
    ({"chunk_size": 12}, "chunk_size=12 must be a power of two"),
    ({"kernel": bad_kernel(log_pole=jnp.zeros((5, 4)))},
     r"kernel.log_pole has shape \(5, 4\), but \[D, N\] = \[3, any\]"),
    ({"kernel": bad_kernel(log_pole=jnp.zeros((D, 0)))}, "N >= 1"),
    ({"kernel": bad_kernel(log_pole=jnp.zeros((D, 4), int))}, "kernel.log_pole has dtype int32"),
    ({"kernel": bad_kernel(coefficient=jnp.zeros((D, 5)))},
     r"kernel.coefficient has shape \(3, 5\)"),
    ({"kernel": bad_kernel(direct=jnp.zeros(4))}, r"kernel.direct has shape \(4,\)"),
    ({"kernel": bad_kernel(direct=jnp.zeros(D, complex))}, "kernel.direct has dtype complex64"),
    ({"kernel": bad_kernel(log_pole=jnp.zeros((D, 4))),
      "initial_state": ExponentialState(jnp.zeros((B, D, 4), complex))},
     "initial_state.h is complex, but the kernel is real"),
  ],
)  # fmt: skip
def test_long_convolution_bad_argument_raises_naming_it(change, message):
  arguments = {"x": (B, 6, D), "kernel": (4, D)} | change
  array = lambda a: jnp.zeros(a) if type(a) is tuple else a
  with pytest.raises(ValueError, match=message):
    long_convolution(**{name: array(a) for name, a in arguments.items()})


def test_exponential_kernel_taps_bad_argument_raises_naming_it():
  with pytest.raises(ValueError, match="length=0 must be at least 1"):
    exponential_kernel_taps(exponential_kernel(), 0)
  with pytest.raises(ValueError, match=r"exponential_kernel_taps: kernel.direct has shape \(4,\)"):
    exponential_kernel_taps(bad_kernel(direct=jnp.zeros(4)), 5)
