"""Checks of arguments at the public boundary, and what every scan does with segments and dtypes."""

import numbers

import jax
import jax.numpy as jnp


def check_shape(scan: str, name: str, array, expected: tuple[int | None, ...], axes: str):
  """Raises `ValueError` unless `array` has the expected shape; `None` matches any size."""
  shape = jnp.shape(array)
  matches = len(shape) == len(expected) and all(
    want is None or got == want for got, want in zip(shape, expected, strict=True)
  )
  if not matches:
    wanted = ", ".join("any" if size is None else str(size) for size in expected)
    raise ValueError(f"{scan}: {name} has shape {shape}, but {axes} = [{wanted}] is needed.")


def check_floating(scan: str, name: str, array):
  """Raises `ValueError` unless `array` is of a real floating-point dtype."""
  if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
    raise ValueError(
      f"{scan}: {name} has dtype {jnp.result_type(array)}; it must be floating point "
      f"(cast it, e.g. {name}.astype(jnp.float32))."
    )


def check_scale(scan: str, scale: float):
  """Raises `ValueError` unless `scale` is a Python number."""
  if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
    raise ValueError(f"{scan}: scale={scale!r} must be a Python number; multiply q for an array.")


def check_chunk_size(scan: str, chunk_size: int | None):
  """Raises `ValueError` unless `chunk_size` is a power of two or None."""
  if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
    raise ValueError(f"{scan}: chunk_size={chunk_size} must be a power of two, such as 64.")


def checked_state(scan: str, kind, state, shape: tuple[int, ...], axes: str, dtype):
  """The initial state, of one array, as a `kind` of this shape and dtype; zeros for None."""
  if state is None:
    return kind(jnp.zeros(shape, dtype))
  (name,) = kind._fields
  array = getattr(state, name)
  check_shape(scan, f"initial_state.{name}", array, shape, axes)
  check_floating(scan, f"initial_state.{name}", array)
  return kind(jnp.asarray(array, dtype))


def accumulation_dtype(*arrays) -> jnp.dtype:
  """float32, or float64 when an input is float64: the dtype of states, decays and sums."""
  return jnp.result_type(jnp.float32, *(jnp.result_type(array) for array in arrays))


def segment_index(scan: str, segment_ids, batch: int, length: int) -> jax.Array | None:
  """Numbers each row's segments 0, 1, ... from `segment_ids` [B, T], which may be any integers.

  A segment begins wherever the id changes, also when it changes back to an earlier one.
  """
  if segment_ids is None:
    return None
  check_shape(scan, "segment_ids", segment_ids, (batch, length), "[B, T]")
  if not jnp.issubdtype(jnp.result_type(segment_ids), jnp.integer):
    raise ValueError(
      f"{scan}: segment_ids has dtype {jnp.result_type(segment_ids)}; it must be integer."
    )
  return jnp.cumsum(first_of_segment(jnp.asarray(segment_ids)), axis=1, dtype=jnp.int32)


def first_of_segment(segments: jax.Array | None, *, reverse: bool = False) -> jax.Array | None:
  """[B, T]: whether a step begins a segment; step 0 does not, it continues the initial state.

  With `reverse` time runs backwards: true at the last step of every segment but the last.
  """
  if segments is None:
    return None
  changes = segments[:, 1:] != segments[:, :-1]
  return jnp.pad(changes, ((0, 0), (0, 1) if reverse else (1, 0)))


def vary_alike(tree):
  """Gives all arrays of `tree` the same varying axes, which a scan inside `shard_map` needs.

  Elsewhere it changes nothing. Its transpose sums over those axes, so that the gradient of a
  replicated parameter is the sum over the devices.
  """
  axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))

  def vary(x):
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x

  return jax.tree.map(vary, tree)
