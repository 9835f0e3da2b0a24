"""The LCSM framework: its backward pass against automatic differentiation, and as printed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax.frameworks import lcsm
from tests.mixers import tiny
from tests.mixers.helpers import relative_error

T, K, D = 6, 3, 4


def drawn(product):
  """(streams, m_0, dy) in float64; the matrices of "matrix" are near the unit matrix."""
  rng = np.random.default_rng(0)
  o = rng.uniform(0.3, 1, (T, K, D))
  if product == "matrix":
    o = np.eye(K) + 0.3 * rng.normal(size=(T, K, K))
  streams = lcsm.Streams(
    rng.normal(size=(T, K)), o, rng.normal(size=(T, K)), rng.normal(size=(T, D))
  )
  return streams, rng.normal(size=(K, D)), rng.normal(size=(T, D))


def printed(streams, initial, dy, product):
  """Section 5.1 as printed: m_t in do, and no transpose in type 2."""
  states = np.asarray(lcsm.recurrence(streams, initial, product=product)[1])
  later, gradients = np.zeros((K, D)), []
  for t in reversed(range(T)):
    e, o, s, i = (x[t] for x in streams)
    cotangent = np.outer(s, dy[t]) + later
    elementwise = product == "elementwise"
    do = cotangent * states[t] if elementwise else cotangent @ states[t].T
    gradients.append((cotangent @ i, do, states[t] @ dy[t], cotangent.T @ e))
    later = o * cotangent if elementwise else o @ cotangent
  return lcsm.Streams(*(np.stack(rows[::-1]) for rows in zip(*gradients, strict=True)))


@pytest.mark.parametrize("product", lcsm.PRODUCTS)
def test_backward_pass_of_complex_streams_equals_automatic_differentiation(product):
  rotated = lambda z: z * np.exp(1j * np.random.default_rng(1).uniform(0, 6, z.shape))
  with jax.enable_x64():
    streams, initial, dy = jax.tree.map(rotated, drawn(product))
    run = lambda streams, initial: lcsm.recurrence(streams, initial, product=product)[0]
    want = jax.vjp(run, streams, initial)[1](jnp.asarray(dy))
    got = lcsm.backward(streams, dy, initial, product=product)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), got, want)


@pytest.mark.parametrize("product", lcsm.PRODUCTS)
def test_backward_pass_equals_automatic_differentiation_and_the_printed_one_does_not(product):
  with jax.enable_x64():
    streams, initial, dy = drawn(product)
    run = lambda streams, initial: lcsm.recurrence(streams, initial, product=product)[0]
    _, vjp = jax.vjp(run, streams, initial)
    want, want_initial = vjp(jnp.asarray(dy))
    got, got_initial = lcsm.backward(streams, dy, initial, product=product)
    as_printed = printed(streams, initial, dy, product)
  for name in lcsm.Streams._fields:
    assert relative_error(getattr(got, name), getattr(want, name)) < 1e-13, name
  assert relative_error(got_initial, want_initial) < 1e-13
  wrong = {
    name
    for name in lcsm.Streams._fields
    if relative_error(getattr(as_printed, name), getattr(want, name)) > 1e-2
  }
  assert wrong == ({"o"} if product == "elementwise" else {"e", "o", "i"})


def test_recurrence_is_the_sum_over_earlier_tokens():
  with jax.enable_x64():
    streams, _, _ = drawn("elementwise")
    y, _ = lcsm.recurrence(streams)
  e, o, s, i = streams
  for t in range(T):
    want = sum(
      (s[t][:, None] * np.prod(o[j + 1 : t + 1], axis=0) * e[j][:, None]).sum(0) * i[j]
      for j in range(t + 1)
    )
    np.testing.assert_allclose(y[t], want, rtol=1e-12)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"e": np.ones(3)}, r"e has shape \(3,\), but \[T, k\]"),
    ({"s": np.ones((T, 2))}, r"s has shape \(6, 2\)"),
    ({"o": np.ones((T, K, K))}, r"o has shape \(6, 3, 3\), but o of product='elementwise'"),
    ({"i": np.ones((T, D), int)}, "i has dtype int"),
  ],
)
def test_bad_streams_raise_with_the_stream_named(change, message):
  with pytest.raises(ValueError, match=message):
    lcsm.recurrence(drawn("elementwise")[0]._replace(**change))


def test_unknown_product_and_bad_cotangent_raise():
  streams, _, dy = drawn("elementwise")
  with pytest.raises(ValueError, match="did you mean 'matrix'"):
    lcsm.recurrence(streams, product="matrx")
  with pytest.raises(ValueError, match=r"dy has shape \(6, 3\)"):
    lcsm.backward(streams, dy[:, 1:])


@pytest.mark.parametrize(
  ("name", "rows"),
  [
    ("delta_net", ["token token token k x k"]),
    ("gsa", ["token token token d", "token token token k"]),
  ],
)
def test_description_says_what_depends_on_the_token(name, rows):
  found = lcsm.describe(tiny.randomized(name))
  assert [" ".join(filter(None, (d.e, d.o, d.s, d.axes))) for d in found] == rows
