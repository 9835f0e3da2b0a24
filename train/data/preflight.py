"""Checks of the tokenizer and of the sets of a run, before anything is tokenized or compiled.

Token files are opened, but not read; of text names, sizes and the first row are looked at.
"""

from collections import Counter
from collections.abc import Sequence

from lnssm_jax.files.buckets import local
from train import config
from train.data import in_bucket, sources, streams
from train.data.errors import DataError
from train.data.indexed import IndexedDataset
from train.data.sidecars import check_owner, origin_of, up_to_date
from train.data.tokenize import check_length, rows_of, text_of
from train.data.tokenizers import Tokenizer, bpe_path, no_tokenizer, tokenizer_of, tokenizer_path


def require(cfg: config.Train) -> None:
  """Checks the data of a run as far as possible without reading it.

  Raises:
    DataError: as `missing`; or a tokenizer, token files or text are not here.
  """
  if lines := missing(cfg):
    raise DataError(lines[0])


def missing(cfg: config.Train) -> list[str]:
  """Checks what is here of the data of a run; says of the rest what is missing, a line each.

  Raises:
    DataError: the tokenizer has more entries than the model, or is unusable; a set is too short for
      one window of `seq_len` tokens; token files are damaged, or belong to another config.
  """
  data, tokenizer, lines = cfg.data, None, []
  in_bucket.fetch(data.folder, data.token_sets)
  path = tokenizer_path(data.tokenizer, local(data.folder))
  if path is None or path.exists():
    tokenizer = tokenizer_of(data)
    check_vocabulary(tokenizer, cfg.model.vocab_size)
  elif path != bpe_path(local(data.folder)):  # which a run trains
    lines.append(no_tokenizer(data.tokenizer))
  if data.stream:
    for name in data.train:
      streams.opened(data.sources[name], cfg.seed)
  for name in data.token_sets:
    try:
      text = text_of(data, name)
    except DataError as error:
      lines.append(str(error))
      continue
    _check_set(cfg, name, tokenizer, text)
  return lines


def windowed(cfg: config.Train) -> dict[str, int]:
  """Sets that are cut into windows, with the tokens of one window with its targets."""
  by_windows = cfg.data.validation if cfg.data.weighting != "documents" else ()
  names = [*(() if cfg.data.stream else cfg.data.train), *by_windows]
  names = [name for name in names if not cfg.data.has_rows(name)]
  return dict.fromkeys(names, cfg.seq_len + 1)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
  """Raises DataError if a model with `vocab_size` entries lacks some of the tokenizer's."""
  if tokenizer.vocab_size > vocab_size:
    raise DataError(
      f"data.tokenizer={tokenizer.spec!r} has {tokenizer.vocab_size} entries, more than"
      f" model.vocab_size={vocab_size}; use model.vocab_size={tokenizer.vocab_size} or more, or"
      " another tokenizer."
    )


def _check_set(
  cfg: config.Train,
  name: str,
  tokenizer: Tokenizer | None,
  text: tuple[str, list[sources.Input]] | None,  # None: only the token files are here
) -> None:
  prefix, least = local(cfg.data.folder) / name, windowed(cfg).get(name, 1)
  if text is not None:
    source, files = text
    origin = origin_of([source], files, tokenizer, rows_of(cfg.data, name))
    if not up_to_date(prefix, origin):
      check_owner(prefix, origin, cfg.data.tokenizer)
      if not cfg.data.has_rows(name):  # of which all are read before the step is compiled
        first = [file for file in files if sources.has_rows(file[0])][:1]
        next(sources.read_inputs(first, Counter(), rows_of(cfg.data, name).fields), None)
      if (most := _most_tokens(cfg.data, files)) is not None and most < least:
        raise DataError(
          f"the set {name!r} has at most {most} tokens, by the size of its text, but one window of"
          f" seq_len={cfg.seq_len} needs {least}; use a smaller seq_len, or more text."
        )
      return
  check_length(prefix, IndexedDataset(prefix).num_tokens, least)


def _most_tokens(data: config.Data, files: Sequence[sources.Input]) -> int | None:
  """Bound on the tokens of plain text; None for other files, or a tokenizer from elsewhere.

  Bytes and BPEs of bytes have at most a token per byte, and a row of JSON is longer than its text
  by more than the end of the text.
  """
  known = data.tokenizer == "bytes" or data.tokenizer.startswith("bpe:")
  if not known or not all(sources.is_plain(path) for path, _ in files):
    return None
  return sum(path.stat().st_size + 1 for path, _ in files)
