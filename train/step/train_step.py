"""The compiled functions that train and evaluate a model; modules exist only inside them."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lnssm_jax import sharding
from lnssm_jax.ops.core.dropout import row_keys
from train import config
from train.cluster import compile_cache, device_mesh
from train.step.loss import next_token_loss, next_token_nats
from train.step.model import model_graph
from train.step.optimizer import make_schedule, penalties_of
from train.step.preference import preference_loss
from train.step.state import abstract_state
from train.step.step import Rules, step

# tokens, targets, segment_ids int32 [B, T]; weights float32 [B, T]; dropout uint32 [B, 2] keys.
# Of pairs of answers also reference float32 [B, T]: `train.step.preference` is their loss.
Batch = dict[str, jax.Array]

_DROPOUT = 1 << 31  # the keys of parameters have small numbers


def make_train_step(
  cfg: config.Train,
  graph: Any,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  kernels: Path | None = None,
) -> jax.stages.Wrapped:
  """Builds the jitted step `(state, batch) -> (state, metrics)`, which donates the old state.

  Metrics are those of `train.step.step.step`, with the loss in nats per predicted token, or per
  pair of answers, if the batch has a `reference`. If the
  batch has `votes` (`distributed.ballot`), they hold their maximum over all devices. The losses of
  auxiliary outputs count for the tokens of their microbatch each.

  With dropout, the keys of a row are functions of `cfg.seed`, the step and the number of the row in
  the global batch: a run has the same masks however it is resumed, sharded or split into
  microbatches.

  Args:
    kernels: folder that caches a GPU's autotuning results; processes that share it compute the
      same bits.
  """
  loss_sums = _make_loss_sums(cfg, graph, mesh, with_aux=True)
  shardings = jax.tree.map(lambda x: x.sharding, abstract_state(cfg, mesh))
  penalties = penalties_of(cfg.optimizer)
  rules = Rules(
    tx=tx,
    schedule=make_schedule(cfg.optimizer, cfg.steps),
    accumulate=cfg.accumulate,
    skip_spikes=cfg.skip_spikes,
    ema_decay=cfg.optimizer.ema_decay,
    shardings=shardings["params"],
    num_layers=cfg.model.num_layers,
  )

  def loss(params, batch):
    return loss_sums(params, batch, penalties)

  def train_step(state, batch):
    votes = batch.get("votes")
    batch = {name: array for name, array in batch.items() if name != "votes"}
    if nnx.merge(graph, state["params"]).has_dropout:
      of_step = jax.random.fold_in(dropout_key(cfg.seed), state["step"])
      batch["dropout"] = row_keys("make_train_step", of_step, len(batch["tokens"]))
    state, metrics = step(loss, state, batch, rules)
    if votes is not None:
      metrics["votes"] = votes.max(0)
    return state, metrics

  # Fixed output shardings: the returned state is sharded as the argument, so one program suffices.
  return jax.jit(
    train_step,
    donate_argnums=0,
    out_shardings=(shardings, device_mesh.replicated(mesh)),
    compiler_options=compile_cache.options(mesh, kernels),
  )


def make_eval_step(
  cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None = None
) -> jax.stages.Wrapped:
  """Builds the jitted `(params, batch) -> LossSums`; `kernels` as in `make_train_step`."""
  loss_sums = _make_loss_sums(cfg, graph, mesh)

  def step(params, batch):
    return loss_sums(params, batch, {})[0]

  options = compile_cache.options(mesh, kernels)
  return jax.jit(step, out_shardings=device_mesh.replicated(mesh), compiler_options=options)


def make_reference_step(
  cfg: config.Train, graph: Any, mesh: Mesh, kernels: Path | None = None
) -> jax.stages.Wrapped:
  """Builds the jitted `(params, batch) -> reference` of a batch of pairs, float32 [B, T]."""
  nats = _make_loss_sums(cfg, graph, mesh, of_tokens=True)
  options = compile_cache.options(mesh, kernels)
  whole = device_mesh.replicated(mesh)  # each process keeps all
  return jax.jit(nats, out_shardings=whole, compiler_options=options)


def _make_loss_sums(
  cfg: config.Train, graph: Any, mesh: Mesh, *, with_aux: bool = False, of_tokens: bool = False
) -> Callable[..., Any]:
  """Builds `(params, batch, penalties) -> (LossSums, aux)` over a global batch on `mesh`.

  `aux` is the auxiliary output of the layers times the sum of weights, so that it adds up over
  devices and microbatches as the loss does; None without `with_aux`. With `of_tokens` it is
  `(params, batch) -> [B, T]`, the weighted negative log-likelihood of each target.
  """
  axes = device_mesh.mapped_axes(mesh)
  if mesh.shape["sequence"] > 1:
    graph = model_graph(cfg.model, "sequence")
  gather = None
  if mesh.shape["tensor"] > 1:
    gather = functools.partial(sharding.constrain, mesh=mesh)
  elif mesh.shape["fsdp"] > 1:
    gather = functools.partial(sharding.gather, axis_name="fsdp")

  def sums(params, batch, penalties=MappingProxyType({})):
    if gather is not None:  # layers gather their parameters when they run
      params = params | gather({name: params[name] for name in params if name != "blocks"})
    model = nnx.merge(graph, params)
    hidden_of = model.hidden_and_aux if with_aux else model.hidden
    options = {"segment_ids": batch["segment_ids"], "dropout_key": batch.get("dropout")}
    hidden, rest = hidden_of(batch["tokens"], **options, gather=gather)
    arrays = hidden, model.head_kernel(), batch["targets"], batch["weights"]
    options = {"chunk": cfg.loss_chunk, "soft_cap": model.logit_soft_cap}
    options["vocab_axis"] = "tensor" if mesh.shape["tensor"] > 1 else None
    if of_tokens:
      return next_token_nats(*arrays, **options)
    if "reference" in batch:
      sums = preference_loss(
        next_token_nats(*arrays, **options),
        *(batch[name] for name in ("reference", "segment_ids", "weights")),
        beta=cfg.preference.beta,
        label_smoothing=cfg.preference.label_smoothing,
        axis_name="sequence" if mesh.shape["sequence"] > 1 else None,
      )
    else:
      sums = next_token_loss(*arrays, **options, **penalties)
    return sums, jax.tree.map(lambda x: x * sums.weight, rest if with_aux else None)

  if not axes:

    def partitioned(*arguments):
      # The scans wrap their kernels in shard_map over the ambient mesh.
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return sums(*arguments)

    return partitioned

  rows = tuple(axis for axis in device_mesh.ROWS if axis in axes) or None
  batch_axes = tuple(axis for axis in axes if axis != "tensor")

  def mapped(params, batch, *penalties):
    def of_shard(params, batch):
      found = sums(params, batch, *penalties)
      return found if of_tokens else jax.tree.map(lambda x: jax.lax.psum(x, batch_axes), found)

    of_batch = {name: PartitionSpec(rows, "sequence") for name in batch}
    if "dropout" in batch:
      of_batch["dropout"] = PartitionSpec(rows)
    inputs = sharding.param_specs(params, batch_axes), of_batch
    outputs = PartitionSpec(rows, "sequence") if of_tokens else PartitionSpec()
    specs = {"mesh": mesh, "in_specs": inputs, "out_specs": outputs}
    return jax.shard_map(of_shard, **specs, axis_names=set(axes))(params, batch)

  return mapped


def dropout_key(seed: int) -> jax.Array:
  """The key of a run's dropout; those of its parameters are made from the seed in another way."""
  return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _DROPOUT)
