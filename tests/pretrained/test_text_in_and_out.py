"""Text of models whose tokenizer puts BOS before it and the space into the first word."""

import dataclasses
import sys
import types

import numpy as np
import pytest
from flax import nnx

import lnssm_jax
from lnssm_jax.generate import SamplingOptions, generate
from lnssm_jax.models import LanguageModel
from lnssm_jax.pretrained import LoadedModel, lm_eval_model, texts
from lnssm_jax.pretrained.harness import Answers
from lnssm_jax.pretrained.tokenizers import FileTokenizer, encode_whole
from tests.mixers.helpers import drawn
from tests.pretrained.test_tokenizer_files import write

VOCABULARY = 405
PROMPTS = ["The capital of", " word", "", "caf\u00e9 x", "<|im_start|>user\n"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """A model of random parameters with a Llama's tokenizer."""
  path = write(tmp_path_factory.mktemp("llama") / "a", "metaspace_bos")
  model = drawn(
    lambda: LanguageModel(
      vocab_size=VOCABULARY, dim=16, num_layers=1, mixer="lrn", rngs=nnx.Rngs(0)
    )
  )
  settings = {"model": {"vocab_size": VOCABULARY}}
  tokenizer = FileTokenizer(path)
  return LoadedModel(model, settings, 0, path, list, lambda: tokenizer)


def log_probs(loaded, tokens):
  """Float64 log-probability of each token but the first."""
  padded = np.zeros((1, 64), np.int32)
  padded[0, : len(tokens)] = tokens
  logits = np.asarray(loaded.model(padded)[0][0], np.float64)[: len(tokens) - 1]
  logits -= np.log(np.exp(logits - logits.max()).sum(-1, keepdims=True)) + logits.max()
  return logits[np.arange(len(tokens) - 1), tokens[1:]]


def test_prompt_is_encoded_as_its_files_do(loaded, monkeypatch):
  """With BOS once, and special tokens as one token, unless they are ordinary text."""
  seen, stream = [], texts.generate.stream
  monkeypatch.setattr(
    texts.generate, "stream", lambda _, rows, *a, **k: seen.extend(rows) or stream(_, rows, *a)
  )
  for prompt in PROMPTS:
    loaded.generate(prompt, max_tokens=1)
    list(loaded.stream(prompt, loaded.options(max_tokens=1)))
    assert seen == [encode_whole(loaded.tokenizer, prompt).tolist()] * 2
    assert seen[0][0] == 1 and 1 not in seen[0][1:]
    seen.clear()
  loaded.generate(PROMPTS[-1], max_tokens=1, special_tokens="text")
  list(loaded.stream(PROMPTS[-1], loaded.options(max_tokens=1), special_tokens="text"))
  plain = [1, *loaded.tokenizer.encode(PROMPTS[-1])]
  assert seen == [plain, plain] and len(plain) > len(encode_whole(loaded.tokenizer, PROMPTS[-1]))


@pytest.mark.parametrize(
  ("case", "wanted"), [("metaspace_bos_eos", "<s>"), ("unigram_eos", texts.OPENING)]
)
def test_empty_prompt_is_not_ended_by_what_follows_a_text(tmp_path, case, wanted):
  """Without a token before every text it is a line feed."""
  tokenizer = FileTokenizer(write(tmp_path / "a", case))
  assert tokenizer.added.after
  found = texts.encode_prompt(tokenizer, "").tolist()
  assert found == tokenizer.encode(wanted, "parse").tolist()[-len(found) :]
  assert len(found) >= 1 and tokenizer.added.after[0] not in found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_continuation_has_the_space_before_its_first_word(loaded, seed):
  options = loaded.options(max_tokens=40, temperature=1.0, top_p=1.0, seed=seed)
  rows = [encode_whole(loaded.tokenizer, prompt).tolist() for prompt in PROMPTS]
  new = generate(loaded.model, rows, options)
  decode = loaded.tokenizer.decode
  found = texts.complete(loaded.model, loaded.tokenizer, PROMPTS, options)
  for text, row, tokens in zip(found, rows, new, strict=True):
    before, whole = decode(row[1:]), decode([*row[1:], *tokens])
    assert whole == before + text
  # Of a stream, in any pieces, and up to a string that is somewhere in it.
  alone = texts.complete(loaded.model, loaded.tokenizer, PROMPTS[:1], options)[0]
  for until in ((), (alone[7:9],), (alone[:1],)):
    wanted = alone[: alone.find(until[0])] if until else alone
    how = {"until": until}
    assert "".join(loaded.stream(PROMPTS[0], options, **how)) == wanted
    assert texts.complete(loaded.model, loaded.tokenizer, PROMPTS[:1], options, **how) == [wanted]


def test_string_with_its_space_ends_a_text(loaded, monkeypatch):
  tokens = loaded.tokenizer.encode("of France is Paris").tolist()
  monkeypatch.setattr(texts.generate, "stream", lambda *_, **k: (np.array([t]) for t in tokens))
  options = SamplingOptions(max_tokens=50)
  for until, wanted in [((" Pa",), " of France is"), ((), " of France is Paris")]:
    how = {"until": until}
    found = texts.complete(None, loaded.tokenizer, ["The capital"], options, **how)
    assert found == [wanted]
    pieces = texts.stream(None, loaded.tokenizer, "The capital", options, **how)
    assert "".join(pieces) == wanted
  assert texts.complete(None, loaded.tokenizer, [""], options) == ["of France is Paris"]


@pytest.mark.parametrize(
  ("context", "text"),
  [("The capital", " of France"), ("P", "aris is"), ("", "Paris"), ("The ", "river")],
)
def test_scored_tokens_are_those_of_the_whole_text(loaded, context, text):
  whole = encode_whole(loaded.tokenizer, context + text)
  score = lnssm_jax.score(loaded, text, context=context)
  count = len(score.tokens)
  assert score.tokens.tolist() == whole[-count:].tolist()
  assert loaded.tokenizer.decode(whole[1:]) == context + text
  before = loaded.tokenizer.decode(whole[1:-count])
  assert context.startswith(before)  # the rest is in a token that is scored
  assert (before == context) == (context not in ("P", "The "))
  np.testing.assert_allclose(score.log_probs, log_probs(loaded, whole)[-count:], atol=2e-5)


def test_requests_of_lm_eval_read_bos_once_and_every_character(loaded, monkeypatch):
  api = types.ModuleType("lm_eval.api.model")
  api.LM = type("LM", (), {})
  monkeypatch.setitem(sys.modules, "lm_eval.api.model", api)
  model = lm_eval_model(loaded)
  requests = lambda *arguments: [types.SimpleNamespace(args=each) for each in arguments]
  encode = lambda text: encode_whole(loaded.tokenizer, text)
  read = lambda tokens, count: log_probs(loaded, tokens)[-count:].sum()
  pairs = [
    ("The capital", " of"),
    ("P", "aris is"),
    ("", "Paris"),
    ("<s>The", " sea"),
    ("", "<s>a"),
  ]
  counts = [1, 3, len(encode("Paris")) - 1, 1, len(encode("a")) - 1]
  found = model.loglikelihood(requests(*pairs))
  for (context, text), count, (total, _) in zip(pairs, counts, found, strict=True):
    whole = encode((context + text).removeprefix("<s>"))
    if (context + text).startswith("<s>"):  # no space is put before what follows a special token
      whole = loaded.tokenizer.encode(context + text, "parse")
      count = len(whole) - len(loaded.tokenizer.encode(context or "<s>", "parse"))
    assert total == pytest.approx(read(whole, count), abs=1e-3)
  rolling = model.loglikelihood_rolling(requests(("Paris is",), ("",)))
  whole = encode("Paris is")
  assert rolling == pytest.approx([read(whole, len(whole) - 1), 0], abs=1e-3)
  other = [0, *whole[1:]]  # a token that is not BOS, whose number is no reason to ignore it
  rolling = lm_eval_model(loaded, prefix_token=0).loglikelihood_rolling(requests(("Paris is",)))
  assert rolling == pytest.approx([read(np.array(other), len(whole) - 1)], abs=1e-3)
  answers = model.generate_until(requests(("The capital", {"max_gen_toks": 3}), ("", {})))
  greedy = {"max_tokens": 3, "temperature": 0}
  assert answers[0] == loaded.generate("The capital", **greedy)
  assert answers[1].startswith(loaded.generate("", **greedy))


def test_what_files_put_after_a_text_is_scored_with_it(loaded, tmp_path):
  tokenizer = FileTokenizer(write(tmp_path / "a", "metaspace_bos_eos"))
  answers = Answers()
  answers.bind(dataclasses.replace(loaded, _tokenizer=lambda: tokenizer), 1)
  context, text = answers._pair("The capital", " of")
  assert [*context, *text] == encode_whole(tokenizer, "The capital of").tolist()
  assert len(text) == 2 and text[-1:].tolist() == list(tokenizer.added.after)


def test_parameters_that_are_nan_are_named(loaded):
  broken = nnx.clone(loaded.model)
  broken.embedding[...] = broken.embedding[...].at[290:].set(np.nan)
  found = dataclasses.replace(loaded, model=broken)
  with pytest.raises(ValueError, match=r"^the logits of prompt 0, new token 0, are NaN"):
    found.generate(" word", max_tokens=3)
  with pytest.raises(ValueError, match=r"^the logits of text 1, token \d, are NaN: parameters of"):
    lnssm_jax.score(found, ["\x03", "Paris"], context=["\x01", ""])


def test_growth_by_several_replacements_is_their_product(tmp_path):
  replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
  for name, steps in (("normalizer", "normalizers"), ("decoder", "decoders")):
    path = write(
      tmp_path / name, "byte_level", **{name: {"type": "Sequence", steps: [replace, replace]}}
    )
    with pytest.raises(ValueError, match=rf"its {name} can make a text 400 times longer"):
      FileTokenizer(path)
