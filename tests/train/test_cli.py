"""The command line: output, error messages and exit codes of each command."""

import io
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import command as experiments
from lnssm_jax.files.reading import FORMAT
from lnssm_jax.pretrained import exports, texts
from train import trainer
from train.cli import commands
from train.cli.main import MOVED, main
from train.config import Sample, from_dict, to_dict
from train.data.tokenizers import load_tokenizer
from train.logging.metric_reader import DivergedError
from train.runs import evaluation, loading
from train.runs.loading import load_model, sampling_options
from train.runs.run_folder import RunFolder
from train.step.model import params_of


def run(*arguments):
  return main([str(argument) for argument in arguments])


def usage_error(capsys, *arguments):
  """Runs a command that must be rejected; returns its one-line message."""
  assert run(*arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "", "printed before the error"
  (line,) = captured.err.splitlines()
  assert line.startswith("error: ")
  return line


@pytest.fixture
def trained(tiny):
  """Config of a finished run."""
  cfg = tiny(optimizer__ema_decay=0.5)
  trainer.fit(cfg)
  return cfg


def test_cli_without_arguments_prints_commands(command):
  process = command("-X", "importtime", "-m", "train")
  out, times = process.communicate(timeout=60)
  assert process.returncode == 0
  for name in ("fit", "generate", "tokenize", "export", "import", "verify", "doctor"):
    assert f"\n    {name} " in out
  assert "lnssm-train fit --config configs/quickstart.py" in out
  assert "| jax\n" not in times  # --help does not import it


@pytest.mark.parametrize("name", ["export", "import", "inspect", "plot", "sweep", "verify"])
def test_cli_help_of_a_command_has_its_examples_only(capsys, name):
  with pytest.raises(SystemExit):
    run(name, "--help")
  examples = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
  assert examples
  assert all(line.startswith(f"  lnssm-train {name} ") for line in examples)


def test_fit_of_a_folder_has_the_settings_of_its_run(tiny, config_file, tmp_path, capsys):
  moved = tmp_path / "moved"
  moved.mkdir()
  values = {"format": FORMAT, **to_dict(tiny(global_batch=8))}
  (moved / "config.json").write_text(json.dumps(values))
  assert run("fit", "--run-dir", moved, "--set", "steps=13", "--print-config") == 0
  printed = from_dict(json.loads(capsys.readouterr().out))
  assert printed == tiny(global_batch=8, steps=13, run_dir=str(moved))
  assert "is not a run folder" in usage_error(capsys, "fit", "--run-dir", tmp_path)
  line = usage_error(capsys, "evaluate", "--run-dir", tmp_path / "mooved")
  assert "none of this name; did you mean" in line and "moved'?" in line
  line = usage_error(capsys, "evaluate", "--run-dir", moved / "config.json")
  assert f"it is a file; did you mean '{moved}'?" in line
  with pytest.raises(SystemExit):
    run("fit", "--run-dir", moved, "--config", config_file(tiny()))
  assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fit", "evaluate", "generate", "tokenize", "import", "doctor"])
def test_cli_each_command_has_help(capsys, name):
  with pytest.raises(SystemExit) as caught:
    run(name, "--help")
  assert caught.value.code == 0
  assert "--set A.B=VALUE" in capsys.readouterr().out


def test_cli_print_config_shows_resolved_settings_only(tiny, config_file, capsys):
  cfg = tiny()
  assert run("fit", "--config", config_file(cfg), "--set", "steps=77", "--print-config") == 0
  printed = from_dict(json.loads(capsys.readouterr().out))
  assert printed == tiny(steps=77)
  assert not os.path.exists(cfg.run_dir)


def test_cli_wrong_usage_is_one_line_and_exit_code_2(tiny, config_file, tmp_path, capsys):
  path = config_file(tiny())
  fit = ("fit", "--config", path)
  line = usage_error(capsys, *fit, "--set", "optimizer.peek_lr=1e-3")
  assert "no setting 'optimizer.peek_lr' in Optimizer; did you mean 'peak_lr'?" in line
  assert "no config file" in usage_error(capsys, "fit", "--config", tmp_path / "none.py")
  heads = ("--set", "model.mixer=gla", "--set", "model.num_heads=4", "--set", "model.dim=510")
  assert "dim=510 is not a multiple of num_heads=4" in usage_error(capsys, *fit, *heads)
  (tmp_path / "file").write_text("x")
  assert "is a file" in usage_error(capsys, *fit, "--set", f"run_dir={tmp_path / 'file'}")
  assert "no checkpoint in" in usage_error(capsys, "generate", "--config", path, "--prompt", "a")
  for words in (("generate", "--prompt-file", ""), ("generate", "--stop="), ("init", "")):
    with pytest.raises(SystemExit):
      run(*words)
    name = words[1].strip("=") or "an argument"
    assert f"error: {name} is empty; give a value" in capsys.readouterr().err
  assert "either --run-dir" in usage_error(capsys, "evaluate")
  assert "is not a run folder" in usage_error(capsys, "evaluate", "--run-dir", tmp_path)
  assert "there is no folder none; give" in usage_error(capsys, "import", "none", *fit[1:])
  assert "either --config FILE, or --input" in usage_error(capsys, "tokenize")
  line = usage_error(capsys, "tokenize", "--input", path, "--output", tmp_path / "out")
  assert "also needs --tokenizer" in line
  assert "'lnsm'" in usage_error(capsys, *fit, "--set", "model.mixer=lnsm")


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["fit"], "--config"),
    (["train"], "no command 'train'; known are init, fit, "),
    (["evalute", "--run-dir", "x"], "no command 'evalute'; did you mean 'evaluate'?"),
    (["task", "extrapolat"], "no command 'extrapolat'; did you mean 'extrapolate'?"),
    (["generate", "--max-tokens", "many"], "invalid int value: 'many'"),
  ],
)
def test_cli_misspelled_command_is_one_line(capsys, arguments, message):
  with pytest.raises(SystemExit) as caught:
    run(*arguments)
  assert caught.value.code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: ")
  assert message in line
  assert "--help" in line


@pytest.mark.parametrize("old", sorted(MOVED))
def test_cli_command_that_has_moved_names_the_new_one(old, capsys):
  assert run(*old.split(), "--config", "x", "--any-option") == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"error: `{old}` is now `python -m experiments {old.split()[-1]}`")


def test_cli_commands_that_have_moved_exist():
  known = {task.name for task in experiments.TASKS} | {"classify"}
  assert {new.removeprefix("python -m experiments ") for new in MOVED.values()} == known


def test_cli_bug_keeps_traceback(tiny, config_file, monkeypatch):
  def faulty(*_, **__):
    json.loads("{")  # a ValueError from another library

  monkeypatch.setattr(trainer, "fit", faulty)
  with pytest.raises(json.JSONDecodeError):
    run("fit", "--config", config_file(tiny()))


def test_cli_diverged_run_is_exit_code_3(tiny, config_file, monkeypatch, capsys):
  def diverge(*_, **__):
    raise DivergedError("loss is nan at step 3")

  monkeypatch.setattr(trainer, "fit", diverge)
  assert run("fit", "--config", config_file(tiny())) == 3
  assert capsys.readouterr().err == "error: loss is nan at step 3\n"


@pytest.mark.parametrize(("name", "code"), [("generate", 0), ("fit", 1), ("verify", 1)])
def test_cli_dead_reader_is_no_success_of_work(name, code, monkeypatch, capsys):
  def broken(options):
    raise BrokenPipeError

  monkeypatch.setattr(commands, name, broken)
  needed = {"fit": ["--config", "x"], "verify": ["x"]}
  assert run(name, *needed.get(name, [])) == code


@pytest.mark.parametrize(
  ("stopped_by", "codes"),  # by default, and with --stopped-code 75
  [("SIGHUP", (129, 129)), ("SIGTERM", (0, 75)), ("a signal to another process", (0, 75)),
   (None, (0, 0))],
)  # fmt: skip
def test_cli_stopped_run_has_the_exit_code_of_its_signal(
  stopped_by, codes, tiny, config_file, monkeypatch
):
  monkeypatch.setattr(trainer, "fit", lambda *_, **__: trainer.Result(3, stopped_by, [], {}))
  fit = ("fit", "--config", config_file(tiny()))
  assert (run(*fit), run(*fit, "--stopped-code", "75")) == codes


def test_evaluation_of_a_state_has_the_loss_of_its_average():
  class Told(evaluation.Evaluator):
    def __init__(self):
      pass

    def __call__(self, step, params):
      return [{"step": step, "val_loss": params}]

  assert Told().of_state(3, {"params": 1.0}) == [{"step": 3, "val_loss": 1.0}]
  wanted = [{"step": 3, "val_loss": 1.0, "ema_val_loss": 2.0}]
  assert Told().of_state(3, {"params": 1.0, "ema": 2.0}) == wanted


@pytest.mark.parametrize("given", [[], ["--ema"]], ids=str)
def test_evaluate_generate_and_serve_take_the_average_where_it_is_asked_for(
  given, tiny, config_file, monkeypatch, tmp_path
):
  """Of a config, a run, a run's folder as a server opens it, and an export, which has none."""
  asked = []

  def told(*_, ema, **__):
    asked.append(ema)
    raise RuntimeError("it is asked for")

  monkeypatch.setattr(evaluation, "run", told)
  monkeypatch.setattr(loading, "of_run", told)
  cfg = tiny()
  for folder in (cfg.run_dir, tmp_path / "export"):
    Path(folder).mkdir()
  RunFolder(cfg.run_dir).write_config(cfg)
  (tmp_path / "export" / exports.MANIFEST).write_text("{}")
  config, folder = ("--config", config_file(cfg)), ("--run-dir", cfg.run_dir)
  generate = "generate", "--prompt", "a"
  uses = [("evaluate", *config), (*generate, *config), (*generate, *folder)]
  uses += [("serve", cfg.run_dir), (*generate, "--run-dir", tmp_path / "export")]
  for use in uses:
    if use is uses[-1]:
      monkeypatch.setattr(loading, "load_model", told)
    with pytest.raises(RuntimeError, match="asked"):
      run(*use, *given)
  assert asked == len(uses) * [bool(given)]


@pytest.mark.slow
def test_evaluate_prints_loss_of_training(trained, capsys):
  capsys.readouterr()
  assert run("evaluate", "--run-dir", trained.run_dir, "--json") == 0
  rows = json.loads(capsys.readouterr().out)
  (of_run,) = RunFolder(trained.run_dir).evaluation(12, ["validation"])
  of_average = of_run.pop("ema_val_loss")
  assert rows == [of_run] and of_average != of_run["val_loss"]
  assert run("evaluate", "--run-dir", trained.run_dir, "--json", "--ema") == 0
  assert json.loads(capsys.readouterr().out)[0]["val_loss"] == of_average
  assert run("evaluate", "--run-dir", trained.run_dir) == 0
  header, row = capsys.readouterr().out.splitlines()
  assert header.split() == ["set", "val_loss", "bits_per_byte", "tokens"]
  name, loss, bits, tokens = row.split()
  assert name == "validation"
  assert float(loss) == pytest.approx(rows[0]["val_loss"], abs=1e-4)
  assert float(bits) == pytest.approx(rows[0]["bits_per_byte"], abs=1e-4)
  assert int(tokens.replace(",", "")) == rows[0]["tokens"]


@pytest.mark.slow
def test_export_average_of_parameters(trained, tiny, tmp_path, capsys):
  out = str(tmp_path / "out")
  assert run("export", trained.run_dir, "--out", out, "--ema") == 0
  of = lambda *args, **options: params_of(load_model(*args, **options).model)
  jax.tree.map(np.testing.assert_array_equal, of(out), of(trained.run_dir, ema=True))
  text = tmp_path / "text.txt"
  text.write_text("some text")
  capsys.readouterr()
  losses = []
  for folder, *ema in ((out,), (trained.run_dir, "--ema"), (trained.run_dir,)):
    assert run("evaluate", "--run-dir", folder, "--input", text, "--json", *ema) == 0
    losses.append(json.loads(capsys.readouterr().out)[0]["perplexity"])
  assert losses[0] == losses[1] != losses[2]
  assert "has no validation sets; name text by" in usage_error(capsys, "evaluate", "--run-dir", out)
  of_export = "evaluate", "--run-dir", out, "--input", f"a={text}"
  assert run(*of_export) == 0
  assert "\n  a  " in capsys.readouterr().out
  assert "use ema with the run" in usage_error(capsys, *of_export, "--ema")
  assert "--set changes settings of a run" in usage_error(capsys, *of_export, "--set", "seed=1")
  assert not np.array_equal(of(out)["head"]["kernel"], of(trained.run_dir)["head"]["kernel"])
  with pytest.raises(ValueError, match="is an exported model; use ema with the run"):
    load_model(out, ema=True)
  RunFolder(trained.run_dir).write_config(tiny(run_dir=trained.run_dir))
  assert run("evaluate", "--run-dir", trained.run_dir, "--ema") == 2
  assert "has no average of its parameters; optimizer.ema_decay makes" in capsys.readouterr().err


@pytest.mark.slow
def test_verify_damaged_checkpoint_found(trained, capsys):
  capsys.readouterr()
  assert run("verify", trained.run_dir) == 0
  ten, twelve, *sets = capsys.readouterr().out.splitlines()
  assert sets == ["text train  intact", "text validation  intact"]
  assert ten.startswith("step 10  intact, ") and twelve.startswith("step 12  intact, ")
  with open(f"{trained.run_dir}/checkpoints/12/params/_METADATA", "ab") as file:
    file.write(b" ")
  assert run("verify", trained.run_dir) == 1
  assert "\nstep 12  DAMAGED: params/_METADATA has " in capsys.readouterr().out
  assert run("verify", trained.run_dir, "--adopt", 12) == 0
  assert "step 12 has new digests, computed from its current content" in capsys.readouterr().out
  assert run("evaluate", "--run-dir", trained.run_dir) == 0
  capsys.readouterr()
  assert "no checkpoint of step 3" in usage_error(capsys, "verify", trained.run_dir, "--adopt", 3)
  assert "no checkpoint in" in usage_error(capsys, "verify", "/nowhere")


def test_verify_changed_text_found(tiny, tmp_path, capsys):
  cfg = tiny(data__folder=str(tmp_path / "tokens"))
  trainer.fit(cfg)
  path = tmp_path / "tokens" / "train.bin"
  path.write_bytes(b"z" + path.read_bytes()[1:])
  (tmp_path / "tokens" / "validation.json").unlink()
  capsys.readouterr()
  assert run("verify", cfg.run_dir) == 1
  lines = capsys.readouterr().out.splitlines()[-2:]
  assert lines[0].startswith("text train  DAMAGED: ")
  assert lines[1] == "text validation  no digest to compare with"
  path.unlink()
  assert run("verify", cfg.run_dir) == 1
  assert "text train  DAMAGED: no train.bin" in capsys.readouterr().out
  path.with_name("train.json").unlink()
  assert run("verify", cfg.run_dir) == 0
  assert "text train  not on this machine" in capsys.readouterr().out


def test_doctor_problems_found(tiny, config_file, capsys):
  assert run("doctor", "--config", config_file(tiny()), "--set", "mesh.data=3") == 1
  assert (
    "PROBLEM      mesh.data=3, mesh.fsdp=1, mesh.sequence=1, mesh.tensor=1 need 3 devices"
    in capsys.readouterr().out
  )


@pytest.mark.slow
def test_generate_one_prompt_streams_several_printed(trained, config_file, capsys):
  capsys.readouterr()
  options = ("--max-tokens", 20, "--temperature", 0.9, "--top-k", 30, "--top-p", 1, "--seed", 3)
  config = config_file(trained)
  assert run("generate", "--config", config, "--prompt", "the river", *options) == 0
  one = capsys.readouterr().out
  assert one.startswith("the river")
  assert len(one) > len("the river\n")
  prompts = ("--prompt", "the river", "--prompt", "a")
  assert run("generate", "--run-dir", trained.run_dir, *prompts, *options) == 0
  first, second = capsys.readouterr().out.split("--- 2 of 2\n")
  assert first == "--- 1 of 2\n" + one  # the same seed, alone or in a batch
  assert second.startswith("a")
  assert run("generate", "--run-dir", trained.run_dir, "--max-tokens", 4, "--temperature", 0) == 0
  assert capsys.readouterr().out.startswith("the ")  # the prompt of the settings
  for wrong, message in (
    (("--max-tokens=0",), "max_tokens=0"),
    (("--max-tokens=4", "--top-k=999"), "top_k=999"),
  ):
    assert message in usage_error(capsys, "generate", "--config", config, *wrong)


@pytest.mark.slow
def test_generate_prompt_of_a_file_and_texts_that_end_it(trained, tmp_path, capsys, monkeypatch):
  capsys.readouterr()
  options = ("--run-dir", trained.run_dir, "--max-tokens", 20, "--temperature", 0)
  file = tmp_path / "prompt.txt"
  file.write_text("the river")
  assert run("generate", *options, "--prompt-file", file) == 0
  whole = capsys.readouterr().out
  assert run("generate", *options, "--prompt", "the river") == 0
  assert capsys.readouterr().out == whole
  monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the river")))
  stop = whole.removeprefix("the river")[3:5]
  assert run("generate", *options, "--prompt-file", "-", "--stop", "none", "--stop", stop) == 0
  assert capsys.readouterr().out == whole[: whole.index(stop, len("the river"))] + "\n"
  assert run("generate", *options, "--prompt", "the river", "--repetition-penalty", 1e9) == 0
  new = capsys.readouterr().out.removeprefix("the river").removesuffix("\n")
  new = new.replace("\ufffd", "")  # bytes that are no character
  assert len(set(new)) == len(new) and not set(new) & set("the river")
  (tmp_path / "binary").write_bytes(b"\xff")
  (tmp_path / "empty").write_bytes(b"")
  for wrong, message in (
    (("--prompt", "a", "--prompt-file", file), "--prompt and --prompt-file are both there"),
    (("--prompt-file", tmp_path / "binary"), "is no UTF-8 text"),
    (("--prompt-file", tmp_path / "empty"), "is empty"),
    (("--prompt-file", tmp_path / "no"), "no"),
    (("--min-p", "2"), "min_p=2.0 must be in 0 to 1"),
  ):
    assert message in usage_error(capsys, "generate", *options, *wrong)


def test_stream_multibyte_character_not_split(monkeypatch):
  tokenizer = load_tokenizer("bytes")
  text = "naïve €5 \U0001f600 end"
  made = [*text.encode(), 0xFF, 0x41, 0xE2, 0x82]  # then invalid bytes, and an incomplete character

  def fake(model, prompts, options):
    assert prompts == [[10]]  # an empty prompt starts on a new line
    return iter(np.array([[t] for t in [*made, tokenizer.end_of_text, 65]]))

  options = sampling_options(Sample(), tokenizer, 0)
  monkeypatch.setattr(texts.generate, "stream", fake)
  pieces = list(texts.stream(None, tokenizer, "", options))
  assert "".join(pieces) == tokenizer.decode(made)
  assert all("\ufffd" not in piece for piece in pieces[: len(text.encode())])
  assert len([piece for piece in pieces if piece]) > 10


def test_tokenize_with_and_without_config(tiny, config_file, text_folder, tmp_path, capsys):
  output = tmp_path / "made" / "text"
  source = text_folder / "validation.jsonl"
  command = ("tokenize", "--input", source, "--output", output, "--tokenizer", "bytes")
  assert run(*command, "--workers", 1) == 0
  out = capsys.readouterr().out
  assert out.startswith(f"{output}.bin  8 documents, ")
  names = sorted(path.name for path in output.parent.iterdir())
  assert names == ["text.bin", "text.crc32", "text.idx", "text.json"]
  chat = tmp_path / "chat.jsonl"
  chat.write_text('{"prompt": "a", "completion": "bc"}\n')
  for fields in (["prompt,completion"], ["prompt", "completion"]):
    made = ("--output", tmp_path / str(len(fields)), "--tokenizer", "bytes", "--fields", *fields)
    assert run("tokenize", "--input", chat, *made) == 0
    assert "1 documents, 4 tokens, 3 bytes" in capsys.readouterr().out
  bpe = (*command[:4], tmp_path / "bpe" / "text", "--tokenizer", "bpe:260")
  assert "end of its own" in usage_error(capsys, *bpe, "--end-of-text", "the")
  assert run(*bpe) == 0
  assert load_tokenizer("bpe:260", tmp_path / "bpe").vocab_size == 260  # trained on the input
  capsys.readouterr()
  cfg = tiny(data__folder=str(tmp_path / "tokens"))
  assert run("tokenize", "--config", config_file(cfg)) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split("  ")[0] for line in lines] == [
    f"{tmp_path}/tokens/train.bin", f"{tmp_path}/tokens/validation.bin",
  ]  # fmt: skip
  assert "60 documents" in lines[0]
