"""Bits per byte of text: a loss that is comparable across tokenizers."""

import math
from collections.abc import Iterable
from pathlib import Path

from train.data.tokenize import read_sidecar


def tokens_per_byte(folder: str | Path, names: Iterable[str]) -> float | None:
  """Tokens per UTF-8 byte of text over token sets; None unless every set has a sidecar."""
  tokens = size = 0
  for name in names:
    sidecar = read_sidecar(Path(folder) / name)
    if sidecar is None:
      return None
    tokens, size = tokens + sidecar["tokens"], size + sidecar["bytes"]
  return tokens / size


def bits_per_byte(nats_per_token: float, tokens_per_byte: float | None) -> float | None:
  """Converts a loss in nats per token; None without byte counts."""
  return None if tokens_per_byte is None else nats_per_token / math.log(2) * tokens_per_byte
