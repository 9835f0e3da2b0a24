"""Small tokenizers of the kinds that published models have, as the files of their folders.

Made here with the package `tokenizers`, which both sides have; nothing is downloaded.
"""

import json
from typing import Any, NamedTuple

from tokenizers import (
  AddedToken,
  Regex,
  Tokenizer,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
  trainers,
)

CORPUS = [
  "The capital of France is Paris, and the capital of Spain is Madrid.",
  "a word, another word; the words of the river run to the sea.",
  "def f(x):\n    return x + 1\n",
  "user assistant system question answer",
] * 3
CHAT = ("<|im_start|>", "<|im_end|>")


class Files(NamedTuple):
  """tokenizer.json and tokenizer_config.json of a folder."""

  tokenizer: Tokenizer
  config: dict[str, Any]


def _byte_level(*special: str) -> Tokenizer:
  inner = Tokenizer(models.BPE())
  inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = decoders.ByteLevel()
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  _train(inner, trainers.BpeTrainer, special, 320, initial_alphabet=alphabet)
  return inner


def _metaspace(*special: str, prepend: bool) -> Tokenizer:
  """BPE of SentencePiece's kind: spaces are letters, unknown letters are bytes."""
  inner = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
  inner.pre_tokenizer = pre_tokenizers.Metaspace()  # so that merges stay within words
  names = [f"<0x{byte:02X}>" for byte in range(256)]
  _train(inner, trainers.BpeTrainer, ("<unk>", *special, *names), 400)
  settings = json.loads(inner.to_str()) | {"pre_tokenizer": None}
  # Bytes are tokens of the model, but none that a text spells out.
  added = [token for token in settings["added_tokens"] if token["content"] not in names]
  inner = Tokenizer.from_str(json.dumps(settings | {"added_tokens": added}))
  spaces = [normalizers.Replace(" ", "\u2581")]
  inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prepend + spaces)
  strip = [decoders.Strip(" ", 1, 0)] * prepend
  steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
  inner.decoder = decoders.Sequence([*steps, *strip])
  return inner


def _unigram(*special: str) -> Tokenizer:
  inner = Tokenizer(models.Unigram())
  inner.normalizer = normalizers.NFKC()
  inner.pre_tokenizer = pre_tokenizers.Metaspace()
  inner.decoder = decoders.Metaspace()
  how = {"unk_token": "<unk>"}
  _train(inner, trainers.UnigramTrainer, ("<unk>", *special), 90, **how)
  # The sums of scores, and pieces of equal ones, come in another order each time.
  settings = json.loads(inner.to_str())
  first = 1 + len(special)
  vocab = settings["model"]["vocab"]
  rounded = [[piece, round(score, 6)] for piece, score in vocab[first:]]
  vocab[first:] = sorted(rounded, key=lambda piece: (-piece[1], piece[0]))
  return Tokenizer.from_str(json.dumps(settings))


def _train(inner: Tokenizer, trainer: Any, special: tuple[str, ...], size: int, **how: Any) -> None:
  options = {"vocab_size": size, "show_progress": False, "special_tokens": list(special)}
  inner.train_from_iterator(CORPUS, trainer(**options, **how))


def _template(inner: Tokenizer, before: list[str], after: list[str]) -> Any:
  single = " ".join([*before, "$A", *after])
  ids = [(name, inner.token_to_id(name)) for name in dict.fromkeys([*before, *after])]
  return processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=ids)


def cases() -> dict[str, Files]:
  """Every tokenizer by the name of its case."""
  generic = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  ends = {"bos_token": "<s>", "eos_token": "</s>"}
  found = {}

  inner = _byte_level("<|endoftext|>", *CHAT)
  inner.post_processor = processors.ByteLevel(trim_offsets=True)
  found["byte_level"] = Files(inner, generic | {"eos_token": "<|endoftext|>"})

  inner = _byte_level("<s>", "</s>", *CHAT)
  words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+")
  inner.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(words, "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  inner.post_processor = processors.Sequence(
    [processors.ByteLevel(trim_offsets=True), _template(inner, ["<s>"], [])]
  )
  found["byte_level_bos"] = Files(inner, generic | ends)

  inner = _metaspace("<s>", "</s>", *CHAT, prepend=True)
  inner.post_processor = _template(inner, ["<s>"], [])
  found["metaspace_bos"] = Files(inner, generic | ends)

  inner = Tokenizer.from_str(inner.to_str())
  inner.post_processor = _template(inner, ["<s>"], ["</s>"])
  found["metaspace_bos_eos"] = Files(inner, generic | ends)

  inner = _metaspace("<pad>", "<eos>", "<bos>", prepend=False)
  inner.post_processor = _template(inner, ["<bos>"], [])
  found["metaspace_no_prefix"] = Files(
    inner, generic | {"bos_token": "<bos>", "eos_token": "<eos>"}
  )

  # As saved for LlamaTokenizer: a Metaspace that prepends to the first word only.
  inner = Tokenizer.from_str(found["metaspace_bos"].tokenizer.to_str())
  inner.normalizer = None
  inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
  flags = {"add_bos_token": True, "add_eos_token": False}
  found["llama_class"] = Files(inner, ends | flags | {"tokenizer_class": "LlamaTokenizer"})

  inner = _unigram("<pad>", "</s>")
  inner.post_processor = _template(inner, [], ["</s>"])
  found["unigram_eos"] = Files(inner, generic | {"eos_token": "</s>"})

  inner = _byte_level("<s>", "</s>", "<unk>")
  roberta = (("</s>", inner.token_to_id("</s>")), ("<s>", inner.token_to_id("<s>")))
  inner.post_processor = processors.RobertaProcessing(*roberta, add_prefix_space=False)
  found["roberta"] = Files(inner, generic | ends)

  inner = _byte_level("<|endoftext|>")
  inner.normalizer = normalizers.NFC()
  inner.post_processor = _template(inner, ["<|endoftext|>"], [])
  neox = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
  found["neox_class"] = Files(inner, neox | {"tokenizer_class": "GPTNeoXTokenizer"})

  inner = _byte_level("<|endoftext|>")
  inner.add_tokens([AddedToken("FRANCE", special=False), AddedToken(" the river", special=False)])
  inner.post_processor = processors.ByteLevel(trim_offsets=False)
  found["added_words"] = Files(inner, generic | {"eos_token": "<|endoftext|>"})
  return found
