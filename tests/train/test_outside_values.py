"""Numbers, names and rows from elsewhere that no command may take as they are; killed sweeps."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import babilong_samples, limits, needles
from lnssm_jax.files.printable import shell_word
from tests.train.test_sweeps import sweep_of, text_runs
from train import config
from train.data import IndexedWriter, windows
from train.data.errors import DataError
from train.runs import bindings
from train.runs.run_folder import RunFolderError, claim
from train.sweeps import groups, tables

ROW = {"kind": "train", "step": 1, "loss": 1.0}


# ---- numbers and names of tasks ----


@pytest.mark.parametrize(
  ("lengths", "samples", "message"),
  [
    ([10**12], 1, "--lengths 1,000,000,000,000: a prompt has at most 67,108,864 tokens, and these"),
    ([10**9], 100, "about 400.0 GB of text; use shorter ones."),
    ([1000], 10**9, "--lengths 1,000 with 1,000,000,000 samples: the prompts would be 1,000,000,"),
  ],
)
def test_prompts_that_no_memory_holds_raise_with_their_size(lengths, samples, message):
  with pytest.raises(ValueError) as error:
    limits.check_prompts("--lengths", lengths, samples)
  assert message in str(error.value)
  with pytest.raises(ValueError, match=r"tokens are the most|at most"):
    needles.run(None, kinds=["single_1"], lengths=lengths, samples=samples)
  how = {"tasks": ["qa1"], "lengths": lengths, "samples": samples, "tokenizer": None}
  with pytest.raises(ValueError, match=r"tokens are the most|at most"):
    next(babilong_samples.rows_of("babi", "text", **how))
  limits.check_prompts("--lengths", [0, 1000, 10**7], 100)


@pytest.mark.parametrize(
  ("names", "message"),
  [
    ({"tasks": ["../babi/qa1"]}, "--tasks '../babi/qa1' is no name of a task"),
    ({"tasks": ["/qa1"]}, "is no name of a task"),
    ({"tasks": ["qa*"]}, "is no name of a task"),
    ({"tasks": ["qa1"], "split": "/../x"}, "--split '/../x' is no end of a file's name"),
    ({"tasks": ["qa1"], "split": "**"}, "is no end of a file's name"),
  ],
)
def test_samples_of_babilong_stay_in_their_folder(names, message, tmp_path):
  how = {"babi": tmp_path, "text": "text", "tokenizer": None, "lengths": [0], "samples": 1} | names
  with pytest.raises(ValueError, match=message.replace("*", r"\*")):
    babilong_samples.write(tmp_path / "out", **how)
  assert list(tmp_path.iterdir()) == []


def test_story_with_a_number_of_many_digits_names_its_file(tmp_path):
  (tmp_path / "qa1_test.txt").write_text("1" * 5_000 + " Mary went.\n")
  with pytest.raises(DataError, match=r"qa1_test.txt, line 1: found '1111"):
    babilong_samples.questions(tmp_path / "qa1_test.txt")


# ---- results and settings that were changed ----


@pytest.mark.parametrize(
  "change",
  [
    {"task": ...},
    {"task": 5},
    {"scores": ...},
    {"scores": []},
    {"scores": "0.9"},
    {"scores": {"accuracy": "0.9"}},
    {"scores": {"validation loss": [1]}},
    {"scores": {"other": 1.0}},
    {"inputs": []},
    {"inputs": {"data": 5}},
  ],
)
def test_result_of_another_shape_is_damage(change, tiny, tmp_path):
  sweep = sweep_of(tmp_path / "sweep", text_runs(tiny))
  run = sweep.runs[0]
  row = groups.result_row(run, 1, {"validation loss": 1.0}, {"data": {}})
  with claim(run.cfg) as folder:
    folder.write_config(run.cfg)
    folder.append([{k: v for k, v in (row | change).items() if v is not ...}])
  with pytest.raises(RunFolderError, match=r"metrics.jsonl is damaged: .*Remove the folder"):
    groups.finished(run, {"data": {}})


def test_result_whose_checksum_was_removed_is_damage(tiny, tmp_path):
  sweep = sweep_of(tmp_path / "sweep", text_runs(tiny))
  run = sweep.runs[0]
  with claim(run.cfg) as folder:
    folder.write_config(run.cfg)
    folder.append([ROW, groups.result_row(run, 1, {"validation loss": 1.0}, None)])
  first, last = folder.metrics_file.read_text().splitlines()
  changed = {k: v for k, v in json.loads(last).items() if k != "crc32"}
  changed["scores"] = {"validation loss": 0.001}
  folder.metrics_file.write_text(f"{first}\n{json.dumps(changed)}\n")
  with pytest.raises(RunFolderError, match="it has no checksum, unlike a row before it"):
    groups.finished(run, None)


def test_cells_of_a_table_start_no_formula():
  for text in ("=cmd|' /C calc'!A0", "+1", "-1+1", "@x", " =1"):
    assert tables._cell_of_csv(text).startswith("'")
  assert tables._cell_of_csv("gla") == "gla"
  assert tables._cell_of_csv(-1.5) == -1.5
  assert tables._cell_of_csv("a\x1b[2J") == r"a\x1b[2J"


def test_weights_without_a_target_are_named(tmp_path):
  with IndexedWriter(tmp_path / "a", "uint16", weighted=True) as writer:
    writer.add_document(np.arange(40), np.zeros(40))
  with pytest.raises(DataError, match=r"a.weights has no weight above 0, so no token is a target"):
    windows.TokenWindows(tmp_path / "a", 8, 257)


def test_settings_that_differ_from_the_checkpoint_are_listed(tiny):
  cfg = tiny()
  stored = config.to_dict(cfg)
  assert bindings.changed_settings({"config": stored}, cfg) == []
  assert bindings.changed_settings({}, cfg) == []
  changed = stored | {"seq_len": 7, "steps": 1, "gone": 5, "run_dir": "elsewhere"}
  changed["model"] = stored["model"] | {"dtype": "bfloat16"}
  assert bindings.changed_settings({"config": changed}, cfg) == [
    f"model.dtype='{cfg.model.dtype}', saved with 'bfloat16'",
    f"seq_len={cfg.seq_len}, saved with 7",
  ]


# ---- processes ----

PARENT = """
import sys
from train.sweeps import processes
child = "from train.sweeps import processes as p; p.end_with_parent(); import os, time;"
child += "print(os.getpid(), flush=True); time.sleep(60)"
processes.run([sys.executable, "-c", child], 2, lambda line: print(line, flush=True))
"""


def test_processes_of_a_sweep_end_with_a_parent_that_is_killed():
  parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
  numbers = [int(parent.stdout.readline().split()[-1]) for _ in range(2)]
  parent.send_signal(signal.SIGKILL)
  parent.wait()
  parent.stdout.close()
  end = time.monotonic() + 10
  left = set(numbers)
  while left and time.monotonic() < end:
    time.sleep(0.05)
    left = {number for number in left if _lives(number)}
  for number in left:
    os.kill(number, signal.SIGKILL)
  assert left == set()


def _lives(number):
  try:
    with open(f"/proc/{number}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] not in "ZX"
  except OSError:
    return False


@pytest.mark.parametrize(
  "text", ["a b", "$(touch x).bin", "it's", "a\x1b]0;title\x07\x1b[2J\rb\n", "é\udcff", ""]
)
def test_words_of_advised_commands_are_one_word_of_a_shell(text):
  word = shell_word(text)
  assert word.isprintable()
  done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
  assert done.stdout == os.fsencode(text)


@pytest.mark.parametrize(("encoding", "word"), [("ascii", r"$'\303\251 x'"), ("utf-8", "'é x'")])
def test_words_of_advised_commands_are_those_that_the_terminal_has(encoding, word, monkeypatch):
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
  assert shell_word("é x") == word
