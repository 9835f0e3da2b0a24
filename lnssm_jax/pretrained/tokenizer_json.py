"""Checks of a tokenizer.json: what it costs, and where a text may be split for it."""

import base64
import math
from typing import Any

_MAX_GROWTH = 256  # times that replacements may lengthen a text, in the worst case
# Bytes of all added tokens, which the package keeps in an automaton of 100 bytes per byte.
_MAX_ADDED_TOKENS = 1 << 20


def check_size(settings: dict[str, Any]) -> None:
  """Raises ValueError if loading the file, or using it, would fill any memory.

  A few bytes of such a file, several replacements in sequence, would make a text far longer.
  """
  added = sum(len(token["content"].encode()) for token in settings.get("added_tokens") or ())
  if added > _MAX_ADDED_TOKENS:
    raise ValueError(f"its added tokens have {added:,} bytes, more than {_MAX_ADDED_TOKENS:,}")
  for name in ("normalizer", "decoder"):
    factor = _growth(settings.get(name) or {})
    if factor > _MAX_GROWTH:
      raise ValueError(
        f"its {name} can make a text {factor:.3g} times longer, more than {_MAX_GROWTH} times"
      )


def _growth(step: dict) -> float:
  """Largest factor by which the replacements of a normalizer or decoder lengthen a text."""
  match step:
    case {"type": "Sequence"}:
      inner = step.get("normalizers", step.get("decoders", []))
      return math.prod(map(_growth, inner))
    case {"type": "Replace", "content": str(content)}:
      found = step["pattern"].get("String")
      # A regular expression, like an empty text, may match between any two letters.
      return max(1.0, len(content) / len(found)) if found else 1.0 + len(content)
    case {"type": "Prepend", "prepend": str(content)}:
      return 1.0 + len(content)
    case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
      raw = base64.b64decode(charsmap)  # the size of a trie, the trie, texts that end in a zero
      texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
      return max(1.0, *map(len, texts))
  return 1.0


def can_split_before_newline(settings: dict[str, Any]) -> bool:
  """Whether a text may be split between a non-space character and a newline after it.

  GPT-2's byte-level pre-tokenizer starts a new word exactly there and looks ahead no further than
  the next non-space character; NFC composes nothing across a newline. Added tokens that contain a
  newline, or strip spaces around them, could span the split.
  """
  words, normal = settings.get("pre_tokenizer") or {}, settings.get("normalizer")
  added = settings.get("added_tokens") or []
  return (
    words.get("type") == "ByteLevel"
    and words.get("use_regex", True)
    and not words.get("add_prefix_space", True)
    and (normal is None or normal.get("type") == "NFC")
    and not any(
      "\n" in token["content"] or token["lstrip"] or token["rstrip"] or token["single_word"]
      for token in added
    )
  )


def byte_tokens(settings: dict[str, Any]) -> frozenset[str]:
  """Tokens that stand for one byte each, of which several in a row are decoded together."""

  def falls_back(step: Any) -> bool:
    match step:
      case {"type": "Sequence", "decoders": steps}:
        return any(map(falls_back, steps))
      case {"type": "ByteFallback"}:
        return True
    return False

  names = (f"<0x{byte:02X}>" for byte in range(256))
  return frozenset(names if falls_back(settings.get("decoder")) else ())
