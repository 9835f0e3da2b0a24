"""The chunked loss against a direct computation in float64, and its memory."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.step.loss import next_token_loss

B, D, VOCAB = 3, 8, 37


def inputs(T, seed=0, dtype=np.float64, vocab=VOCAB):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(B, T, D)).astype(dtype)
  head = rng.normal(size=(D, vocab)).astype(dtype)
  targets = rng.integers(0, vocab, (B, T)).astype(np.int32)
  weights = rng.choice([0.0, 0.5, 1.0, 2.0], (B, T)).astype(np.float32)
  return hidden, head, targets, weights


def direct(hidden, head, targets, weights, coefficient=0.0, z_loss=0.0):
  """(nats, penalty, d hidden, d head) of the whole batch at once, in float64."""
  hidden, head, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
  z = hidden @ head
  largest = z.max(-1, keepdims=True)
  p = np.exp(z - largest)
  normalizer = p.sum(-1, keepdims=True)
  onehot = np.eye(head.shape[1])[targets]
  log_sum = largest + np.log(normalizer)
  nll = log_sum[..., 0] - (z * onehot).sum(-1)
  penalties = 0.5 * coefficient * largest**2 + z_loss * log_sum**2
  penalty = (weights * penalties[..., 0]).sum()
  dz = p / normalizer - onehot + coefficient * largest * (z == largest)
  dz += 2 * z_loss * log_sum * p / normalizer
  dz *= weights[..., None]
  d_head = np.einsum("btd,btv->dv", hidden, dz)
  return (weights * nll).sum(), penalty, dz @ head.T, d_head


def loss_and_gradients(args, **options):
  def nats(hidden, head):
    sums = next_token_loss(hidden, head, *args[2:], **options)
    return sums.nats, sums

  (_, sums), gradients = jax.jit(jax.value_and_grad(nats, (0, 1), has_aux=True))(*args[:2])
  return sums, *gradients


def largest_error(got, want):
  return np.abs(np.asarray(got, np.float64) - want).max() / max(1e-30, np.abs(want).max())


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_loss_of_capped_logits_matches_float64(coefficient):
  """c tanh(z / c) in place of z, in values and gradients."""
  args, cap = inputs(12), 0.7
  hidden, head, targets, weights = (np.asarray(x, np.float64) for x in args)
  z, width = hidden @ head, head.shape[1]
  eye = np.eye(width)
  nats, penalty, dz, _ = direct(
    cap * np.tanh(z / cap), eye, targets.astype(int), weights, coefficient
  )
  dz = dz * (1 - np.tanh(z / cap) ** 2)
  want = nats, dz @ head.T, np.einsum("btd,btv->dv", hidden, dz)
  sums, *gradients = loss_and_gradients(args, chunk=12, soft_cap=cap, logit_penalty=coefficient)
  for got, value in zip((sums.nats, *gradients), want, strict=True):
    assert largest_error(got, value) < 2e-6
  assert largest_error(sums.penalty, penalty) < 2e-6


@pytest.mark.parametrize(  # chunk counts positions over all B = 3 rows
  ("T", "chunk"), [(1, 1), (5, 7), (12, 12), (17, 1), (17, 12), (17, 10_000)]
)
def test_loss_values_and_gradients_match_float64(T, chunk):
  args = inputs(T)
  nats, penalty, d_hidden, d_head = direct(*args, coefficient=0.3, z_loss=0.2)
  args32 = [jnp.asarray(x, jnp.float32) for x in args[:2]] + list(args[2:])
  sums, got_d_hidden, got_d_head = loss_and_gradients(
    args32, chunk=chunk, logit_penalty=0.3, z_loss=0.2
  )
  assert abs(float(sums.nats) / nats - 1) < 2e-6
  assert abs(float(sums.penalty) / penalty - 1) < 2e-6
  assert float(sums.weight) == args[3].sum()
  assert largest_error(got_d_hidden, d_hidden) < 2e-6
  assert largest_error(got_d_head, d_head) < 2e-6


def test_loss_value_without_gradient_same():
  args = inputs(17, dtype=np.float32)
  alone = next_token_loss(*args, chunk=12, logit_penalty=1e-4)
  penalized, _, _ = loss_and_gradients(args, chunk=12, logit_penalty=1e-4)
  np.testing.assert_allclose(alone[:3], penalized[:3], rtol=1e-6)
  sharded = next_token_loss(*args, chunk=12, logit_penalty=1e-4, vocab_axis="tensor")
  np.testing.assert_allclose(sharded[:3], penalized[:3], rtol=1e-6)  # without a gather


def test_loss_penalty_gradient_matches_definition():
  hidden, head, targets, _ = inputs(9, dtype=np.float32)
  hidden[0, 3] = 0  # all logits are 0, so all are tied
  head[:, 2] = head[:, 5] = 3 * hidden[0, 4]  # two logits of this token are tied, and the largest
  logits = hidden[0, 4] @ head
  assert logits[2] == logits[5] == logits.max() > 0
  weights = np.ones((B, 9), np.float32)
  coefficient = 0.7

  def explicit(hidden, head):
    z = hidden @ head
    nll = jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
    return nll.mean() + 0.5 * coefficient * jnp.mean(z.max(-1) ** 2)

  def ours(hidden, head):
    sums = next_token_loss(hidden, head, targets, weights, chunk=12, logit_penalty=coefficient)
    return sums.nats / sums.weight

  for got, want in zip(
    jax.grad(ours, (0, 1))(hidden, head), jax.grad(explicit, (0, 1))(hidden, head), strict=True
  ):
    assert largest_error(got, np.asarray(want)) < 3e-6
  without = next_token_loss(hidden, head, targets, weights, chunk=12)
  assert float(ours(hidden, head)) == float(without.nats / without.weight)  # not in the loss


@pytest.mark.slow  # also in the gradients of all at once
def test_z_loss_gradient_matches_definition():
  hidden, head, targets, _ = inputs(5, dtype=np.float32)
  weights = np.ones((B, 5), np.float32)

  def explicit(hidden, head):
    log_sum = jax.nn.logsumexp(hidden @ head, -1)
    nll = log_sum - jnp.take_along_axis(hidden @ head, targets[..., None], -1)[..., 0]
    return (nll + 0.2 * log_sum**2).sum()

  _, *got = loss_and_gradients((hidden, head, targets, weights), chunk=6, z_loss=0.2)
  for ours, want in zip(got, jax.grad(explicit, (0, 1))(hidden, head), strict=True):
    assert largest_error(ours, np.asarray(want)) < 3e-6


def test_loss_gradient_scales_with_cotangent():
  args = inputs(6, dtype=np.float32)
  _, d_hidden, _ = loss_and_gradients(args, chunk=6)

  def scaled(hidden):
    return -3.0 * next_token_loss(hidden, *args[1:], chunk=6).nats ** 2

  nats = float(next_token_loss(*args, chunk=6).nats)
  np.testing.assert_allclose(jax.grad(scaled)(args[0]), -6 * nats * d_hidden, rtol=1e-5)


def test_loss_padded_vocabulary_matches_float64():
  """All logits are negative, so that the zeros of padded columns would be the largest."""
  hidden, head, targets, weights = inputs(4, vocab=4097)
  hidden, head = np.abs(hidden), -np.abs(head)
  nats, penalty, d_hidden, d_head = direct(hidden, head, targets, weights, coefficient=0.3)
  args = (jnp.float32(hidden), jnp.float32(head), targets, weights)
  sums, got_d_hidden, got_d_head = loss_and_gradients(args, chunk=6, logit_penalty=0.3)
  assert abs(float(sums.nats) / nats - 1) < 1e-6
  assert abs(float(sums.penalty) / penalty - 1) < 1e-6
  assert largest_error(got_d_hidden, d_hidden) < 2e-6
  assert largest_error(got_d_head, d_head) < 2e-6
  plain = next_token_loss(*args, chunk=6, logit_penalty=0.3)
  assert abs(float(plain.nats) / nats - 1) < 1e-6


def test_loss_bfloat16_accumulates_in_float32():
  D, T = 512, 6
  rng = np.random.default_rng(1)
  hidden = jnp.asarray(rng.normal(size=(B, T, D)), jnp.bfloat16)
  head = jnp.asarray(rng.normal(size=(D, VOCAB)) / math.sqrt(D), jnp.float32)
  _, _, targets, weights = inputs(T)
  rounded = np.asarray(head.astype(jnp.bfloat16), np.float64)
  nats, _, d_hidden, d_head = direct(hidden, rounded, targets, weights)
  args = (hidden, head, targets, weights)
  sums, got_d_hidden, got_d_head = loss_and_gradients(args, chunk=9)
  assert (got_d_hidden.dtype, got_d_head.dtype) == (jnp.bfloat16, jnp.float32)
  assert abs(float(sums.nats) / nats - 1) < 1e-6  # exact products, float32 sums
  assert largest_error(got_d_hidden, d_hidden) < 2**-7
  assert largest_error(got_d_head, d_head) < 2**-8
  traced = jax.jit(lambda *a: loss_and_gradients(a, chunk=9)).trace(*args)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  products = [line for line in text.splitlines() if "dot_general" in line]
  assert len(products) == 3  # logits once, and one per gradient
  for line in products:
    assert re.search(r": \(tensor<\w+bf16>, tensor<\w+bf16>\) -> tensor<\w+f32>", line)


def test_loss_gradient_of_a_tied_bfloat16_head_runs_on_a_cpu():
  _, _, targets, weights = inputs(8)
  hidden = jnp.asarray(inputs(8)[0], jnp.bfloat16)
  tied = lambda x: next_token_loss(hidden, x.T, targets, weights).nats
  head = inputs(8)[1].astype(jnp.bfloat16).astype(np.float32)
  want = direct(hidden, head, targets, weights)[3].T
  assert largest_error(jax.jit(jax.grad(tied))(head.T), want) < 2**-8


def test_loss_bfloat16_rounds_each_gradient_once():
  """With the identity as head, the gradient by the hidden states is that by the logits."""
  T, cap, eye = 12, 0.7, np.eye(VOCAB)
  rng = np.random.default_rng(2)
  hidden = jnp.asarray(rng.normal(size=(B, T, VOCAB)), jnp.bfloat16)
  _, _, targets, weights = inputs(T)
  bounded = np.tanh(np.asarray(hidden, np.float64) / cap)
  want = direct(cap * bounded, eye, targets, weights)[2] * (1 - bounded**2)
  args = hidden, jnp.asarray(eye, jnp.float32), targets, weights
  _, d_hidden, d_head = loss_and_gradients(args, chunk=B * T, soft_cap=cap)
  assert (np.asarray(d_hidden) == want.astype(jnp.bfloat16)).mean() > 0.99
  assert (d_head == d_head.astype(jnp.bfloat16)).mean() < 0.1  # float32 of one chunk


def test_loss_positions_of_weight_zero_ignored():
  hidden, head, targets, weights = inputs(10, dtype=np.float32)
  weights[:, ::3] = 0
  clean = loss_and_gradients((hidden, head, targets, weights), chunk=12, logit_penalty=0.1)
  hidden[:, ::3] = np.nan
  hidden[1, 3] = np.inf
  targets[:, ::3] = [[-100], [VOCAB], [2**31 - 1]]
  dirty = loss_and_gradients((hidden, head, targets, weights), chunk=12, logit_penalty=0.1)
  for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
    np.testing.assert_array_equal(a, b)
  assert not np.asarray(dirty[1])[:, ::3].any()


def test_loss_all_weights_zero_is_zero():
  hidden, head, targets, weights = inputs(5, dtype=np.float32)
  result = loss_and_gradients((hidden, head, targets, 0 * weights), chunk=6, logit_penalty=1.0)
  assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(result))


def test_loss_target_outside_vocabulary_is_nan():
  hidden, head, targets, weights = inputs(5, dtype=np.float32)
  weights[:] = 1
  targets[1, 2] = VOCAB
  assert math.isnan(next_token_loss(hidden, head, targets, weights, chunk=6).nats)


def test_loss_extreme_logits_finite():
  hidden, head, targets, weights = inputs(5, dtype=np.float32)
  weights[:] = 1
  sums, d_hidden, d_head = loss_and_gradients((1e3 * hidden, head, targets, weights), chunk=6)
  assert all(np.isfinite(x).all() for x in (sums.nats, d_hidden, d_head))


def shapes_in(jaxpr):
  """Shapes of all values of a jaxpr, including inner jaxprs (scans, calls)."""
  yield from (v.aval.shape for v in jaxpr.invars)
  for eqn in jaxpr.eqns:
    yield from (v.aval.shape for v in eqn.outvars)
    for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
      inner = getattr(inner, "jaxpr", inner)  # unwraps closed jaxprs
      if hasattr(inner, "eqns"):
        yield from shapes_in(inner)


def test_loss_whole_batch_logits_never_materialized():
  T, vocab, chunk = 64, 1000, 24
  shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
  args = (shape(B, T, D), shape(D, vocab), shape(B, T, dtype=jnp.int32), shape(B, T))

  def run(*args):
    return loss_and_gradients(args, chunk=chunk, logit_penalty=1e-4)

  sizes = [math.prod(s) for s in shapes_in(jax.make_jaxpr(run)(*args).jaxpr)]
  assert max(sizes) == chunk * vocab  # the scan's body is included
  compiled = jax.jit(run).lower(*args).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < B * T * vocab * 4 / 2


@pytest.mark.parametrize(("vocab", "positions"), [(1024, 8192), (2**17, 1024)])
def test_loss_chunk_by_default_is_bounded_in_positions_and_bytes(vocab, positions):
  """A power of two: of at most 8192 positions and 512 MiB of logits."""
  shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)
  T = 2**14
  args = shape(2, T, D), shape(D, vocab), shape(2, T, dtype=jnp.int32), shape(2, T)
  sizes = [math.prod(s) for s in shapes_in(jax.make_jaxpr(next_token_loss)(*args).jaxpr)]
  assert max(sizes) == positions * vocab


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"chunk": 0}, "chunk=0 must be at least 1"),
    (
      {"targets": np.zeros((B, 4), np.int32)},
      "targets has shape .*, but hidden needs",
    ),
    ({"head": np.zeros((D + 1, VOCAB), np.float32)}, r"head \(9, 37\)"),
  ],
)
def test_loss_invalid_arguments_named(change, message):
  names = ("hidden", "head", "targets", "weights")
  arguments = dict(zip(names, inputs(5, dtype=np.float32), strict=True)) | {"chunk": 6} | change
  positional = [arguments.pop(name) for name in names]
  with pytest.raises(ValueError, match=message):
    next_token_loss(*positional, **arguments)
