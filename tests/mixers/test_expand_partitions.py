"""A trained SSE with (N, k) continues as one with (N', k'): its losses stay, and children learn."""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.mixers import SSE, expand_partitions
from lnssm_jax.mixers.common.expansion import DEFAULTS
from lnssm_jax.mixers.common.routing import top_k
from lnssm_jax.models import LanguageModel, aux_loss
from tests.mixers.helpers import drawn, inputs, split

DIM = 8
SMALL = {"num_partitions": 4, "lora_rank": 3, "gate_rank": 3, "method": "mask", "balance": 0.3}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def built(**options):
  """(SSE with no parameter at its initial value, its options), float64 under `enable_x64`."""
  options = SMALL | {"dtype": jnp.float64, "param_dtype": jnp.float64} | options
  return drawn(lambda: SSE(DIM, num_heads=2, **options, rngs=nnx.Rngs(0))), options


def expanded(mixer, options, N, k=None, **margin):
  """The mixer with N partitions, and its options."""
  params, more = expand_partitions(
    split(mixer)[1], options, num_partitions=N, num_selected=k, **margin
  )
  new = jax.eval_shape(lambda: SSE(DIM, num_heads=2, **more, rngs=nnx.Rngs(0)))
  return nnx.merge(split(new)[0], params), more


@jax.jit
def run(mixer, x):
  """(out, balance loss, share)."""
  out, _, aux = mixer.with_aux(x)
  return out, *aux


def tokens(T=24):
  return jnp.asarray(inputs(2, T, DIM), jnp.float64)


GATES = ("uniform", "joint", "eta")
SIZES = [  # N', k' of (4, 1)
  (8, 1),  # a child each
  (11, 1),  # two children of three partitions, one of the other
  (12, 3),  # three copies
  (16, 2),  # two copies and two children each
  (15, 2),
]


@pytest.mark.parametrize(
  ("gate", "size", "options"),
  [
    *((pytest.param if size == (16, 2) else slow)("eta", size, {}) for size in SIZES),
    *((pytest.param if size == (11, 1) else slow)("joint", size, {}) for size in SIZES[1:]),
    *(slow("uniform", size, {}) for size in SIZES),
    ("eta", (8, 1), {"inner": "gated_delta_rule"}),
    slow("joint", (11, 1), {"inner": "gated_delta_rule"}),
    slow("eta", (8, 4), {"num_selected": 2}),
    ("joint", (12, 6), {"num_selected": 2, "num_readers": 1}),
    ("eta", (12, 2), {"router_bias": True, "eta_scale": 1.7}),
  ],
)
def test_expanded_mixer_has_the_outputs_and_the_balance_loss_that_it_had(gate, size, options):
  with jax.enable_x64(True):
    mixer, options = built(gate=gate, **options)
    after, more = expanded(mixer, options, *size)
    want, got = run(mixer, tokens()), run(after, tokens())
  assert (more["num_partitions"], more["num_selected"]) == size
  np.testing.assert_allclose(got[0], want[0], rtol=1e-11, atol=1e-12)
  assert float(got[1]) == pytest.approx(float(want[1]), rel=2e-7)  # it is float32
  copies = size[1] // options.get("num_selected", 1) * 4
  np.testing.assert_array_equal(got[2][:copies], np.repeat(want[2], copies // 4))
  assert not np.any(got[2][copies:])


def test_expansion_twice_gives_the_outputs_that_it_gave():
  with jax.enable_x64(True):
    mixer, options = built()
    once = expanded(mixer, options, 8, margin=0.5)
    twice, _ = expanded(*once, 32, 2, margin=1.0)
    want, got = run(mixer, tokens()), run(twice, tokens())
  np.testing.assert_allclose(got[0], want[0], rtol=1e-11, atol=1e-12)
  assert float(got[1]) == pytest.approx(float(want[1]), rel=2e-7)


@pytest.mark.parametrize("gate", ["eta", "joint"])
def test_some_partitions_with_a_child_change_eta_within_its_bound(gate):
  """N' between N and 2 N: exact for joint weights; for eta up to (1 + epsilon)^2."""
  with jax.enable_x64(True):
    mixer, options = built(gate=gate)
    after, _ = expanded(mixer, options, 6, margin=1.0)
    want, got = run(mixer, tokens()), run(after, tokens())

    def product(mixer):
      write, read = mixer._weights(top_k(mixer.router_proj(tokens()), 1)[1])
      return write * read

    ratios = np.ravel(product(after) / product(mixer))
  if gate == "joint":
    np.testing.assert_allclose(got[0], want[0], rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(ratios, 1.0)
  else:
    bound = (1 + math.exp(-1.0)) ** 2
    assert 1 / bound < min(ratios) < 0.95 and 1.05 < max(ratios) < bound
  assert float(got[1]) == pytest.approx(float(want[1]), rel=1 - 1 / (1 + math.exp(-1.0)))


@pytest.mark.slow
def test_child_displaces_a_partition_only_where_the_lead_exceeds_the_margin():
  """k = 2, both selected: the child of the first takes the place of the second."""
  with jax.enable_x64(True):
    mixer, options = built(num_selected=2)
    x = tokens(64)
    e = np.sort(mixer.router_proj(x), axis=-1)[..., ::-1]
    lead = e[..., 0] - e[..., 1]
    want = run(mixer, x)[0]
    for margin in (float(np.quantile(lead, 0.97)), float(lead.max()) + 1e-6):
      after, _ = expanded(mixer, options, 8, margin=margin)
      indices = top_k(after.router_proj(x), 2)[2]
      wrong = np.any(indices >= 4, axis=-1)
      np.testing.assert_array_equal(wrong, lead > margin)
      assert wrong.any() == (margin < lead.max())
      got = run(after, x)[0]
      for row in range(2):
        exact = np.argmax(wrong[row]) if wrong[row].any() else x.shape[1]
        np.testing.assert_allclose(got[row, :exact], want[row, :exact], rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_training_makes_children_selected():
  """The loss of the function and the balance loss, from an expanded mixer that used none."""
  mixer, options = built(dtype=jnp.float32, param_dtype=jnp.float32)
  mixer, _ = expanded(mixer, options, 8)
  graph, params = split(mixer)
  x, target = inputs(4, 32, DIM), inputs(4, 32, DIM, seed=2)
  optimizer = optax.adam(1e-2)

  @jax.jit
  def train(params):
    def loss(params):
      out, _, aux = nnx.merge(graph, params).with_aux(x)
      return jnp.mean(jnp.square(out - target)) + aux.loss, aux.share

    def step(carry, _):
      params, state = carry
      (value, share), gradient = jax.value_and_grad(loss, has_aux=True)(params)
      updates, state = optimizer.update(gradient, state, params)
      return (optax.apply_updates(params, updates), state), (value, share)

    return jax.lax.scan(step, (params, optimizer.init(params)), length=100)[1]

  values, shares = train(params)
  used = shares[:, 4:] > 0
  assert not used[0].any() and used.any(axis=0).all()
  assert shares[-1, 4:].sum() > 0.1
  assert values[-1] < values[0]


@pytest.mark.parametrize("size", [(12, 2), slow((8, 1))])
def test_expanded_model_has_the_losses_that_it_had(size):
  """In a pattern, with an axis of layers."""
  sizes = {"vocab_size": 13, "dim": DIM, "num_layers": 2, "num_heads": 2, "mixer": ("sse", "lrn")}
  tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 13)

  @jax.jit
  def losses(model):
    logits, _, aux = model.with_aux(tokens[:, :-1])
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2).mean()
    return nats, aux_loss(aux)

  def new(options):
    return LanguageModel(**sizes, mixer_options={"sse": options}, rngs=nnx.Rngs(0))

  before = drawn(lambda: new(SMALL))
  N, k = size
  params, more = expand_partitions(split(before)[1], SMALL, num_partitions=N, num_selected=k)
  graph, like = split(jax.eval_shape(lambda: new(more)))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, like)
  router = params["blocks"]["0"]["mixer"]["router_proj"]
  assert router["kernel"].shape == (1, DIM, N) and router["bias"].shape == (1, N)
  np.testing.assert_allclose(losses(nnx.merge(graph, params)), losses(before), rtol=2e-6)
  specs = sharding.param_specs(params)["blocks"]["0"]["mixer"]["router_proj"]
  assert specs["kernel"] == PartitionSpec(None, "fsdp", None)
  assert specs["bias"] in (PartitionSpec(), PartitionSpec(None), PartitionSpec(None, None))
  decays = sharding.has_weight_decay(params)["blocks"]["0"]["mixer"]["router_proj"]
  assert decays == {"kernel": True, "bias": False}


def test_defaults_are_those_of_the_constructor():
  parameters = inspect.signature(SSE.__init__).parameters
  assert {name: parameters[name].default for name in DEFAULTS} == DEFAULTS


def test_router_of_a_mixture_of_memories_stays():
  mixer, options = built(dtype=jnp.float32, param_dtype=jnp.float32)
  memories = {"router_proj": {"kernel": jnp.ones((DIM, 4))}, "memory_gates": {}}
  params, _ = expand_partitions({"0": split(mixer)[1], "1": memories}, options, num_partitions=8)
  assert params["0"]["router_proj"]["kernel"].shape == (DIM, 8)
  jax.tree.map(np.testing.assert_array_equal, params["1"], memories)


def test_expansion_without_a_rule_that_keeps_the_function_raises():
  options = {"num_partitions": 4, "num_selected": 2}
  shapes = jax.eval_shape(lambda: SSE(DIM, num_heads=2, **options, rngs=nnx.Rngs(0)))
  expand = functools.partial(expand_partitions, split(shapes)[1])
  few = r"from \(N, k\) = \(4, 2\) use \(4 or more, 2\), \(8 or more, 4\), "
  for size in ((8, 3), (8, 1), (7, 4), (3, 2)):
    with pytest.raises(ValueError, match=few):
      expand(options, num_partitions=size[0], num_selected=size[1])
  for margin in (0.0, -1.0, math.nan, math.inf, "2", True):
    with pytest.raises(ValueError, match=r"margin=.* must be a positive number"):
      expand(options, num_partitions=8, margin=margin)
  with pytest.raises(ValueError, match=r"inner='gated_delta_rule': .* use num_selected=2"):
    expand(options | {"inner": "gated_delta_rule"}, num_partitions=8, num_selected=4)
  with pytest.raises(ValueError, match=r"shape \(8, 4\), but the options num_partitions=5"):
    expand({"num_partitions": 5}, num_partitions=8)
  with pytest.raises(ValueError, match="num_partitions=0"):
    expand(options, num_partitions=0)
  with pytest.raises(ValueError, match="num_partitions=1,000,000,000,000 must be at most"):
    expand(options, num_partitions=10**12)
  with pytest.raises(ValueError, match="no router_proj of an SSE"):
    expand_partitions({"q_proj": {}}, options, num_partitions=8)
