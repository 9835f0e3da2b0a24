"""Bits per byte of text: a loss that is comparable across tokenizers."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from train.data.sidecars import read_sidecar


def tokens_per_byte(folder: str | Path, names: Iterable[str]) -> float | None:
  """Tokens per UTF-8 byte of text over token sets.

  Args:
    names: of the sets; a mapping has the weights of a mixture, in tokens.

  Returns:
    None unless every set has a sidecar, and all tokens of it are targets.
  """
  tokens = size = 0.0
  for name in names:
    sidecar = read_sidecar(Path(folder) / name)
    if sidecar is None or "weights_sha256" in sidecar:
      return None
    weight = names[name] / sidecar["tokens"] if isinstance(names, Mapping) else 1
    tokens, size = tokens + weight * sidecar["tokens"], size + weight * sidecar["bytes"]
  return tokens / size


def bits_per_byte(nats_per_token: float, tokens_per_byte: float | None) -> float | None:
  """Converts a loss in nats per token; None without byte counts."""
  return None if tokens_per_byte is None else nats_per_token / math.log(2) * tokens_per_byte
