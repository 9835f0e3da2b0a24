"""Linear complexity sequence models (LCSM): expansion, oscillation and shrinkage by a code."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax import ops
from lnssm_jax.mixers.base import Mixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.activations import log_gate
from lnssm_jax.mixers.common.checks import check_normalizer, check_positive
from lnssm_jax.mixers.common.complex_state import empty_state, from_complex, to_complex
from lnssm_jax.mixers.common.initializers import uniform_fan_in
from lnssm_jax.mixers.common.norms import LayerNorm, unit_norm
from lnssm_jax.mixers.common.positions import cosine_features
from lnssm_jax.mixers.common.projections import Linear, merge_heads
from lnssm_jax.mixers.lcsm_code import ACTIVATIONS, is_learned, read_code
from lnssm_jax.mixers.tnl import alibi_slopes
from lnssm_jax.ops.core.activations import softplus
from lnssm_jax.ops.core.halo import step_positions
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

# Value columns per head of linear attention, at most: kernels exist up to about this width, and
# columns that share their keys may be split into heads.
_WIDEST_HEAD = 128


@register_state
class LCSMState(NamedTuple):
  """Recurrent state of `LCSM`, float32."""

  recurrent: Any  # the state of the code's op; a ComplexState for a complex one
  position: jax.Array | None  # [B] int32, the number of tokens so far, where they are counted


class LCSM(Mixer[LCSMState]):
  r"""A linear complexity sequence model, in one head, by its code e-o-s-a.

      i_t = W_i x_t,      e_t, s_t [k, D]: see below,      o_t [k, D] in (0, 1]
      m_t = o_t * m_{t-1} + e_t * (1 i_t^T),      y_t = sum over k of s_t * m_t         m: [k, D]
      out_t = W_o LayerNorm(y_t)

  e, s: 1, act_a(W x_t), a vector [k] for all columns; 0, act_a of a learned matrix [k, D].
  a: 0 x, 1 relu, 2 sigmoid, 3 1 + elu, 4 silu, 5 elu, 6 relu^2, 7 x^2.
  o, with gate(u) = sigmoid(u)^(1 / tau), P a learned array, key u [k] and value w [D] of the token:

       0 gate(P [k, D])        4 gate(P [k])          8 gate(P [k] w^T)
       1 gate(u) gate(w)^T     5 gate(P [D])          9 gate(u P [D]^T)
       2 gate(w), all rows     6 gate(P [k, D] * u)  10 one
       3 gate(u), all columns  7 gate(P [k, D] * w)  11 exp(i theta [k]), and y_t the real part
      m1 I - e e^T, a matrix product with m, for unit e
      m2 I - e f^T, f_t = act_a(W_f x_t) another unit vector; a without negative values
      m3 1 - e, all columns; a is 2

  The code "0" is the state-space form: with d_t = softplus(W_2 W_1 x_t) [D] and linear e and s,
  o_t = exp(-exp(a_log) * d_t) and d_t i_t in place of i_t.

  A code runs on the cheapest op that computes it exactly (`Code.op`): linear attention where the
  decay is a product of a key and a value factor and e and s are vectors; the delta rule for m1 and
  m2; the selective scan for "0", and for a constant o with vectors e and s; one number per channel
  where a constant e or s and a decay without rows leave no more; a convolution where all three are
  constant; else the elementwise scan.

  Args:
    dim: D, the width.
    code: "e-o-s-a", or "0".
    state_dim: k; 128 in the text, 64 in the released sweep.
    gate_logit_normalizer: tau; larger values move the decays towards 1.
    learned: whether P (codes 0, 4, 5) or theta (11) is learned; None takes what was published,
      learned P and constant theta. Constant decays are exp(-slope), ALiBi's slopes of k D (code 0),
      k (4) or D (5) heads; published for code 0, in the same way here for 4 and 5.
    coloring: which of the codes 2 to 5 depend on the token: 2 and 3 ("source", as in all commits of
      the published code since March 2024), or 4 and 5 ("exchanged", 2 and 3 being gate(P [D]) and
      gate(P [k]); the paper's parameter counts and perplexities would fit that as well).
    gate_rank: the width of W_1 x of code "0".
    norm_eps: eps of the norm, under the root.
    dtype: of the projections and of e, s and i; decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  The published file has constant decays exp(+slope) > 1, a flipped sign, which no state survives;
  here it is negative. Unit vectors of m1 and m2 are ours: without them the state grows.

  Raises:
    ValueError: a size is not positive, the code is unknown, or an option does not apply to it.

  Source: LCSM (Qin et al. 2024), sections 2 and 4, table 7, and its published code. W start uniform
  within 1 / sqrt(inputs), P and the matrices e and s normal with a standard deviation of 0.1, theta
  at 10000^(-2 i / D), a_log at log(1 .. k).
  """

  name = "lcsm"
  sharding = ((r"(e|s|decay)_weight", (None, "fsdp")),)  # [N, D]

  # None where the code has no such part.
  e_proj: Any
  e_weight: Any
  s_proj: Any
  s_weight: Any
  a_proj: Any
  c_proj: Any

  def __init__(
    self,
    dim: int,
    *,
    code: str | int = "1-1-1-4",
    state_dim: int = 128,
    gate_logit_normalizer: float = 16.0,
    learned: bool | None = None,
    coloring: str = "source",
    gate_rank: int = 16,
    norm_eps: float = 1e-5,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.dim, self.dtype = check_positive("dim", dim), jnp.dtype(dtype)
    self.constant_dtype = jnp.promote_types(param_dtype, jnp.float32)
    self.state_dim = check_positive("state_dim", state_dim)
    self.gate_logit_normalizer = check_normalizer(gate_logit_normalizer)
    self.code = read_code(code, coloring)
    self.learned = is_learned(self.code, learned)
    check_positive("gate_rank", gate_rank)

    def linear(inputs, outputs):
      options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
      return Linear(inputs, outputs, kernel_init=uniform_fan_in(inputs), **options)

    def weight(*shape):
      return nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), shape, param_dtype))

    D, k = dim, self.state_dim
    self.i_proj = linear(D, D)
    self.e_proj, self.e_weight = (linear(D, k), None) if self.code.expand else (None, weight(k, D))
    self.s_proj, self.s_weight = (linear(D, k), None) if self.code.shrink else (None, weight(k, D))
    self._make_oscillation(linear, weight, gate_rank, param_dtype)
    self.norm = LayerNorm(D, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(D, D)

  def _make_oscillation(self, linear, weight, gate_rank, param_dtype):
    D, k, o = self.dim, self.state_dim, self.code.oscillate
    self.a_proj = linear(D, k) if o in ("1", "3", "6", "9") else None
    self.c_proj = linear(D, D) if o in ("1", "2", "7", "8") else None
    if self.learned:
      shape = {"0": (k, D), "4": (k,), "5": (D,), "6": (k, D), "7": (k, D), "8": (k,), "9": (D,)}
      if o == "11":
        self.theta = nnx.Param(jnp.asarray(_angles(k, D), param_dtype))
      elif len(shape[o]) == 2:
        self.decay_weight = weight(*shape[o])
      else:
        self.decay_logit = weight(*shape[o])
    if o == "m2":
      self.f_proj = linear(D, k)
    if o == "ssm":
      self.rate_proj, self.dt_proj = linear(D, gate_rank), linear(gate_rank, D)
      a_log = jnp.log(jnp.arange(1, k + 1, dtype=jnp.float32))
      self.a_log = nnx.Param(jnp.broadcast_to(a_log, (D, k)).astype(param_dtype))

  def recurrence_flops(self, state, length):
    """FLOPs by the op of the code; state entries decay, are added to and read."""
    op, axes = self.code.op, self.code.kind.axes
    recurrent = state.recurrent
    if op == "linear_attention":
      decays = 2 if axes == "key value" else int(axes in ("key", "value"))
      return flops.linear_attention(self, recurrent, length, decays=decays)
    size = sum(x.size for x in jax.tree.leaves(recurrent))
    constant = (self.e_weight is not None) + (self.s_weight is not None)
    if op == "diagonal_scan":  # each constant matrix: a weighted sum of k numbers per channel
      return 2 * size + 2 * self.state_dim * self.dim * (constant == 1) + size
    if op == "delta_rule":
      return 6 * size
    if op == "selective_scan":
      return 6 * size + 2 * self.dim
    if op == "long_convolution":  # two numbers of a complex entry cost 11 together
      return 4 * size if axes != "rotation" else 11 * size // 2
    return (5 + (constant > 0)) * size

  def _init_state(self, B):
    D, k, op = self.dim, self.state_dim, self.code.op
    heads = self._value_heads()
    if op == "long_convolution":
      if self.code.kind.axes == "rotation":
        state = empty_state(B, D, k)
      else:
        state = ops.long_convolution.init_state(batch=B, dim=D, state_dim=k, dtype=jnp.float32)
    elif op == "selective_scan":
      state = ops.selective_scan.init_state(batch=B, dim=D, state_dim=k)
    elif op == "diagonal_scan":
      state = ops.diagonal_scan.init_state(batch=B, dim=D)
    else:
      rows = 2 * k if self.code.rotates else k
      sizes = {"batch": B, "heads": heads, "key_dim": rows, "value_dim": D // heads}
      state = getattr(ops, op).init_state(**sizes)
    return LCSMState(state, jnp.zeros(B, jnp.int32) if self.code.rotates else None)

  def _value_heads(self) -> int:
    """The number of heads into which the columns of the state are split."""
    if self.code.op != "linear_attention" or "value" in self.code.kind.axes:
      return 1
    return next(
      n for n in range(1, self.dim + 1) if self.dim % n == 0 and self.dim // n <= _WIDEST_HEAD
    )

  def _mix(self, x, state, segment_ids):
    recurrent, before = (None, None) if state is None else state
    position, positions = None, None
    if self.code.rotates:
      B, T, _ = x.shape
      positions, position = step_positions(B, T, segment_ids, before, axis_name=self.sequence_axis)
    run = getattr(self, f"_{self.code.op}")
    scan = {"segment_ids": segment_ids, "axis_name": self.sequence_axis}
    i = self.i_proj(x).astype(self.dtype)
    y, recurrent = run(x, i, positions, recurrent, scan)
    return self.o_proj(self.norm(y).astype(self.dtype)), LCSMState(recurrent, position)

  def _activated(self, projection, x):
    """[B, T, k], float32 at least."""
    return ACTIVATIONS[self.code.activation](wide(projection(x)))

  def _vectors(self, x, positions):
    """s and e [B, T, 1, k or 2 k] in `dtype`; ones where they are matrices."""
    ones = jnp.ones((*x.shape[:2], self.state_dim), wide(x).dtype)
    vectors = [
      (ones if projection is None else self._activated(projection, x))[:, :, None]
      for projection in (self.s_proj, self.e_proj)
    ]
    if positions is not None:
      vectors = [cosine_features(z, positions, self._theta()) for z in vectors]
    return [z.astype(self.dtype) for z in vectors]

  def _matrices(self) -> Any:
    """The product of those of e and s that are matrices, [k, D], float32 at least; or None."""
    weights = [w[...] for w in (self.e_weight, self.s_weight) if w is not None]
    active = [ACTIVATIONS[self.code.activation](wide(w)) for w in weights]
    return functools.reduce(jnp.multiply, active) if active else None

  def _theta(self):
    """[1, k]"""
    constant = lambda: jnp.asarray(_angles(self.state_dim, self.dim), self.constant_dtype)
    return (wide(self.theta[...]) if self.learned else constant())[None]

  def _log_decay(self, x):
    """[B, T, 1, k] of the token, or [1, k]: by key; None: none."""
    if self.code.oscillate == "m3":
      return jax.nn.log_sigmoid(-wide(self.e_proj(x)))[:, :, None]
    if "key" not in self.code.kind.axes:
      return None
    if self.code.kind.data_dependent:
      return log_gate(self.a_proj(x), self.gate_logit_normalizer)[:, :, None]
    return self._constant_decay(self.state_dim)[None]

  def _value_log_decay(self, x):
    """[B, T, 1, D] of the token, or [1, D]: by value; None: none."""
    if "value" not in self.code.kind.axes:
      return None
    if self.code.kind.data_dependent:
      return log_gate(self.c_proj(x), self.gate_logit_normalizer)[:, :, None]
    return self._constant_decay(self.dim)[None]

  def _log_decays(self, x, state, segment_ids):
    # Of constant decays the selective scan is given steps per token, which are ones.
    if self.code.op == "selective_scan" and self.code.kind.axes == "full":
      return [self._constant_decay(self.state_dim, self.dim)[None]]
    return super()._log_decays(x, state, segment_ids)

  def _constant_decay(self, *shape):
    """A log decay that is the same for all tokens."""
    if not self.learned:
      slopes = alibi_slopes(int(np.prod(shape))).reshape(shape)
      return -jnp.asarray(slopes, self.constant_dtype)
    logit = self.decay_weight if len(shape) == 2 else self.decay_logit
    return log_gate(logit[...], self.gate_logit_normalizer)

  def _linear_attention(self, x, i, positions, state, scan):
    heads = self._value_heads()
    q, k = self._vectors(x, positions)
    log_decay = self._log_decay(x)
    if log_decay is not None:  # of the heads of v, which share q and k
      shape = (*log_decay.shape[:-2], heads, log_decay.shape[-1])
      log_decay = jnp.broadcast_to(log_decay, shape)
    y, state = ops.linear_attention(
      q,
      k,
      i.reshape(*i.shape[:2], heads, -1),
      log_decay=log_decay,
      value_log_decay=self._value_log_decay(x),
      scale=1.0,
      initial_state=state,
      **scan,
    )
    return merge_heads(y), state

  def _delta_rule(self, x, i, positions, state, scan):
    del positions
    s, e = self._activated(self.s_proj, x), unit_norm(self._activated(self.e_proj, x))
    f = unit_norm(self._activated(self.f_proj, x)) if self.code.oscillate == "m2" else None
    narrow = lambda z: z.astype(self.dtype)[:, :, None]
    beta = jnp.ones((*x.shape[:2], 1), e.dtype)
    y, state = ops.delta_rule(
      narrow(s),
      narrow(e),
      narrow(i),
      beta,
      erase_key=None if f is None else narrow(f),
      scale=1.0,
      initial_state=state,
      **scan,
    )
    return y[:, :, 0], state

  def _selective_scan(self, x, i, positions, state, scan):
    s, e = (z[:, :, 0] for z in self._vectors(x, positions))
    if self.code.kind.axes == "step":
      dt = softplus(wide(self.dt_proj(self.rate_proj(x))))
      a = -jnp.exp(wide(self.a_log[...]))
    else:  # constant decays: all steps are equal
      dt = jnp.ones(i.shape, wide(i).dtype)
      a = self._constant_decay(self.state_dim, self.dim).T
    return ops.selective_scan(i, dt, a, e, s, initial_state=state, **scan)

  def _diagonal_scan(self, x, i, positions, state, scan):
    """All rows decay alike, so that their weighted sum is one number per column."""
    del positions
    log_decay = self._value_log_decay(x)
    if log_decay is None:
      log_decay = jnp.zeros((1, self.dim), wide(x).dtype)
    decay = jnp.exp(log_decay[..., 0, :])  # [B, T, D], or of all tokens [D]
    weight, added = self._matrices(), wide(i)
    sums = lambda projection: wide(
      self._activated(projection, x).astype(self.dtype) @ weight.astype(self.dtype)
    )
    if self.e_proj is not None:
      added = added * sums(self.e_proj)
    y, state = ops.diagonal_scan(decay, added, initial_state=state, **scan)
    if self.s_proj is not None:
      y = y * sums(self.s_proj)
    elif self.e_proj is None:
      y = y * weight.sum(0)
    return y, state

  def _long_convolution(self, x, i, positions, state, scan):
    del x, positions
    D, k, weight = self.dim, self.state_dim, self._matrices().T
    if self.code.kind.axes == "rotation":
      pole = jnp.broadcast_to(1j * self._theta(), (D, k))
      state = None if state is None else to_complex(state)
    else:
      shape = (k, D) if self.code.kind.axes == "full" else (k,)
      pole = jnp.broadcast_to(self._constant_decay(*shape).T, (D, k))
      state = None if state is None else state.h
    y, (h,) = ops.long_convolution(
      i,
      ops.ExponentialKernel(pole, weight),
      initial_state=None if state is None else ops.ExponentialState(state),
      **scan,
    )
    return y, from_complex(h) if jnp.iscomplexobj(h) else ops.ExponentialState(h)

  def _elementwise_decay_scan(self, x, i, positions, state, scan):
    q, k = self._vectors(x, positions)
    weight = self._matrices()
    if weight is not None and positions is not None:
      weight = jnp.concatenate([weight, weight])
    y, state = ops.elementwise_decay_scan(
      q,
      k,
      i[:, :, None],
      self._full_decay(x, k.shape[-1]),
      read_weight=None if weight is None else weight[None],
      initial_state=state,
      **scan,
    )
    return y[:, :, 0], state

  def _full_decay(self, x, rows):
    """The log decay of the elementwise scan: an array [1, rows, D], or a function."""
    o, tau = self.code.oscillate, self.gate_logit_normalizer
    if o == "11":
      return jnp.zeros((1, rows, self.dim), jnp.float32)
    if o == "0":
      return self._constant_decay(rows, self.dim)[None]
    if o == "4":
      return jnp.broadcast_to(self._constant_decay(rows)[:, None], (1, rows, self.dim))
    key, value = (None if p is None else wide(p(x)) for p in (self.a_proj, self.c_proj))
    if o in ("1", "3"):
      make = functools.partial(_product_of_gates, tau=tau, columns=self.dim)
      return ops.DecayFunction(make, (key, value))
    parameter = self.decay_logit if o in ("8", "9") else self.decay_weight
    weight = wide(parameter[...])
    weight = weight[:, None] if o == "8" else jnp.broadcast_to(weight, (rows, self.dim))
    return ops.DecayFunction(functools.partial(_gate_of_product, tau=tau), (key, value), weight)


def _product_of_gates(steps, parameters, *, tau, columns):
  """Codes 1 and 3: log of gate(u) gate(w)^T or gate(u), [B, C, 1, k, D]."""
  del parameters
  key, value = steps
  log_decay = log_gate(key, tau)[:, :, None, :, None]
  if value is None:
    return jnp.broadcast_to(log_decay, (*log_decay.shape[:-1], columns))
  return log_decay + log_gate(value, tau)[:, :, None, None, :]


def _gate_of_product(steps, weight, *, tau):
  """Codes 6 to 9: log of gate(P * u) or gate(P * w), [B, C, 1, k, D]."""
  key, value = steps
  token = key[:, :, :, None] if value is None else value[:, :, None, :]
  return log_gate(token * weight, tau)[:, :, None]


def _angles(k: int, dim: int) -> np.ndarray:
  """10000^(-2 i / D), [k]."""
  return 10000.0 ** (-2 * np.arange(k) / dim)
