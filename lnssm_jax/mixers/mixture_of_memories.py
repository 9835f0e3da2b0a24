"""Mixture of memories (MoM): linear attention whose tokens are routed to a few of many memories."""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers.base import SelectingMixer
from lnssm_jax.mixers.common import flops
from lnssm_jax.mixers.common.checks import check_choice, check_heads, check_positive
from lnssm_jax.mixers.common.inner_recurrence import InnerRecurrence
from lnssm_jax.mixers.common.norms import RMSNorm
from lnssm_jax.mixers.common.projections import Linear, merge_heads, split_heads, split_linear
from lnssm_jax.mixers.common.routing import (
  METHODS,
  balance,
  check_coefficient,
  check_selected,
  is_selected,
  of_selected,
  top_k,
)
from lnssm_jax.ops import DeltaRuleState, LinearAttentionState, SparseState, sparse_state_attention
from lnssm_jax.ops.core.precision import wide
from lnssm_jax.ops.core.states import register_state


@register_state
class MoMState(NamedTuple):
  """Recurrent state of `MoM`, float32."""

  shared: LinearAttentionState | DeltaRuleState | None  # kv [B, H, K, V]; None without
  memories: SparseState  # kv [B, M, H, K, V]


class MoM(SelectingMixer[MoMState]):
  r"""M memories, of which a token writes and reads k, and one that all tokens use.

      p_t = softmax(W_e x_t),  I_t = the k largest,  w^i_t = p^i_t / sum over I_t of p_t
      q_t = W_q x_t,  k^i_t = W^i_k x_t,  v^i_t = W^i_v x_t
      S^i_t = diag(a^i_t) S^i_{t-1} + k^i_t v^i_t^T for i in I_t, else S^i_{t-1}         per head
      y_t = K^(-1/2) (S_t^T q_t + sum over i in I_t of w^i_t (S^i_t)^T q_t)
      out_t = W_o (silu(W_g x_t) * RMSNorm(y_t))

  S, the shared memory, has projections and a decay of its own, as each memory has; queries are
  shared. a is the gate of GLA, of low rank. K = V = D / H; the norm is over the V channels of each
  head, with one scale [V].

  With inner="gated_delta_rule" the memories are those of the gated delta rule, with one decay and
  one rate per head; q and k are divided by their length.

  The auxiliary output (`with_aux`) is the balance loss coefficient M sum_i p_i f_i of this layer, p
  and f the means of p_t and of the selection: k times `routing.balance`, as in its published code,
  which however takes the means over all layers together.

  The projections of all M memories are computed for all tokens, and those of the selected kept: M /
  k times the products that are used. In decoding too, whose time is memory traffic: that reads the
  2 M D^2 numbers of W_k and W_v once per batch, while gathering 2 k D^2 reads, writes and again
  reads them for each of B sequences, which is less only for M > 3 k B. Recurrences run on selected
  tokens only. A sharded sequence is not supported, for the reason that `SSE` gives.

  Args:
    dim: D, the width of input and output; a multiple of `num_heads`.
    num_heads: H.
    num_memories: M, without the shared one.
    num_selected: k.
    inner: the recurrence inside a memory, "gla" or "gated_delta_rule".
    shared_memory: whether there is one.
    gate_rank, gate_logit_normalizer: of the decays, as in `GLA`.
    balance: coefficient of the balance loss.
    method: of `ops.sparse_state_attention`: "mask", "varlen", "gather", or None, which chooses.
    norm_eps: eps of the norm, under the root.
    num_layers: of the model, for the initial W_o.
    dtype: of the projections and of q, k, v; router, decays, norm, state and sums are float32.
    param_dtype: of the parameters.

  Raises:
    ValueError: a size is not positive, `dim` is not a multiple of `num_heads`, a token would select
      more memories than there are, or a name is unknown.

  Source: MoM (Du et al. 2025), sections 3.1 and 3.2. The defaults are those of the SSE paper's
  comparison (Pan et al. 2025, table 1): decays of GLA, no convolutions, no tokens dropped. MoM's
  own experiments have the gated delta rule and convolutions of 4 tokens. Kernels start normal with
  standard deviation 0.02, W_o divided by sqrt(2 num_layers).
  """

  name = "mom"
  set_by_model = ("num_heads", "num_layers")
  can_shard_time = False
  recurrence_flops = flops.routed

  def __init__(
    self,
    dim: int,
    *,
    num_heads: int,
    num_memories: int = 4,
    num_selected: int = 2,
    inner: str = "gla",
    shared_memory: bool = True,
    gate_rank: int = 16,
    gate_logit_normalizer: float = 16.0,
    balance: float = 0.01,
    method: str | None = None,
    norm_eps: float = 1e-5,
    num_layers: int = 1,
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    rngs: nnx.Rngs,
  ):
    self.head_dim = check_heads(dim, num_heads)
    self.dim, self.num_heads, self.dtype = dim, num_heads, jnp.dtype(dtype)
    check_selected("num_selected", num_selected, "num_memories", num_memories)
    self.num_memories, self.num_selected, self.inner = num_memories, num_selected, inner
    self.balance = check_coefficient("balance", balance)
    self.method: Any = None if method is None else check_choice("method", method, METHODS)
    check_positive("num_layers", num_layers)
    normal = nnx.initializers.normal
    options = {"param_dtype": param_dtype, "rngs": rngs}
    linear = functools.partial(Linear, dim, kernel_init=normal(0.02), dtype=dtype, **options)
    self.router_proj = linear(num_memories, dtype=jnp.promote_types(dtype, jnp.float32))
    self.q_proj = linear(dim)
    self.k_proj, self.v_proj = linear(num_memories * dim), linear(num_memories * dim)
    recurrence = functools.partial(
      InnerRecurrence,
      dim,
      inner=inner,
      num_heads=num_heads,
      key_dim=self.head_dim,
      gate_rank=gate_rank,
      gate_logit_normalizer=gate_logit_normalizer,
      kernel_init=normal(0.02),
      dtype=dtype,
      **options,
    )
    self.memory_gates = recurrence(memories=num_memories)
    if shared_memory:
      self.shared_k_proj, self.shared_v_proj = linear(dim), linear(dim)
    self.shared_gates = recurrence() if shared_memory else None
    self.g_proj = linear(dim)
    self.norm = RMSNorm(self.head_dim, eps=norm_eps, param_dtype=param_dtype)
    self.o_proj = linear(dim, kernel_init=normal(0.02 / math.sqrt(2 * num_layers)))

  def _init_state(self, B):
    shape = (B, self.num_memories, self.num_heads, self.head_dim, self.head_dim)
    shared = None if self.shared_gates is None else self.shared_gates.init_state(B, self.head_dim)
    return MoMState(shared, SparseState(jnp.zeros(shape, jnp.float32)))

  def _aux(self, weights, selected):
    chosen = is_selected(selected, self.num_memories)
    return balance(weights, chosen, coefficient=self.num_selected * self.balance)

  def _log_decays(self, x, state, segment_ids):
    return super()._log_decays(x, state, segment_ids)[::-1]  # the shared memory first, as in states

  def _run(self, x, state, segment_ids):
    """(out, state, (router's probabilities [B, T, M], indices [B, T, k] of the selected))."""
    shared, memories = state if state is not None else (None, None)
    heads = lambda z: split_heads(z, self.num_heads)
    rest = {"scale": self.head_dim**-0.5, "segment_ids": segment_ids}
    scores, chosen, indices = top_k(self.router_proj(x), self.num_selected)

    def routed(layer):
      return heads(of_selected(indices, split_linear(layer, x, [self.dim] * self.num_memories)))

    feature = self.memory_gates.feature
    q = feature(heads(self.q_proj(x)))
    log_decay, beta = self.memory_gates(x, indices)
    y, memories = sparse_state_attention(
      q,
      feature(routed(self.k_proj)),
      routed(self.v_proj),
      indices,
      jnp.ones_like(chosen),
      num_partitions=self.num_memories,
      read_gates=chosen / jnp.sum(chosen, axis=-1, keepdims=True),
      log_decay=log_decay,
      beta=beta,
      method=self.method,
      initial_state=memories,
      **rest,
    )
    y = wide(y)
    if self.shared_gates is not None:
      k, v = feature(heads(self.shared_k_proj(x))), heads(self.shared_v_proj(x))
      gates = self.shared_gates(x)
      more, shared = self.shared_gates.recur(q, k, v, gates, initial_state=shared, **rest)
      y = y + wide(more)
    y = self.norm(y, gate=heads(self.g_proj(x)), dtype=self.dtype)
    return self.o_proj(merge_heads(y)), MoMState(shared, memories), (scores, indices)
