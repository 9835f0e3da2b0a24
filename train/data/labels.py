"""Which tokens of a document are targets of the loss, and how it is encoded."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from lnssm_jax.pretrained.chat import ChatTemplate
from lnssm_jax.pretrained.special_tokens import InText
from lnssm_jax.pretrained.tokenizers import Tokenizer
from train.data.errors import DataError
from train.data.sources import TEXT_FIELDS, Chat, Document, value_in

Targets = Literal["all", "completion", "last", "assistant"]


class Rows(NamedTuple):
  """The keys of a row of JSON, how it is encoded, and which of its tokens are targets."""

  # Of the text, of a prompt and its completion, of messages; or also of two answers to these.
  fields: tuple[str, ...] = TEXT_FIELDS
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

  def template(self, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of rows of messages."""
    return ChatTemplate(tokenizer) if self.of_loss == "assistant" else None

  def chat(self, tokenizer: Tokenizer) -> Chat | None:
    """The function that makes documents of such a row, for `sources.read_inputs`.

    Of two answers, each a text or messages, each is a document after the messages before it, none
    of which is a target.
    """
    template, (key, *answers) = self.template(tokenizer), self.fields
    if template is None:
      return None

    def documents(row: Any, where: str) -> Iterator[Document]:
      for name in self.fields:
        value_in(row, where, name)
      how: Any = {"tools": row.get("tools"), "special_tokens": self.special_tokens}
      how |= {"variables": row.get("chat_template_kwargs")}
      if not answers:
        for text, places in template.turns(row[key], where=where, **how):
          yield Document(text, places=places)
      for name in answers:
        place, reply = f'{where}, "{name}"', row[name]
        if reply == "":
          raise DataError(f"{place} is empty, but a pair has two answers; remove the row.")
        if isinstance(reply, str):
          reply = [{"role": "assistant", "content": reply}]
        if not all(isinstance(x, list) for x in (row[key], reply)):
          raise DataError(f'{place}: expected a text or messages, after a list in "{key}".')
        found = template.turns(row[key] + reply, where=place, first=len(row[key]), **how)
        text, places = found[-1]
        if not places:
          raise DataError(f"{place}: there is no reply that counts, but a pair has two answers.")
        if len(found) > 1:
          raise DataError(
            f"{place}: the chat template rewrites earlier replies, so that several have no text in"
            ' common; give one reply, or the others "weight": 0.'
          )
        yield Document(text, places=places)

    return documents


TEXT_ROWS = Rows()
MESSAGES = ("messages",)  # the usual key of a conversation
