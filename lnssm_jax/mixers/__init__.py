"""NNX layers `[B, T, D] -> [B, T, D]`, one file per family: parameters and projections on top of
`lnssm_jax.ops`.

    mixer = LNSSM(512, num_heads=4, rngs=nnx.Rngs(0))
    y, state = mixer(x, state=None, segment_ids=None)

The state is a value, passed in and returned; decoding is the same call with T = 1. Modules hold
`nnx.Param`s only.

An import below is all that registers a mixer: `MIXERS` has the classes that have a `name`.
"""

from typing import Any

from lnssm_jax.mixers.base import Mixer as Mixer
from lnssm_jax.mixers.base import shard_time as shard_time
from lnssm_jax.mixers.comba import Comba as Comba
from lnssm_jax.mixers.common.calls import single as single
from lnssm_jax.mixers.common.calls import step as step
from lnssm_jax.mixers.common.complex_state import ComplexState as ComplexState
from lnssm_jax.mixers.common.expansion import expand_partitions as expand_partitions
from lnssm_jax.mixers.common.kernels import redraw as redraw
from lnssm_jax.mixers.common.routing import Aux as Aux
from lnssm_jax.mixers.delta_net import DeltaNet as DeltaNet
from lnssm_jax.mixers.delta_net import DeltaNetState as DeltaNetState
from lnssm_jax.mixers.delta_net import GatedDeltaNet as GatedDeltaNet
from lnssm_jax.mixers.delta_product import DeltaProduct as DeltaProduct
from lnssm_jax.mixers.diagonal_state_spaces import DSS as DSS
from lnssm_jax.mixers.diagonal_state_spaces import S4D as S4D
from lnssm_jax.mixers.diagonal_state_spaces import S5 as S5
from lnssm_jax.mixers.gated_convolution import ShortConv as ShortConv
from lnssm_jax.mixers.gated_linear_attention import GLA as GLA
from lnssm_jax.mixers.gated_linear_attention import RetNet as RetNet
from lnssm_jax.mixers.gated_linear_attention import RetNetState as RetNetState
from lnssm_jax.mixers.gateloop import GateLoop as GateLoop
from lnssm_jax.mixers.gfw import GFW as GFW
from lnssm_jax.mixers.griffin import RGLRU as RGLRU
from lnssm_jax.mixers.griffin import RGLRUState as RGLRUState
from lnssm_jax.mixers.gsa import GSA as GSA
from lnssm_jax.mixers.gsa import GSAState as GSAState
from lnssm_jax.mixers.hgrn import HGRN as HGRN
from lnssm_jax.mixers.hgrn import HGRN2 as HGRN2
from lnssm_jax.mixers.hgrn import LRN as LRN
from lnssm_jax.mixers.hyena import BaseConv as BaseConv
from lnssm_jax.mixers.hyena import BaseConvState as BaseConvState
from lnssm_jax.mixers.hyena import Hyena as Hyena
from lnssm_jax.mixers.hyena import HyenaState as HyenaState
from lnssm_jax.mixers.kda import KDA as KDA
from lnssm_jax.mixers.kda import GatedDeltaNet2 as GatedDeltaNet2
from lnssm_jax.mixers.kernel_attention import Based as Based
from lnssm_jax.mixers.kernel_attention import LinearAttention as LinearAttention
from lnssm_jax.mixers.kernel_attention import NormalizedAttention as NormalizedAttention
from lnssm_jax.mixers.lcsm import LCSM as LCSM
from lnssm_jax.mixers.lcsm import LCSMState as LCSMState
from lnssm_jax.mixers.lln import LLN as LLN
from lnssm_jax.mixers.lln import LLNState as LLNState
from lnssm_jax.mixers.lnssm import LNSSM as LNSSM
from lnssm_jax.mixers.lnssm import LNSSMState as LNSSMState
from lnssm_jax.mixers.log_linear import LevelState as LevelState
from lnssm_jax.mixers.log_linear import LogLinear as LogLinear
from lnssm_jax.mixers.log_linear import LogLinearState as LogLinearState
from lnssm_jax.mixers.longhorn import Longhorn as Longhorn
from lnssm_jax.mixers.longhorn import LonghornExact as LonghornExact
from lnssm_jax.mixers.longhorn import LonghornExactState as LonghornExactState
from lnssm_jax.mixers.longhorn import LonghornState as LonghornState
from lnssm_jax.mixers.mamba import Mamba as Mamba
from lnssm_jax.mixers.mamba import Mamba2 as Mamba2
from lnssm_jax.mixers.mamba import Mamba2State as Mamba2State
from lnssm_jax.mixers.mamba import MambaState as MambaState
from lnssm_jax.mixers.mamba3 import Mamba3 as Mamba3
from lnssm_jax.mixers.mamba3 import Mamba3State as Mamba3State
from lnssm_jax.mixers.metala import MetaLA as MetaLA
from lnssm_jax.mixers.metala import MetaLAState as MetaLAState
from lnssm_jax.mixers.mixture_of_memories import MoM as MoM
from lnssm_jax.mixers.mixture_of_memories import MoMState as MoMState
from lnssm_jax.mixers.mlstm import MLSTM as MLSTM
from lnssm_jax.mixers.mlstm import MLSTMState as MLSTMState
from lnssm_jax.mixers.positional_attention import LRPE as LRPE
from lnssm_jax.mixers.positional_attention import CosFormer as CosFormer
from lnssm_jax.mixers.positional_attention import PositionalState as PositionalState
from lnssm_jax.mixers.qlstm import QLSTM as QLSTM
from lnssm_jax.mixers.qlstm import QLSTMReversed as QLSTMReversed
from lnssm_jax.mixers.qlstm import QLSTMState as QLSTMState
from lnssm_jax.mixers.rwkv import RWKV4 as RWKV4
from lnssm_jax.mixers.rwkv import RWKV5 as RWKV5
from lnssm_jax.mixers.rwkv import RWKV6 as RWKV6
from lnssm_jax.mixers.rwkv import RWKV4State as RWKV4State
from lnssm_jax.mixers.rwkv import RWKV5State as RWKV5State
from lnssm_jax.mixers.rwkv7 import RWKV7 as RWKV7
from lnssm_jax.mixers.rwkv7 import RWKV7State as RWKV7State
from lnssm_jax.mixers.s4 import S4 as S4
from lnssm_jax.mixers.s6 import S6 as S6
from lnssm_jax.mixers.s6 import SSD as SSD
from lnssm_jax.mixers.softmax_attention import SlidingWindowAttention as SlidingWindowAttention
from lnssm_jax.mixers.softmax_attention import SoftmaxAttention as SoftmaxAttention
from lnssm_jax.mixers.sparse_state_expansion import SSE as SSE
from lnssm_jax.mixers.sparse_state_expansion import SSEState as SSEState
from lnssm_jax.mixers.tnl import TNL as TNL
from lnssm_jax.mixers.tnl import TNLState as TNLState
from lnssm_jax.mixers.tnn import TNN as TNN
from lnssm_jax.mixers.tnn import TNNState as TNNState

_NAMED: list[type[Mixer[Any]]] = [
  x
  for x in globals().values()
  if isinstance(x, type) and issubclass(x, Mixer) and "name" in vars(x)
]
MIXERS: dict[str, type[Any]] = {x.name: x for x in sorted(_NAMED, key=lambda x: x.name)}


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
  "MIXERS",
  *(key for key, x in globals().items() if getattr(x, "__module__", "").startswith(__name__)),
]
