r"""FLOPs per token of recurrences, for the class attribute `recurrence_flops` of mixers.

Multiplications and additions as written in the papers, by the shape of the state per head (a
complex number is one entry):

    linear attention S [K, V]       4 K V        S + k v^T, S^T q
      with key decay, key and value   + K V, + 2 K V         a S; (a c^T) * S
      with a normalizer z [K]       3 K, 4 K     z + k, z^T q; a z
      read before the update        + 3 K + 2 V  (q . u k) v
      complex decay, real k, v      10 K V
    Mamba-3 S [K, V]              7 K V        a S, S + k v^T twice, S^T q; rank R: (6 R + 1) K V
    delta rule S [K, V]             6 K V        S^T e, S + k (..)^T, S^T q; with decay + K V
      with n steps per token        + 4 (n - 1) K V
      with a key that writes        + 2 K V      S + w v^T
    k of N states S [K, V]        as above     per state that a token uses: k + 1
    selective scan S [E, N]         6 E N + 3 E  dt a, a S, S + x b^T, S c; dt x, skip x
      with one rate per channel     5 E N + 4 E  dt a once per channel
    Longhorn S [E, N]               7 E N + 3 E  e k^2, 1 - .., a S, S + x k^T, S q; e x, skip x
    diagonal h [D]                  2 D          a h + x; complex 8 D
    RWKV-4, two sums [D]            11 D         update and read of both, their quotient
    S4D, DSS h [D, N], complex      11 D N + 2 D a h, h + u, Re(c h); skip u
    S4, diagonal plus rank 1        26 D N + 2 D (1 - dt A / 2)^-1 by its formula, b u, Re(c h)
    attention                       2 (K + V)    q . k, p v, per visible key
    convolution of length T         10 log2(2 T) per channel: two real FFTs of 2 T numbers

A token of a sequence of length T sees (T + 1) / 2 keys on average; with a window or blocks, only
those inside. Document boundaries within a sequence are ignored.

Each function is a method of a mixer: it takes the mixer, its state for one sequence (shapes) and
the length of the sequence.
"""

import math
from typing import Any

import jax

from lnssm_jax.ops import AttentionState, LinearAttentionState


def linear_attention(
  mixer: Any, state: Any, length: int, *, decays: int = 1, bonus: bool = False
) -> float:
  """Scans with a matrix state per head, summed over the scans of the layer."""
  del mixer, length
  is_scan = lambda x: isinstance(x, LinearAttentionState)
  scans = [x for x in jax.tree.leaves(state, is_leaf=is_scan) if is_scan(x)]
  total = 0
  for kv, key_sum in scans:
    _, H, K, V = kv.shape
    total += (4 + decays) * H * K * V
    total += (3 + min(decays, 1)) * (0 if key_sum is None else key_sum.size)
    total += H * (3 * K + 2 * V) if bonus else 0
  return total


def delta_rule(
  mixer: Any, state: Any, length: int, *, decays: int, steps: int = 1, writes: int = 0
) -> float:
  """A delta rule, with decays or none; `writes` is 1 with a key that writes."""
  del mixer, length
  return (2 + 4 * steps + decays + 2 * writes) * state.recurrent.kv.size


def channel_states(
  mixer: Any, state: Any, length: int, *, per_entry: int, per_channel: int = 3
) -> float:
  """A selective scan, or Longhorn's."""
  del mixer, length
  (h,) = getattr(state, "recurrent", state)
  _, E, _ = h.shape
  return per_entry * h.size + per_channel * E


def diagonal(mixer: Any, state: Any, length: int) -> float:
  """The state is h itself, or contains it as `recurrent`."""
  del mixer, length
  return 2 * getattr(state, "recurrent", state).h.size


def wkv4(mixer: Any, state: Any, length: int) -> float:
  """The two sums of RWKV-4."""
  del mixer, length
  return 11 * state.recurrent.numerator.size


def complex_states(
  mixer: Any, state: Any, length: int, *, per_entry: int, skip: bool = False
) -> float:
  """A state of complex numbers."""
  return per_entry * state.real.size + (2 * mixer.dim if skip else 0)


def attention(mixer: Any, state: Any, length: int) -> float:
  """Softmax attention: causal, in a window, or in blocks."""
  is_cache = lambda x: isinstance(x, AttentionState)
  (cache,) = (x for x in jax.tree.leaves(state, is_leaf=is_cache) if is_cache(x))
  reach = cache.k.shape[1] + 1  # most positions that a token sees, including its own
  keys = min(reach, length)
  if is_cache(state):  # the first tokens see less than a full window
    seen = keys * (keys + 1) / 2 + (length - keys) * keys
  else:
    blocks, rest = divmod(length, reach)
    seen = blocks * reach * (reach + 1) / 2 + rest * (rest + 1) / 2
  widths = cache.k.shape[-1] + cache.v.shape[-1]
  if getattr(mixer, "latents", None) is not None:  # cached are vectors of all heads
    widths = mixer.key_dim + mixer.value_dim
  return 2 * mixer.num_heads * widths * seen / length


def long_convolution(mixer: Any, state: Any, length: int) -> float:
  """Real Fourier transforms of a filter; 0 if the layer has none."""
  if getattr(mixer, "filter", None) is None:
    return 0
  del state
  channels = getattr(mixer, "inner_dim", mixer.dim)
  return 10 * math.log2(2 * length) * channels


def log_linear(mixer: Any, state: Any, length: int) -> float:
  """A scan with one decay for each level that a sequence of this length has, and one above."""
  used = min(mixer.num_states, (length - 1).bit_length() + 1)
  return linear_attention(mixer, state, length) * used / mixer.num_states


def mimo(mixer: Any, state: Any, length: int) -> float:
  """One state per head with one decay: R keys of this and of the last token, read R times."""
  del length
  return (6 * mixer.rank + 1) * state.recurrent.kv.size


def two_gates(mixer: Any, state: Any, length: int) -> float:
  """A gate before a short convolution and one after it; W taps have W - 1 additions."""
  del state, length
  return mixer.dim


def routed(mixer: Any, state: Any, length: int) -> float:
  """Of the states of `sse` and `mom`, those that a token uses."""
  del length
  always, sparse = state
  _, _, H, K, V = sparse.kv.shape
  used = mixer.num_selected + (always is not None)
  return used * (5 if mixer.inner == "gla" else 7) * H * K * V
