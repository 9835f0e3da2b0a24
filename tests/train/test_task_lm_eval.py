"""The adapter of `lm_eval` on a fake of its interface, `task lm-eval`, and `lnssm_jax.score`."""

import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import lnssm_jax
from lnssm_jax.generate import SamplingOptions
from lnssm_jax.pretrained import LoadedModel, harness, lm_eval_model, texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from tests.byte_model import log_probs
from tests.pages import blocks_of
from tests.train.test_export import random_params
from train import config
from train.scoring import harness as task
from train.step.model import model_graph

SIZES = {"dim": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 257, "dtype": "float32"}


def make(mixer, **options):
  model = config.Model(mixer=mixer, mixer_options=options, **SIZES)
  params = random_params(model)
  params["head"]["kernel"][:, 128:] = 0  # so the likeliest token is ASCII
  merged = nnx.merge(model_graph(model), jax.device_put(params))
  return LoadedModel(merged, {"model": SIZES}, 7, Path("m"), list, ByteTokenizer)


@pytest.fixture(scope="module")
def loaded():
  return make("lrn")


@pytest.fixture
def package(monkeypatch):
  """A package `lm_eval` with an empty class LM."""
  names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")
  modules = {name: types.ModuleType(name) for name in names}
  modules["lm_eval.api.model"].LM = type("LM", (), {})
  for name, module in modules.items():
    monkeypatch.setitem(sys.modules, name, module)
  return modules


def requests(*arguments):
  return [types.SimpleNamespace(args=each) for each in arguments]


def test_log_likelihoods_are_those_of_the_text_after_its_context(loaded, package):
  """White space between them counts as text; an empty context is a line feed."""
  model = lm_eval_model(loaded, batch=2)
  assert isinstance(model, package["lm_eval.api.model"].LM)
  greedy = loaded.generate("Who?", max_tokens=2, temperature=0)
  other = "b" if greedy[1] == "a" else "a"
  pairs = [("Who?", " me"), ("Who? ", "you"), ("", "they"), ("Who?", greedy)]
  pairs += [("Who?", greedy[0] + other), ("Who?", other + greedy[1])]
  found = model.loglikelihood(requests(*pairs))
  for (context, text), (total, is_greedy) in zip(pairs, found, strict=True):
    kept = context.rstrip() or "\n"
    expected, likeliest = log_probs(loaded, kept + context[len(kept) :] + text)
    assert total == pytest.approx(expected[len(kept) - 1 :].sum(), abs=1e-3)
    assert is_greedy == likeliest[len(kept) - 1 :].all() == (text == greedy)
  assert model.loglikelihood([]) == []


@pytest.mark.slow
def test_rolling_log_likelihood_is_that_of_the_whole_text(loaded, package):
  model, documents = lm_eval_model(loaded, batch=2), ["one document", "x", ""]
  found = model.loglikelihood_rolling(requests(*((text,) for text in documents)))
  expected = [log_probs(loaded, f"\n{text}")[0].sum() if text else 0 for text in documents]
  np.testing.assert_allclose(found, expected, atol=1e-3)


def test_windows_of_a_cache_score_each_token_once(package):
  """10 tokens after the opening, at most 4 of which are read at once."""
  loaded = make("softmax_attention", max_length=4)
  model = lm_eval_model(loaded)
  (found,) = model.loglikelihood_rolling(requests(("0123456789",)))
  windows = [("\n0123", 4), ("34567", 4), ("56789", 2)]
  expected = sum(log_probs(loaded, text)[0][-count:].sum() for text, count in windows)
  assert found == pytest.approx(expected, abs=1e-3)
  ((total, _),) = model.loglikelihood(requests(("long context", "yes")))
  assert total == pytest.approx(log_probs(loaded, "xtyes")[0][-3:].sum(), abs=1e-3)
  with pytest.raises(ValueError, match=r"max_length=4"):
    model.loglikelihood(requests(("a", "too long")))
  options = {"until": [], "max_gen_toks": 3}
  answers = model.generate_until(requests(("long context", options), ("xt", options)))
  assert answers[0] == answers[1] and len(answers[0]) == 3


def test_generation_ends_at_the_strings_of_each_request(loaded, package):
  model = lm_eval_model(loaded, batch=2)
  whole = [loaded.generate(p, max_tokens=6, temperature=0) for p in ("longer", "ab", "c")]
  stop = whole[2][2:4]
  long = {"until": [], "max_gen_toks": 6, "do_sample": False, "temperature": 0.7}
  asked = [("longer", long), ("c", {"until": stop, "max_gen_toks": 6}), ("ab", long)]
  answers = model.generate_until(requests(*asked, ("c", {"max_gen_toks": 2, "temperature": 0})))
  assert answers == [whole[0], whole[2].split(stop)[0], whole[1], whole[2][:2]]
  drawn = {"do_sample": True, "temperature": 9.0, "max_gen_toks": 6}
  assert model.generate_until(requests(("ab", drawn))) != [whole[1]]


def test_answers_are_in_the_order_of_the_requests(loaded, package):
  """Of any lengths and options, in batches."""
  model = lm_eval_model(loaded, batch=2)
  contexts = ["abcd", "xyz", "ab", "qrs"]
  asked = [(text, {"max_gen_toks": 3 + number % 2}) for number, text in enumerate(contexts)]
  wanted = [
    loaded.generate(text, max_tokens=how["max_gen_toks"], temperature=0) for text, how in asked
  ]
  assert model.generate_until(requests(*asked)) == wanted
  pairs = [(text, " x" * (1 + number % 2)) for number, text in enumerate(contexts)]
  scores = [loaded.score(text, context=context).total for context, text in pairs]
  found = [total for total, _ in model.loglikelihood(requests(*pairs))]
  np.testing.assert_allclose(found, scores, atol=1e-3)
  assert len(set(np.round(found, 3))) == len(pairs)


def test_options_of_a_request_are_used(loaded, package):
  model = lm_eval_model(loaded)
  text = lambda **how: model.generate_until(requests(("ab", {"max_gen_toks": 12} | how)))[0]
  options = {"max_tokens": 12, "stop_token": 256}
  for how in (
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 1.7, "do_sample": True, "min_p": 0.2, "temperature": 1.5},
    {"do_sample": True, "top_k": 3, "top_p": 0.9},
  ):
    given = {name: value for name, value in how.items() if name != "do_sample"}
    given["temperature"] = given.get("temperature", 1.0) if "do_sample" in how else 0.0
    wanted = texts.complete(
      loaded.model, loaded.tokenizer, ["ab"], SamplingOptions(**options, **given)
    )
    assert [text(**how)] == wanted
  assert text(repetition_penalty=1.7) != text()
  hot = {"temperature": 9.0}  # draws, unless do_sample is false
  assert text(**hot) == text(**hot, do_sample=True) != text()
  neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "top_k": 0, "length_penalty": None}
  assert text(**neutral, until=["", ""]) == text(until=None) == text() != ""
  assert text(max_new_tokens=3) == text()  # as in lm_eval, the first of the names counts


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"num_beams": np.ones(2)}, r"num_beams=array.* of a request is not implemented; leave it out"),
    ({"num_beams": 2}, r"num_beams=2 of a request is not implemented; leave it out, or give 1"),
    ({"no_repeat_ngram_size": 3}, r"no_repeat_ngram_size=3 of a request is not implemented"),
    ({"bad_words_ids": [[1]]}, r"bad_words_ids=\[\[1\]\] of a request is not implemented"),
    ({"beam": 1}, r"the option 'beam' of a request is not known; use max_gen_toks"),
    ({"until": [5]}, r"until has 5 of type int; give a list of strings"),
    ({"until": {"a"}}, r"until=\{'a'\} of a request must be a string or a list"),
    ({"until": 5}, r"until=5 of a request must be a string or a list"),
    ({"temperature": "warm"}, r"temperature='warm' of a request must be a number"),
    ({"max_gen_toks": 2.5}, r"max_gen_toks=2.5 of a request must be a whole number"),
    ({"do_sample": "no"}, r"do_sample='no' of a request must be true or false"),
    ({"do_sample": True, "temperature": 0}, r"temperature=0 of a request with do_sample=True"),
    ({"temperature": -1}, r"temperature=-1 must be 0 \(greedy\) or in"),
    ({"min_p": 2.0}, r"min_p=2.0 must be in 0 to 1"),
    (None, r"options=None of a request must be a dictionary"),
  ],
  ids=str,
)
def test_options_that_cannot_be_followed_raise(loaded, package, options, message):
  """Also next to a request that could be answered."""
  model = lm_eval_model(loaded)
  with pytest.raises(ValueError, match=message) as raised:
    model.generate_until(requests(("a", {}), ("a", options)))
  assert "\n" not in str(raised.value)


def test_texts_that_cannot_be_scored_raise(loaded, package):
  """An empty one would win every choice by its log-likelihood of 0."""
  model = lm_eval_model(loaded)
  for pair in (("context", ""), ("", "")):
    with pytest.raises(ValueError, match=r"^a request has an empty text after context="):
      model.loglikelihood(requests(("a", "b"), pair))
  for pair in ((None, "a"), ("a", 5)):
    with pytest.raises(ValueError, match=r"^the \w+ of a request is .* of type \w+; give a str"):
      model.loglikelihood(requests(pair))
  with pytest.raises(ValueError, match=r"^the text of a request is None of type NoneType"):
    model.loglikelihood_rolling(requests((None,)))
  with pytest.raises(ValueError, match=r"^the context of a request is None of type NoneType"):
    model.generate_until(requests((None, {})))
  for ask, args in ((model.loglikelihood, ("a",)), (model.generate_until, ("a",))):
    with pytest.raises(ValueError, match=r"^args=\['a'\] of a request must be its context and "):
      ask(requests(args))


def test_missing_package_is_named(loaded, monkeypatch):
  monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
  with pytest.raises(ValueError, match=r"^the adapter needs the package lm_eval: pip install"):
    lm_eval_model(loaded)


def test_task_has_a_row_per_metric(loaded, package, monkeypatch):
  def simple_evaluate(model, **options):
    assert isinstance(model, harness.Answers)
    assert (options["tasks"], options["limit"], options["num_fewshot"]) == (["mine"], 3, 2)
    metrics = {"alias": "mine", "acc,none": 0.5, "acc_stderr,none": 0.1, "ppl,first": 2.0}
    return {"results": {"mine": metrics | {"ppl_stderr,first": "N/A"}}}

  def manager(include_path):
    return types.SimpleNamespace(all_tasks=["mine"] if include_path == "folder" else [])

  package["lm_eval"].simple_evaluate = simple_evaluate
  package["lm_eval.tasks"].TaskManager = manager
  monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
  report = task.run(loaded, ["mine"], include="folder", limit=3, fewshot=2)
  assert report.tables["metrics"] == [
    {"task": "mine", "metric": "acc", "filter": "none", "value": 0.5, "stderr": 0.1},
    {"task": "mine", "metric": "ppl", "filter": "first", "value": 2.0, "stderr": None},
  ]
  with pytest.raises(ValueError, match=r"tasks=\['mine'\] are not known to lm_eval"):
    task.run(loaded, ["mine"])


def test_program_of_the_page_runs(loaded, package, monkeypatch):
  evaluated = []
  package["lm_eval"].simple_evaluate = lambda model, tasks: evaluated.append((model, tasks))
  monkeypatch.setattr(lnssm_jax, "load_model", {"exported": loaded}.__getitem__)
  (code,) = blocks_of((Path(__file__).parents[2] / "docs" / "scoring.md").read_text(), "py")
  exec(compile(code, "docs/scoring.md", "exec"), {})
  ((model, tasks),) = evaluated
  assert isinstance(model, harness.Answers) and tasks == ["my_task"]


@pytest.mark.slow
def test_score_takes_one_text_or_several(loaded):
  one = lnssm_jax.score(loaded, "a text", context="before")
  many = lnssm_jax.score(loaded, ["a text", "other"], context="before")
  np.testing.assert_allclose(many[0].log_probs, one.log_probs, atol=1e-5)
  np.testing.assert_allclose(one.log_probs, log_probs(loaded, "beforea text")[0][5:], atol=2e-5)
  each = lnssm_jax.score(loaded, ["other", "x"], context=["before", "y"])
  assert each[0].total == pytest.approx(many[1].total, abs=1e-4)
  assert lnssm_jax.score(loaded, []) == []
  with pytest.raises(ValueError, match=r"context has 1 texts for the 2 of text"):
    lnssm_jax.score(loaded, ["a", "b"], context=["c"])
  assert texts.OPENING == "\n"
