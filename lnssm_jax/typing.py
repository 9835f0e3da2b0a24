"""Array types of the public signatures, one alias per combination of axes.

The letters are the axes: `B` batch, `T` time, `H` heads, `K` key width per head, `V` value width
per head, `D` channels, `N` state width per channel, `C` chunk length; `G` heads that groups of the
others share, `S` H or G heads, `R` keys per token, `W` and `L` taps of a convolution. `q: BTHK` is
a floating-point array `[B, T, H, K]`; `Ids` are integers. An axis has one size in a whole
signature, but for `S`.

For a type checker every alias is `jax.Array`. Where jaxtyping is installed the aliases carry dtypes
and shapes, which the tests check with beartype; the library itself does not need it.
"""

from typing import TYPE_CHECKING, Any, Literal

import jax

if TYPE_CHECKING:
  from typing import Annotated as Complex
  from typing import Annotated as Float
  from typing import Annotated as Inexact
  from typing import Annotated as Integer
else:
  try:
    from jaxtyping import Complex, Float, Inexact, Integer
  except ImportError:

    class Float:
      """`Float[jax.Array, "B T"]` without jaxtyping: the array's type alone."""

      def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        return item[0]

    Complex = Inexact = Integer = Float

Implementation = Literal[
  "reference",
  "associative",
  "chunked",
  "pallas",
  "pallas_interpret",
  "pallas_ampere",
  "pallas_ampere_interpret",
  "cudnn",
]  # ways to compute an op; README.md of the op describes those that it has

Ids = Integer[jax.Array, "B T"]
BCount = Integer[jax.Array, "B"]

B = Float[jax.Array, "B"]
D = Float[jax.Array, "D"]
H = Float[jax.Array, "H"]
WD = Float[jax.Array, "W D"]
LD = Float[jax.Array, "L D"]
DN = Float[jax.Array, "D N"]
D1 = Float[jax.Array, "D 1"]
BTD = Float[jax.Array, "B T D"]
BTN = Float[jax.Array, "B T N"]
BD = Float[jax.Array, "B D"]
BDN = Float[jax.Array, "B D N"]
BWD = Float[jax.Array, "B W-1 D"]
HKV = Float[jax.Array, "H K V"]
BHK = Float[jax.Array, "B H K"]
BTHK = Float[jax.Array, "B T H K"]
BTHV = Float[jax.Array, "B T H V"]
S = Float[jax.Array, "_"]
SK = Float[jax.Array, "_ K"]
SV = Float[jax.Array, "_ V"]
BTS = Float[jax.Array, "B T _"]
BTSK = Float[jax.Array, "B T _ K"]
BTRSK = Float[jax.Array, "B T R _ K"]
BTRSV = Float[jax.Array, "B T R _ V"]
BTRHV = Float[jax.Array, "B T R H V"]
BTSV = Float[jax.Array, "B T _ V"]
BTGK = Float[jax.Array, "B T G K"]
BTGV = Float[jax.Array, "B T G V"]
BHKV = Float[jax.Array, "B H K V"]
BTHKV = Float[jax.Array, "B T H K V"]
# Real or complex.
AnyD = Inexact[jax.Array, "D"]
AnyBD = Inexact[jax.Array, "B D"]
AnyBTD = Inexact[jax.Array, "B T D"]
AnyBDN = Inexact[jax.Array, "B D N"]
