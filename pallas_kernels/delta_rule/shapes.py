"""Block sizes, per device, apart from the kernels. Never keyed on the length of the sequence."""

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128)  # what v is padded to
NARROWEST = 32  # narrower heads are padded more than twofold


def worthwhile(key_width, value_width):
  """Whether many steps are better run by the kernels than by XLA's form, where the kernels can."""
  return min(key_width, value_width) >= NARROWEST


def walk(value_width, heads):
  """Options of the kernels that walk along the chunks: columns of values in a block, and chunks in
  shared memory at a time. `heads`: of all sequences together."""
  del heads
  return {"value_tile": min(value_width, 32), "stages": 2}
