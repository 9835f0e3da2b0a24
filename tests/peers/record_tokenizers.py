"""Records what transformers makes of the tokenizers of `tokenizer_files`.

Part of `make test-peers`. tests/pretrained/golden/tokenizers.json keeps the files, ids of texts as
AutoTokenizer gives them, and the text of tokens that continue a text.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from tests.peers import tokenizer_files

FILE = Path(__file__).parents[1] / "pretrained" / "golden" / "tokenizers.json"
TEXTS = [
  "",
  "Paris",
  " Paris is",
  "The capital of France is  Paris.\n\n  x",
  "\n",
  "caf\u00e9 \u4f60\u597d \U0001f600 e\u0301",
  "<|im_start|>user\nhi<|im_end|>",
  "<s>a</s> <unk> <|endoftext|>b<eos>",
  "FRANCE and the river",
  "def f(x):\n    return x + 1\n",
]


def load(files: tokenizer_files.Files) -> Any:
  """The tokenizer that transformers loads from a folder with the files."""
  with tempfile.TemporaryDirectory() as folder:
    files.tokenizer.save(f"{folder}/tokenizer.json")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(files.config))
    return AutoTokenizer.from_pretrained(folder)


def continuations(tokenizer: Any, bos: list[int], seed: int) -> list[list[Any]]:
  """(tokens of a text, tokens that continue it, the text of all without that of the first)."""
  rng, found = np.random.default_rng(seed), []
  size = len(tokenizer)
  for text in ("The capital", "caf\u00e9", "x \u4f60", ""):
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    for _ in range(4):
      tokens = rng.integers(0, size, 12).tolist()
      tokens = [i for i in tokens if i != tokenizer.eos_token_id]
      decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
      before, whole = decode(prompt), decode(prompt + tokens)
      same = next((n for n, x in enumerate(before) if whole[n : n + 1] != x), len(before))
      found.append([[*bos, *prompt], tokens, whole[same:]])
  return found


def record(case: str, files: tokenizer_files.Files, seed: int) -> dict[str, Any]:
  """The entry of one case."""
  tokenizer = load(files)
  whole = [tokenizer(text)["input_ids"] for text in TEXTS]
  how = {"add_special_tokens": False, "split_special_tokens": True}
  plain = [tokenizer(text, **how)["input_ids"] for text in TEXTS]
  kept = [[i for i in ids if i != tokenizer.eos_token_id] for ids in whole]
  texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in kept]
  empty = tokenizer("a")["input_ids"]
  bos = empty[:1] if empty[:1] == [tokenizer.bos_token_id] else []
  return {
    "tokenizer": json.loads(files.tokenizer.to_str()),
    "config": files.config,
    "whole": whole,
    "plain": plain,
    "decoded": texts,
    "continuations": continuations(tokenizer, bos, seed),
  }


def main() -> None:
  found = {case: record(case, files, n) for n, (case, files) in enumerate(
    tokenizer_files.cases().items())}  # fmt: skip
  FILE.write_text(json.dumps({"texts": TEXTS, "cases": found}, separators=(",", ":")) + "\n")
  print(f"golden/{FILE.name}: {', '.join(found)}")


if __name__ == "__main__":
  main()
