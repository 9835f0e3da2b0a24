"""The public function: its promises, the checks of its arguments, the choice of implementation."""

import jax
import jax.numpy as jnp

from lnssm_jax.ops import dispatch, per_device
from lnssm_jax.ops.checks import (
  accumulation_dtype,
  check_floating,
  check_shape,
  first_of_segment,
  segment_index,
  vary_alike,
)
from lnssm_jax.ops.wkv4 import reference, xla
from lnssm_jax.ops.wkv4.state import WKV4State, empty_state

_NAME = "wkv4"


def wkv4(
  k: jax.Array,  # [B, T, D]
  v: jax.Array,  # [B, T, D]
  decay_rate: jax.Array,  # [D], values > 0
  bonus: jax.Array,  # [D]
  *,
  initial_state: WKV4State | None = None,
  segment_ids: jax.Array | None = None,  # [B, T] integer
  implementation: str | None = None,
  chunk_size: int | None = None,
) -> tuple[jax.Array, WKV4State]:
  r"""RWKV-4's mean of the values so far, weighted by exp(k), which decays by `decay_rate` a step.

      out_t = (sum_{j<t} e_j v_j + exp(bonus + k_t) v_t) / (sum_{j<t} e_j + exp(bonus + k_t)),
      e_j = exp(k_j - (t - 1 - j) decay_rate)

  Computed in log space: the sums are divided by exp of a running maximum, so that keys of any size
  neither overflow nor vanish. Every output lies between the smallest and the largest value so far.
  k = -inf leaves a step out of the mean; an output whose every weight is 0 is NaN. `decay_rate` is
  in nats a step; inf forgets everything before the last step.

  States and sums are float32 (float64 if an input is) whatever the dtype of k and v; `out` has the
  dtype of `v`. Cutting a sequence anywhere and passing the state on gives the same result as one
  call; so does packing several sequences with `segment_ids` (the state is forgotten where the id
  changes; `initial_state` belongs to the first segment, the returned state to the last). Gradients
  flow to every array argument, to `initial_state` and from the returned state, whose `max` is a
  scale that is held fixed: a function of exp(max) numerator and exp(max) denominator has the right
  gradient through the latter two alone. Reverse mode only: the chunked form defines its own
  backward pass.

  Args:
    initial_state: the state before the first step, with `denominator` >= 0; None means empty.
    implementation: "pallas" (kernels; a Hopper GPU, k and v bfloat16 or float32), "chunked" (a scan
      over chunks; any device and arguments), "associative" (`lax.associative_scan`), "reference"
      (one step at a time), or "pallas_interpret" (the kernels on a CPU, slowly, to test them). None
      takes "pallas" where it can run and is known to be faster (T = 1: D a multiple of 128; T > 1:
      D >= 128; with several devices inside `shard_map`, or with a mesh that `per_device` knows),
      otherwise "chunked".
    chunk_size: steps in a chunk of the chunked form; None means 8 on CPUs, 512 elsewhere. The
      kernels choose their own.

  Returns:
    `out` [B, T, D] and the `WKV4State` after the last step.

  Raises:
    ValueError: shapes or dtypes do not agree; the message names the argument.
    NotImplementedError: the named implementation cannot run these arguments.

  Source: RWKV, Peng et al. 2023, eqs. 16 and 19-25 (appendix D: the numerically safe recursion).
  """
  args, kwargs = _checked(
    k,
    v,
    decay_rate,
    bonus,
    initial_state=initial_state,
    segment_ids=segment_ids,
    chunk_size=chunk_size,
  )
  with jax.named_scope(_NAME):
    return dispatch.choose(_NAME, implementation, args, kwargs).run(*args, **kwargs)


def _checked(k, v, decay_rate, bonus, *, initial_state=None, segment_ids=None, chunk_size=None):
  """Checks the arguments of `wkv4` and gives them the implementations' form."""
  k, v, decay_rate, bonus = (jnp.asarray(x) for x in (k, v, decay_rate, bonus))
  for name, x in (("k", k), ("v", v), ("decay_rate", decay_rate), ("bonus", bonus)):
    check_floating(_NAME, name, x)
  check_shape(_NAME, "k", k, (None,) * 3, "[B, T, D]")
  B, T, D = k.shape
  check_shape(_NAME, "v", v, (B, T, D), "the shape of k, [B, T, D]")
  check_shape(_NAME, "decay_rate", decay_rate, (D,), "[D]")
  check_shape(_NAME, "bonus", bonus, (D,), "[D]")
  if 0 in (T, D):
    raise ValueError(f"{_NAME}: k {k.shape} has an empty axis; T >= 1 and D >= 1 are needed.")
  if chunk_size is not None and chunk_size < 1:
    raise ValueError(f"{_NAME}: chunk_size={chunk_size} must be at least 1.")
  acc = accumulation_dtype(k, v, decay_rate, bonus)
  state = empty_state(B, D, acc)
  if initial_state is not None:
    for name, x in initial_state._asdict().items():
      check_shape(_NAME, f"initial_state.{name}", x, (B, D), "[B, D]")
    state = WKV4State(*(jnp.asarray(x, acc) for x in initial_state))
  segments = segment_index(_NAME, segment_ids, B, T)
  keep = None if segments is None else ~first_of_segment(segments)[..., None]
  args = vary_alike((k, v, decay_rate, bonus, state, keep))
  return args, {"chunk_size": chunk_size}


_LAYOUT = per_device.Layout(("BTD", "BTD", "D", "D", "BD", "BT"), ("BTD", "BD"))
_COMPILED, _INTERPRETED = dispatch.kernels(f"{__package__}.pallas", _LAYOUT)

dispatch.register(
  _NAME,
  _checked,
  _COMPILED,
  dispatch.Implementation("chunked", xla.chunked),
  dispatch.Implementation("reference", reference.reference),
  dispatch.Implementation("associative", xla.associative),
  _INTERPRETED,
)
