"""Dataclasses whose constructors check field names and types, with helpful errors."""

import contextlib
import dataclasses
import difflib
import functools
import math
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from lnssm_jax.files import buckets
from lnssm_jax.files.checked_json import MAX_DEPTH
from lnssm_jax.files.printable import PrintableError, printable

# Usual names in other libraries, and what they are here.
_ELSEWHERE = {
  name: setting
  for setting, names in {
    "'optimizer.peak_lr'": "lr learning_rate max_lr peak_learning_rate base_lr",
    "'optimizer.final_lr'": "min_lr end_lr final_learning_rate",
    "'optimizer.schedule'": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "'optimizer.warmup_steps'": "warmup num_warmup_steps lr_warmup_steps",
    "'optimizer.weight_decay'": "wd decay",
    "'optimizer.clip_norm'": "max_grad_norm grad_clip gradient_clipping clip_grad",
    "'optimizer.name'": "optim optimizer_name",
    "'optimizer.b1'": "beta1 adam_beta1",
    "'optimizer.b2'": "beta2 adam_beta2",
    "'optimizer.b1' and b2": "betas",
    "'optimizer.eps'": "epsilon adam_epsilon",
    "'optimizer.ema_decay'": "ema",
    "'global_batch', the sequences of one step": "batch_size train_batch_size batch bs",
    "'accumulate'": "gradient_accumulation_steps grad_accum accumulation_steps",
    "'steps'": "max_steps num_steps train_steps total_steps iterations num_iterations",
    "'steps', the number of batches": "epochs num_epochs num_train_epochs",
    "'seq_len'": "sequence_length max_length max_seq_len block_size context_length seqlen",
    "'eval_every'": "eval_interval eval_steps",
    "'checkpoint_every'": "save_every save_steps save_interval checkpoint_interval",
    "'keep_checkpoints'": "save_total_limit max_to_keep",
    "'run_dir'": "output_dir out_dir save_dir log_dir",
    "'watch', such as watch=wandb": "report_to logger wandb tensorboard",
    "'model.dim'": "d_model hidden_size hidden_dim n_embd embed_dim width",
    "'model.num_layers'": "n_layers n_layer num_hidden_layers depth",
    "'model.num_heads'": "n_heads n_head num_attention_heads heads",
    "'model.channel_hidden'": "intermediate_size ffn_dim mlp_dim d_ff",
    "'model.channel_mixer'": "mlp ffn activation",
    "'model.initialization'": "kernel_init weight_init init_method",
    "'model.mixer'": "attention model_type arch layer_type mixers",
    "'model.residual_dropout' (also embedding_dropout, drop_path)": "dropout dropout_rate",
    "'model.dtype'": "precision mixed_precision bf16",
    "'model.remat'": "gradient_checkpointing checkpointing",
    "'model.tie_embeddings'": "tie_word_embeddings weight_tying",
    "'data.train'": "dataset train_data train_files datasets",
    "'data.train', a dictionary of weights by set": "weights mixture mixture_weights",
    "'data.fields', the keys of the rows of a set": "text_key text_column text_field columns",
    "'data.tokenizer'": "tokenizer_path tokenizer_name tokenizer_file vocab_file",
    "'data.stream'": "streaming stream",
    "'eval_tokens'": "eval_batches eval_iters max_eval_batches limit_val_batches",
    "'data.validation'": "val_data eval_dataset eval_data validation_files",
  }.items()
  for name in names.split()
}

_MOST_OPTIONS = 500  # that are compared with a wrong name

# Bytes, with room for the names inside a run folder.
MAX_NAME, MAX_PATH = 255, 3800


class ConfigError(PrintableError, ValueError):
  """Unknown, missing, wrongly typed or inconsistent setting; the message names it."""


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def settings[T](cls: type[T]) -> type[T]:
  """Turns `cls` into a frozen keyword-only dataclass whose constructor checks names and types.

  A plain dataclass would accept `dim=5.5` and raise a TypeError without a suggestion for a
  misspelled name. Rules between settings belong in `__post_init__`, which runs afterwards.
  """
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  build = cls.__init__

  def __init__(self, /, **values: Any) -> None:
    build(self, **_checked(cls, values))

  cls.__init__ = __init__  # pyrefly: ignore[bad-assignment]
  return cls


@contextlib.contextmanager
def within(section: str) -> Iterator[None]:
  """Converts a ValueError that begins with a setting's name to a ConfigError with its section."""
  try:
    yield
  except ValueError as error:
    raise ConfigError(f"{section}.{error}") from None


def check(rule: bool, message: str) -> None:
  """Raises `ConfigError(message)` unless `rule` holds."""
  if not rule:
    raise ConfigError(message)


def at_least(label: str, value: float, least: int) -> None:
  """Raises `ConfigError` unless `value`, the setting called `label`, is `least` or more."""
  check(value >= least, f"{label}={value} must be at least {least}.")


def at_most(label: str, value: float, most: int) -> None:
  """Raises `ConfigError` unless `value`, the setting called `label`, is `most` or less."""
  check(value <= most, f"{label}={value} must be at most {most}.")


def check_path(label: str, value: str, *, in_bucket: bool = False) -> None:
  """Raises `ConfigError` unless `value`, the setting called `label`, can be a path.

  Args:
    in_bucket: whether it may be a folder in a bucket.
  """
  supported = in_bucket and buckets.is_bucket(value)
  check(supported or not buckets.is_address(value), buckets.no_address(label, value, in_bucket))
  if supported:
    with contextlib.suppress(buckets.BucketError):
      value = str(buckets.local(value))
  check("\0" not in value, f"{label}={value!r:.80} has a null character, as no path does.")
  check(
    not any("\ud800" <= x <= "\udfff" for x in value),
    f"{label}={value!r:.80} is not UTF-8, as JSON and the packages that read it need; rename it.",
  )
  longest = max((part for part in value.split("/")), key=len)
  name, whole = (len(text.encode(errors="replace")) for text in (longest, value))
  check(
    name <= MAX_NAME and whole <= MAX_PATH,
    f"{label}={value[:40]!r}... is too long for a path: it has {whole} bytes, and a name of {name};"
    f" {MAX_PATH} and {MAX_NAME} are the most.",
  )


def check_json(label: str, value: Any, depth: int = 0) -> None:
  """Rejects values that a round trip through JSON would change, or that its readers reject."""
  check(
    depth <= MAX_DEPTH,
    f"{label[:80]}... is nested too deeply: in more than {MAX_DEPTH} lists and dictionaries.",
  )
  if isinstance(value, dict):
    for key, item in value.items():
      check(isinstance(key, str), f"{label} has the key {key!r}; keys are strings.")
      check_json(f"{label}.{key}", item, depth + 1)
  elif isinstance(value, list):
    for i, item in enumerate(value):
      check_json(f"{label}[{i}]", item, depth + 1)
  else:
    plain = value is None or type(value) in (str, bool, int, float)
    check(
      plain and (type(value) is not float or math.isfinite(value)),
      f"{label}={value!r} cannot be stored as JSON; use finite numbers, strings, booleans, None,"
      " lists and dictionaries.",
    )


def did_you_mean(name: str, options: Iterable[str]) -> str:
  """Suffix of an error message: the closest of `options`, or the first if none is close.

  Names from elsewhere can be many and long: only the first are compared.
  """
  options = list(options)
  known = [printable(option, 200) for option in options[:_MOST_OPTIONS]]
  near = difflib.get_close_matches(name[:200], known, 1)
  if near:
    return f"; did you mean {near[0]!r}?"
  more = len(options) - len(known)
  return f"; known are {', '.join(known)}{f' and {more:,} more' if more else ''}."


def unknown(cls: type, name: str) -> ConfigError:
  """Error for a setting that `cls` does not have, with the closest known name, or ours for it."""
  label = _label(cls, name)
  ours = _ELSEWHERE.get(name)
  if ours is not None and _has(cls, ours.split("'")[1]):
    return ConfigError(f"no setting {label!r}; here it is {ours}.")
  fields = [f.name for f in dataclasses.fields(cls)]
  inside = [g for g in _groups(cls) if name in hints_of(hint_of(cls, g))]
  if inside and not difflib.get_close_matches(name, fields, 1, 0.8):
    return ConfigError(f"no setting {label!r}; did you mean '{inside[0]}.{name}'?")
  return ConfigError(f"no setting {label!r} in {cls.__name__}{did_you_mean(name, fields)}")


@functools.cache
def hints_of(cls: type) -> Mapping[str, Any]:
  """Declared types of all settings of `cls`. Reading them is slow."""
  return types.MappingProxyType(typing.get_type_hints(cls))


def hint_of(cls: type, name: str) -> Any:
  """Declared type of setting `name` of `cls`."""
  return hints_of(cls)[name]


def coerce(value: Any, hint: Any, label: str) -> Any:
  """Converts `value` to type `hint` by lossless conversions only: int to float, list to tuple.

  Raises:
    ConfigError: the message names `label`, the expected type and the value.
  """
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any or (value is None and hint is types.NoneType):
    return value
  if origin in (typing.Union, types.UnionType):
    kinds = {tuple: tuple | list, dict: Mapping}
    kind = lambda a: Mapping if dataclasses.is_dataclass(a) else kinds.get(typing.get_origin(a), ())
    of_kind = [a for a in args if isinstance(value, kind(a))]
    if len(of_kind) == 1:  # whose error says what is wrong inside
      return coerce(value, of_kind[0], label)
    for option in sorted(args, key=lambda a: a is not type(value)):  # an exact match first
      try:
        return coerce(value, option, label)
      except ConfigError:
        continue
  elif origin is Literal:
    check(value in args, f"{label}={value!r} is not a choice{did_you_mean(str(value), args)}")
    return value
  elif dataclasses.is_dataclass(hint):
    if isinstance(value, Mapping):
      return hint(**value)
    if isinstance(value, typing.cast(type, hint)):
      return value
  elif origin is tuple and isinstance(value, tuple | list):
    return tuple(coerce(item, args[0], f"{label}[{i}]") for i, item in enumerate(value))
  elif origin is dict and isinstance(value, Mapping):
    return {coerce(k, args[0], label): coerce(v, args[1], f"{label}.{k}") for k, v in value.items()}
  elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
    check(abs(value) <= sys.float_info.max, f"{label}={value} must be a finite number.")
    return float(value)
  elif type(value) is hint:  # exact, because a bool is an int to isinstance
    return value
  raise ConfigError(f"{label} wants {type_name(hint)}, got {value!r}.")


def type_name(hint: Any) -> str:
  """Readable name of the type `hint` for error messages."""
  args = typing.get_args(hint)
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    return " or ".join(type_name(a) for a in args)
  if args:
    return str(hint).replace("typing.", "")
  if dataclasses.is_dataclass(hint):
    return f"{typing.cast(type, hint).__name__}(...)"
  return "None" if hint is types.NoneType else hint.__name__


def _checked(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
  hints = hints_of(cls)
  for name in values:
    if name not in hints:
      raise unknown(cls, name)
  for field in dataclasses.fields(cls):
    required = field.default is field.default_factory is dataclasses.MISSING
    check(
      field.name in values or not required,
      f"{_label(cls, field.name)} is missing; it wants {type_name(hints[field.name])}.",
    )
  return {name: coerce(value, hints[name], _label(cls, name)) for name, value in values.items()}


def _has(cls: type, path: str) -> bool:
  """Whether there is a setting such as "model.dim", as far as `cls` knows: a group has its own."""
  group, _, name = path.rpartition(".")
  if not _groups(cls):
    return group != cls.__name__.lower() or name in hints_of(cls)
  return name in hints_of(hint_of(cls, group) if group else cls)


def _groups(cls: type) -> list[str]:
  return [f.name for f in dataclasses.fields(cls) if dataclasses.is_dataclass(hint_of(cls, f.name))]


def _label(cls: type, name: str) -> str:
  """Command-line name of the setting: 'steps', 'model.dim'.

  Settings of a group class are prefixed by the group's name, those of the top class are not.
  """
  return name if _groups(cls) else f"{cls.__name__.lower()}.{name}"
