"""Times and memory of compiled programs."""

import statistics
import time

import jax
import jax.numpy as jnp


def milliseconds(program, arguments, calls: int, groups: int) -> float:
  """The median over groups of `calls` calls, waiting once a group."""

  def group():
    result = None
    for number in range(calls):
      result = program(*arguments[number % len(arguments)])
    jax.block_until_ready(result)

  group()
  times = []
  for _ in range(groups):
    begin = time.perf_counter()
    group()
    times.append((time.perf_counter() - begin) / calls)
  return 1e3 * statistics.median(times)


def copy_bandwidth(mebibytes: int, calls: int, groups: int) -> float:
  """Bytes per second, read and written, of a copy on the device."""
  x = jnp.zeros((mebibytes, 2**18), jnp.float32)
  copy = jax.jit(jnp.copy).lower(x).compile()
  return 2 * x.nbytes / (1e-3 * milliseconds(copy, [(x,)], calls, groups))


def compiled(function, *arguments):
  """(program, seconds it took to compile)."""
  begin = time.perf_counter()
  program = jax.jit(function).lower(*arguments).compile()
  return program, time.perf_counter() - begin


def allocated(program) -> int:
  """Bytes that a compiled program takes: arguments, new results and temporaries."""
  plan = program.memory_analysis()
  results = plan.output_size_in_bytes - plan.alias_size_in_bytes
  return plan.argument_size_in_bytes + results + plan.temp_size_in_bytes
