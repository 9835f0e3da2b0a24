"""Programs that are kept: JAX's cache, and executables under what was traced."""

import gc
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.cluster import compile_cache, device_mesh

X = jnp.arange(4.0)


def test_compile_cache_filled_and_settings_restored(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  with compile_cache.at(str(tmp_path / "programs")):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.jit(lambda x: 3 * x + 7)(1.0)
  assert list((tmp_path / "programs").glob("jit__lambda*"))
  assert jax.config.jax_compilation_cache_dir == before
  with pytest.raises(ValueError, match="compile_cache='/proc/x' cannot be used"):
    compile_cache.at("/proc/x").__enter__()


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
