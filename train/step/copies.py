"""Copies of one model that differ in seed and learning rate, trained as one program.

    copies = Copies(cfg, seeds=(0, 1, 2), learning_rates=(1e-3, 3e-3))
    for batch in batches:
      metrics = copies.step(batch)              # loss [6]
    copies.loss(batch).nats, copies.right(batch)

A small model leaves most of a GPU idle. Here the training step is vmapped over the copies, which
see the same batches, or each its own. Each has the dropout of its own seed, and skips the steps
that it would skip alone (`train.step.step_guard`).
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train import config
from train.cluster import compile_cache, device_mesh
from train.step import step_guard
from train.step.loss import LossSums, next_token_loss
from train.step.model import model_graph
from train.step.optimizer import make_optimizer, penalties_of
from train.step.state import State, initializer
from train.step.step import Rules, step
from train.step.train_step import dropout_key

_PEAK = 1e-3  # learning rate of the programs, which each copy scales


class Copies:
  """R copies of the model of `cfg`, one for each pair of a seed and a learning rate.

  A batch is a dictionary of `tokens` [B, T] and, optionally, `segment_ids` [B, T]. With `positions`
  [B, n], `targets` [B, n] belong to these positions; else `targets` and, optionally, `weights` are
  [B, T]. With a leading axis R in all of them each copy has its own batch. The learning rate scales
  the schedule of `cfg.optimizer`, whose `peak_lr` it replaces.

  Args:
    seeds, learning_rates: all pairs of these are copies.
    runs: or the pairs themselves.
    kernels: a folder for XLA's choices of kernels on a GPU, see `compile_cache.options`.

  Attributes:
    runs: (seed, learning rate) of each copy.
    params: the parameters, with a leading axis R.
    state: the whole training state, with a leading axis R; may be set, to resume.
  """

  def __init__(
    self,
    cfg: config.Train,
    *,
    seeds: Sequence[int] = (),
    learning_rates: Sequence[float] = (),
    runs: Sequence[tuple[int, float]] = (),
    kernels: Path | None = None,
  ):
    self.cfg = cfg
    self.runs = [*itertools.product(seeds, learning_rates), *runs]
    if not self.runs:
      raise ValueError("Copies needs at least one seed and one learning rate.")
    self._ratios = jnp.asarray([rate / _PEAK for _, rate in self.runs])
    keys = jnp.stack([jax.random.key(seed) for seed, _ in self.runs])
    self._dropout_keys = jnp.stack([dropout_key(seed) for seed, _ in self.runs])
    programs = _programs(json.dumps(config.to_dict(without_run(cfg)), sort_keys=True), kernels)
    self.state: State = programs.init(keys)
    self._step: dict[bool, Any] = dict(programs.step)
    self._loss, self._right = programs.loss, programs.right

  @property
  def params(self) -> Any:
    return self.state["params"]

  @property
  def diverged(self) -> np.ndarray:
    """[R] bool: whether `max_skipped` consecutive steps of a copy were skipped, as in `train.fit`.

    Those without targets count neither way.
    """
    return np.asarray(self.state["failures"][:, 1]) >= self.cfg.max_skipped

  def compile(self, batch: Any) -> None:
    """Compiles the training step for batches like this one."""
    arguments = self.state, self._ratios, self._dropout_keys, batch
    own = _is_own(batch)
    self._step[own] = self._step[own].lower(*arguments).compile()

  def step(self, batch: Any, scale: float = 1.0) -> dict[str, Any]:
    """Trains on a batch; metrics [R] of `train.step.step`, with a router also `aux` of each layer.

    `scale` multiplies the learning rates of this step. Nothing but the schedule advances in a copy
    of whose batch no target counts (`tokens` is 0).
    """
    step = self._step[_is_own(batch)]
    ratios = self._ratios * np.float32(scale)
    self.state, metrics = step(self.state, ratios, self._dropout_keys, batch)
    return metrics

  def advance(self, state: State, batch: Any, scale: float = 1.0) -> tuple[State, dict[str, Any]]:
    """`step` from `state`, as `train.loop.train` calls it."""
    self.state = state
    metrics = self.step(batch, scale)
    return self.state, metrics

  def restart(self, params: Any) -> None:
    """Sets the parameters to copies of `params`, with a leading axis R, and begins at step 0."""
    transformation = make_optimizer(self.cfg.optimizer, self.cfg.steps)[0]
    opt_state = jax.vmap(transformation.init)(optax.tree.cast(params, jnp.float32))
    new = {"params": jax.tree.map(jnp.copy, params), "opt_state": opt_state}
    if "ema" in self.state:
      new["ema"] = jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
    zeros = {name: jnp.zeros_like(self.state[name]) for name in ("step", "failures")}
    if "spikes" in self.state:
      zeros["spikes"] = jax.tree.map(jnp.zeros_like, self.state["spikes"])
    self.state = self.state | new | zeros

  def loss(self, batch: Any) -> LossSums:
    """Sums of the loss, of arrays [R]."""
    return self._loss[_is_own(batch)](self.params, batch)

  def right(self, batch: Any) -> jax.Array:
    """[R] float32: the share of the targets that have the largest logit."""
    return self._right[_is_own(batch)](self.params, batch)


class _Programs:
  """The functions of copies, which any number of them with one model and optimizer share."""

  def __init__(self, cfg: config.Train, kernels: Path | None):
    self._cfg = cfg
    options = compile_cache.options(device_mesh.make_mesh(cfg), kernels)
    jit = functools.partial(jax.jit, compiler_options=options)
    tx, schedule = make_optimizer(cfg.optimizer, cfg.steps)
    self._rules = Rules(
      tx=tx,
      num_layers=cfg.model.num_layers,
      of_mean=True,
      schedule=schedule,
      skip_spikes=cfg.skip_spikes,
      ema_decay=cfg.optimizer.ema_decay,
    )
    of_failures = {"failures": jnp.zeros(2, jnp.int32)}
    self.init = jit(lambda keys: jax.lax.map(lambda key: initializer(cfg)(key) | of_failures, keys))

    def mapped(function, copies, **how):  # by whether each copy has its own batch
      axes = {own: (*[0] * copies, 0 if own else None) for own in (False, True)}
      return {own: jit(jax.vmap(function, in_axes=axes[own]), **how) for own in axes}

    self.step = mapped(self._one_step, 3, donate_argnums=0)
    self.loss, self.right = mapped(self._one_loss, 1), mapped(self._one_right, 1)

  def _hidden(self, model, batch, key=None):
    segment_ids = batch.get("segment_ids")
    hidden, aux = model.hidden_and_aux(batch["tokens"], segment_ids, dropout_key=key)
    if "positions" in batch:
      hidden = jnp.take_along_axis(hidden, batch["positions"][..., None], axis=1)
    return hidden, aux

  @functools.cached_property
  def _graph(self):
    return model_graph(self._cfg.model)

  def _sums(self, params, batch, penalties: Mapping[str, float] = {}, key=None):
    model = nnx.merge(self._graph, params)
    hidden, aux = self._hidden(model, batch, key)
    weights = batch.get("weights", jnp.ones(batch["targets"].shape, jnp.float32))
    rest: dict[str, Any] = {"chunk": self._cfg.loss_chunk, **penalties}
    rest["soft_cap"] = model.logit_soft_cap
    return next_token_loss(hidden, model.head_kernel(), batch["targets"], weights, **rest), aux

  def _one_loss(self, params, batch):
    return self._sums(params, batch)[0]

  def _one_right(self, params, batch):
    model = nnx.merge(self._graph, params)
    logits = self._hidden(model, batch)[0] @ model.head_kernel().astype(model.dtype)
    return jnp.mean((logits.argmax(-1) == batch["targets"]).astype(jnp.float32))

  def _one_step(self, state, ratio, dropout, batch):
    of_step = jax.random.fold_in(dropout, state["step"])

    def mean_loss(params, batch):
      sums, aux = self._sums(params, batch, penalties_of(self._cfg.optimizer), of_step)
      mean = sums.nats / jnp.where(sums.weight > 0, sums.weight, 1.0)
      return sums._replace(nats=mean), aux

    state, metrics = step(mean_loss, state, batch, self._rules, ratio)
    failures = step_guard.count_failures(state["failures"], metrics)
    state = state | {"failures": failures}
    kept = ("loss", "grad_norm", "tokens", "skipped", "aux")  # others would be computed for nothing
    return state, {name: metrics[name] for name in kept if name in metrics}


@functools.lru_cache(maxsize=1)
def _programs(settings: str, kernels: Path | None) -> _Programs:
  """Those of a config in JSON: groups of a sweep that follow one another compile nothing again."""
  return _Programs(config.from_dict(json.loads(settings)), kernels)


def without_run(cfg: config.Train) -> config.Train:
  """The settings that copies of one program have in common: of no seed, learning rate or folder."""
  optimizer = cfg.optimizer
  final = float(f"{optimizer.final_lr / optimizer.peak_lr:.9g}") * _PEAK
  return dataclasses.replace(
    cfg,
    seed=0,
    run_dir="-",
    run_name=None,
    run_group=None,
    run_tags=(),
    optimizer=dataclasses.replace(optimizer, peak_lr=_PEAK, final_lr=final),
  )


def _is_own(batch: Any) -> bool:
  """Whether each copy has its own batch."""
  return batch["tokens"].ndim == 3
