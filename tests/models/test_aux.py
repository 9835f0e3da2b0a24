"""Auxiliary outputs of mixers: through blocks, every layer loop, meshes and Linen faces."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import linen
from lnssm_jax.mixers import Aux, Mixer
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.projections import Linear
from lnssm_jax.mixers.common.routing import balance, is_selected, top_k
from lnssm_jax.models import LanguageModel, aux_loss, layers
from tests import devices
from tests.mixers.helpers import drawn, split


class Sum(Mixer):
  """A running sum: a mixer that is quick to compile."""

  def __init__(self, dim, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs):
    self.dim = dim

  def _init_state(self, B):
    return jnp.zeros((B, self.dim))

  def _mix(self, x, state, segment_ids):
    y = jnp.cumsum(x, axis=1) + (0.0 if state is None else state[:, None])
    return y, y[:, -1]


class Routed(Sum):
  """The same, scaled by the probability of one of three parts."""

  def __init__(self, dim, *, dtype=jnp.float32, param_dtype=jnp.float32, rngs):
    super().__init__(dim, rngs=rngs)
    types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    self.router_proj = Linear(dim, 3, kernel_init=uniform_fan_in(1), **types)

  def _mix(self, x, state, segment_ids):
    return self._mix_with_aux(x, state, segment_ids)[:2]

  def _mix_with_aux(self, x, state, segment_ids):
    probabilities, chosen, indices = top_k(self.router_proj(x), 1)
    y, state = super()._mix(x * chosen, state, segment_ids)
    return y, state, balance(probabilities, is_selected(indices, 3), coefficient=0.01)


SIZES = {"vocab_size": 13, "dim": 8, "num_heads": 2, "channel_mixer": "none"}
PATTERN = (Routed, Sum)
TOKENS = jax.random.randint(jax.random.key(0), (2, 6), 0, 13)


def model(**options):
  rest = {"mixer": PATTERN, "num_layers": 3} | options
  return drawn(lambda: LanguageModel(**SIZES, **rest, rngs=nnx.Rngs(0)))


@functools.cache
def by_block():
  """The hidden state before the last norm, and the auxiliary output of each layer, one by one."""
  lm = model()

  @jax.jit
  def run(lm):
    x, aux = lm.embed(TOKENS), []
    for block in layers.apart(lm.blocks, 3):
      x, _, output = block.with_aux(x)
      aux.append(output)
    return lm.norm(x), aux

  return run(lm)


def same(aux):
  """Three layers, the second without an auxiliary output."""
  _, want = by_block()
  first, second, third = layers.apart(aux, 3)
  assert second is None and want[1] is None
  chex.assert_trees_all_close((first, third), (want[0], want[2]), rtol=1e-5)
  total = float(want[0].loss + want[2].loss)
  assert float(aux_loss(aux)) == pytest.approx(total, rel=1e-5)
  assert total > 0.02 * 0.99  # two layers' coefficients of 0.01


@pytest.mark.parametrize(
  ("unroll", "remat"),
  [(None, "full"), pytest.param(4, "none", marks=pytest.mark.slow),
   pytest.param(4, "dots", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_layer_loop_collects_the_auxiliary_outputs(unroll, remat):
  lm = model(unroll=unroll, remat=remat)

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(lm):
    hidden, aux = lm.hidden_and_aux(TOKENS)
    return aux_loss(aux), (hidden, aux)

  (_, (hidden, aux)), gradient = run(lm)
  same(aux)
  np.testing.assert_allclose(hidden, by_block()[0], rtol=1e-4, atol=1e-5)
  routers = gradient.blocks["0"].mixer.router_proj.kernel[...]
  assert routers.shape == (2, 8, 3)
  assert np.all(np.any(np.asarray(routers) != 0, axis=(1, 2)))


def test_model_without_routing_has_no_auxiliary_output():
  lm = jax.eval_shape(lambda: LanguageModel(**SIZES, mixer=Sum, num_layers=2, rngs=nnx.Rngs(0)))
  logits, state, aux = jax.eval_shape(lambda lm: lm.with_aux(TOKENS), lm)
  chex.assert_trees_all_equal_shapes((logits, state), jax.eval_shape(lambda lm: lm(TOKENS), lm))
  assert aux is None
  assert aux_loss(aux) == 0
  # Nor does asking for it change the program.
  program = lambda call: str(jax.make_jaxpr(lambda lm: call(lm)[:2])(lm))
  assert program(lambda lm: lm.with_aux(TOKENS)) == program(lambda lm: lm(TOKENS))


def test_calls_that_do_not_ask_for_it_do_not_compute_the_balance_loss():
  lm = jax.eval_shape(model)
  size = lambda call: str(jax.make_jaxpr(call)(lm)).count("\n")
  assert size(lambda lm: lm(TOKENS)) < size(lambda lm: lm.with_aux(TOKENS)[:2])


@pytest.mark.slow
def test_linen_faces_put_the_auxiliary_output_in_a_collection():
  lm = model()
  face = linen.LanguageModel(**SIZES, mixer=PATTERN, num_layers=3)
  variables = {"params": split(lm)[1]}
  shapes = jax.eval_shape(lambda: face.init(jax.random.key(0), TOKENS))
  assert set(shapes) == {"params"}
  apply = jax.jit(functools.partial(face.apply, mutable=["aux"]))
  (logits, _), collected = apply(variables, TOKENS)
  assert logits.shape == (2, 6, 13)
  (aux,) = collected["aux"]["aux"]
  same(aux)
  plain = jax.eval_shape(lambda: face.apply(variables, TOKENS))
  assert len(plain) == 2


@pytest.mark.slow
def test_explicit_meshes_replicate_the_auxiliary_output():
  """On a mesh of one device; its axes are Explicit by default."""
  lm, mesh = model(), jax.make_mesh((1,), ("data",))
  tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
  with jax.set_mesh(mesh):
    _, _, aux = jax.jit(lambda lm, tokens: lm.with_aux(tokens))(lm, tokens)
  same(aux)


def on_devices():
  """The balance loss and its gradient in `shard_map` over rows and time, and on one device."""
  logits = jax.random.normal(jax.random.key(0), (4, 6, 5)) * jnp.arange(1, 5)[:, None, None]

  def loss(logits):
    probabilities, _, indices = top_k(logits, 2)
    return balance(probabilities, is_selected(indices, 5), coefficient=0.1)

  mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = jax.P("data", "sequence")
  sharded = jax.shard_map(loss, mesh=mesh, in_specs=spec, out_specs=Aux(jax.P(), jax.P()))
  results = []
  for run in (loss, sharded):
    gradient, aux = jax.jit(jax.grad(lambda x, run=run: (run(x).loss, run(x)), has_aux=True))(
      logits
    )
    results.append([float(aux.loss), aux.share.tolist(), gradient.tolist()])
  return results


def test_balance_loss_on_a_mesh_is_that_of_all_tokens():
  code = "import json; from tests.models import test_aux; print(json.dumps(test_aux.on_devices()))"
  one, mesh = devices.result_of("-c", code, devices=4)
  for got, want in zip(mesh, one, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-8)
