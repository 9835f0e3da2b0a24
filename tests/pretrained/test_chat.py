"""Chat templates: texts and replies as of transformers, and conversations as training data."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import lnssm_jax
from lnssm_jax import pretrained
from lnssm_jax.files.reading import DataError
from lnssm_jax.models.settings import params_of
from lnssm_jax.pretrained import exports, folders
from lnssm_jax.pretrained.chat import ChatTemplate, special_in
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.pretrained.manifest import ExportError
from lnssm_jax.pretrained.tokenizers import ByteTokenizer, FileTokenizer
from tests.pages import blocks_of
from tests.peers.chats import TALKS, TEMPLATES, TOKENS
from tests.pretrained.published import GOLDEN, recorded, write
from tests.pretrained.test_save_model import random_model
from train.cli.main import main
from train.config.checked import ConfigError
from train.config.schema import Data
from train.data import IndexedDataset, load_tokenizer
from train.data.tokenize import prepare, rows_of
from train.runs.run_folder import RunFolder

RECORDED = json.loads((GOLDEN / "chat.json").read_text())


def folder_with(path, template):
  """A tokenizer of bytes with special tokens, and a template."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  inner = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(alphabet)}, []))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "<end>"])
  path.mkdir(exist_ok=True)
  inner.save(str(path / "tokenizer.json"))
  settings = TOKENS | ({} if template is None else {"chat_template": template})
  (path / "tokenizer_config.json").write_text(json.dumps(settings))
  return path


@pytest.fixture
def chat(tmp_path):
  pytest.importorskip("jinja2", reason="the extra `chat` is not installed")
  return lambda template: ChatTemplate(load_tokenizer(str(folder_with(tmp_path, template))))


@pytest.mark.parametrize("normalizes", [False, True])
def test_special_token_in_any_form_is_found_in_a_message(tmp_path, normalizes):
  """With a quote, which JSON writes otherwise; in letters that a normalizer makes the token's."""
  path = folder_with(tmp_path, None) / "tokenizer.json"
  inner, given = tokenizers.Tokenizer.from_file(str(path)), tokenizers.AddedToken
  inner.normalizer = tokenizers.normalizers.Lowercase()
  inner.add_special_tokens(['<|"|>', given("<think>", normalized=normalizes)])
  inner.add_tokens(["<ordinary>"])
  inner.save(str(path))
  tokenizer = FileTokenizer(path, end_of_text="<end>")
  found = lambda value: special_in(tokenizer, {"role": "user", "content": value})
  assert found('a<|"|>') == found([{"text": {'<|"|>': 1}}]) == '<|"|>'
  assert found("<think>") == "<think>" and found('<ordinary> | " <END>') is None
  assert found("a <THINK>") == ("<think>" if normalizes else None)


@pytest.mark.parametrize("case", RECORDED)
def test_conversation_has_the_text_and_replies_of_transformers(case, chat):
  template, talk = case.split("/")
  want, tools = RECORDED[case], [{"name": "add"}] if talk == "calls" else None
  found = chat(TEMPLATES[template])
  ((text, places),) = found.turns(TALKS[talk], tools=tools)
  assert text == want["text"] and [list(x) for x in places] == want["places"]
  assert found.prompt(TALKS[talk][:1], tools) == want["prompt"]


def test_prompt_leaves_out_what_generation_puts_before_it(tmp_path, chat):
  folder = folder_with(tmp_path, TEMPLATES["brackets"])
  settings = json.loads((folder / "tokenizer_config.json").read_text())
  (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_bos_token": True}))
  tokenizer = load_tokenizer(str(folder))
  loaded = LoadedModel(None, {}, 0, folder, list, lambda: tokenizer)
  assert loaded.chat_prompt([{"role": "user", "content": "a"}]) == "[INST] a[/INST]"


def test_replies_of_weight_0_and_other_ends_are_followed(tmp_path, chat):
  talk = [x | {"weight": 0 if n == 1 else None} for n, x in enumerate(TALKS["turns"])]
  found = chat(TEMPLATES["plain"])
  ((text, places),), ((same, both),) = map(found.turns, (talk, TALKS["turns"]))
  assert (len(places), len(both)) == (1, 2) and text == same
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 259]}')
  other = ChatTemplate(load_tokenizer(str(tmp_path)))
  assert other.fingerprint != found.fingerprint
  text = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"
  (tmp_path / "chat_template.jinja").write_text(text)  # before that of tokenizer_config.json
  ((_, places),) = ChatTemplate(load_tokenizer(str(tmp_path))).turns(TALKS["turns"][:2])
  assert places == ((10, 19),)
  # A later message has the other end.
  ends = "{{ '<|im_end|>' if m.role == 'user' else '<end>' }}"
  (tmp_path / "chat_template.jinja").write_text(text.replace("<end>", ends))
  ((_, places),) = ChatTemplate(load_tokenizer(str(tmp_path))).turns(TALKS["turns"])
  assert places == ((15, 24), (41, 51))


# As of Qwen3.5: a reply begins after empty thoughts, which the template leaves out of earlier ones.
_START = "'<|im_start|>assistant\\n"
# Two that a variable has: with thoughts, or without them, as is the default.
OPEN = "' + ('<think>' if think else '') }}{% endif"
VARIABLE = (
  TEMPLATES["plain"]
  .replace("' }}{% endif", OPEN)
  .replace("{{- m.content + eos", "{{- ('<think>' if think else '') + m.content + eos")
)
CLOSED = TEMPLATES["thinking"].replace(_START, rf"{_START}<think>\n\n</think>\n\n")


def test_reply_ends_at_the_token_of_the_tokenizer_where_no_settings_say(tmp_path, chat):
  """As of Qwen3.5, whose config.json names the end of a document alone."""
  del chat  # for its package
  folder_with(tmp_path, TEMPLATES["plain"])
  config = {"eos_token_id": 259}  # <end>; replies end at <|im_end|>
  assert folders.sample(tmp_path, config) == {"stop_tokens": (259, 258)}
  assert folders.sample(tmp_path, {"eos_token_id": [258, 259]}) == {"stop_tokens": (258, 259)}
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": 259, "do_sample": true}')
  assert folders.sample(tmp_path, config)["stop_tokens"] == (259,)


def test_variables_of_a_row_are_those_of_its_template(tmp_path, chat):
  found, talk = chat(VARIABLE), TALKS["turns"]
  assert found.prompt(talk[:1], variables={"think": True}) == found.prompt(talk[:1]) + "<think>"
  rows = [{"messages": talk}, {"messages": talk, "chat_template_kwargs": {"think": True}}]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  source = {"chats": str(tmp_path / "rows.jsonl")}
  data = Data(
    folder=str(tmp_path),
    tokenizer=str(tmp_path),
    train=("chats",),
    sources=source,
    targets={"chats": "assistant"},
  )
  prepare(data)
  dataset, tokenizer = IndexedDataset(tmp_path / "chats"), load_tokenizer(str(tmp_path))
  plain, thinking = (dataset.sequence(number) for number in (0, 1))
  assert [tokenizer.decode(x).count("<think>") for x in (plain, thinking)] == [0, 2]
  # It is of the prompt, and so no target.
  count = len(plain)
  assert dataset.weights[:count].sum() == dataset.weights[count : count + len(thinking)].sum() == 11


def test_reply_that_the_template_rewrites_later_is_in_a_text_of_its_own(tmp_path, chat):
  talk, found = TALKS["turns"], chat(CLOSED)
  texts = found.turns(talk)
  replies = [[text[begin:end] for begin, end in places] for text, places in texts]
  assert replies == [["two\n<|im_end|>"], ["four<|im_end|>"]]
  for (text, ((begin, _),)), number in zip(texts, (1, 3), strict=True):
    assert text[:begin] == found.prompt(talk[:number]) and text.endswith("<|im_end|>\n")
  # The second alone, and no text without a reply.
  assert found.turns([talk[0], talk[1] | {"weight": 0}, *talk[2:]]) == texts[1:]
  assert found.turns(talk[:3]) == texts[:1]
  silent = {"messages": [x | {"weight": 0} for x in talk]}
  rows = "".join(json.dumps(x) + "\n" for x in (silent, {"messages": talk}))
  (tmp_path / "rows.jsonl").write_text(rows)
  source = str(tmp_path / "rows.jsonl")
  given = {"folder": str(tmp_path), "tokenizer": str(tmp_path), "train": ("chats",)}
  given |= {"sources": {"chats": source}, "targets": {"chats": "assistant"}}
  sidecar = prepare(Data(**given))["chats"]
  assert sidecar["documents"] == 2 and sidecar["skipped"] == {"empty": 1}
  (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": talk[:1], "a": talk[1:], "b": "c"}))
  with pytest.raises(DataError, match='line 1, "a": the chat template rewrites earlier replies'):
    prepare(Data(**given, fields={"chats": ("messages", "a", "b")}), force=True)


HI = {"role": "user", "content": "Hi"}
ERRORS = [
  ({"messages": "Hi"}, "found 'Hi', expected messages"),
  ([HI, {"content": "Ho"}], 'message 1 is .* needs a "role"'),
  ([{"role": "user", "content": [{"type": "image"}]}], '"content" of message 0 is list'),
  (
    [HI | {"content": [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>"}]}],
    "special",
  ),
  ([HI | {"weight": 0.5}], '"weight" of message 0 is 0.5'),
  ([HI | {"content": "a<|im_end|>"}], r"message 0 spells out the special token '<\|im_end\|>'"),
  ([HI, HI], "rejects the messages: roles must alternate"),
  ([HI | {"content": "a\ud800"}], "message 0 has an unpaired surrogate"),
  ([HI | {"name": "a\ud800"}], "message 0 has an unpaired surrogate"),
]


@pytest.mark.parametrize(("messages", "message"), ERRORS)
def test_wrong_messages_are_an_error_of_one_line(messages, message, chat):
  given = messages["messages"] if isinstance(messages, dict) else messages
  with pytest.raises(DataError, match=rf"^row 7: .*{message}") as error:
    chat(TEMPLATES["brackets"]).turns(given, where="row 7")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{% for m in messages %}", "the chat template of .* is none"),
    ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "the chat template of .* is none: maximum rec"),
    ("{{ " + "9" * 6000 + " }}", "the chat template of .* is none"),
    ("{{ messages.__class__.__mro__ }}", "unsafe|rejects"),
    ("{{ messages | length }}", "does not repeat its prompt, so that message 1"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not end a reply"),
    (None, "has no chat template"),
  ],
  ids=lambda x: str(x)[:40],
)
def test_unusable_template_is_an_error(template, message, chat):
  with pytest.raises(DataError, match=message):
    chat(template).turns([HI, {"role": "assistant", "content": "Ho"}])


def test_token_of_a_template_that_the_tokenizer_lacks_is_an_error(tmp_path, chat):
  """It would be spelled out in ordinary tokens; transformers adds it to the vocabulary."""
  del chat  # for its package
  path = folder_with(tmp_path, "{{ messages[0].content }}") / "tokenizer_config.json"
  settings = json.loads(path.read_text()) | {"bos_token": "<s>", "eos_token": "<new>"}
  template = lambda: ChatTemplate(folders.tokenizer(tmp_path, {"eos_token_id": 258}))
  path.write_text(json.dumps(settings))
  template()  # which writes no EOS
  path.write_text(json.dumps(settings | {"chat_template": "{{ eos_token }}"}))
  with pytest.raises(DataError, match="eos_token='<new>', which the chat template may write, is"):
    template()


def test_end_that_the_tokenizer_lacks_is_an_error(tmp_path, chat):
  del chat  # for its package
  path = folder_with(tmp_path, "{{ messages[0].content }}") / "tokenizer_config.json"
  template = lambda: ChatTemplate(folders.tokenizer(tmp_path, {"eos_token_id": 7777}))
  settings = {x: v for x, v in json.loads(path.read_text()).items() if x != "eos_token"}
  path.write_text(json.dumps(settings | {"eos_token": "<end>"}))
  template()  # which that file names
  path.write_text(json.dumps(settings))
  with pytest.raises(DataError, match="eos_token_id=7777 is not in tokenizer"):
    template()
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["<end>"]}')
  with pytest.raises(ExportError, match=r"eos_token_id=\['<end>'\] is no token"):
    template()


def test_saved_model_keeps_the_template_of_its_tokenizer(tmp_path, chat, monkeypatch):
  del chat  # for its package
  model, there = random_model(mixer="lrn", num_layers=1, vocab_size=261), tmp_path / "there"
  tokenizer = load_tokenizer(str(folder_with(there, TEMPLATES["brackets"])))
  lnssm_jax.save_model(tmp_path / "out", model, there)
  found = lnssm_jax.load_model(tmp_path / "out")
  assert found.tokenizer.fingerprint == tokenizer.fingerprint
  assert found.chat_prompt([HI]) == ChatTemplate(tokenizer).prompt([HI])
  (tmp_path / "out" / "chat_template.jinja").write_text("another")
  with pytest.raises(ExportError, match="the chat template, or a file of its tokens, has changed"):
    lnssm_jax.load_model(tmp_path / "out").tokenizer  # noqa: B018
  monkeypatch.chdir(there)  # of which an object of the package knows nothing
  inner = tokenizers.Tokenizer.from_file("tokenizer.json")
  inner.add_special_tokens(["</s>"])
  lnssm_jax.save_model(tmp_path / "alone", model, inner)
  assert sorted(x.name for x in (tmp_path / "alone").iterdir()) == [
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
  ]


def test_tokenizer_of_bytes_has_no_template():
  with pytest.raises(DataError, match="'bytes' has no chat template"):
    ChatTemplate(ByteTokenizer())


def test_rows_of_messages_become_weighted_tokens(tmp_path, chat):
  chat(TEMPLATES["thinking"])
  silent = {"messages": TALKS["turns"][:1]}
  rows = [{"messages": TALKS["turns"]}, silent]
  rows += [{"messages": TALKS["calls"], "tools": [{"name": "add"}]}]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  given = {"folder": str(tmp_path / "data"), "tokenizer": str(tmp_path), "train": ("chats",)}
  given |= {"sources": {"chats": str(tmp_path / "rows.jsonl")}, "targets": {"chats": "assistant"}}
  data = Data(**given)
  sidecar = prepare(data)["chats"]
  assert sidecar["documents"] == 2 and sidecar["skipped"] == {"empty": 1}
  assert data.has_rows("chats") and rows_of(data, "chats").fields == ("messages",)
  tokenizer, dataset = load_tokenizer(str(tmp_path)), IndexedDataset(tmp_path / "data" / "chats")
  first = 0
  for number, case in enumerate(("thinking/turns", "thinking/calls")):
    ids, want = dataset.sequence(number), RECORDED[case]
    np.testing.assert_array_equal(ids, tokenizer.encode(want["text"], "parse"))
    weights = dataset.weights[first : first + len(ids)]
    first += len(ids)
    replies = [want["text"][begin:end] for begin, end in want["places"]]
    kept = [tokenizer._inner.id_to_token(i) for i in ids[weights == 1]]
    assert kept.count("<|im_end|>") == len(replies)
    chosen = np.concatenate([tokenizer.encode(reply, "parse") for reply in replies])
    np.testing.assert_array_equal(ids[weights == 1], chosen)
  # Another template: tokenized again.
  (tmp_path / "chat_template.jinja").write_text(TEMPLATES["plain"])
  with pytest.raises(DataError, match=r"line 3: the chat template of .* rejects the messages"):
    prepare(data)
  wrong = (
    ({"text": "a"}, "found the keys .'text'., expected an object with the key \"messages\"."),
    ({"messages": [HI]}, 'no text: .* A reply that counts has the role "assistant"'),
    ({"messages": TALKS["turns"], "tools": "add"}, '"tools" is str, expected a list'),
    (
      {"messages": TALKS["turns"], "tools": ["<end>"]},
      "tools spells out the special token '<end>'",
    ),
    (
      {"messages": TALKS["turns"], "chat_template_kwargs": {"tools": 1}},
      "kwargs=.*'tools': 1.* must",
    ),
  )
  for row, message in wrong:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
      prepare(data, force=True)
  with pytest.raises(ConfigError, match="'assistant' needs one key"):
    Data(**given, fields={"chats": ("a", "b")})


def test_rows_of_two_answers_to_messages_become_two_documents_of_one_target_each(tmp_path, chat):
  chat(TEMPLATES["plain"])
  given = {"folder": str(tmp_path / "data"), "tokenizer": str(tmp_path), "train": ("chats",)}
  given |= {"sources": {"chats": str(tmp_path / "rows.jsonl")}, "targets": {"chats": "assistant"}}
  data = Data(**given, fields={"chats": ("messages", "chosen", "rejected")})
  write = lambda row: (tmp_path / "rows.jsonl").write_text(json.dumps(row))
  row = {"messages": TALKS["turns"][:3], "rejected": "no"}  # its second message is a reply, too
  assert [x["role"] for x in row["messages"]] == ["user", "assistant", "user"]
  row["chosen"] = [{"role": "assistant", "content": "yes"}]
  write(row)
  assert prepare(data)["chats"]["documents"] == 2 and data.has_pairs
  template = ChatTemplate(load_tokenizer(str(tmp_path)))
  dataset = IndexedDataset(tmp_path / "data" / "chats")
  tokenizer, first = load_tokenizer(str(tmp_path)), 0
  for number, answer in enumerate(("yes", "no")):
    ids = dataset.sequence(number)
    talk = [*row["messages"], {"role": "assistant", "content": answer}]
    np.testing.assert_array_equal(ids, tokenizer.encode(template.turns(talk)[0].text, "parse"))
    weights = dataset.weights[first : first + len(ids)]
    first += len(ids)
    reply = tokenizer.encode(f"{answer}<|im_end|>", "parse")
    np.testing.assert_array_equal(ids[weights == 1], reply)
  for change, message in (
    ({"chosen": 1}, 'line 1, "chosen": expected a text or messages, after a list in "messages"'),
    ({"messages": "Hi"}, 'line 1, "chosen": expected a text or messages, after a list'),
    ({"rejected": ""}, 'line 1, "rejected" is empty, but a pair has two answers; remove the row'),
    ({"rejected": [HI]}, 'line 1, "rejected": there is no reply that counts'),
    ({"rejected": [{"role": "assistant"}]}, 'line 1, "rejected": "content" of message 3 is None'),
    ({"rejected": "<|im_end|>"}, r'line 1, "rejected": message 3 spells out the special token'),
  ):
    write(row | change)
    with pytest.raises(DataError, match=message) as error:
      prepare(data, force=True)
    assert "\n" not in str(error.value)
  write({"messages": [HI], "chosen": "a"})
  with pytest.raises(DataError, match='expected an object with the key "rejected"'):
    prepare(data, force=True)


PAGE = (Path(__file__).parents[2] / "docs" / "fine_tuning.md").read_text()
SMALL = ["seq_len=192", "global_batch=2", "steps=30", "eval_every=30", "checkpoint_every=30"]
SMALL += ["compile_cache=None", "model.dtype=float32", "optimizer.lora_rank=2", "log_every=30"]
SMALL += ["optimizer.peak_lr=3e-2"]


def of_qwen(folder, **sizes):
  """A tiny random Qwen3.5 of bytes, with other sizes in its config.json."""
  folder_with(folder, TEMPLATES["thinking"])
  tensors = recorded("qwen3_5").tensors
  wide = {name: np.resize(x, (260, 8)) for name, x in tensors.items() if x.shape == (11, 8)}
  config = dict(recorded("qwen3_5").config)
  config["text_config"] = config["text_config"] | {"vocab_size": 260}
  config["text_config"] |= {"max_position_embeddings": 8192, "eos_token_id": 258} | sizes
  write(folder, "qwen3_5", dtype=np.float32, config=config, tensors=wide)


def of_qwen_0_8b(folder):
  """The same with the sizes of Qwen3.5-0.8B in its config.json, and other tensors."""
  sizes = {"vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584}
  sizes |= {"num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2}
  sizes |= {"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16}
  sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
  sizes |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6}
  sizes |= {"max_position_embeddings": 262_144, "tie_word_embeddings": True}
  of_qwen(folder, **sizes)
  config = folder / "config.json"
  config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))


@pytest.mark.slow
def test_program_and_commands_of_the_fine_tuning_page_run(tmp_path, monkeypatch, capsys, chat):
  monkeypatch.chdir(tmp_path)
  of_qwen(tmp_path / "Qwen3.5-0.8B")
  *blocks, config, last, write_pairs, of_pairs = blocks_of(PAGE)
  program = {}
  for block in blocks:
    exec(compile(block, "docs/fine_tuning.md", "exec"), program)
  Path("chat.py").write_text(config)
  Path("pairs.py").write_text(of_pairs)
  commands, of_preferences = re.findall(r"((?:^    lnssm-train .*\n)+)", PAGE, re.MULTILINE)
  small = [word for setting in SMALL for word in ("--set", setting)]

  def run(commands):
    for line in commands.splitlines():
      words = line.split()[1:]
      assert main([*words, *(small if "--config" in words else [])]) == 0, capsys.readouterr().err

  run(commands)
  output = capsys.readouterr()
  assert "exportable  by --layout hf (qwen3_5_text)\nadapter     by" in output.err + output.out
  exec(compile(last, "docs/fine_tuning.md", "exec"), program)
  assert program["after"] != program["before"]
  tuned, merged = (exports.flat(params_of(program[name].model)) for name in ("tuned", "merged"))
  base = exports.flat(params_of(program["loaded"].model))
  for name, x in tuned.items():
    np.testing.assert_allclose(x, merged[name], rtol=1e-4, atol=1e-5, err_msg=name)
  changed = {name for name, x in tuned.items() if np.abs(x - base[name]).max() > 1e-3}
  assert len(changed) > 10 and all(name.endswith("kernel") for name in changed)
  exec(compile(write_pairs, "docs/fine_tuning.md", "exec"), program)
  run(of_preferences)
  row = next(row for row in RunFolder("runs/pairs").read_rows() if row["kind"] == "train")
  assert row["step"] == 30 and row["reward_accuracy"] == 1 and row["loss"] < 0.5
  assert pretrained.load("preferred", max_length=64).model is not None


@pytest.mark.slow
def test_dry_run_of_the_page_has_the_sizes_of_qwen3_5_0_8b(tmp_path, monkeypatch, capsys, chat):
  monkeypatch.chdir(tmp_path)
  of_qwen_0_8b(tmp_path / "Qwen3.5-0.8B")
  Path("chat.py").write_text(blocks_of(PAGE)[-4])
  Path("chats.jsonl").write_text(json.dumps({"messages": TALKS["turns"]}))
  small = ["--set", "seq_len=512", "--set", "global_batch=1", "--set", "compile_cache=None"]
  assert main(["fit", "--config", "chat.py", "--dry-run", *small]) == 0
  output = capsys.readouterr()
  assert "752,393,024 parameters" in output.out + output.err
