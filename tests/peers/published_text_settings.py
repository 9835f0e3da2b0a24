"""The fields of published generation_config.json and tokenizer_config.json files: facts, no code.

Ids are those of the files; a vocabulary is a few words and the file's special tokens. Where a file
has a chat template, the one here is ours, of one line.
"""

from typing import Any, NamedTuple


class Generation(NamedTuple):
  """One generation_config.json, and the eos_token_id of config.json next to it."""

  source: str
  file: dict[str, Any] | None  # None: the folder has none
  ends: int | list[int] | None = None


GENERATION = {
  "falcon-h1-tiny-90m": Generation("tiiuae/Falcon-H1-Tiny-90M-Instruct", None, [228, 11]),
  "rwkv-5-world": Generation(
    "RWKV-5 World, by its converter's repository",
    {
      "chat_format": "chatml",
      "do_sample": True,
      "eos_token_id": 0,
      "max_new_tokens": 4096,
      "max_window_size": 4096,
      "pad_token_id": 0,
      "repetition_penalty": 1.0,
      "top_k": 0,
      "top_p": 0.1,
      "transformers_version": "4.31.1",
    },
    0,
  ),
  "devstral-24b": Generation(
    "Devstral 24B, of Mistral's class",
    {
      "_from_model_config": True,
      "bos_token_id": 1,
      "eos_token_id": 2,
      "pad_token_id": 11,
      "transformers_version": "4.53.1",
    },
    2,
  ),
  "gemma-3n-e4b": Generation(
    "google/gemma-3n-E4B-it",
    {
      "bos_token_id": 2,
      "cache_implementation": "hybrid",
      "do_sample": True,
      "eos_token_id": [1, 106],
      "pad_token_id": 0,
      "top_k": 64,
      "top_p": 0.95,
      "transformers_version": "4.54.0.dev0",
    },
    1,
  ),
  "gemma-3-27b": Generation(
    "google/gemma-3-27b-it",
    {
      "_from_model_config": True,
      "bos_token_id": 2,
      "cache_implementation": "hybrid",
      "eos_token_id": [1, 106],
      "pad_token_id": 0,
      "transformers_version": "4.50.0.dev0",
    },
    [1, 106],
  ),
  "glm-4.5-air": Generation(
    "zai-org/GLM-4.5-Air",
    {
      "_from_model_config": True,
      "eos_token_id": [151329, 151336, 151338],
      "pad_token_id": 151329,
      "transformers_version": "4.54.0",
    },
    [151329, 151336, 151338],
  ),
  "glm-4.7": Generation(
    "zai-org/GLM-4.7 of 9B",
    {
      "_from_model_config": True,
      "eos_token_id": [154820, 154827, 154829],
      "pad_token_id": 154820,
      "temperature": 1.0,
      "transformers_version": "5.0.0.dev0",
    },
    [154820, 154827, 154829],
  ),
  # Made here: transformers ends no text then, for the file has no token for it.
  "without-ends": Generation("a file without eos_token_id", {"do_sample": False}, 2),
}


class Texts(NamedTuple):
  """One tokenizer_config.json and what its tokenizer.json has."""

  source: str
  file: dict[str, Any]
  special: tuple[str, ...]
  before: str | None = None  # the token that tokenizer.json puts before a text


_LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>")
_TURNS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }}{% endfor %}"
_SENTENCE_PIECE = {
  "add_bos_token": True,
  "add_eos_token": False,
  "clean_up_tokenization_spaces": False,
  "legacy": False,
  "sp_model_kwargs": {},
  "spaces_between_special_tokens": False,
  "use_default_system_prompt": False,
}
_ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
_added = lambda *names: {
  str(i): {"content": name, "special": True} | _ADDED for i, name in enumerate(names)
}

TOKENIZERS = {
  "transformers-5": Texts(
    "rimon-dutta/Rimon-Math-3B-V1, Llama 3 saved by transformers 5",
    {
      "additional_special_tokens": [*_LLAMA_3[:2], *_TURNS],
      "backend": "tokenizers",
      "bos_token": _LLAMA_3[0],
      "chat_template": _TEMPLATE,
      "clean_up_tokenization_spaces": True,
      "eos_token": _LLAMA_3[1],
      "is_local": True,
      "model_input_names": ["input_ids", "attention_mask"],
      "model_max_length": 131072,
      "pad_token": _LLAMA_3[1],
      "padding_side": "left",
      "tokenizer_class": "TokenizersBackend",
      "unk_token": None,
    },
    (*_LLAMA_3, *_TURNS),
    _LLAMA_3[0],
  ),
  "transformers-5-from-slow": Texts(
    "assemsabry/flash, saved by transformers 5",
    {
      "backend": "tokenizers",
      "bos_token": _LLAMA_3[0],
      "chat_template": _TEMPLATE,
      "eos_token": _LLAMA_3[1],
      "from_slow": True,
      "is_local": False,
      "legacy": False,
      "model_max_length": 131072,
      "pad_token": _LLAMA_3[2],
      "padding_side": "left",
      "tokenizer_class": "TokenizersBackend",
    },
    (*_LLAMA_3, *_TURNS),
    _LLAMA_3[0],
  ),
  "llama-3.1": Texts(
    "theprint/ReWiz-Llama-3.1-8B, saved by transformers 4",
    {
      "added_tokens_decoder": _added(*_LLAMA_3, *_TURNS),
      "bos_token": _LLAMA_3[0],
      "chat_template": _TEMPLATE,
      "clean_up_tokenization_spaces": True,
      "eos_token": _LLAMA_3[1],
      "model_input_names": ["input_ids", "attention_mask"],
      "model_max_length": 131072,
      "pad_token": _LLAMA_3[2],
      "padding_side": "left",
      "tokenizer_class": "PreTrainedTokenizerFast",
    },
    (*_LLAMA_3, *_TURNS),
    _LLAMA_3[0],
  ),
  "mistral": Texts(
    "tsavage68/Na_M2_1000steps_1e7_SFT, of Mistral 7B",
    _SENTENCE_PIECE
    | {
      "add_prefix_space": None,
      "added_tokens_decoder": _added("<unk>", "<s>", "</s>"),
      "additional_special_tokens": [],
      "bos_token": "<s>",
      "chat_template": _TEMPLATE,
      "eos_token": "</s>",
      "extra_special_tokens": {},
      "model_max_length": 1000000000000000019884624838656,
      "pad_token": "</s>",
      "tokenizer_class": "LlamaTokenizer",
      "unk_token": "<unk>",
    },
    ("<unk>", "<s>", "</s>"),
    "<s>",
  ),
  "gemma": Texts(
    "neuralweb/mental_health_counseling_gemma_7b_merged, of Gemma 7B",
    _SENTENCE_PIECE
    | {
      "added_tokens_decoder": _added("<pad>", "<eos>", "<bos>", "<unk>"),
      "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
      "bos_token": "<bos>",
      "chat_template": _TEMPLATE,
      "eos_token": "<eos>",
      "legacy": None,
      "model_max_length": 8192,
      "pad_token": "<pad>",
      "padding_side": "right",
      "tokenizer_class": "GemmaTokenizer",
      "unk_token": "<unk>",
    },
    ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "<bos>",
  ),
}
