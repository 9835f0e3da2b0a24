"""Block sizes, apart from the kernels. Never keyed on the length of the sequence."""

from pallas_kernels import chip

AT_ONCE = 2  # blocks of the backward pass on a multiprocessor
STATES = (8, 16)  # numbers of states of a channel that a kernel works on; more are cut
CHANNELS = 128  # the number of channels is padded to a multiple: those of a block
STEPS = 16  # the number of steps is padded to a multiple: steps between kept states
SHORTEST = 128  # steps of a part
NARROWEST = 64  # fewer channels are padded more than twofold


def states(N):
  """The number of states that N are padded to, or cut into groups of."""
  return next((width for width in STATES if width >= N), STATES[-1])


def worthwhile(channels):
  """Whether the scans are better run by the kernels than by XLA's form, where the kernels can."""
  return channels >= NARROWEST


def parts(B, T, D, fewest):
  """Into how many parts to cut a sequence so that all multiprocessors have work; 1 or `fewest`."""
  number = chip.parts(B * -(-D // CHANNELS), T, SHORTEST, AT_ONCE)
  return number if number >= fewest else 1


def forward(name, B, T, D, N):
  """Options of `forward.outputs`: a thread to a channel, or to two in two blocks' place.

  Exponentials bound the selective scan, reads of keys from shared memory the Longhorn scan: there
  two channels share them. Measured on an H200.
  """
  del B, T, N
  pair = name == "longhorn_scan" and D % 256 == 0
  return {"tiles": (1, 2 if pair else 1), "chunk": STEPS, "unroll": 2, "stages": 2}


def backward(N):
  """Options of `backward.gradients`: 4 states to a thread, which lie beside one another."""
  lanes = N // 4
  return {"tiles": (lanes, lanes), "chunk": STEPS, "stages": 2}
