"""Mixers side by side in one layer."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from lnssm_jax.mixers import Mixer
from lnssm_jax.mixers.common.routing import joined
from lnssm_jax.ops.core.dropout import fold


class Part(nnx.Module):
  """One of the mixers, so that the paths of its parameters end as those of a mixer alone."""

  def __init__(self, mixer: Mixer[Any]):
    self.mixer = mixer


class Parallel(Mixer[tuple[Any, ...]]):
  """The sum of several mixers of one input: y = sum_i b_i mixer_i(a_i x).

  A model's mixer "parallel" has in `mixer_options` the constructor's arguments, with the options of
  each mixer in place of the mixer: {"mixers": {"mamba2": {}, "softmax_attention": {}}}.

  Args:
    mixers: {name: the mixer}, of one width.
    input_scales, output_scales: {name: a or b}; 1 for the others.

  Source: Falcon-H1 (Zuo et al. 2025), section 2.1.
  """

  set_by_model = ("num_heads", "layer", "num_layers")

  def __init__(
    self,
    mixers: Mapping[str, Any],
    *,
    input_scales: Mapping[str, float] | None = None,
    output_scales: Mapping[str, float] | None = None,
    num_heads: int | None = None,
    layer: int = 0,
    num_layers: int = 1,
  ):
    del num_heads, layer, num_layers  # of the mixers, which are there
    self.parts = nnx.Dict({name: Part(mixer) for name, mixer in mixers.items()})
    self.names = tuple(mixers)
    scales = lambda given: tuple(float((given or {}).get(name, 1.0)) for name in mixers)
    self.input_scales, self.output_scales = scales(input_scales), scales(output_scales)
    self.dim = self._all[0].dim
    self.attention_dropout = max(mixer.attention_dropout for mixer in self._all)

  @property
  def _all(self) -> list[Any]:
    return [self.parts[name].mixer for name in self.names]

  @property
  def max_length(self) -> int | None:
    """The least of the mixers that have one."""
    lengths = [getattr(mixer, "max_length", None) for mixer in self._all]
    return min((length for length in lengths if length is not None), default=None)

  def recurrence_flops(self, state: Any, length: int) -> float:
    """The sum of the mixers'."""
    pairs = zip(self._all, state, strict=True)
    return sum(mixer.recurrence_flops(own, length) for mixer, own in pairs)

  def _init_state(self, B):
    return tuple(mixer.init_state(B) for mixer in self._all)

  def _mix(self, x, state, segment_ids):
    return self._mix_dropping(x, state, segment_ids, None)

  def _mix_dropping(self, x, state, segment_ids, dropout_key):
    run = lambda mixer, *args, **key: (*mixer(*args, **key), None)
    return self._sum(run, x, state, segment_ids, dropout_key)[:2]

  def _mix_with_aux(self, x, state, segment_ids):
    return self._mix_dropping_with_aux(x, state, segment_ids, None)

  def _mix_dropping_with_aux(self, x, state, segment_ids, dropout_key):
    run = lambda mixer, *args, **key: mixer.with_aux(*args, **key)
    return self._sum(run, x, state, segment_ids, dropout_key)

  def _sum(self, run, x, state, segment_ids, dropout_key):
    scaled = lambda x, scale: x if scale == 1 else x * scale
    total: Any = None
    states, aux = [], None
    for n, mixer in enumerate(self._all):
      of_mixer = None if state is None else state[n]
      key = None if dropout_key is None else fold(dropout_key, n)
      of_input = scaled(x, self.input_scales[n])
      y, last, own = run(mixer, of_input, of_mixer, segment_ids, dropout_key=key)
      y = scaled(y, self.output_scales[n])
      total = y if total is None else total + y
      aux = aux if own is None else joined(aux, own)
      states.append(last)
    return total, tuple(states), aux
