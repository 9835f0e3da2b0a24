"""Language models on four devices that share a sequence, against the same model on one.

Run as a program, for the number of devices is fixed when jax starts; prints errors as JSON.
"""

import json
import sys

import jax
import jax.numpy as jnp
from flax import nnx

from lnssm_jax.mixers import LNSSM, shard_time
from lnssm_jax.models import LanguageModel
from tests.mixers.helpers import drawn, split, with_normal_noise
from tests.mixers.tiny import TINY
from tests.ops.contract import named_errors, values_and_gradients
from tests.ops.divided import AXIS, DIVIDED, SEGMENT_IDS, WHOLE, collectives, mesh

VOCAB = 13


def models(mixer, **options):
  """A model whose parameters are all away from their initial values, and the divided one."""
  names = (mixer,) if isinstance(mixer, str) else tuple(mixer)
  by_mixer = {name: dict(TINY[name].model_options) for name in names}
  sizes = {"vocab_size": VOCAB, "dim": 8, "num_layers": 2, "num_heads": 2}
  sizes |= {"dtype": jnp.float64, "param_dtype": jnp.float64}
  settings = {
    "mixer": mixer,
    "mixer_options": by_mixer[mixer] if isinstance(mixer, str) else by_mixer,
  }

  def build(**more):
    return LanguageModel(**sizes | settings | options | more, rngs=nnx.Rngs(0))

  graphs = [nnx.graphdef(jax.eval_shape(lambda d=d: build(**d))) for d in ({}, sequence_axis())]
  params = jax.jit(lambda: with_normal_noise(split(build())[1]))()
  return params, *(lambda p, g=g: nnx.merge(g, p) for g in graphs)


def sequence_axis():
  return {"sequence_axis": AXIS}


def errors(mixer, segments=True, state=True, **options) -> dict[str, float]:
  """Errors of logits, last state and the gradients of parameters and initial state.

  In float64: what is compared is the same mathematics, however a model magnifies roundings.
  """
  params, whole, divided = models(mixer, **options)
  tokens = jax.random.randint(jax.random.key(2), SEGMENT_IDS.shape, 0, VOCAB)
  ids = jnp.asarray(SEGMENT_IDS) if segments else None
  before = whole(params).init_state(len(tokens))
  if state:  # that of some tokens, with what is not a number of tokens disturbed
    _, before = jax.jit(lambda p: whole(p)(tokens[:, :5], before))(params)
  is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  numbers, structure = jax.tree.flatten(before)
  real = [x for x in numbers if is_real(x)]

  def with_state(real):
    rest = iter(real)
    return jax.tree.unflatten(structure, [next(rest) if is_real(x) else x for x in numbers])

  def run(model):
    return lambda inputs: model(inputs["params"], with_state(inputs["state"]))

  part = jax.shard_map(
    lambda p, s, tokens, ids: divided(p)(tokens, s, ids),
    mesh=mesh(),
    in_specs=(WHOLE, WHOLE, DIVIDED, DIVIDED),
    out_specs=(DIVIDED, WHOLE),
  )
  inputs = {"params": params, "state": real}
  want = values_and_gradients(run(lambda p, s: whole(p)(tokens, s, ids)), inputs)
  got = values_and_gradients(run(lambda p, s: part(p, s, tokens, ids)), inputs)
  return named_errors(got, want)


def traffic(factor: int) -> list[tuple[str, int]]:
  """The collective operations of one LNSSM layer and its gradients on `factor` times 16 steps."""
  layer = drawn(lambda: LNSSM(8, num_heads=2, rngs=nnx.Rngs(0)))
  params = split(layer)[1]
  graph = nnx.graphdef(shard_time(layer, AXIS))

  def run(params, x):
    return nnx.merge(graph, params)(x)

  divided = jax.shard_map(run, mesh=mesh(), in_specs=(WHOLE, DIVIDED), out_specs=(DIVIDED, WHOLE))
  loss = lambda params, x: jnp.sum(divided(params, x)[0] ** 2)
  x = jnp.ones((2, 16 * factor, 8))
  return sorted(collectives(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()))


if __name__ == "__main__":
  if sys.argv[1] == "traffic":
    print(json.dumps([traffic(1), traffic(4)]))
  else:
    with jax.enable_x64(True):
      print(json.dumps({call: errors(**json.loads(call)) for call in sys.argv[1:]}))
