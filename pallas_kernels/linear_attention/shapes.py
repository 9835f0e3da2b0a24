"""Block sizes, per device, apart from the kernels. Never keyed on the length of the sequence."""

from pallas_kernels import chip
from pallas_kernels.tensor_core import CHUNK

KEY_WIDTHS = (64, 128)  # what q and k are padded to
VALUE_WIDTHS = (64, 128, 256)  # what v is padded to
NARROWEST = 32  # narrower heads are padded more than twofold, which has not been measured


def padded_width(width, widths):
  """The first of `widths` that is wide enough."""
  return next(size for size in widths if size >= width)


def worthwhile(key_width, value_width):
  """Whether many steps are better run by the kernels than by XLA's form, where the kernels can.

  Measured on an H200 at B8 T2048 H16 K128 V128, where they win for every decay.
  """
  return min(key_width, value_width) >= NARROWEST


def walk(value_width):
  """Options of the kernels that walk along the chunks: columns of values in a block, and for how
  many chunks their inputs are in shared memory."""
  return {"value_tile": min(value_width, 128), "stages": 3}


def parts(batch, heads, length):
  """Into how many parts to cut a sequence so that all multiprocessors have work."""
  return chip.parts(batch * heads, padded_length(length, 1), 4 * CHUNK)


def padded_length(length, number_of_parts):
  """The steps that the kernels run: the same number of whole chunks in every part."""
  block = CHUNK * number_of_parts
  return -(-length // block) * block


def chunks_together(chunks):
  """How many chunks a block of threads works on, one after the other, if there are so many in all:
  a few, with three blocks or more for each place on the chip, of which a multiprocessor has two."""
  return next(n for n in (4, 2, 1) if n == 1 or chunks >= n * 3 * 2 * chip.MULTIPROCESSORS)
