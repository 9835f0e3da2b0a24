"""A mixer that reads a sequence in both directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.lengths import checked_lengths, flipped, without_padding
from lnssm_jax.ops.core.dropout import fold

# Submodules that the two directions share, if a mixer has them: the projections in and out.
SHARED = ("in_proj", "o_proj")


class Bidirectional(nnx.Module):
  """(mixer(x) + flip(mixer'(flip(x)))) / 2: [B, T, D] -> [B, T, D], without a state.

  The two mixers, both built by `new`, have parameters of their own but for the submodules in
  `shared`, which are the first's.
  """

  def __init__(self, new: Callable[[], Mixer], *, shared: Sequence[str] = ()):
    self.forward = new()
    own = nnx.to_pure_dict(nnx.state(new(), nnx.Param))
    self.backward = _parameters({name: own[name] for name in own if name not in shared})

  @property
  def attention_dropout(self) -> float:
    """The rate of both mixers."""
    return self.forward.attention_dropout

  def __call__(
    self,
    x: jax.Array,
    *,
    lengths: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """The mean of both directions, [B, T, D]; the key is [B, 2] uint32, of the rows.

    Each document of `segment_ids` [B, T], integers that change at its boundaries, is mixed alone.

    `lengths` [B], integers from 0 to T, are those of rows padded on the right: each is read
    backward from its own last token, and the result is 0 at padding, which may hold anything.

    Raises:
      ValueError: `lengths` have another shape or dtype, or one is known to be outside.
    """
    ends = None
    if lengths is not None:
      ends = checked_lengths("Bidirectional", lengths, x, None, None)
    x = without_padding(x, ends)
    graph, params = nnx.split(self.forward, nnx.Param)
    own = nnx.to_pure_dict(nnx.state(self.backward, nnx.Param))
    backward: Any = nnx.merge(graph, nnx.to_pure_dict(params) | own)
    keys = [None if dropout_key is None else fold(dropout_key, number) for number in range(2)]
    ids = None if segment_ids is None else flipped(segment_ids, ends)
    y = flipped(backward(flipped(x, ends), None, ids, dropout_key=keys[1])[0], ends)
    x = self.forward(x, None, segment_ids, dropout_key=keys[0])[0]
    return without_padding((x + y) / 2, ends)


def _parameters(tree: Mapping[str, Any]) -> nnx.Dict:
  """A nested dictionary of arrays as one of parameters."""
  inner = lambda leaf: _parameters(leaf) if isinstance(leaf, Mapping) else nnx.Param(leaf)
  return nnx.Dict({name: inner(leaf) for name, leaf in tree.items()})
