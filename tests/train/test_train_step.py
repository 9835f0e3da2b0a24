"""The compiled step: accumulation, masking, precision, and no transfers to the host."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lnssm_jax.mixers import Aux
from train import trainer
from train.cluster import device_mesh
from train.logging.loggers import scalars
from train.logging.metric_reader import aux_columns
from train.step.loss import LossSums
from train.step.model import model_graph
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state, init_state
from train.step.step import Rules, step
from train.step.train_step import make_eval_step, make_train_step


def make_batch(cfg, seed=0, weights=None):
  rng = np.random.default_rng(seed)
  shape = (cfg.global_batch, cfg.seq_len)
  tokens = rng.integers(0, cfg.model.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
  return {
    "tokens": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "segment_ids": np.cumsum(rng.random(shape) < 0.1, axis=1).astype(np.int32),
    "weights": np.float32(rng.random(shape) < 0.7) if weights is None else weights,
  }


DROPOUT = {"embedding_dropout": 0.1, "residual_dropout": 0.2, "drop_path": 0.3}
DROPOUT = {f"model__{name}": rate for name, rate in DROPOUT.items()}

_begun = {}


def begin(cfg):
  """(mesh, step, initial state), compiled once for all tests of an equal config."""
  key = repr(dataclasses.replace(cfg, run_dir="-"))
  if key not in _begun:
    mesh = device_mesh.make_mesh(cfg)
    tx, _ = make_optimizer(cfg.optimizer, cfg.steps)
    step = make_train_step(cfg, model_graph(cfg.model), tx, mesh)
    state = trainer.init_state(cfg, mesh)
    _begun[key] = mesh, step, jax.device_get(state), jax.tree.map(lambda x: x.sharding, state)
  mesh, step, state, shardings = _begun[key]
  return mesh, step, jax.device_put(state, shardings)  # a copy: the step donates it


def run(cfg, batch, steps=1):
  mesh, step, state = begin(cfg)
  batch = jax.device_put(batch, device_mesh.batch_sharding(mesh))
  for _ in range(steps):
    state, metrics = step(state, batch)
  return jax.device_get(state), jax.device_get(metrics)


def test_state_of_given_parameters_has_them_as_its_average(tiny):
  cfg = tiny(optimizer__ema_decay=0.9)
  mesh = device_mesh.make_mesh(cfg)
  given = jax.tree.map(lambda x: jnp.full(x.shape, 3, x.dtype), abstract_state(cfg, mesh)["params"])
  state = init_state(cfg, mesh, params=given)
  assert state["params"] is given
  assert all(np.all(x == 3) for x in jax.tree.leaves(state["ema"]))
  chex.assert_trees_all_equal_shapes(state, abstract_state(cfg, mesh))


def assert_close(a, b, **tolerance):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, **tolerance)


def first_moment(state):
  """Adam's first moment after one step: (1 - b1) times the gradient."""
  return np.concatenate([x.ravel() for x in jax.tree.leaves(state["opt_state"][1].mu)])


def test_train_step_accumulation_matches_large_batch(tiny):
  batch = make_batch(tiny())
  batch["weights"][0] = 0  # one microbatch predicts nothing, another everything
  batch["weights"][1] = 1
  whole, whole_metrics = run(tiny(), batch)
  parts, parts_metrics = run(tiny(accumulate=4), batch)
  largest = np.abs(first_moment(whole)).max()
  assert largest > 0
  np.testing.assert_allclose(first_moment(parts), first_moment(whole), rtol=0, atol=1e-6 * largest)
  assert_close(whole_metrics, parts_metrics, rtol=2e-6)


def test_train_step_dropout_by_step(tiny):
  """Other masks in each step; none in evaluation."""
  cfg, batch = tiny(**DROPOUT), make_batch(tiny())
  mesh, step, state = begin(cfg)
  loss_at = lambda number: float(
    step(jax.tree.map(jnp.copy, state) | {"step": number}, batch)[1]["loss"]
  )
  losses = [loss_at(jnp.int32(number)) for number in (0, 1, 2)]
  _, plain = run(tiny(), batch)
  assert len({*losses, float(plain["loss"])}) == 4
  evaluated = make_eval_step(cfg, model_graph(cfg.model), mesh)(state["params"], batch)
  assert float(evaluated.nats / evaluated.weight) == pytest.approx(float(plain["loss"]), rel=1e-6)


@pytest.mark.slow
def test_train_step_dropout_same_in_microbatches(tiny):
  batch = make_batch(tiny())
  (_, whole), (_, parts) = (run(tiny(accumulate=n, **DROPOUT), batch) for n in (1, 2))
  assert_close(whole, parts, rtol=2e-6)


@pytest.mark.slow
def test_train_step_balances_experts_and_reports_their_shares(tiny):
  options = {"num_experts": 4, "balance_bias": True, "balance": 0.5}
  cfg = tiny(model__channel_mixer="moe", model__channel_mixer_options=options, seq_len=8)
  cfg = dataclasses.replace(cfg, accumulate=2)
  state, metrics = run(cfg, make_batch(cfg))
  (aux,) = metrics["aux"]
  bias = state["params"]["blocks"]["channel_mixer"]["router_bias"][0]
  np.testing.assert_allclose(bias, -1e-3 * np.sign(aux.share - 0.5), rtol=1e-6)
  assert set(np.sign(bias)) >= {-1, 1} and aux.share.sum() == pytest.approx(2)
  row = aux_columns(metrics["aux"])
  assert row["aux"][0]["dead"] == 0 and row["aux_loss"] == pytest.approx(0.5, rel=0.5)


def test_train_step_adds_and_reports_auxiliary_losses(tiny):
  """Under "uniform" the router's whole gradient is that of the balance loss, microbatch by
  microbatch."""
  options = {"num_partitions": 3, "lora_rank": 2, "gate_rank": 2, "method": "mask"}
  options |= {"gate": "uniform", "balance": 0.5}
  cfg = tiny(model__mixer="sse", model__mixer_options=options, accumulate=2, seq_len=8)
  batch = make_batch(cfg)
  batch["weights"][::2] *= 0.5  # rows of the first microbatch: each counts for its weights
  state, metrics = run(cfg, batch)
  graph, start = model_graph(cfg.model), begin(cfg)[-1]["params"]
  kernel = lambda tree: tree["blocks"]["mixer"]["router_proj"]["kernel"]

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def weighted(kernel, tokens, segment_ids, share):
    params = jax.tree.map(lambda x: x, start)
    params["blocks"]["mixer"]["router_proj"]["kernel"] = kernel
    _, aux = nnx.merge(graph, params).hidden_and_aux(tokens, segment_ids)
    aux = jax.tree.map(lambda x: share * x[0], aux)
    return aux.loss, aux

  def expected(rows):
    share = batch["weights"][rows].sum() / batch["weights"].sum()
    return weighted(kernel(start), batch["tokens"][rows], batch["segment_ids"][rows], share)

  want, aux = jax.tree.map(jnp.add, expected(slice(0, None, 2)), expected(slice(1, None, 2)))
  got = kernel(state["opt_state"][1].mu) / (1 - cfg.optimizer.b1)
  assert np.abs(want).max() > 1e-4
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * np.abs(want).max())
  np.testing.assert_allclose(metrics["aux"][0].loss, aux.loss, rtol=1e-5)
  np.testing.assert_allclose(metrics["aux"][0].share, aux.share, rtol=1e-5)
  row = aux_columns([None, *metrics["aux"]])
  assert row["aux_loss"] == pytest.approx(float(aux.loss), rel=1e-5)
  assert row["aux"][0]["layer"] == 1
  assert sum(row["aux"][0]["share"]) == pytest.approx(1, rel=1e-5)


def test_columns_of_auxiliary_outputs_count_dead_parts():
  wide = Aux(np.float32(0.25), np.zeros(65, np.float32))
  row = aux_columns([Aux(np.float32(0.5), np.float32([0.0, 0.75, 0.25])), None, wide])
  assert row["aux_loss"] == 0.75
  first, last = row["aux"]
  assert first == {"layer": 0, "loss": 0.5, "dead": 1, "share": [0.0, 0.75, 0.25]}
  assert last == {"layer": 2, "loss": 0.25, "dead": 65}
  widest = aux_columns([Aux(np.float32(0), np.full(64, 1 / 64, np.float32))])["aux"][0]
  assert widest["share"] == [1 / 64] * 64 and widest["dead"] == 0
  logged = scalars({"kind": "train", "step": 3, "loss": 2.0} | row)
  assert logged["train/aux/0/dead"] == 1
  assert logged["train/aux/0/share/1"] == 0.75
  assert logged["train/aux_loss"] == 0.75
  assert "train/aux/2/share/0" not in logged


def test_train_step_metrics_match_definition(tiny):
  cfg = tiny()
  batch = make_batch(cfg)
  state, metrics = run(cfg, batch)
  graph = model_graph(cfg.model)

  @jax.jit
  def logits(params, batch):
    return nnx.merge(graph, params)(batch["tokens"], segment_ids=batch["segment_ids"])[0]

  _, _, start = begin(cfg)
  log_p = jax.nn.log_softmax(logits(start["params"], batch))
  nll = -np.take_along_axis(np.asarray(log_p), batch["targets"][..., None], -1)[..., 0]
  weights = batch["weights"]
  assert metrics["loss"] == pytest.approx((nll * weights).sum() / weights.sum(), rel=1e-5)
  assert metrics["tokens"] == weights.sum()
  assert metrics["learning_rate"] == pytest.approx(3e-3)
  numbers = np.concatenate([x.ravel() for x in jax.tree.leaves(state["params"])])
  assert metrics["param_norm"] == pytest.approx(np.linalg.norm(np.float64(numbers)), rel=1e-5)
  assert metrics["grad_norm"] > 0
  assert state["step"] == 1


def test_eval_step_matches_training_loss(tiny):
  cfg = tiny()
  mesh, _, state = begin(cfg)
  batch = make_batch(cfg)
  evaluate = make_eval_step(cfg, model_graph(cfg.model), mesh)
  sums = evaluate(state["params"], batch)
  _, metrics = run(cfg, batch)
  assert float(sums.nats / sums.weight) == pytest.approx(float(metrics["loss"]), rel=1e-6)
  assert sums.penalty == 0


def test_train_step_zero_weights_leave_parameters(tiny):
  cfg = tiny()
  start = jax.device_get(begin(cfg)[-1])
  state, metrics = run(cfg, make_batch(cfg, weights=np.zeros((4, 32), np.float32)))
  assert_close(state["params"], start["params"], rtol=0, atol=0)
  assert (metrics["loss"], metrics["tokens"], metrics["grad_norm"]) == (0, 0, 0)


def equations(jaxpr):
  """All equations of a jaxpr, including inner jaxprs (scans, calls)."""
  for eqn in jaxpr.eqns:
    yield eqn
    for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
      inner = getattr(inner, "jaxpr", inner)  # unwraps closed jaxprs
      if hasattr(inner, "eqns"):
        yield from equations(inner)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_train_step_narrow_products_float32_parameters(dtype, tiny):
  cfg = tiny(model__dtype=dtype, model__channel_mixer="gpt2")
  mesh = device_mesh.make_mesh(cfg)
  tx, _ = make_optimizer(cfg.optimizer, cfg.steps)
  step = make_train_step(cfg, model_graph(cfg.model), tx, mesh)
  state = abstract_state(cfg, mesh)
  after, _ = jax.eval_shape(step, state, make_batch(cfg))
  floats = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert {x.dtype for x in floats} == {np.dtype("float32")}
  kernels = {x.shape[-2:] for x in jax.tree.leaves(state["params"]) if x.ndim >= 2}
  kernels |= {shape[::-1] for shape in kernels}
  operands = [
    v.aval
    for eqn in equations(jax.make_jaxpr(step)(state, make_batch(cfg)).jaxpr)
    if eqn.primitive.name == "dot_general"
    for v in eqn.invars
  ]
  of_kernels = [x.dtype for x in operands if x.shape in kernels]
  assert len(of_kernels) > 10
  assert set(of_kernels) == {jnp.dtype(dtype)}


@pytest.mark.slow
def test_train_step_float16_has_the_gradient_and_skips_what_overflows(tiny):
  """Cotangents are those of a sum over tokens, which float16 holds without a scale of the loss."""
  cfg, batch = tiny(model__dtype="float16"), make_batch(tiny())
  (narrow, got), (whole, want) = (run(each, batch) for each in (cfg, tiny()))
  assert got["loss"] == pytest.approx(float(want["loss"]), rel=1e-3) and got["skipped"] == 0
  gradient = first_moment(whole)
  error = np.linalg.norm(first_moment(narrow) - gradient) / np.linalg.norm(gradient)
  assert 0 < error < 4 * jnp.finfo(jnp.float16).eps
  _, step, state = begin(cfg)
  head = 1e6 * state["params"]["head"]["kernel"]
  state["params"]["head"]["kernel"] = head
  state, metrics = step(state, batch)
  assert metrics["skipped"] == 1 and float(jnp.abs(state["params"]["head"]["kernel"]).max()) > 1e3


@pytest.mark.slow
def test_train_step_bfloat16_parameters_float32_moments(tiny):
  batch = make_batch(tiny())
  cfg = tiny(model__dtype="bfloat16", model__param_dtype="bfloat16")
  state, metrics = run(cfg, batch, steps=2)
  assert {x.dtype for x in jax.tree.leaves(state["params"])} == {jnp.dtype("bfloat16")}
  moments = [x.dtype for x in jax.tree.leaves(state["opt_state"]) if x.ndim]
  assert set(moments) == {np.dtype("float32")}
  _, exact = run(tiny(), batch, steps=2)
  assert metrics["loss"] == pytest.approx(float(exact["loss"]), rel=2e-2)


def test_train_step_donates_state_without_host_sync(tiny):
  cfg = tiny()
  mesh, step, state = begin(cfg)
  batch = jax.device_put(make_batch(cfg), device_mesh.batch_sharding(mesh))
  with jax.transfer_guard("disallow"):
    for _ in range(3):
      before = state
      state, _ = step(state, batch)
  assert all(x.is_deleted() for x in jax.tree.leaves(before))
  assert step._cache_size() == 1  # the returned state has the same shardings: no recompilation


def test_train_step_penalty_and_clipping_applied(tiny):
  batch = make_batch(tiny())
  _, usual = run(tiny(), batch)
  state, metrics = run(tiny(optimizer__logit_penalty=0.0, optimizer__clip_norm=1e-3), batch)
  assert metrics["loss"] == pytest.approx(float(usual["loss"]), rel=1e-6)
  assert metrics["grad_norm"] == pytest.approx(float(usual["grad_norm"]), rel=1e-2)
  assert metrics["grad_norm"] != pytest.approx(float(usual["grad_norm"]), rel=1e-6)  # no penalty
  assert metrics["grad_norm"] > 1e-2  # before clipping
  assert np.linalg.norm(first_moment(state)) == pytest.approx((1 - 0.9) * 1e-3, rel=1e-4)


def test_train_step_averages_parameters_but_not_over_skipped_steps(tiny):
  cfg = tiny(optimizer__ema_decay=0.75, optimizer__z_loss=1e-3)
  mesh, step, state = begin(cfg)
  place = lambda batch: jax.device_put(batch, device_mesh.batch_sharding(mesh))
  batch = make_batch(cfg)
  exact = lambda tree: np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(tree)])
  for _ in range(3):
    params, ema = exact(state["params"]), exact(state["ema"])
    state, _ = step(state, place(batch))
    moved = exact(state["params"]) - params
    assert np.linalg.norm(moved) > 1e-3
    wrong = exact(state["ema"]) - (0.75 * ema + 0.25 * (params + moved))
    assert np.linalg.norm(wrong) < 1e-2 * np.linalg.norm(0.25 * moved)  # not those before the step
  for weight in (np.nan, 0):
    before = jax.device_get((state["ema"], state["params"]))
    bad = batch | {"weights": np.full_like(batch["weights"], weight)}
    state, metrics = step(state, place(bad))
    assert metrics["skipped"] == 1
    chex.assert_trees_all_equal((state["ema"], state["params"]), before, strict=True)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"mesh__data": 64},
      "mesh.tensor=1 need 64 devices, but jax finds",
    ),
    ({"mesh__fsdp": 3, "mesh__data": 1}, "need 3 devices.*device_count=3 JAX"),
  ],
)
def test_mesh_too_many_devices_rejected(tiny, changes, message):
  with pytest.raises(ValueError, match=message):
    device_mesh.make_mesh(tiny(**changes))


def test_mesh_of_more_shards_than_experts_rejected(tiny):
  pattern = {"model__mixer": ("lrn", "lrn"), "model__num_layers": 2}
  pattern |= {"model__channel_mixer": ("none", "moe")}
  for changes, count in (({}, 0), ({"model__channel_mixer": "moe"}, 8), (pattern, 8)):
    with pytest.raises(ValueError, match=f"mesh.expert=3 shards .* there are {count}, evenly"):
      device_mesh.make_mesh(tiny(mesh__expert=3, **changes))


def test_mesh_indivisible_sequence_rejected(tiny, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: [jax.local_devices()[0]] * 3)
  with pytest.raises(ValueError, match=r"seq_len=16 cannot be split .*=3 equal .* seq_len=15"):
    device_mesh.make_mesh(tiny(seq_len=16, mesh__data=1, mesh__sequence=3))


def test_mesh_indivisible_batch_rejected(tiny, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: [jax.local_devices()[0]] * 4)
  with pytest.raises(ValueError, match=r"microbatch of 2 sequences .* over the 4 devices"):
    device_mesh.make_mesh(tiny(accumulate=2, mesh__data=-1))


def test_step_takes_any_loss_and_batch():
  """A line through points, fitted by the step that trains language models."""
  rate = optax.constant_schedule(0.5)
  tx = optax.chain(optax.identity(), optax.scale_by_learning_rate(rate))
  rules = Rules(tx=tx, schedule=rate, accumulate=2, ema_decay=0.5)
  params = {"slope": jnp.float32(0)}
  state = {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0), "ema": params}
  x = np.arange(4, dtype=np.float32)
  batch = {"x": x, "y": 3 * x, "weight": np.float32([1, 1, 0, 1])}

  def loss(params, batch):
    nats = batch["weight"] * (params["slope"] * batch["x"] - batch["y"]) ** 2 / 2
    return LossSums(nats.sum(), batch["weight"].sum(), jnp.float32(0)), None

  new, metrics = jax.jit(lambda state, batch: step(loss, state, batch, rules))(state, batch)
  gradient = -3 * (1 + 9) / 3  # of the rows that count
  assert float(metrics["loss"]) == pytest.approx(9 * (1 + 9) / 2 / 3)
  assert float(metrics["grad_norm"]) == pytest.approx(-gradient)
  assert float(new["params"]["slope"]) == pytest.approx(-0.5 * gradient)
  assert float(new["ema"]["slope"]) == pytest.approx(-0.25 * gradient)
  nothing = batch | {"weight": np.zeros(4, np.float32)}
  again, metrics = step(loss, new, nothing, rules)
  assert (float(metrics["skipped"]), int(again["step"])) == (1, 2)
  assert again["params"] == new["params"] and again["ema"] == new["ema"]
