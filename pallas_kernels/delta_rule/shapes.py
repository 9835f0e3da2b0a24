"""Block sizes, per device, apart from the kernels. Never keyed on the length of the sequence."""

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128)  # what v is padded to
NARROWEST = 32  # narrower heads are padded more than twofold


def worthwhile(key_width, value_width):
  """Whether many steps are better run by the kernels than by XLA's form, where the kernels can."""
  return min(key_width, value_width) >= NARROWEST


def walk(separate_key, *, backwards):
  """Options of the kernels that walk along the chunks: columns of values in a block, for how many
  blocks the inputs that they share are copied at once, and for how many chunks there are inputs and
  results in shared memory.

  Wider blocks were slower at 32 heads, for too few of them run. `separate_key`: whether the erase
  key is one more input.
  """
  stages = 2 if backwards or separate_key else 3
  return {"value_tile": 32, "cluster": 2, "stages": stages, "slots": 3}
