"""Tuning configuration of the kernels: per device, never keyed on the length of the sequence."""

import dataclasses

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128)  # what v is padded to
NARROWEST = 32  # narrower heads are padded more than twofold


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
  """How the recurrence along the chunks runs.

  Attributes:
    value_tile: value columns per CTA.
    cluster: CTAs of neighboring columns that get their common inputs by one multicast copy.
    num_stages: chunks whose inputs are in SMEM.
    num_slots: chunks whose results are in SMEM.
  """

  value_tile: int
  cluster: int
  num_stages: int
  num_slots: int

  def __post_init__(self):
    if self.value_tile not in (32, 64):
      raise ValueError(
        f"value_tile={self.value_tile} must be 32 or 64: one swizzle of bfloat16 operands."
      )
    for name in ("cluster", "num_stages"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
    if self.num_slots < 2:
      raise ValueError(
        f"num_slots={self.num_slots} must be at least 2: one is stored while the next is computed."
      )
    if VALUE_WIDTHS[0] % (self.value_tile * self.cluster):
      raise ValueError(
        f"value_tile={self.value_tile} times cluster={self.cluster} must divide the narrowest "
        f"values, V={VALUE_WIDTHS[0]}."
      )


def recurrence_config(separate_erase_key: bool, *, backward: bool) -> RecurrenceConfig:
  """The tuned configuration. `separate_erase_key`: whether the erase key is one more input.

  Wider tiles were slower at 32 heads, for too few CTAs run.
  """
  num_stages = 2 if backward or separate_erase_key else 3
  return RecurrenceConfig(value_tile=32, cluster=2, num_stages=num_stages, num_slots=3)


def preferred(key_width: int, value_width: int) -> bool:
  """Whether the chunked kernels are faster than XLA's form, where they can run."""
  return min(key_width, value_width) >= NARROWEST
