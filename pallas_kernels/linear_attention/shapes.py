"""Block sizes, per device, apart from the kernels. Never keyed on the length of the sequence."""

from pallas_kernels import chip
from pallas_kernels.tensor_core import CHUNK

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128, 256)  # what v is padded to
NARROWEST = 32  # narrower heads are padded more than twofold, which has not been measured
STEP_WIDTH = 16  # of the decode kernel: K and V are padded to a multiple
STEP_HEADS = 16  # up to so many states (batch times heads) it was measured to win; at 1,024 to lose


def padded_width(width, widths):
  """The first of `widths` that is wide enough."""
  return next(size for size in widths if size >= width)


def worthwhile(key_width, value_width):
  """Whether many steps are better run by the kernels than by XLA's form, where the kernels can.

  Measured on an H200 at B8 T2048 H16 K128 V128, where they win for every decay.
  """
  return min(key_width, value_width) >= NARROWEST


def worthwhile_step(batch, heads, key_width, value_width):
  """The same of a single step: padding would copy the state, which the kernel updates in place."""
  whole = key_width % STEP_WIDTH == 0 and value_width % STEP_WIDTH == 0
  return whole and batch * heads <= STEP_HEADS


def walk(value_width):
  """Options of the kernels that walk along the chunks: columns of values in a block, and chunks in
  shared memory at a time."""
  return {"value_tile": min(value_width, 128), "stages": 2}


def parts(batch, heads, length):
  """Into how many parts to cut a sequence so that all multiprocessors have work."""
  return chip.parts(batch * heads, padded_length(length, 1), 4 * CHUNK)


def padded_length(length, number_of_parts):
  """The steps that the kernels run: the same number of whole chunks in every part."""
  block = CHUNK * number_of_parts
  return -(-length // block) * block
