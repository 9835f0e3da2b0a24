"""Ops with N states per channel on the Mosaic-GPU kernels: selective_scan and longhorn_scan.

Import this module where it is needed only (see `dispatch.Kernels`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lnssm_jax.ops.core import single_step
from lnssm_jax.ops.core.channel_states import Options
from pallas_kernels.channel_states import config, decode, op
from pallas_kernels.channel_states.recurrence import Inputs, Recurrence
from pallas_kernels.core.mma import of_architecture
from pallas_kernels.core.wgmma import Backend

_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_STATES = 256
_MOST_ROWS = 65535
_AXES = {
  "x": "BTD", "rate": "BTD", "write_key": "BTN", "read_key": "BTN", "skip": "D", "initial": "BDN",
  "a": "DN", "other_squares": "BTN", "key_norm": "BT", "rate_logits": "BTD", "rate_bias": "D",
}  # fmt: skip


class ChannelScan(NamedTuple):
  """An op on the kernels: how its arguments become theirs, and when they run."""

  fields: Mapping[str, str]  # the kernels' names of the arrays -> fields of the op's `Inputs`
  recurrence: Callable[..., Recurrence]  # of `exact`
  is_exact: Callable[[jax.Array, int], bool]  # (x, N): whether T > 1 needs the exact recurrence
  chunked: Callable[[Any, Options], tuple[Any, Any]]  # XLA's form, for the gradient of T = 1
  # Further arrays that the kernels for T > 1 read, from those of `fields`.
  prepare: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda arrays: {}

  def unsupported(self, inputs, options: Options) -> str | None:
    """Why the kernels cannot run these arguments on any device, or None."""
    if options.chunk_size is not None:
      return f"chunk_size={options.chunk_size}, and the kernels choose their own chunks"
    for name in self.fields.values():
      dtype = getattr(inputs, name).dtype
      if dtype not in _DTYPES:
        return f"{name} has dtype {dtype}, and the kernels take bfloat16 and float32"
    h = inputs.state.h
    if h.dtype != jnp.float32:
      return f"initial_state has dtype {h.dtype}, and the kernels compute in float32"
    if h.shape[-1] > _MOST_STATES:
      return f"each channel has {h.shape[-1]} states, and at most {_MOST_STATES} are supported"
    if h.shape[0] > _MOST_ROWS:
      return f"x has B={h.shape[0]}, and a grid of thread blocks has at most {_MOST_ROWS} per axis"
    return None

  def preferred(self, inputs, options: Options) -> bool:
    """Whether `implementation=None` takes the kernels for sizes like these."""
    del options
    D, N = inputs.state.h.shape[1:]
    if inputs.x.shape[1] > 1:
      return config.preferred(D)
    return self._fits_decode(inputs) and decode.fits(D, N)

  def run(
    self,
    inputs,
    options: Options,
    *,
    sizes=None,
    num_splits: int | None = None,
    interpret=None,
    architecture: str | None = None,
  ):
    """`sizes`: the configuration of the kernels for many tokens, `num_splits`: into how many the
    sequence is cut, `architecture`: whose copies they make; None leaves them to `config` and the
    device."""
    del options
    arrays, h = self._arrays(inputs), inputs.state.h
    if self._fits_decode(inputs):
      out, h = self._single_token(inputs, interpret)
    else:
      recurrence = self.recurrence(exact=self.is_exact(inputs.x, h.shape[2]))
      arrays |= self.prepare(arrays) | self._logits(inputs, recurrence)
      first = None if inputs.segments is None else inputs.segments.first()
      backend = of_architecture(architecture, interpret)
      how = {"sizes": sizes, "num_splits": num_splits, "backend": backend}
      out, h = scan(recurrence, arrays, inputs.skip, h, first, **how)
    return out, inputs.state._replace(h=h)

  def _arrays(self, inputs) -> dict[str, jax.Array]:
    return {name: getattr(inputs, field) for name, field in self.fields.items()}

  def _logits(self, inputs, recurrence) -> dict[str, jax.Array]:
    """The logits of the rates and their bias, where the kernels write the gradients of both."""
    rate = self.fields["rate"]
    logits, bias = getattr(inputs, f"{rate}_logits"), getattr(inputs, f"{rate}_bias")
    narrow = logits is not None and logits.dtype == jnp.bfloat16
    if not narrow or recurrence.exact or is_cut(inputs.state.h.shape[2]):
      return {}
    return {"rate_logits": logits, "rate_bias": bias}

  def _fits_decode(self, inputs) -> bool:
    """Whether the kernel for single tokens runs these arguments."""
    arrays = decode.Inputs(**self._arrays(inputs), skip=inputs.skip)
    return inputs.x.shape[1] == 1 and decode.unsupported(arrays, inputs.state.h) is None

  def _single_token(self, inputs, interpret):
    """T = 1 in one kernel, which updates the state in place. No boundary can lie before it."""
    recurrence = self.recurrence(exact=True)

    def kernel(arrays, skip, h):
      token = {name: x if name == "a" else x[:, 0] for name, x in arrays.items()}
      given = decode.Inputs(**token, skip=skip)
      out, h = decode.decode(recurrence, given, h, interpret=interpret)
      return out[:, None], h

    def form(arrays, skip, h):
      given = {self.fields[name]: x for name, x in arrays.items()}
      state = inputs.state._replace(h=h)
      given = inputs._replace(**given, skip=skip, state=state, segments=None)
      out, state = self.chunked(given, Options())
      return out, state.h

    arguments = self._arrays(inputs), inputs.skip, inputs.state.h
    return single_step.with_gradient_of(form, kernel)(*arguments)


def is_cut(N: int) -> bool:
  """Whether the kernels process the N states of a channel in several groups."""
  return config.STATE_WIDTHS[-1] < N


def scan(
  recurrence: Recurrence,
  arrays: dict,
  skip,
  state,
  first,
  *,
  sizes=None,
  num_splits=None,
  backend: Backend,
) -> tuple[jax.Array, jax.Array]:
  """`out` [B, T, D] and the state after the last token.

  Args:
    arrays: fields of the kernels' `Inputs`.
    skip: [D].
    state: [B, D, N] float32.
    first: [B, T], whether the state is reset before a token, or None.
    sizes: the configuration of the kernels; None takes that of the table.
    num_splits: into how many splits the sequence is cut; None leaves it to `config`.
  """
  x = arrays["x"]
  B, T, D = x.shape
  N = state.shape[2]
  width = config.state_width(N)
  groups = -(-N // width)
  num_splits = num_splits or config.num_splits(B, T, D, recurrence.min_splits)
  ends = {"T": -T % (config.CHUNK * num_splits), "D": -D % config.CHANNELS, "N": groups * width - N}
  pad = lambda array, axes: jnp.pad(array, [(0, ends.get(axis, 0)) for axis in axes])
  arrays = arrays | {"skip": skip, "initial": state}
  inputs = Inputs(**{name: pad(array, _AXES[name]) for name, array in arrays.items()})
  if first is not None:
    first = pad(first, "BT")
  bytes_of = inputs.x.dtype.itemsize, inputs.rate.dtype.itemsize
  shape = config.Shape(recurrence.name, inputs.x.shape[2], width, recurrence.num_sums, *bytes_of)
  sizes = sizes or config.default(shape)
  sizes.check(shape)

  if groups == 1:
    logits = arrays.get("rate_logits")
    logits_dtype = None if logits is None else logits.dtype
    static = op.Static(recurrence, x.dtype, sizes, backend, logits_dtype)
    out, last = op.scan(static, inputs, first, num_splits)
    return out[:, :T, :D], last[:, :D, :N]

  # Groups of states one after the other: each adds to the output in float32.
  static = op.Static(recurrence, jnp.dtype(jnp.float32), sizes, backend)
  split = lambda y: jnp.moveaxis(y.reshape(*y.shape[:-1], groups, width), -2, 0)
  grouped = {name: split(getattr(inputs, name)) for name in arrays if "N" in _AXES[name]}
  grouped["skip"] = jnp.pad(inputs.skip[None], ((0, groups - 1), (0, 0)))

  def group(total, own):
    out, last = op.scan(static, inputs._replace(**own), first, num_splits)
    return total + out, last

  out, last = jax.lax.scan(group, jnp.zeros_like(inputs.x, jnp.float32), grouped)
  last = jnp.moveaxis(last, 0, -2).reshape(B, -1, groups * width)
  return out[:, :T, :D].astype(x.dtype), last[:, :D, :N]
