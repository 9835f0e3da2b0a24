"""The command line, python -m train: fit, evaluate, generate, tokenize, verify, plot, doctor."""

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lnssm_jax
from train import config, overrides

EXAMPLES = """\
examples:
  python -m train fit --config configs/quickstart.py
  python -m train fit --config configs/quickstart.py --set steps=1000 --set run_dir=runs/longer
  python -m train evaluate --run-dir runs/quickstart
  python -m train generate --run-dir runs/quickstart --prompt 'def '
  python -m train tokenize --input TEXT --output data/text --tokenizer bytes
  python -m train verify runs/quickstart
  python -m train plot runs/quickstart runs/longer --output compared.png
  python -m train doctor --config configs/quickstart.py
"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit code: 0 done, 1 failed on the way, 2 wrong use.

  One process of several that fails ends here, with that code, and does not wait for the others.
  """
  parser = _parser()
  options = parser.parse_args(arguments)
  if options.command is None:
    parser.print_help()
    return 0
  try:
    return options.run(options) or 0
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  except BrokenPipeError:  # whoever reads the output, such as `head`, has enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  except Exception as error:
    code = _exit_code(error)
    if code is None:
      if not _is_joined():
        raise
      traceback.print_exc()
    else:
      print(f"error: {error}", file=sys.stderr)
    if _is_joined():
      _leave(code or 1)
    return code or 1
  return 0


def _fit(options: argparse.Namespace) -> None:
  cfg = overrides.apply(config.load_config(options.config), options.set)
  if options.print_config:
    print(json.dumps(config.to_dict(cfg), indent=2))
    return
  from train import distributed
  from train.loop import fit

  distributed.join()
  fit(cfg, allow_config_change=options.allow_config_change)


def _evaluate(options: argparse.Namespace) -> None:
  from train import evaluate

  rows = evaluate.run(_run_config(options))
  if options.json:
    print(json.dumps(rows, indent=2))
    return
  width = max(len("set"), *(len(row["set"]) for row in rows))
  print(f"{'set':<{width}}  {'val_loss':>9}  {'bits_per_byte':>13}  {'tokens':>13}")
  for row in rows:
    bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
    print(f"{row['set']:<{width}}  {row['val_loss']:>9.4f}  {bits:>13}  {row['tokens']:>13,}")


def _generate(options: argparse.Namespace) -> None:
  cfg = _run_config(options)
  changes = {
    "tokens": options.max_tokens,
    "temperature": options.temperature,
    "top_k": options.top_k,
    "top_p": options.top_p,
  }
  changes = {name: value for name, value in changes.items() if value is not None}
  settings = dataclasses.replace(cfg.sample, **changes)
  prompts = options.prompt or [settings.prompt]
  if options.prompt and "" in options.prompt:
    raise ValueError("--prompt is empty; give some text, or leave it out to begin a new document.")
  from train import sample

  model, tokenizer = sample.load(cfg)
  if len(prompts) == 1:
    pieces = sample.stream(model, tokenizer, prompts[0], settings, options.seed)
    print(prompts[0], end="", flush=True)
    for piece in pieces:
      print(piece, end="", flush=True)
    print()
    return
  texts = sample.complete(model, tokenizer, prompts, settings, options.seed)
  for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
    print(f"--- {number} of {len(prompts)}\n{prompt}{text}")


def _tokenize(options: argparse.Namespace) -> None:
  if bool(options.config) == bool(options.input):
    raise ValueError(
      "tokenize needs either --config FILE, or --input PATH... --output PREFIX --tokenizer SPEC."
    )
  from train.data import tokenize, tokenizers

  how = {"workers": options.workers, "progress": True, "force": options.force}
  if options.config:
    cfg = overrides.apply(config.load_config(options.config), options.set)
    sidecars = tokenize.prepare(cfg.data, **how)
    results = {str(Path(cfg.data.folder) / name): sidecars[name] for name in sidecars}
  else:
    missing = [name for name in ("output", "tokenizer") if not getattr(options, name)]
    if missing:
      raise ValueError(f"--input also needs --{' and --'.join(missing)}.")
    folder = Path(options.output).parent
    tokenizer = tokenizers.load_tokenizer(options.tokenizer, folder)
    sidecar = tokenize.tokenize_to(options.output, options.input, tokenizer, **how)
    results = {options.output: sidecar}
  for prefix, sidecar in results.items():
    counts = "kept as it is"
    if sidecar is not None:
      counts = ", ".join(f"{sidecar[name]:,} {name}" for name in ("documents", "tokens", "bytes"))
    print(f"{prefix}.bin  {counts}")


def _verify(options: argparse.Namespace) -> int:
  from train import verify

  if options.adopt is not None:
    print(verify.adopt(options.folder, options.adopt))
  lines, whole = verify.report(options.folder)
  print("\n".join(lines))
  return 0 if whole else 1


def _plot(options: argparse.Namespace) -> None:
  from train import plot

  plot.draw(options.runs, options.output)
  print(options.output)


def _doctor(options: argparse.Namespace) -> int:
  cfg = None
  if options.config:
    cfg = overrides.apply(config.load_config(options.config), options.set)
  from train import doctor

  return 0 if doctor.examine(cfg, print) else 1


def _run_config(options: argparse.Namespace) -> config.Train:
  """The settings from --run-dir or --config, with every --set done."""
  if bool(options.config) == bool(options.run_dir):
    raise ValueError("give either --run-dir FOLDER (a run of `fit`) or --config FILE.")
  if options.config:
    return overrides.apply(config.load_config(options.config), options.set)
  from train.run_folder import RunFolder

  cfg = RunFolder(options.run_dir).load_config()
  # The folder may have been moved since.
  return overrides.apply(dataclasses.replace(cfg, run_dir=options.run_dir), options.set)


def _exit_code(error: Exception) -> int | None:
  """2 for what the user can mend, 1 for what failed on the way, None for a fault of the program."""
  code = getattr(error, "exit_code", None)
  if code is not None or isinstance(error, config.ConfigError):
    return code or 2
  # A ValueError from inside JAX or another library is no message for users, but a fault of ours.
  place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
  packages = (Path(module.__file__ or "").parent for module in (config, lnssm_jax))
  is_ours = any(place.is_relative_to(package) for package in packages)
  is_users = isinstance(error, ValueError | FileNotFoundError | PermissionError)
  return 2 if is_ours and is_users else None


def _leave(code: int) -> NoReturn:
  """Ends a process whose peers wait for it: its launcher then ends them."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _is_joined() -> bool:
  """Whether other processes would wait for this one; nothing is imported to find out."""
  module = sys.modules.get("train.distributed")
  return module is not None and module.count() > 1


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="python -m train",
    description="Train, evaluate and use language models whose cost is linear in length.",
    epilog=EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

  def plain(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> Any:
    added = commands.add_parser(name, help=help, description=help)
    added.set_defaults(run=run)
    return added

  def command(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> Any:
    added = plain(name, run, help)
    added.add_argument(
      "--config", metavar="FILE", required=name == "fit", help="Python file with get_config()"
    )
    added.add_argument(
      "--set",
      metavar="A.B=VALUE",
      action="append",
      default=[],
      help="change a setting (repeatable)",
    )
    if name in ("evaluate", "generate"):
      added.add_argument("--run-dir", metavar="FOLDER", help="a run of `fit`, instead of --config")
    return added

  fit = command("fit", _fit, "Train a model, or go on with a run that was stopped.")
  fit.add_argument("--print-config", action="store_true", help="print the settings and do nothing")
  fit.add_argument(
    "--allow-config-change",
    action="store_true",
    help="continue a run although its settings or its text have changed",
  )
  evaluate = command("evaluate", _evaluate, "Print the loss of a run on its validation sets.")
  evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
  generate = command("generate", _generate, "Continue text with the model of a run.")
  generate.add_argument(
    "--prompt", metavar="TEXT", action="append", help="what to continue (repeatable)"
  )
  generate.add_argument("--max-tokens", type=int, metavar="N", help="at most this many new tokens")
  generate.add_argument(
    "--temperature", type=float, metavar="T", help="0 takes the likeliest token"
  )
  generate.add_argument(
    "--top-k", type=int, metavar="K", help="choose among the K likeliest tokens"
  )
  generate.add_argument("--top-p", type=float, metavar="P", help="choose among this share; 1: all")
  generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the choices")
  tokenize = command("tokenize", _tokenize, "Make token files from text.")
  tokenize.add_argument("--input", nargs="+", metavar="PATH", help="files or folders of text")
  tokenize.add_argument("--output", metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, .json")
  tokenize.add_argument(
    "--tokenizer", metavar="SPEC", help="'bytes' or the path of a tokenizer.json"
  )
  tokenize.add_argument("--workers", type=int, metavar="N", help="threads (default: all cores)")
  tokenize.add_argument("--force", action="store_true", help="make files again that are up to date")
  verify = plain("verify", _verify, "Read a run's checkpoints whole, and say which are intact.")
  verify.add_argument("folder", metavar="RUN", help="the run_dir of a run of `fit`")
  verify.add_argument(
    "--adopt", type=int, metavar="STEP", help="trust this checkpoint as it is: make its digests new"
  )
  plot = plain("plot", _plot, "Draw the loss curves of runs beside one another.")
  plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
  plot.add_argument("--output", required=True, type=Path, metavar="FILE", help="such as a.png")
  command("doctor", _doctor, "Say what there is to train with, and what stands in the way.")
  return parser
