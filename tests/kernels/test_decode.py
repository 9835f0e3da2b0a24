"""The decode kernel, interpreted with a watch on races, and lowered for the shapes that matter."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.core import decode as steps
from pallas_kernels.linear_attention import decode as module
from pallas_kernels.linear_attention.decode import decode

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def inputs(B, H, K, V, *, dtype=jnp.float32, decay=None, bonus=False, normalize=False, seed=0):
  """The arrays of one step, by name. `decay` is a shape; positive q and k for the normalizer."""
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  feature = jnp.abs if normalize else lambda x: x
  return {
    "q": feature(normal(B, H, K)).astype(dtype),
    "k": feature(normal(B, H, K)).astype(dtype),
    "v": normal(B, H, V).astype(dtype),
    "log_decay": None if decay is None else -jnp.abs(normal(*decay)),
    "bonus": jnp.abs(normal(H, K)) if bonus else None,
    "kv": normal(B, H, K, V),
    "key_sum": jnp.abs(normal(B, H, K)) if normalize else None,
  }


def step_in_float64(q, k, v, log_decay, bonus, kv, key_sum, *, normalize, scale):
  """The recurrence as mathematics writes it: (out, kv, key_sum)."""
  q, k, v, kv = (np.asarray(x, np.float64) for x in (q, k, v, kv))
  key_sum = np.zeros(k.shape) if key_sum is None else np.asarray(key_sum, np.float64)
  decay = np.exp(np.asarray(0.0 if log_decay is None else log_decay, np.float64))
  decay = np.broadcast_to(decay, k.shape)
  write = k[..., :, None] * v[..., None, :]
  after = decay[..., None] * kv + write, decay * key_sum + k
  read = after
  if bonus is not None:
    u = np.asarray(bonus, np.float64)
    read = kv + u[..., None] * write, key_sum + u * k
  out = scale * np.einsum("bhk,bhkv->bhv", q, read[0])
  if normalize:
    out = out / np.sum(q * read[1], axis=-1, keepdims=True)
  return out, after[0], after[1] if normalize else None


def error(got, want):
  return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def check(arrays, *, normalize=False, scale=1.0, **options):
  got = decode(**arrays, normalize=normalize, scale=scale, interpret=INTERPRET, **options)
  want = step_in_float64(**arrays, normalize=normalize, scale=scale)
  assert got[0].dtype == arrays["v"].dtype
  assert error(got[0], want[0]) < max(
    float(jnp.finfo(arrays["v"].dtype).eps), 1e-6
  )  # two roundings
  assert error(got[1], want[1]) < 1e-6
  if normalize:
    assert error(got[2], want[2]) < 1e-6
  else:
    assert got[2] is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  ("shape", "options"),
  [
    ((2, 3, 16, 16), {}),
    ((1, 2, 48, 32), {"decay": (1, 2, 1), "scale": 48**-0.5}),
    ((2, 1, 32, 96), {"decay": (1, 1, 32), "normalize": True}),
    ((3, 2, 16, 48), {"decay": (3, 2, 1), "bonus": True}),
    ((1, 3, 64, 16), {"decay": (1, 3, 64), "bonus": True, "normalize": True, "scale": 0.25}),
    ((2, 2, 32, 32), {"decay": (2, 1, 32), "normalize": True, "scale": 2.0}),
    # Padded outside the kernel.
    ((2, 1, 20, 40), {"decay": (2, 1, 20), "bonus": True}),
    ((1, 1, 1, 3), {"decay": (1, 1, 1), "normalize": True}),
  ],
)
def test_a_step_is_the_recurrence(shape, options, dtype):
  keep = {name: options[name] for name in ("normalize", "scale") if name in options}
  made = {name: value for name, value in options.items() if name != "scale"}
  check(inputs(*shape, dtype=dtype, **made), **keep)


@pytest.mark.parametrize("tile", [16, 32, 64])
def test_all_tiles_and_the_widest_key(tile):
  arrays = inputs(1, 1, 256, 64, decay=(1, 1, 256), normalize=True)
  check(arrays, normalize=True, tile=tile)


@pytest.mark.parametrize("per", ["channel", "head"])
def test_decays_from_none_to_everything(per):
  """0 leaves what k v^T does not touch bit for bit, -inf forgets all of it."""
  shape = (1, 4, 16) if per == "channel" else (1, 4, 1)
  arrays = inputs(2, 4, 16, 16, decay=shape, normalize=True)
  levels = jnp.asarray([0.0, -0.1, -20.0, -jnp.inf], jnp.float32)
  arrays["log_decay"] = jnp.broadcast_to(levels[None, :, None], shape)
  check(arrays, normalize=True)
  arrays["k"] = arrays["k"].at[..., ::2].set(0.0)
  _, kv, key_sum = decode(**arrays, normalize=True, interpret=INTERPRET)
  rows = slice(None, None, 2)
  for got, before in ((kv, arrays["kv"]), (key_sum, arrays["key_sum"])):
    np.testing.assert_array_equal(got[:, 0, rows], before[:, 0, rows])
    assert not np.any(np.asarray(got[:, 3, rows]))
    assert error(got[:, 1, rows], np.exp(-0.1) * np.asarray(before[:, 1, rows])) < 1e-6


def test_steps_follow_one_another():
  """Five steps through the returned state, as decoding runs them."""
  shape, options = (2, 2, 16, 32), {"decay": (1, 2, 16), "normalize": True}
  step = jax.jit(functools.partial(decode, normalize=True, interpret=INTERPRET))
  arrays = inputs(*shape, **options)
  state = want = arrays["kv"], arrays["key_sum"]
  for number in range(5):
    arrays = inputs(*shape, **options, seed=number)
    out, *state = step(**{**arrays, "kv": state[0], "key_sum": state[1]})
    arrays |= {"kv": want[0], "key_sum": want[1]}
    want_out, *want = step_in_float64(**arrays, normalize=True, scale=1.0)
    assert max(map(error, (out, *state), (want_out, *want))) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("widths", [(16, 128, 128), (12, 64, 64), (3, 256, 48), (1, 40, 24)])
@pytest.mark.parametrize("B", [1, 64, 512])
def test_lowers_for_cuda_in_place(B, widths, dtype):
  H, K, V = widths
  spec = jax.ShapeDtypeStruct
  decay = {1: (1, H, K), 64: (B, H, 1), 512: (B, H, K)}[B]
  normalize = B != 64
  arrays = {
    "q": spec((B, H, K), dtype),
    "k": spec((B, H, K), dtype),
    "v": spec((B, H, V), dtype),
    "log_decay": spec(decay, jnp.float32),
    "bonus": spec((H, K), jnp.float32) if B == 512 else None,
    "kv": spec((B, H, K, V), jnp.float32),
    "key_sum": spec((B, H, K), jnp.float32) if normalize else None,
  }
  step = jax.jit(functools.partial(decode, normalize=normalize), donate_argnames="kv")
  text = step.trace(**arrays).lower(lowering_platforms=("cuda",)).as_text()
  state = f"tensor<{B}x{H}x{K}x{V}xf32>"
  assert text.count("custom_call @mosaic_gpu") == 1
  if K % 16 == 0:
    # The caller's buffer becomes the kernel's, the kernel's becomes the result.
    assert re.search(re.escape(state) + r" \{tf.aliasing_output = 1 : i32\}", text)
    operand = 5 + normalize + (B == 512) - 1
    alias = rf"output_tuple_indices = \[{1 + normalize}\], operand_index = {operand}"
    assert re.search(alias, text)
    assert text.count("stablehlo.") - text.count("#stablehlo.") == 1, "something next to the kernel"


def test_small_batches_have_blocks_for_most_multiprocessors():
  blocks = lambda B, H, V: B * H * V // steps.value_tile(B, H, V)
  assert blocks(1, 16, 128) == 128
  assert blocks(64, 16, 128) == 4096
  assert steps.value_tile(64, 16, 48) == 16


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"q": jnp.zeros((1, 1, 1, 16))}, "one token"),
    ({"k": jnp.zeros((1, 1, 17))}, "k has shape"),
    ({"v": jnp.zeros((1, 1, 16), jnp.float16)}, "v is float16"),
    ({"log_decay": jnp.zeros((1, 16))}, "log_decay has shape"),
    ({"log_decay": jnp.zeros((1, 1, 1), jnp.bfloat16)}, "log_decay is bfloat16"),
    ({"bonus": jnp.zeros((16,))}, "bonus has shape"),
    ({"kv": jnp.zeros((1, 1, 16, 8))}, "kv has shape"),
    ({"kv": jnp.zeros((1, 1, 16, 16), jnp.bfloat16)}, "the state is bfloat16"),
    ({"key_sum": None}, "key_sum is None"),
  ],
)
def test_decode_wrong_arguments_are_named(change, message):
  arrays = inputs(1, 1, 16, 16, normalize=True) | change
  with pytest.raises(ValueError, match=message):
    decode(**arrays, normalize=True, interpret=INTERPRET)


def test_a_tile_divides_the_values():
  with pytest.raises(ValueError, match="tile=32"):
    decode(**inputs(1, 1, 16, 48), normalize=False, tile=32, interpret=INTERPRET)


def test_the_widest_key_is_256():
  arrays = inputs(1, 1, 272, 16)
  assert "K=272" in module.unsupported(**arrays, normalize=False)
  assert module.unsupported(**inputs(1, 1, 256, 16), normalize=False) is None
