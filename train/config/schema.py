"""The settings of a training run, as frozen, typed, checked dataclasses."""

import dataclasses
import math
import re
from typing import Any, Literal

from lnssm_jax.models.config import ModelConfig
from lnssm_jax.pretrained.manifest import MAX_PATTERN
from train.config.checked import (
  at_least,
  at_most,
  check,
  check_json,
  check_path,
  did_you_mean,
  settings,
  within,
)
from train.config.optimizer import Optimizer

# Beyond any model; larger numbers are mistakes that would fill the memory first.
MOST = {"dim": 2**20, "num_layers": 2**16, "vocab_size": 2**30}


@settings
class Model(ModelConfig):
  """Architecture of the language model and its dtypes: `lnssm_jax.models.ModelConfig`.

  Mixers are given by their names.
  """

  mixer: str | tuple[str, ...] = "lnssm"  # a tuple is a pattern repeated over the layers
  dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of activations; states: float32
  param_dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters and their gradients

  def __post_init__(self):
    for name, most in MOST.items():
      at_most(f"model.{name}", getattr(self, name), most)
    if isinstance(self.mixer, tuple):
      at_most("the number of layers in model.mixer", len(self.mixer), MAX_PATTERN)
    check_json("model.mixer_options", self.mixer_options)
    check_json("model.channel_mixer_options", self.channel_mixer_options)
    with within("model"):
      super().__post_init__()


@settings
class Data:
  """Token files and the text they are tokenized from.

  `train` and `validation` name pairs of files `<folder>/<name>.bin|.idx`. Several training sets are
  read as one, or as a mixture if `train` maps their names to weights. `sources` maps a name to
  the text that is tokenized if its pair is missing: a file, folder or glob, or "python-stdlib" for
  the standard library of the running Python, split into training and validation files.
  `tokenizer` is "bytes", "bpe:N" (trained on the training sources) or the path of a tokenizer.json,
  of a folder with one or with vocab.json and merges.txt, or of the vocabulary of RWKV World, a
  .txt. `end_of_text` is the token of a tokenizer.json that ends each text, if that is not
  tokenizer_config.json's or a usual one.
  `add_special_tokens="file"` puts around each text, and around prompts that the model reads, what
  the tokenizer's files say, such as BOS (a post-processor, `add_bos_token`, `add_eos_token`);
  "none" puts nothing there. Special tokens spelled out in a text are ordinary text, or with
  `special_tokens="parse"`, for text that you trust, such as chats, one token each.

  With `stream=True` the one training set has no token files: its source is read, and encoded, while
  the run trains (`train.data.streams`). It may then also be "MODULE:FUNCTION" of a function that
  returns documents: a generator, or a dataset with rows by number.

  `fields` maps a set to the keys of its rows in .jsonl: that of the text, or those of a prompt and
  its completion; without it a row has "text". `targets` maps a set to the tokens that the loss
  counts: "all" (of a text, without it), "completion" (of prompts, without it), "last", the last
  token of each row, or "assistant": the rows have "messages", of which the chat template next to
  the tokenizer makes the text, and the replies count, but those with `"weight": 0`. Three keys are
  those of a prompt, or with "assistant" of messages, and of the answers that were chosen and
  rejected: `preference` has their loss.

  At a document boundary `boundaries="reset"` resets the state, and the target across it does not
  count; "ignore" does neither. `order` is "windows", of which each occurs once per epoch, or
  "random_crops", which start anywhere; a set of rows, with two `fields` or with `targets`, has
  windows of whole rows in either order, a state for each. `weighting` of a validation loss:
  "tokens", their mean in windows of the training length; "crops", the same of random crops,
  `eval_tokens` tokens in all, drawn by `seed` and the same in every evaluation; or "documents", the
  mean of the documents' mean losses, each alone and cut to its first `document_length` tokens.
  """

  folder: str  # of the token files
  tokenizer: str  # "bytes", "bpe:N" or a path
  end_of_text: str | None = None  # a token of the tokenizer's file; None: the usual one
  add_special_tokens: Literal["file", "none"] = "file"  # around each text
  special_tokens: Literal["text", "parse"] = "text"  # spelled out in a text
  train: tuple[str, ...] | dict[str, float]  # names, or weights by name
  validation: tuple[str, ...] = ()  # names
  sources: dict[str, str] = dataclasses.field(default_factory=dict)  # text by name
  stream: bool = False  # encode the training text while it is read, without token files
  fields: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # keys of rows
  # Tokens that the loss counts.
  targets: dict[str, Literal["all", "completion", "last", "assistant"]] = dataclasses.field(
    default_factory=dict
  )
  boundaries: Literal["reset", "ignore"] = "reset"  # of documents
  order: Literal["windows", "random_crops"] = "windows"  # of training
  pack_rows: bool = True  # several rows in a window of training, or one
  weighting: Literal["tokens", "crops", "documents"] = "tokens"  # of a validation loss
  document_length: int | None = None  # None: seq_len

  def __post_init__(self):
    check(self.folder != "", "data.folder is empty; give the folder of the token files.")
    check(
      self.tokenizer != "",
      "data.tokenizer is empty; give 'bytes', 'bpe:N' or the path of a tokenizer.json.",
    )
    check_path("data.folder", self.folder, in_bucket=True)
    check_path("data.tokenizer", self.tokenizer)
    for name, source in self.sources.items():
      check_path(f"data.sources.{name}", source)
    least = self.least_vocab_size
    check(
      least is None or self.end_of_text is None,
      f"data.end_of_text={self.end_of_text!r} is a token of a file, but"
      f" data.tokenizer={self.tokenizer!r} has an end of its own; leave it out.",
    )
    check(
      least is None or least > 256,
      f"data.tokenizer={self.tokenizer!r} is too small: 256 bytes and the end of text need at"
      " least 257 entries.",
    )
    if self.document_length is not None:
      at_least("data.document_length", self.document_length, 2)
      check(
        self.weighting == "documents",
        f"data.document_length={self.document_length} belongs to data.weighting='documents'; leave"
        " it out, or choose that.",
      )
    check(len(self.train) > 0, "data.train is empty; name at least one set to train on.")
    for group in ("train", "validation"):
      names = getattr(self, group)
      for name in names:
        check(
          re.fullmatch(r"\w[\w.-]*", name) is not None and len(name.encode()) <= 200,
          f"data.{group} holds {name!r:.80}, which is not a plain file name; put folders in"
          " data.folder, and the text of a set in data.sources.",
        )
      check(len(set(names)) == len(names), f"data.{group}={names} names a set twice.")
    for name, weight in self.train.items() if isinstance(self.train, dict) else ():
      check(
        0 < weight < math.inf,
        f"data.train.{name}={weight} is the weight of a set in the mixture; it must be positive.",
      )
    known = dict.fromkeys((*self.train, *self.validation))
    for group in ("sources", "fields", "targets"):
      for name in getattr(self, group):
        check(
          name in known,
          f"data.{group} has {name!r}, which is in neither data.train nor data.validation"
          f"{did_you_mean(name, known)} To use other sets, remove the entry, or all of them by"
          f" --set 'data.{group}={{}}'.",
        )
    for name, keys in self.fields.items():
      check(
        len(keys) in (1, 2, 3) and all(keys) and len({*keys}) == len(keys),
        f"data.fields.{name}={keys} must be the key of a text, such as ('text',), those of a prompt"
        " and its completion, or those of a prompt, the chosen answer and the rejected one, none of"
        " them twice.",
      )
    pairs = [name for name in self.train if self.documents_of_rows(name) == 2]
    check(
      len(pairs) in (0, len(self.train)),
      f"data.train={tuple(self.train)} has pairs of answers in {', '.join(pairs)} only, but a run"
      " has one loss; give three data.fields for each set, or for none.",
    )
    pairs += [name for name in self.validation if self.documents_of_rows(name) == 2]
    check(
      not pairs or self.weighting != "documents",
      f"data.weighting='documents' has no loss of pairs, which are in {', '.join(pairs)}; use"
      " 'tokens' or 'crops'.",
    )
    if self.stream:
      self._check_stream()
    for name, which in self.targets.items():
      check(
        which != "assistant" or len(self.fields.get(name, ("messages",))) != 2,
        f"data.targets.{name}='assistant' needs one key in data.fields.{name}, that of the"
        " messages, or three, with those of two answers.",
      )
      check(
        which != "completion" or len(self.fields.get(name, ())) >= 2,
        f"data.targets.{name}='completion' needs data.fields.{name} with two keys, those of a"
        " prompt and its completion.",
      )
      check(
        which in ("completion", "assistant") or len(self.fields.get(name, ())) < 3,
        f"data.targets.{name}={which!r} does not go with the two answers of data.fields.{name}; use"
        " 'completion' or 'assistant'.",
      )

  def _check_stream(self) -> None:
    for wrong, what in (
      (len(self.train) != 1, f"data.train={self.train}; name one set"),
      (not self.sources.keys() >= set(self.train), "no data.sources of the training set; name it"),
      (bool(set(self.train) & set(self.validation)), "its set in data.validation; use another"),
      (any(map(self.has_rows, self.train)), "rows with prompts or targets; use token files"),
      (self.order != "windows", f"data.order={self.order!r}; use 'windows'"),
      (
        self.tokenizer.startswith("bpe:"),
        f"data.tokenizer={self.tokenizer!r}, which is trained on token files' text; use a file",
      ),
    ):
      check(not wrong, f"data.stream=True cannot be used with {what}.")

  @property
  def token_sets(self) -> tuple[str, ...]:
    """Names of the sets that have token files, those of training first."""
    return tuple(dict.fromkeys((*(() if self.stream else self.train), *self.validation)))

  def has_rows(self, name: str) -> bool:
    """Whether a set has rows of prompts or messages, which windows hold whole."""
    return self.documents_of_rows(name) > 0

  def documents_of_rows(self, name: str) -> int:
    """The documents of each row of a set: 2 of a pair of answers; 0 if it has no such rows."""
    keys = len(self.fields.get(name, ()))
    return 2 if keys == 3 else int(keys == 2 or self.targets.get(name, "all") != "all")

  @property
  def has_pairs(self) -> bool:
    """Whether the training sets have pairs of answers."""
    return any(self.documents_of_rows(name) == 2 for name in self.train)

  @property
  def least_vocab_size(self) -> int | None:
    """Vocabulary size that the tokenizer's name implies ("bytes", "bpe:4096"), else None."""
    if self.tokenizer == "bytes":
      return 257
    if not self.tokenizer.startswith("bpe:"):
      return None
    size = self.tokenizer.removeprefix("bpe:")
    check(
      size.isascii() and size.isdecimal(),
      f"data.tokenizer={self.tokenizer!r} has no vocabulary size; write for example 'bpe:4096'.",
    )
    return int(size)


@settings
class Preference:
  """The loss of sets whose rows have two answers, DPO (Rafailov et al. 2023), a mean over pairs.

  With u = beta (r(chosen) - r(rejected)), where r(y) is the log-probability of an answer minus that
  under the model before the first step, a pair's loss is
  -(1 - label_smoothing) log sigmoid(u) - label_smoothing log sigmoid(-u).
  """

  beta: float = 0.1  # how strongly the model is kept near the one before the first step
  label_smoothing: float = 0.0  # probability that a pair is labeled the wrong way round

  def __post_init__(self):
    check(self.beta > 0, f"preference.beta={self.beta} must be positive; 0.1 is usual.")
    check(
      0 <= self.label_smoothing < 0.5,
      f"preference.label_smoothing={self.label_smoothing} must be in [0, 0.5).",
    )


@settings
class Mesh:
  """Devices per mesh axis; -1 takes all that remain.

  `data` replicates the parameters and shards the batch; `fsdp` shards both; `sequence` replicates
  the parameters and shards time, so it must divide the sequence length; `tensor` replicates the
  batch and shards heads and channels, that is each layer's parameters and matrix products; `expert`
  shards the batch, and the experts of the channel mixer "moe".
  """

  data: int = -1  # shards of the batch
  fsdp: int = 1  # shards of the batch and of the parameters
  sequence: int = 1  # shards of time
  tensor: int = 1  # shards of heads and channels
  expert: int = 1  # shards of the batch and of experts

  def __post_init__(self):
    sizes = dataclasses.asdict(self)
    for axis, size in sizes.items():
      check(size == -1 or size >= 1, f"mesh.{axis}={size} must be positive, or -1 for the rest.")
    rest = [f"mesh.{axis}" for axis, size in sizes.items() if size == -1]
    check(
      len(rest) <= 1,
      f"{' and '.join(rest)} are all -1, but only one axis can take the devices that remain.",
    )


@settings
class Sample:
  """Text generation, by default at the end of a run."""

  prompt: str = ""  # empty: a new document
  tokens: int = 200  # at most; 0 writes none
  temperature: float = 0.8  # 0 takes the most likely token
  top_p: float | None = 0.95  # nucleus sampling
  top_k: int | None = None  # only the most likely tokens

  def __post_init__(self):
    at_least("sample.tokens", self.tokens, 0)
    at_least("sample.temperature", self.temperature, 0)
    check(
      self.top_p is None or 0 < self.top_p <= 1,
      f"sample.top_p={self.top_p} must be in (0, 1], or be None.",
    )
    check(
      self.top_k is None or self.top_k >= 1,
      f"sample.top_k={self.top_k} must be at least 1, or be None.",
    )


@settings
class Train:
  """One training run."""

  model: Model
  optimizer: Optimizer
  data: Data
  preference: Preference = dataclasses.field(default_factory=Preference)
  mesh: Mesh = dataclasses.field(default_factory=Mesh)
  run_dir: str  # folder that the run writes into
  steps: int  # updates of the parameters
  seed: int = 0  # of initial values, order of the data, dropout
  seq_len: int  # tokens per sequence
  global_batch: int  # sequences per step, over all devices and microbatches
  accumulate: int = 1  # microbatches per step
  checkpoint_every: int  # steps
  eval_every: int  # steps
  eval_at_start: bool = True  # before the first step too
  eval_tokens: int | None = None  # first of each validation set, or in its crops; None: all of it
  log_every: int = 10  # steps
  keep_checkpoints: int = 2  # the newest
  max_skipped: int = 10  # consecutive skipped steps (non-finite or spikes) that end the run
  skip_spikes: float | None = None  # skip steps this many standard deviations above the mean
  loss_chunk: int | None = None  # tokens whose logits are in memory at once; None: 512 MiB or less
  watch: tuple[Literal["tensorboard", "wandb"], ...] = ()  # in addition to metrics.jsonl
  run_name: str | None = None  # in what `watch` names; None: the name of run_dir
  run_group: str | None = None  # runs to be compared there
  run_tags: tuple[str, ...] = ()  # by which runs are found there
  # {"MODULE:FUNCTION": its options}: what is called at evaluations (`train.callbacks`).
  callbacks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
  # Folder of compiled programs; runs may share one. "run": in the run folder, unless JAX has one.
  compile_cache: str | None = "run"
  sample: Sample = dataclasses.field(default_factory=Sample)

  def __post_init__(self):
    check(len(set(self.watch)) == len(self.watch), f"watch={self.watch} names one twice.")
    for name, options in self.callbacks.items():
      check(
        re.fullmatch(r"[\w.]+:\w+", name) is not None,
        f"callbacks has {name!r}, which is no MODULE:FUNCTION, such as"
        " 'train.callbacks:early_stopping'.",
      )
      check_json(f"callbacks.{name}", options)
    check(self.compile_cache != "", "compile_cache is empty; give a folder, or None.")
    check_path("compile_cache", self.compile_cache or "")
    check(self.run_dir != "", "run_dir is empty; give the folder that the run writes into.")
    check_path("run_dir", self.run_dir, in_bucket=True)
    positive = "steps seq_len global_batch accumulate checkpoint_every eval_every log_every"
    for name in (*positive.split(), "keep_checkpoints", "max_skipped"):
      at_least(name, getattr(self, name), 1)
    if self.eval_tokens is not None:
      at_least("eval_tokens", self.eval_tokens, 1)
      check(
        self.data.weighting != "documents",
        f"eval_tokens={self.eval_tokens} counts tokens, and data.weighting='documents' does not;"
        " leave one of them out.",
      )
    check(
      self.data.weighting != "crops" or self.eval_tokens is not None,
      "data.weighting='crops' has no end; give eval_tokens, the tokens of all crops together.",
    )
    at_most("steps", self.steps, 2**31 - 1)
    check(
      self.global_batch * self.seq_len < 2**31,
      f"global_batch={self.global_batch} times seq_len={self.seq_len} must be below 2**31 tokens"
      " per step; make one of them smaller.",
    )
    if self.loss_chunk is not None:
      at_least("loss_chunk", self.loss_chunk, 1)
    check(
      self.skip_spikes is None or self.skip_spikes > 0,
      f"skip_spikes={self.skip_spikes} must be positive (6 is usual); None skips no spikes.",
    )
    check(0 <= self.seed < 2**32, f"seed={self.seed} must be in [0, 2**32).")
    check(
      self.global_batch % self.accumulate == 0,
      f"global_batch={self.global_batch} cannot be split into accumulate={self.accumulate} equal"
      " microbatches; use a multiple.",
    )
    rank, dtype = self.optimizer.lora_rank, self.model.param_dtype
    check(
      rank is None or dtype == "float32",
      f"optimizer.lora_rank={rank} adds small numbers to model.param_dtype={dtype!r}, which would"
      " lose them; use model.param_dtype='float32'.",
    )
    check(
      not self.data.has_pairs or not (self.optimizer.z_loss or self.optimizer.logit_penalty),
      f"optimizer.z_loss={self.optimizer.z_loss} and optimizer.logit_penalty="
      f"{self.optimizer.logit_penalty} are no part of the loss of pairs (data.fields); use 0.",
    )
    warmup = self.optimizer.warmup_steps
    check(
      warmup < self.steps,
      f"optimizer.warmup_steps={warmup} leaves no step of steps={self.steps} after the warmup.",
    )
    decay = self.optimizer.decay_steps or 0
    check(
      warmup + decay <= self.steps,
      f"optimizer.warmup_steps={warmup} and optimizer.decay_steps={decay} are more than"
      f" steps={self.steps}; make one of them shorter.",
    )
    least = self.data.least_vocab_size
    check(
      least is None or self.model.vocab_size >= least,
      f"model.vocab_size={self.model.vocab_size} is smaller than the {least} entries of"
      f" data.tokenizer={self.data.tokenizer!r}; use model.vocab_size={least}.",
    )
