"""Model FLOPs against counts by hand and by XLA, and utilization."""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS, Mixer
from lnssm_jax.ops.core import dispatch
from train.config import Model
from train.step import flops

PAPER = Model(dim=512, num_layers=6, num_heads=4, vocab_size=50_277)


def test_flops_lnssm_72m_match_hand_count():
  projections = 5 * 2 * 512 * 512  # q, k, v, gate, output: 2,621,440
  update = 4 * 128 * 128 * 3  # 4 heads: decay, multiply, add: 196,608
  read = 4 * 128 * 128 * 2
  key_sum = 4 * 128 * 4  # decay and add; multiply and add of the read
  mlp = 2 * 512 * 2048 + 2 * 2048 * 512  # 4,194,304
  head = 2 * 512 * 50_277  # 51,483,648
  by_hand = 6 * (projections + update + read + key_sum + mlp) + head
  assert by_hand == 94_356_480
  assert flops.model_flops_per_token(PAPER, 2048) == by_hand


def layer(mixer, sequence_length=64, **options):
  """FLOPs of one layer of a mixer, of width 64 with 4 heads, without head and channel mixer."""
  sizes = {"dim": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 1, "channel_mixer": "none"}
  model = Model(mixer=mixer, mixer_options=options, **sizes)
  return flops.model_flops_per_token(model, sequence_length) - 2 * 64


def test_flops_mamba_match_hand_count():
  D, E, N, R, W = 64, 128, 16, 4, 4
  maps = D * 2 * E + W * E + E * (R + 2 * N) + R * E + E * D
  scan = E * N * (1 + 1 + 2 + 2) + E * (1 + 2)  # dt a, decay, write, read; dt x, skip
  assert layer("mamba") == 2 * maps + scan


def test_flops_gated_delta_net_match_hand_count():
  D, H, K, V, W = 64, 4, 16, 32, 4
  maps = 2 * D * H * K + 2 * D * H * V + 2 * D * H + W * (2 * H * K + H * V) + H * V * D
  scan = H * K * V * (1 + 2 + 2 + 2)  # decay, the old value, update, read
  assert layer("gated_delta_net") == 2 * maps + scan


@pytest.mark.parametrize(
  ("mixer", "options", "keys"),
  [
    ("softmax_attention", {}, 65 / 2),
    ("softmax_attention", {"num_kv_heads": 2}, 65 / 2),
    ("sliding_window_attention", {"window": 3}, (1 + 2 + 62 * 3) / 64),
    ("sliding_window_attention", {"window": 100}, 65 / 2),
  ],
)
def test_flops_attention_match_hand_count(mixer, options, keys):
  maps = (2 + 2 * options.get("num_kv_heads", 4) / 4) * 64 * 64
  assert layer(mixer, **options) == 2 * maps + 4 * 64 * keys


def test_flops_block_attention_match_hand_count():
  """64 steps in blocks of 16 see 8.5 keys on average; 20 steps (136 + 10) / 20."""
  scan = 5 * 4 * 16 * 16 + 4 * 4 * 16
  for length, keys in ((64, 8.5), (20, 7.3)):
    assert layer("lln", length) == round(8 * 64 * 64 + scan + 4 * 64 * keys)


def test_flops_of_experts_count_those_of_a_token():
  options = {"num_experts": 5, "experts_per_token": 2, "shared_hidden": 8, "balance_bias": True}
  sizes = {"dim": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 1, "mixer": "linear_attention"}
  none, some = (
    Model(**sizes, channel_mixer=name, **given)
    for name, given in (
      ("none", {}),
      ("moe", {"channel_hidden": 16, "channel_mixer_options": options}),
    )
  )
  used = 3 * (64 * 5 + 2 * 3 * 64 * 16 + 3 * 64 * 8)  # router, two experts, the shared one
  counts = [flops.model_flops_per_token(model, 64) for model in (some, none)]
  assert counts[0] - counts[1] == 2 * used


def test_flops_pattern_and_tied_head_counted():
  sizes = {"dim": 64, "num_heads": 4, "vocab_size": 50, "channel_mixer": "none"}
  count = lambda mixer, **more: flops.model_flops_per_token(Model(mixer=mixer, **sizes, **more), 32)
  head = 2 * 64 * 50
  lru, attention = (
    count(name, num_layers=1) - head for name in ("rg_lru", "sliding_window_attention")
  )
  pattern = ("rg_lru", "rg_lru", "sliding_window_attention")
  assert count(pattern, num_layers=5) == 4 * lru + attention + head
  assert count(pattern, num_layers=5, tie_embeddings=True) == 4 * lru + attention + head


# Parameters of rank 2 that do not multiply tokens as matrices: elementwise ones, long filters.
ELEMENTWISE = {"b_offset", "c_offset", "level_weight", "a_log", "a_imag", "c_real", "c_imag"}


def abstract(name, dim, **options):
  taken = MIXERS[name].set_by_model
  given = {n: value for n, value in {"num_heads": 2, "num_layers": 2}.items() if n in taken}
  return nnx.eval_shape(lambda: MIXERS[name](dim, **given, **options, rngs=nnx.Rngs(0)))


@pytest.mark.slow
def test_flops_every_mixer_has_formula():
  for name in MIXERS:
    mixer = abstract(name, 64)
    parameters = nnx.to_pure_dict(nnx.state(mixer, nnx.Param))
    for path, x in jax.tree_util.tree_leaves_with_path(parameters):
      names = {str(entry.key) for entry in path}
      wide = x.ndim > 1 and not names & (ELEMENTWISE | {"filter"})
      assert flops.is_kernel(path) == wide, (name, path)
    assert flops.mixer_recurrence(mixer, 16) >= 0


# The ops run as their equations state them, token by token. Other implementations do more, such as
# applying a decay near 1 without its rounding. XLA also counts norms, gates, for each number of a
# state the mask of a document's first token and a decay of 1, and in these features, levels,
# rotations or powers of their matrix. Mixers that compute a whole filter for one
# token (dss, s4d, hyena, tnn) cannot be compared.
LARGER = {"based": 1.5, "lln": 1.4, "s4": 1.6}
LARGER |= dict.fromkeys(("cosformer", "gateloop", "log_linear", "lrpe", "mamba3"), 1.35)
QUICK = {"delta_net", "gla", "hgrn", "longhorn", "rwkv6", "s5", "s6", "softmax_attention", "ssd"}
SHORT = {"log_linear": {"max_length": 16}, "softmax_attention": {"max_length": 16}}
SHORT |= {"sliding_window_attention": {"window": 16}}
SHORT |= {"delta_product": {"num_householder": 1}}  # XLA counts a loop over steps as one of them
COMPARED = sorted(set(MIXERS) - {"dss", "s4d", "hyena", "tnn"})


@pytest.mark.parametrize(
  "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in COMPARED]
)
def test_flops_formula_matches_xla(name, monkeypatch):
  monkeypatch.setattr(dispatch.Call, "choose", lambda call, implementation=None: "reference")
  D = 128
  mixer = abstract(name, D, **SHORT.get(name, {}))
  graph, params = nnx.split(mixer)
  state = jax.eval_shape(lambda: mixer.init_state(1))
  x = jax.ShapeDtypeStruct((1, 1, D), jnp.float32)
  step = jax.jit(lambda params, x, state: nnx.merge(graph, params)(x, state))
  counted = step.lower(params, x, state).cost_analysis()["flops"]
  by_formula = 2 * flops.kernel_entries(mixer) + flops.mixer_recurrence(mixer, 16)
  masks = 2 * sum(x.size for x in jax.tree.leaves(state))
  assert by_formula <= counted <= LARGER.get(name, 1.2) * by_formula + masks


def test_mfu_three_forward_passes_over_peak():
  h200 = types.SimpleNamespace(device_kind="NVIDIA H200")
  assert flops.utilization(94_356_480, 1e6, [h200]) == pytest.approx(3 * 94_356_480e6 / 989.4e12)
  halved = flops.utilization(94_356_480, 1e6, [h200] * 2)
  assert halved == pytest.approx(3 * 94_356_480e6 / 1978.8e12)


def test_mfu_unknown_device_or_mixer_none():
  assert flops.utilization(94_356_480, 1e6, [types.SimpleNamespace(device_kind="cpu")]) is None
  h200 = types.SimpleNamespace(device_kind="NVIDIA H200")
  assert flops.utilization(None, 1e6, [h200]) is None


def test_mixer_that_states_no_flops_has_none_and_says_so(monkeypatch):
  mixer, state = abstract("lrn", 8), None
  monkeypatch.setattr(MIXERS["lrn"], "recurrence_flops", Mixer.recurrence_flops)
  model = Model(dim=8, num_layers=1, num_heads=1, vocab_size=3, mixer="lrn")
  assert flops.model_flops_per_token(model, 8) is None
  with pytest.raises(NotImplementedError, match=r"LRN does not state the FLOPs .*recurrence_flops"):
    mixer.recurrence_flops(state, 8)


@pytest.mark.parametrize(
  ("kind", "peak"),
  [("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("TPU v4", None)],
)
def test_peak_flops_longest_name_prefix_wins(kind, peak):
  assert flops.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak
