"""Mixtures of experts against a loop over experts in float64, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.models import MixtureOfExperts, experts
from lnssm_jax.models.experts import AXIS, Router, mixture
from lnssm_jax.models.settings import params_of

D, F, E, K, SHAPE = 6, 5, 8, 3, (3, 7, 6)
QWEN = {"shared_hidden": 4, "shared_gate": True}
DEEPSEEK = {"router": "sigmoid", "weight_scale": 2.5, "num_groups": 4, "groups_per_token": 2}
DEEPSEEK |= {"balance_bias": True, "shared_hidden": 4, "balance": 0.5, "weight_eps": 0.3}
LING = DEEPSEEK | {"limit": 2.0, "shared_limit": 1.5}
NEMOTRON = DEEPSEEK | {"num_groups": 1, "groups_per_token": 1, "gated": False, "latent": 4}
NEMOTRON |= {"activation": "squared_relu"}
PLAIN = {"normalize_weights": False, "balance": 0.0}


def selection(p, x, *, router="softmax", num_groups=1, groups_per_token=1, **_):
  """bool [.., E] in NumPy, float64: token after token, group after group."""
  logits = x @ p["router"]["kernel"]
  s = np.exp(logits - logits.max(-1, keepdims=True))
  s = s / s.sum(-1, keepdims=True) if router == "softmax" else 1 / (1 + np.exp(-logits))
  ranked, size = s + p.get("router_bias", 0.0), E // num_groups
  chosen = np.zeros(s.shape, bool)
  for place in np.ndindex(s.shape[:-1]):
    of_group = np.sort(ranked[place].reshape(num_groups, size))[:, -2:].sum(-1)
    groups = np.argsort(of_group)[::-1][:groups_per_token]
    allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
    chosen[place][sorted(allowed, key=lambda e, of=ranked[place]: -of[e])[:K]] = True
  return chosen


def dense(p, x, chosen, *, router="softmax", weight_scale=1.0, normalize_weights=True,
          balance=0.01, weight_eps=0.0, limit=np.inf, shared_limit=np.inf, **_):  # fmt: skip
  """(y, the balance loss), every expert applied to every token."""

  def mlp(p, e=..., x=x, limit=limit):
    up, down = (p[name]["kernel"][e] for name in ("up", "down"))
    if "gate" not in p:
      return jnp.square(jax.nn.relu(x @ up)) @ down
    gate = jnp.minimum(jax.nn.silu(x @ p["gate"]["kernel"][e]), limit)
    return gate * jnp.clip(x @ up, -limit, limit) @ down

  logits = x @ p["router"]["kernel"]
  s = jax.nn.softmax(logits) if router == "softmax" else 1 / (1 + jnp.exp(-logits))
  w = jnp.where(chosen, s, 0)
  w = weight_scale * (w / (w.sum(-1, keepdims=True) + weight_eps) if normalize_weights else w)
  inner = x @ p["latent_down"]["kernel"] if "latent_down" in p else x
  y = sum(w[..., e : e + 1] * mlp(p["experts"], e, inner) for e in range(E))
  y = y @ p["latent_up"]["kernel"] if "latent_up" in p else y
  if "shared" in p:
    gate = jax.nn.sigmoid(x @ p["shared_gate"]["kernel"]) if "shared_gate" in p else 1.0
    y += gate * mlp(p["shared"], limit=shared_limit)
  mass = (s / s.sum(-1, keepdims=True)).reshape(-1, E).mean(0)
  return y, balance * E / K * (mass * chosen.reshape(-1, E).mean(0)).sum()


@pytest.mark.parametrize(
  "options",
  [
    pytest.param(QWEN, id="qwen", marks=pytest.mark.slow),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.slow),
    pytest.param(LING, id="deepseek"),
    pytest.param(NEMOTRON, id="nemotron", marks=pytest.mark.slow),
  ],
)
def test_experts_values_and_gradients_match_a_loop_in_float64(options):
  module = MixtureOfExperts(
    D, hidden=F, num_experts=E, experts_per_token=K, **options, rngs=nnx.Rngs(0)
  )
  nnx.update(module, jax.tree.map(lambda x: 20 * x, nnx.state(module, nnx.Param)))
  rng = np.random.default_rng(1)
  if module.router_bias is not None:
    module.router_bias[...] = jnp.asarray(rng.normal(size=E), jnp.float32)
  graph, params = nnx.split(module, nnx.Param)
  x, c = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))

  @jax.jit
  def found(params, x):
    def loss(params, x):
      y, aux = nnx.merge(graph, params).with_aux(x)
      return jnp.sum(c * y) + aux.loss, (y, aux)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

  (_, (y, aux)), (d_params, d_x) = found(params, x)
  wide = jax.tree.map(np.float64, (params_of(module), x))
  chosen = selection(*wide, **options)
  with jax.enable_x64(True):

    def loss(p, x):
      y, aux = dense(p, x, chosen, **options)
      return jnp.sum(np.float64(c) * y) + aux, (y, aux)

    (_, wanted), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*wide)
    (want, want_aux), gradients = jax.tree.map(np.asarray, (wanted, gradients))
  matrices = 3 * D if options.get("gated", True) else 2 * options["latent"]
  assert module.idle_entries == matrices * F * (E - K)
  share = chosen.reshape(-1, E).mean(0)
  assert share.min() < K / E < share.max()
  np.testing.assert_allclose(aux.share, share, rtol=1e-6)
  np.testing.assert_allclose(aux.loss, want_aux, rtol=1e-5, atol=1e-9)
  np.testing.assert_allclose(y, want, rtol=0, atol=3e-6 * np.abs(want).max())
  got = nnx.to_pure_dict(d_params), d_x
  if module.router_bias is not None:  # what the optimizer takes the sign of
    np.testing.assert_allclose(got[0].pop("router_bias"), share - K / E, rtol=0, atol=1e-6)
    assert not gradients[0].pop("router_bias").any()
  for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True):
    np.testing.assert_allclose(x, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_experts_drop_no_token_where_all_select_one():
  """Next to a shared one with its gate."""
  options = {"num_experts": E, "experts_per_token": 1, "balance_bias": True, "balance": 1.0}
  options |= {"shared_hidden": 4, "shared_gate": True}
  module = MixtureOfExperts(D, hidden=F, **options, rngs=nnx.Rngs(0))
  module.router_bias[...] = jnp.zeros(E).at[2].set(9.0)
  module.shared_gate.kernel[...] *= 50
  x = jax.random.normal(jax.random.key(0), SHAPE)

  def alone(module, x):
    gate = jax.nn.sigmoid(x @ module.shared_gate.kernel[...])
    return jax.tree.map(lambda leaf: leaf[2], module.experts)(x) + gate * module.shared(x)

  (y, aux), want = jax.jit(lambda module, x: (module.with_aux(x), alone(module, x)))(module, x)
  np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-8)
  assert aux.share.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
  assert module.idle_entries == 3 * D * F * (E - 1)


def test_experts_select_by_logits_in_float32_and_start_apart():
  """Of 8 experts 2, with weights of sum 1; probabilities that are equal are not selected by."""
  module = MixtureOfExperts(D, hidden=F, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
  assert module.route == Router("softmax", 2, 1e-20, 1.0, 1, 1, 0.01)
  assert len(np.unique(module.experts.gate.kernel[:, 0, 0])) == 8
  x = jax.random.normal(jax.random.key(0), (7, D))
  want = module.route(jnp.matmul(x, module.router.kernel[...], precision="highest"), None)[2].loss
  np.testing.assert_allclose(jax.jit(lambda x: module.with_aux(x)[1].loss)(x), want, rtol=1e-6)
  logits = jnp.array([[0.0, -201.0, -200.0]])
  assert module.route(logits, None)[1].tolist() == [[0, 2]]


def test_experts_with_a_row_more_than_their_blocks_drop_none():
  """Experts of 5 rows and 1 in blocks of 4: three blocks, the most that 6 rows can need."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  kernels = normal(2, D, F), normal(2, F, D)
  x, weights, indices = normal(6, D), normal(6, 1), jnp.array([[0], [0], [1], [0], [0], [0]])
  got = jax.jit(lambda: mixture(kernels, jax.nn.silu, x, weights, indices, 2))()
  up, down = (kernel[indices[:, 0]] for kernel in kernels)
  want = weights * jnp.einsum("nf,nfd->nd", jax.nn.silu(jnp.einsum("nd,ndf->nf", x, up)), down)
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_experts_in_four_shards_are_those_of_one_with_more_rows_than_room_too(monkeypatch):
  """Of 16 rows each shard has 4, and room for 5; or the first has 13. Gradients too."""
  rng = np.random.default_rng(0)
  kernels = rng.normal(size=(E, D, F)), rng.normal(size=(E, D, F)), rng.normal(size=(E, F, D))
  x, weights, cotangent = rng.normal(size=(8, D)), rng.random((8, 2)), rng.normal(size=(8, D))
  even = np.int32([[n, (n + 1) % E] for n in range(8)])
  uneven = np.int32([[0, 1 if n < 5 else n] for n in range(8)])
  divided = lambda tree: jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), tree)

  def one(kernels, x, weights, indices):
    return mixture(kernels, jax.nn.silu, x, weights, indices, E)

  def shards(kernels, x, weights, indices):
    given = divided((kernels, x, weights, indices))
    return jax.vmap(one, axis_name=AXIS)(*given).reshape(x.shape)

  def gradients(run, indices):
    y, back = jax.vjp(lambda *given: run(*given, indices), kernels, x, weights)
    return y, back(cotangent)

  with jax.enable_x64(True):
    found = jax.jit(lambda indices: (gradients(shards, indices), gradients(one, indices)))
    for indices in (even, uneven):
      for got, want in zip(*map(jax.tree.leaves, found(indices)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)
  # In room for all rows are NaN from here on.
  all_rows = lambda _, order, into_kernel, down_kernel, x, weights: jnp.full_like(x, np.nan)
  monkeypatch.setattr(experts._Products, "__call__", all_rows)
  y = jax.jit(shards)(*jax.tree.map(np.float32, (kernels, x, weights)), even)
  assert np.isfinite(y).all()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"experts_per_token": 9}, "experts_per_token=9 is more than num_experts=8"),
    ({"num_groups": 3}, "num_groups=3 must divide num_experts=8"),
    ({"num_groups": 8}, "groups_per_token=1 groups must have experts_per_token=2 experts"),
    ({"shared_gate": True}, "shared_gate=True needs shared_hidden"),
    ({"router": "relu"}, "router='relu'"),
    ({"balance": -1.0}, "balance=-1.0 must be a number of at least 0"),
  ],
)
def test_experts_with_wrong_options_are_an_error(options, message):
  with pytest.raises(ValueError, match=message) as error:
    MixtureOfExperts(8, **options, rngs=nnx.Rngs(0))
  assert "\n" not in str(error.value)
