"""RWKV-4's scan in chunks; README.md derives it, forward and backward.

The maximum is found first. Divided by it, both sums are one recurrence with factors of at most 1.
The factors are kept as logarithms: for a weak decay, exp(log) is 1 minus a little, and its
rounding, the same at every step, would add up along time. The backward pass keeps the inputs and
the states that enter the chunks, and computes the rest again.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from lnssm_jax.ops.core.chunking import over_chunks, shift
from lnssm_jax.ops.core.precision import CompensatedSum
from lnssm_jax.ops.core.segments import no_gradient
from lnssm_jax.ops.core.spmd import vary_alike
from lnssm_jax.ops.wkv4.reference import associative_elements, read_weights
from lnssm_jax.ops.wkv4.types import EMPTY, Inputs, Options, WKV4State
from pallas_kernels.core.gradients import custom_vjp

# As in the diagonal scan: chains of steps on CPUs, long chunks and a logarithmic depth elsewhere.
_CPU_CHUNK_SIZE = 8
# There a chunk holds a few dozen arrays at a time: fewer tokens where these would be large.
_ACCELERATOR_CHUNK_SIZES = 64, 512
_LARGEST_ARRAY = 1 << 20  # numbers
_LONGEST_CHAIN = 32


class _Steps(NamedTuple):
  """A chunk's recurrence and its states, [B, C, D] each. `_before`: of the state before a token."""

  log_decay: jax.Array  # of numerator and denominator, with the change of scale in it
  weight: jax.Array  # of the token's own value in the state: exp(k - max)
  max_before: jax.Array
  denominator_before: jax.Array
  mean_before: jax.Array  # numerator / denominator; 0 where the state is empty
  denominator: jax.Array
  last: WKV4State
  low: jax.Array  # [B, 2, D], what the roundings of the last numerator and denominator lost


class _Static(NamedTuple):
  """Trace-time constants."""

  chunk_size: int
  elements: bool  # the forward pass by the associative scan of `reference.py`


def chunked(inputs: Inputs, options: Options) -> tuple[jax.Array, WKV4State]:
  """The chunked form."""
  B, _, D = inputs.k.shape
  default = _CPU_CHUNK_SIZE if jax.default_backend() == "cpu" else accelerator_chunk_size(B, D)
  return _run(_Static(options.chunk_size or default, False), inputs)


def accelerator_chunk_size(batch: int, channels: int) -> int:
  """Tokens per chunk, a power of two."""
  least, most = _ACCELERATOR_CHUNK_SIZES
  if is_symbolic_dim(batch):
    return most
  fit = max(_LARGEST_ARRAY // max(batch * channels, 1), 1)
  return min(max(1 << (fit.bit_length() - 1), least), most)


def associative(inputs: Inputs, options: Options) -> tuple[jax.Array, WKV4State]:
  """The associative scan of `reference.py`, with the backward pass of one chunk of all tokens."""
  del options
  return _run(_Static(inputs.k.shape[1], True), inputs)


def _run(static, inputs):
  out, last = _scan(static, *inputs[:-1], inputs.keep)
  # The maximum is a scale that the other two are divided by; they carry the gradient.
  return out, last._replace(max=jax.lax.stop_gradient(last.max))


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _scan(static, k, v, decay_rate, bonus, state, keep):
  return _forward(static, k, v, decay_rate, bonus, state, keep)[0]


def _forward(static, k, v, decay_rate, bonus, state, keep):
  """Returns (out, last state) and the residuals."""
  if static.elements:
    out, last = associative_elements(k, v, decay_rate, bonus, state, keep)
    entering = jax.tree.map(lambda x: x[None], state)
    return (out, last), (k, v, decay_rate, bonus, keep, entering, last)

  def chunk(carry, by_step, _):
    state, low = carry
    k, v, keep = by_step
    steps = _steps(k, v, keep, decay_rate, state, low)
    _, present, past = _read(k, bonus, steps)
    out = past * steps.mean_before + present * v.astype(state.max.dtype)
    return (steps.last, steps.low), (out.astype(v.dtype), state)

  carry = (state, _nothing_lost(state))
  (last, _), out, entering = over_chunks(
    chunk, carry, (k, v, keep), size=static.chunk_size, reverse=False
  )
  return (out, last), (k, v, decay_rate, bonus, keep, entering, last)


@jax.named_scope("wkv4")
def _backward(static, residuals, cotangents):
  k, v, decay_rate, bonus, keep, entering, last = residuals
  d_out, d_last = cotangents

  def chunk(carry, by_step, entering):
    d_numerator, d_shift, d_rate, d_bonus = carry
    k, v, keep, d_out = by_step
    acc = entering.max.dtype
    steps = _steps(k, v, keep, decay_rate, entering, _nothing_lost(entering))
    v, d_out = v.astype(acc), d_out.astype(acc)
    scaled, present, past = _read(k, bonus, steps)
    away = v - steps.mean_before  # every difference below is a weight times this one
    decay = jnp.exp(steps.log_decay)

    def backwards(from_step, carry):
      """Cotangents of all states from the tokens after them, and of the entering one."""
      totals, arriving = _linear_scan(
        steps.log_decay, keep, _masked(keep, from_step), carry, reverse=True
      )
      return shift(totals, later=False, boundary=carry.high), arriving

    # The adjoint of the numerator, and that of a shift of all values that the state holds.
    read = scaled * d_out
    numerator, d_numerator = backwards(read, d_numerator)
    total = jnp.where(steps.denominator > 0, steps.denominator, 1)
    mean_change = steps.weight / total * away
    shifted = -read * present * away - decay * numerator * mean_change
    shift_, d_shift = backwards(shifted, d_shift)

    own = present * past * away * d_out
    past_weight = decay * steps.denominator_before
    d_k = own + steps.weight * (shift_ + numerator * (past_weight / total * away))
    d_v = present * d_out + steps.weight * numerator
    forgotten = past_weight * (shift_ - numerator * mean_change)
    carry = d_numerator, d_shift, d_rate.add(-forgotten.sum(1)), d_bonus.add(own.sum(1))
    return carry, ((d_k.astype(by_step[0].dtype), d_v.astype(by_step[1].dtype)), ())

  initial = jax.tree.map(lambda x: x[0], entering)
  if static.elements:
    # The same maximum as in `chunk`, from which that of the forward pass may differ by roundings.
    acc = last.max.dtype
    m = _running_max(k.astype(acc), keep, decay_rate.astype(acc), initial.max)[:, -1]
    rescaled = lambda x: jnp.exp(m - last.max) * x
    d_last = WKV4State(d_last.max, rescaled(d_last.numerator), rescaled(d_last.denominator))
  zeros = jnp.zeros_like(last.max)
  d_shift = d_last.denominator + d_last.numerator * _mean(last)
  carry = tuple(CompensatedSum(x, zeros) for x in (d_last.numerator, d_shift, zeros, zeros))
  (d_numerator, d_shift, d_rate, d_bonus), (d_k, d_v), _ = over_chunks(
    chunk,
    vary_alike((carry, k))[0],
    (k, v, keep, d_out),
    entering,
    size=static.chunk_size,
    reverse=True,
  )
  d_initial = WKV4State(
    initial.denominator * d_shift.high,
    d_numerator.high,
    d_shift.high - d_numerator.high * _mean(initial),
  )
  d_rate = d_rate.high.sum(0).astype(decay_rate.dtype)
  d_bonus = d_bonus.high.sum(0).astype(bonus.dtype)
  return d_k, d_v, d_rate, d_bonus, d_initial, no_gradient(keep)


_scan.defvjp(_forward, _backward)


def _steps(k, v, keep, decay_rate, state, low):
  """The states of one chunk from the state that enters it."""
  acc = state.max.dtype
  k, v, rate = k.astype(acc), v.astype(acc), decay_rate.astype(acc)
  m = _running_max(k, keep, rate, state.max)
  max_before = shift(m, later=True, boundary=state.max)
  max_before = max_before if keep is None else jnp.where(keep, max_before, EMPTY)
  # In this order: a difference of neighboring maxima is nearly exact, so that the rounding of the
  # maxima themselves does no harm.
  log_decay = (max_before - m) - rate
  weight = jnp.exp(k - m)
  inputs = jnp.stack([weight * v, weight], axis=2)
  entering = CompensatedSum(jnp.stack([state.numerator, state.denominator], axis=1), low)
  keep_4 = None if keep is None else keep[..., None]
  sums, leaving = _linear_scan(log_decay[:, :, None], keep_4, inputs, entering, reverse=False)
  before = _masked(keep_4, shift(sums, later=True, boundary=entering.high))
  return _Steps(
    log_decay,
    weight,
    max_before,
    before[:, :, 1],
    _mean(WKV4State(max_before, before[:, :, 0], before[:, :, 1])),
    sums[:, :, 1],
    WKV4State(m[:, -1], leaving.high[:, 0], leaving.high[:, 1]),
    leaving.low,
  )


def _nothing_lost(state):
  return jnp.stack([jnp.zeros_like(state.numerator)] * 2, axis=1)


def _running_max(k, keep, rate, first):
  """m_t = max(m_{t-1} - rate, k_t), and k_t where `keep` is False; fixed in differentiation."""
  # The gradient's own derivative would else move the sums by a scale that the maximum does not.
  k, rate, first = jax.lax.stop_gradient((jnp.maximum(k, EMPTY), rate, first))
  reached = lambda keep, m: m if keep is None else jnp.where(keep, m, EMPTY)
  at = lambda t: None if keep is None else keep[:, t]
  k = k.at[:, 0].max(reached(at(0), first - rate))
  if k.shape[1] <= _LONGEST_CHAIN:
    results = [k[:, 0]]
    for t in range(1, k.shape[1]):
      results.append(jnp.maximum(reached(at(t), results[-1] - rate), k[:, t]))
    return _computed(jnp.stack(results, axis=1))

  def combine(left, right):
    decay, m, *kept = right
    kept = [x & y for x, y in zip(left[2:], kept, strict=True)]
    m = jnp.maximum(reached(right[2] if kept else None, left[1] - decay), m)
    return left[0] + decay, m, *kept

  elements = (jnp.broadcast_to(rate, k.shape), k, *(() if keep is None else (keep,)))
  return jax.lax.associative_scan(combine, elements, axis=1)[1]


def _linear_scan(log_decay, keep, x, entering, *, reverse):
  """h_t = exp(log_decay_t) h_{t-1} + x_t from h = `entering`: all h, and the sum that leaves."""
  # Near 1 the factor is 1 + expm1(log): the 1 is exact, and what the sum of the rest loses by
  # rounding is kept, since small steps that are lost in the same direction add up along time.
  near = log_decay > -0.5
  rest = jnp.where(near, jnp.expm1(log_decay), jnp.exp(log_decay))
  if keep is not None:
    near, rest = near & keep, jnp.where(keep, rest, 0)

  def step(t, total):
    forget = lambda h: h if keep is None else jnp.where(keep[:, t], h, 0)
    kept = CompensatedSum(jnp.where(near[:, t], total.high, 0), jnp.where(near[:, t], total.low, 0))
    return kept.add(rest[:, t] * forget(total.high) + x[:, t])

  first, last = (-1, 0) if reverse else (0, -1)
  if x.shape[1] <= _LONGEST_CHAIN:
    near, rest, x = _computed((near, rest, x))
    order = list(range(x.shape[1]))[:: -1 if reverse else 1]
    results, total = [], entering
    for t in order:
      total = _computed(step(t, total))
      results.append(total.high)
    return jnp.stack(results[:: -1 if reverse else 1], axis=1), total

  def combine(left, right):
    decay, h, *kept = right
    h = jnp.exp(decay) * _masked(kept[0] if kept else None, left[1]) + h
    return left[0] + decay, h, *(a & b for a, b in zip(left[2:], kept, strict=True))

  x = x.at[:, first].set(step(first, entering).high)
  elements = (log_decay, x, *(() if keep is None else (keep,)))
  results = jax.lax.associative_scan(combine, elements, axis=1, reverse=reverse)[1]
  return results, CompensatedSum(results[:, last], jnp.zeros_like(entering.low))


def _computed(tree):
  """The arrays, computed once: else the compiler computes a whole chain again for each reader."""
  return jax.lax.optimization_barrier(tree)


def _read(k, bonus, steps):
  """Weights of the output: of the numerator, of the present value, and of the past mean."""
  acc = steps.weight.dtype
  past, present = read_weights(k.astype(acc), bonus.astype(acc), steps.max_before)
  total = past * steps.denominator_before + present
  return past / total, present / total, past * steps.denominator_before / total


def _mean(state):
  """numerator / denominator, and 0 for an empty state."""
  there = state.denominator > 0
  return jnp.where(there, state.numerator / jnp.where(there, state.denominator, 1), 0)


def _masked(keep, x):
  return x if keep is None else jnp.where(keep, x, 0)
