"""The cases of the scans that keep N states per channel, longhorn_scan and selective_scan."""

from dataclasses import dataclass

from lnssm_jax.ops.core.cases import Scan


@dataclass(frozen=True)
class Case:
  """One set of arguments."""

  T: int = 37
  strength: str = "ordinary"
  segments: bool = False
  skip: bool = True
  D: int = 3
  N: int = 5
  chunk: int | None = 4
  state: bool = True
  activated: bool = False  # the rates are an activation of logits, with a bias

  def __str__(self):
    flags = [name for name in ("segments", "skip", "activated") if getattr(self, name)]
    return "-".join([self.strength, f"T{self.T}D{self.D}N{self.N}C{self.chunk}", *flags])


def channel_scan(*, function, state, draw, arguments, tokens: tuple[str, ...]) -> Scan:
  """A scan of states per channel; `tokens` have a time axis."""
  return Scan(
    function=function,
    state=state,
    draw=draw,
    arguments=arguments,
    narrow=tokens,
    measured=lambda T, strength: Case(T, strength, D=8, N=4, chunk=None),
  )
