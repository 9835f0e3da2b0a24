"""Scans with N states per channel: the entry point for many tokens, with its `custom_vjp`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import MADE_BY_KERNELS
from pallas_kernels.channel_states.backward import backward_kernel
from pallas_kernels.channel_states.config import Config
from pallas_kernels.channel_states.forward import forward_kernel
from pallas_kernels.channel_states.recurrence import Inputs, Recurrence
from pallas_kernels.channel_states.streams import KernelInputs, Streams
from pallas_kernels.core.gradients import custom_vjp
from pallas_kernels.core.wgmma import Backend


class Static(NamedTuple):
  """Arguments that the compiled program is specialized to."""

  recurrence: Recurrence
  out_dtype: Any
  config: Config
  backend: Backend = Backend()
  logits_dtype: Any = None  # of `Inputs.rate_logits`; None without them


def scan(
  static: Static, inputs: Inputs, first: jax.Array | None, num_splits: int = 1
) -> tuple[jax.Array, jax.Array]:
  """Returns out [B, T, D] and the last state [B, D, N].

  A long sequence with few channels is split so that every SM has work: a first pass computes the
  state after each split that starts from zero, `Recurrence.split_decay` by how much a split decays
  a state, and from both follows the state that enters each split.

  Args:
    inputs: padded as `config` says; T is a multiple of CHUNK * num_splits.
    first: [B, T], set at the first tokens of documents; or None.
  """
  if num_splits == 1:
    return _scan(static, inputs, first)
  B, T, D = inputs.x.shape
  split = lambda x: x.reshape(B * num_splits, T // num_splits, *x.shape[2:])
  whole = lambda x: x.reshape(B, num_splits, *x.shape[1:])
  per_token = ("x", "rate", "write_key", "read_key", "other_squares", "key_norm", "rate_logits")
  pieces = {name: getattr(inputs, name) for name in per_token}
  pieces = inputs._replace(**{n: split(x) for n, x in pieces.items() if x is not None})
  first = None if first is None else split(first)
  # Derived from an array that is there: inside `shard_map` it must vary over the same mesh axes.
  empty = jnp.zeros_like(jnp.repeat(inputs.initial, num_splits, axis=0))
  alone = pieces._replace(initial=empty, skip=jnp.zeros_like(inputs.skip))
  run = lambda inputs: _scan(static, inputs, first)[1]
  added = whole(run(alone))
  decay = whole(static.recurrence.split_decay(alone, first, run))

  def enter(state, split):
    decay, added = split
    return decay * state + added, state

  by_split = lambda x: jnp.moveaxis(x, 1, 0)
  _, entering = jax.lax.scan(enter, inputs.initial, (by_split(decay), by_split(added)))
  entering = jnp.moveaxis(entering, 0, 1).reshape(empty.shape)
  out, last = _scan(static, pieces._replace(initial=entering), first)
  return out.reshape(B, T, D), whole(last)[:, -1]


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _scan(static, inputs, first):
  results = _forward(static, inputs, first, None)
  return results.out, results.last


def _forward(static, inputs, first, chunk_state_dtype):
  recurrence = static.recurrence
  inputs = recurrence.prepare(inputs)
  return forward_kernel(
    recurrence,
    KernelInputs(Streams.of(inputs, first), inputs.skip, inputs.a, inputs.initial),
    config=static.config.forward,
    out_dtype=static.out_dtype,
    chunk_state_dtype=chunk_state_dtype,
    has_boundaries=first is not None,
    backend=static.backend,
  )


def _forward_rule(static, inputs, first):
  results = _forward(static, inputs, first, inputs.x.dtype)
  results = jax.tree.map(functools.partial(checkpoint_name, name=MADE_BY_KERNELS), results)
  kept = inputs._replace(rate_logits=None, rate_bias=None)  # the slope follows from the rate
  return (results.out, results.last), (kept, first, results.chunk_states)


def _backward_rule(static, residuals, cotangents):
  inputs, first, chunk_states = residuals
  d_out, d_last = cotangents
  recurrence = static.recurrence
  prepared = recurrence.prepare(inputs)
  results = backward_kernel(
    recurrence,
    Streams.of(prepared, first),
    prepared.skip,
    prepared.a,
    chunk_states,
    d_out.astype(inputs.x.dtype),
    d_last,
    logits_dtype=static.logits_dtype,
    config=static.config.backward,
    has_boundaries=first is not None,
    backend=static.backend,
  )
  keys = recurrence.key_gradients(results.key_sums.sum(1), inputs)
  has_logits = static.logits_dtype is not None
  d_inputs = Inputs(
    results.x,
    None if has_logits else results.rate,
    keys.write_key,
    keys.read_key,
    results.skip.sum(0),
    results.initial,
    None if results.a is None else results.a.sum(0),
    keys.other_squares,
    keys.key_norm,
  )
  inputs = inputs._replace(rate=None) if has_logits else inputs
  d_inputs = jax.tree.map(lambda d, x: d.astype(x.dtype), d_inputs, inputs)
  if has_logits:
    d_inputs = d_inputs._replace(rate_logits=results.rate, rate_bias=results.rate_sums.sum(0))
  return d_inputs, None


_scan.defvjp(_forward_rule, _backward_rule)
