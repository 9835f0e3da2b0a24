"""Text from elsewhere as a terminal may show it: no control characters, no endless lines."""

import os
import re
import shlex
import sys
from typing import Any

# Control characters, among them ESC; marks that change the direction of text, ends of lines that
# are no line feed; halves of surrogate pairs, which stand for bytes of a name that is not UTF-8.
_UNSAFE = re.compile(
  "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
MAX_LINE = 2000  # characters of a line of an error


def printable(text: Any, limit: int | None = None, keep: str = "") -> str:
  r"""`text` with escaped control characters, such as \x1b and \n, and without its middle if longer.

  A terminal would obey them: clear the screen, change its title, or show a line that seems ours.
  Twice is the same as once.

  Args:
    limit: characters of `text` that are kept; None: all.
    keep: control characters that stay, such as the line feeds of a text of several lines.
  """
  text = str(text)
  if limit is not None and len(text) > limit:
    tail = limit // 4
    text = f"{text[: limit - tail]}... ({len(text):,} characters) ...{text[len(text) - tail :]}"
  return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _escaped(found[0]), text)


def _escaped(character: str) -> str:
  return character.encode("unicode_escape").decode("ascii")


def shell_word(text: Any) -> str:
  """`text` as one word of a command that users copy into a shell; expands to nothing else.

  Characters that the terminal does not have, or that `printable` escapes, are written as bash and
  zsh read them: $'\\303\\251'.
  """
  text = str(text)
  try:
    text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    if not _UNSAFE.search(text):
      return shlex.quote(text)
  except UnicodeEncodeError:
    pass
  plain = lambda byte: 0x20 <= byte < 0x7F and byte not in b"\\'"
  content = os.fsencode(text)
  return "$'" + "".join(chr(x) if plain(x) else f"\\{x:03o}" for x in content) + "'"


class PrintableError(Exception):
  """An error whose message may have names and values from elsewhere in it.

  Args:
    lines: of the message, one in most cases. They are `printable`: a name with a line feed in it
      adds no line, and one of a megabyte is shortened.
  """

  def __init__(self, *lines: object):
    super().__init__(*(printable(line, MAX_LINE) for line in lines))

  def __str__(self) -> str:
    return "\n".join(self.args)
