"""SSE and MoM: their options, their methods, routing, the balance loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from lnssm_jax.mixers.common.routing import balance, top_k
from tests.mixers.helpers import apply, drawn, float64_params, relative_error
from tests.mixers.references import sparse_state_expansion as references
from tests.mixers.references.common import silu
from tests.mixers.tiny import DIM, inputs

SMALL = {"sse": {"num_partitions": 4, "lora_rank": 3, "gate_rank": 3}, "mom": {"gate_rank": 3}}
REFERENCES = {"sse": references.sse, "mom": references.mom}
SEGMENT_IDS = np.repeat([[1, 2, 1]] * 2, (5, 1, 6), axis=1)


def build(name="sse", **options):
  """A mixer with no parameter at its initial value."""
  options = SMALL[name] | options
  return drawn(lambda: MIXERS[name](DIM, num_heads=2, **options, rngs=nnx.Rngs(0)))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("sse", {"gate": "joint", "num_selected": 2, "output_gate": "full", "num_readers": 1}),
    ("sse", {"inner": "gated_delta_rule", "shared_gate": True, "num_readers": 3}),
    slow("sse", {"gate": "uniform", "num_selected": 3, "output_gate": "none", "num_readers": 4}),
    slow("sse", {"feature_map": "silu", "head_dim": 3, "num_selected": 2}),
    slow("sse", {"inner": "gated_delta_rule", "gate": "joint", "num_selected": 2}),
    slow("sse", {"router_bias": True}),
    ("mom", {"inner": "gated_delta_rule", "shared_memory": False, "num_selected": 1}),
    slow("mom", {"inner": "gated_delta_rule", "num_selected": 3}),
  ],
)
def test_options_equal_the_float64_reference(name, options):
  mixer, x = build(name, method="mask", **options), inputs(2, 12)
  known = ("num_selected", "num_readers", "gate", "inner", "shared_memory")
  given = {n: value for n, value in options.items() if n in known}
  given |= {"phi": silu} if options.get("feature_map") == "silu" else {}
  reference = functools.partial(REFERENCES[name], float64_params(mixer), num_heads=2, **given)
  want = np.stack([reference(np.float64(row)) for row in x])
  assert relative_error(apply(mixer, x)[0], want) < 2e-6


@pytest.mark.parametrize(
  ("name", "options"),
  [
    slow("sse", {"num_selected": 2, "num_readers": 3}),
    slow("sse", {"inner": "gated_delta_rule", "num_selected": 2}),
    slow("mom", {}),
    slow("mom", {"inner": "gated_delta_rule"}),
  ],
)
def test_methods_agree_in_float64(name, options):
  """Outputs, states and gradients, of packed documents after a state; and cut in two."""
  with jax.enable_x64(True):
    options = options | {"dtype": jnp.float64, "param_dtype": jnp.float64}
    x = jnp.asarray(inputs(2, 12), jnp.float64)
    before = apply(build(name, method="mask", **options), x[:, :4])[1]
    results = {}
    for method in ("gather", "mask", "varlen"):
      mixer = build(name, method=method, **options)

      def loss(mixer, x, before, cut):
        first, state = mixer(x[:, :cut], before, SEGMENT_IDS[:, :cut])
        # The id of the last token so far continues its document.
        rest, state = mixer(x[:, cut:], state, SEGMENT_IDS[:, cut:])
        out = jnp.concatenate([first, rest], axis=1)
        terms = (out, *jax.tree.leaves(state))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in terms), terms

      run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), static_argnames="cut")
      results[method] = jax.tree.leaves(run(mixer, x, before, cut=7))
    for method in ("mask", "varlen"):
      for got, want in zip(results[method], results["gather"], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_methods_give_the_same_outputs_and_states():
  """Of packed documents after a state, in one program; the slow test above has gradients."""
  mixers = [build(method=method, num_selected=2) for method in ("gather", "mask", "varlen")]
  x, before = inputs(2, 12), mixers[0].init_state(2)
  before = jax.tree.map(lambda leaf: leaf + 0.1, before)
  run = lambda mixers: [mixer(x, before, SEGMENT_IDS) for mixer in mixers]
  want, *others = jax.jit(run)(mixers)
  for got in others:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), got, want)


@jax.jit
def router_gradients(mixer):
  """Of a function of the output, and of the balance loss, with respect to W_e."""

  def losses(mixer, x):
    out, _, aux = mixer.with_aux(x)
    return jnp.sum(jnp.sin(out)), aux.loss

  _, pull = jax.vjp(lambda mixer: losses(mixer, inputs(2, 12)), mixer)
  gradients = [pull(weights)[0] for weights in ((1.0, 0.0), (0.0, 1.0))]
  return [gradient.router_proj.kernel[...] for gradient in gradients]


@pytest.mark.slow
def test_routing_under_uniform_gets_exactly_no_gradient_but_from_the_balance_loss():
  options = {"num_selected": 2, "method": "mask"}
  uniform = build(gate="uniform", **options)
  of_output, of_balance = router_gradients(uniform)
  assert np.all(of_output == 0)
  assert np.all(of_balance != 0)
  of_output, _ = router_gradients(build(gate="eta", **options))
  assert np.all(of_output != 0)


@pytest.mark.parametrize("name", ["sse", "mom"])
def test_auxiliary_output_is_the_balance_loss_of_all_tokens(name):
  mixer, x = build(name, num_selected=2, balance=0.3, method="mask"), inputs(2, 12)
  out, state, aux = jax.jit(lambda mixer: mixer.with_aux(x))(mixer)
  want, want_state = apply(mixer, x)
  np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(jnp.shape, state),
               jax.tree.map(jnp.shape, want_state))  # fmt: skip
  e = np.float64(x).reshape(-1, DIM) @ np.float64(mixer.router_proj.kernel[...])
  p = np.exp(e) / np.exp(e).sum(-1, keepdims=True)
  f = np.zeros_like(p)
  np.put_along_axis(f, np.argsort(-p, axis=-1)[:, :2], 1.0, axis=-1)
  np.testing.assert_allclose(aux.share, f.mean(0), rtol=1e-6)
  factor = 2 if name == "mom" else 1
  want_loss = factor * 0.3 * (p.shape[1] / 2) * np.sum(p.mean(0) * f.mean(0))
  assert float(aux.loss) == pytest.approx(want_loss, rel=1e-5)


def test_balance_loss_is_its_coefficient_where_all_parts_are_selected_equally():
  mass, selected = jnp.full((8, 4), 0.25), jnp.arange(8)[:, None] % 4 == jnp.arange(4)
  even = balance(mass, selected, coefficient=0.01)
  assert float(even.loss) == pytest.approx(0.01, rel=1e-6)
  one = balance(jnp.eye(4)[jnp.zeros(8, int)], jnp.arange(4) == jnp.zeros((8, 1)), coefficient=0.01)
  assert float(one.loss) == pytest.approx(0.04, rel=1e-6)
  assert np.count_nonzero(np.asarray(one.share) == 0) == 3


def test_top_k_selects_by_logits_where_probabilities_round_to_equals():
  logits = jnp.asarray([[-200.0, 0.0, -190.0]])
  probabilities, _, indices = top_k(logits, 2)
  assert probabilities[0, 0] == probabilities[0, 2] == 0
  np.testing.assert_array_equal(indices, [[1, 2]])


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("sse", {}),
    slow("sse", {"inner": "gated_delta_rule"}),
    slow("sse", {"num_readers": 3, "num_selected": 2}),
    slow("mom", {}),
  ],
)
def test_decoding_loop_needs_memory_for_the_selected_states_only(name, options):
  """With each layer's state as a donated carry, as `generate` has it."""
  parts = "num_partitions" if name == "sse" else "num_memories"

  def temporary(parts_of_state):
    options_of = SMALL[name] | options | {parts: parts_of_state}
    build = lambda: MIXERS[name](64, num_heads=1, **options_of, rngs=nnx.Rngs(0))
    mixer = jax.eval_shape(build)
    state = jax.eval_shape(lambda: mixer.init_state(1))
    step = lambda mixer, state, x: mixer(x[:, None], state)[::-1]
    loop = lambda mixer, state, x: jax.lax.scan(functools.partial(step, mixer), state, x)
    x = jax.ShapeDtypeStruct((4, 1, 64), jnp.float32)
    compiled = jax.jit(loop, donate_argnums=1).lower(mixer, state, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  one_state = 64 * 64 * 4
  assert temporary(36) - temporary(4) < 4 * one_state
