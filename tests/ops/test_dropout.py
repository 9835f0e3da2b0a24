"""Dropout: rates, masks that are functions of their key, attention probabilities."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import ops
from lnssm_jax.ops.core.dropout import drop_rows, dropout, row_keys, token_keys

KEY = jax.random.key(3)
RATE = 0.3


def factor(*numbers, key=KEY, rate=RATE):
  """The multiplier at one place, from `jax.random` alone: 0, or 1 / (1 - rate)."""
  for number in numbers:
    key = jax.random.fold_in(key, number)
  uniform = (jax.random.key_data(key)[0] >> 8) / 2**24
  return jnp.where(uniform >= rate, 1 / (1 - rate), 0.0)


def factors(*sizes):
  """[*sizes], the multiplier at each place."""
  of_all = factor
  for _ in sizes:
    of_all = jax.vmap(of_all)
  return jax.jit(of_all)(*jnp.meshgrid(*map(jnp.arange, sizes), indexing="ij"))


def test_dropout_keeps_the_rate_and_the_mean():
  x, rows = jnp.ones((4, 50, 64)), row_keys("test", KEY, 4)
  for rate in (0.1, 0.6):
    y = np.asarray(dropout(x, token_keys(rows, 50), rate))
    deviation = (rate * (1 - rate) / y.size) ** 0.5
    assert abs((y == 0).mean() - rate) < 5 * deviation
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)
    for axis in range(3):  # no mask is that of another row, token or channel
      masks = np.moveaxis(y, axis, 0).reshape(y.shape[axis], -1)
      assert len(np.unique(masks, axis=0)) == len(masks)
  np.testing.assert_allclose(dropout(x, token_keys(rows, 50), RATE), factors(4, 50, 64), rtol=1e-6)
  # In bfloat16 too: 1 / (1 - rate) is not rounded before it multiplies.
  y = dropout(jnp.full((4, 50, 64), 0.9, jnp.bfloat16), token_keys(rows, 50), 0.1)
  assert float(y.max()) == float(jnp.bfloat16(float(jnp.bfloat16(0.9)) / 0.9))


def test_tokens_of_a_shard_have_the_keys_of_the_whole_sequence():
  rows = row_keys("test", KEY, 4)
  shard = lambda _: token_keys(rows, 3, "time")
  shards = jax.vmap(shard, axis_name="time", out_axes=1)(jnp.arange(5))  # [B, shards, 3, 2]
  np.testing.assert_array_equal(shards.reshape(4, 15, 2), token_keys(rows, 15))


def test_dropped_rows_keep_the_rate():
  y = np.asarray(drop_rows(jnp.ones((4000, 2, 3)), row_keys("test", KEY, 4000), jnp.float32(0.2)))
  assert np.all(y == y[:, :1, :1])
  assert abs((y[:, 0, 0] == 0).mean() - 0.2) < 0.03
  np.testing.assert_allclose(y[y != 0], 1.25, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"causal": False}], ids=repr)
def test_attention_dropout_equals_the_formula_with_its_gradients(options):
  """In float64, given the masks; with documents, which restart the positions of the keys."""
  B, T, H, G = 2, 20, 4, 2
  rng = np.random.default_rng(0)
  arrays = [rng.normal(size=(B, T, heads, 4)) for heads in (H, G, G)]
  ids = np.repeat([[0, 1, 2], [0, 0, 1]], [3, 9, 8], axis=1)
  position = np.arange(T) - np.array([np.searchsorted(row, row) for row in ids])
  masks = np.asarray(factors(B, T, H, T), np.float64)  # by the position of the key
  masks = np.stack([row[..., at] for row, at in zip(masks, position, strict=True)])
  masks = masks.transpose(0, 2, 1, 3)

  lag = np.arange(T)[:, None] - np.arange(T)
  seen = (ids[:, :, None] == ids[:, None]) & (np.abs(lag) < options.get("window", T))
  if options.get("causal", True):
    seen &= lag >= 0

  def plain(q, k, v):
    k, v = (jnp.repeat(x, H // G, axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1) * masks
    return jnp.sum(jnp.sin(jnp.einsum("bhts,bshv->bthv", weights, v)))

  def loss(form):
    how = {"dropout": RATE, "dropout_key": KEY, "segment_ids": jnp.asarray(ids)} | form | options
    return lambda q, k, v: jnp.sum(jnp.sin(ops.attention(q, k, v, **how)[0]))

  with jax.enable_x64(True):
    run = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1, 2)))(*map(jnp.asarray, arrays))
    want = run(plain)
    for form in ({"implementation": "reference"}, {"implementation": "chunked", "chunk_size": 8}):
      # 1 / (1 - rate) of the masks above is a float32.
      chex.assert_trees_all_close(run(loss(form)), want, rtol=2e-7, atol=2e-7)


@pytest.mark.slow
def test_attention_without_key_or_rate_drops_nothing():
  q = jax.random.normal(KEY, (1, 9, 2, 4))
  want = ops.attention(q, q, q)[0]
  for options in ({"dropout": 0.5}, {"dropout_key": KEY}):
    np.testing.assert_array_equal(ops.attention(q, q, q, **options)[0], want)
  options = {"dropout": 0.5, "dropout_key": KEY}
  assert "cudnn" not in ops.supported("attention", q, q, q, **options)
  with pytest.raises(NotImplementedError, match=r"dropout=0\.5: cuDNN draws masks"):
    ops.attention(q.astype("bfloat16"), *[q.astype("bfloat16")] * 2, **options,
                  implementation="cudnn")  # fmt: skip


def test_key_of_each_row_is_that_of_its_number():
  rows = row_keys("test", KEY, 3)
  of_numbers = jnp.stack([jax.random.fold_in(KEY, row) for row in range(3)])
  np.testing.assert_array_equal(rows, jax.random.key_data(of_numbers))
  np.testing.assert_array_equal(row_keys("test", of_numbers, 3), rows)
  np.testing.assert_array_equal(row_keys("test", rows, 3), rows)
  np.testing.assert_array_equal(row_keys("test", jax.random.key_data(KEY), 3), rows)


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), True, "0.1"])
def test_wrong_rate_rejected(rate):
  q = jnp.ones((1, 2, 1, 2))
  with pytest.raises(ValueError, match=r"attention: dropout=.* at least 0 and below 1"):
    ops.attention(q, q, q, dropout=rate)


@pytest.mark.parametrize("key", [jnp.zeros(2), jax.random.split(KEY, 5), jnp.uint32(3)])
def test_wrong_key_rejected(key):
  q = jnp.ones((1, 2, 1, 2))
  with pytest.raises(
    ValueError, match=r"attention: dropout_key has .* give jax.random.key\(seed\)"
  ):
    ops.attention(q, q, q, dropout=0.5, dropout_key=key)
