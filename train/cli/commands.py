"""The commands of `lnssm-train`. Slow imports are inside the functions."""

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lnssm_jax.files.atomic import named, write_output
from lnssm_jax.files.buckets import local
from train import config
from train.cluster.stop_signal import StopSignal
from train.config import apply_overrides
from train.messages import show, show_generated, show_json

if TYPE_CHECKING:
  from lnssm_jax.pretrained.loaded import LoadedModel

_MAX_PROMPT = 2**26  # bytes


def fit(options: argparse.Namespace) -> int | None:
  """Trains a model; with --print-config or --dry-run only describes the run."""
  for name in ("tokens_per_second", "interconnect"):
    if getattr(options, name) is not None and not options.dry_run:
      raise ValueError(f"--{name.replace('_', '-')} is for --dry-run; add it, or leave it out.")
  if not (options.print_config or options.dry_run):
    code = functools.partial(code_of, stopped_code=options.stopped_code)
    with StopSignal(code) as stop:  # from here on, as what follows may take minutes
      return code(_train(options, stop))
  cfg = run_config(options)
  if options.print_config:
    from train.step.model import model_graph

    model_graph(cfg.model)  # raises for unknown mixers and options
    show_json(config.to_dict(cfg))
    return None
  from train.cli import dry_run
  from train.cluster import distributed

  distributed.join()
  dry_run.describe(cfg, options.tokens_per_second, options.interconnect)
  return None


def _train(options: argparse.Namespace, stop: StopSignal) -> str | None:
  """Trains a model; returns the name of the signal that stopped it."""
  cfg = run_config(options)
  from train.cluster import distributed
  from train.logging import tracing
  from train.trainer import fit

  profile = tracing.steps_of(options.profile) if options.profile else None
  distributed.join()
  flags = {name: getattr(options, name) for name in ("allow_config_change", "verify_data")}
  return fit(cfg, profile=profile, stop=stop, **flags).stopped_by


def sweep(options: argparse.Namespace) -> int | None:
  """Trains the unfinished runs of a sweep, and writes its tables and its plot."""
  from train.sweeps import command

  code = functools.partial(code_of, stopped_code=0)
  trains = not (options.dry_run or options.collect)
  with StopSignal(code) if trains else contextlib.nullcontext() as stop:
    ended = command.run(options, stop)
    return code(ended) if isinstance(ended, str) else ended


def evaluate(options: argparse.Namespace) -> None:
  """Prints the losses of a run on its validation sets, or of any model on given text."""
  from train.runs import evaluation

  if options.input:
    from train.scoring import perplexity

    report = perplexity.lm(_model(options), options.input, key=options.fields)
    rows = report.tables["corpora"]
    show_json(rows) if options.json else show(report.text())
    return
  if _is_saved(options):
    raise ValueError(
      f"{options.run_dir} is a model and has no validation sets; name text by --input."
    )
  rows = evaluation.run(run_config(options), ema=options.ema)
  if options.json:
    show_json(rows)
    return
  width = max(len("set"), *(len(row["set"]) for row in rows))
  show(f"{'set':<{width}}  {'val_loss':>9}  {'bits_per_byte':>13}  {'tokens':>13}")
  for row in rows:
    bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
    show(f"{row['set']:<{width}}  {row['val_loss']:>9.4f}  {bits:>13}  {row['tokens']:>13,}")


def generate(options: argparse.Namespace) -> None:
  """Continues text with the model of a run, an exported or a published one."""
  sources = [x for x in ("prompt", "prompt_file", "prompts") if getattr(options, x)]
  if len(sources) > 1:
    both = " and ".join(f"--{name.replace('_', '-')}" for name in sources)
    raise ValueError(f"{both} are both there; give one of them.")
  if bool(options.prompts) != bool(options.output):
    raise ValueError("--prompts FILE and --output FILE go together: rows in, rows out.")
  if (options.prompt_file or "").endswith((".jsonl", ".ndjson")):
    raise ValueError(
      f"--prompt-file {options.prompt_file} would be one prompt with all rows; for a text for each"
      " row, use --prompts FILE --output FILE."
    )
  from lnssm_jax.pretrained import texts

  loaded, until, special = _model(options), options.stop or (), options.special_tokens
  prompts = options.prompt or [loaded.settings.get("sample", {}).get("prompt", "")]
  if options.prompt_file:
    prompts = [_text_of(options.prompt_file)]
  sampling = loaded.options(
    max_tokens=options.max_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    min_p=options.min_p,
    repetition_penalty=options.repetition_penalty,
    seed=options.seed,
  )
  if options.prompts:
    from train.runs import answers

    given: Any = {"until": until, "special_tokens": special, "ema": options.ema}
    given |= {} if options.batch is None else {"batch": options.batch}
    count = answers.write(loaded, options.prompts, options.output, sampling, **given)
    show(f"{options.output}  {count:,} rows")
    return
  if len(prompts) == 1:
    pieces = loaded.stream(prompts[0], sampling, until=until, special_tokens=special)
    show_generated(prompts[0])
    for piece in pieces:
      show_generated(piece)
    show()
    return
  how: Any = {"until": until, "special_tokens": special}
  answers = texts.complete(loaded.model, loaded.tokenizer, prompts, sampling, **how)
  for number, (prompt, new) in enumerate(zip(prompts, answers, strict=True), 1):
    show_generated(f"--- {number} of {len(prompts)}\n{prompt}{new}", end="\n")


def serve(options: argparse.Namespace) -> None:
  """Serves a model over HTTP."""
  from train.runs import loading
  from train.serving import command

  names = ("host", "port", "slots", "queue", "most_tokens", "prefix_memory")
  loaded = loading.load_model(options.folder, ema=options.ema)
  say = lambda line: show(line, flush=True)
  command.serve(loaded, say=say, **{name: getattr(options, name) for name in names})


def _text_of(file: str) -> str:
  """The text of a file, or of standard input for "-"."""
  if file == "-":
    raw = sys.stdin.buffer.read(_MAX_PROMPT + 1)
  else:  # also a pipe, as of the shell's <(...)
    with named(file), open(file, "rb") as opened:
      raw = opened.read(_MAX_PROMPT + 1)
  if not 0 < len(raw) <= _MAX_PROMPT:
    size = "empty" if not raw else f"longer than {_MAX_PROMPT} bytes"
    raise ValueError(f"--prompt-file {file} is {size}; give a shorter one, or some text.")
  try:
    return raw.decode()
  except UnicodeDecodeError as error:
    raise ValueError(f"--prompt-file {file} is no UTF-8 text: {error}; convert it.") from None


def init(options: argparse.Namespace) -> None:
  """Writes a config file with every setting and its meaning."""
  from train.cli import new_config

  show(new_config.write(options.file))


def tokenize(options: argparse.Namespace) -> None:
  """Creates token files from a config's data or from the given text."""
  if bool(options.config) == bool(options.input):
    raise ValueError(
      "tokenize needs either --config FILE, or --input PATH... --output PREFIX --tokenizer SPEC."
    )
  from train.data import in_bucket, preflight, tokenize

  how = {"workers": options.workers, "progress": True, "force": options.force}
  if options.config:
    cfg = config_of(options)
    if not options.force:
      preflight.require(cfg)
    sidecars = tokenize.prepare(cfg.data, **how, least=preflight.windowed(cfg))
    results = {f"{cfg.data.folder}/{name}": sidecars[name] for name in sidecars}
  else:
    missing = [name for name in ("output", "tokenizer") if not getattr(options, name)]
    if missing:
      raise ValueError(f"--input also needs --{' and --'.join(missing)}.")
    parent, name = os.path.split(options.output)
    in_bucket.fetch(parent, [name])
    folder = local(parent)
    # Also with commas, as in --set data.fields.NAME=prompt,completion.
    fields = tuple(key for word in options.fields or () for key in word.split(","))
    given = {"fields": fields, "targets": options.targets}
    chosen: Any = {key: {name: value} for key, value in given.items() if value}
    names = ("tokenizer", "end_of_text", "add_special_tokens", "special_tokens")
    chosen |= {name: getattr(options, name) for name in names}
    data = config.Data(folder="-", train=(name,), **chosen)  # checks
    tokenizer = tokenize.load_or_train(
      options.tokenizer,
      folder,
      options.input,
      fields=dict.fromkeys(options.input, fields) if fields else {},
      end_of_text=options.end_of_text,
      add_special_tokens=options.add_special_tokens,
      progress=True,
    )
    sidecar = tokenize.tokenize_to(
      folder / name, options.input, tokenizer, rows=tokenize.rows_of(data, name), **how
    )
    in_bucket.publish(parent, [name])
    results = {options.output: sidecar}
  for prefix, sidecar in results.items():
    counts = "unchanged"
    if sidecar is not None:
      counts = ", ".join(f"{sidecar[name]:,} {name}" for name in ("documents", "tokens", "bytes"))
    show(f"{prefix}.bin  {counts}")


def export(options: argparse.Namespace) -> None:
  """Writes the model of a run as safetensors with a manifest."""
  from train.runs import export

  given = {"step": options.step, "ema": options.ema, "layout": options.layout}
  names = {"partitions": "num_partitions", "selected": "num_selected", "margin": "margin"}
  wider = {argument: getattr(options, name) for name, argument in names.items()}
  wider = {argument: value for argument, value in wider.items() if value is not None}
  if wider:
    if options.partitions is None:
      raise ValueError("--selected and --margin need --partitions N, the new number of partitions.")
    given["partitions"] = wider
  manifest = export.export_run(options.folder, options.out, **given)
  if manifest is None:
    show(f"{options.out}  a folder of layout {options.layout}")
  else:
    show(f"{options.out}  {manifest.model['mixer']}, step {manifest.step}")


def import_(options: argparse.Namespace) -> None:
  """Starts a run from an exported model."""
  from train.runs import importing

  cfg = config_of(options)
  step = importing.import_model(options.folder, cfg)
  show(f"{cfg.run_dir}  a new run from the model of {options.folder}, trained for {step} steps")


def inspect(options: argparse.Namespace) -> None:
  """Shows what is in a folder, as text, JSON or a page."""
  from train.inspection import page, report, text

  if options.html and not options.html.absolute().parent.is_dir():
    raise config.ConfigError(f"--html {options.html}: there is no folder {options.html.parent}.")
  found = report.report(
    options.folder,
    step=options.step,
    select=options.select,
    values=not options.shapes,
    compare=options.compare,
    half_lives=options.half_lives,
  )
  if options.html:
    write_output(options.html, page.page(found).encode(errors="replace"))
  if options.json:
    show_json(report.to_json(found))
  elif options.html:
    show(options.html)
  else:
    show("\n".join(text.lines(found)))


def verify(options: argparse.Namespace) -> int:
  """Checks every byte of the checkpoints and of the text; returns 1 if something is damaged."""
  from train.checkpoint import verify
  from train.runs import config_file

  directory = Path(options.folder) / "checkpoints"
  if options.adopt is not None:
    show(verify.adopt(directory, options.adopt))
  lines, whole = verify.report(directory)
  data = config_file.read(options.folder, dict).get("data", {})
  if "folder" in data:  # of a language model
    more, same = verify.data_report(data)
    lines, whole = lines + more, whole and same
  show("\n".join(lines))
  return 0 if whole else 1


def plot(options: argparse.Namespace) -> None:
  """Plots the losses of runs."""
  from train.logging import plot

  show(plot.draw(options.runs, options.output))


def doctor(options: argparse.Namespace) -> int:
  """Checks whether this machine or job can train; returns 1 if there is a problem."""
  cfg = config_of(options) if options.config else None
  from train.cluster import doctor

  return 0 if doctor.examine(cfg, show) else 1


def code_of(stopped_by: str | None, stopped_code: int) -> int:
  """Exit code of a run that has saved: 129 if its terminal or session has ended."""
  if stopped_by is None:
    return 0
  return 128 + signal.SIGHUP if stopped_by == signal.SIGHUP.name else stopped_code


def config_of(options: argparse.Namespace) -> config.Train:
  """Config from --config, with every --set applied."""
  return apply_overrides(config.load_config(options.config), options.set)


def _is_saved(options: argparse.Namespace) -> bool:
  """Whether --run-dir, without --config, is an exported or a published model."""
  from lnssm_jax.pretrained import exports, folders

  path = "" if options.config else options.run_dir
  return bool(path) and (exports.is_exported(path) or folders.is_published(path))


def _model(options: argparse.Namespace) -> "LoadedModel":
  """The model of --run-dir, of any kind, or of --config; --ema: its average."""
  from train.runs import loading

  if not _is_saved(options):
    return loading.of_run(run_config(options), ema=options.ema)
  if options.set:
    raise ValueError(f"--set changes settings of a run; the model {options.run_dir} has none.")
  return loading.load_model(options.run_dir, ema=options.ema)


def run_config(options: argparse.Namespace) -> config.Train:
  """Config from --run-dir or --config, with every --set applied."""
  if bool(options.config) == bool(options.run_dir):
    raise ValueError("use either --run-dir FOLDER (a run of `fit`) or --config FILE.")
  if options.config:
    return config_of(options)
  from train.runs.run_folder import RunFolder

  cfg = RunFolder(options.run_dir).load_config()
  # The folder may have been moved.
  return apply_overrides(dataclasses.replace(cfg, run_dir=options.run_dir), options.set)
