"""Runs authors' layers that are in JAX, in float64, as `record` does those in torch.

    make test-peers

It runs in our own environment.
"""

import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tests.peers import golden_files
from tests.peers.numbers import DIM, cotangent, inputs, parameter


def _s5():
  """(names and shapes, layer) of S5 without its norm and its residual.

  The logarithm of minus the real parts of the poles is given, as ours has it.
  """
  jax.numpy.DeviceArray = jax.Array  # its annotations have this name of older versions
  sys.path.insert(0, str(golden_files.AUTHORS / "S5"))
  from s5 import layers
  from s5.ssm import init_S5SSM

  P = 3
  poles, identity = np.ones(P), np.eye(2 * P, P)
  given = {"C_init": "complex_normal", "discretization": "zoh", "dt_min": 0.001, "dt_max": 0.1}
  flags = {"conj_sym": True, "clip_eigs": False, "bidirectional": False}
  ssm = init_S5SSM(DIM, P, poles, poles, identity, identity.T, **given, **flags)
  layer = layers.SequenceLayer(ssm, 0.0, DIM, activation="half_glu1", training=False, prenorm=True)
  shapes = {"Lambda_log": (P,), "Lambda_im": (P,), "B": (P, DIM, 2), "C": (DIM, P, 2)}
  shapes |= {"D": (DIM,), "log_step": (P, 1), "out2.kernel": (DIM, DIM), "out2.bias": (DIM,)}

  def call(theirs, x):
    seq = {name: theirs[name] for name in ("Lambda_im", "B", "C", "D", "log_step")}
    seq["Lambda_re"] = -jnp.exp(theirs["Lambda_log"])
    out2 = {name: theirs[f"out2.{name}"] for name in ("kernel", "bias")}
    with mock.patch.object(layers.nn, "LayerNorm", lambda: lambda x: x):
      run = lambda row: layer.apply({"params": {"seq": seq, "out2": out2}}, row) - row
      return jax.vmap(run)(x)

  return shapes, call


def record(case, shapes, call) -> dict[str, np.ndarray]:
  """Outputs and gradients of one layer: "out", "x", and each parameter by its name."""
  theirs = {name: parameter(case, name, shape) for name, shape in shapes.items()}
  out, pull = jax.vjp(call, theirs, inputs(case))
  assert out.dtype == jnp.float64, case
  gradients, x = pull(jnp.asarray(cotangent(case)))
  return jax.tree.map(np.asarray, {"out": out, "x": x} | gradients)


def main() -> None:
  with jax.enable_x64(True):
    golden_files.write("jax", {"s5_authors": record("s5_authors", *_s5())})


if __name__ == "__main__":
  main()
