"""Records the models of `published_fla_configs`, in float64, and the defaults of their classes.

Part of `make test-peers`. tests/pretrained/golden/real/CASE.npz keeps config.json as published,
its source, the names and shapes of the tensors that the project's own code saves, and the logits.
golden/resaved.json says how each differs once a version of transformers has opened and saved it.
"""

import inspect
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.peers.numbers import parameter
from tests.peers.published_fla_configs import PUBLISHED
from tests.peers.record_models import FOLDER, TOKENS, with_published_tensors

REAL = FOLDER / "real"
# {class of the authors: of transformers}
OTHER_NAMES = {"BailingMoeV3ForCausalLM": "BailingHybridForCausalLM"}


def model_of(layout: str, config: dict[str, Any]) -> Any:
  """The model that the project itself builds from a config.json."""
  if layout == "mamba_ssm":
    from tests.peers import mamba_ssm_models

    return mamba_ssm_models.model(config)
  import transformers

  if layout == "fla":
    from fla import models as package

    from tests.peers.fla_models import patch
  else:
    package = transformers
    from tests.peers.transformers_models import patch
  patch()
  read = opened(package, config)
  if layout == "hf":
    read._attn_implementation = read._experts_implementation = "eager"
  read.dtype = torch.float64
  return getattr(package, _class(config))(read)


def _class(config: dict[str, Any]) -> str:
  name = config.get("architectures", ["RwkvForCausalLM"])[0]
  return OTHER_NAMES.get(name, name)


def opened(package: Any, config: dict[str, Any]) -> Any:
  """A config.json as transformers 5.23 or fla reads it."""
  kind = _class(config).replace("ForCausalLM", "Config")
  given = dict(config)
  if "kda_lower_bound" in config:
    given["kda_lower_bound"] = float(config["kda_lower_bound"])
  if "attention_head_dim" in config:
    given["head_dim"] = config["attention_head_dim"]
  with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(given))
    kind = kind.replace("ForConditionalGeneration", "Config")
    return getattr(package, kind).from_pretrained(folder)


def computed(case: str, layout: str, config: dict[str, Any]) -> tuple[dict[str, Any], Any]:
  """(the shapes of the tensors that are saved, logits)."""
  with torch.no_grad():
    model = model_of(layout, config).double().eval()
    if layout == "hf":
      model, _, shapes = with_published_tensors(case, model)
    else:
      for name, value in model.named_parameters():
        value.copy_(torch.from_numpy(parameter(case, name, value.shape)))
      shapes = {name: list(value.shape) for name, value in model.named_parameters()}
    return shapes, model(torch.from_numpy(TOKENS)).logits.numpy()


def record(case: str) -> None:
  """Writes real/CASE.npz."""
  source, config, layout = PUBLISHED[case]
  shapes, logits = computed(case, layout, config)
  assert logits.dtype == np.float64, case
  text = lambda value: np.frombuffer(value.encode(), np.uint8)
  index = {"config": text(json.dumps(config)), "shapes": text(json.dumps(shapes))}
  REAL.mkdir(exist_ok=True)
  np.savez_compressed(
    REAL / f"{case}.npz",
    **index,
    source=text(source),
    layout=text(layout),
    tokens=TOKENS,
    logits=logits,
  )
  print(f"golden/real/{case}.npz")


def resave(cases: Iterable[str]) -> None:
  """Writes how files differ that this version has opened and saved, to golden/resaved.json.

  What other versions wrote stays. A file is left out if this version computes something else from
  what it saves.
  """
  import transformers

  path, version = FOLDER / "resaved.json", transformers.__version__
  changes: dict[str, Any] = {}
  for case in cases:
    _, config, _ = PUBLISHED[case]
    with tempfile.TemporaryDirectory() as folder:
      opened(transformers, config).save_pretrained(folder)
      saved = json.loads((Path(folder) / "config.json").read_text())
    if "dtype" in saved:  # which `record` makes float64
      saved["dtype"] = config.get("torch_dtype", config.get("dtype"))
    logits = [computed(case, "hf", x)[1] for x in (saved, config)]
    if np.allclose(*logits, rtol=0, atol=1e-12):
      changed = {x: v for x, v in saved.items() if x not in config or config[x] != v}
      changes[case] = {"changed": changed, "gone": sorted(config.keys() - saved.keys())}
    else:
      print(f"transformers {version} computes something else from what it saves of {case}")
  found = json.loads(path.read_text()) if path.exists() else {}
  lines = [f'"{x}": {json.dumps(v)}' for x, v in sorted((found | {version: changes}).items())]
  path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
  print("golden/resaved.json")


_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
_SIZES = {"hidden_size": 72, "num_hidden_layers": 4, "vocab_size": 11}
_TYPES = ["linear_attention"] * 3 + ["full_attention"]
_KINDS = ["mamba", "mlp", "attention", "mlp"]
_FLA_SIZES = {"hidden_size": 288, "num_heads": 3, "num_hidden_layers": 1, "vocab_size": 11}
# {class: settings that are given; every other one has its default}
CLASSES = {
  "hf": {
    "LlamaConfig": _SIZES | _HEADS | {"intermediate_size": 40},
    "Qwen2Config": _SIZES | _HEADS | {"intermediate_size": 40},
    "Qwen3Config": _SIZES | _HEADS | {"intermediate_size": 40},
    "MistralConfig": _SIZES | _HEADS | {"intermediate_size": 40},
    "MambaConfig": _SIZES | {"state_size": 3},
    "Mamba2Config": _SIZES | {"hidden_size": 4096, "state_size": 3},
    "FalconMambaConfig": _SIZES | {"state_size": 3},
    "RwkvConfig": _SIZES,
    "RecurrentGemmaConfig": _SIZES | _HEADS,
    "BambaConfig": _SIZES
    | {"num_attention_heads": 8, "intermediate_size": 40}
    | {"attn_layer_indices": [1], "mamba_n_heads": 9},
    "GraniteMoeHybridConfig": _SIZES
    | {"num_attention_heads": 8, "mamba_n_heads": 9, "layer_types": ["mamba", "attention"] * 2},
    "JambaConfig": _SIZES | _HEADS | {"num_hidden_layers": 8},
    "Lfm2MoeConfig": _SIZES | _HEADS | {"layer_types": ["conv"] * 3 + ["full_attention"]},
    "Lfm2Config": _SIZES | _HEADS | {"layer_types": ["conv"] * 3 + ["full_attention"]},
    "Qwen3_5TextConfig": _SIZES | _HEADS | {"intermediate_size": 40},
    "Qwen3_5MoeTextConfig": _SIZES | _HEADS,
    "Qwen3NextConfig": _SIZES | _HEADS | {"num_experts": 0, "intermediate_size": 40},
    "FalconH1Config": _SIZES
    | _HEADS
    | {"intermediate_size": 40, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16},
    "NemotronHConfig": _SIZES
    | _HEADS
    | {"head_dim": 24, "mamba_num_heads": 9, "mamba_head_dim": 16, "layers_block_type": _KINDS},
    "OlmoHybridConfig": _SIZES
    | {"num_attention_heads": 3, "num_key_value_heads": 3}
    | {"intermediate_size": 40, "layer_types": _TYPES},
    "KimiLinearConfig": _SIZES | {"layer_types": _TYPES},
    "BailingHybridConfig": _SIZES | {"layer_types": _TYPES},
    "Zamba2Config": _SIZES
    | {"num_attention_heads": 8, "n_mamba_heads": 9, "layers_block_type": ["mamba", "hybrid"] * 2},
  },
  "fla": {
    "TransformerConfig": _FLA_SIZES,
    "GLAConfig": _FLA_SIZES,
    "RetNetConfig": _FLA_SIZES,
    "DeltaNetConfig": _FLA_SIZES,
    "GatedDeltaNetConfig": _FLA_SIZES,
    "GSAConfig": _FLA_SIZES,
    "HGRN2Config": _FLA_SIZES | {"hidden_size": 384},
    "RWKV6Config": _FLA_SIZES,
    "RWKV7Config": _FLA_SIZES | {"hidden_size": 384, "num_heads": 6, "num_hidden_layers": 2},
  },
}
# What they give a gated MLP: (hidden_size, hidden_ratio), where 256 is not reached and where it is.
_WIDTHS = ((72, 4), (72, None), (96, 4), (100, 4), (288, 4), (384, 2), (392, 2), (1000, 3))


def defaults() -> dict[str, list[dict[str, Any]]]:
  """{layout: [{given, full, without, null, widths}]}: what each class makes of what it is given.

  `full` is the whole config.json for `given`; of those for all of it but one setting (`without`)
  and with one that may be null (`null`) there is what differs, or nothing where the class rejects
  it. `widths` are of the MLP, which fla computes in its layers.
  """
  import fla.models
  import transformers

  found: dict[str, list[dict[str, Any]]] = {}
  for layout, classes in CLASSES.items():
    for name, given in classes.items():
      cls = getattr(fla.models if layout == "fla" else transformers, name)
      full = _saved(cls, given)
      row = {"given": given | {"model_type": cls.model_type}, "full": full}
      changes = {x: {y: v for y, v in given.items() if y != x} for x in given}
      row["without"] = {x: _differing(full, _saved(cls, left)) for x, left in changes.items()}
      nullable = [x for x in _nullable(cls) if not x.endswith("_token_id")]
      row["null"] = {x: _differing(full, _saved(cls, given | {x: None})) for x in nullable}
      if layout == "fla" and cls.model_type != "rwkv7":  # whose MLP has no gate
        model = getattr(fla.models, name.replace("Config", "ForCausalLM"))
        row["widths"] = [_width(cls, model, given, *pair) for pair in _WIDTHS]
      found.setdefault(layout, []).append(row)
  from tests.peers import mamba_ssm_models

  return found | {"mamba_ssm": [mamba_ssm_models.defaults()]}


def _saved(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
  """The config.json that a class writes; empty where it rejects what it is given."""
  with tempfile.TemporaryDirectory() as folder:
    try:
      cls(**given).save_pretrained(folder)
    except Exception as error:
      print(f"{cls.__name__}({given}): {str(error)[-80:]!r}")
      return {}
    return json.loads((Path(folder) / "config.json").read_text())


def _differing(full: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
  return {x: v for x, v in other.items() if x not in full or full[x] != v} if other else None


def _nullable(cls: Any) -> list[str]:
  arguments = inspect.signature(cls.__init__).parameters.values()
  own = inspect.get_annotations(cls)
  named = {x.name: x.annotation for x in arguments if x.name in own or not own} | own
  return [name for name, kind in named.items() if "None" in str(kind)]


def _width(cls: Any, model: Any, given: dict[str, Any], dim: int, ratio: int | None) -> list[Any]:
  with torch.device("meta"):
    options = given | {"hidden_size": dim, "hidden_ratio": ratio}
    options |= {"num_heads": 2 if dim < 300 else 4}
    options |= {"expand_ratio": None} if cls.model_type == "hgrn2" else {}
    layer = model(cls(**options))
  block = layer.model.layers[0]
  width = block.mlp.intermediate_size if hasattr(block, "mlp") else block.ffn.intermediate_size
  return [dim, ratio, width]


def main() -> None:
  for case in PUBLISHED:
    record(case)
  resave(case for case, found in PUBLISHED.items() if found.layout == "hf")
  (FOLDER / "defaults.json").write_text(json.dumps(defaults(), separators=(",", ":")) + "\n")
  print("golden/defaults.json")
