"""Links, pipes and folders where files belong: rejected in one line, never waited for."""

import io
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import babilong_samples, rouge
from experiments.vision.images import FolderImages
from lnssm_jax.files import atomic
from lnssm_jax.files.atomic import append_to
from lnssm_jax.files.reading import open_regular, read_json
from lnssm_jax.pretrained import DataError, exports
from train import config
from train.config import Model
from train.data import IndexedDataset, IndexedWriter, fingerprints, read_sidecar
from train.data.tokenizers import load_tokenizer, train_bpe
from train.logging import loggers, plot, tracing
from train.loop import Moment
from train.runs import export
from train.runs.run_folder import RunFolder, RunFolderError, claim


@pytest.fixture(autouse=True)
def _waits_at_most_ten_seconds():
  def expired(*_):
    raise AssertionError("waited for a pipe")

  before = signal.signal(signal.SIGALRM, expired)
  signal.setitimer(signal.ITIMER_REAL, 10, 1)  # again, for what is called on the way out
  yield
  signal.setitimer(signal.ITIMER_REAL, 0)
  signal.signal(signal.SIGALRM, before)


def link(path):
  """A link to the former content of `path`, elsewhere."""
  target = path.with_name(f"outside-{path.name}")
  path.rename(target) if path.exists() else target.write_text("outside")
  path.symlink_to(target)


def pipe(path):
  path.unlink(missing_ok=True)
  os.mkfifo(path)


def folder(path):
  path.unlink(missing_ok=True)
  path.mkdir()


ODD = pytest.mark.parametrize("replace", [link, pipe, folder])
ROW = {"kind": "train", "step": 1, "loss": 1.0}


@pytest.fixture
def run(tiny):
  """A run folder with a row."""
  cfg = tiny()
  with claim(cfg) as run:
    run.write_config(cfg)
    run.append([ROW])
  return run


@ODD
def test_odd_file_opened_rejected(replace, tmp_path):
  replace(tmp_path / "x")
  for opened in (open_regular, append_to):
    with pytest.raises(OSError, match=r"x is a link; links are not|x is not a regular|Is a dir"):
      opened(tmp_path / "x")
  with pytest.raises(OSError, match=r"x is a link|not a regular file"):
    read_json(tmp_path / "x", 100)
  if replace is link:
    with open_regular(tmp_path / "x", follow_links=True) as file:
      assert file.read() == b"outside"


@ODD
def test_odd_file_as_config_rejected(replace, run):
  replace(run.config_file)
  with pytest.raises(RunFolderError, match=r"is a link|not a regular file"):
    run.load_config()


@ODD
def test_odd_file_as_metrics_neither_read_nor_written(replace, run, tiny, capsys):
  replace(run.metrics_file)
  for read in (run.read_rows, lambda: claimed.keep_rows_until(5)):
    with claim(tiny()) as claimed, pytest.raises(RunFolderError, match="cannot be read"):
      read()
  with claim(tiny()) as claimed:
    claimed.append([ROW | {"step": 2}])
  assert "1 rows could not be written" in capsys.readouterr().err
  if replace is link:
    assert run.metrics_file.resolve().read_text().count("\n") == 1


@ODD
def test_odd_file_as_request_of_a_trace_reported_once(replace, tmp_path, monkeypatch):
  monkeypatch.setattr(tracing, "_LOOK_EVERY", 0.0)
  said = []
  tracer = tracing.Tracer(tmp_path, None, said.append, str)
  (tmp_path / "profile").write_text("5")
  replace(tmp_path / "profile")
  for step in (0, 1):
    tracer.before_step(Moment(step, None))
  assert len(said) == 1 and ("is a link" in said[0] or "not a regular file" in said[0])


def test_link_in_place_of_the_folder_of_traces_is_not_followed(tmp_path, monkeypatch):
  said, traced, outside = [], [], tmp_path / "outside"
  monkeypatch.setattr(jax.profiler, "start_trace", traced.append)
  outside.mkdir()
  (tmp_path / "traces").symlink_to(outside)
  tracing.Tracer(tmp_path, range(1, 3), said.append, str).before_step(Moment(0, None))
  assert traced == [] and not list(outside.iterdir())
  assert len(said) == 1 and "traces is a link; links are not followed" in said[0]


@ODD
def test_odd_file_as_identity_of_a_logger_rejected(replace, tmp_path):
  assert loggers._identity(tmp_path / "wandb-id") == loggers._identity(tmp_path / "wandb-id")
  replace(tmp_path / "wandb-id")
  with pytest.raises(OSError, match=r"is a link|not a regular file"):
    loggers._identity(tmp_path / "wandb-id")


def test_links_planted_under_temporary_names_not_followed(run, tiny, tmp_path):
  outside = tmp_path / "outside"
  outside.write_text("mine")
  for name in ("config.json.tmp", "metrics.jsonl.tmp", "config.json"):
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(outside)
  with claim(tiny()) as claimed:
    claimed.write_config(tiny())
    claimed.keep_rows_until(5)
  assert outside.read_text() == "mine"
  assert RunFolder(run.path).load_config() == tiny()


def test_names_of_partial_files_unpredictable_and_new(tmp_path):
  path = tmp_path / "x"
  assert atomic.partial_name(path) != atomic.partial_name(path)
  outside = tmp_path / "outside"
  outside.write_text("mine")
  path.symlink_to(outside)
  with pytest.raises(FileExistsError):
    atomic.create(path)
  atomic.replace_file(path, b"new")
  assert (path.read_text(), outside.read_text(), path.is_symlink()) == ("new", "mine", False)


def test_partial_files_of_ended_processes_removed(tmp_path):
  path = tmp_path / "x.bin"
  dead, other = atomic.partial_name(path), atomic.partial_name(tmp_path / "y.bin")
  half = atomic.partial_name(tmp_path / ".export")
  for name in (dead, other):
    name.write_text("half")
  half.mkdir()
  (half / "part").write_text("half")
  alive = atomic.partial_name(path)
  with atomic.create(alive):
    atomic.replace_file(path, b"whole")
    assert not dead.exists() and alive.exists() and other.exists()
  with atomic.new_folder(tmp_path / "export", ValueError) as new:
    assert not half.exists()
    atomic.remove_leftovers(tmp_path / ".export")
    (new / "file").write_text("kept")
  atomic.replace_file(path, b"whole")
  left = {name.name for name in tmp_path.iterdir()}
  assert left == {"x.bin", "export", other.name}


def test_partial_file_removed_while_it_is_created_is_created_again(tmp_path, monkeypatch):
  """A process that looks for leftovers between creation and lock."""
  path, taken = tmp_path / "x", []

  def flock(descriptor, kind):
    if not taken:
      taken.append(descriptor)
      path.unlink()

  monkeypatch.setattr(atomic.fcntl, "flock", flock)
  with atomic.create(path) as file:
    file.write(b"x")
  assert path.read_bytes() == b"x"


def test_all_is_written_however_little_a_call_takes():
  class Slow(io.BytesIO):
    def write(self, content):
      return super().write(bytes(content[:3]))

  file = Slow()
  atomic.write_all(file, memoryview(b"0123456789"))
  assert file.getvalue() == b"0123456789"


@pytest.fixture
def pair(tmp_path):
  """Prefix of a pair of token files with a sidecar."""
  with IndexedWriter(tmp_path / "pair", "uint16") as writer:
    writer.add_document([1, 2, 3])
    writer.add_document([])
  (tmp_path / "pair.json").write_text('{"tokens": 3, "bytes": 3}')
  return tmp_path / "pair"


@pytest.mark.parametrize("end", [".bin", ".idx", ".json"])
@ODD
def test_odd_token_files_rejected_links_to_files_read(replace, end, pair):
  before = fingerprints.sample(pair)
  replace(pair.with_name(f"pair{end}"))

  def use():
    IndexedDataset(pair).sequence(0)
    return read_sidecar(pair), fingerprints.sample(pair)

  if replace is link:
    assert use() == ({"tokens": 3, "bytes": 3}, before)
    return
  with pytest.raises(DataError, match=r"not a (regular )?file"):
    use()
  if end != ".json":
    with pytest.raises(DataError, match="not a regular file"):
      fingerprints.sample(pair)


@ODD
def test_odd_tokenizer_rejected_link_to_a_file_read(replace, tmp_path):
  train_bpe("bpe:260", tmp_path, ["the river the river over the stones"] * 3)
  path = tmp_path / "tokenizer.json"
  replace(path)
  if replace is link:  # as in the cache of Hugging Face
    assert load_tokenizer(str(path)).vocab_size == 260
  else:
    with pytest.raises(DataError, match=r"not a regular file|is a folder"):
      load_tokenizer(str(path))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """An exported model with a tokenizer."""
  place = tmp_path_factory.mktemp("export")
  model = Model(dim=8, num_layers=1, num_heads=2, vocab_size=260, mixer="lrn", dtype="float32")
  train_bpe("bpe:260", place, ["the river the river over the stones"] * 3)
  abstract = exports.abstract_params(config.to_dict(model))
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
  tokenizer = load_tokenizer(str(place / "tokenizer.json"))
  export.write(place / "exported", model, params, tokenizer, 3)
  return place / "exported"


@pytest.fixture
def exported(written, tmp_path):
  """A copy of it."""
  return Path(shutil.copytree(written, tmp_path / "exported"))


@ODD
@pytest.mark.parametrize("name", [exports.MANIFEST, exports.TENSORS, exports.TOKENIZER])
def test_odd_file_of_an_export_rejected(replace, name, exported):
  replace(exported / name)
  with pytest.raises(ValueError, match=r"is a link|not a regular file|not a run|is a folder"):
    manifest, _ = exports.read(exported)
    exports.tokenizer_of(exported, manifest)


def test_pipes_as_samples_of_tasks_rejected(tmp_path):
  pipe(tmp_path / "qa1.txt")
  with pytest.raises(DataError, match="not a regular file"):
    babilong_samples.questions(tmp_path / "qa1.txt")
  with pytest.raises(DataError, match="not a regular file"):
    rouge._content(tmp_path / "qa1.txt")


def test_pipes_to_plot_and_as_images_rejected(run, tmp_path):
  pipe(run.metrics_file)
  with pytest.raises(FileNotFoundError, match="no metrics"):
    plot.read(run.path)
  (tmp_path / "images" / "a").mkdir(parents=True)
  pipe(tmp_path / "images" / "a" / "x.png")
  with pytest.raises(
    ValueError, match=r"x\.png is no readable image: x\.png is not a regular file"
  ):
    FolderImages(tmp_path / "images").image(0)
