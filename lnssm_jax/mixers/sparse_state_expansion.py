"""Sparse state expansion (SSE): linear attention with many states, of which a token uses a few."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import SelectingMixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_choice, check_heads, check_positive
from lnssm_jax.mixers.common.inner_recurrence import InnerRecurrence
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads
from lnssm_jax.mixers.common.routing import (
  METHODS,
  balance,
  check_coefficient,
  check_selected,
  is_selected,
  top_k,
)
from lnssm_jax.ops import DeltaRuleState, LinearAttentionState, SparseState, sparse_state_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state

GATES = ("uniform", "joint", "eta")
OUTPUT_GATES = ("low_rank", "full", "none")
FEATURE_MAPS = {"linear": lambda x: x, "silu": jax.nn.silu}


@register_state
class SSEState(NamedTuple):
  """Recurrent state of `SSE`, float32."""

  always: LinearAttentionState | DeltaRuleState  # kv [B, H, K, V], of the always-on partition
  sparse: SparseState  # kv [B, N, H, K, V]


class SSE(SelectingMixer[SSEState]):
  r"""N partitions of the state, of which a token writes and reads k, and one that all use.

      e_t = W_e x_t,  eta_t = softmax(e_t),  I_t = the k largest                    per token
      q_t = phi(W_q x_t),                 k_t = softmax(W_k x_t),  v_t = phi(W_v x_t)
      p_t = phi(W_q x_t + U_q D_q x_t),   m_t = softmax(W_k x_t + U_k D_k x_t)       per head
      S_t = diag(a_t) S_{t-1} + k_t v_t^T
      S^i_t = diag(b_t) S^i_{t-1} + w^i_t m_t v_t^T for i in I_t, else S^i_{t-1}
      y_t = K^(-1/2) (S_t^T q_t + sum over i in I_t of (S^i_t)^T (r^i_t p_t))
      out_t = W_o (silu(G_2 G_1 x_t) * RMSNorm(y_t))

  The softmax of keys is over the K channels of a head; heads share the selection. a and b are the
  gates of GLA, of low rank. The norm is over the V channels of each head, with one scale [V].

  `gate` sets w and r:

      "uniform"  w = 1 / k, r = 1: the paper's eq. 11, in which softmax(W_k x_t + e_i) does not
                 depend on e_i, because softmax does not see a shift. The output then has no
                 gradient with respect to W_e: it learns from the balance loss only.
      "joint"    w = softmax of the selected e, r = 1: one softmax over the k K rows of the selected
                 partitions. With k = 1 that is "uniform".
      "eta"      w = r = eta_scale * eta, not renormalized: the authors' later code.

  With inner="gated_delta_rule", S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, with
  one decay per head and rates beta; q, k, p, m are phi of their projections, divided by their
  length, and w multiplies the rates.

  The auxiliary output (`with_aux`) is the balance loss, `routing.balance` of eta.

  A single token gathers, updates and stores the k + 1 states that it uses, whatever N is. A sharded
  sequence is not supported: which partitions a shard's tokens leave behind is known only where all
  tokens have been sorted.

  Args:
    dim: D, the width of input and output.
    num_heads: H. V = D / H.
    head_dim: K, the rows of a partition; None means D / H.
    num_partitions: N, without the one that is always on.
    num_selected: k.
    num_readers: how many partitions a token reads, those of largest eta; None means those that it
      writes. Of the others nothing decays.
    lora_rank: the width of D_q x and D_k x, or None: the partitions share queries and keys.
    gate: "uniform", "joint" or "eta", see above.
    eta_scale: a factor of "eta", which `expand_partitions` sets.
    router_bias: whether e_t has a bias, initially 0. Without it a partition cannot be kept unused;
      `expand_partitions` sets it.
    inner: the recurrence inside a partition, "gla" or "gated_delta_rule".
    shared_gate: whether b = a (and the rates are equal), as in the paper; two in its later code.
    feature_map: phi: "linear", the paper's, or "silu", that of its later code.
    gate_rank, gate_logit_normalizer: of a and b, as in `GLA`.
    output_gate: "low_rank" (of rank V), "full" or "none".
    balance: coefficient of the balance loss.
    method: of `ops.sparse_state_attention`: "mask", "varlen", "gather", or None, which chooses.
    norm_eps: eps of the norm, under the root.
    num_layers: of the model, for the initial W_o.
    dtype: of the projections and of q, k, v; router, decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, `dim` is not a multiple of `num_heads`, a token would select
      more partitions than there are, or a name is unknown.

  Source: SSE (Pan et al. 2025), sections 3.2 and 4, and the authors' later code (SpikingBrain 2.0).
  Kernels start normal with standard deviation 0.02, W_o divided by sqrt(2 num_layers). The optional
  convolution of the later code is left out, as in the paper.
  """

  name = "sse"
  set_by_model = ("num_heads", "num_layers")
  can_shard_time = False
  recomputes = True
  recurrence_flops = flops.routed

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    head_dim: int | None = None,
    num_partitions: int = 4,
    num_selected: int = 1,
    num_readers: int | None = None,
    lora_rank: int | None = 64,
    gate: str = "eta",
    eta_scale: float = 1.0,
    router_bias: bool = False,
    inner: str = "gla",
    shared_gate: bool = False,
    feature_map: str = "linear",
    gate_rank: int = 16,
    gate_logit_normalizer: float = 16.0,
    output_gate: str = "low_rank",
    balance: float = 0.01,
    method: str | None = None,
    norm_eps: float = 1e-5,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.value_dim = check_heads(dim, num_heads)
    self.key_dim = self.value_dim if head_dim is None else check_positive("head_dim", head_dim)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_selected("num_selected", num_selected, "num_partitions", num_partitions)
    self.num_partitions, self.num_selected = num_partitions, num_selected
    self.num_readers = num_selected if num_readers is None else num_readers
    check_selected("num_readers", self.num_readers, "num_partitions", num_partitions)
    self.gate, self.inner = check_choice("gate", gate, GATES), inner
    self.eta_scale = float(eta_scale)
    self.feature_map = check_choice("feature_map", feature_map, FEATURE_MAPS)
    self.balance = check_coefficient("balance", balance)
    self.method: Any = None if method is None else check_choice("method", method, METHODS)
    check_choice("output_gate", output_gate, OUTPUT_GATES)
    check_positive("num_layers", num_layers)
    keys, normal = num_heads * self.key_dim, nnx.initializers.normal
    options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, kernel_init=normal(0.02), **options)
    self.q_proj, self.k_proj, self.v_proj = linear(dim, keys), linear(dim, keys), linear(dim, dim)
    options["dtype"] = jnp.promote_types(dtype, jnp.float32)
    bias_init = "zeros" if router_bias else None
    self.router_proj = Linear(
      dim, num_partitions, kernel_init=normal(0.02), bias_init=bias_init, **options
    )
    options["dtype"] = dtype
    self.has_lora = lora_rank is not None
    if lora_rank is not None:
      rank = check_positive("lora_rank", lora_rank)
      self.q_down_proj, self.k_down_proj = linear(dim, rank), linear(dim, rank)
      self.q_up_proj, self.k_up_proj = linear(rank, keys), linear(rank, keys)
    recurrence = functools.partial(
      InnerRecurrence,
      dim,
      inner=inner,
      num_heads=num_heads,
      key_dim=self.key_dim,
      gate_rank=gate_rank,
      gate_logit_normalizer=gate_logit_normalizer,
      kernel_init=normal(0.02),
      **options,
    )
    self.always_gates = recurrence()
    self.sparse_gates = None if shared_gate else recurrence()
    if output_gate == "low_rank":
      self.gate_down_proj, self.gate_up_proj = (
        linear(dim, self.value_dim),
        linear(self.value_dim, dim),
      )
    elif output_gate == "full":
      self.g_proj = linear(dim, dim)
    self.norm = RMSNorm(self.value_dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(dim, dim, kernel_init=normal(0.02 / math.sqrt(2 * num_layers)))
    self.output_gate = output_gate

  def _init_state(self, B):
    shape = (B, self.num_partitions, self.num_heads, self.key_dim, self.value_dim)
    always = self.always_gates.init_state(B, self.value_dim)
    return SSEState(always, SparseState(jnp.zeros(shape, jnp.float32)))

  def _aux(self, weights, selected):
    chosen = is_selected(selected[..., : self.num_selected], self.num_partitions)
    return balance(weights, chosen, coefficient=self.balance)

  def _run(self, x, state, segment_ids):
    """(out, state, (eta [B, T, N], indices [B, T, S] of the partitions in descending order))."""
    always, sparse = state if state is not None else (None, None)
    heads = lambda z: split_heads(z, self.num_heads)
    phi = lambda z: FEATURE_MAPS[self.feature_map](wide(z))
    to_q, to_k = self.q_proj(x), self.k_proj(x)
    v = phi(heads(self.v_proj(x))).astype(self.dtype)
    rest = {"scale": self.key_dim**-0.5, "segment_ids": segment_ids}

    q, k = self._features(heads(to_q), heads(to_k))
    gates = self.always_gates(x)
    y, always = self.always_gates.recur(q, k, v, gates, initial_state=always, **rest)

    if self.has_lora:
      to_q = wide(to_q) + wide(self.q_up_proj(self.q_down_proj(x)))
      to_k = wide(to_k) + wide(self.k_up_proj(self.k_down_proj(x)))
      q, k = self._features(heads(to_q), heads(to_k))
    log_decay, beta = gates if self.sparse_gates is None else self.sparse_gates(x)
    S = max(self.num_selected, self.num_readers)
    eta, chosen, indices = top_k(self.router_proj(x), S)
    write, read = self._weights(chosen)
    if self.num_readers > self.num_selected:
      # What is only read keeps decay 1; a decay per selection needs a key per selection.
      written = jnp.arange(S) < self.num_selected
      log_decay = jnp.where(
        written.reshape(-1, *[1] * (log_decay.ndim - 2)), log_decay[:, :, None], 0
      )
      k = jnp.broadcast_to(k[:, :, None], (*k.shape[:2], S, *k.shape[2:]))
    more, sparse = sparse_state_attention(
      q,
      k,
      v,
      indices,
      write,
      num_partitions=self.num_partitions,
      read_gates=read,
      log_decay=log_decay,
      beta=beta,
      method=self.method,
      initial_state=sparse,
      **rest,
    )
    gate = None
    if self.output_gate != "none":
      full = self.output_gate == "full"
      gate = heads(self.g_proj(x) if full else self.gate_up_proj(self.gate_down_proj(x)))
    y = self.norm(wide(y) + wide(more), gate=gate, dtype=self.dtype)
    return self.o_proj(merge_heads(y)), SSEState(always, sparse), (eta, indices)

  def _features(self, q, k):
    """Queries and keys [B, T, H, K] of the recurrence, in `dtype`."""
    phi = FEATURE_MAPS[self.feature_map]
    q, k = phi(wide(q)), wide(k)
    k = jax.nn.softmax(k) if self.inner == "gla" else phi(k)
    return self.always_gates.feature(q), self.always_gates.feature(k)

  def _weights(self, eta):
    """(w, r) [B, T, S], from eta of the selected partitions in descending order."""
    S, k = eta.shape[-1], self.num_selected
    written, seen = jnp.arange(S) < k, jnp.arange(S) < self.num_readers
    if self.gate == "eta":
      write = read = self.eta_scale * eta
    else:
      joint = self.gate == "joint"
      write = eta / jnp.sum(eta[..., :k], axis=-1, keepdims=True) if joint else 1 / k
      read = jnp.ones_like(eta)
    return jnp.where(written, write, jnp.zeros_like(eta)), jnp.where(seen, read, 0.0)
