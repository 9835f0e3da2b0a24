"""Opens a folder with transformers or fla, and writes the logits of TOKENS.

    .venv-peers/bin/python -m tests.peers.open_folder FOLDER OUT.npy [fla]

It warns of every tensor that is missing or not used, and these warnings are errors here.
"""

import json
import logging
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.peers.record_models import TOKENS


class _Raises(logging.Handler):
  def emit(self, record):
    message = record.getMessage()
    if any(word in message for word in ("MISSING", "UNEXPECTED", "newly initialized", "not used")):
      raise AssertionError(message)


def main(folder: str, out: str, layout: str = "hf") -> None:
  torch.set_default_dtype(torch.float64)
  if layout == "fla":
    from tests.peers.fla_models import patch
  else:
    from tests.peers.transformers_models import patch
  patch()
  transformers.utils.logging.get_logger().addHandler(_Raises())
  # By name: once Qwen3-Next has imported fla, `AutoModelForCausalLM` of "mamba" is fla's.
  config = json.loads((Path(folder) / "config.json").read_text())
  named = lambda: getattr(transformers, config["architectures"][0])
  model, info = (transformers.AutoModelForCausalLM if layout == "fla" else named()).from_pretrained(
    folder, dtype=torch.float64, output_loading_info=True
  )
  assert not info["missing_keys"] and not info["unexpected_keys"], info
  with torch.no_grad():
    logits = model.eval()(torch.from_numpy(TOKENS), use_cache=False).logits
  np.save(out, logits.numpy())


if __name__ == "__main__":
  main(*sys.argv[1:])
