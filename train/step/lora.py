"""LoRA (Hu et al. 2021) as an optax transformation: trains low-rank corrections of matrices.

    W = W_0 + scale A B,      dL/dA = scale dL/dW B^T,      dL/dB = scale A^T dL/dW

The parameters that the model, checkpoints and exports see are the sums W: a step changes a sum by
what its factors change it. So nothing outside of the optimizer knows of the factors, and nothing
has to be merged. That saves the moments of the frozen parameters, not their gradients.
"""

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lnssm_jax.pretrained.exports import flat, name_of
from train import config

# Keys of the factors, below that of their matrix.
A, B = "lora_a", "lora_b"  # [..., in, r] and [..., r, out]


def lora(
  inner: optax.GradientTransformation, rank: int, scale: float, names: Sequence[str], key: jax.Array
) -> optax.GradientTransformation:
  """Trains the factors of all matrices that match a name by `inner`, whose state is a tuple.

  Args:
    scale: of the product of the factors.
    names: patterns of `fnmatch` for parameters [..., in, out], named as `inspect` prints them.
    key: of the initial A, normal with variance 1 / in; B is zero.

  The state is `(factors, *state of inner)`: the factors in a tree like that of the parameters.

  Raises:
    ConfigError: on `init`: a pattern matches no parameter, or one that is not a matrix.
  """
  product = lambda x, y: scale * jnp.matmul(x, y, precision="highest")
  transposed = lambda x: jnp.swapaxes(x, -1, -2)

  def init(params):
    _check(flat(params), names)
    factors = {}
    for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(params)):
      if any(fnmatch.fnmatchcase(name_of(path), name) for name in names):
        *lead, rows, columns = x.shape
        a = jax.random.normal(jax.random.fold_in(key, number), (*lead, rows, rank))
        node = factors
        for entry in path:
          node = node.setdefault(entry.key, {})
        node |= {A: a / math.sqrt(rows), B: jnp.zeros((*lead, rank, columns))}
    state: Any = inner.init(factors)
    return factors, *state

  def gradient(pair, d_kernel):
    return {A: product(d_kernel, transposed(pair[B])), B: product(transposed(pair[A]), d_kernel)}

  def change(pair, step):
    """A' B' - A B, without the difference of two products."""
    return product(pair[A], step[B]) + product(step[A], pair[B] + step[B])

  def update(updates, state, params=None):
    del params
    factors, *rest = state
    gradients = _map(gradient, factors, updates)
    result: Any = inner.update(gradients, tuple(rest), factors)
    steps, rest = result
    changes = _map(change, factors, steps)
    return _or_zeros(updates, changes), (optax.apply_updates(factors, steps), *rest)

  return optax.GradientTransformation(init, update)


def _map(function, factors: dict[str, Any], tree: Any) -> Any:
  """`function` of every pair of factors and of what `tree` has in its place."""
  if A in factors:
    return function(factors, tree)
  return {name: _map(function, x, tree[name]) for name, x in factors.items()}


def _or_zeros(updates: Any, changes: Any) -> Any:
  """`changes` in the tree of `updates`, with zeros for all other parameters."""
  if not isinstance(updates, dict):
    return jnp.zeros_like(updates) if changes is None else changes
  return {name: _or_zeros(x, (changes or {}).get(name)) for name, x in updates.items()}


def _check(params: dict[str, Any], patterns: Sequence[str]) -> None:
  for pattern in patterns:
    found = fnmatch.filter(params, pattern)
    if not found:
      raise config.ConfigError(
        f"optimizer.lora_names: no parameter matches {pattern!r}; there are {', '.join(params)}."
      )
    for name in found:
      if params[name].ndim < (3 if name.startswith("blocks.") else 2):
        raise config.ConfigError(
          f"optimizer.lora_names: {pattern!r} matches {name} of shape {params[name].shape}, which "
          "is no matrix; name kernels only, such as '*_proj.kernel'."
        )
