"""Training on every device mesh equals training on one device."""

import numpy as np
import pytest

from lnssm_jax.mixers import MIXERS
from tests.devices import result_of
from tests.mixers.tiny import TINY

MATRICES = 7  # of a layer of the LNSSM: q, k, v, g, o; up, down
ENDS = 2  # embedding, head


@pytest.fixture
def run(tiny, config_file, command):
  """Returns a function that runs `tests.train.arrangements` on `devices` devices."""

  def ask(what, *arrangements, devices=4, **changes):
    path = config_file(tiny(**{"model__mixer": "lnssm", "model__channel_mixer": "gpt2"} | changes))
    arguments = ("-m", "tests.train.arrangements", path, what, *arrangements)
    return result_of(*arguments, devices=devices)

  return ask


# Avoids parameters whose gradient is only rounding error, which Adam would amplify.
TRAINING = {"global_batch": 8, "accumulate": 2, "optimizer__clip_norm": 1.0}
DROPOUT = {"embedding_dropout": 0.1, "residual_dropout": 0.2, "drop_path": 0.3, "num_layers": 2}
DROPOUT = {f"model__{name}": value for name, value in DROPOUT.items()}


def same_training(results, steps=3):
  one = results["1"]
  for name, result in results.items():
    assert result["start"] == one["start"], f"{name}: the initial state differs"
    # Only the order of sums over devices may differ.
    rows = (each["rows"][:steps] for each in (result, one))
    np.testing.assert_allclose(*rows, rtol=2e-5, err_msg=name)
    assert result["gradient_error"] < 2e-5, name


def test_sharding_every_mesh_same_training(run):
  """Parameters, rows and heads sharded; the masks of dropout are those of one device."""
  names = ("1", "2x2", "1x2x1x2 kernels")
  results = run("trained", *names, seq_len=8, **DROPOUT, **TRAINING)
  same_training(results)
  shares = [results[name]["share"] for name in names]
  assert shares == [1, 1 / 2, 1 / 4]

  # Sharded parameters: each matrix is gathered once per pass, and its gradient is reduce-scattered
  # once. Counts in the bodies of the layer loops, forward and backward, and outside of them.
  counts = results["2x2"]["collectives"]
  numbers = lambda name: sorted(count[name] for count in counts if name in count)
  assert numbers("all-gather") == [ENDS, MATRICES, MATRICES]
  assert numbers("reduce-scatter") == [ENDS, MATRICES]
  # Sharded heads and channels: a layer's forward pass sums two activations, the outputs of o_proj
  # and down, and two numbers per token, for the norms of all queries and all keys. Scans need no
  # communication: each device runs them on its rows and heads, here 2 of 4 rows and 1 of 2 heads,
  # and the token shift on its rows and all 32 channels.
  sharded = results[names[-1]]
  assert {"all-gather": MATRICES, "all-reduce": 2 + 2} in sharded["collectives"]
  assert {tuple(shape) for shape in sharded["scans"]} == {(2, 8, 1, 16), (2, 8, 32)}


@pytest.mark.slow
def test_sharding_dropout_same_masks(run):
  """Parameters and time sharded: the masks are those of one device."""
  results = run("trained", "1", "1x2x2", model__mixer="lrn", seq_len=8, **DROPOUT, **TRAINING)
  same_training(results)
  assert results["1x2x2"]["share"] == 1 / 2


@pytest.mark.slow
def test_sharding_pairs_of_answers_same_training(run):
  """Also those that time shards cut: the loss of a pair needs the tokens of all shards."""
  changes = {"data__fields": {"train": ("prompt", "chosen", "rejected")}, "model__num_layers": 2}
  changes |= {"optimizer__logit_penalty": 0.0, "preference__label_smoothing": 0.1}
  options = {"model__mixer": "lrn", "seq_len": 16, **changes, **TRAINING}
  same_training(run("trained", "1", "4", "1x1x4", "2x1x2", "1x2x1x2", **options))


@pytest.mark.slow
def test_sharding_fp8_same_training(run):
  """Gathered, time-sharded and partitioned. Later steps magnify what was rounded another way."""
  changes = {"mixer": "gla", "channel_mixer": "swiglu", "dim": 256, "matmul": "fp8"}
  changes = {f"model__{name}": value for name, value in changes.items()}
  results = run("trained", "1", "2x2", "1x1x2", "1x1x1x2", seq_len=8, **changes, **TRAINING)
  for name, result in results.items():
    first, want = result["rows"][0], results["1"]["rows"][0]
    np.testing.assert_allclose(first, want, rtol=2e-4, err_msg=name)


@pytest.mark.slow
def test_sharding_experts_same_training(run):
  """Experts alone, with gathered parameters, and with time; their loads are those of all shards."""
  options = {"num_experts": 4, "shared_hidden": 8, "balance_bias": True, "balance": 0.5}
  changes = {"channel_mixer": "moe", "channel_hidden": 8, "channel_mixer_options": options}
  changes = {f"model__{name}": value for name, value in changes.items()}
  names = ("1", "1x1x1x1x4", "2x1x1x1x2", "1x2x1x1x2", "1x1x2x1x2", "1x2x1x2")
  results = run("trained", *names, model__mixer="lrn", seq_len=8, **changes, **TRAINING)
  same_training(results)


@pytest.mark.slow
def test_sharding_attention_dropout_same_masks(run):
  """Parameters and heads sharded too, and probabilities dropped."""
  changes = {"mixer": "softmax_attention", "mixer_options": {"attention_dropout": 0.3}}
  changes = DROPOUT | {f"model__{name}": value for name, value in changes.items()}
  names = ("1", "2x1x2", "1x2x1x2")
  for options in ({}, {"model__remat": "full"}):
    same_training(run("trained", *names, seq_len=8, **changes, **options, **TRAINING))


@pytest.mark.slow
def test_sharding_per_device_scans_add_no_collectives(run):
  names = ("1", "1x2x1x2", "1x2x1x2 kernels")
  results = run("trained", *names, model__num_layers=2, **TRAINING)
  same_training(results)
  totals = []
  for name in names[1:]:
    counts = results[name]["collectives"]
    assert {"all-gather": MATRICES, "all-reduce": 2 + 2} in counts
    totals.append(sum(n for count in counts for n in count.values()))
  by_compiler, by_device = totals
  assert by_device <= by_compiler


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "unroll"), [("none", 1), ("none", 3), ("dots", 3), ("full", 1)])
def test_sharding_more_meshes_same_training(run, remat, unroll):
  """Four devices along each axis and in pairs, with rematerialization."""
  names = ("1", "4", "1x4", "2x1x2", "1x2x2", "2x1x1x2", "1x1x2x2")
  changes = {"model__num_layers": 3, "model__remat": remat, "model__unroll": unroll}
  results = run("trained", *names, **changes, **TRAINING)
  same_training(results)
  assert results["1x4"]["share"] == 1 / 4
  assert results["1x4"]["bytes"] < 0.8 * results["4"]["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_sharding_every_mixer_same_training(run, mixer):
  """Gathered parameters; heads and channels sharded by the compiler and for kernels."""
  # The tiny ones have ranks of 3, which are not divisible.
  options = {} if mixer in ("gla", "mom", "rwkv6", "sse") else dict(TINY[mixer].model_options)
  # 3 rows are not divisible, either, nor the one angle of 4.
  options |= {"lcsm": {"state_dim": 4}, "mamba3": {"state_dim": 8}}.get(mixer, {})
  options |= {name: 4 for name in ("decay_rank", "gate_rank") if options.get(name) == 3}
  changes = {"model__mixer": mixer, "model__mixer_options": options}
  changes |= {"model__dim": 128} if mixer == "mamba2" else {}  # in 32 channels it has one head
  results = run("trained", "1", "2x2", "1x2x1x2", "1x2x1x2 kernels", **changes, global_batch=4)
  same_training(results, steps=2)


@pytest.mark.slow
def test_sharding_three_axes_same_training(run):
  results = run("trained", "1", "2x2x2", "1x2x2x2", "2x2x1x2", devices=8, **TRAINING)
  same_training(results)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mixer", "forward"),
  [
    ("lnssm", {"all-reduce": 2 + 2}),
    ("gated_delta_net", {"all-reduce": 2}),
    ("softmax_attention", {"all-reduce": 2}),
    # Parts of the fused projection, of the convolution and of its output cross shard boundaries.
    # Heads share b and c, whose channels are sharded: scores are summed. One norm covers all heads.
    ("mamba2", {"collective-permute": 10, "all-gather": 1, "all-reduce": 4}),
  ],
)
def test_sharding_tensor_parallel_collectives(run, mixer, forward):
  """All-reduces of a layer's forward pass: outputs of o_proj and down."""
  changes = {"model__mixer": mixer, "model__num_layers": 2, "model__dim": 128}
  results = run("trained", "1", "1x1x1x2", **changes, **TRAINING)
  same_training(results)
  assert forward in results["1x1x1x2"]["collectives"]


@pytest.mark.slow
def test_sharding_uneven_pattern_same_training(run):
  """A layer outside of the loop, tied embeddings, a mixer with convolutions."""
  changes = {"model__mixer": ["lnssm", "rg_lru"], "model__num_layers": 3}
  changes |= {"model__tie_embeddings": True, "model__channel_mixer": "swiglu"}
  same_training(run("trained", "1", "2x2", "1x2x2", "2x1x1x2", **changes, **TRAINING))


@pytest.mark.slow
def test_sharding_sequence_traffic_independent_of_length(run):
  """A step with a sharded sequence sends the same number of bytes for any length."""
  short, long = (run("traffic", "1x1x2", seq_len=length)["1x1x2"] for length in (64, 4096))
  assert short == long
  assert short["all_gather"] > 0
  assert short["collective_permute"] > 0


WIDE = {
  "model__dim": 256,
  "model__dtype": "bfloat16",
  "seq_len": 4096,  # the rows of one device are enough for the kernels of norms
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mixer", "tensor", "splits"),
  [
    ("lnssm", 10, 0),
    ("gla", 10, 0),
    ("mamba2", 10, 0),
    ("longhorn", 8, 0),
    ("gated_delta_net", 18, 2),
  ],
)
def test_sharding_kernels_are_those_of_one_device(run, mixer, tensor, splits):
  """With sharded heads all but the norms over all channels, which XLA adds up over devices.

  A device with fewer rows or heads cuts the delta rule's sequences into splits, whose maps are
  kernels of their own.
  """
  whole, sharded = ("1", "4", "2x2"), ("1x1x1x2", "2x1x1x2", "1x2x1x2")
  counts = run("kernels", *whole, *sharded, model__mixer=mixer, **WIDE)
  expected = dict.fromkeys(whole, counts["1"] + splits) | {"1": counts["1"]}
  assert counts == expected | dict.fromkeys(sharded, tensor)
  assert counts["1"] > tensor
