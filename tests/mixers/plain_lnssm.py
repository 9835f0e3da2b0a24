"""The LNSSM mixer written out from its equations, as sums over pairs of tokens. Slow and plain.

In NumPy it is the judge of values; in `jax.numpy` under x64 its derivatives judge the gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers import LNSSM


def plain_lnssm(params, x, *, num_heads, shift="qkvg", decay_first=True, xp=np):
  """The output [T, D] for one sequence x [T, D]; `params` as in the module's pure dictionary."""
  T, D = x.shape
  before = xp.concatenate([xp.zeros((1, D)), x[:-1]])

  def stream(name):
    if name == "q" and shift == "kvg":
      return x
    mu = params[f"mu_{name}"]
    return mu * x + (1 - mu) * before

  def norm(z):
    root_mean_square = xp.sqrt(xp.sum(z**2, axis=-1, keepdims=True) / D)
    return params["gamma"] * z / (root_mean_square + 1e-8)

  q, k, v, g = (stream(name) @ params[f"{name}_proj"]["kernel"] for name in "qkvg")
  phi_q, phi_k = xp.exp(norm(q)), xp.exp(norm(k))

  lag = np.arange(T)[:, None] - np.arange(T)[None, :]
  power = lag if decay_first else np.maximum(lag - 1, 0)
  decay = xp.exp(-xp.exp(params["w"]))  # [D]
  weight = (lag >= 0)[..., None] * decay ** np.maximum(power, 0)[..., None]  # [T, T, D]

  K = D // num_heads
  outputs = []
  for head in range(num_heads):
    i = slice(head * K, (head + 1) * K)
    scores = xp.einsum("ti,ji,tji->tj", phi_q[:, i], phi_k[:, i], weight[..., i])
    outputs.append(scores @ v[:, i] / scores.sum(axis=-1, keepdims=True))
  y = xp.concatenate(outputs, axis=-1)
  return (y / (1 + xp.exp(-g))) @ params["o_proj"]["kernel"]


def random_mixer(dim=8, num_heads=2, *, seed=0, **options) -> LNSSM:
  """A mixer with no parameter at its initial value, but decays over the whole initial range."""
  mixer = LNSSM(dim, num_heads=num_heads, layer=1, num_layers=3, rngs=nnx.Rngs(0), **options)
  graphdef, params = split(mixer)
  keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params))))

  def disturb(value):
    size = 0.2 if value.ndim == 1 else dim**-0.5
    noise = size * jax.random.normal(next(keys), value.shape)
    return (value + noise).astype(value.dtype)

  return nnx.merge(graphdef, jax.tree.map(disturb, params))


@jax.jit
def apply(mixer, x, state=None, segment_ids=None):
  """The module's call as one program, which costs less to compile than its steps one by one."""
  return mixer(x, state, segment_ids)


def split(module):
  """(graphdef, parameters as a plain nested dictionary)."""
  graphdef, params = nnx.split(module, nnx.Param)
  return graphdef, nnx.to_pure_dict(params)


def float64_params(module):
  """The parameters as NumPy arrays in float64."""
  return jax.tree.map(lambda p: np.asarray(p, np.float64), split(module)[1])


def inputs(B, T, D, *, seed=1):
  """x [B, T, D] float32, normal."""
  return jax.random.normal(jax.random.key(seed), (B, T, D), jnp.float32)


def relative_error(got, want) -> float:
  """|got - want| / |want| in the Frobenius norm, float64."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))
