"""The command line `lnssm-train`: commands and their options."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import train
from train import config
from train.cli import commands, program
from train.cli.program import Commands, Parser
from train.scoring import registry
from train.scoring.commands import TASKS
from train.sweeps import command as sweeping

EXAMPLES = """\
  lnssm-train init configs/mine.py
  lnssm-train fit --config configs/quickstart.py
  lnssm-train fit --config configs/quickstart.py --set steps=1000 --set run_dir=runs/longer
  lnssm-train fit --run-dir runs/longer --set steps=2000
  lnssm-train fit --config configs/quickstart.py --dry-run
  lnssm-train fit --config configs/longhorn.py:mamba-350m-4096 --dry-run
  lnssm-train evaluate --run-dir runs/quickstart
  lnssm-train generate --run-dir runs/quickstart --prompt 'def '
  lnssm-train serve exported --port 8000
  lnssm-train tokenize --input TEXT --output data/text --tokenizer bytes
  lnssm-train inspect runs/quickstart --compare 120
  lnssm-train verify runs/quickstart
  lnssm-train export runs/quickstart --out exported
  lnssm-train export runs/quickstart --out folder --layout fla
  lnssm-train import exported --config configs/quickstart.py --set run_dir=runs/more
  lnssm-train plot runs/quickstart runs/longer --output compared.png
  lnssm-train sweep experiments/sweeps/mqar_dsf.py --dry-run
  lnssm-train sweep experiments/sweeps/mqar_dsf.py --processes 4
  lnssm-train task lm runs/quickstart TEXT
  lnssm-train doctor --config configs/quickstart.py
"""

# Commands that do nothing but print.
_PRINTING = ("evaluate", "generate", "inspect")

# Which of a command's paths may be folders in buckets.
_IN_BUCKETS = {
  "export": ("folder", "out"),
  "tokenize": ("output",),
  **dict.fromkeys(("fit", "evaluate", "generate"), ("run_dir",)),
  **dict.fromkeys(("import", "inspect", "serve", "verify"), ("folder",)),
}

# Commands of earlier versions, and what has taken their place.
_TASKS = "mqar listops image choice cloze babilong babilong-samples recall rouge niah"
MOVED = {
  "classify": "python -m experiments classify",
  **{f"task {name}": f"python -m experiments {name}" for name in _TASKS.split()},
}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs one command; returns its exit code, see `train.cli.program.run`."""
  how = {"moved": MOVED, "printing": _PRINTING, "in_buckets": _IN_BUCKETS}
  return program.run(_parser(), arguments, package=train, **how)


def _parser() -> Parser:
  description = "Train, evaluate and use language models with linear cost in sequence length."
  added = Commands("lnssm-train", description, EXAMPLES)
  init = added.add("init", commands.init, "Write a config file with every setting and its meaning.")
  init.add_argument("file", type=Path, metavar="FILE", help="a new file, NAME or NAME.py")
  _add_fit(added)
  sweep = "Train many runs, those of one program together, and compare them."
  sweeping.add_options(added.add("sweep", commands.sweep, sweep))
  _add_evaluate(added)
  _add_generate(added)
  _add_serve(added)
  _add_tokenize(added)
  _add_export(added)
  importing = added.add(
    "import", commands.import_, "Start a run from an exported or a published model."
  )
  _add_config(importing, required=True)
  importing.add_argument(
    "folder", metavar="DIR", help="a folder written by `export`, or a published model"
  )
  _add_inspect(added)
  verify = added.add("verify", commands.verify, "Check every byte of a run's checkpoints and text.")
  verify.add_argument("folder", metavar="RUN", help="the run_dir of a run of `fit`")
  verify.add_argument(
    "--adopt", type=int, metavar="STEP", help="trust this checkpoint: recompute its digests"
  )
  plot = added.add("plot", commands.plot, "Plot the loss curves of runs in one figure.")
  plot.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
  plot.add_argument(
    "--output", type=Path, metavar="FILE", help="such as a.png (default: losses.png)"
  )
  task = "Score any model, or count its cost; `task NAME --help` has the options."
  tasks = added.added_to.add_parser("task", help=task, description=task)
  named = tasks.add_subparsers(dest="task", metavar="NAME", required=True, parser_class=Parser)
  registry.add_parsers(named, TASKS)
  doctor = "Check whether this machine or job can train."
  _add_config(added.add("doctor", commands.doctor, doctor))
  return added.parser


def add_training(added: Any) -> None:
  """The options of a command that trains: what it prints instead, changes, exit codes."""
  add = added.add_argument
  add("--print-config", action="store_true", help="print the config and exit")
  add(
    "--allow-config-change",
    action="store_true",
    help="resume a run although its settings or its data have changed",
  )
  add(
    "--dry-run",
    action="store_true",
    help="compile the training step, print its memory and FLOPs, and exit",
  )
  add(
    "--stopped-code",
    type=int,
    default=0,
    metavar="N",
    help="exit code if SIGTERM or SIGINT ends the run before its last step (default: 0)",
  )


def _add_config(added: Any, *, required: bool = False, of: str = "", all_below: bool = False):
  """--config and --set and, where `of` says of what, --run-dir in place of --config."""
  named = added.add_mutually_exclusive_group(required=True) if all_below else added
  named.add_argument(
    "--config", metavar="FILE[:VARIANT]", required=required, help="Python file with get_config()"
  )
  listed = "all are below" if all_below else "`fit --help` lists them"
  added.add_argument(
    "--set",
    metavar="A.B=VALUE",
    action="append",
    default=[],
    help=f"override a setting (repeatable); {listed}",
  )
  if of:
    named.add_argument(
      "--run-dir", metavar="FOLDER", help=f"a run of `fit`, {of}, instead of --config"
    )


def _add_fit(added: Commands) -> None:
  fit = added.add("fit", commands.fit, "Train a model, or resume a stopped run.")
  _add_config(fit, of="to resume with its settings", all_below=True)
  fit.settings = config.Train
  add_training(fit)
  add = fit.add_argument
  add(
    "--verify-data",
    action="store_true",
    help="compare every byte of the token files with their digests, not only samples",
  )
  add(
    "--tokens-per-second",
    type=float,
    metavar="N",
    help="with --dry-run: of one device, from which the speed of many is predicted",
  )
  add(
    "--interconnect",
    metavar="NAME",
    help="with --dry-run: of the devices that are predicted: nvlink (the default), "
    "nvlink-ethernet, pcie",
  )
  add(
    "--profile",
    metavar="START:STOP",
    help="write a profiler trace of these steps to RUN/traces; during a run, "
    "`echo 5 > RUN/profile` traces the next 5",
  )


def _add_evaluate(added: Commands) -> None:
  evaluate = added.add(
    "evaluate", commands.evaluate, "Print the loss of a run on its validation sets."
  )
  _add_config(evaluate, of="or an exported or a published model")
  add = evaluate.add_argument
  add(
    "--input",
    nargs="+",
    metavar="[NAME=]TEXT",
    help="files, folders or globs of text instead, with names; each document is scored alone",
  )
  add("--fields", default="text", metavar="KEY", help="of rows of --input: that of the text")
  add("--json", action="store_true", help="print JSON instead of a table")
  _add_ema(evaluate)


def _add_generate(added: Commands) -> None:
  generate = added.add("generate", commands.generate, "Continue text with the model of a run.")
  _add_config(generate, of="or an exported or a published model")
  add = generate.add_argument
  add("--prompt", metavar="TEXT", action="append", help="what to continue (repeatable)")
  add("--prompt-file", metavar="FILE", help="its text; -: that of standard input")
  add(
    "--prompts",
    metavar="FILE",
    help='many: rows such as {"prompt": TEXT}, to --output; the same command continues',
  )
  add("--output", metavar="FILE", help='the rows of --prompts, in order, with "generated"')
  add("--batch", type=int, metavar="N", help="of --prompts at once (default 16)")
  add("--max-tokens", type=int, metavar="N", help="at most this many new tokens")
  add("--temperature", type=float, metavar="T", help="0 takes the most likely token")
  add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
  add("--top-p", type=float, metavar="P", help="nucleus sampling; 1: all tokens")
  add("--min-p", type=float, metavar="P", help="no tokens below this share of the most likely one")
  add("--repetition-penalty", type=float, metavar="R", help="above 1: fewer tokens that were there")
  add("--stop", metavar="TEXT", action="append", help="end before this text (repeatable)")
  add(
    "--special-tokens",
    choices=("parse", "text"),
    default="parse",
    help="those spelled out in a prompt, such as <|im_start|>: one token each (default), or "
    "ordinary text, for prompts with text from others",
  )
  add("--seed", type=int, default=0, metavar="N", help="of the sampling")
  _add_ema(generate)


def _add_serve(added: Commands) -> None:
  serve = added.add(
    "serve", commands.serve, "Serve a model over HTTP: completions and chats of the OpenAI API."
  )
  add = serve.add_argument
  add("folder", metavar="FOLDER", help="a run, an export, or a published model")
  add("--host", default="127.0.0.1", help="address to listen at (default: this machine's own)")
  add("--port", type=int, default=8000, metavar="N", help="0: a free one (default: 8000)")
  add("--slots", type=int, default=16, metavar="N", help="texts continued at once (default: 16)")
  add("--queue", type=int, default=256, metavar="N", help="texts that may wait (default: 256)")
  add(
    "--most-tokens",
    type=int,
    metavar="N",
    help="of a prompt and its continuation (default: what the model's caches hold, or 32,768)",
  )
  add(
    "--prefix-memory",
    type=int,
    default=256,
    metavar="MIB",
    help="for states after texts that were read, to be continued (default: 256)",
  )
  _add_ema(serve)


def _add_tokenize(added: Commands) -> None:
  tokenize = added.add("tokenize", commands.tokenize, "Create token files from text.")
  _add_config(tokenize)
  add = tokenize.add_argument
  add("--input", nargs="+", metavar="PATH", help="files or folders of text")
  add("--output", metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, .json")
  add(
    "--tokenizer",
    metavar="SPEC",
    help="'bytes', 'bpe:N' (trained on the input if the folder has none), or a tokenizer.json or a "
    "folder with one",
  )
  add("--end-of-text", metavar="TOKEN", help="that ends each text")
  add(
    "--add-special-tokens",
    choices=("file", "none"),
    default="file",
    help="around each text, such as BOS: those that the tokenizer's files say (default), or none",
  )
  add(
    "--special-tokens",
    choices=("text", "parse"),
    default="text",
    help="those spelled out in a text: ordinary text (default), or one token each",
  )
  add(
    "--fields",
    nargs="+",
    metavar="KEY",
    help="of rows of JSON: that of the text (default: text), or of a prompt and its completion",
  )
  add(
    "--targets",
    choices=("all", "completion", "last", "assistant"),
    help="tokens that the loss counts (default: all; of a prompt and completion, the latter's);"
    " assistant: the replies in messages, by the tokenizer's chat template",
  )
  add("--workers", type=int, metavar="N", help="threads (default: all cores)")
  add("--force", action="store_true", help="replace files that are up to date")


def _add_export(added: Commands) -> None:
  export = added.add(
    "export", commands.export, "Write a run's model as safetensors with a manifest."
  )
  add = export.add_argument
  add("folder", metavar="RUN", help="the run_dir of a run of `fit`")
  add("--out", required=True, metavar="DIR", help="a folder that does not exist")
  add(
    "--layout",
    choices=("hf", "fla", "mamba_ssm", "peft"),
    help="a folder that transformers, fla or mamba-ssm open; or the corrections of LoRA alone, for"
    " PEFT (docs/pretrained.md)",
  )
  add("--step", type=int, metavar="N", help="a checkpoint other than the newest")
  add(
    "--partitions",
    type=int,
    metavar="N",
    help="expand the state of layers of SSE to N partitions, with the same losses (docs/mixers.md)",
  )
  add(
    "--selected", type=int, metavar="K", help="of them per token, a multiple (default: as before)"
  )
  add(
    "--margin",
    type=float,
    metavar="M",
    help="logit by which a new partition is below the one that it copies",
  )
  _add_ema(export)


def _add_ema(added: Any) -> None:
  text = "the average of the parameters (optimizer.ema_decay)"
  added.add_argument("--ema", action="store_true", help=text)


def _add_inspect(added: Commands) -> None:
  inspect = added.add(
    "inspect", commands.inspect, "Show what is in a run, an exported model or a folder of arrays."
  )
  add = inspect.add_argument
  add("folder", metavar="FOLDER", help="a run, an export, or a checkpoint")
  add("--step", type=int, metavar="N", help="a checkpoint other than the newest")
  add("--select", default="*", metavar="PATTERN", help="only these parameters: 'blocks.mixer.*'")
  add("--shapes", action="store_true", help="read no parameter: names, dtypes and shapes only")
  add("--compare", metavar="OTHER", help="show the difference to another folder, or another step")
  add(
    "--half-lives",
    nargs="?",
    const="",
    metavar="TEXT",
    help="add half-lives of the state, of data-dependent decays while reading TEXT (imports JAX)",
  )
  add("--json", action="store_true", help="print JSON")
  add("--html", type=Path, metavar="FILE", help="write a page with plots")
