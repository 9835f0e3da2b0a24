"""Special tokens that the files of a tokenizer put before and after every text, such as BOS.

tokenizer.json has a post-processor. tokenizer_config.json next to it may have `add_bos_token` and
`add_eos_token`, or name a class of transformers with defaults of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lnssm_jax.files.reading import DataError, read_json

# Special tokens spelled out in a text: each one token, or ordinary text.
InText = Literal["parse", "text"]

CONFIG, NAMES = "tokenizer_config.json", "special_tokens_map.json"
_MAX_CONFIG = 1 << 24  # bytes
_MAX_ADDED = 64  # tokens before and after a text
# Names of BOS and EOS where no file has them, by class.
_OF_CLASS = {
  "LlamaTokenizer": ("<s>", "</s>"),
  "CodeLlamaTokenizer": ("<s>", "</s>"),
  "GemmaTokenizer": ("<bos>", "<eos>"),
  "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
  "GPTNeoXTokenizer": ("<|endoftext|>", "<|endoftext|>"),
}
# Without `add_bos_token` this class puts nothing around a text, whatever the post-processor says;
# the others of the table put BOS before it.
_ADDS_NOTHING = "GPTNeoXTokenizer"


class Added(NamedTuple):
  """Ids that are put before and after every text."""

  before: tuple[int, ...] = ()
  after: tuple[int, ...] = ()


def check_in_text(special_tokens: str) -> None:
  """Raises ValueError unless the value of an argument `special_tokens` is known."""
  if special_tokens not in ("parse", "text"):
    raise ValueError(
      f"special_tokens={special_tokens!r:.80} must be 'parse' (one token where it is spelled out)"
      " or 'text' (ordinary text)."
    )


def read_settings(folder: Path, *, follow_links: bool) -> dict[str, Any]:
  """Entries of special_tokens_map.json and tokenizer_config.json of a folder, where they exist.

  Raises:
    DataError: a file is unusable.
  """
  found = {}
  for name in (NAMES, CONFIG):
    path = folder / name
    if path.exists() or path.is_symlink():
      try:
        found |= read_json(path, _MAX_CONFIG, follow_links=follow_links, strict=False)
      except (OSError, ValueError) as error:
        raise DataError(
          f"{path} is unusable: {error}. Repair or remove it; without it the end of a text is named"
          " by data.end_of_text."
        ) from None
  return found


def token_of(settings: Mapping[str, Any], name: str) -> str | None:
  """The text of a token of `read_settings`, such as "eos_token"."""
  token = settings.get(name)
  token = token.get("content") if isinstance(token, dict) else token
  return token if isinstance(token, str) else None


def check_known(settings: Mapping[str, Any], id_of: Mapping[str, int], place: Path) -> None:
  """Raises DataError if `read_settings` names special tokens that tokenizer.json does not have.

  transformers adds them to the vocabulary when it opens the folder; here they would silently be
  spelled out in ordinary tokens.
  """
  listed: list[Any] = []
  for name in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
    given = settings.get(name)
    listed += (
      given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    )
  names = (token.get("content") if isinstance(token, dict) else token for token in listed)
  missing = [name for name in names if isinstance(name, str) and name not in id_of]
  if missing:
    raise DataError(
      f"{place} has no token {missing[0]!r:.80}, which {CONFIG} or {NAMES} next to it adds"
      f" ({len(missing)} in all); write the folder again with both:"
      " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
    )


def added_by(
  post_processor: Any, settings: Mapping[str, Any], id_of: Mapping[str, int], place: Path
) -> Added:
  """The ids that a post-processor of tokenizer.json and `read_settings` put around a text.

  `add_bos_token` and `add_eos_token` count whatever the class is; transformers 4 reads them for
  some classes, transformers 5 for none that has a tokenizer.json.

  Args:
    id_of: the vocabulary.
    place: folder or file, for messages.

  Raises:
    DataError: they put tokens between parts of a text, too many of them, or one that is not in the
      vocabulary.
  """
  try:
    found = _of_post_processor(post_processor)
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise DataError(
      f"the post_processor of {place} cannot be used ({error}): it must put special tokens before"
      " and after one text."
    ) from None
  kind = settings.get("tokenizer_class")
  kind = kind.removesuffix("Fast") if isinstance(kind, str) else None
  if kind == _ADDS_NOTHING:
    found = Added()
  before, after = (
    _flagged(tokens, end, kind, settings, id_of, place)
    for tokens, end in zip(found, ("bos", "eos"), strict=True)
  )
  if len(before) + len(after) > _MAX_ADDED:
    raise DataError(
      f"{place} puts {len(before) + len(after)} special tokens around a text, more than"
      f" {_MAX_ADDED}; check its post_processor."
    )
  return Added(before, after)


def post_processor(added: Added, names: Mapping[int, str]) -> dict[str, Any] | None:
  """The post-processor of a tokenizer.json that puts tokens around a text."""
  if not any(added):
    return None
  token = lambda i: {"SpecialToken": {"id": names[i], "type_id": 0}}
  text = lambda name, number: {"Sequence": {"id": name, "type_id": number}}
  before, after = ([token(i) for i in part] for part in added)
  known = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()}
  return {
    "type": "TemplateProcessing",
    "single": [*before, text("A", 0), *after],
    "pair": [*before, text("A", 0), *after, text("B", 1), *after],
    "special_tokens": known,
  }


def _flagged(
  tokens: tuple[int, ...],
  end: str,
  kind: str | None,
  settings: Mapping[str, Any],
  id_of: Mapping[str, int],
  place: Path,
) -> tuple[int, ...]:
  """Tokens before ("bos") or after ("eos") a text with what `add_bos_token` says of it."""
  flag, name = settings.get(f"add_{end}_token"), token_of(settings, f"{end}_token")
  if flag is not None and not isinstance(flag, bool):
    raise DataError(f"{place}: add_{end}_token={flag!r:.80} must be true or false.")
  if name is None and f"{end}_token" not in settings and kind in _OF_CLASS:
    name = _OF_CLASS[kind][end == "eos"]
  token = None if name is None else id_of.get(name)
  if flag is None:
    implied = end == "bos" and kind in _OF_CLASS and kind != _ADDS_NOTHING
    flag = True if implied and token is not None else None
  elif flag and token is None:
    raise DataError(
      f"{place}: add_{end}_token is true, but {end}_token={name!r:.80} is not in the vocabulary;"
      f" name a token that is, or set add_{end}_token to false."
    )
  if flag is None or token is None or (flag and token in tokens):
    return tokens
  if not flag:
    return tuple(each for each in tokens if each != token)
  return (token, *tokens) if end == "bos" else (*tokens, token)


def _of_post_processor(step: Any) -> Added:
  """Tokens that a post-processor puts around a text."""
  match step:
    case {"type": "Sequence", "processors": steps}:
      found = [inner for inner in map(_of_post_processor, steps) if any(inner)]
      if len(found) > 1:  # with which the package itself loses the text
        raise ValueError("several of its steps add tokens")
      return found[0] if found else Added()
    case {"type": "TemplateProcessing", "single": single, "special_tokens": known}:
      places = [n for n, part in enumerate(single) if "Sequence" in part]
      if len(places) != 1:
        raise ValueError(f"its template has the text {len(places)} times")
      ids = lambda parts: tuple(
        int(i) for part in parts for i in known[part["SpecialToken"]["id"]]["ids"]
      )
      return Added(ids(single[: places[0]]), ids(single[places[0] + 1 :]))
    case {"type": "BertProcessing" | "RobertaProcessing", "sep": [_, sep], "cls": [_, cls]}:
      return Added((int(cls),), (int(sep),))
    case None | {"type": "ByteLevel"}:
      return Added()
  raise ValueError("its type is not known")
