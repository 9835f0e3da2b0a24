"""Text of drawn tokens: that of the prompt and them, without that of the prompt.

Decoded alone, tokens of a SentencePiece-like tokenizer lose the space before their first word, and
a character whose bytes the prompt begins is broken.
"""

from collections.abc import Sequence

from lnssm_jax.pretrained.tokenizers import Tokenizer

# Tokens that are decoded again with new ones: their text is what new tokens may depend on.
_TAIL = 32
# Characters of their text at least, so that what is stripped at its start is none of new tokens.
_TAIL_TEXT = 8
# Tokens after which those whose text is final are not decoded again.
_WINDOW = 128


class Continuation:
  """The text of one row's new tokens, as they come, up to the first of several strings.

  Args:
    prompt: the tokens before them; what the tokenizer puts before a text is not part of its text.
    until: the text ends before the string of these that is complete first; of those that are
      complete with the same character, before the longest. It does not depend on how many tokens
      are added at once.

  Attributes:
    ended: whether one of the strings was found; later tokens change nothing.
  """

  def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], until: Sequence[str] = ()):
    before = list(tokenizer.added.before)
    prompt = [int(token) for token in prompt]
    prompt = prompt[len(before) :] if prompt[: len(before)] == before else prompt
    self._tokenizer = tokenizer
    self._window = _tail(tokenizer, prompt)
    self._base = tokenizer.decode(self._window)  # its text, as far as it is that of the prompt
    self._until = [(end, _Beginning(end)) for end in until]
    self._done = ""  # text of tokens that are no longer in the window
    self._run = 0  # characters of `text` that are final, though the last token is a byte
    self._fed = 0  # characters that `_until` has seen
    self.text = ""
    self.ended = False

  def add(self, tokens: Sequence[int]) -> None:
    """Adds tokens of the row, which are its next ones."""
    end, bytewise = self._tokenizer.end_of_text, self._tokenizer.is_byte
    tokens = [int(token) for token in tokens if token != end]
    if self._until and any(map(bytewise, (*self._window[-1:], *tokens))):
      parts = [[token] for token in tokens]  # a string may be there, and be gone a token later
    else:
      parts = [tokens]
    for part in parts:
      if part and not self.ended:
        self._extend(part)

  @property
  def shown(self) -> str:
    """The part of `text` that no later token changes, and that is no beginning of `until`."""
    if self.ended:
      return self.text
    held = max((beginning.length for _, beginning in self._until), default=0)
    return self.text[: self._fed - held]

  def _extend(self, tokens: list[int]) -> None:
    if len(self._window) > _WINDOW and self._fed == len(self.text):
      self._done, self._window = self.text, _tail(self._tokenizer, self._window)
      self._base = self._tokenizer.decode(self._window)
    self._window += tokens
    whole, done = self._tokenizer.decode(self._window), len(self._done)
    new = whole[_common(self._base, whole) :]
    searched = done + _common(self.text[done:].rstrip("\ufffd"), new)
    self.text = self._done + new
    if self._tokenizer.is_byte(self._window[-1]):
      # Of several in a row that are no UTF-8, each becomes U+FFFD, also those before.
      final = min(self._run, len(self.text))
    else:
      final = self._run = len(self.text.rstrip("\ufffd"))
    self._find(searched)
    if self.ended:
      return
    final = max(final, self._fed)
    for _, beginning in self._until:
      beginning.feed(self.text[self._fed : final])
    self._fed = final

  def _find(self, searched: int) -> None:
    """Ends the text before the first of `until`; none is in the first `searched` characters."""
    text = self.text.rstrip("\ufffd")
    places = []
    for end, _ in self._until:
      place = text.find(end, max(0, searched - len(end) + 1))
      if place >= 0:
        places.append((place + len(end), place))
    if places:
      self.text, self.ended = self.text[: min(places)[1]], True


class _Beginning:
  """How many characters at the end of a text that grows `end` begins with.

  The algorithm of Knuth, Morris and Pratt, whose table is built no further than the text needs.
  """

  def __init__(self, end: str):
    self._end, self._shorter, self.length = end, [0], 0

  def feed(self, text: str) -> None:
    for letter in text:
      while self.length and (self.length == len(self._end) or self._end[self.length] != letter):
        self.length = self._shorter[self.length - 1]
      self.length += self._end[self.length] == letter
      if self.length > len(self._shorter):
        self._shorter.append(self._next())

  def _next(self) -> int:
    """The longest beginning of `end` that ends where its first `length` characters do."""
    letter, shorter = self._end[self.length - 1], self._shorter[-1]
    while shorter and self._end[shorter] != letter:
      shorter = self._shorter[shorter - 1]
    return shorter + (self._end[shorter] == letter)


def _common(a: str, b: str) -> int:
  """Number of characters at the beginning of both."""
  if b.startswith(a):
    return len(a)
  differ = (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
  return next(differ, min(len(a), len(b)))


def _tail(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
  """The last tokens, on whose text alone that of further tokens depends."""
  size = _TAIL
  while size < len(tokens):
    tail = tokens[-size:]
    if not tokenizer.is_byte(tail[0]) and len(tokenizer.decode(tail).strip()) >= _TAIL_TEXT:
      return tail
    size *= 2
  return list(tokens)
