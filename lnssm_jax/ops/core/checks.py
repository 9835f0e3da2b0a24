"""Argument checks at the public boundary of the ops."""

import numbers
from collections.abc import Container, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Arguments of other libraries by ours; one that is no name is for every function.
_ELSEWHERE = {
  name: ours
  for ours, names in {
    "log_decay": "g gk",
    "value_log_decay": "gv",
    "segment_ids": "cu_seqlens seqlens seq_idx",
    "lengths": "mask attention_mask padding_mask",
    "state": "past_key_values cache_params inference_params cache",
    "dropout_key, without which nothing is dropped": "deterministic train training is_training",
    "the second result, always": "output_final_state return_final_state use_cache",
    "the first argument, [B, T, D] in place of tokens": "inputs_embeds",
    "the method hidden_states": "output_hidden_states",
    "dim": "hidden_size d_model embed_dim n_embd",
    "num_layers": "n_layers n_layer num_hidden_layers depth",
    "num_heads": "n_heads n_head num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_value_heads": "num_v_heads",
    "state_dim": "d_state",
    "conv_size": "d_conv use_short_conv",
    "norm_scale": "elementwise_affine",
    "channel_hidden": "intermediate_size d_ff",
    "tie_embeddings": "tie_word_embeddings",
    "mixers.redraw(module, kernel_init, rngs=rngs) afterwards": "kernel_init weight_init",
  }.items()
  for name in names.split()
}


def check_names(what: str, given: Iterable[str], known: Container[str]) -> None:
  """Raises `ValueError` if an argument of `what` has another library's name for a known one."""
  for name in given:
    ours = None if name in known else _ELSEWHERE.get(name)
    if ours is not None and (ours in known or not ours.isidentifier()):
      raise ValueError(
        f"{what}: no argument {name!r}; here it is {ours}"
        " (docs/migration.md has the names of other libraries)."
      )


def is_number(value: Any) -> bool:
  """Whether a value is a real number; a bool is none."""
  return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
  """Whether a value is an integer; a bool is none."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_shape(scan: str, name: str, array, expected: tuple[int | None, ...], axes: str):
  """Raises `ValueError` unless `array` has the expected shape; `None` matches any size."""
  shape = jnp.shape(array)
  matches = len(shape) == len(expected) and all(
    want is None or got == want for got, want in zip(shape, expected, strict=True)
  )
  if not matches:
    wanted = ", ".join("any" if size is None else str(size) for size in expected)
    raise ValueError(f"{scan}: {name} has shape {shape}, but {axes} = [{wanted}] is needed.")


def check_sequence(op: str, name: str, array) -> tuple[int, int, int]:
  """Checks that an array is [B, T, D] with tokens and channels; returns B, T, D."""
  check_shape(op, name, array, (None,) * 3, "[B, T, D]")
  B, T, D = array.shape
  if 0 in (T, D):
    raise ValueError(f"{op}: {name} {array.shape} has an empty axis; T >= 1 and D >= 1 are needed.")
  return B, T, D


def check_floating(scan: str, name: str, array):
  """Raises `ValueError` unless `array` is of a real floating-point dtype."""
  if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
    raise ValueError(
      f"{scan}: {name} has dtype {jnp.result_type(array)}; it must be floating point "
      f"(cast it, e.g. {name}.astype(jnp.float32))."
    )


def checked_integers(op: str, name: str, array) -> jax.Array | np.ndarray:
  """`array` as signed integers of 32 bits, or 64 if it has them; known numbers stay NumPy's.

  In a narrower dtype, or without a sign, a number that it is compared with may wrap: the size of a
  vocabulary, a length, -1.

  Raises:
    ValueError: it is not of integers; the message begins with `op`.
  """
  array = np.asarray(array) if isinstance(array, list | tuple | int) else array
  dtype = jnp.result_type(array)
  if not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
      f"{op}: {name} has dtype {dtype}; it must be integer (cast it, e.g. {name}.astype(np.int32))."
    )
  return array.astype(f"int{max(32, 8 * dtype.itemsize)}")


def has_known_values(array) -> bool:
  """Whether this process can look at all values: not while they are traced, or on other hosts."""
  return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


def check_log_decay(op: str, name: str, decay):
  """Raises `ValueError` unless `decay` is floating point and, where its values are known, <= 0.

  They are known in calls outside of `jit`, `grad` and other transformations.
  """
  check_floating(op, name, decay)
  if isinstance(decay, jax.core.Tracer) or not jnp.size(decay):
    return
  largest = jnp.max(jnp.asarray(decay))
  if not isinstance(largest, jax.core.Tracer) and largest > 0:
    raise ValueError(
      f"{op}: {name} has the value {float(largest):.4g}, and the state would grow; it is the "
      "logarithm of a factor from 0 to 1, at most 0. Pass jnp.log(factor)."
    )


def check_heads(op: str, q, k, v, *, grouped: bool = False) -> tuple[int, int, int, int, int]:
  """Checks q, k `[B, T, H, K]` and v `[B, T, H, V]` of an op; returns B, T, H, K, V.

  Args:
    grouped: whether some of them may have fewer heads, all the same divisor of H.
  """
  arrays = {"q": q, "k": k, "v": v}
  for name, x in arrays.items():
    check_floating(op, name, x)
  check_shape(op, "q", q, (None,) * 4, "[B, T, H, K]")
  B, T, H, K = q.shape
  heads = None if grouped else H
  check_shape(op, "k", k, (B, T, heads, K), "the shape of q, [B, T, H, K]")
  check_shape(op, "v", v, (B, T, heads, None), "[B, T, H] of q, then V")
  V = v.shape[-1]
  if 0 in (T, K, V, *(x.shape[2] for x in arrays.values())):
    raise ValueError(f"{op}: q {q.shape} and v {v.shape} have an empty axis; T >= 1 is needed.")
  counts = sorted({x.shape[2] for x in arrays.values()})
  if len(counts) > 2 or counts[-1] % counts[0]:
    each = ", ".join(f"{name} {x.shape[2]}" for name, x in arrays.items())
    raise ValueError(
      f"{op}: the numbers of heads are {each}, but they must be H or all the same divisor of H, "
      "of which each head serves a group of neighbors."
    )
  return B, T, counts[-1], K, V


def checked_scale(op: str, scale: float | None, default: float) -> float:
  """A Python number; `default` for None. Raises `ValueError` for arrays."""
  if scale is None:
    return default
  if not is_number(scale):
    raise ValueError(f"{op}: scale={scale!r} must be a Python number; multiply q for an array.")
  return float(scale)


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
