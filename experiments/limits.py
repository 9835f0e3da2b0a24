"""Sizes and names that an experiment rejects before it computes anything."""

from collections.abc import Mapping, Sequence

MAX_PROMPT = 2**26  # tokens
MAX_TOKENS = 2**31  # of the prompts of a command, all of which are made before they are used
_BYTES_PER_TOKEN = 4


def check_prompts(option: str, lengths: Sequence[int], samples: int) -> None:
  """Raises ValueError if prompts of these lengths, `samples` of each, are more than memory holds.

  Args:
    option: of the command line, for the message.
  """
  longest, total = max(lengths, default=0), sum(lengths) * samples
  size = f"{total * _BYTES_PER_TOKEN / 1e9:,.1f} GB of text"
  if longest > MAX_PROMPT:
    raise ValueError(
      f"{option} {longest:,}: a prompt has at most {MAX_PROMPT:,} tokens, and these would be about"
      f" {size}; use shorter ones."
    )
  if total > MAX_TOKENS:
    raise ValueError(
      f"{option} {longest:,} with {samples:,} samples: the prompts would be {total:,} tokens, about"
      f" {size}, and {MAX_TOKENS:,} tokens are the most; use fewer samples, or shorter ones."
    )


def check_rows(rows: int, length: int) -> None:
  """Raises ValueError if so many rows of this length are more tokens than memory holds."""
  if rows * length > MAX_TOKENS:
    raise ValueError(
      f"{rows:,} rows of {length:,} tokens are about {4 * rows * length / 1e9:,.1f} GB;"
      f" {MAX_TOKENS:,} tokens are the most, so use fewer rows."
    )


def kind_of[Kind](name: str, kinds: Mapping[str, Kind]) -> Kind:
  """The kind of this name.

  Raises:
    ValueError: it is unknown.
  """
  if name not in kinds:
    raise ValueError(f"kind={name!r} is not known; use one of {', '.join(kinds)}.")
  return kinds[name]
