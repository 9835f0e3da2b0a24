"""Running sums of angles, kept within a turn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.common.recompute import recomputed
from lnssm_jax.mixers.common.spans import earlier, spans
from lnssm_jax.ops.core.segments import Segments, positions
from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.rotations.reference import within_a_turn
from lnssm_jax.ops.rotations.types import CHUNK


def running_angles(
  step: jax.Array,  # [B, T, ...]
  start: jax.Array | None,  # [B, ...]
  axis_name: str | None,
) -> tuple[jax.Array, jax.Array]:
  """(Sums of `step` over time, the last one [B, ...]), modulo whole turns.

  Args:
    start: the sum before the first token; None means 0.
    axis_name: mesh axis that shards time; `start` and the last sum are of the whole sequence.
  """
  return _continued(sums_within_a_turn(step), start, None, axis_name)


class ChunkAngles(NamedTuple):
  """Angles of heads between chunks of tokens, as `ops.rotations` takes them."""

  entering: jax.Array  # [B, L, H, A]
  last: jax.Array  # [B, H, A], after the last token of the whole sequence
  keep: jax.Array  # [B, L C], 0 where a document begins that is not the row's first, else 1


def chunk_angles(
  pace: jax.Array,  # [B, T, A]
  step: jax.Array,  # [B, T, H]
  start: jax.Array | None,  # [B, H, A]
  segments: Segments | None,
  axis_name: str | None,
) -> ChunkAngles:
  """The angle_t = angle_{t-1} + step_t pace_t of each document before each chunk of C tokens.

  Args:
    pace, step: float32 at least.
    start, axis_name: as for `running_angles`.
    segments: each document but the first starts from 0.
  """
  B, T = step.shape[:2]
  C = chunk_size(T)
  document = jnp.zeros((B, T), jnp.int32) if segments is None else segments.index
  document = padded(document, mode="edge")
  chunks = document.reshape(B, -1, C)
  ends = chunks[:, :, -1]
  # A chunk adds what the document of its last token has in it.
  ones = (chunks == ends[..., None]).astype(step.dtype)[..., None]
  of_chunks = lambda x: padded(x).reshape(B, -1, C, x.shape[-1])
  added = jnp.einsum(
    "blch,blca->blha", ones * of_chunks(step), of_chunks(pace), precision=jax.lax.Precision.HIGHEST
  )
  # The angle before the row stands before the first chunk, where it is of the first document.
  added = jnp.pad(added, ((0, 0), (1, 0), (0, 0), (0, 0)))
  end = jnp.minimum(C * (1 + jnp.arange(ends.shape[1])), T) - 1
  begin = end - positions(segments, B, T)[:, end]  # of the document of a chunk's last token
  reach = jnp.pad(end // C - begin // C, ((0, 0), (1, 0)))[..., None, None]
  with_first = lambda x: jnp.concatenate([x[:, :1], x[:, end]], axis=1)
  between = None if segments is None else Segments(*map(with_first, segments))
  add = lambda a, b: within_a_turn(a + b)

  @recomputed  # of all passes the gradient needs where documents begin, no sums
  def sums(angle):
    for span in spans(angle.shape[1]):
      angle = add(angle, earlier(angle, span, reach, 0.0))
    return angle

  angle, last = _continued(sums(within_a_turn(added)), start, between, axis_name)
  keep = jnp.ones((B, T), step.dtype)
  keep = keep if segments is None else 1 - segments.first().astype(step.dtype)
  return ChunkAngles(angle[:, :-1], last, padded(keep, constant_values=1))


def chunk_size(length: int) -> int:
  """Tokens of a chunk; a short sequence is one."""
  return min(CHUNK, length)


def padded(x: jax.Array, **options) -> jax.Array:
  """x [B, T, ...] for whole chunks of tokens."""
  more = -x.shape[1] % chunk_size(x.shape[1])
  return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)), **options) if more else x


def sums_within_a_turn(angle: jax.Array) -> jax.Array:
  """Cumulative sums of `angle` [B, T, ...] over time, modulo whole turns."""
  add = lambda a, b: within_a_turn(a + b)
  return jax.lax.associative_scan(add, within_a_turn(angle), axis=1)


def _continued(angle, start, segments, axis_name):
  """(angle [B, T, ...] after the one that enters the row, the last one of the sequence)."""
  if axis_name is None and start is None:
    return angle, angle[:, -1]
  add = lambda a, b: within_a_turn(a + b)
  entering = jnp.zeros(angle[:, 0].shape, angle.dtype) if start is None else start
  last = None
  if axis_name is not None:
    entering, last = states(axis_name, angle[:, -1], entering, add, segments)
  entering = entering[:, None]
  if segments is not None:
    in_first = (segments.index == 0).reshape(*angle.shape[:2], *[1] * (angle.ndim - 2))
    entering = jnp.where(in_first, entering, 0.0)
  angle = add(angle, entering)
  return angle, angle[:, -1] if last is None else last
