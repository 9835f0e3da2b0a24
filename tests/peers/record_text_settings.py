"""Records what transformers reads in the files of `published_text_settings`.

Part of `make test-peers`. tests/pretrained/golden/text_settings.json keeps the files, what a model
generates with, and special tokens, ids and chats by the tokenizer.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tests.peers.published_text_settings import GENERATION, TOKENIZERS, Generation, Texts

FILE = Path(__file__).parents[1] / "pretrained" / "golden" / "text_settings.json"
CHAT = [{"role": "user", "content": "words"}]
TEXT = "some words"
_SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
_READ = ("do_sample", "max_new_tokens", "repetition_penalty", "temperature", "top_k", "top_p")


def generation(case: Generation) -> dict[str, Any]:
  """The options with which `generate` of a folder's model runs, without arguments."""
  config = transformers.LlamaConfig(**_SIZES, intermediate_size=8, eos_token_id=case.ends)
  with tempfile.TemporaryDirectory() as folder:
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    path = Path(folder) / "generation_config.json"
    path.unlink() if case.file is None else path.write_text(json.dumps(case.file))
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
  read = model._prepare_generation_config(None)[0]
  ends = read.eos_token_id
  ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
  return {"ends": ends} | {name: getattr(read, name) for name in _READ}


def tokenizer(case: Texts) -> dict[str, Any]:
  """tokenizer.json, and what AutoTokenizer makes of the folder."""
  names = [*case.special, "some", "words", "user"]
  unknown = "<unk>" if "<unk>" in names else names[0]
  inner = Tokenizer(models.WordLevel({x: i for i, x in enumerate(names)}, unk_token=unknown))
  inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  inner.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in case.special])
  if case.before is not None:
    inner.post_processor = processors.TemplateProcessing(
      single=f"{case.before} $A", special_tokens=[(case.before, names.index(case.before))]
    )
  with tempfile.TemporaryDirectory() as folder:
    inner.save(f"{folder}/tokenizer.json")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(case.file))
    # Of the class that the file names, transformers 5 builds one of its own.
    found = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  special = {f"{x}_token": getattr(found, f"{x}_token") for x in ("bos", "eos", "pad", "unk")}
  return {
    "tokenizer": json.loads(inner.to_str()),
    "special": special,
    "ids": found(TEXT)["input_ids"],
    "chat": found.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
  }


def main() -> None:
  found = {
    "generation": {
      x: {**case._asdict(), "read": generation(case)} for x, case in GENERATION.items()
    },
    "tokenizers": {
      x: {"source": case.source, "file": case.file} | tokenizer(case)
      for x, case in TOKENIZERS.items()
    },
  }
  FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")
  print(f"golden/{FILE.name}")


if __name__ == "__main__":
  main()
