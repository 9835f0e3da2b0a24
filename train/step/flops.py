"""Model FLOPs per token, and model FLOP utilization (MFU).

The count covers the multiplications and additions of matrix products (two per multiply-add) and of
the recurrences as written in the papers. It does not cover what an implementation adds (chunking,
recomputation), nor norms, activations, feature maps, gates and exponentials.

    forward FLOPs per token = 2 * (entries of all kernels, including the head) + recurrences

Every kernel entry is multiplied once per token: projections, low-rank and block-diagonal maps,
short convolutions. The networks that generate long filters run once for all tokens and are not
counted. Recurrences by the shape of the state per head (`RECURRENCES`; a complex number is
one entry):

    linear attention S [K, V]       4 K V        S + k v^T, S^T q
      with key decay, key and value   + K V, + 2 K V         a S; (a c^T) * S
      with a normalizer z [K]       3 K, 4 K     z + k, z^T q; a z
      read before the update        + 3 K + 2 V  (q . u k) v
      complex decay, real k, v      10 K V
    delta rule S [K, V]             6 K V        S^T e, S + k (..)^T, S^T q; with decay + K V
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

A training step costs three forward passes: each product has two in its backward pass.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lnssm_jax.ops import AttentionState, LinearAttentionState
from train import config
from train.step.model import build_model

TRAINING_FACTOR = 3

# Dense bf16 tensor-core peak in FLOP/s from the vendor's data sheets (without sparsity).
PEAK_FLOPS = {
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989.4e12,
  "NVIDIA H100 NVL": 835.5e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA H200": 989.4e12,
  "NVIDIA H200 NVL": 835.5e12,
}

# Matrix parameters that are not named "kernel".
_OTHER_KERNELS = ("mix_up", "up_kernel")


def _linear_attention(mixer, state, length, *, decays=1, bonus=False):
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


def _delta_rule(mixer, state, length, *, decays):
  del mixer, length
  return (6 + decays) * state.recurrent.kv.size


def _routed(mixer, state, length):
  """Of the states of `sse` and `mom`, those that a token uses."""
  del length
  always, sparse = state
  _, _, H, K, V = sparse.kv.shape
  used = mixer.num_selected + (always is not None)
  return used * (5 if mixer.inner == "gla" else 7) * H * K * V


def _channel_states(mixer, state, length, *, per_entry, per_channel=3):
  del mixer, length
  (h,) = getattr(state, "recurrent", state)
  _, E, _ = h.shape
  return per_entry * h.size + per_channel * E


def _diagonal(mixer, state, length):
  """The state is h itself, or contains it as `recurrent`."""
  del mixer, length
  return 2 * getattr(state, "recurrent", state).h.size


def _lcsm(mixer, state, length):
  """By the op of its code; state entries decay, are added to and read."""
  op, axes = mixer.code.op, mixer.code.kind.axes
  recurrent = state.recurrent
  if op == "linear_attention":
    decays = 2 if axes == "key value" else int(axes in ("key", "value"))
    return _linear_attention(mixer, recurrent, length, decays=decays)
  size = sum(x.size for x in jax.tree.leaves(recurrent))
  constant = (mixer.e_weight is not None) + (mixer.s_weight is not None)
  if op == "diagonal_scan":  # each constant matrix: a weighted sum of k numbers per channel
    return 2 * size + 2 * mixer.state_dim * mixer.dim * (constant == 1) + size
  if op == "delta_rule":
    return 6 * size
  if op == "selective_scan":
    return 6 * size + 2 * mixer.dim
  if op == "long_convolution":  # two numbers of a complex entry cost 11 together
    return 4 * size if axes != "rotation" else 11 * size // 2
  return (5 + (constant > 0)) * size


def _wkv4(mixer, state, length):
  del mixer, length
  return 11 * state.recurrent.numerator.size


def _complex(mixer, state, length, *, per_entry, skip=False):
  return per_entry * state.real.size + (2 * mixer.dim if skip else 0)


def _attention(mixer, state, length):
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
  return 2 * mixer.num_heads * (cache.k.shape[-1] + cache.v.shape[-1]) * seen / length


def _long_convolution(mixer, state, length):
  if getattr(mixer, "filter", None) is None:
    return 0
  del state
  channels = getattr(mixer, "inner_dim", mixer.dim)
  return 10 * math.log2(2 * length) * channels


def _log_normal_attention(mixer, state, length):
  return _linear_attention(mixer, state, length) + _attention(mixer, state, length)


Recurrence = Callable[[Any, Any, int], float]
_undecayed = functools.partial(_linear_attention, decays=0)
_with_bonus = functools.partial(_linear_attention, bonus=True)
_state_space = functools.partial(_complex, per_entry=11, skip=True)

# FLOPs per token, from the mixer, its state for one sequence (shapes) and the sequence length.
RECURRENCES: dict[str, Recurrence] = {
  "base_conv": _long_convolution,
  "based": _undecayed,
  "cosformer": _undecayed,
  "delta_net": functools.partial(_delta_rule, decays=0),
  "dss": _state_space,
  "gated_delta_net": functools.partial(_delta_rule, decays=1),
  "gateloop": functools.partial(_complex, per_entry=10),
  "gfw": functools.partial(_linear_attention, decays=2),
  "gla": _linear_attention,
  "gsa": _linear_attention,
  "hgrn": functools.partial(_complex, per_entry=8),
  "hgrn2": _linear_attention,
  "hyena": _long_convolution,
  "lcsm": _lcsm,
  "linear_attention": _undecayed,
  "lln": _log_normal_attention,
  "lnssm": _linear_attention,
  "longhorn": functools.partial(_channel_states, per_entry=7),
  "longhorn_exact": functools.partial(_delta_rule, decays=0),
  "lrn": _diagonal,
  "lrpe": _undecayed,
  "mamba": functools.partial(_channel_states, per_entry=6),
  "mamba2": _linear_attention,
  "metala": _linear_attention,
  "mom": _routed,
  "normalized_attention": _undecayed,
  "qlstm": _diagonal,
  "qlstm_reversed": _diagonal,
  "retnet": _linear_attention,
  "rg_lru": _diagonal,
  "rwkv4": _wkv4,
  "rwkv5": _with_bonus,
  "rwkv6": _with_bonus,
  "s4": functools.partial(_complex, per_entry=26, skip=True),
  "s4d": _state_space,
  "s6": functools.partial(_channel_states, per_entry=6),
  "ssd": functools.partial(_channel_states, per_entry=5, per_channel=4),
  "s5": functools.partial(_complex, per_entry=8),
  "sliding_window_attention": _attention,
  "softmax_attention": _attention,
  "sse": _routed,
  "tnl": _linear_attention,
  "tnn": _long_convolution,
}


def model_flops_per_token(model: config.Model, sequence_length: int) -> int | None:
  """FLOPs of the forward pass per token, or None if a mixer has no formula here.

  Args:
    sequence_length: T, on which only attention and long convolutions depend.
  """
  pattern = (model.mixer,) if isinstance(model.mixer, str) else tuple(model.mixer)
  if not set(pattern) <= set(RECURRENCES):
    return None
  built = jax.eval_shape(functools.partial(build_model, model), jax.random.key(0))
  products = kernel_entries(built)
  if model.tie_embeddings:
    products += model.dim * model.vocab_size
  total = 2.0 * products
  for place, name in enumerate(pattern):
    stack = built.blocks if len(pattern) == 1 else built.blocks[str(place)]
    layers = len(range(place, model.num_layers, len(pattern)))
    total += layers * mixer_recurrence(name, stack.mixer, sequence_length)
  return round(total)


def mixer_recurrence(name: str, mixer: Any, sequence_length: int) -> float:
  """FLOPs per token of a mixer, without its kernels' matrix products."""
  state = jax.eval_shape(lambda: mixer.init_state(1))
  return RECURRENCES[name](mixer, state, sequence_length)


def kernel_entries(module: nnx.Module) -> int:
  """Number of kernel entries, each multiplied once per token."""
  leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))
  return sum(x.size for path, x in leaves if is_kernel(path))


def is_kernel(path: tuple[Any, ...]) -> bool:
  """Whether the parameter at this path is a matrix that multiplies every token."""
  names = [str(entry.key) for entry in path]
  return names[-1] in ("kernel", *_OTHER_KERNELS) and "filter" not in names


def peak_flops(device: jax.Device) -> float | None:
  """bf16 peak of a device by the longest known prefix of its name, or None if unknown."""
  known = [name for name in PEAK_FLOPS if device.device_kind.startswith(name)]
  return PEAK_FLOPS[max(known, key=len)] if known else None


def utilization(flops: int | None, tokens_per_second: float, devices: list) -> float | None:
  """Model FLOP utilization of training: model FLOP/s over the devices' bf16 peak, or None.

  Args:
    flops: of the forward pass per token (`model_flops_per_token`), or None.
  """
  peak = peak_flops(devices[0])
  if flops is None or peak is None:
    return None
  return TRAINING_FACTOR * flops * tokens_per_second / (peak * len(devices))
