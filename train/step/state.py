"""The training state: a plain dictionary.

`params` (nested dictionary of arrays), `opt_state` (optax), `step` (int32, the number of finished
steps), with `skip_spikes` `spikes` (`train.step.step_guard`), and with `optimizer.ema_decay` `ema`
(the average of `params`, float32).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lnssm_jax import sharding
from train import config
from train.cluster import compile_cache, device_mesh
from train.step import step_guard
from train.step.model import build_model, params_of
from train.step.optimizer import make_optimizer

State = dict[str, Any]


def abstract_state(cfg: config.Train, mesh: Mesh) -> State:
  """Shape, dtype and sharding of every leaf of the state, without allocating any."""
  shapes = jax.eval_shape(initializer(cfg), jax.random.key(cfg.seed))
  # The sharding rules match the end of a path, so Adam's moments are sharded as their parameters.
  return jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    shapes,
    sharding.shardings(shapes, mesh),
  )


def abstract_batch(cfg: config.Train, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape, dtype and sharding of the arrays of a batch."""
  shape, where = (cfg.global_batch, cfg.seq_len), device_mesh.batch_sharding(mesh)
  describe = lambda dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
  batch = {name: describe(jnp.int32) for name in ("tokens", "targets", "segment_ids")}
  floats = ("weights", "reference") if cfg.data.has_pairs else ("weights",)
  return batch | {name: describe(jnp.float32) for name in floats}


def init_state(
  cfg: config.Train, mesh: Mesh, kernels: Path | None = None, *, params: Any = None
) -> State:
  """Initializes the state from `cfg.seed`, sharded; the same numbers on any mesh.

  Args:
    kernels: as in `make_train_step`.
    params: of a model that was trained, sharded, from which the state begins; initial ones are not
      computed then.
  """
  initialize = initializer(cfg)

  def init(key, given):
    state = initialize(key, given)
    # A sharded computation of an orthogonal matrix would round differently: compute it whole.
    whole = {name: state[name] for name in ("params", "ema") if name in state}
    state |= jax.lax.with_sharding_constraint(whole, device_mesh.replicated(mesh))
    return {name: x for name, x in state.items() if given is None or name != "params"}

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))
  given = {} if params is None else {"params": params}
  shardings = {name: x for name, x in shardings.items() if name not in given}
  options = compile_cache.options(mesh, kernels)
  make = jax.jit(init, out_shardings=shardings, compiler_options=options)
  return make(jax.random.key(cfg.seed), params) | given


def initializer(cfg: config.Train) -> Callable[..., State]:
  """The function from a key, and the parameters if there are some, to the state, on one device."""
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps, cfg.seed)

  def init(key, params=None):
    params = params_of(build_model(cfg.model, key)) if params is None else params
    state = {
      "params": params,
      "opt_state": tx.init(optax.tree.cast(params, jnp.float32)),
      "step": jnp.int32(0),
    }
    if cfg.skip_spikes is not None:
      state["spikes"] = step_guard.init_statistics()
    if cfg.optimizer.ema_decay is not None:
      state["ema"] = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    return state

  return init
