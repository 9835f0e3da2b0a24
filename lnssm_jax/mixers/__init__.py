"""NNX layers `[B, T, D] -> [B, T, D]`, one file per family: parameters and projections on top of
`lnssm_jax.ops`.

    mixer = LNSSM(512, num_heads=4, rngs=nnx.Rngs(0))
    y, state = mixer(x, state=None, segment_ids=None)

The state is a value, passed in and returned; decoding is the same call with T = 1. Modules hold
`nnx.Param`s only.
"""

from typing import Any

from lnssm_jax.mixers.base import Mixer, shard_time
from lnssm_jax.mixers.common.calls import single, step
from lnssm_jax.mixers.common.complex_state import ComplexState
from lnssm_jax.mixers.common.expansion import expand_partitions
from lnssm_jax.mixers.common.routing import Aux
from lnssm_jax.mixers.delta_net import DeltaNet, DeltaNetState, GatedDeltaNet
from lnssm_jax.mixers.diagonal_state_spaces import DSS, S4D, S5
from lnssm_jax.mixers.gated_linear_attention import GLA, RetNet, RetNetState
from lnssm_jax.mixers.gateloop import GateLoop
from lnssm_jax.mixers.gfw import GFW
from lnssm_jax.mixers.griffin import RGLRU, RGLRUState
from lnssm_jax.mixers.gsa import GSA, GSAState
from lnssm_jax.mixers.hgrn import HGRN, HGRN2, LRN
from lnssm_jax.mixers.hyena import BaseConv, BaseConvState, Hyena, HyenaState
from lnssm_jax.mixers.kernel_attention import Based, LinearAttention, NormalizedAttention
from lnssm_jax.mixers.lcsm import LCSM, LCSMState
from lnssm_jax.mixers.lln import LLN, LLNState
from lnssm_jax.mixers.lnssm import LNSSM, LNSSMState
from lnssm_jax.mixers.longhorn import (
  Longhorn,
  LonghornExact,
  LonghornExactState,
  LonghornState,
)
from lnssm_jax.mixers.mamba import Mamba, Mamba2, Mamba2State, MambaState
from lnssm_jax.mixers.metala import MetaLA, MetaLAState
from lnssm_jax.mixers.mixture_of_memories import MoM, MoMState
from lnssm_jax.mixers.positional_attention import LRPE, CosFormer, PositionalState
from lnssm_jax.mixers.qlstm import QLSTM, QLSTMReversed, QLSTMState
from lnssm_jax.mixers.rwkv import RWKV4, RWKV5, RWKV6, RWKV4State, RWKV5State
from lnssm_jax.mixers.s4 import S4
from lnssm_jax.mixers.s6 import S6, SSD
from lnssm_jax.mixers.softmax_attention import SlidingWindowAttention, SoftmaxAttention
from lnssm_jax.mixers.sparse_state_expansion import SSE, SSEState
from lnssm_jax.mixers.tnl import TNL, TNLState
from lnssm_jax.mixers.tnn import TNN, TNNState

MIXERS: dict[str, type[Any]] = {
  "base_conv": BaseConv,
  "based": Based,
  "cosformer": CosFormer,
  "delta_net": DeltaNet,
  "dss": DSS,
  "gated_delta_net": GatedDeltaNet,
  "gateloop": GateLoop,
  "gfw": GFW,
  "gla": GLA,
  "gsa": GSA,
  "hgrn": HGRN,
  "hgrn2": HGRN2,
  "hyena": Hyena,
  "lcsm": LCSM,
  "linear_attention": LinearAttention,
  "lln": LLN,
  "lnssm": LNSSM,
  "longhorn": Longhorn,
  "longhorn_exact": LonghornExact,
  "lrn": LRN,
  "lrpe": LRPE,
  "mamba": Mamba,
  "mamba2": Mamba2,
  "metala": MetaLA,
  "mom": MoM,
  "normalized_attention": NormalizedAttention,
  "qlstm": QLSTM,
  "qlstm_reversed": QLSTMReversed,
  "retnet": RetNet,
  "rg_lru": RGLRU,
  "rwkv4": RWKV4,
  "rwkv5": RWKV5,
  "rwkv6": RWKV6,
  "s4": S4,
  "s4d": S4D,
  "s5": S5,
  "s6": S6,
  "sliding_window_attention": SlidingWindowAttention,
  "softmax_attention": SoftmaxAttention,
  "ssd": SSD,
  "sse": SSE,
  "tnl": TNL,
  "tnn": TNN,
}


def register[M: type[Mixer[Any]]](name: str, mixer: M) -> M:
  """Adds a mixer of your own to `MIXERS` and returns it: models and configs then take its name.

      mixers.register("leaky_sum", LeakySum)
      model = models.LanguageModel(mixer="leaky_sum", ...)

  It lasts as long as the process: one that opens a run or an exported model with such a mixer
  registers it first, for example in the config. A notebook's cell that runs again replaces its own
  class.

  Raises:
    ValueError: `mixer` is not a subclass of `Mixer`, `name` is not an identifier, or another class
      has it.
  """
  if not (isinstance(mixer, type) and issubclass(mixer, Mixer)):
    raise ValueError(f"register: mixer={mixer!r} must be a subclass of lnssm_jax.mixers.Mixer.")
  if not (isinstance(name, str) and name.isidentifier()):
    raise ValueError(f"register: name={name!r} must be an identifier, such as 'my_mixer'.")
  described = lambda cls: f"{cls.__module__}.{cls.__qualname__}"
  if name in MIXERS and described(MIXERS[name]) != described(mixer):
    raise ValueError(
      f"register: name={name!r} is that of {described(MIXERS[name])}; choose another name."
    )
  MIXERS[name] = mixer
  return mixer


__all__ = [
  "DSS",
  "GFW",
  "GLA",
  "GSA",
  "HGRN",
  "HGRN2",
  "LCSM",
  "LLN",
  "LNSSM",
  "LRN",
  "LRPE",
  "MIXERS",
  "QLSTM",
  "RGLRU",
  "RWKV4",
  "RWKV5",
  "RWKV6",
  "S4",
  "S4D",
  "S5",
  "S6",
  "SSD",
  "SSE",
  "TNL",
  "TNN",
  "Aux",
  "BaseConv",
  "BaseConvState",
  "Based",
  "ComplexState",
  "CosFormer",
  "DeltaNet",
  "DeltaNetState",
  "GSAState",
  "GateLoop",
  "GatedDeltaNet",
  "Hyena",
  "HyenaState",
  "LCSMState",
  "LLNState",
  "LNSSMState",
  "LinearAttention",
  "Longhorn",
  "LonghornExact",
  "LonghornExactState",
  "LonghornState",
  "Mamba",
  "Mamba2",
  "Mamba2State",
  "MambaState",
  "MetaLA",
  "MetaLAState",
  "Mixer",
  "MoM",
  "MoMState",
  "NormalizedAttention",
  "PositionalState",
  "QLSTMReversed",
  "QLSTMState",
  "RGLRUState",
  "RWKV4State",
  "RWKV5State",
  "RetNet",
  "RetNetState",
  "SSEState",
  "SlidingWindowAttention",
  "SoftmaxAttention",
  "TNLState",
  "TNNState",
  "expand_partitions",
  "register",
  "shard_time",
  "single",
  "step",
]
