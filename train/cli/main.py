"""The command line `python -m train`: commands, options, error messages and exit codes."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lnssm_jax
from lnssm_jax.pretrained.printable import MAX_LINE, printable
from train import config
from train.cli import commands
from train.cli.errors import explained
from train.config.checked import did_you_mean
from train.config.listing import listing
from train.messages import discard, open_standard_streams, write
from train.sweeps import command as sweeping
from train.tasks import registry

EXAMPLES = """\
examples:
  python -m train init configs/mine.py
  python -m train fit --config configs/quickstart.py
  python -m train fit --config configs/quickstart.py --set steps=1000 --set run_dir=runs/longer
  python -m train fit --run-dir runs/longer --set steps=2000
  python -m train fit --config configs/quickstart.py --dry-run --set compile_cache=programs
  python -m train fit --config configs/longhorn.py:mamba-350m-4096 --dry-run
  python -m train classify --config configs/vision.py:vil-tiny --set data.train=FOLDER
  python -m train evaluate --run-dir runs/quickstart
  python -m train generate --run-dir runs/quickstart --prompt 'def '
  python -m train tokenize --input TEXT --output data/text --tokenizer bytes
  python -m train inspect runs/quickstart --compare 120
  python -m train verify runs/quickstart
  python -m train export runs/quickstart --out exported
  python -m train export runs/quickstart --out folder --layout fla
  python -m train import exported --config configs/quickstart.py --set run_dir=runs/more
  python -m train plot runs/quickstart runs/longer --output compared.png
  python -m train sweep configs/sweeps/mqar_dsf.py --dry-run
  python -m train sweep configs/sweeps/mqar_dsf.py --processes 4
  python -m train task mqar --config configs/mqar.py:linear
  python -m train task lm runs/quickstart TEXT
  python -m train doctor --config configs/quickstart.py
"""

# Commands that do nothing but print: a reader that exits early, such as `head`, has enough.
_PRINTING = ("evaluate", "generate", "inspect")


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit code: 0 success, 1 failure while running, 2 wrong usage,
  3 diverged, 129 a run stopped by SIGHUP, 130 interrupted, and what --stopped-code says.

  In a run of several processes, a failing process exits here without waiting for the others.
  """
  parser = _parser()
  arguments = list(sys.argv[1:] if arguments is None else arguments)
  _check_names(parser, arguments)
  options = parser.parse_args(arguments)
  if options.command is None:
    parser.print_help()
    return 0
  open_standard_streams()
  try:
    return options.run(options) or 0
  except KeyboardInterrupt:
    message, code = "interrupted\n", 130
  except BrokenPipeError:  # the reader of the output, such as `head`, has exited
    discard(sys.stdout)
    message, code = "", 0 if options.command in _PRINTING else 1
  except Exception as error:
    found = explained(error)
    if found is None and not _is_joined():
      raise
    code, text = found or (1, "")
    message = f"error: {text}\n" if found else traceback.format_exc()
  write(sys.stderr, message)
  if code and _is_joined():
    _leave(code)
  return code


def _leave(code: int) -> NoReturn:
  """Exits at once; the launcher then ends the other processes, which wait for this one."""
  write(sys.stdout, "")
  write(sys.stderr, "")
  os._exit(code)


def _is_joined() -> bool:
  """Whether other processes would wait for this one; imports nothing."""
  module = sys.modules.get("train.cluster.distributed")
  return module is not None and module.count() > 1


class _Parser(argparse.ArgumentParser):
  settings: type | None = None  # those that `--set` changes, for `--help`

  def format_help(self) -> str:
    text = super().format_help()
    return text if self.settings is None else f"{text}\n{listing(self.settings)}\n"

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {printable(message, MAX_LINE)} (see {self.prog} --help)\n")


def _check_names(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
  """Exits if an option has a name that its command lacks, with the closest that it has.

  argparse would first report what is missing, such as the option whose name is misspelled.
  """
  for argument in arguments:
    commands = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if commands and argument in commands[0].choices:
      parser = commands[0].choices[argument]
    elif commands and not argument.startswith("-"):
      parser.error(f"no command {argument!r}{did_you_mean(argument, commands[0].choices)}")
    name = argument.partition("=")[0]
    known = parser._option_string_actions
    if name.startswith("--") and len(name) > 2 and name not in known:
      long = [option for option in known if option.startswith("--")]
      parser.error(f"no option {name}{did_you_mean(name, long)}")


def _parser() -> argparse.ArgumentParser:
  parser = _Parser(
    prog="python -m train",
    description="Train, evaluate and use language models with linear cost in sequence length.",
    epilog=EXAMPLES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  version = f"lnssm_jax {lnssm_jax.__version__}"
  parser.add_argument("--version", action="version", version=version)
  added_to = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

  def plain(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> Any:
    start = f"  python -m train {name} "
    examples = [line for line in EXAMPLES.splitlines() if line.startswith(start)]
    added = added_to.add_parser(
      name,
      help=help,
      description=help,
      epilog="\n".join(("examples:", *examples)),
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=run)
    return added

  def command(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> Any:
    added = plain(name, run, help)
    listed = "all are below" if name in ("fit", "classify") else "`fit --help` lists them"
    named = added.add_mutually_exclusive_group(required=True) if name == "fit" else added
    named.add_argument(
      "--config",
      metavar="FILE[:VARIANT]",
      required=name in ("classify", "import"),
      help="Python file with get_config()",
    )
    added.add_argument(
      "--set",
      metavar="A.B=VALUE",
      action="append",
      default=[],
      help=f"override a setting (repeatable); {listed}",
    )
    if name in ("fit", "evaluate", "generate"):
      what = "to resume with its settings" if name == "fit" else "or an exported model"
      named.add_argument(
        "--run-dir", metavar="FOLDER", help=f"a run of `fit`, {what}, instead of --config"
      )
    return added

  init = plain("init", commands.init, "Write a config file with every setting and its meaning.")
  init.add_argument("file", type=Path, metavar="FILE", help="a new file, NAME or NAME.py")
  fit = command("fit", commands.fit, "Train a model, or resume a stopped run.")
  classify = command("classify", commands.classify, "Train an image classifier, or resume it.")
  fit.settings, classify.settings = config.Train, config.Vision
  for added in (fit, classify):
    added.add_argument("--print-config", action="store_true", help="print the config and exit")
    added.add_argument(
      "--allow-config-change",
      action="store_true",
      help="resume a run although its settings or its data have changed",
    )
    added.add_argument(
      "--dry-run",
      action="store_true",
      help="compile the training step, print its memory and FLOPs, and exit",
    )
    added.add_argument(
      "--stopped-code",
      type=int,
      default=0,
      metavar="N",
      help="exit code if SIGTERM or SIGINT ends the run before its last step (default: 0)",
    )
  fit.add_argument(
    "--verify-data",
    action="store_true",
    help="compare every byte of the token files with their digests, not only samples",
  )
  fit.add_argument(
    "--profile",
    metavar="START:STOP",
    help="write a profiler trace of these steps to RUN/traces; during a run, "
    "`echo 5 > RUN/profile` traces the next 5",
  )
  sweep = "Train many runs, those of one program together, and compare them."
  sweeping.add_options(plain("sweep", commands.sweep, sweep))
  evaluate = command(
    "evaluate", commands.evaluate, "Print the loss of a run on its validation sets."
  )
  evaluate.add_argument(
    "--input",
    nargs="+",
    metavar="[NAME=]TEXT",
    help="files, folders or globs of text instead, with names; each document is scored alone",
  )
  evaluate.add_argument(
    "--fields", default="text", metavar="KEY", help="of rows of --input: that of the text"
  )
  evaluate.add_argument("--json", action="store_true", help="print JSON instead of a table")
  generate = command("generate", commands.generate, "Continue text with the model of a run.")
  generate.add_argument(
    "--prompt", metavar="TEXT", action="append", help="what to continue (repeatable)"
  )
  generate.add_argument("--prompt-file", metavar="FILE", help="its text; -: that of standard input")
  generate.add_argument("--max-tokens", type=int, metavar="N", help="at most this many new tokens")
  generate.add_argument(
    "--temperature", type=float, metavar="T", help="0 takes the most likely token"
  )
  generate.add_argument(
    "--top-k", type=int, metavar="K", help="sample from the K most likely tokens"
  )
  generate.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling; 1: all tokens")
  generate.add_argument(
    "--min-p", type=float, metavar="P", help="no tokens below this share of the most likely one"
  )
  generate.add_argument(
    "--repetition-penalty", type=float, metavar="R", help="above 1: fewer tokens that were there"
  )
  generate.add_argument(
    "--stop", metavar="TEXT", action="append", help="end before this text (repeatable)"
  )
  generate.add_argument(
    "--special-tokens",
    choices=("parse", "text"),
    default="parse",
    help="those spelled out in a prompt, such as <|im_start|>: one token each (default), or "
    "ordinary text, for prompts with text from others",
  )
  generate.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling")
  tokenize = command("tokenize", commands.tokenize, "Create token files from text.")
  tokenize.add_argument("--input", nargs="+", metavar="PATH", help="files or folders of text")
  tokenize.add_argument("--output", metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, .json")
  tokenize.add_argument(
    "--tokenizer",
    metavar="SPEC",
    help="'bytes', 'bpe:N' (trained on the input if the folder has none), or a tokenizer.json or a "
    "folder with one",
  )
  tokenize.add_argument("--end-of-text", metavar="TOKEN", help="that ends each text")
  tokenize.add_argument(
    "--add-special-tokens",
    choices=("file", "none"),
    default="file",
    help="around each text, such as BOS: those that the tokenizer's files say (default), or none",
  )
  tokenize.add_argument(
    "--special-tokens",
    choices=("text", "parse"),
    default="text",
    help="those spelled out in a text: ordinary text (default), or one token each",
  )
  tokenize.add_argument(
    "--fields",
    nargs="+",
    metavar="KEY",
    help="of rows of JSON: that of the text (default: text), or of a prompt and its completion",
  )
  tokenize.add_argument(
    "--targets",
    choices=("all", "completion", "last"),
    help="tokens that the loss counts (default: all; of a prompt and completion, the latter's)",
  )
  tokenize.add_argument("--workers", type=int, metavar="N", help="threads (default: all cores)")
  tokenize.add_argument("--force", action="store_true", help="replace files that are up to date")
  export = plain("export", commands.export, "Write a run's model as safetensors with a manifest.")
  export.add_argument("folder", metavar="RUN", help="the run_dir of a run of `fit`")
  export.add_argument("--out", required=True, metavar="DIR", help="a folder that does not exist")
  export.add_argument(
    "--layout",
    choices=("hf", "fla", "mamba_ssm"),
    help="a folder that transformers, fla or mamba-ssm open (docs/pretrained.md)",
  )
  export.add_argument("--step", type=int, metavar="N", help="a checkpoint other than the newest")
  export.add_argument(
    "--partitions",
    type=int,
    metavar="N",
    help="expand the state of layers of SSE to N partitions, with the same losses (docs/mixers.md)",
  )
  export.add_argument(
    "--selected", type=int, metavar="K", help="of them per token, a multiple (default: as before)"
  )
  export.add_argument(
    "--margin",
    type=float,
    metavar="M",
    help="logit by which a new partition is below the one that it copies",
  )
  for added in (evaluate, generate, export):
    added.add_argument(
      "--ema", action="store_true", help="the average of the parameters (optimizer.ema_decay)"
    )
  importing = command(
    "import", commands.import_, "Start a run from an exported or a published model."
  )
  importing.add_argument(
    "folder", metavar="DIR", help="a folder written by `export`, or a published model"
  )
  inspect = plain(
    "inspect", commands.inspect, "Show what is in a run, an exported model or a folder of arrays."
  )
  inspect.add_argument("folder", metavar="FOLDER", help="a run, an export, or a checkpoint")
  inspect.add_argument("--step", type=int, metavar="N", help="a checkpoint other than the newest")
  inspect.add_argument(
    "--select", default="*", metavar="PATTERN", help="only these parameters: 'blocks.mixer.*'"
  )
  inspect.add_argument(
    "--shapes", action="store_true", help="read no parameter: names, dtypes and shapes only"
  )
  inspect.add_argument(
    "--compare", metavar="OTHER", help="show the difference to another folder, or another step"
  )
  inspect.add_argument(
    "--half-lives",
    nargs="?",
    const="",
    metavar="TEXT",
    help="add half-lives of the state, of data-dependent decays while reading TEXT (imports JAX)",
  )
  inspect.add_argument("--json", action="store_true", help="print JSON")
  inspect.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
  verify = plain("verify", commands.verify, "Check every byte of a run's checkpoints and text.")
  verify.add_argument("folder", metavar="RUN", help="the run_dir of a run of `fit`")
  verify.add_argument(
    "--adopt",
    type=int,
    metavar="STEP",
    help="trust this checkpoint: recompute its digests",
  )
  plot = plain("plot", commands.plot, "Plot the loss curves of runs in one figure.")
  plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
  plot.add_argument(
    "--output", type=Path, metavar="FILE", help="such as a.png (default: losses.png)"
  )
  task = "Train or score on a task of the papers; `task NAME --help` has its options."
  registry.add_parsers(added_to.add_parser("task", help=task, description=task))
  command("doctor", commands.doctor, "Check whether this machine or job can train.")
  return parser
