"""Gradients of the LNSSM mixer: right everywhere, finite and of sane size from the first step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lnssm_jax.mixers import LNSSM
from tests.mixers.helpers import apply, inputs, random_lnssm, split
from tests.mixers.references import lnssm as reference


@pytest.mark.parametrize(
  "options", [{}, {"shift": "kvg", "decay_first": False}], ids=["default", "kvg, read first"]
)
def test_gradients_match_float64(options):
  """With respect to every parameter and the input, for decays from 0.993 to 2e-9 per token."""
  mixer, x = random_lnssm(**options), inputs(1, 70, 8)
  graphdef, params = split(mixer)
  params["w"] = jnp.linspace(-5.0, 3.0, 8)
  weight = inputs(1, 70, 8, seed=7)

  def loss(params, x):
    return jnp.sum(weight * nnx.merge(graphdef, params)(x)[0])

  got = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)

  with jax.enable_x64(True):
    exact = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (params, x, weight))

    def exact_loss(params, x):
      out = reference.lnssm(params, x[0], num_heads=2, **options, xp=jnp)
      return jnp.sum(exact[2][0] * out)

    want = jax.jit(jax.grad(exact_loss, argnums=(0, 1)))(*exact[:2])
    want = jax.tree.map(np.asarray, want)

  for (path, a), b in zip(
    jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True
  ):
    error = np.abs(a - b).max() / np.abs(b).max()
    assert error < 1e-5, f"{jax.tree_util.keystr(path)}: {error}"
    if jax.tree_util.keystr(path) == "[0]['w']":
      # Channels that forget at once have gradients 1e-7 of the largest; they must be right too.
      np.testing.assert_allclose(a[b != 0], b[b != 0], rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_gradients_at_initialization_are_finite(dtype):
  """W_q = W_k = 0: the norm is taken of zeros. With W_o = 0 no gradient would get that far."""
  graphdef, params = split(LNSSM(8, num_heads=2, dtype=dtype, rngs=nnx.Rngs(0)))
  params["o_proj"]["kernel"] = jnp.eye(8)
  x = inputs(1, 1024, 8)

  @jax.jit
  def gradients(params, x):
    return jax.grad(
      lambda p, x: jnp.sum(nnx.merge(graphdef, p)(x)[0].astype(jnp.float32) ** 2), argnums=(0, 1)
    )(params, x)

  grads = gradients(params, x)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
  largest = {name: np.abs(grads[0][f"{name}_proj"]["kernel"]).max() for name in "qkv"}
  assert 0 < largest["q"] < 100 * largest["v"]
  assert 0 < largest["k"] < 100 * largest["v"]


@pytest.mark.slow
def test_gradients_flow_through_the_state():
  """A loss on the second half alone, seen from the first half's inputs through the state."""
  mixer, x = random_lnssm(), inputs(1, 6, 8)

  def whole(x):
    return jnp.sum(apply(mixer, x)[0][:, 4:] ** 2)

  def in_two_calls(x):
    _, state = apply(mixer, x[:, :4])
    return jnp.sum(apply(mixer, x[:, 4:], state)[0] ** 2)

  want, got = (jax.jit(jax.grad(loss))(x) for loss in (whole, in_two_calls))
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * np.abs(want).max())
  assert np.abs(want[:, :4]).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_first_optimizer_steps_move_every_kernel(dtype):
  """Zero matrices come to life one after another, none with an outsized gradient.

  Step 1 moves W_o alone; step 2 the rest. A norm that is steep at zero would give W_q and W_k
  gradients 1e8 times the usual in step 2, and Adam, remembering them, would then hold them still.
  """
  x, target = inputs(2, 32, 8), inputs(2, 32, 8, seed=2)
  graphdef, params = split(LNSSM(8, num_heads=2, dtype=dtype, rngs=nnx.Rngs(0)))
  optimizer = optax.adam(1e-3, b1=0.9, b2=0.99)

  @jax.jit
  def step(params, memory):
    def loss(params):
      return jnp.mean((nnx.merge(graphdef, params)(x)[0] - target) ** 2)

    grads = jax.grad(loss)(params)
    updates, memory = optimizer.update(grads, memory)
    return optax.apply_updates(params, updates), memory, grads

  kernel = lambda tree, name: np.asarray(tree[f"{name}_proj"]["kernel"])
  memory, sizes, moved = optimizer.init(params), [], []
  for _ in range(12):
    before = params
    params, memory, grads = step(params, memory)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, grads)))
    sizes.append({name: np.linalg.norm(kernel(grads, name)) for name in "qkvgo"})
    moved.append(np.abs(kernel(params, "q") - kernel(before, "q")).max())

  assert [sizes[0][name] for name in "qkvg"] == [0, 0, 0, 0]
  assert sizes[0]["o"] > 0
  for name in "qk":
    assert 0 < sizes[1][name] < sizes[0]["o"]
    assert sizes[1][name] < 10 * sizes[2][name]
  assert min(moved[1:]) > 2e-4  # of a learning rate of 1e-3: W_q keeps learning


def test_algorithm_2_as_printed_is_not_the_gradient_of_the_decay():
  """Of y_t = q_t S_t, S_t = a S_{t-1} + k_t v_t: the printed sum takes a D_{t+1} in place of D_t.

  D_t = dS_t / da = S_{t-1} + a D_{t-1} needs the state before the token.
  """
  rng = np.random.default_rng(0)
  q, k, v, weight = (rng.normal(size=(1, 6, 1, size)) for size in (3, 3, 2, 2))
  a = np.array([0.9, 0.5, 0.1])

  def loss(a):
    S, total = np.zeros((3, 2)), 0.0
    for t in range(6):
      S = a[:, None] * S + np.outer(k[0, t, 0], v[0, t, 0])
      total += q[0, t, 0] @ S @ weight[0, t, 0]
    return total

  S, D, corrected, printed = np.zeros((3, 2)), np.zeros((3, 2)), np.zeros(3), np.zeros(3)
  for t in range(6):
    D = S + a[:, None] * D
    S = a[:, None] * S + np.outer(k[0, t, 0], v[0, t, 0])
    corrected += q[0, t, 0] * (D @ weight[0, t, 0])
    printed += q[0, t, 0] * (a[:, None] * (S + a[:, None] * D) @ weight[0, t, 0])

  h = 1e-5
  exact = np.array([(loss(a + h * e) - loss(a - h * e)) / (2 * h) for e in np.eye(3)])
  np.testing.assert_allclose(corrected, exact, rtol=1e-7)
  assert np.abs(printed / exact - 1).max() > 0.5
