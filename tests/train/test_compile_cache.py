"""Programs that are kept: JAX's cache, and executables under what was traced."""

import gc
import hashlib
import os
import pickle
import shutil
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.cluster import compile_cache, device_mesh, signatures

X = jnp.arange(4.0)


def test_compile_cache_filled_and_settings_restored(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  with compile_cache.at(str(tmp_path / "programs")):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: 3 * x + 7)(1.0)
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"  # files without signatures
  assert list((tmp_path / "programs").glob("jit__lambda*"))
  assert jax.config.jax_compilation_cache_dir == before
  with pytest.raises(ValueError, match="compile_cache='/proc/x' cannot be used"):
    compile_cache.at("/proc/x").__enter__()


def test_programs_of_the_last_dry_run_go_to_a_new_run_with_its_settings(tmp_path):
  for size in (3, 4):
    (programs := compile_cache.of_dry_run({"dim": size}) / "programs").mkdir()
    (programs / "x").write_text(str(size))
  for number, size in enumerate((3, 5, 4, 4)):  # that of the first is gone; a second run has none
    (run := tmp_path / str(number)).mkdir()
    compile_cache.take_from_dry_run({"dim": size}, run)
  assert [path.parent.parent.name for path in tmp_path.glob("*/programs/x")] == ["2"]
  (compile_cache.of_dry_run({"dim": 4}) / "programs").mkdir()
  compile_cache.take_from_dry_run({"dim": 4}, tmp_path / "2")  # which has begun
  assert (tmp_path / "2" / "programs" / "x").read_text() == "4"


def test_compile_cache_by_default_is_in_the_run_folder(tmp_path, monkeypatch):
  folder = lambda setting: compile_cache.folder(setting, tmp_path)
  for of_jax, expected in ((None, str(tmp_path / "programs")), ("x", None)):
    config = types.SimpleNamespace(jax_compilation_cache_dir=of_jax)
    monkeypatch.setattr(compile_cache, "jax", types.SimpleNamespace(config=config))
    assert folder("run") == expected
  assert (folder("elsewhere"), folder(None)) == ("elsewhere", None)


@pytest.fixture
def looked_up(tiny, tmp_path, monkeypatch):
  """Returns a function that compiles `function(x, x)`, with its argument x donated, on a CPU."""
  monkeypatch.setattr(compile_cache, "_LOOKED_UP", ("cpu",))
  mesh = device_mesh.make_mesh(tiny())

  def run(function=lambda x, y: x * 3 + y, **settings):
    jitted = jax.jit(function, donate_argnums=0)
    with compile_cache.at(str(tmp_path / "programs")):
      return compile_cache.compiled(jitted, (X, X), mesh, settings)

  run.files = lambda: list((tmp_path / "programs").glob("*.program"))
  return run


@pytest.fixture
def lowered(monkeypatch):
  """The names of functions that were lowered, in order."""
  names, lower = [], jax.stages.Traced.lower
  record = lambda traced, *args: (names.append(traced.fun_name), lower(traced, *args))[1]
  monkeypatch.setattr(jax.stages.Traced, "lower", record)
  return names


def test_program_that_was_traced_before_is_not_lowered_again(looked_up, lowered):
  first, second = looked_up(), looked_up()
  assert (len(lowered), len(looked_up.files())) == (1, 1)
  copy = X + 0
  np.testing.assert_array_equal(second(copy, X), first(X + 0, X))
  assert copy.is_deleted()
  assert second.memory_analysis().output_size_in_bytes == 16


def test_damaged_program_is_compiled_again(looked_up, lowered):
  want = looked_up()(X + 0, X)
  (path,) = looked_up.files()
  whole = path.read_bytes()
  for content in (b"", whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]):
    path.write_bytes(content)
    lowered.clear()
    np.testing.assert_array_equal(looked_up()(X + 0, X), want)
    assert lowered
    assert len(path.read_bytes()) == len(whole)


def with_table(table):
  """A function that holds an array, in a function that it calls."""
  return lambda x, y: jax.jit(lambda x: x * table)(x) + y


def test_other_constants_settings_and_flags_are_other_programs(looked_up, monkeypatch):
  outs = [looked_up(with_table(np.full(4, size)))(X + 0, X) for size in (2.0, 5.0)]
  np.testing.assert_array_equal(outs, [3 * X, 6 * X])
  count = lambda: len(looked_up.files())
  assert count() == 2
  looked_up(seed=1), looked_up(seed=2), looked_up(seed=2, run_dir="elsewhere")
  assert count() == 4
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
  looked_up(seed=2)
  assert count() == 5


def test_program_that_holds_a_callback_runs_and_is_not_kept(looked_up):
  def doubled(x, y):
    return jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + y

  with pytest.warns(UserWarning, match="cannot be written"):
    out = looked_up(doubled)(X + 0, X)
  np.testing.assert_array_equal(out, 3 * X)
  assert not looked_up.files()


def test_function_found_by_trace_has_a_program_for_each_shape(tiny, looked_up, lowered, tmp_path):
  mesh = device_mesh.make_mesh(tiny())
  double = jax.jit(lambda x: 2 * x)
  with compile_cache.at(str(tmp_path / "programs")):
    for _ in range(2):  # the second finds the programs of the first
      call = compile_cache.found_by_trace(double, mesh, {})
      for x in (X, X[:2], X):
        np.testing.assert_array_equal(call(x), 2 * x)
  assert (len(lowered), len(looked_up.files())) == (2, 2)
  with mock.patch.object(compile_cache, "_LOOKED_UP", ()):
    assert compile_cache.found_by_trace(double, mesh, {}) is double


def test_garbage_is_not_collected_while_a_program_is_traced(looked_up):
  collected = []

  def failing(x, y):
    collected.append(gc.isenabled())
    raise ArithmeticError

  with pytest.raises(ArithmeticError):
    looked_up(failing)
  assert (collected, gc.isenabled()) == ([False], True)


@pytest.fixture
def programs(tmp_path):
  """Returns a function that computes x * factor in a new process, in a way, with its cache."""
  folder = tmp_path / "programs"

  def run(factor):
    jax.clear_caches()
    with compile_cache.at(str(folder)):
      jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
      return jax.jit(lambda x: x * factor)(2.0).item()

  run.folder = folder
  run.files = lambda: {path.name: path for path in folder.glob("*-cache")}
  return run


@pytest.mark.slow
def test_program_of_jax_with_another_programs_name_is_not_run(programs):
  programs(3.0)
  (ours,) = (path for name, path in programs.files().items() if "lambda" in name)
  assert programs(3.0) == 6 and ours.exists()
  programs(5.0)
  (other,) = (path for name, path in programs.files().items() if "lambda" in name and path != ours)
  for end in ("", signatures.SIGNATURE):  # with the signature of the other
    shutil.copy(f"{other}{end}", f"{ours}{end}")
  assert programs(3.0) == 6


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "unsigned", "cut"])
def test_file_in_place_of_a_program_is_removed_and_not_waited_for(kind, programs, tmp_path):
  programs(3.0)
  for path in programs.files().values():
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
      os.mkfifo(path)
    elif kind == "link":
      (tmp_path / "elsewhere").write_bytes(content)
      path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
      path.mkdir()
    else:
      path.write_bytes(content[: len(content) // 2] if kind == "cut" else content)
      if kind == "unsigned":
        path.with_name(path.name + signatures.SIGNATURE).unlink()
  assert programs(3.0) == 6
  assert all(path.is_file() and not path.is_symlink() for path in programs.files().values())
  assert (before := {path: path.stat().st_ino for path in programs.files().values()})
  assert programs(3.0) == 6  # found again
  assert before == {path: path.stat().st_ino for path in programs.files().values()}


def test_program_of_jax_that_this_user_signed_is_found_again(programs, monkeypatch):
  programs(3.0)
  # A file that takes the place of another may get its inode.
  written = lambda: {path: path.stat().st_mtime_ns for path in programs.files().values()}
  before = written()
  programs(3.0)
  assert before == written()
  monkeypatch.setattr(signatures, "_key", lambda: b"of another user")
  programs(3.0)
  assert before != written()


@pytest.mark.parametrize("kind", ["link", "writable", "other user", "other key"])
def test_folder_of_others_is_not_used_for_programs(kind, programs, tmp_path, monkeypatch):
  programs(3.0)
  folder, names = programs.folder, set(programs.files())
  if kind == "link":
    folder = folder.rename(tmp_path / "elsewhere")
    programs.folder.symlink_to(folder)
  elif kind == "writable":
    folder.chmod(0o770)
  elif kind == "other user":
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
  else:  # as of another process of the run, which removes nothing
    monkeypatch.setattr(signatures, "_key", lambda: b"of another user")
    monkeypatch.setattr(compile_cache.distributed, "is_first", lambda: False)
  with pytest.warns(UserWarning, match="programs is not used for compiled programs"):
    assert programs(7.0) == 14
  assert {path.name for path in folder.glob("*-cache")} == names


def test_name_of_a_folder_reaches_the_terminal_without_control_characters(tmp_path):
  (tmp_path / "\x1b[2J").mkdir()
  (tmp_path / "\x1b[2J").chmod(0o777)
  with (
    pytest.warns(UserWarning, match=r"/\\x1b\[2J is not used"),
    compile_cache.at(str(tmp_path / "\x1b[2J")),
  ):
    pass


class _Command:
  """A pickle that runs a command."""

  def __init__(self, file):
    self.file = file

  def __reduce__(self):
    return Path.touch, (self.file,)


def test_pickle_in_place_of_a_program_is_not_executed(looked_up, lowered, tmp_path):
  want = looked_up()(X + 0, X)
  (path,) = looked_up.files()
  program = pickle.dumps(_Command(tmp_path / "executed"))
  for content in (hashlib.sha256(program).digest() + program, path.read_bytes()[:32] + program):
    path.write_bytes(content)
    lowered.clear()
    np.testing.assert_array_equal(looked_up()(X + 0, X), want)
    assert lowered and not (tmp_path / "executed").exists()
  other = path.with_name("0" * 64 + ".program")  # signed, but under another name
  path.rename(other)
  assert signatures.read(other) == b""
  os.mkfifo(path)
  np.testing.assert_array_equal(looked_up()(X + 0, X), want)


def test_key_is_private_and_that_of_all_processes_of_a_user(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  fresh = signatures._key.__wrapped__
  first, path = fresh(), tmp_path / "lnssm_jax" / "key"
  assert first == fresh() == path.read_bytes() and path.stat().st_mode & 0o077 == 0
  assert [file.name for file in path.parent.iterdir()] == ["key"]
  path.chmod(0o644)  # others may have read it
  assert fresh() != first
  monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
  assert fresh() != fresh()
  monkeypatch.chdir(tmp_path)  # perhaps the folder of a run of others
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.setenv("XDG_CACHE_HOME", "cache")
  assert fresh() == (tmp_path / "home/.cache/lnssm_jax/key").read_bytes()
  assert not (tmp_path / "cache").exists()


def test_kernels_that_are_no_files_are_rejected(tmp_path):
  folder, link, elsewhere = (tmp_path / name for name in ("kernels", "link", "elsewhere"))
  folder.mkdir()
  elsewhere.mkdir()
  compile_cache._check_files(folder)
  for place in (link, folder / "link"):
    place.symlink_to(elsewhere)
    with pytest.raises(ValueError, match=r"/link is a link, or no regular file; remove it"):
      compile_cache._check_files(link if place == link else folder)
  (folder / "link").unlink()
  os.mkfifo(folder / "x.textproto")
  with pytest.raises(ValueError, match=r"x\.textproto is a link, or no regular file; remove it"):
    compile_cache._check_files(folder)
