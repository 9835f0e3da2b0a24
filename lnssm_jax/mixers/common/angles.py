"""Running sums of angles, kept within a turn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lnssm_jax.mixers.common.recompute import recomputed
from lnssm_jax.mixers.common.spans import earlier, spans
from lnssm_jax.ops.core.dispatch import MADE_BY_KERNELS
from lnssm_jax.ops.core.segments import Segments, positions
from lnssm_jax.ops.core.sequence_parallel import states
from lnssm_jax.ops.rotations.reference import within_a_turn
from lnssm_jax.ops.rotations.types import chunk_size, whole_chunks


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
  keep: jax.Array  # [B, T], 0 where a document begins that is not the row's first, else 1


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
  L = -(-T // C)
  end = jnp.minimum(C * (1 + jnp.arange(L)), T) - 1
  document = jnp.zeros((B, T), jnp.int32) if segments is None else segments.index
  # A chunk adds what the document of its last token has in it.
  of_last = document == jnp.repeat(document[:, end], C, axis=1)[:, :T]
  of_chunks = lambda x: whole_chunks(x, L).reshape(B, L, C, x.shape[-1])
  added = jnp.einsum(
    "blch,blca->blha",
    of_chunks(jnp.where(of_last[..., None], step, 0)),
    of_chunks(pace),
    precision=jax.lax.Precision.HIGHEST,
  )
  # The angle before the row stands before the first chunk, where it is of the first document.
  added = jnp.pad(added, ((0, 0), (1, 0), (0, 0), (0, 0)))
  begin = end - positions(segments, B, T)[:, end]  # of the document of a chunk's last token
  reach = jnp.pad(end // C - begin // C, ((0, 0), (1, 0)))[..., None, None]
  with_first = lambda x: jnp.concatenate([x[:, :1], x[:, end]], axis=1)
  between = None if segments is None else Segments(*map(with_first, segments))

  @recomputed  # of all passes the gradient needs where documents begin, no sums
  def sums(angle):
    for span in spans(angle.shape[1]):
      angle = _add(angle, earlier(angle, span, reach, 0.0))
    return angle

  angle, last = _continued(sums(within_a_turn(added)), start, between, axis_name)
  first = jnp.zeros((B, T), bool) if segments is None else segments.first()
  # Small, and the chain that makes it is long: kept for the backward pass.
  entering = checkpoint_name(angle[:, :-1], name=MADE_BY_KERNELS)
  return ChunkAngles(entering, last, 1 - first.astype(step.dtype))


def sums_within_a_turn(angle: jax.Array) -> jax.Array:
  """Cumulative sums of `angle` [B, T, ...] over time, modulo whole turns."""
  return jax.lax.associative_scan(_add, within_a_turn(angle), axis=1)


def _add(a, b):
  return within_a_turn(a + b)


def _continued(angle, start, segments, axis_name):
  """(angle [B, T, ...] after the one that enters the row, the last one of the sequence)."""
  if axis_name is None and start is None:
    return angle, angle[:, -1]
  entering = jnp.zeros(angle[:, 0].shape, angle.dtype) if start is None else start
  last = None
  if axis_name is not None:
    entering, last = states(axis_name, angle[:, -1], entering, _add, segments)
  entering = entering[:, None]
  if segments is not None:
    in_first = (segments.index == 0).reshape(*angle.shape[:2], *[1] * (angle.ndim - 2))
    entering = jnp.where(in_first, entering, 0.0)
  angle = _add(angle, entering)
  return angle, angle[:, -1] if last is None else last
