r"""The one form of all recurrences, per head: what an op states as its `recurrence`.

    S_t = psi(o_t, S_{t-1}) + e_t (rate_t * u_t)^T,      out_t = S_t^T s_t / eta_t + direct_t * u_t

S is [K, V] and zero before the first token; psi is the product of entries, o_t [K, V], or of
matrices, o_t [K, K].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Recurrence(NamedTuple):
  """One recurrence of a layer over T tokens, of one sequence."""

  op: str  # the op that computes it
  o: jax.Array  # [T, H, K, V], or with matrix products [T, H, K, K]
  e: jax.Array  # [T, H, K]
  s: jax.Array  # [T, H, K]
  u: jax.Array  # [T, H, V], the op's values
  rate: jax.Array  # [T, H, V]
  eta: jax.Array  # [T, H]
  direct: jax.Array  # [T, H, V]
  product: str = "elementwise"  # psi, or "matrix"
  copies: int = 1  # the outputs of so many groups of heads are added: partitions of one state

  def outputs(self) -> jax.Array:
    """The output of the op, [T, H / copies, V], token by token."""

    def step(S, token):
      o, e, s, u, rate, eta, direct = token
      S = o * S if self.product == "elementwise" else o @ S
      S = S + e[..., None] * (rate * u)[:, None]
      return S, jnp.einsum("hk,hkv->hv", s, S) / eta[:, None] + direct * u

    shape = (*self.e.shape[1:], self.u.shape[2])
    start = jnp.zeros(shape, jnp.result_type(*self.streams))
    return self.add_copies(jax.lax.scan(step, start, self.streams)[1])

  @property
  def streams(self) -> tuple[jax.Array, ...]:
    """(o, e, s, u, rate, eta, direct)."""
    return self[1:8]

  def add_copies(self, out: jax.Array) -> jax.Array:
    """[T, H, V] -> [T, H / copies, V]."""
    return out.reshape(len(out), self.copies, -1, out.shape[2]).sum(1)


def complete(op, *, o, e, s, u, rate=1.0, eta=1.0, direct=0.0, **more) -> Recurrence:
  """The streams at their full shapes, of one dtype."""
  dtype = jnp.result_type(o, e, s, u, rate, eta, direct)
  T, H, V = u.shape
  K = e.shape[-1]
  full = lambda z, *shape: jnp.broadcast_to(z, shape).astype(dtype)
  columns = K if more.get("product") == "matrix" else V
  return Recurrence(
    op,
    full(o, T, H, K, columns),
    full(e, T, H, K),
    full(s, T, H, K),
    u.astype(dtype),
    full(rate, T, H, V),
    full(eta, T, H),
    full(direct, T, H, V),
    **more,
  )


def before_the_update(a, e, s, bonus):
  """(s, direct [T, H, 1]) of an output that reads S_{t-1} + diag(bonus) e_t u_t^T; a [T, H, K] > 0.

  S_{t-1} = (S_t - e_t u_t^T) / a_t.
  """
  return s / a, jnp.sum(s * (bonus - 1 / a) * e, axis=-1, keepdims=True)


def normalized(streams):
  """The streams of an output that is divided by what it is for values of 1."""
  ones = jnp.ones_like(streams["u"][..., :1])
  eta = complete("", **streams | {"u": ones}).outputs()[..., 0]
  return streams | {"eta": eta, "direct": streams["direct"] / eta[..., None]}
