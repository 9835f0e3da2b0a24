"""The adapter of `lm_eval` on a fake of its interface, `task lm-eval`, and `lnssm_jax.score`."""

import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import lnssm_jax
from lnssm_jax.pretrained import LoadedModel, harness, lm_eval_model, texts
from lnssm_jax.pretrained.tokenizers import ByteTokenizer
from tests.pages import blocks_of
from tests.train.test_export import random_params
from train import config
from train.step.model import model_graph
from train.tasks import harness as task

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


def log_probs(loaded, text):
  """Float64 log-probability of each byte but the first, and whether it is the likeliest."""
  tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
  logits = np.asarray(loaded.model(tokens[None, :-1])[0][0], np.float64)
  logits -= np.log(np.exp(logits - logits.max()).sum(-1, keepdims=True)) + logits.max()
  return logits[np.arange(len(tokens) - 1), tokens[1:]], logits.argmax(-1) == tokens[1:]


def test_log_likelihoods_are_those_of_the_text_after_its_context(loaded, package):
  """White space between them counts as text; an empty context is a line feed."""
  model = lm_eval_model(loaded, batch=2)
  assert isinstance(model, package["lm_eval.api.model"].LM)
  greedy = loaded.generate("Who?", max_tokens=2, temperature=0)
  pairs = [("Who?", " me"), ("Who? ", "you"), ("", "they"), ("Who?", greedy)]
  found = model.loglikelihood(requests(*pairs))
  for (context, text), (total, is_greedy) in zip(pairs, found, strict=True):
    kept = context.rstrip() or "\n"
    expected, likeliest = log_probs(loaded, kept + context[len(kept) :] + text)
    assert total == pytest.approx(expected[len(kept) - 1 :].sum(), abs=1e-3)
    assert is_greedy == likeliest[len(kept) - 1 :].all() == (text == greedy)
  assert model.loglikelihood([]) == []


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
  (code,) = blocks_of((Path(__file__).parents[2] / "docs" / "tasks.md").read_text(), "py")
  exec(compile(code, "docs/tasks.md", "exec"), {})
  ((model, tasks),) = evaluated
  assert isinstance(model, harness.Answers) and tasks == ["my_task"]


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
