"""Compiles the kernels for a GPU that is described and not there; prints what was compiled.

    python -m tests.kernels.described A100

A program, because a kernel that a GPU cannot run may end the process in LLVM. Needs JAX's plugin
for CUDA, and no GPU.
"""

import sys

import jax
import jax.numpy as jnp

from benchmarks.described import GPUS, default
from lnssm_jax import ops
from lnssm_jax.ops.cross_entropy.api import cross_entropy
from lnssm_jax.ops.rotations.api import rotations
from lnssm_jax.ops.rotations.types import CHUNK
from lnssm_jax.ops.rotations.types import Inputs as RotationInputs
from pallas_kernels.core import device
from tests.kernels import test_delta_rule, test_lowering
from tests.kernels.lowered import total

BF16, F32 = jnp.bfloat16, jnp.float32


def array(*shape, dtype=BF16):
  return jax.ShapeDtypeStruct(shape, dtype)


def attend(configuration):
  """(function, arguments) of linear attention by one of the configurations of test_lowering."""
  *sizes, options, num_splits = configuration
  inputs, segments = test_lowering.arguments(*sizes, options)

  def call(x):
    rest = {name: x[name] for name in inputs}
    return test_lowering.run(rest, x["segments"], options, num_splits, "ampere")

  return call, inputs | {"segments": segments}


def recall(width, channels, write=False):
  """(function, arguments) of the delta rule with documents, with a decay per key channel or not."""
  how = {"channels": channels, "write": write}
  inputs, segments = test_delta_rule.arguments(width, width, True, True, **how)

  def call(x):
    rest = {name: x[name] for name in inputs}
    return test_delta_rule.run(rest, x["segments"], architecture="ampere")

  return call, inputs | {"segments": segments}


def attend_softly(B, T, H, G, K, V):
  """(function, arguments) of softmax attention with documents, a window, and a cap."""
  options = {"window": 100, "soft_cap": 30.0, "implementation": "pallas"}
  call = lambda x: ops.attention(*(x[n] for n in "qkv"), segment_ids=x["ids"], **options)[0]
  arrays = {"q": array(B, T, H, K), "k": array(B, T, G, K), "v": array(B, T, G, V)}
  return call, arrays | {"ids": array(B, T, dtype=jnp.int32)}


def scans(B, T, D):
  """(function, arguments) by name, of the scans with states per channel."""
  wide, keys, numbers = array(B, T, D), array(B, T, 16), array(B, T, D, dtype=F32)
  narrow, states = array(D, dtype=F32), array(D, 16, dtype=F32)
  arguments = {
    "selective_scan": {"x": wide, "dt": wide, "a": states, "b": keys, "c": keys},
    "longhorn_scan": {"x": numbers, "beta": numbers, "k": keys, "q": keys},
    "wkv4": {"k": wide, "v": wide, "decay_rate": narrow, "bonus": narrow},
  }
  if T > 1:  # XLA fuses a single token
    arguments["diagonal_scan"] = {"decay": array(B, T, D, dtype=jnp.complex64), "x": wide}

  def call(name, documents):
    of_documents = {"segment_ids": jnp.zeros((B, T), jnp.int32)} if documents else {}
    return lambda x: getattr(ops, name)(**x, **of_documents, implementation="pallas")

  return {name: (call(name, T > 1), x) for name, x in arguments.items()}


def programs():
  """(function, arguments, whether it has a gradient in kernels) by name."""
  B, T, H, K, D = 2, 256, 4, 64, 256
  heads = {name: array(B, 1, H, K) for name in ("q", "k", "v")}
  state = array(B, H, K, K, dtype=F32)
  narrow = array(D, dtype=F32)
  kernels = {"implementation": "pallas"}
  table = {f"linear_attention {x}": (*attend(x), True) for x in test_lowering.SOME}
  for suffix, length in (("", T), (", a token", 1)):
    table |= {f"{n}{suffix}": (*x, length > 1) for n, x in scans(B, length, D).items()}
  table |= {f"delta_rule{x}": (*recall(128, bool(x)), True) for x in ("", ", decays per channel")}
  table["delta_rule, a write key"] = *recall(64, True, write=True), True
  for width in (64, 128):
    table[f"attention, heads of {width}"] = *attend_softly(B, T, H, 2, width, width), True
  return table | {
    "normalize": (
      lambda x: ops.normalize(x["x"], scale=x["scale"], **kernels),
      {"x": array(B * T, D), "scale": narrow},
      True,
    ),
    "causal_conv1d": (
      lambda x: ops.causal_conv1d(x["x"], x["kernel"], x["bias"], activation="silu", **kernels),
      {"x": array(B, T, D), "kernel": array(4, D, dtype=F32), "bias": narrow},
      True,
    ),
    "cross_entropy": (
      lambda x: cross_entropy(**x, gradient_dtype=BF16, **kernels),
      {
        "logits": array(1, B * T, 32_000, dtype=F32),
        "targets": array(1, B * T, dtype=jnp.int32),
        "weights": array(1, B * T, dtype=F32),
      },
      False,
    ),
    "rotations": (
      lambda x: rotations(RotationInputs(**x), dtype=BF16, **kernels)[0],
      {
        "keys": array(B, T, 1, 1, 128),
        "queries": array(B, T, 1, 1, 128),
        "key_offset": array(H, 1, 128, dtype=F32),
        "query_offset": array(H, 1, 128, dtype=F32),
        "pace": array(B, T, 32, dtype=F32),
        "step": array(B, T, H, dtype=F32),
        "weight": array(B, T, H, dtype=F32),
        "entering": array(B, T // CHUNK, H, 32, dtype=F32),
        "keep": array(B, T, dtype=F32),
      },
      True,
    ),
    "token_shift": (
      lambda x: ops.token_shift(x["x"], [x["weight"]], **kernels),
      {"x": array(B, T, D), "weight": narrow},
      True,
    ),
    "linear_attention, a token": (
      lambda x: ops.linear_attention(
        x["q"], x["k"], x["v"], initial_state=ops.LinearAttentionState(x["kv"], None), **kernels
      ),
      heads | {"kv": state},
      False,
    ),
    "delta_rule, a token": (
      lambda x: ops.delta_rule(*(x[n] for n in ("q", "k", "v", "beta")), **kernels),
      heads | {"beta": array(B, 1, H, dtype=F32)},
      False,
    ),
    "attention, a token": (
      lambda x: ops.attention(
        *(x[n] for n in ("q", "k", "v")),
        window=128,
        initial_state=ops.attention.init_state(
          batch=B, kv_heads=H, key_dim=K, window=128, dtype=BF16
        ),
        **kernels,
      )[0],
      heads,
      False,
    ),
  }


def main(name: str) -> None:
  with default(GPUS[name], device.AMPERE) as there:
    mesh = jax.sharding.Mesh([there], ("all",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
    for what, (call, arguments, differentiable) in programs().items():
      arguments = jax.tree.map(place, arguments)
      forms = {"": call}
      if differentiable:
        forms[", gradient"] = jax.grad(lambda x, call=call: total(call(x)), allow_int=True)
      for suffix, function in forms.items():
        text = jax.jit(function).trace(arguments).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in text.as_text(), f"{what}{suffix} has no kernel"
        text.compile()
        print(f"{name}: {what}{suffix}", flush=True)


if __name__ == "__main__":
  main(sys.argv[1])
