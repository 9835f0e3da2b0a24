"""Records the logits of a tiny model with an adapter of PEFT, in float64.

    .venv-peers/bin/python -m tests.peers.record_adapter           part of `make test-peers`
    .venv-peers/bin/python -m tests.peers.record_adapter BASE ADAPTER OUT.npy    opens an adapter

golden/adapter.npz keeps adapter_config.json, the names and shapes of the tensors, and the logits.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors import safe_open

from tests.peers.numbers import parameter
from tests.peers.record_models import TOKENS

CASE = "qwen3_5_text"  # the base model, as recorded
GOLDEN = Path(__file__).parents[1] / "pretrained" / "golden" / "adapters"


def logits_of(model) -> np.ndarray:
  """Of the recorded tokens."""
  with torch.no_grad():
    return model.eval()(torch.from_numpy(TOKENS), use_cache=False).logits.numpy()


def main() -> None:
  base = transformers_models.cases()[CASE][0].double()
  options = {"rank_pattern": {"down_proj": 3}, "alpha_pattern": {"down_proj": 5}}
  names = ["q_proj", "in_proj_qkv", "out_proj", "down_proj"]
  model = peft.get_peft_model(
    base, peft.LoraConfig(r=2, lora_alpha=3, target_modules=names, use_rslora=True, **options)
  )
  with torch.no_grad():
    for name, value in model.named_parameters():
      plain = name.replace("base_model.model.", "").replace(".base_layer", "")
      drawn = parameter("adapter" if "lora" in name else CASE, plain, value.shape)
      value.copy_(torch.from_numpy(drawn))
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    with safe_open(Path(folder) / "adapter_model.safetensors", "np") as file:
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  config["target_modules"].sort()
  text = np.frombuffer(json.dumps(config).encode(), np.uint8)
  GOLDEN.mkdir(exist_ok=True)
  np.savez_compressed(GOLDEN / f"{CASE}.npz", config=text, logits=logits_of(model), **arrays)
  print(f"golden/adapters/{CASE}.npz")


def opened(base: str, adapter: str, out: str) -> None:
  """Opens an adapter of ours with PEFT; every tensor of it must have its place."""
  transformers_models.patch()
  config = json.loads((Path(base) / "config.json").read_text())
  model = getattr(transformers, config["architectures"][0]).from_pretrained(base).double()
  model = peft.PeftModel.from_pretrained(model, adapter).double()
  with safe_open(Path(adapter) / "adapter_model.safetensors", "np") as file:
    stored = {name.replace("weight", "default.weight") for name in file.keys()}  # noqa: SIM118
  assert {name for name, _ in model.named_parameters() if "lora_" in name} == stored
  np.save(out, logits_of(model))


if __name__ == "__main__":
  if len(sys.argv) == 1:
    import tests.peers.record  # noqa: F401  (casts to float32 keep float64)
  from tests.peers import transformers_models

  if len(sys.argv) > 1:
    opened(*sys.argv[1:])
  else:
    main()
