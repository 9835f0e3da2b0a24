"""Options of mixers that are wrong raise ValueError naming the option, its value and the rule."""

import inspect
import math

import pytest
from flax import nnx

from lnssm_jax.mixers import MIXERS
from tests.mixers.tiny import DIM, HEADS, TINY

# By mixer: options, next to `dim` = 8 and two heads, and what the message contains.
LAYER = [({"layer": 2, "num_layers": 2}, "layer=2 must be .* num_layers=2")]
BAD = {
  "base_conv": [
    ({"max_length": 0}, "max_length=0 must"),
    ({"conv_size": -1}, "conv_size=-1 must"),
  ],
  "based": [({"head_dim": 0}, "head_dim=0 must")],
  "comba": [
    ({"num_value_heads": 3}, "num_value_heads=3 is not a multiple of num_heads=2"),
    ({"correction_factor": math.nan}, "correction_factor=nan must be a finite number"),
  ],
  "cosformer": [({"max_length": 0}, "max_length=0 must")],
  "delta_net": [({"conv_size": 0}, "conv_size=0 must")],
  "delta_product": [({"num_householder": 0}, "num_householder=0 must")],
  "dss": [
    ({"state_dim": 0}, "state_dim=0 must"),
    ({"kernel_length": 0}, "kernel_length=0 must"),
  ],
  "gated_delta_net": [
    ({"head_dim": 0}, "head_dim=0 must"),
    ({"expand_v": 0}, "expand_v=0 must"),
  ],
  "gated_delta_net2": [({"gate_rank": 0}, "gate_rank=0 must")],
  "gfw": [
    ({"gate_logit_normalizer": -1}, "gate_logit_normalizer=-1 must"),
    ({"head_dim": 0}, "head_dim=0 must"),
  ],
  "gla": [
    ({"dim": 6}, r"expand_k=0.5 of dim=6 gives 3.0 channels"),
    ({"expand_v": 0.3}, "expand_v=0.3 of dim=8"),
    ({"gate_logit_normalizer": 0}, "gate_logit_normalizer=0 must"),
    ({"gate_rank": 0}, "gate_rank=0 must"),
  ],
  "gsa": [
    ({"num_slots": 0}, "num_slots=0 must"),
    ({"gate_logit_normalizer": 0}, "gate_logit_normalizer=0 must"),
  ],
  "hgrn": [*LAYER, ({"lower_bound": "non"}, "lower_bound='non' is unknown")],
  "hgrn2": [
    *LAYER,
    ({"lower_bound": "non"}, "lower_bound='non' is unknown; did you mean 'none'"),
    ({"variant": "paper"}, "variant='paper' is unknown"),
  ],
  "hyena": [
    ({"max_length": 0}, "max_length=0 must"),
    ({"filter_layers": 0}, "filter_layers=0 must"),
    ({"conv_size": 0}, "conv_size=0 must"),
  ],
  "kda": [
    ({"lower_bound": 5.0}, "lower_bound=5.0 must be a finite negative number"),
    ({"lower_bound": -math.inf}, "lower_bound=-inf must be a finite negative number"),
    ({"expand_v": 0.3}, "expand_v=0.3 of head_dim=4 gives 1.2"),
    ({"expand_v": math.inf}, "expand_v=inf must be a positive, finite number"),
  ],
  "lcsm": [
    ({"code": "1-12-1-0"}, "code='1-12-1-0' must be 'e-o-s-a'"),
    ({"code": "1-1-1"}, "code='1-1-1' must be"),
    ({"code": "1-1-1-8"}, "a 0 to 7"),
    ({"code": 110}, "code=110 must be"),
    ({"code": "1-ssm-1-0"}, "or '0' for the state-space form"),
    ({"code": "0-m1-1-0"}, "use '1-m1-1-0'"),
    ({"code": "1-m2-1-4"}, "m2 grows without bound"),
    ({"code": "1-m3-1-4"}, "use '1-m3-1-2'"),
    ({"code": "1-10-1-0", "learned": False}, "learned=False does not apply to oscillation 10"),
    ({"code": "1-6-1-0", "learned": False}, "stands inside the sigmoid"),
    ({"code": "1-0-1-0", "learned": 3}, "learned=3 must be True"),
    ({"coloring": "exchange"}, "did you mean 'exchanged'"),
    ({"state_dim": 0}, "state_dim=0 must"),
    ({"gate_logit_normalizer": 0}, "gate_logit_normalizer=0 must"),
    ({"gate_rank": 0, "code": "0"}, "gate_rank=0 must"),
  ],
  "linear_attention": [
    ({"feature_map": "elo"}, "feature_map='elo' .* 'elu'"),
    ({"num_layers": 0}, "num_layers=0 must"),
  ],
  "lln": [
    ({"mixture": "mena"}, "mixture='mena' is unknown; did you mean 'mean'"),
    ({"matching": "batch"}, "matching='batch' is unknown"),
  ],
  "lnssm": [
    ({"dim": 10, "num_heads": 4}, "dim=10 is not a multiple of num_heads=4; use dim=8 or 12"),
    ({"dim": 0}, "dim=0 must be an integer of at least 1"),
    ({"num_heads": -1}, "num_heads=-1 must be"),
    ({"shift": "qkgv"}, "shift='qkgv' is unknown; did you mean 'qkvg'"),
    *LAYER,
  ],
  "lrn": [
    ({"activation": "relu"}, "activation='relu' is unknown"),
    ({"output_gate": "silu"}, "output_gate='silu' is unknown"),
  ],
  "lrpe": [({"num_layers": 0}, "num_layers=0 must")],
  "mamba2": [({"dim": 48}, r"head_dim=64 does not divide .* 96; .*=32")],
  "metala": [
    ({"expand_v": 0.3}, "expand_v=0.3 of dim=8"),
    ({"gate_logit_normalizer": 0}, "gate_logit_normalizer=0 must"),
    ({"conv_size": 0}, "conv_size=0 must"),
  ],
  "normalized_attention": [({"eta": "log"}, "eta='log' is unknown")],
  "qlstm": [
    ({"expand": 0}, "expand=0 must"),
    ({"conv_size": 0}, "conv_size=0 must"),
    ({"variant": "printed"}, "variant='printed' is unknown"),
  ],
  "qlstm_reversed": [
    ({"exponent": "rel"}, "exponent='rel' is unknown; did you mean 'relu'"),
    ({"variant": ""}, "variant='' is unknown"),
  ],
  "retnet": [({"dim": 6}, "keys of odd width 3")],
  "rg_lru": [({"width": 0}, "width=0 must"), ({"conv_size": 0}, "conv_size=0 must")],
  "rwkv4": LAYER,
  "rwkv5": [
    *LAYER,
    ({"num_layers": 0}, "num_layers=0 must"),
    ({"decay": "heads"}, "decay='heads' is unknown; did you mean 'head'"),
  ],
  "rwkv6": [({option: 0}, f"{option}=0 must") for option in ("mix_rank", "gate_rank")],
  "s4": [({"state_dim": 3}, "state_dim=3 is odd"), ({"state_dim": 0}, "state_dim=0 must")],
  "s4d": [({"state_dim": 3}, "state_dim=3 is odd")],
  "s5": [
    ({"state_dim": 5}, "state_dim=5 is odd"),
    ({"state_dim": 8, "num_blocks": 3}, r"state_dim=8 is not a multiple of .* = 6"),
    ({"gelu": "erf"}, "gelu='erf' is unknown"),
  ],
  "s6": [
    ({"state_dim": 0}, "state_dim=0 must"),
    ({"gate_rank": 0}, "gate_rank=0 must"),
    ({"initialization": "as run"}, "did you mean 'as_run'"),
  ],
  "sliding_window_attention": [({"window": 0}, "window=0 must")],
  "softmax_attention": [
    ({"num_heads": 8}, "keys of odd width 1"),
    ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
    ({"max_length": 0}, "max_length=0 must"),
    ({"positions": "rope"}, "positions='rope' is unknown"),
    ({"rotary_base": 0}, "rotary_base=0 must"),
    ({"kv_rank": 4}, "latent attention needs kv_rank and rotary_width"),
    ({"q_rank": 4, "rotary_width": 2}, "latent attention needs kv_rank and rotary_width"),
    ({"kv_rank": 0, "rotary_width": 2}, "kv_rank=0 must"),
  ],
  "ssd": [({"num_layers": 0}, "num_layers=0 must")],
  "sse": [
    ({"num_partitions": 4, "num_selected": 5}, "num_selected=5 is more than num_partitions=4"),
    ({"num_partitions": 4, "num_readers": 5}, "num_readers=5 is more than num_partitions=4"),
    ({"gate": "sigmoid"}, "gate='sigmoid' is unknown.*'uniform', 'joint', 'eta'"),
    ({"inner": "delta"}, "inner='delta' is unknown"),
    ({"method": "sort"}, "method='sort' is unknown"),
    ({"balance": -0.1}, "balance=-0.1 must be a number of at least 0"),
    ({"lora_rank": 0}, "lora_rank=0"),
    ({"feature_map": "relu"}, "feature_map='relu' is unknown"),
    ({"output_gate": "rank"}, "output_gate='rank' is unknown"),
  ],
  "tnl": [
    ({"positions": "lrp"}, "positions='lrp' is unknown; did you mean 'lrpe'"),
    ({"gate_rank": 0}, "gate_rank=0 must"),
    *LAYER,
  ],
  "log_linear": [({"head_dim": 8, "max_length": 1}, "max_length=1 must be at least 2")],
  "mamba3": [
    ({"head_dim": 3}, "head_dim=3 does not divide .* 16; use head_dim=1"),
    ({"head_dim": 8, "num_groups": 3}, "num_groups=3 does not divide"),
    ({"head_dim": 8, "mimo_rank": 0}, "mimo_rank=0 must"),
    ({"head_dim": 8, "rotary_fraction": 0.3}, "rotary_fraction=0.3 is unknown"),
    ({"head_dim": 8, "state_dim": 2}, "state_dim=2 and .* no pair of channels"),
    ({"head_dim": 8, "decay_rate": "exp"}, "decay_rate='exp' is unknown"),
    ({"head_dim": 8, "decay_floor": None}, "decay_floor=None must be a finite number"),
    ({"head_dim": 8, "decay_floor": -1.0}, "decay_floor=-1.0 must be .* of at least 0"),
  ],
  "mlstm": [
    ({"gate_soft_cap": 0.0}, "gate_soft_cap=0.0 must be positive and finite, or None"),
    ({"gate_soft_cap": math.inf}, "gate_soft_cap=inf must be positive and finite, or None"),
    ({"variant": "large"}, "variant='large' is unknown"),
    ({"variant": "block", "expand_k": 1.0}, "expand_k=1.0: variant='block' has expand of both"),
    *(
      ({name: 2}, f"{name}=2: variant='layer' has")
      for name in ("expand", "conv_size", "block_size")
    ),
    ({"variant": "block", "block_size": 3}, "block_size=3 does not divide expand \\* dim = 16"),
    ({"denominator_eps": -1.0}, "denominator_eps=-1.0 must be .* of at least 0"),
    ({"expand_k": 0.3}, "expand_k=0.3 of dim=8"),
  ],
  "tnn": [
    ({"max_length": 7}, "max_length=7 is odd"),
    ({"decay": 0.0}, "decay=0.0 must be greater than 0"),
    ({"decay": 1.5}, "decay=1.5 must .* at most 1"),
    ({"expand": 0}, "expand=0 must"),
    ({"filter_dim": 0}, "filter_dim=0 must"),
  ],
}
WITH_HEADS = [name for name in MIXERS if "num_heads" in TINY[name].options]


def build(name, *, dim=DIM, **options):
  heads = HEADS if name in WITH_HEADS else {}
  return MIXERS[name](dim, **heads | options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  ("name", "options", "message"), [(name, *case) for name, cases in BAD.items() for case in cases]
)
def test_bad_options_raise_with_the_option_named(name, options, message):
  with pytest.raises(ValueError, match=message):
    build(name, **options)


@pytest.mark.parametrize("name", MIXERS)
def test_flags_and_numbers_that_are_of_another_type_raise(name):
  kinds = {bool: ("yes", "must be True or False"), float: ("a", "must be a finite number")}
  kinds[float | None] = kinds[float]
  for option in inspect.signature(MIXERS[name].__init__).parameters.values():
    value, rule = kinds.get(option.annotation, (None, None))
    if value is not None:
      with pytest.raises(ValueError, match=f"^{option.name}='{value}' {rule}"):
        build(name, **{option.name: value})


def test_width_of_values_is_whole_by_a_factor_that_is_rounded():
  mixer = build("kda", head_dim=49, expand_v=1 / 49)  # 49 (1 / 49) is below 1 in float64
  assert mixer.init_state(1).recurrent.kv.shape == (1, 2, 49, 1)


@pytest.mark.parametrize("name", MIXERS)
def test_rngs_that_are_none_of_flax_raise(name):
  with pytest.raises(ValueError, match=rf"{MIXERS[name].__name__}: rngs=0 must be .*nnx.Rngs\(0\)"):
    MIXERS[name](DIM, rngs=0)


@pytest.mark.parametrize("name", WITH_HEADS)
def test_heads_that_do_not_divide_the_width_raise(name):
  with pytest.raises(ValueError, match=r"num_heads=3|expand_k=0\.5 of dim=8"):
    build(name, num_heads=3)
