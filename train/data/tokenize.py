"""Documents -> token files and their sidecars (`train.data.sidecars`)."""

import contextlib
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from lnssm_jax.files.atomic import locked
from lnssm_jax.files.buckets import local
from lnssm_jax.pretrained.special_tokens import InText
from train.data import fingerprints, in_bucket, sources
from train.data.encoding import encode, limit_threads
from train.data.errors import DataError, writing
from train.data.indexed import CHECKSUMS, IndexedDataset, IndexedWriter, dtype_for
from train.data.labels import MESSAGES, TEXT_ROWS, Rows, Targets
from train.data.parts import Parts
from train.data.progress import Progress
from train.data.sidecars import (
  check_owner,
  has_digests,
  intact,
  origin_of,
  read_sidecar,
  sidecar_path,
  write_sidecar,
)
from train.data.tokenizers import (
  AddSpecialTokens,
  Tokenizer,
  TokenizerSettings,
  add_special_tokens_of,
  bpe_path,
  bpe_size,
  load_tokenizer,
  train_bpe,
)
from train.messages import warn

BPE_BYTES = 64_000_000  # most text to train a BPE on, split equally over the sources


class DataSettings(TokenizerSettings, Protocol):
  """The part of `train.config.Data` that is used here, documented there."""

  @property
  def train(self) -> Collection[str]: ...
  @property
  def validation(self) -> Collection[str]: ...
  @property
  def token_sets(self) -> Collection[str]: ...
  @property
  def sources(self) -> dict[str, str]: ...
  @property
  def fields(self) -> dict[str, tuple[str, ...]]: ...
  @property
  def targets(self) -> dict[str, Targets]: ...
  @property
  def special_tokens(self) -> InText: ...


def prepare(
  data: DataSettings,
  *,
  workers: int | None = None,
  progress: bool = False,
  force: bool = False,
  whole: bool = False,
  least: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, dict[str, Any] | None]:
  """Creates every token file named by `data` that is missing or out of date.

  A pair without a source, or whose source is not on this machine, is used as it is if its tokenizer
  matches. A BPE is trained on the training sources once, because models depend on it. Files of
  another config (other text, tokenizer, fields or targets) are not replaced.

  Args:
    workers: encoding threads; None means one per core. The first call of the process decides. The
      files do not depend on it.
    progress: whether to report on stderr.
    force: whether to create everything again, including the BPE.
    whole: whether to read every byte of existing files, not only sampled blocks.
    least: tokens that a set needs, by name. Short texts are tokenized first, so that one that is
      too short is found before the others are.

  Returns:
    The sidecar of each set; None for a pair without one.

  Raises:
    DataError: see `tokenize_to`; or a set has neither files nor a source, or is too short, or its
      files have changed since they were written (`train.data.fingerprints`).
  """
  in_bucket.fetch(data.folder, data.token_sets)
  with writing(local(data.folder)):
    local(data.folder).mkdir(parents=True, exist_ok=True)
  names = list(data.token_sets)
  for name in names:
    _check_name(name)
  limit_threads(workers)
  origins = {
    source: data.fields.get(name, sources.TEXT_FIELDS)
    for name in data.train
    if name in names and (source := _source(data, name))
  }
  how = {"progress": progress, "force": force}
  of_file = {"end_of_text": data.end_of_text, "add_special_tokens": add_special_tokens_of(data)}
  tokenizer = load_or_train(
    data.tokenizer, local(data.folder), list(origins), fields=origins, **of_file, **how
  )
  options = {"workers": workers, **how}
  sidecars = dict.fromkeys(names)
  for name in sorted(names, key=lambda name: _size(text_of(data, name))):
    prefix = local(data.folder) / name
    sidecars[name] = sidecar = _prepare_set(data, name, tokenizer, options)
    if sidecar is not None:
      fingerprints.check(prefix, sidecar, whole=whole)
    if name in least:
      check_length(prefix, IndexedDataset(prefix).num_tokens, least[name])
  in_bucket.publish(data.folder, names)
  return sidecars


def tokenize_to(
  prefix: str | Path,
  inputs: Sequence[str],
  tokenizer: Tokenizer,
  *,
  rows: Rows = TEXT_ROWS,
  workers: int | None = None,
  progress: bool = False,
  force: bool = False,
) -> dict[str, Any]:
  """Tokenizes `inputs` into one pair and its sidecar, unless they are up to date.

  Each document becomes its tokens, with those that the tokenizer puts around a text, followed by
  the end-of-text token; a prompt and its completion are joined without a space and encoded as one
  text, of which a token with characters of both counts as one of the completion. Unless all tokens
  are targets, the pair has `.weights`: 1 for the completion and the end-of-text, for the last token
  of the text only, or for the replies of a conversation, each with the token that ends it, else 0.
  A conversation is the text that the tokenizer's chat template makes of it, with nothing around it.
  Text is streamed: memory holds a few batches, the longest document, and a part
  (`train.data.parts`), of which many have been written if the process is
  killed; the next call continues after them.

  Args:
    prefix: path of the files without suffixes.
    inputs: sources as in `train.data.sources`, read in order.
    tokenizer: its vocabulary size determines the dtype of the file (`dtype_for`).
    rows: keys and targets of rows of JSON, and special tokens in a text.

  Returns:
    The sidecar: documents, tokens (including end-of-text), bytes (of UTF-8 text), vocab_size,
    tokenizer, tokenizer_fingerprint, source, source_fingerprint, skipped, sha256 (of `.bin`),
    crc32_sha256, sample (`train.data.fingerprints`); with `.weights` also weights_sha256, fields
    and targets; special_tokens, if there are any around a text or parsed in it; of prompts and
    completions, unless each byte is a token, completions: "whole", which older versions lack.

  Processes that create the same pair do so one after the other; all but the first find it up to
  date. Where files have no locks each creates it, with the same content.

  Raises:
    DataError: the text is missing, empty or unreadable, existing files have changed since they were
      written or belong to another config (`sidecars.check_owner`), or files cannot be written.
      Existing files at `prefix` are then unchanged.
  """
  prefix, name = Path(prefix), Path(prefix).name
  _check_name(name)
  files = [file for source in inputs for file in sources.find_inputs(source)]
  origin = origin_of(inputs, files, tokenizer, rows)
  wrong = None
  if not force:  # without a lock: the folder may not be writable
    try:
      if sidecar := intact(prefix, origin):
        return sidecar
    except DataError as error:  # it may be that another process replaces them
      wrong = error
  with _alone(prefix, f"tokenize {name}", progress, wrong):
    if not force:
      if sidecar := intact(prefix, origin):
        return sidecar
      check_owner(prefix, origin, tokenizer.spec)
    options = {"rows": rows, "workers": workers, "progress": progress, "force": force}
    return _tokenize(prefix, inputs, files, origin, tokenizer, **options)


@contextlib.contextmanager
def _alone(
  path: Path, what: str, progress: bool, otherwise: DataError | None = None
) -> Iterator[None]:
  """Context in which no other process creates `path`; `otherwise` is raised if that cannot be."""
  waiting = lambda: progress and warn(f"{what}: another process does it; waiting")
  with contextlib.ExitStack() as stack:
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      stack.enter_context(locked(path, waiting))
    except OSError as error:
      if otherwise is not None:
        raise otherwise from None
      with writing(path.parent):
        raise error
    yield


def _tokenize(
  prefix: Path,
  inputs: Sequence[str],
  files: list[sources.Input],
  origin: dict[str, Any],
  tokenizer: Tokenizer,
  *,
  rows: Rows,
  workers: int | None,
  progress: bool,
  force: bool,
) -> dict[str, Any]:
  """Writes the pair and its sidecar, which it returns; arguments as of `tokenize_to`."""
  name = prefix.name
  limit_threads(workers)
  skipped: Counter[str] = Counter()
  report = Progress(f"tokenize {name}", sys.stderr if progress else None)
  weighted, dtype = rows.of_loss != "all", dtype_for(tokenizer.vocab_size)
  parts = Parts(prefix, origin, dtype, weighted=weighted)
  if force:
    parts.remove()
  with (
    IndexedWriter(prefix, dtype, weighted=weighted) as writer,
    contextlib.closing(
      sources.read_inputs(files, skipped, rows.fields, rows.chat(tokenizer))
    ) as documents,
  ):
    for (ids, weights), document in zip(parts.finished(), documents, strict=False):
      writer.add_document(ids, weights)
      report.add(len(document.text.encode()))
    for ids, prompt, ends, size, chosen in encode(documents, tokenizer, rows.special_tokens):
      weights = rows.weights(len(ids), prompt, ends) if chosen is None else chosen.astype("<f4")
      writer.add_document(ids, weights)
      parts.add(ids, weights)
      report.add(size)
    if not writer.num_documents:
      advice = "Name sources with text in UTF-8."
      if rows.of_loss == "assistant":
        advice = 'A reply that counts has the role "assistant", and not "weight": 0.'
      raise DataError(
        f"{', '.join(map(repr, inputs))} has no text: {len(files)} files, {dict(skipped)}"
        f" documents skipped. {advice}"
      )
    if not has_digests(prefix, writer.digests()):  # a crash would leave it with other files
      sidecar_path(prefix).unlink(missing_ok=True)
  report.close(skipped)
  sidecar = {
    "documents": writer.num_documents,
    "tokens": writer.num_tokens,
    "bytes": report.bytes,
    "vocab_size": tokenizer.vocab_size,
    "tokenizer": tokenizer.spec,
    **origin,
    "skipped": dict(skipped),
    **writer.digests(),
    "crc32_sha256": fingerprints.sha256_of(prefix, CHECKSUMS),
    "sample": fingerprints.sample(prefix),
  }
  write_sidecar(prefix, sidecar)
  parts.remove()
  return sidecar


def load_or_train(
  spec: str,
  folder: str | Path,
  origins: Sequence[str],
  *,
  fields: Mapping[str, Sequence[str]] = MappingProxyType({}),
  end_of_text: str | None = None,
  add_special_tokens: AddSpecialTokens = "file",
  progress: bool = False,
  force: bool = False,
) -> Tokenizer:
  """Loads a tokenizer; "bpe:N" is trained first, on the sources `origins`, if necessary.

  Args:
    fields: keys of the rows of a source; by default that of a text.
    end_of_text, add_special_tokens: as in `load_tokenizer`.

  Raises:
    DataError: the tokenizer cannot be loaded, or there is not enough text to train it.
  """
  if not spec.startswith("bpe:"):
    return load_tokenizer(spec, end_of_text=end_of_text, add_special_tokens=add_special_tokens)
  path = bpe_path(folder)
  bpe_size(spec)  # checks
  if path.exists() and (not force or not origins):
    return load_tokenizer(spec, folder)
  if not origins:
    raise DataError(
      f"the tokenizer {spec!r} must be trained, but there is no text for it; name the text of"
      " the training sets in data.sources."
    )
  with _alone(path, f"train {spec}", progress):
    if path.exists() and not force:  # by another process
      return load_tokenizer(spec, folder)
    report = Progress(f"train {spec}", sys.stderr if progress else None)
    tokenizer = train_bpe(spec, folder, _sample(origins, report, fields))
    report.close()
  return tokenizer


def text_of(data: DataSettings, name: str) -> tuple[str, list[sources.Input]] | None:
  """The source of a set and its files; None if it is not here, but the token files are.

  Raises:
    DataError: neither is.
  """
  prefix, source = local(data.folder) / name, _source(data, name)
  try:
    if source is None:
      raise DataError(
        f"the set {name!r} has no files {prefix}.bin and {prefix}.idx, and no text to create"
        f" them from; set data.sources[{name!r}]."
      )
    return source, sources.find_inputs(source)
  except DataError:
    if not all(Path(f"{prefix}{end}").exists() for end in (".bin", ".idx")):
      raise
  return None


def check_length(prefix: str | Path, tokens: int, least: int) -> None:
  """Raises DataError if a set of so many tokens has less than `least`, a window's."""
  if tokens < least:
    raise DataError(
      f"{prefix}.bin has {tokens} tokens, but one window of seq_len={least - 1} needs {least}; use"
      f" seq_len={max(tokens - 1, 1)} or less, or more text."
    )


def _prepare_set(
  data: DataSettings, name: str, tokenizer: Tokenizer, options: dict[str, Any]
) -> dict[str, Any] | None:
  prefix, text = local(data.folder) / name, text_of(data, name)
  if text is None:
    sidecar, source = _adopt(prefix, tokenizer), _source(data, name)
    theirs = (sidecar or {}).get("source", [source])
    if options["progress"] and source and theirs != [source]:
      line = f"{name}: {source!r} is not on this machine; {prefix}.bin was created from"
      warn(f"{line} {', '.join(map(repr, theirs))}")
    return sidecar
  return tokenize_to(prefix, [text[0]], tokenizer, rows=rows_of(data, name), **options)


def rows_of(data: DataSettings, name: str) -> Rows:
  """Keys and targets of the rows of the set `name`, by `data.fields` and `data.targets`."""
  usual = MESSAGES if data.targets.get(name) == "assistant" else sources.TEXT_FIELDS
  fields = data.fields.get(name, usual)
  return Rows(fields, data.targets.get(name), getattr(data, "special_tokens", "text"))


def _size(text: tuple[str, list[sources.Input]] | None) -> int:
  return sum(path.stat().st_size for path, _ in text[1]) if text else 0


def _adopt(prefix: Path, tokenizer: Tokenizer) -> dict[str, Any] | None:
  """Checks a pair that cannot be created again here."""
  IndexedDataset(prefix)
  sidecar = read_sidecar(prefix)
  if sidecar and sidecar.get("tokenizer_fingerprint") != tokenizer.fingerprint:
    raise DataError(
      f"{prefix}.bin was tokenized by {sidecar.get('tokenizer')!r}, not by the current"
      f" {tokenizer.spec!r}, and its text is not available to tokenize it again. Set data.tokenizer"
      " to the original one, or name its text in data.sources."
    )
  return sidecar


def _source(data: DataSettings, name: str) -> str | None:
  """Source of the set; "python-stdlib" alone means the split for the set's role."""
  source = data.sources.get(name)
  if source == sources.STDLIB:
    return f"{source}:{'train' if name in data.train else 'validation'}"
  return source


def _sample(
  origins: Sequence[str],
  report: Progress,
  fields: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[str]:
  """Documents of each source, up to its share of BPE_BYTES."""
  for source in origins:
    room = BPE_BYTES // len(origins)
    keys = fields.get(source, sources.TEXT_FIELDS)
    for text in sources.read_documents(source, fields=keys):
      size = len(text.encode())
      yield text if size <= room else text[:room]
      report.add(size)
      room -= size
      if room <= 0:
        break


def _check_name(name: str) -> None:
  if name != Path(name).name or name in ("", ".", "..", bpe_path("").stem):
    raise DataError(
      f"the set {name!r} needs another name: without folders, and not 'tokenizer', because"
      " tokenizer.json is taken."
    )
