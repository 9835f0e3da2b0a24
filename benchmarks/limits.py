"""Measures what happens outside of what the scans promise, for the second table of numerics.md.

    python -m benchmarks.limits

Errors are those of `benchmarks.numerics`, of the output alone, in float32 unless a row says
otherwise: of the form that `implementation=None` takes, and of the recurrence step by step in the
same precision, which shows what belongs to the arguments and not to the form.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax import ops
from lnssm_jax.ops.core import accuracy

B, H, K, V = 1, 2, 16, 16


def output_errors(scan, *args, **kwargs) -> tuple[float, float]:
  """Relative errors of `out`: of the preferred form, and step by step. NaN if not all finite."""
  wide = lambda x: jnp.asarray(np.asarray(x, np.float64)) if hasattr(x, "shape") else x
  with jax.enable_x64(True):
    exact = jax.tree.map(wide, (args, kwargs))
    run = jax.jit(lambda args: scan(*args, **exact[1], implementation="reference")[0])
    want = np.asarray(run(exact[0]))
  errors = []
  for form in (None, "reference"):
    got = jax.jit(lambda args, f=form: scan(*args, **kwargs, implementation=f)[0])(args)
    finite = np.isfinite(np.asarray(got, np.float64)).all()
    errors.append(accuracy.relative_error(got, want) if finite else float("nan"))
  return errors[0], errors[1]


def normal(*shape, seed=0, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def unit(x):
  return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def delta_rule(size, length, rates=None, **kwargs):
  """Keys of this length with β = 1, or keys of length 1 with β from `rates`."""
  q, k, v = (normal(B, length, H, n, seed=s) for s, n in enumerate((K, K, V)))
  beta = jnp.ones((B, length, H))
  if rates is not None:
    beta = jnp.asarray(np.random.default_rng(3).uniform(*rates, beta.shape), jnp.float32)
  return output_errors(functools.partial(ops.delta_rule, **kwargs), q, size * unit(k), v, beta)


def signed_normalizer(length):
  """Features of both signs: the sum of weights comes near 0 for some step."""
  q, k, v = (normal(B, length, H, n, seed=s) for s, n in enumerate((K, K, V)))
  return output_errors(ops.linear_attention, q, k, v, normalize=True)


def growth(length, rate):
  q, k, v = (normal(B, length, H, n, seed=s) for s, n in enumerate((K, K, V)))
  return output_errors(ops.linear_attention, q, k, v, log_decay=jnp.full((H,), rate))


def float16_sum(length):
  ones = jnp.ones((B, length, H, K), jnp.float16)
  return output_errors(ops.linear_attention, ones, ones, ones)


def growing_diagonal(length, decay):
  return output_errors(ops.diagonal_scan, jnp.full((K,), decay), normal(B, length, K))


def small_outputs(length, rate):
  """An impulse through a decaying kernel: the outputs after 20 / rate steps are 2e-9 of the first.

  The error is that of the second half of the outputs in relation to themselves.
  """
  x = jnp.zeros((B, length, 1)).at[:, 0].set(1.0)
  kernel = jnp.exp(-rate * jnp.arange(length))[:, None]
  tail = lambda *args, **kwargs: (ops.long_convolution(*args, **kwargs)[0][:, length // 2 :], None)
  return output_errors(tail, x, kernel)


ROWS = (
  ("delta_rule", "β‖k‖² = 1, T = 1,024", lambda: delta_rule(1.0, 1024)),
  ("delta_rule", "β‖k‖² = 2, T = 1,024", lambda: delta_rule(2**0.5, 1024)),
  ("delta_rule", "β‖k‖² = 4, T = 64", lambda: delta_rule(2.0, 64)),
  ("delta_rule", "β‖k‖² = 4, T = 1,024", lambda: delta_rule(2.0, 1024)),
  ("delta_rule", "β in [1.9, 2], T = 1,024", lambda: delta_rule(1.0, 1024, (1.9, 2.0))),
  (
    "delta_rule",
    "the same with `chunk_size=16`",
    lambda: delta_rule(1.0, 1024, (1.9, 2.0), chunk_size=16),
  ),
  ("linear_attention", "`normalize`, features of both signs", lambda: signed_normalizer(1024)),
  ("linear_attention", "log decay +0.01, T = 1,024", lambda: growth(1024, 0.01)),
  ("linear_attention", "log decay +0.01, T = 16,384", lambda: growth(16384, 0.01)),
  ("linear_attention", "float16, a sum that reaches 65,536", lambda: float16_sum(4096)),
  ("diagonal_scan", "decay 1.01, T = 1,024", lambda: growing_diagonal(1024, 1.01)),
  ("diagonal_scan", "decay 1.01, T = 16,384", lambda: growing_diagonal(16384, 1.01)),
  ("long_convolution", "outputs 1e-3 of the largest", lambda: small_outputs(1024, 0.0135)),
  ("long_convolution", "outputs 1e-9 of the largest", lambda: small_outputs(1024, 0.04)),
)


def table() -> str:
  """The rows as Markdown."""
  show = lambda error: "not finite" if np.isnan(error) else f"{error:.1e}"
  lines = ["| scan | arguments | error | step by step |", "|---|---|---|---|"]
  for scan, arguments, measure in ROWS:
    lines.append(f"| {scan} | {arguments} | {' | '.join(map(show, measure()))} |")
  return "\n".join(lines)


if __name__ == "__main__":
  print(table())
