"""Helpers of the mixer and model tests: programs, parameters, inputs, errors."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lnssm_jax.mixers import LNSSM


@jax.jit
def apply(mixer, x, state=None, segment_ids=None):
  """The module's call as one program, which costs less to compile than its steps one by one."""
  return mixer(x, state, segment_ids)


def split(module):
  """(graphdef, parameters as a plain nested dictionary)."""
  graphdef, params = nnx.split(module, nnx.Param)
  return graphdef, nnx.to_pure_dict(params)


def drawn(build, seed=0):
  """The module of `build` with random parameters, scales near 1 and all others near 0.

  By NumPy: to compile how a model starts takes as long as to compile the model. For modules whose
  parameters may be any numbers: `qlstm_reversed`, for one, clips its exponent.
  """
  graphdef, params = split(jax.eval_shape(build))
  random = np.random.default_rng(seed)

  def draw(path, leaf):
    noise = 0.3 * random.normal(size=leaf.shape)
    return jnp.asarray((path[-1].key == "scale") + noise, leaf.dtype)

  return nnx.merge(graphdef, jax.tree.map_with_path(draw, params))


def with_normal_noise(params):
  """Parameters near these, none of them equal. By JAX, for a program that also makes them."""
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  noise = lambda leaf, key: leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
  return jax.tree.unflatten(structure, map(noise, leaves, keys))


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


def random_lnssm(dim=8, num_heads=2, *, seed=0, **options) -> LNSSM:
  """A mixer with no parameter at its initial value, but decays over the whole initial range."""
  mixer = LNSSM(dim, num_heads=num_heads, layer=1, num_layers=3, rngs=nnx.Rngs(0), **options)
  graphdef, params = split(mixer)
  keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params))))

  def disturb(value):
    size = 0.2 if value.ndim == 1 else dim**-0.5
    noise = size * jax.random.normal(next(keys), value.shape)
    return (value + noise).astype(value.dtype)

  return nnx.merge(graphdef, jax.tree.map(disturb, params))
