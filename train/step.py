"""The training state, and the compiled functions that train and evaluate it.

A state is a plain dictionary: `params` (nested dictionary of arrays), `opt_state` (optax), `step`
(int32, the number of finished steps) and, with `skip_spikes`, `spikes` (`train.skip`). Modules
exist only inside the compiled functions.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.models import LanguageModel
from train import config, skip
from train import mesh as meshes
from train.loss import LossSums, next_token_loss
from train.optimizer import as_skipped, make_optimizer, make_schedule

State = dict[str, Any]
Batch = dict[str, jax.Array]  # tokens, targets, segment_ids int32 [B, T]; weights float32 [B, T]


def build_model(
  model: config.Model, key: jax.Array, *, sequence_axis: str | None = None
) -> LanguageModel:
  """The language model that the settings describe, with random parameters."""
  return LanguageModel(
    vocab_size=model.vocab_size,
    dim=model.dim,
    num_layers=model.num_layers,
    num_heads=model.num_heads,
    mixer=model.mixer,
    mixer_options=model.mixer_options,
    channel_mixer=model.channel_mixer,
    channel_hidden=model.channel_hidden,
    norm=model.norm,
    embedding_norm=model.embedding_norm,
    tie_embeddings=model.tie_embeddings,
    remat=model.remat,
    unroll=model.unroll,
    sequence_axis=sequence_axis,
    dtype=jnp.dtype(model.dtype),
    param_dtype=jnp.dtype(model.param_dtype),
    rngs=nnx.Rngs(key),
  )


def model_graph(model: config.Model, sequence_axis: str | None = None) -> Any:
  """The static part of the model, for `nnx.merge(graph, params)`. Computes no parameters."""
  build = functools.partial(build_model, model, sequence_axis=sequence_axis)
  return nnx.split(jax.eval_shape(build, jax.random.key(0)), nnx.Param)[0]


def abstract_state(cfg: config.Train, mesh: Mesh) -> State:
  """Shape, dtype and sharding of every leaf of the state, without memory for any."""
  shapes = jax.eval_shape(_initializer(cfg), jax.random.key(cfg.seed))
  # The rules look at the end of a path, so Adam's moments lie beside their parameters.
  return jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    shapes,
    sharding.shardings(shapes, mesh),
  )


def init_state(cfg: config.Train, mesh: Mesh, kernels: Path | None = None) -> State:
  """A new state from `cfg.seed`, every leaf made where it belongs; the same numbers on any mesh.

  `kernels` as in `make_train_step`.
  """
  initialize = _initializer(cfg)

  def init(key):
    state = initialize(key)
    # An orthogonal matrix made in parts would be rounded otherwise: make each whole, then divide.
    whole = jax.lax.with_sharding_constraint(state["params"], meshes.replicated(mesh))
    return state | {"params": whole}

  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))
  options = _reproducible(mesh, kernels)
  make = jax.jit(init, out_shardings=shardings, compiler_options=options)
  return make(jax.random.key(cfg.seed))


def make_train_step(
  cfg: config.Train,
  graph: Any,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  kernels: Path | None = None,
) -> jax.stages.Wrapped:
  """A compiled `(state, batch) -> (state, metrics)` that consumes (donates) the old state.

  Metrics are float32 scalars: `loss` (nats per predicted token, before the step), `grad_norm`
  (before clipping), `param_norm` (after the step), `learning_rate`, `tokens` (sum of weights), and
  `skipped`: 1 where the step was not finite, or a spike, and left the parameters as they were. A
  batch may hold `votes` (`train.distributed`); then the metrics do, as what any process voted.

  With `cfg.accumulate` microbatches the gradient is the sum over all predicted tokens divided by
  their number, as for one large batch, however unequally the microbatches are filled.

  `kernels` is a folder in which a GPU's choices of kernels are kept: processes that share it
  compute the same bits.
  """
  schedule = make_schedule(cfg.optimizer, cfg.steps)
  loss_sums = _make_loss_sums(cfg, graph, mesh)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))

  def loss(params, batch):
    sums = loss_sums(params, batch, cfg.optimizer.logit_penalty)
    return sums.nats, sums

  def gradient_sums(params, batch):
    (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
    return _float32(gradients), sums

  def step(state, batch):
    params, votes = state["params"], batch.get("votes")
    batch = {name: array for name, array in batch.items() if name != "votes"}
    gradients, sums = _accumulate(functools.partial(gradient_sums, params), batch, cfg.accumulate)
    tokens = jnp.where(sums.weight > 0, sums.weight, 1.0)
    gradients = jax.tree.map(lambda g: g / tokens, gradients)
    gradients = jax.lax.with_sharding_constraint(gradients, shardings["params"])
    mean_loss, grad_norm = sums.nats / tokens, optax.tree.norm(gradients)
    good = skip.is_finite(mean_loss, grad_norm)
    if cfg.skip_spikes is not None:
      good &= ~skip.is_spike(state["spikes"], mean_loss, grad_norm, cfg.skip_spikes)
    choose = functools.partial(jax.tree.map, lambda new, old: jnp.where(good, new, old))
    with jax.named_scope("optimizer"):
      updates, opt_state = tx.update(gradients, state["opt_state"], _float32(params))
      opt_state = choose(opt_state, as_skipped(state["opt_state"], opt_state))
      params = choose(optax.apply_updates(params, updates), params)
    metrics = {
      "loss": mean_loss,
      "grad_norm": grad_norm,
      "param_norm": optax.tree.norm(params),
      "learning_rate": jnp.asarray(schedule(state["step"]), jnp.float32),
      "tokens": sums.weight,
      "skipped": 1 - good.astype(jnp.float32),
    }
    if votes is not None:
      metrics["votes"] = votes.max(0)
    state = state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
    if cfg.skip_spikes is not None:
      seen = state["spikes"]
      state["spikes"] = choose(skip.watch(seen, mean_loss, grad_norm), seen)
    return state, metrics

  # Fixed output shardings: the state comes back where it was, so the next call fits this one.
  return jax.jit(
    step,
    donate_argnums=0,
    out_shardings=(shardings, meshes.replicated(mesh)),
    compiler_options=_reproducible(mesh, kernels),
  )


def make_eval_step(
  cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None = None
) -> jax.stages.Wrapped:
  """A compiled `(params, batch) -> LossSums`; `kernels` as in `make_train_step`."""

  loss_sums = _make_loss_sums(cfg, graph, mesh)

  def step(params, batch):
    return loss_sums(params, batch, 0.0)

  options = _reproducible(mesh, kernels)
  return jax.jit(step, out_shardings=meshes.replicated(mesh), compiler_options=options)


def _reproducible(mesh: Mesh, kernels: Path | None) -> dict[str, Any] | None:
  """Compiler options by which every process that shares the folder `kernels` gets the same bits.

  For a GPU the compiler chooses matrix-product kernels by timing them, and the next process may
  choose others, which round differently. In the folder it finds the choices of the first.
  """
  if kernels is None or mesh.devices.flat[0].platform != "gpu":
    return None
  kernels.mkdir(exist_ok=True)
  return {"xla_gpu_per_fusion_autotune_cache_dir": str(kernels.absolute())}


def _initializer(cfg: config.Train) -> Callable[[jax.Array], State]:
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps)

  def init(key):
    params = nnx.to_pure_dict(nnx.state(build_model(cfg.model, key), nnx.Param))
    state = {"params": params, "opt_state": tx.init(_float32(params)), "step": jnp.int32(0)}
    return state if cfg.skip_spikes is None else state | {"spikes": skip.start()}

  return init


def _make_loss_sums(cfg: config.Train, graph: Any, mesh: Mesh) -> Callable[..., LossSums]:
  """`(params, batch, logit_penalty) -> LossSums` of a whole batch on this mesh."""
  axes = meshes.mapped_axes(mesh)
  if mesh.shape["sequence"] > 1:
    graph = model_graph(cfg.model, "sequence")
  gather = None
  if mesh.shape["tensor"] > 1:
    gather = functools.partial(sharding.constrain, mesh=mesh)
  elif mesh.shape["fsdp"] > 1:
    gather = functools.partial(sharding.gather, axis_name="fsdp")

  def sums(params, batch, penalty):
    if gather is not None:  # layers are gathered one by one, when they run
      params = params | gather({name: params[name] for name in params if name != "blocks"})
    model = nnx.merge(graph, params)
    hidden, _ = model.hidden(batch["tokens"], segment_ids=batch["segment_ids"], gather=gather)
    return next_token_loss(
      hidden,
      model.head_kernel(),
      batch["targets"],
      batch["weights"],
      chunk=cfg.loss_chunk,
      logit_penalty=penalty,
      vocab_axis="tensor" if mesh.shape["tensor"] > 1 else None,
    )

  if not axes:

    def divided(params, batch, penalty):
      # The scans ask for the mesh, over which they map their kernels.
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return sums(params, batch, penalty)

    return divided

  part = PartitionSpec(tuple(axis for axis in meshes.ROWS if axis in axes) or None, "sequence")
  parts = tuple(axis for axis in axes if axis != "tensor")

  def mapped(params, batch, penalty):
    def of_part(params, batch):
      return jax.tree.map(lambda x: jax.lax.psum(x, parts), sums(params, batch, penalty))

    inputs = sharding.param_specs(params, parts), part
    specs = {"mesh": mesh, "in_specs": inputs, "out_specs": PartitionSpec()}
    return jax.shard_map(of_part, **specs, axis_names=set(axes))(params, batch)

  return mapped


def _accumulate(sums_of: Callable[[Batch], Any], batch: Batch, count: int) -> Any:
  """`sums_of` added up over `count` microbatches, one after another."""
  if count == 1:
    return sums_of(batch)

  # Row r goes to microbatch r % count: rows of one device stay on it.
  split = lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1)
  microbatches = jax.tree.map(split, batch)

  def body(total, microbatch):
    return jax.tree.map(jnp.add, total, sums_of(microbatch)), None

  shapes = jax.eval_shape(sums_of, jax.tree.map(lambda x: x[0], microbatches))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return jax.lax.scan(body, zeros, microbatches)[0]


def _float32(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
