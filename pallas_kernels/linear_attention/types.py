"""Arguments of the chunked kernels of linear attention, and the residuals of their forward pass."""

from typing import Any, NamedTuple

import jax

from pallas_kernels.core.wgmma import Backend
from pallas_kernels.linear_attention.config import Shape


class Inputs(NamedTuple):
  """Differentiable arguments, padded: T to `config.padded_length`, K and V to its widths."""

  # bfloat16. Some of q, k, v and a decay of four axes may have fewer heads, which groups share.
  q: jax.Array  # [B, T, H, K]
  k: jax.Array  # [B, T, H, K]
  v: jax.Array  # [B, T, H, V]
  # float32. Scalar, for all key channels of a head: [1, 1, H] or [B, length, H]. Per key channel:
  # [H, K] or [B, T, H, K].
  log_decay: jax.Array
  bonus: jax.Array | None  # [H, K] float32
  kv: jax.Array | None  # [B, H, K, V] float32; None for zeros
  key_sum: jax.Array | None  # [B, H, K] float32; None for zeros or without the normalizer
  # [B, T, H] float32, with scalar decays: the weight of a token in its own output.
  own_weight: jax.Array | None = None

  @property
  def heads(self) -> int:
    """H, the heads of the grid and of all results."""
    return max(x.shape[2] for x in (self.q, self.k, self.v))

  def sizes(self, normalize: bool) -> Shape:
    """Sizes for which a configuration is chosen."""
    (B, T, G, K), V, H = self.k.shape, self.v.shape[3], self.heads
    shares_queries_and_keys = self.q.shape[2] == G and self.v.shape[2] == H
    # The kernels that add over heads have no weight of the own token.
    shares_queries_and_keys &= self.own_weight is None
    decay = {2: "HK", 3: "BTH", 4: "BTHK"}[self.log_decay.ndim]
    return Shape(B, T, H, G if shares_queries_and_keys else H, K, V, decay, normalize)


class Options(NamedTuple):
  """Static arguments."""

  scale: float
  length: int  # tokens before padding
  num_splits: int  # into which the sequence is cut
  normalize: bool
  config: Any  # a `Config`, or an `AmpereConfig`, for the kernels of that architecture
  interpret: Any = None  # `plgpu.InterpretGPUParams`, or None to compile
  architecture: str | None = None  # the folder of the kernels; None for the device's own
  rank: int = 1  # rows of a token, a power of two; several only with scalar decays and own weights

  @property
  def backend(self) -> Backend:
    """How all kernels of the call run."""
    return Backend(self.interpret)


class Residuals(NamedTuple):
  """Results of the forward pass that the backward pass needs, besides the arguments."""

  states: jax.Array  # [B, H, N, K, V] bfloat16, that enter the chunks
  decay: jax.Array | None  # of `ChunkDecay`; None where decays are constant per channel
  tables: Any  # `ScalarDecayTables` of one decay for all key channels, or None
  key_sums: jax.Array | None  # [B, H, N, K] float32, that enter the chunks
  out: jax.Array | None  # with the normalizer
  denominator: jax.Array | None  # [B, H, T] float32
  scores: jax.Array | None  # channel decays: [B, H, T, C] bfloat16
  q: jax.Array | None  # per-token channel decays: [B, T, H, K], decayed from the chunk's start
  k: jax.Array | None  # channel decays, where dv is a kernel of its own: decayed to the chunk's end


class Cotangents(NamedTuple):
  """Cotangents shared by the scalar and the channel decay backward pass; `scale` comes last."""

  d_out: Any  # [B, T, H, V] bfloat16: G, the cotangent of S^T q
  d_denominator: Any  # [B, H, T] float32: d; None without the normalizer
  d_last_key_sum: Any  # [B, H, K] float32; None for zeros
  scale: float
  decays: bool  # whether the decay wants a gradient


def has_channel_decay(log_decay: jax.Array) -> bool:
  """Whether decays are per key channel, not one for all channels of a head."""
  return log_decay.ndim != 3
