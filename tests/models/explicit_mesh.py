"""Ops, mixers and models on a mesh with Explicit axes, against one device.

Run as a program, for the number of devices is fixed when jax starts; prints errors as JSON.

    python -m tests.models.explicit_mesh op mixer model vision
"""

import contextlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lnssm_jax import mixers, models, ops
from tests.mixers.helpers import drawn

MESH = jax.make_mesh((2,), ("data",))  # Explicit is jax's default
TOKENS = np.arange(12).reshape(2, 6) % 11


def place(x, spec):
  return jax.device_put(x, NamedSharding(MESH, spec))


def error(got, want) -> float:
  """The largest error of any array, relative to its largest entry."""
  difference = lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3))
  arrays = [jax.tree.map(np.asarray, tree) for tree in (got, want)]
  return max(jax.tree.leaves(jax.tree.map(difference, *arrays)))


def modules(names):
  """{name: (function of a module and an array, the module)}."""
  gla = lambda: mixers.GLA(8, num_heads=2, gate_rank=3, rngs=nnx.Rngs(0))
  model = lambda: models.LanguageModel(
    vocab_size=11, dim=8, num_layers=2, mixer="lrn", rngs=nnx.Rngs(0)
  )
  vision = lambda: models.VisionModel(
    image_size=4, patch_size=2, num_classes=3, channels=1, dim=8, num_layers=1, rngs=nnx.Rngs(0)
  )
  decay = jnp.full((2,), -0.1)
  call = lambda module, y: module(y)
  # Keywords in another order: which argument has the batch goes by its name.
  op = lambda _, y: ops.linear_attention(log_decay=decay, v=y, k=y, q=y)
  build = {"mixer": gla, "model": model, "vision": vision}
  return {name: (call, drawn(build[name])) if name in build else (op, ()) for name in names}


def values_and_slopes(run):
  """A program of (module, array): the values, and the module's gradient of their sines' sum."""

  def loss(module, y):
    values = run(module, y)
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(values)), values

  program = jax.jit(jax.value_and_grad(loss, has_aux=True))

  def values_then_slopes(module, y):
    (_, values), slopes = program(module, y)
    return values, slopes

  return values_then_slopes


def main():
  x = jax.random.normal(jax.random.key(0), (2, 6, 8))
  arrays = {"op": x.reshape(2, 6, 2, 4), "mixer": x, "model": jnp.asarray(TOKENS)}
  arrays["vision"] = x[:, :2].reshape(2, 4, 4, 1)
  errors, specs = {}, {}
  for name, (run, module) in modules(sys.argv[1:]).items():
    y = arrays[name]
    program = values_and_slopes(run)
    plain = program(module, y)
    sharded = place(y, P("data"))
    contexts = {"no mesh": contextlib.nullcontext}
    if name == "mixer":  # one shows that an ambient mesh changes nothing
      contexts["mesh"] = lambda: jax.set_mesh(MESH)
    for label, context in contexts.items():
      with context():
        got = program(module, sharded)
      out = got[0] if name == "vision" else got[0][0]
      specs[name, label] = str(jax.typeof(out).sharding.spec[0])
      errors[f"{name}, {label}"] = error(got, plain)
    if name == "op":
      errors["eager op"] = error(run((), sharded), plain[0])
  try:
    ops.linear_attention(*[place(jnp.ones((2, 2, 2, 4)), P(None, None, "data"))] * 3)
    message = ""
  except ValueError as raised:
    message = str(raised)
  specs = {", ".join(key): spec for key, spec in specs.items()}
  print(json.dumps({"errors": errors, "specs": specs, "message": message}))


if __name__ == "__main__":
  main()
