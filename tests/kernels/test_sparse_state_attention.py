"""Sparse state attention in kernels: which it runs on a Hopper GPU, and on how many rows."""

import jax
import jax.numpy as jnp

from lnssm_jax import ops
from lnssm_jax.ops.sparse_state_attention import varlen
from tests.kernels.lowered import kernels_traced

T, S, N, H, K = 512, 2, 64, 2, 128


def run(q, indices, gates, log_decay):
  options = {"num_partitions": N, "log_decay": log_decay, "method": "varlen"}
  return ops.sparse_state_attention(q, q, q, indices, gates, **options)[0]


def test_varlen_is_one_kernel_on_as_many_rows_as_tokens_are_selected(hopper, monkeypatch):
  """None is padding, however many partitions there are."""
  rows, inside = [], varlen.recurrence

  def recorded(q, *args, **kwargs):
    rows.append(q.shape)
    return inside(q, *args, **kwargs)

  monkeypatch.setattr(varlen, "recurrence", recorded)
  shape = jax.ShapeDtypeStruct
  arguments = (
    shape((1, T, H, K), jnp.bfloat16),
    shape((1, T, S), jnp.int32),
    shape((1, T, S), jnp.float32),
    shape((1, T, H, K), jnp.float32),
  )
  names = kernels_traced(run, *arguments)
  assert len(names) == len(set(names)) > 0
  assert all("linear_attention" in name or "decay" in name for name in names), names
  assert rows == [(1, S * T, H, K)]
