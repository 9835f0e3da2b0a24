"""Running sums of angles, kept within a turn, and rotations of pairs of channels by them."""

import math

import jax
import jax.numpy as jnp

from lnssm_jax.mixers.common.recompute import recomputed
from lnssm_jax.mixers.common.spans import earlier, reach, spans
from lnssm_jax.ops.core.segments import Segments
from lnssm_jax.ops.core.sequence_parallel import states

# 2 pi in two parts. The first has few digits, so that whole turns of it are subtracted exactly.
_TURN = (6.28125, 2 * math.pi - 6.28125)


def running_angles(
  step: jax.Array,  # [B, T, ...]
  start: jax.Array | None,  # [B, ...]
  segments: Segments | None,
  axis_name: str | None,
) -> tuple[jax.Array, jax.Array]:
  """(Sums of `step` over time in each document, the last one [B, ...]), modulo whole turns.

  Args:
    start: the sum before the first token; None means 0.
    segments: of the tokens; each document but the first starts from 0.
    axis_name: mesh axis that shards time; `start` and the last sum are of the whole sequence.
  """
  add = lambda a, b: _within_a_turn(a + b)
  if segments is None:
    angle = sums_within_a_turn(step)
  else:
    before = reach(segments, step)

    @recomputed  # of all passes the gradient needs where documents begin, no sums
    def sums(angle):
      for span in spans(step.shape[1]):
        angle = add(angle, earlier(angle, span, before, 0.0))
      return angle

    angle = sums(_within_a_turn(step))
  if axis_name is None and start is None:
    return angle, angle[:, -1]
  entering = jnp.zeros(angle[:, 0].shape, angle.dtype) if start is None else start
  last = None
  if axis_name is not None:
    entering, last = states(axis_name, angle[:, -1], entering, add, segments)
  entering = entering[:, None]
  if segments is not None:
    in_first = (segments.index == 0).reshape(*step.shape[:2], *[1] * (step.ndim - 2))
    entering = jnp.where(in_first, entering, 0.0)
  angle = add(angle, entering)
  return angle, angle[:, -1] if last is None else last


def sums_within_a_turn(angle: jax.Array) -> jax.Array:
  """Cumulative sums of `angle` [B, T, ...] over time, modulo whole turns."""
  add = lambda a, b: _within_a_turn(a + b)
  return jax.lax.associative_scan(add, _within_a_turn(angle), axis=1)


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
  """Rotates the pairs (i, i + A) of the first 2 A channels of x [..., K] by angle [..., A]."""
  A = angle.shape[-1]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b, rest = jnp.split(x, [A, 2 * A], axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos, rest], axis=-1)


def _within_a_turn(angle):
  """The angle modulo whole turns, which cost digits."""
  turns = jnp.round(angle / sum(_TURN))
  return (angle - turns * _TURN[0]) - turns * _TURN[1]
