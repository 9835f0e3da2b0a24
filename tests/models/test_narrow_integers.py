"""Integers of narrow dtypes give what int32 gives: no size that they are compared with wraps."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.models import LanguageModel
from lnssm_jax.models.embedding import lookup
from lnssm_jax.ops.core.checks import checked_integers
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.cross_entropy.api import cross_entropy
from train.step.loss import next_token_loss

# Each dtype with a size that it does not hold: 257 is 1 in uint8, 300 is 44 in int8.
SIZES = {"uint8": 257, "int8": 300, "uint16": 65_537, "int16": 33_000, "uint32": 300}
B, T, D = 2, 6, 3


def drawn(shape, most, seed=0):
  return np.random.default_rng(seed).integers(0, most, size=shape)


def normal(key, *shape):
  """Of a key that the compiler does not know: it would compute the results while it compiles."""
  return jax.random.normal(jax.random.fold_in(key, len(shape)), shape)


def loss(key, ids, size):
  sums = lambda hidden, head: next_token_loss(hidden, head, ids, jnp.ones((B, T))).nats
  return jax.value_and_grad(sums, (0, 1))(normal(key, B, T, D), normal(key, D, size))


def entropy(key, ids, size):
  return cross_entropy(normal(key, B, T, size), ids, jnp.ones((B, T)), gradient_dtype=jnp.float32)


def rows(key, ids, size):
  table = normal(key, size, D)
  return jax.value_and_grad(lambda table: jnp.sum(jnp.sin(lookup(table, ids))))(table)


def selected(key, ids, size):
  """Partitions by number."""
  q = k = v = normal(key, B, T, 1, 2)
  gates = jnp.ones((B, T, 1))
  return ops.sparse_state_attention(q, k, v, ids[..., None], gates, num_partitions=size)


def documents(key, ids, size):
  """-1 and the largest ids are documents like others."""
  del key, size
  return step_positions(B, T, jnp.sort(ids, axis=1) - 1, None, axis_name=None)


@pytest.mark.parametrize(
  ("call", "dtype"),
  [
    pytest.param(call, dtype, marks=[pytest.mark.slow] * (dtype != "uint8"))
    for call in (loss, entropy, rows, documents, selected)
    for dtype in SIZES
  ],
)
def test_ids_of_narrow_dtypes_equal_int32(call, dtype):
  size = SIZES[dtype]
  if call is selected and size > 300:
    size = 300  # a state for each
  ids = drawn((B, T), min(size, 100))
  run = jax.jit(call, static_argnums=2)
  got, want = (run(jax.random.key(0), jnp.asarray(ids, kind), size) for kind in (dtype, "int32"))
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(want))
  chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize(
  "dtype", ["uint8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("int8", "int16"))]
)
def test_model_and_generation_read_narrow_tokens_segments_and_lengths(dtype):
  """More positions and ids than the dtype counts."""
  sizes = {"vocab_size": 300, "dim": 4, "num_layers": 1, "num_heads": 1}
  model = LanguageModel(**sizes, mixer="lrn", learned_positions=300, rngs=nnx.Rngs(0))
  tokens, lengths = drawn((B, 280), 100), np.array([100, 3])
  segments = np.sort(drawn((B, 280), 5), axis=1)

  @jax.jit
  def logits(tokens, segments, lengths):
    return model(tokens, None, segments)[0], model(tokens, lengths=lengths)[0]

  runs = [
    logits(*(jnp.asarray(x, kind) for x in (tokens, segments, lengths)))
    for kind in (dtype, "int32")
  ]
  assert jnp.isfinite(runs[1][0]).all()
  chex.assert_trees_all_equal(*runs)
  texts = [
    generate(
      model, [tokens[0, :5].astype(kind), tokens[1, :3].astype(kind)], SamplingOptions(max_tokens=4)
    )
    for kind in (dtype, "int32")
  ]
  chex.assert_trees_all_equal(*texts)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "uint32"])
@pytest.mark.parametrize("kind", [np, jnp])
def test_integers_are_signed_and_of_32_bits_or_more(kind, dtype):
  checked = checked_integers("op", "ids", kind.asarray([0, 5, 100], dtype))
  assert checked.dtype == np.int32
  assert isinstance(checked, np.ndarray) == (kind is np)
  np.testing.assert_array_equal(checked, [0, 5, 100])


def test_numbers_that_are_no_integers_raise_and_are_named():
  with pytest.raises(ValueError, match=r"^op: ids has dtype float32; it must be integer \(cast"):
    checked_integers("op", "ids", jnp.ones(3))
  with pytest.raises(ValueError, match="cross_entropy: targets has dtype bool"):
    cross_entropy(jnp.ones((1, 2, 3)), jnp.ones((1, 2), bool), jnp.ones((1, 2)))
