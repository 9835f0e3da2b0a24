"""Records what the package lm_eval answers with a small model of transformers.

Part of `make test-peers`. tests/pretrained/golden/lm_eval.json keeps the model's config and shapes,
whose parameters are those of `numbers`, the requests, and the answers of `HFLM` with the tokenizers
of `tokenizer_files`.
"""

import json
import types
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

from tests.peers import record_tokenizers, tokenizer_files
from tests.peers.numbers import parameter

FILE = Path(__file__).parents[1] / "pretrained" / "golden" / "lm_eval.json"
# Not one with EOS: the package counts that of the context, and leaves a token of the text out.
CASES = ("byte_level", "byte_level_bos", "metaspace_bos")
# Pairs whose boundary lies between tokens of the whole text; the first ends with white space.
PAIRS = [
  ("The capital of ", "France"),
  ("The capital of France is", " Paris"),
  ("The capital of France is", " Madrid, and"),
  ("a word", " sea"),
  ("<|im_start|>user", "\nquestion<|im_end|>"),
  ("a word, another", " word"),
]
TEXTS = ["The capital of France is Paris, and the sea.", "a word", "caf\u00e9"]
OPTIONS = [
  {"until": [], "max_gen_toks": 10},
  {"until": ["e", "\x7f"], "max_gen_toks": 16, "do_sample": False, "temperature": 0.0},
  {"until": "zz", "max_new_tokens": 10, "repetition_penalty": 1.8, "num_beams": 1},
]
CONTEXTS = ["The capital of France", "a", "a word, another word; the"]


def model_of(vocab_size: int) -> LlamaForCausalLM:
  """A Llama of two layers in float64."""
  config = LlamaConfig(
    vocab_size=vocab_size,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=128,
  )
  model = LlamaForCausalLM(config).double().eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      value.copy_(torch.from_numpy(parameter("lm_eval", name, value.shape)) * 3)
  return model


def record(case: str) -> dict[str, Any]:
  """The entry of one tokenizer."""
  tokenizer = record_tokenizers.load(tokenizer_files.cases()[case])
  model = model_of(len(tokenizer))
  how = {"tokenizer": tokenizer, "backend": "causal", "batch_size": 2, "softmax_dtype": "float64"}
  judge = HFLM(model, **how)
  requests = lambda rows: [types.SimpleNamespace(args=row, task_name=None) for row in rows]
  prefix = judge.prefix_token_id
  # A rolling text begins with the prefix there, and BOS would be read and scored after it.
  once = HFLM(model, **how, add_bos_token=False)
  rolling = once.loglikelihood_rolling(requests((text,) for text in TEXTS), True)
  generated = [
    judge.generate_until(requests((text, dict(options)) for text in CONTEXTS), True)
    for options in OPTIONS
  ]
  return {
    "config": json.loads(model.config.to_json_string()),
    "shapes": {name: list(x.shape) for name, x in model.state_dict().items()},
    "prefix": prefix,
    "loglikelihood": judge.loglikelihood(requests([*PAIRS, ("", "Paris")]), True),
    "rolling": rolling,
    "generated": generated,
  }


def main() -> None:
  found = {case: record(case) for case in CASES}
  asked = {"pairs": [*PAIRS, ("", "Paris")], "texts": TEXTS, "options": OPTIONS}
  asked["contexts"] = CONTEXTS
  FILE.write_text(json.dumps(asked | {"cases": found}, separators=(",", ":")) + "\n")
  print(f"golden/{FILE.name}: {', '.join(found)}")


if __name__ == "__main__":
  main()
