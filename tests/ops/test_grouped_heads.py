"""Heads that share keys, values, decays or queries: the same as copies of them, in every form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from tests.ops.promises import close

B, T, H, K, V = 2, 9, 4, 3, 5
OPS = {
  "linear_attention": (ops.linear_attention, ops.LinearAttentionState),
  "delta_rule": (ops.delta_rule, ops.DeltaRuleState),
}
# Heads of q, k, v and of what decays and writes.
LAYOUTS = {
  "values of their own": (2, 2, 4, 4),
  "values of their own, decays shared": (2, 2, 4, 2),
  "queries of their own": (4, 2, 2, 2),
  "queries and decays of their own": (4, 1, 1, 4),
  "keys of their own": (2, 4, 2, 2),
}


def arguments(name: str, heads: tuple[int, ...]) -> dict[str, jax.Array]:
  """Arguments of an op; head h of copies differs from head h - 1 where a group ends."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, k, v, decay = heads
  x = {"q": normal(B, T, q, K), "k": normal(B, T, k, K), "v": normal(B, T, v, V)}
  if name == "delta_rule":
    x["k"] /= jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
    x |= {"erase_key": 0.9 * x["k"], "beta": jax.nn.sigmoid(normal(B, T, decay))}
    x["log_decay"] = -jnp.exp(normal(B, T, decay))
  else:
    x |= {"log_decay": -jnp.exp(normal(B, T, decay, K)), "bonus": normal(2 if q == 2 else H, K)}
  return x | {"state": normal(B, max(k, v, decay), K, V)}


def to_all_heads(name: str, x: jax.Array) -> jax.Array:
  axis = {"state": 1, "bonus": 0}.get(name, 2)
  return jnp.repeat(x, H // x.shape[axis], axis)


@functools.cache
def loss_and_gradients(name, implementation):
  """A program of (arguments, weights of the heads of the last state); that of copies is one."""
  op, make = OPS[name]
  segments = jnp.asarray([[0] * 4 + [1] * 5, [0] * 9])
  options = {"segment_ids": segments, "implementation": implementation}
  options |= {"chunk_size": 4} if implementation == "chunked" else {}

  def loss(inputs, weights):
    rest = {n: x for n, x in inputs.items() if n != "state"}
    out, last = op(**rest, initial_state=make(inputs["state"]), **options)
    of_state = weights[:, None, None] * jnp.cos(last.kv)
    return jnp.sum(jnp.sin(out)) + jnp.sum(of_state), (out, last.kv)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
  ("layout", "implementation"),
  [
    *((layout, "chunked") for layout in LAYOUTS),
    ("queries of their own", "reference"),
    *(
      pytest.param(layout, form, marks=pytest.mark.slow)
      for form in ("associative", "reference")
      for layout in LAYOUTS
    ),
  ],
)
def test_grouped_heads_equal_copies(name, layout, implementation):
  """Outputs, states and all gradients, with two documents and an initial state."""
  inputs = arguments(name, LAYOUTS[layout])
  S = inputs["state"].shape[1]
  copies, pull = jax.vjp(lambda x: {n: to_all_heads(n, y) for n, y in x.items()}, inputs)
  first = jnp.arange(H) % (H // S) == 0  # of the copies of each state
  (got, (out, kv)), gradients = loss_and_gradients(name, implementation)(inputs, jnp.ones(S))
  (want, (all_out, all_kv)), of_copies = loss_and_gradients(name, implementation)(
    copies, 1.0 * first
  )
  assert out.shape == (B, T, H, V) and kv.shape == (B, S, K, V)
  close((got, out, kv, gradients), (want, all_out, all_kv[:, first], *pull(of_copies)))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
  ("heads", "message"),
  [
    ((3, 2, 2, 2), "the numbers of heads are q 3, k 2, v 2, but they must be H or all the same"),
    ((4, 2, 1, 4), "the numbers of heads are q 4, k 2, v 1, but"),
    ((4, 2, 2, 3), r"\[2, 9, 4"),
  ],
)
def test_heads_that_do_not_group_raise(name, heads, message):
  inputs = arguments(name, (4, 4, 4, heads[-1]))
  for n, number in zip("qkv", heads, strict=False):
    inputs[n] = inputs[n][:, :, :number]
  inputs.pop("state")
  inputs.pop("erase_key", None)
  with pytest.raises(ValueError, match=f"{name}: .*{message}"):
    OPS[name][0](**inputs)


@pytest.mark.parametrize("name", OPS)
def test_state_of_other_heads_raises(name):
  op, make = OPS[name]
  inputs = arguments(name, (4, 2, 2, 2))
  state = to_all_heads("state", inputs.pop("state"))
  with pytest.raises(ValueError, match=r"initial_state.kv has shape .*4, 3, 5.* \[2, 2, 3, 5\]"):
    op(**inputs, initial_state=make(state))
