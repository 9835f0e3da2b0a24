"""Settings: accepted values, error messages, overrides and the JSON round trip."""

import dataclasses
import json
import re

import pytest

from train.config import (
  ConfigError,
  Data,
  Mesh,
  Model,
  Optimizer,
  Sample,
  Train,
  apply_overrides,
  from_dict,
  to_dict,
)
from train.config.changes import flatten, is_free


def small(**changes) -> Train:
  values = {
    "model": Model(
      dim=8, num_layers=2, num_heads=4, vocab_size=257, mixer_options={"shift": "kvg"}
    ),
    "optimizer": Optimizer(peak_lr=1e-3, final_lr=1e-5),
    "data": Data(folder="data", tokenizer="bytes", train=("a", "b"), sources={"a": "a.txt"}),
    "run_dir": "runs/small",
    "steps": 10,
    "seq_len": 16,
    "global_batch": 4,
    "checkpoint_every": 5,
    "eval_every": 5,
  }
  return Train(**(values | changes))


def test_settings_frozen_and_keyword_only():
  config = small()
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.steps = 3  # ty: ignore
  with pytest.raises(TypeError):
    Mesh(1, 2)  # ty: ignore


def test_settings_defaults_match_paper():
  assert to_dict(Optimizer(peak_lr=8e-4, final_lr=1e-5)) == {
    "name": "adamw",
    "options": {},
    "peak_lr": 8e-4,
    "final_lr": 1e-5,
    "schedule": "exponential",
    "warmup_steps": 0,
    "decay_steps": None,
    "b1": 0.9,
    "b2": 0.99,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "clip_norm": None,
    "lr_factors": {},
    "lora_rank": None,
    "lora_alpha": None,
    "lora_names": ["*_proj.kernel"],
    "router_bias_rate": 1e-3,
    "ema_decay": None,
    "z_loss": 0.0,
    "logit_penalty": 0.0,
  }
  assert to_dict(Mesh()) == {"data": -1, "fsdp": 1, "sequence": 1, "tensor": 1, "expert": 1}
  assert small().seed == 0
  assert small().accumulate == 1


def test_width_of_heads_frees_their_number():
  heads = {"num_layers": 2, "num_heads": 6, "vocab_size": 9}
  Model(dim=8, mixer="gated_delta_net", mixer_options={"head_dim": 4}, **heads)
  by_name = {"gated_delta_net": {"head_dim": 4}}
  Model(dim=8, mixer=("gated_delta_net", "lrn"), mixer_options=by_name, **heads)
  with pytest.raises(ConfigError, match="not a multiple of"):
    Model(dim=8, mixer=("gla", "lrn"), mixer_options={"gla": {"expand_k": 1.0}}, **heads)


def test_settings_dictionary_copied():
  options = {"shift": "kvg"}
  model = Model(dim=8, num_layers=1, num_heads=1, vocab_size=9, mixer_options=options)
  options["shift"] = "qkvg"
  assert model.mixer_options == {"shift": "kvg"}


@pytest.mark.parametrize(
  ("make", "message"),
  [
    # names
    (
      lambda: Optimizer(peek_lr=1e-3, final_lr=1e-5),
      "no setting 'optimizer.peek_lr' in Optimizer; did you mean 'peak_lr'?",
    ),
    (lambda: small(stepps=3), "no setting 'stepps' in Train; did you mean 'steps'?"),
    (lambda: small(peak_lr=1e-3), "no setting 'peak_lr'; did you mean 'optimizer.peak_lr'?"),
    (lambda: from_dict({"self": 1}), "no setting 'self' in Train"),
    (lambda: Mesh(zzz=1), "mesh.zzz' in Mesh; known are data, fsdp, sequence, tensor, expert."),
    (lambda: Optimizer(final_lr=1e-5), "optimizer.peak_lr is missing; it wants float."),
    # types
    (lambda: small(steps=1.5), "steps wants int, got 1.5."),
    (lambda: small(steps=True), "steps wants int, got True."),
    (lambda: small(run_dir=3), "run_dir wants str, got 3."),
    (lambda: small(model={"dim": 8}), "model.num_layers is missing; it wants int."),
    (lambda: small(mesh=3), "mesh wants Mesh(...), got 3."),
    (lambda: Sample(top_p="all"), "sample.top_p wants float or None, got 'all'."),
    (lambda: Sample(top_k=2.5), "sample.top_k wants int or None, got 2.5."),
    (lambda: Sample(temperature=float("nan")), "sample.temperature=nan must be a finite number."),
    (lambda: Sample(temperature=10**400), "must be a finite number."),
    (
      lambda: Optimizer(peak_lr=1, final_lr=1, schedule="cosin"),
      "optimizer.schedule='cosin' is not a choice; did you mean 'cosine'?",
    ),
    (
      lambda: Data(folder="d", tokenizer="bytes", train="books"),
      "data.train wants tuple[str, ...] or dict[str, float], got 'books'.",
    ),
    (
      lambda: Data(folder="d", tokenizer="bytes", train=("a", 1)),
      "data.train[1] wants str, got 1.",
    ),
    (
      lambda: Data(folder="d", tokenizer="bytes", train=("a",), sources={"a": 1}),
      "data.sources.a wants str, got 1.",
    ),
    # rules
    (
      lambda: Model(dim=510, num_layers=1, num_heads=4, vocab_size=9),
      "model.dim=510 is not a multiple of num_heads=4; use dim=508 or 512, or another num_heads.",
    ),
    (lambda: Model(dim=2, num_layers=1, num_heads=4, vocab_size=9), "use dim=4, or another"),
    (lambda: Model(dim=8, num_layers=0, num_heads=4, vocab_size=9), "model.num_layers=0 must be"),
    (
      lambda: Model(dim=8, num_layers=1, num_heads=4, vocab_size=9, mixer_options={"a": (1, 2)}),
      "model.mixer_options.a=(1, 2) cannot be stored as JSON",
    ),
    (
      lambda: Model(dim=8, num_layers=1, num_heads=4, vocab_size=9, mixer_options={"a": [1e999]}),
      "model.mixer_options.a[0]=inf cannot be stored as JSON",
    ),
    (lambda: Optimizer(peak_lr=0, final_lr=0), "optimizer.peak_lr=0.0 must be positive."),
    (lambda: Optimizer(peak_lr=1e-4, final_lr=1e-3), "must be between 0 and optimizer.peak_lr"),
    (lambda: Optimizer(peak_lr=1e-4, final_lr=0), "cannot be reached by an exponential schedule"),
    (
      lambda: Optimizer(peak_lr=1, final_lr=1, schedule="inverse_sqrt"),
      "optimizer.warmup_steps=0 has no inverse square root",
    ),
    (
      lambda: Optimizer(peak_lr=1, final_lr=1, decay_steps=5),
      "optimizer.decay_steps=5 belongs to optimizer.schedule='wsd'",
    ),
    (
      lambda: small(
        steps=10,
        optimizer=Optimizer(peak_lr=1, final_lr=1, schedule="wsd", warmup_steps=6, decay_steps=5),
      ),
      "optimizer.warmup_steps=6 and optimizer.decay_steps=5 are more than steps=10",
    ),
    (lambda: small(eval_tokens=0), "eval_tokens=0 must be at least 1"),
    (lambda: Optimizer(peak_lr=1, final_lr=1, b2=1), "optimizer.b2=1.0 must be in [0, 1)."),
    (lambda: Optimizer(peak_lr=1, final_lr=1, clip_norm=0), "None turns clipping off"),
    (lambda: Mesh(data=0), "mesh.data=0 must be positive, or -1 for the rest."),
    (lambda: Mesh(data=-1, fsdp=-1), "only one axis can take the devices that remain"),
    (lambda: small(steps=0), "steps=0 must be at least 1."),
    (lambda: small(seed=-1), "seed=-1 must be in [0, 2**32)."),
    (lambda: small(global_batch=4, accumulate=3), "use a multiple"),
    (lambda: small(run_dir=""), "run_dir is empty"),
    (
      lambda: small(optimizer=Optimizer(peak_lr=1, final_lr=1, warmup_steps=10)),
      "optimizer.warmup_steps=10 leaves no step of steps=10",
    ),
    (
      lambda: small(model=Model(dim=8, num_layers=1, num_heads=1, vocab_size=256)),
      "model.vocab_size=256 is smaller than the 257 entries of data.tokenizer='bytes'",
    ),
    (lambda: Data(folder="d", tokenizer="bytes", train=()), "data.train is empty"),
    (lambda: Data(folder="d", tokenizer="bytes", train=("a", "a")), "names a set twice"),
    (lambda: Data(folder="d", tokenizer="bytes", train=("../a",)), "not a plain file name"),
    (lambda: Data(folder="d", tokenizer="bpe:4k", train=("a",)), "write for example 'bpe:4096'"),
    (lambda: Data(folder="d", tokenizer="bpe:200", train=("a",)), "at least 257 entries"),
    (
      lambda: Data(folder="d", tokenizer="bytes", train=("books",), sources={"boks": "x"}),
      "in neither data.train nor data.validation; did you mean 'books'?",
    ),
    (lambda: Sample(top_p=0), "sample.top_p=0.0 must be in (0, 1], or be None."),
    (lambda: Sample(top_k=0), "sample.top_k=0 must be at least 1, or be None."),
  ],
)
def test_settings_invalid_value_rejected(make, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    make()


@pytest.mark.parametrize(
  ("assignment", "read", "value"),
  [
    ("steps=1_000", lambda c: c.steps, 1000),
    ("optimizer.peak_lr=2", lambda c: c.optimizer.peak_lr, 2.0),
    ("optimizer.peak_lr=5e-3", lambda c: c.optimizer.peak_lr, 5e-3),
    ("optimizer.clip_norm=1", lambda c: c.optimizer.clip_norm, 1.0),
    ("optimizer.clip_norm=none", lambda c: c.optimizer.clip_norm, None),
    ("optimizer.clip_norm=NONE", lambda c: c.optimizer.clip_norm, None),
    ("eval_at_start=FALSE", lambda c: c.eval_at_start, False),
    ("optimizer.schedule=cosine", lambda c: c.optimizer.schedule, "cosine"),
    ("sample.top_p=None", lambda c: c.sample.top_p, None),
    ("sample.top_k=5", lambda c: c.sample.top_k, 5),
    ("sample.prompt=12", lambda c: c.sample.prompt, "12"),
    ("sample.prompt=1e3", lambda c: c.sample.prompt, "1e3"),
    ("sample.prompt=a = b", lambda c: c.sample.prompt, "a = b"),
    ("sample.prompt='it is'", lambda c: c.sample.prompt, "it is"),
    ("sample.prompt=None", lambda c: c.sample.prompt, "None"),
    ("sample.prompt=", lambda c: c.sample.prompt, ""),
    ("data.train=a", lambda c: c.data.train, ("a",)),
    ("data.train=a, c", lambda c: c.data.train, ("a", "c")),
    ("data.train=('a', 'c')", lambda c: c.data.train, ("a", "c")),
    ("data.validation=()", lambda c: c.data.validation, ()),
    ("data.sources.b=/text/b.txt", lambda c: c.data.sources, {"a": "a.txt", "b": "/text/b.txt"}),
    ("data.sources={'b': 'x'}", lambda c: c.data.sources, {"b": "x"}),
    ("model.mixer_options.shift=qkvg", lambda c: c.model.mixer_options, {"shift": "qkvg"}),
    (
      "model.mixer_options.decay_first=false",
      lambda c: c.model.mixer_options,
      {"shift": "kvg", "decay_first": False},
    ),
    ("mesh.fsdp=4", lambda c: c.mesh, Mesh(fsdp=4)),
  ],
)
def test_override_value_parsed_by_setting_type(assignment, read, value):
  result = read(apply_overrides(small(data=small_data()), [assignment]))
  assert result == value
  assert type(result) is type(value)


@pytest.mark.parametrize(("text", "mixer"), [("gla", "gla"), ("gla, rwkv4", ("gla", "rwkv4"))])
def test_override_of_the_mixer_needs_other_options(text, mixer):
  assignments = ["model.mixer_options={}", f"model.mixer={text}"]
  assert apply_overrides(small(), assignments).model.mixer == mixer


def small_data() -> Data:
  return Data(
    folder="d", tokenizer="bytes", train=("a",), validation=("b",), sources={"a": "a.txt"}
  )


def test_override_repeated_last_one_wins():
  config = small()
  changed = apply_overrides(config, ["steps=3", "steps=7"])
  assert changed == dataclasses.replace(config, steps=7)
  assert config == small()


def test_override_of_dependent_settings_checked_once():
  changed = apply_overrides(small(), ["model.dim=9", "model.num_heads=3"])
  assert (changed.model.dim, changed.model.num_heads) == (9, 3)


def test_override_of_sets_drops_what_belongs_to_others():
  """Another set to evaluate on, or to train on, needs no data.sources={}."""
  apply = lambda *given: apply_overrides(small(), given).data
  assert apply("data.validation=c").sources == {"a": "a.txt"}
  assert apply("data.train=c").sources == {}
  assert apply("data.train=c", "data.sources.c=c.txt").sources == {"c": "c.txt"}
  of_both = dataclasses.replace(small_data(), sources={"a": "a.txt", "b": "b.txt"})
  assert apply_overrides(small(data=of_both), ["data.validation=c"]).data.sources == {"a": "a.txt"}
  for given in ("data.sources.x=x.txt", 'data.sources={"x": "x.txt"}'):
    with pytest.raises(ConfigError, match=r"data\.sources has 'x', which is in neither"):
      apply("data.train=c", given)


@pytest.mark.parametrize(
  ("assignment", "message"),
  [
    (
      "optimizer.peek_lr=1",
      "no setting 'optimizer.peek_lr' in Optimizer; did you mean 'peak_lr'?",
    ),
    ("optimzer.peak_lr=1", "no setting 'optimzer' in Train; did you mean 'optimizer'?"),
    ("dim=8", "no setting 'dim'; did you mean 'model.dim'?"),
    ("steps", "--set wants name=value, got 'steps'"),
    ("=3", "--set wants name=value, got '=3'"),
    ("steps=many", "steps wants int, got 'many'."),
    ("steps=1e3", "steps wants int, got 1000.0. Write 1000."),
    ("steps=none", "steps wants int, got None."),
    ("steps.x=3", "no setting 'steps.x': steps is a single value, int."),
    ("model.dim=5.5", "model.dim wants int, got 5.5."),
    ("model.dim=510", "model.dim=510 is not a multiple of num_heads=4"),
    (
      "model.mixer_options.shfit=kvg",
      "model.mixer_options of 'lnssm': option='shfit' is unknown; did you mean 'shift'? Use one of",
    ),
    (
      "model.mixer_options.use_gate=3",
      "model.mixer_options of 'lnssm': use_gate=3 is of type int; give bool.",
    ),
    ("model.mixer=gla", "model.mixer_options of 'gla': option='shift' is unknown"),
    ("model.mixer=lnsm", "model.mixer='lnsm' is unknown; did you mean 'lnssm'?"),
    ("optimizer.peak_lr=fast", "optimizer.peak_lr wants float, got 'fast'."),
    (
      "optimizer.peak_lr=1e-3,3e-3",
      "got (0.001, 0.003). A run has one value; `lnssm-train sweep`",
    ),
    ("optimizer.clip_norm=x", "optimizer.clip_norm wants float or None, got 'x'."),
    ("optimizer.schedule=square", "optimizer.schedule='square' is not a choice"),
    ("model.remat=ful", "model.remat='ful' is not a choice; did you mean 'full'?"),
    ("data.train=3", "data.train wants tuple[str, ...] or dict[str, float], got 3."),
    ("data.sources.x=y", "known are a, b. To use other sets, remove the entry, or all of them by"),
    ("data.sources=3", "data.sources wants dict[str, str], got 3."),
    ("data.sources.=x", "ends in a dot"),
    ("mesh={'data': 2}", "mesh is a group of settings; set one of them: mesh.data=..."),
    ("steps=" + "(" * 5000, "steps wants int"),
  ],
)
def test_override_invalid_rejected(assignment, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    apply_overrides(small(), [assignment])


def test_config_json_round_trip_exact():
  options = {"shift": "kvg", "decay_first": False}
  deep = {"list": [1, 2.5, None, {"deep": "x"}]}
  config = small(
    model=Model(dim=12, num_layers=2, num_heads=3, vocab_size=300, mixer_options=options),
    optimizer=Optimizer(
      name="optax:adamw", options=deep, peak_lr=0.1 + 0.2, final_lr=1e-300, clip_norm=1 / 3
    ),
    sample=Sample(prompt='λ "quoted"\n', top_k=3, top_p=None),
  )
  stored = json.loads(json.dumps(to_dict(config), allow_nan=False))
  assert stored == to_dict(config)
  assert from_dict(stored) == config


def test_config_stored_unknown_setting_rejected():
  values = to_dict(small())
  values["model"]["width"] = 3
  with pytest.raises(ConfigError, match=r"no setting 'model\.width'"):
    from_dict(values)


def test_resumed_run_may_change_what_affects_its_numbers_by_rounding_only():
  names = {name for name, _ in flatten(to_dict(small()))}
  groups = {"sample", "mesh"}
  free = {name for name in names if is_free(name)}
  assert {name for name in free if name.split(".")[0] not in groups} == {
    *("steps", "accumulate", "checkpoint_every", "eval_every", "eval_at_start", "log_every"),
    *(
      "keep_checkpoints",
      "max_skipped",
      "loss_chunk",
      "watch",
      "callbacks",
      "run_name",
      "run_group",
    ),
    *("run_tags", "compile_cache", "model.remat", "model.unroll"),
  }
  assert {name for name in names if name.split(".")[0] in groups} <= free
  assert not is_free("samples") and not is_free("steps_per_epoch")
