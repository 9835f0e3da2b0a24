"""Arguments of the chunked delta rule kernels, and the residuals of their forward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.core.wgmma import Backend
from pallas_kernels.delta_rule.config import NUM_ROWS as NUM_ROWS
from pallas_kernels.delta_rule.config import Shape


class Inputs(NamedTuple):
  """Differentiable arguments, padded: T to whole chunks, K and V to the widths of `config`.

  q, k, erase_key and v may have fewer heads, which groups share; and so may beta and log_decay with
  q and k, whose triangular systems are then those of several heads of v.
  """

  q: jax.Array  # [B, T, H, K] bfloat16
  k: jax.Array  # [B, T, H, K] bfloat16
  erase_key: jax.Array | None  # [B, T, H, K] bfloat16; None for k
  v: jax.Array  # [B, T, H, V] bfloat16
  beta: jax.Array  # [B, length, H] float32
  log_decay: jax.Array  # [B, length, H] float32; or per key channel [B, T, H, K], padded
  kv: jax.Array | None  # [B, H, K, V] float32; None for zeros
  # [B, T, H, K] bfloat16, or None for k. With a decay per key channel; then v is times beta.
  write_key: jax.Array | None = None

  @property
  def heads(self) -> int:
    """H, the heads of the state and of the output."""
    return max(x.shape[2] for x in (self.q, self.k, self.v, self.beta))

  @property
  def channels(self) -> bool:
    """Whether each key channel has a decay."""
    return self.log_decay.ndim == 4

  @property
  def sizes(self) -> Shape:
    """Sizes for which a configuration is chosen."""
    B, _, _, K = self.k.shape
    separate = self.erase_key is not None or self.channels
    writes = self.write_key is not None
    return Shape(B * self.heads, K, self.v.shape[3], separate, self.channels, writes)


class Options(NamedTuple):
  """Static arguments."""

  scale: float
  length: int  # tokens before padding
  config: Any  # a `Config`, or an `AmpereConfig`, for the kernels of that architecture
  num_splits: int  # of a sequence, that run at the same time: P
  erase_before_decay: bool = False  # of its own token; with decays per key channel
  interpret: Any = None  # `plgpu.InterpretGPUParams`, or None to compile
  architecture: str = "sm90"  # the folder of the kernels

  @property
  def backend(self) -> Backend:
    """How all kernels of the call run."""
    return Backend(self.interpret)


class Residuals(NamedTuple):
  """Results of the forward pass that the backward pass needs, besides the arguments."""

  inverse: jax.Array  # [B, H or fewer, T, C] bfloat16
  tables: jax.Array  # [B, H or fewer, N, NUM_ROWS, C] float32; with a decay per key channel: beta
  x: jax.Array  # [B, H, N, V, C] bfloat16, the corrections
  states: jax.Array  # [B, H, N, V, K] bfloat16, that enter the chunks
  maps: jax.Array | None  # [B, H, P, K + V, K] float32, of the splits; None for one
  chunks: Any = None  # `channel_chunks.DecayedChunks`, with a decay per key channel


# The rows of a chunk's table, per token: decay of the entering state; decay in the leaving state;
# beta; decay of the state over the chunk, in the first column; log decays summed from the chunk's
# start.
BEFORE, AFTER, RATE, DECAY, CUMULATIVE = range(5)


def rate_tables(chunk: int, padded: int, beta: jax.Array) -> jax.Array:
  """[B, H, N, 1, C] float32: beta [B, length, H], 0 after the last token."""
  B, length, H = beta.shape
  beta = jnp.pad(beta.transpose(0, 2, 1), ((0, 0), (0, 0), (0, padded - length)))
  return beta.reshape(B, H, -1, 1, chunk)
