"""Continuous batching: texts join and leave a batch of recurrent states between any two calls.

There are `size` slots. A text takes one while its prompt is read and while its tokens are drawn;
its state is the same size all the time, but for the caches of attention, which are allocated whole.
Tokens are those of `lnssm_jax.generate` with the same options, as far as its numbers are: another
batch may round logits differently.

A state after a prompt is kept, and one after what two prompts have in common, as long as there is
memory for it: a text that begins with the same tokens is read from there.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import sampling
from lnssm_jax.generate import AnyModel, apart, checked, decode, parts_of
from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.prefill import default_prefill_chunk, extend
from lnssm_jax.sampling import SamplingOptions

# Tokens of each row that a program draws, and programs of a call, after which texts join or leave.
# A call is one program until so many tokens after a text has left, as its client may ask again.
_STEPS, _PROGRAMS, _SOON = 2, 4, 32
# Prompts that wait for no others: all rows wait while one is read, and 16 take little longer.
_TOGETHER = 16
# Prompts that new ones are compared with, and what they must have in common to keep its state.
_RECENT, _SHORTEST_SHARED = 32, 16


@dataclasses.dataclass(eq=False)
class Row:
  """A text to continue; `Slots` counts what it has read and drawn of it.

  Args:
    prompt: token ids, at least one.
    options: `prefill_chunk` is not used.
    number: of the prompt among those of one call of `generate`, whose random numbers it gets.

  Attributes:
    reused: tokens of the prompt whose state was there.
    drawn: tokens drawn so far.
    cancelled: set it to have the slot freed at the next `step`.
  """

  prompt: np.ndarray
  options: SamplingOptions
  number: int = 0
  reused: int = 0
  drawn: int = 0
  cancelled: bool = False


class Drawn(NamedTuple):
  """New tokens of a row; `ended` says why it has left: "stop", "length" or "nan", or is None."""

  row: Row
  tokens: list[int]
  ended: str | None


class _Read(NamedTuple):
  """The first `length` tokens of a text, read."""

  state: Any  # of one row
  logits: Any  # [1, vocab], or None before the first token
  length: int


@dataclasses.dataclass(eq=False)
class _Reading:
  """A prompt that is being read, and the places in it after which the state is kept."""

  read: _Read
  ends: list[int]
  waited: bool = False  # for others

  def next_piece(self, chunk: int) -> tuple[int, int]:
    """(tokens with padding, tokens) that are read next, or (0, 0) if all are; few sizes in all."""
    rest = self.ends[0] - self.read.length if self.ends else 0
    if rest and self.read.length == 0:  # padding on the left is before the state's reset
      tokens = rest % chunk or chunk
      return min(chunk, 1 << (tokens - 1).bit_length()), tokens
    size = min(chunk, 1 << (rest.bit_length() - 1)) if rest else 0
    return size, size


@dataclasses.dataclass(eq=False)
class _Place:
  """The slot of a row, and how many tokens of it the device was asked for."""

  slot: int
  asked: int = 0


class _Call(NamedTuple):
  """A call of the device that draws tokens of these rows."""

  slots: dict[Row, int]
  steps: list[Any]  # of each program, as of `generate.decode`


class Slots:
  """A batch of `size` slots on the device; one thread may use it.

      slots = Slots(model, 8)
      slots.add(Row(np.array([1, 2, 3]), SamplingOptions(max_tokens=20)))
      while slots.rows:
        for row, tokens, ended in slots.step(): ...

  Args:
    prefix_memory: bytes for states of what was read.

  Attributes:
    model: the NNX model, whose parameters stay as they are: `Slots` has copied some.
    rows: those that have not ended.
  """

  def __init__(self, model: AnyModel, size: int, *, prefix_memory: int = 1 << 28):
    self.model: Any = model.module() if hasattr(model, "module") else model
    self.size = check_positive("size", size)
    self.rows: list[Row] = []
    self._free = list(range(size))  # those of rows whose last tokens are being drawn included
    self._reading: dict[Row, _Reading] = {}
    self._drawing: dict[Row, _Place] = {}
    self._call: _Call | None = None  # whose tokens the host has not read
    self._ahead: list[Any] = []  # logits after the pieces of prompts that were read last
    self._since = 0  # tokens since a row has left its slot
    self._prefixes = _Prefixes(prefix_memory)
    vocabulary, empty = self.model.vocab_size, jax.jit(self.model.init_state, static_argnums=0)
    self._empty = empty(1)
    states, self._weights = apart(empty(size), self.model.num_layers), parts_of(self.model)
    keys = jax.random.split(jax.random.key(0), size)
    self._device = (
      states,
      jnp.zeros((size, vocabulary)),
      jnp.zeros((size, vocabulary), bool),
      keys,
    )
    self._limits: Any = [np.ones((size, 1), np.float32) for _ in sampling.Limits._fields]

  def add(self, row: Row) -> None:
    """Gives a row a slot.

    Raises:
      ValueError: all are taken; or as `generate`.
    """
    if not self.free:
      raise ValueError(f"all {self.size} slots are taken; wait until one is free.")
    checked(self.model, [row.prompt], row.options)
    row.prompt = np.asarray(row.prompt, np.int32)
    self.rows.append(row)
    read = self._prefixes.longest(row.prompt) or _Read(self._empty, None, 0)
    row.reused = read.length
    self._reading[row] = _Reading(read, self._prefixes.ends(row.prompt, read.length))

  @property
  def free(self) -> int:
    """Number of rows that `add` takes now; one whose last tokens are being drawn has no slot."""
    return len(self._free) - len(self._reading)

  @property
  def prefix_bytes(self) -> int:
    """Bytes of the states that are kept."""
    return self._prefixes.used

  def step(self) -> list[Drawn]:
    """Reads some of the prompts, then draws tokens of the rows that are read; returns those.

    The device is a call ahead: it draws the next tokens while the host works on these.
    """
    for row in [row for row in self.rows if row.cancelled]:
      self._leave(row)
    if not self._gathers():
      self._read()
    call = self._call or self._draw()
    self._call = self._draw()
    before, self._ahead = self._ahead, [each.read.logits for each in self._reading.values()]
    if call is None:  # or the host would have the device read all of a prompt, whatever comes then
      jax.block_until_ready(before)
      return []
    drawn = jax.device_get([(tokens, broken) for tokens, _, broken in call.steps])
    tokens, broken = map(np.concatenate, zip(*drawn, strict=True))
    places = [(row, slot) for row, slot in call.slots.items() if row in self._drawing]
    return [self._of_row(row, tokens[:, slot], broken[:, slot]) for row, slot in places]

  def _leave(self, row: Row) -> None:
    self.rows.remove(row)
    self._reading.pop(row, None)
    place = self._drawing.pop(row, None)
    if place and place.asked < row.options.max_tokens:
      self._free.append(place.slot)
      self._since = 0

  def _gathers(self) -> bool:
    """Whether prompts that have come wait for one short call, for others to be read with them."""
    reading = self._reading.values()
    few = len(reading) < min(_TOGETHER, len(self._free))
    short = self._call is not None and len(self._call.steps) == 1 and self._since < _SOON
    gathers = few and short and not any(each.waited for each in reading)
    for each in reading:
      each.waited = True
    return gathers

  def _read(self) -> None:
    """Reads a piece of each prompt, and more of them up to a chunk; those of equal pieces at once.

    So no prompt waits for longer ones; the pieces are powers of two, of two chunks or so in all.
    """
    chunk = default_prefill_chunk(self.size)
    left = chunk = min(chunk, self.model.max_length or chunk)
    begun, once = [], set()
    while waiting := [row for row in self._reading if left > 0 or row not in once]:
      pieces = {row: self._reading[row].next_piece(chunk) for row in waiting}
      size = max(size for size, _ in pieces.values())
      rows = [row for row, (padded, _) in pieces.items() if padded == size]
      once.update(rows)
      if size:
        for some in self._calls(rows):
          self._extend(some, size, [pieces[row][1] for row in some])
        left -= size
      for row in rows:
        read, ends = self._reading[row].read, self._reading[row].ends
        if ends and read.length == ends[0]:
          self._prefixes.keep(row.prompt, read)
          del ends[0]
        if not ends:
          begun.append((row, self._reading.pop(row).read))
    if begun:
      self._begin(begun)

  def _calls(self, rows: list[Row]) -> Iterator[list[Row]]:
    """Rows of one call each, of which less than half is padding."""
    while rows:
      count = len(rows)
      if self._padded(count) > 2 * count:
        count = 4 ** ((count.bit_length() - 1) // 2)
      yield rows[:count]
      rows = rows[count:]

  def _padded(self, count: int) -> int:
    """Rows of a call for `count` of them: few programs."""
    padded = 1
    while padded < count:
      padded = min(4 * padded, self.size)
    return padded

  def _extend(self, rows: list[Row], size: int, counts: list[int]) -> None:
    """Reads the next `counts` tokens of rows, padded on the left to `size`."""
    reading, more = [self._reading[row] for row in rows], self._padded(len(rows)) - len(rows)
    tokens = np.zeros((len(rows) + more, size), np.int32)
    starts = np.zeros(len(rows) + more, np.int32)
    for place, (row, one, count) in enumerate(zip(rows, reading, counts, strict=True)):
      starts[place] = size - count
      tokens[place, size - count :] = row.prompt[one.read.length : one.read.length + count]
    states = [*(one.read.state for one in reading), *[self._empty] * more]
    states, logits = _extend_rows(self.model, states, tokens, starts)
    for one, state, out, count in zip(reading, states, logits, counts, strict=False):
      one.read = _Read(state, out, one.read.length + count)

  def _begin(self, begun: list[tuple[Row, _Read]]) -> None:
    """Moves rows whose prompts are read into free slots."""
    more = self._padded(len(begun)) - len(begun)
    seen = np.zeros((len(begun) + more, self.model.vocab_size), bool)
    seeds, numbers, slots = (np.zeros(len(seen), np.uint32) for _ in range(3))
    slots[:] = self.size  # of rows that are none: out of range
    for place, (row, _) in enumerate(begun):
      self._drawing[row] = _Place(slot := self._free.pop())
      for values, value in zip(self._limits, sampling.limits_of(row.options), strict=True):
        values[slot] = value
      seen[place, row.prompt] = True
      seed, alone = row.options.seed, isinstance(row.options.seed, tuple)
      seeds[place], numbers[place] = (seed[0], 0) if alone else (seed, row.number)
      slots[place] = slot
    reads = [read for _, read in begun] + [begun[0][1]] * more
    states, logits = [read.state for read in reads], [read.logits for read in reads]
    self._device = _put(self._device, states, logits, seen, (seeds, numbers), slots)

  def _draw(self) -> _Call | None:
    """Has the device draw the next tokens of the rows that are read and not yet whole."""
    rows = {
      row: place for row, place in self._drawing.items() if place.asked < row.options.max_tokens
    }
    if not rows:
      return None
    vocabulary = self.model.vocab_size
    choices = [sampling.choice_of(row.options, vocabulary, False) for row in rows]
    choice = sampling.common_choice(choices, vocabulary)
    most = max(row.options.max_tokens - place.asked for row, place in rows.items())
    soon = self._free and self._since < _SOON
    count = _STEPS * (1 if soon else min(_PROGRAMS, -(-most // _STEPS)))
    self._since += count
    first = np.zeros(self.size, np.int32)
    for row, place in rows.items():
      first[place.slot] = place.asked
      place.asked += count
      if place.asked >= row.options.max_tokens:  # the device begins no other row there before
        self._free.append(place.slot)
        self._since = 0
    states, logits, seen, keys = self._device
    # Copies, because the host changes its arrays while the call may still wait.
    limits = jax.device_put(sampling.Limits(*(values.copy() for values in self._limits)))
    calls = []
    for number in range(0, count, _STEPS):
      states, logits, new, steps = decode(
        self.model,
        self._weights,
        states,
        logits,
        seen if choice.penalized else None,
        keys,
        first + number,
        limits,
        choice=choice,
        steps=_STEPS,
      )
      seen = new if choice.penalized else seen
      calls.append(steps)
    self._device = states, logits, seen, keys
    return _Call({row: place.slot for row, place in rows.items()}, calls)

  def _of_row(self, row: Row, tokens: np.ndarray, broken: np.ndarray) -> Drawn:
    tokens = tokens[: row.options.max_tokens - row.drawn]
    kept = sampling.before_stop(tokens, row.options.stop_tokens or None)
    ended = "stop" if len(kept) < len(tokens) else None
    if broken[: len(kept) + (ended is not None)].any():
      kept, ended = kept[: np.argmax(broken)], "nan"
    row.drawn += len(kept)
    if ended is None and row.drawn == row.options.max_tokens:
      ended = "length"
    if ended:
      self._leave(row)
    return Drawn(row, kept.tolist(), ended)


class _Prefixes:
  """States of the beginnings of texts, of which those used least recently leave first."""

  def __init__(self, memory: int):
    self._memory, self.used = memory, 0
    self._kept: collections.OrderedDict[bytes, _Read] = collections.OrderedDict()
    self._recent: collections.deque[np.ndarray] = collections.deque(maxlen=_RECENT)

  def longest(self, prompt: np.ndarray) -> _Read | None:
    """The longest beginning of a prompt that is kept."""
    lengths = {read.length for read in self._kept.values() if read.length <= len(prompt)}
    for length in sorted(lengths, reverse=True):
      if read := self._kept.get(key := prompt[:length].tobytes()):
        self._kept.move_to_end(key)
        return read
    return None

  def ends(self, prompt: np.ndarray, length: int) -> list[int]:
    """Places after `length` whose state may be of use again: what recent prompts share, and all."""
    start = prompt[:_SHORTEST_SHARED]
    alike = [other for other in self._recent if np.array_equal(start, other[:_SHORTEST_SHARED])]
    shared = max((_common(prompt, other) for other in alike), default=0)
    if not any(np.array_equal(prompt, other) for other in alike):
      self._recent.append(prompt)
    ends = {shared if shared >= _SHORTEST_SHARED else 0, len(prompt)}
    return sorted(end for end in ends if end > length)

  def keep(self, prompt: np.ndarray, read: _Read) -> None:
    size = _bytes(read)
    if size > self._memory:
      return
    if old := self._kept.pop(key := prompt[: read.length].tobytes(), None):
      self.used -= _bytes(old)
    self._kept[key] = read
    self.used += size
    while self.used > self._memory:
      _, old = self._kept.popitem(last=False)
      self.used -= _bytes(old)


def _bytes(read: _Read) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(read[:2]))


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """Number of tokens at the beginning of both."""
  shorter = min(len(a), len(b))
  differ = a[:shorter] != b[:shorter]
  return int(np.argmax(differ)) if differ.any() else shorter


@jax.jit
def _extend_rows(model, states, tokens, starts):
  """Reads tokens [B, C] from starts [B] on after a state for each row: states and logits, by row.

  A row whose state is not empty starts at 0.
  """
  model.unroll = 1  # one of many programs: a loop over layers compiles in a tenth of the time
  segment_ids = (jnp.arange(tokens.shape[1]) >= starts[:, None]).astype(jnp.int32)
  state, logits = extend(model, _joined(states), tokens, segment_ids)
  row = lambda n: jax.tree.map(lambda x: x[:, n : n + 1], state)
  return [row(n) for n in range(len(states))], jnp.split(logits, len(states))


def _joined(states):
  """One state of the rows of several."""
  return jax.tree.map(lambda *rows: jnp.concatenate(rows, axis=1), *states)


@functools.partial(jax.jit, donate_argnums=0)
def _put(batch, states, logits, seen, seeds, slots):
  """The batch with rows, each in its slot."""
  model_states, *_ = batch
  rows = (
    apart(_joined(states), len(model_states[0])),
    jnp.concatenate(logits),
    seen,
    jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(*seeds),
  )
  return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), batch, rows)
