"""Which tokens of a document are targets of the loss, and how it is encoded."""

from typing import Any, Literal, NamedTuple

import numpy as np

from lnssm_jax.pretrained.special_tokens import InText
from train.data.sources import TEXT_FIELDS

Targets = Literal["all", "completion", "last"]


class Rows(NamedTuple):
  """The keys of a row of JSON, how it is encoded, and which of its tokens are targets."""

  fields: tuple[str, ...] = TEXT_FIELDS  # of the text, or of a prompt and its completion
  targets: Targets | None = None  # None: the completion, or all of a text
  special_tokens: InText = "text"  # spelled out in a text: one token each, or ordinary text

  @property
  def of_loss(self) -> Targets:
    """`targets`, or what it stands for."""
    return self.targets or ("completion" if len(self.fields) > 1 else "all")

  def origin(self) -> dict[str, Any]:
    """Entries of the sidecar; none for rows of a text, as older versions wrote them."""
    if self.of_loss == "all" and self.fields == TEXT_FIELDS:
      return {}
    return {"fields": list(self.fields), "targets": self.of_loss}

  def weights(self, tokens: int, prompt: int, ends: int = 1) -> np.ndarray | None:
    """float32 [tokens] of a document, of which the last `ends` end it; None: all are 1."""
    if self.of_loss == "all":
      return None
    place, last = np.arange(tokens), tokens - 1 - ends
    return (place >= prompt if self.of_loss == "completion" else place == last).astype("<f4")


TEXT_ROWS = Rows()
