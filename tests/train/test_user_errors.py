"""Mistakes and failing disks on the command line: one line, an exit code, nothing half written."""

import errno
import io
import json
import os
import sys
import threading
import time

import numpy as np
import pytest

from experiments import command as experiments
from lnssm_jax.files import atomic, reading
from lnssm_jax.files.atomic import replace_file, replace_files, write_output
from tests.train.test_sweeps import sweep_of, text_runs
from train.cli import commands
from train.cli.errors import explained
from train.cli.main import main
from train.cluster import distributed, launcher
from train.config import ConfigError, load_config
from train.inspection.arrays import SafetensorsArrays
from train.messages import show_generated
from train.runs.run_folder import RunFolderError, claim
from train.sweeps import tables

ESC = "\x1b]0;title\x07\x1b[2J\rerror: all is well\nerror: fake"
ROW = {"kind": "train", "step": 1, "loss": 1.0}


def error_of(capsys, *given):
  """The one line of a command that must fail with exit code 2."""
  assert main([str(x) for x in given]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and line.isprintable() and len(line) < 3000
  return line


def unreadable(code):
  def read():
    with reading.reading("/a"):
      raise os_error(code)

  return raised(read)


def raised(function):
  try:
    function()
  except Exception as error:
    return error
  raise AssertionError("nothing was raised")


# ---- which errors are a user's ----


def os_error(number, *names):
  return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
  ("error", "code", "text"),
  [
    (os_error(errno.ENOSPC), 2, "No space left on device; free disk space"),
    (os_error(errno.ENOSPC, "/a/b"), 2, "/a/b: No space left on device; free disk space"),
    (os_error(errno.EDQUOT, "/a/b"), 2, "/a/b: Disk quota exceeded; free"),
    (os_error(errno.EISDIR, "/a"), 2, "/a: Is a directory; name a file."),
    (os_error(errno.EACCES, b"/a"), 2, "/a: Permission denied; change its permissions"),
    (os_error(errno.ENOTDIR, "/a/b"), 2, "/a/b: Not a directory; a part of the path is a file"),
    (os_error(errno.ENOENT, "/a"), 2, "/a: No such file or directory."),
    (os_error(errno.EMFILE), 1, "Too many open files; raise `ulimit -n`."),
    (os_error(errno.EIO, "/a"), 1, "/a: Input/output error."),
    (unreadable(errno.EMFILE), 1, "cannot read /a: Too many open files."),
    (unreadable(errno.EACCES), 2, "cannot read /a: Permission denied."),
    (os_error(errno.ENAMETOOLONG, "x" * 5000), 2, "'xxx"),
    (os_error(errno.EISDIR, f"/{ESC}"), 2, r"/\x1b]0;title\x07\x1b[2J\rerror: all is well\nerror:"),
    (ValueError("embedded null byte"), 2, "a path has a null character"),
    (MemoryError("Unable to allocate 7 TiB"), 1, "out of memory (MemoryError: Unable to allocate"),
    (ConfigError(f"no {ESC}"), 2, r"no \x1b]0;title"),
  ],
)
def test_errors_of_paths_disks_and_memory_are_one_line(error, code, text):
  found, line = explained(error)
  assert found == code
  assert line.startswith(text)
  assert line.isprintable() and len(line) < 300


@pytest.mark.parametrize(
  "error",
  [os_error(errno.EBADF), OSError("a library's own"), KeyError("a"), ValueError("of NumPy")],
)
def test_other_errors_are_bugs(error):
  assert explained(raised(lambda: (_ for _ in ()).throw(error))) is None


def test_lines_after_the_first_are_indented():
  error = RunFolderError("first", "  listed", f"last {ESC}")
  assert explained(error)[1].split("\n")[:2] == ["first", "  listed"]
  assert explained(error)[1].split("\n")[2].startswith(r"  last \x1b]0;title")


def test_machine_without_a_device_is_named(monkeypatch):
  jax = sys.modules["jax"]

  def none():
    raise AssertionError  # as JAX 0.11 does for JAX_PLATFORMS=cuda

  monkeypatch.setattr(jax, "devices", none)
  code, line = explained(raised(none))
  assert code == 2
  assert line.startswith("JAX has no device to compute on (AssertionError); install jax for")


@pytest.mark.parametrize("missing", [KeyError("SLURM_JOB_ID"), RuntimeError("needs mpi4py")])
def test_incomplete_variables_of_a_launcher_are_named(missing, monkeypatch):
  def initialize(**_):
    raise missing

  launch = launcher.Launch("Slurm", 2, 0, {})
  monkeypatch.setattr(launcher, "detect", lambda: launch)
  monkeypatch.setattr(distributed.jax.distributed, "initialize", initialize)
  with pytest.raises(launcher.LaunchError, match=r"Slurm started 2 processes, but JAX cannot") as e:
    distributed.join()
  assert "set JAX_COORDINATOR_ADDRESS=HOST:PORT" in str(e.value)


# ---- disks ----


def full_after(monkeypatch, count):
  """A disk that is full after so many writes."""
  left, write = [count], atomic.write_all

  def limited(file, content):
    left[0] -= 1
    if left[0] < 0:
      raise os_error(errno.ENOSPC)
    write(file, content)

  monkeypatch.setattr(atomic, "write_all", limited)


def test_full_disk_before_the_first_step_names_the_file(tiny, monkeypatch):
  cfg = tiny()
  with claim(cfg) as run:
    run.append([ROW])
    full_after(monkeypatch, 0)
    for function, name in (
      (lambda: run.keep_rows_until(1), run.metrics_file),
      (lambda: run.write_config(cfg), run.config_file),
    ):
      code, line = explained(raised(function))
      assert (code, line.split(": ")[0]) == (2, str(name))
      assert "No space left on device; free disk space" in line
    monkeypatch.undo()
    assert run.read_rows() == [ROW]


@pytest.mark.parametrize("count", range(4))
def test_files_of_a_set_are_replaced_together_or_not_at_all(count, tmp_path, monkeypatch):
  paths = [tmp_path / f"{n}.txt" for n in range(4)]
  replace_files(dict.fromkeys(paths, b"old"))
  full_after(monkeypatch, count)
  with pytest.raises(OSError, match=r"No space left on device: .*txt"):
    replace_files(dict.fromkeys(paths, b"new"))
  assert [path.read_bytes() for path in paths] == [b"old"] * 4
  assert sorted(tmp_path.iterdir()) == paths


def test_tables_of_a_sweep_name_a_folder_in_their_place(tiny, tmp_path):
  sweep = sweep_of(tmp_path / "sweep", text_runs(tiny))
  rows = [{"validation loss": 3.0} for _ in sweep.runs]
  tables.write(tmp_path, sweep.runs, rows)
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
  (tmp_path / "table.csv").unlink()
  (tmp_path / "table.csv").mkdir()
  code, line = explained(
    raised(lambda: tables.write(tmp_path, sweep.runs, [{"validation loss": 2.0}] * len(rows)))
  )
  assert (code, line) == (2, f"{tmp_path / 'table.csv'}: Is a directory; name a file.")
  del before["table.csv"]
  after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
  assert after == before


def test_output_goes_to_devices_pipes_and_targets_of_links(tmp_path):
  write_output("/dev/null", b"x")
  assert explained(raised(lambda: write_output("/dev/full", b"x")))[1].startswith("/dev/full: No s")
  link, target = tmp_path / "link", tmp_path / "target"
  link.symlink_to(target)
  write_output(link, b"x")
  assert link.is_symlink() and target.read_bytes() == b"x"
  pipe, found = tmp_path / "pipe", []
  os.mkfifo(pipe)
  reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
  reader.start()
  write_output(pipe, b"y" * 100_000)
  reader.join()
  assert found == [b"y" * 100_000]
  for place in (tmp_path, "/proc/x.png", "/dev/full/x"):
    assert explained(raised(lambda place=place: write_output(place, b"x")))[0] == 2


def test_replaced_file_has_its_own_name_in_errors(tmp_path):
  error = raised(lambda: replace_file(tmp_path / "no folder" / "a.txt", b""))
  assert error.filename == str(tmp_path / "no folder" / "a.txt")
  (tmp_path / "plot.png").mkdir()
  found = explained(raised(lambda: replace_file(tmp_path / "plot.png", b"")))
  assert found == (2, f"{tmp_path / 'plot.png'}: Is a directory; name a file.")


# ---- commands ----


@pytest.fixture
def arrays(tmp_path):
  """A folder with two arrays."""
  folder = tmp_path / "arrays"
  folder.mkdir()
  safetensors = pytest.importorskip("safetensors.numpy")
  safetensors.save_file({"a": np.ones(2), "b": np.zeros(3)}, folder / "x.safetensors")
  return folder


def test_page_of_inspect_that_cannot_be_written_is_one_line(arrays, capsys):
  assert "Is a directory" in error_of(capsys, "inspect", arrays, "--html", arrays)
  assert "/dev/full: No space" in error_of(capsys, "inspect", arrays, "--html", "/dev/full")
  assert "null character" in error_of(capsys, "inspect", arrays, "--html", arrays / "a\0b")
  assert main(["inspect", str(arrays), "--html", str(arrays / "a.html")]) == 0
  assert (arrays / "a.html").read_text().startswith("<!doctype html>")


def test_plot_and_export_that_cannot_be_written_are_one_line(tiny, tmp_path, capsys):
  with claim(tiny()) as run:
    run.append([ROW])
  assert "/proc/x.png: " in error_of(capsys, "plot", run.path, "--output", "/proc/x.png")
  (tmp_path / "a.png").mkdir()
  assert "a.png: Is a dir" in error_of(capsys, "plot", run.path, "--output", tmp_path / "a.png")
  error_of(capsys, "export", run.path, "--out", tmp_path / "a\0b")
  error_of(capsys, "inspect", "a\0b")
  error_of(capsys, "plot", "a\0b")
  error_of(capsys, "verify", "a\0b")


def test_prompt_may_come_from_a_pipe(tmp_path):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  writer = threading.Thread(target=lambda: pipe.write_text("a prompt"))
  writer.start()
  assert commands._text_of(str(pipe)) == "a prompt"
  writer.join()


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/null", "/", "/proc/self/mem", "missing"])
def test_prompt_of_another_kind_of_file_is_one_line(file):
  code, line = explained(raised(lambda: commands._text_of(file)))
  assert code in (1, 2)
  assert file in line and line.isprintable()


def test_generated_text_is_printable_on_a_terminal_and_unchanged_elsewhere(monkeypatch):
  text = "a\tb\n\x1b[2Jc é 你"
  for is_terminal, shown in ((False, text), (True, "a\tb\n\\x1b[2Jc é 你")):
    stream = io.StringIO()
    stream.isatty = lambda is_terminal=is_terminal: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    show_generated(text)
    assert stream.getvalue() == shown


@pytest.mark.parametrize(
  "given",
  [
    ["inspect", f"/{ESC}"],
    ["inspect", ".", "--select", ESC],
    ["verify", f"/{ESC}"],
    ["plot", f"/{ESC}"],
    ["export", f"/{ESC}", "--out", "x"],
    ["evaluate", "--run-dir", f"/{ESC}"],
    ["evaluate", "--run-dir", "/", "--set", f"{ESC}=1"],
    ["generate", "--run-dir", f"/{ESC}"],
    ["generate", "--run-dir", "/", "--prompt-file", f"/{ESC}", "--prompt", "a"],
    ["fit", "--config", f"/{ESC}.py"],
    ["fit", "--config", "configs/quickstart.py", "--set", f"{ESC}=1"],
    ["fit", "--config", "configs/quickstart.py", "--set", f"model.mixer={ESC}"],
    ["fit", "--config", f"experiments/configs/mqar.py:{ESC}"],
    ["import", f"/{ESC}", "--config", "configs/quickstart.py"],
    ["tokenize", "--input", f"/{ESC}", "--output", "/x", "--tokenizer", "bytes"],
    ["tokenize", "--input", "README.md", "--output", "/x", "--tokenizer", ESC],
    ["sweep", f"/{ESC}"],
    ["sweep", "experiments/sweeps/mqar_dsf.py", "--only", ESC],
    ["sweep", "experiments/sweeps/mqar_dsf.py", "--set", f"{ESC}=1"],
    ["init", f"/{ESC}.txt"],
    ["task", "lm", f"/{ESC}", "x"],
    ["task", "cost", "--run-dir", f"/{ESC}"],
    ["doctor", "--config", f"/{ESC}"],
    [f"--{ESC}"],
    [ESC],
    ["inspect", f"--{ESC}"],
    ["task", ESC],
    ["inspect", ".", "--step", ESC],
    ["inspect", "x" * 3000],
    ["inspect", "/" + "x/" * 50_000],
    ["fit", "--config", "configs/quickstart.py", "--set", "x" * 100_000],
    ["fit", "--config", "configs/quickstart.py", "--set", "a." * 2000 + "b=1"],
    [
      "fit",
      "--config",
      "configs/quickstart.py",
      "--set",
      "model.mixer_options." + "a." * 2000 + "b=1",
    ],
    ["fit", "--config", "configs/quickstart.py", "--set", f"run_dir=a{chr(0xDCFF)}"],
    ["fit", "--config", "configs/quickstart.py", "--set", r"run_dir='a\0b'"],
  ],
)
def test_no_command_lets_its_arguments_reach_the_terminal(given, capsys, program=main):
  try:
    assert program(given) == 2
  except SystemExit as ended:  # of argparse
    assert ended.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ") and line.isprintable()
  assert len(line) < 3000


@pytest.mark.parametrize(
  "given",
  [
    ["classify", "--config", f"/{ESC}"],
    ["mqar", "--config", f"experiments/configs/mqar.py:{ESC}"],
    ["evaluate", "--run-dir", f"/{ESC}"],
    ["rouge", "x", f"/{ESC}", "--kind", ESC],
    ["niah", "x", "--lengths", "5", "--kinds", ESC],
    ["niah", "x", f"--{ESC}"],
    [ESC],
  ],
)
def test_no_experiment_lets_its_arguments_reach_the_terminal(given, capsys):
  test_no_command_lets_its_arguments_reach_the_terminal(given, capsys, experiments.main)


def test_config_files_of_a_folder_are_listed_printable(tmp_path):
  (tmp_path / f"{ESC.replace('/', '')}.py").touch()
  for number in range(100):
    (tmp_path / f"{number}{'x' * 200}.py").touch()
  with pytest.raises(FileNotFoundError, match=r"that folder has") as error:
    load_config(tmp_path / "missing.py")
  assert str(error.value).isprintable() and len(str(error.value)) < 2000


def test_names_of_arrays_and_settings_are_shown_printable(tmp_path, capsys):
  safetensors = pytest.importorskip("safetensors.numpy")
  safetensors.save_file({ESC: np.ones(2), "x" * 10**6: np.ones(1)}, tmp_path / "x.safetensors")
  assert main(["inspect", str(tmp_path)]) == 0
  out = capsys.readouterr().out
  assert all(line.isprintable() and len(line) < 500 for line in out.splitlines())
  assert r"\x1b]0;title\x07\x1b[2J\rerror: all is well\nerror: fake" in out
  assert main(["inspect", str(tmp_path), "--json"]) == 0
  names = [row["name"] for row in json.loads(capsys.readouterr().out)["parameters"]]
  assert sorted(names) == sorted([ESC, "x" * 10**6])
  assert "did you mean" in error_of(capsys, "inspect", tmp_path, "--select", ESC[:-1])


def test_array_in_two_files_and_file_without_arrays_are_named(arrays, tmp_path, capsys):
  safetensors = pytest.importorskip("safetensors.numpy")
  safetensors.save_file({"b": np.ones(3)}, arrays / "y.safetensors")
  line = error_of(capsys, "inspect", arrays)
  assert "the array b is in x.safetensors and in y.safetensors; inspect one" in line
  safetensors.save_file({}, tmp_path / "z.safetensors")
  assert "has no arrays" in error_of(capsys, "inspect", tmp_path / "z.safetensors")


def test_many_arrays_are_shown_in_seconds(tmp_path, capsys):
  safetensors = pytest.importorskip("safetensors.numpy")
  count = 5_000
  x = np.ones(1)
  safetensors.save_file({f"a{n}": x for n in range(count)}, tmp_path / "x.safetensors")
  begin = time.process_time()
  assert main(["inspect", str(tmp_path)]) == 0
  assert time.process_time() - begin < 5
  assert f"{count:,} numbers in {count} parameters" in capsys.readouterr().out
  line = error_of(capsys, "inspect", tmp_path, "--select", "b")
  assert "and 4,500 more" in line or "did you mean" in line


def test_names_of_arrays_are_listed_a_few_times_however_many_are_compared(tmp_path, monkeypatch):
  safetensors = pytest.importorskip("safetensors.numpy")
  safetensors.save_file({f"a{n}": np.ones(1) for n in range(50)}, tmp_path / "x.safetensors")
  looks, listed = [], SafetensorsArrays.__iter__
  monkeypatch.setattr(SafetensorsArrays, "__iter__", lambda x: looks.append(x) or listed(x))
  assert main(["inspect", str(tmp_path), "--compare", str(tmp_path)]) == 0
  assert 0 < len(looks) < 50
