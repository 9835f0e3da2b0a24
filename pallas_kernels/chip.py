"""What block sizes and grids are chosen for: a Hopper GPU."""

MULTIPROCESSORS = 132  # of an H100 or H200


def parts(blocks, length, shortest, at_once=1):
  """Into how many parts, a power of two, to cut a sequence so that all multiprocessors have work.

  Args:
    blocks: of threads that run for each part.
    length: steps of the sequence.
    shortest: steps that a part has at least.
    at_once: blocks that a multiprocessor runs.
  """
  number = 1
  while 2 * number * blocks <= at_once * MULTIPROCESSORS and length >= 2 * number * shortest:
    number *= 2
  return number
