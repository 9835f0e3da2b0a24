"""The triangular systems of the delta rule: the corrections of a chunk's steps, all at once.

    x_i = beta_i * (r_i - sum_{j<i} gram_ij x_j)

in float32 throughout, whatever the dtype of the inputs. `beta` is shared by the columns of `r`, or
there is one per column: then each column has a system of its own, but all have the same `gram`.

Nothing here is a power series. With two equal keys the powers of `gram` grow like binomial
coefficients while the solution stays below 1; substitution, and inverses merged from those of
halves, form no such terms.
"""

import jax.numpy as jnp

from lnssm_jax.ops.core.precision import product
from pallas_kernels.core.gradients import custom_vjp

# Blocks up to this size are solved row by row, unrolled.
_SMALLEST_BLOCK = 8


@custom_vjp
def solve(gram, beta, r):
  """x [..., C, V] of gram [..., C, C], strictly lower triangular, beta [..., C, 1 or V] and r.

  C is a power of two.
  """
  return _solve(gram, beta, r)[0]


def transposed_solve(gram, beta, d):
  """The adjoint of `r -> solve(gram, beta, r)`: w with w = beta * (d - gram^T w)."""
  if _is_shared(beta):
    return _product("...ji,...jv->...iv", _resolvent(gram, beta), d)
  flip = lambda x: jnp.flip(x, axis=-2)
  reversed_gram = jnp.flip(jnp.swapaxes(gram, -1, -2), axis=(-1, -2))
  return flip(_substitute(reversed_gram, flip(beta), flip(d)))


def _solve(gram, beta, r):
  if not _is_shared(beta):
    return _substitute(gram, beta, r), None
  resolvent = _resolvent(gram, beta)
  return _product("...ij,...jv->...iv", resolvent, r), resolvent


def _forward(gram, beta, r):
  x, resolvent = _solve(gram, beta, r)
  return x, (gram, beta, r, x, resolvent)


def _backward(kept, d):
  """With y = d - gram^T w and w = beta y: dr = w, dbeta = y (r - gram x), dgram = -w x^T."""
  gram, beta, r, x, resolvent = kept
  if resolvent is None:
    w = transposed_solve(gram, beta, d)
  else:
    w = _product("...ji,...jv->...iv", resolvent, d)
  y = d - _product("...ji,...jv->...iv", gram, w)
  d_beta = y * (r - _product("...ij,...jv->...iv", gram, x))
  if _is_shared(beta):
    d_beta = d_beta.sum(-1, keepdims=True)
  strictly_lower = jnp.tri(gram.shape[-1], k=-1, dtype=bool)
  d_gram = jnp.where(strictly_lower, -_product("...iv,...jv->...ij", w, x), 0.0)
  return d_gram, d_beta, w


solve.defvjp(_forward, _backward)


def _product(equation, left, right):
  return product(equation, left, right, jnp.result_type(left, right))


def _is_shared(beta):
  return beta.shape[-1] == 1


def _resolvent(gram, beta):
  """[..., C, C]: (I + diag(beta) gram)^-1 diag(beta), so that x = resolvent r.

  The inverses of diagonal blocks of s steps are merged two by two:

      [[A, 0], [G, B]]^-1 = [[A^-1, 0], [-B^-1 G A^-1, B^-1]]
  """
  length = gram.shape[-1]
  size = min(length, _SMALLEST_BLOCK)
  lower = beta * gram
  inverse = _substitute(  # [..., C/s, s, s]
    _diagonal_blocks(lower, size), jnp.ones((1, 1), gram.dtype), jnp.eye(size, dtype=gram.dtype)
  )
  while size < length:
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    below = _diagonal_blocks(lower, 2 * size)[..., size:, :size]
    corner = -_product("...ij,...jk->...ik", _product("...ij,...jk->...ik", second, below), first)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    size *= 2
  return inverse[..., 0, :, :] * jnp.swapaxes(beta, -1, -2)


def _diagonal_blocks(matrix, size):
  """[..., C, C] -> [..., C/size, size, size]."""
  count = matrix.shape[-1] // size
  blocks = matrix.reshape(*matrix.shape[:-2], count, size, count, size)
  diagonal = jnp.eye(count, dtype=bool)[:, None, :, None]
  return jnp.where(diagonal, blocks, 0.0).sum(-2)


def _substitute(gram, beta, r):
  """Forward substitution in blocks; between the blocks, matrix products that all columns share."""
  length = gram.shape[-1]
  if length <= _SMALLEST_BLOCK:
    return _substitute_rows(gram, beta, r)
  half = length // 2
  first = _substitute(gram[..., :half, :half], beta[..., :half, :], r[..., :half, :])
  rest = r[..., half:, :] - _product("...ij,...jv->...iv", gram[..., half:, :half], first)
  second = _substitute(gram[..., half:, half:], beta[..., half:, :], rest)
  return jnp.concatenate([first, second], axis=-2)


def _substitute_rows(gram, beta, r):
  shape = jnp.broadcast_shapes((*gram.shape[:-1], 1), beta.shape, r.shape)
  beta, r = jnp.broadcast_to(beta, shape), jnp.broadcast_to(r, shape)
  for i in range(gram.shape[-1] - 1):
    # x_i is known: take it out of the rows below.
    r = r - gram[..., :, i, None] * (beta * r)[..., i, None, :]
  return beta * r
