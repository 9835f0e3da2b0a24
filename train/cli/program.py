"""The program that runs a command: parser, one-line errors, exit codes."""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

import lnssm_jax
from lnssm_jax.files import buckets
from lnssm_jax.files.printable import MAX_LINE, printable
from train.cli.errors import explained
from train.config.checked import did_you_mean
from train.config.listing import listing
from train.messages import discard, open_standard_streams, write

# What is a path in any command: by its place, and options.
_PLACED = ("file", "folder", "runs")
_PATHS = (*_PLACED, "config", "html", "input", "out", "output", "plot", "prompts", "run_dir")


class Parser(argparse.ArgumentParser):
  """A parser whose errors are one line; `settings` are those that `--set` changes, for `--help`."""

  settings: type | None = None

  def format_help(self) -> str:
    text = super().format_help()
    return text if self.settings is None else f"{text}\n{listing(self.settings)}\n"

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"error: {printable(message, MAX_LINE)} (see {self.prog} --help)\n")


class Commands:
  """The commands of a program, added one by one; `parser` has them."""

  def __init__(self, prog: str, description: str, examples: str):
    self.parser = Parser(
      prog=prog,
      description=description,
      epilog=f"examples:\n{examples}",
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"lnssm_jax {lnssm_jax.__version__}"
    self.parser.add_argument("--version", action="version", version=version)
    self._examples = examples.splitlines()
    self.added_to = self.parser.add_subparsers(
      dest="command", metavar="COMMAND", parser_class=Parser
    )

  def add(self, name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> Any:
    """Adds a command, which `run` executes, and returns its parser."""
    start = f"  {self.parser.prog} {name} "
    examples = [line for line in self._examples if line.startswith(start)]
    added = self.added_to.add_parser(
      name,
      help=help,
      description=help,
      epilog="\n".join(("examples:", *examples)) if examples else None,
      formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    added.set_defaults(run=run)
    return added


def run(
  parser: Parser,
  arguments: Sequence[str] | None,
  *,
  package: ModuleType,
  moved: Mapping[str, str] = {},
  printing: Sequence[str] = (),
  in_buckets: Mapping[str, Sequence[str]] = {},
) -> int:
  """Runs one command; returns its exit code: 0 success, 1 failure while running, 2 wrong usage,
  3 diverged, 129 a run stopped by SIGHUP, 130 interrupted, and what --stopped-code says.

  In a run of several processes, a failing process exits here without waiting for the others.

  Args:
    package: of the program; a ValueError that it raises is a user's mistake.
    moved: first words of commands that are elsewhere now, and the whole new command.
    printing: commands that do nothing but print: a reader that exits early, such as `head`, has
      enough.
    in_buckets: names of the paths of a command that may be folders in buckets.
  """
  arguments = list(sys.argv[1:] if arguments is None else arguments)
  for old, new in moved.items():
    if arguments[: len(old.split())] == old.split():
      write(sys.stderr, f"error: `{old}` is now `{new}`, in a checkout of the repository.\n")
      return 2
  _check_words(parser, arguments)
  options = parser.parse_args(arguments)
  if options.command is None:
    parser.print_help()
    return 0
  open_standard_streams()
  for name in _PATHS:
    given = getattr(options, name, None)
    for path in given if isinstance(given, list) else [given]:
      supported = name in in_buckets.get(options.command, ())
      if path is None or (supported and buckets.is_bucket(path)):
        continue
      if buckets.is_address(path):
        label = name if name in _PLACED else f"--{name.replace('_', '-')}"
        parser.error(buckets.no_address(label, path, supported))
  try:
    for name in in_buckets.get(options.command, ()):
      if name in ("folder", "run_dir") and options.command != "fit":
        _fetch(options, name)
    return options.run(options) or 0
  except KeyboardInterrupt:
    message, code = "interrupted\n", 130
  except BrokenPipeError:  # the reader of the output, such as `head`, has exited
    discard(sys.stdout)
    message, code = "", 0 if options.command in printing else 1
  except Exception as error:
    found = explained(error, package)
    if found is None and not _is_joined():
      raise
    code, text = found or (1, "")
    message = f"error: {text}\n" if found else traceback.format_exc()
  write(sys.stderr, message)
  if code and _is_joined():
    _leave(code)
  return code


def _fetch(options: argparse.Namespace, name: str) -> None:
  """Replaces a path in a bucket, which a command reads, by that of its local copy."""
  if buckets.is_bucket(getattr(options, name)):
    from train.runs import bucket

    setattr(options, name, str(bucket.fetched(getattr(options, name))))


def _leave(code: int) -> NoReturn:
  """Exits at once; the launcher then ends the other processes, which wait for this one."""
  write(sys.stdout, "")
  write(sys.stderr, "")
  os._exit(code)


def _is_joined() -> bool:
  """Whether other processes would wait for this one; imports nothing."""
  module = sys.modules.get("train.cluster.distributed")
  return module is not None and module.count() > 1


def _check_words(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
  """Exits if a word is empty, or an option has a name that its command lacks.

  argparse would first report what is missing, such as the option whose name is misspelled. An empty
  word, as of a shell's variable that is not set, would be an option that is not given, or this
  folder.
  """
  for before, argument in zip(["", *arguments], arguments, strict=False):
    if not argument or re.fullmatch("--[^=]*=", argument):
      name = argument[:-1] or (before if before.startswith("--") else "an argument")
      parser.error(f"{name} is empty; give a value, or omit it")
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
