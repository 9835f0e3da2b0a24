"""A model from a folder, with its settings, metrics and tokenizer; the scores of texts by it."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from flax import nnx

from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.models import LanguageModel, count_parameters
from lnssm_jax.pretrained import chat, texts
from lnssm_jax.pretrained.special_tokens import InText
from lnssm_jax.pretrained.texts import Score
from lnssm_jax.pretrained.tokenizers import Tokenizer
from lnssm_jax.sampling import SamplingOptions

# Sampling of a model that comes without such settings of a run.
_SAMPLE = {"tokens": 200, "temperature": 0.8, "top_k": None, "top_p": 0.95}


def sample_of(options: SamplingOptions) -> dict[str, Any]:
  """The settings "sample" of a model whose `LoadedModel.options` are these."""
  names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
  own = {name: getattr(options, name) for name in names}
  stops = [int(token) for token in options.stop_tokens]
  return {"tokens": options.max_tokens, **own, "stop_tokens": stops}


@overload
def score(
  model: "LoadedModel",
  text: str,
  *,
  context: str | Sequence[str] = "",
  batch: int = 8,
  special_tokens: InText = "parse",
) -> Score: ...
@overload
def score(
  model: "LoadedModel",
  text: Sequence[str],
  *,
  context: str | Sequence[str] = "",
  batch: int = 8,
  special_tokens: InText = "parse",
) -> list[Score]: ...
def score(
  model: "LoadedModel",
  text: str | Sequence[str],
  *,
  context: str | Sequence[str] = "",
  batch: int = 8,
  special_tokens: InText = "parse",
) -> Score | list[Score]:
  """Log-probabilities of the tokens of a text, or of each of several, `batch` at once.

      lnssm_jax.score(lnssm_jax.load_model("exported"), "def f(x): return x").perplexity

  Context and text are encoded as one text, as the tokenizer's own files encode it: also with the
  tokens that they put around a text, of which those after it are scored. A token that has
  characters of both is scored.

  Args:
    context: text before it, read but not scored; one for all texts, or one for each. Without it the
      first token of a text is its context, unless the tokenizer puts one before every text.
    special_tokens: as in `LoadedModel.generate`, for context and text.

  Raises:
    ValueError: there is no token to score, the logits are NaN, contexts and texts are no texts or
      differ in number, the model has no tokenizer with it or a cache too small for the tokens, or
      `batch` is no positive number.
  """
  if not isinstance(model, LoadedModel):
    raise ValueError(
      f"model is of the class {type(model).__name__}; give a LoadedModel, which load_model returns:"
      " it has the tokenizer."
    )
  check_positive("batch", batch)
  several, contexts = texts_of("text", text), texts_of("context", context)
  if isinstance(context, str):
    contexts *= len(several)
  if len(contexts) != len(several):
    raise ValueError(
      f"context has {len(contexts)} texts for the {len(several)} of text; give one, or as many."
    )
  pairs = list(zip(contexts, several, strict=True))
  how: Any = {"batch": batch, "special_tokens": special_tokens}
  found = texts.scores(model.model, model.tokenizer, pairs, **how) if pairs else []
  return found[0] if isinstance(text, str) else found


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LoadedModel:
  """A trained model with what is known about it. It prints itself briefly.

  Attributes:
    model: the model with its parameters, on one device.
    settings: "model" has the arguments of the model; the rest is that of its run, such as
      "optimizer", "steps" and "sample", where known.
    step: number of training steps.
    source: the folder it was loaded from.
  """

  model: LanguageModel
  settings: Mapping[str, Any]
  step: int
  source: Path
  _metrics: Callable[[], list[dict[str, Any]]] = dataclasses.field(repr=False)
  _tokenizer: Callable[[], Tokenizer] = dataclasses.field(repr=False)

  @functools.cached_property
  def metrics(self) -> list[dict[str, Any]]:
    """Rows of the run's metrics.jsonl up to `step`; of an export, the last of each kind and set."""
    return self._metrics()

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    """Its tokenizer, loaded when first used because a model is useful without one.

    Raises:
      DataError: it is missing (a run's is stored in `data.folder`) or unusable, or the package
        `tokenizers` is not installed.
      ExportError: it is not the one that the model was trained with.
    """
    return self._tokenizer()

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    """Tokens before any of which a generated text ends: the end of text, and its settings'."""
    own = self.settings.get("sample", {}).get("stop_tokens", ())
    return tuple(dict.fromkeys((self.tokenizer.end_of_text, *own)))

  def options(
    self,
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
  ) -> SamplingOptions:
    """The model's own options of sampling, up to the end of text, with those given in their place.

    Args:
      max_tokens, temperature, top_k, top_p, min_p, repetition_penalty: as in `SamplingOptions`;
        None takes `settings["sample"]`, or 200 tokens, 0.8, all, 0.95, all and 1.

    Raises:
      ValueError: an option is out of range.
    """
    given = {
      "tokens": max_tokens,
      "temperature": temperature,
      "top_k": top_k,
      "top_p": top_p,
      "min_p": min_p,
      "repetition_penalty": repetition_penalty,
    }
    given = {name: value for name, value in given.items() if value is not None}
    own = dict(self.settings.get("sample", {}))
    if own.get("tokens") == 0:  # a run that prints no text while it trains
      del own["tokens"]
    sample: dict[str, Any] = {**_SAMPLE, **own, **given}
    return SamplingOptions(
      max_tokens=sample["tokens"],
      temperature=sample["temperature"],
      top_k=sample["top_k"],
      top_p=sample["top_p"],
      min_p=sample.get("min_p"),
      repetition_penalty=sample.get("repetition_penalty", 1.0),
      seed=seed,
      stop_token=self.stop_tokens,
    )

  @overload
  def generate(
    self,
    prompt: str = "",
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    until: Sequence[str] = (),
    special_tokens: InText = "parse",
    batch: int = 16,
  ) -> str: ...
  @overload
  def generate(
    self,
    prompt: Sequence[str],
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    until: Sequence[str] = (),
    special_tokens: InText = "parse",
    batch: int = 16,
  ) -> list[str]: ...
  def generate(
    self,
    prompt: str | Sequence[str] = "",
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    until: Sequence[str] = (),
    special_tokens: InText = "parse",
    batch: int = 16,
  ) -> str | list[str]:
    """Continues a prompt, or each of several, up to the end of text; returns the new text only.

    A prompt is encoded as the tokenizer's own files encode it, also with the tokens, such as BOS,
    that they put around a text. Of several, those of similar lengths are continued at once; the
    random numbers of each are those of its place in the list.

    Args:
      max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed: as in `options`.
      until: the new text ends before the string of these that is complete first.
      special_tokens: a special token spelled out in the prompt, such as "<|im_start|>", is one
        token ("parse"), or ordinary text ("text"): for a prompt with text from others.
      batch: how many prompts are continued at once.

    Raises:
      ValueError: an option is out of range, a prompt is no text, or the model's cache cannot hold
        the tokens.
    """
    options = self.options(
      max_tokens=max_tokens,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      min_p=min_p,
      repetition_penalty=repetition_penalty,
      seed=seed,
    )
    how: Any = {"batch": batch, "until": until, "special_tokens": special_tokens}
    several = texts_of("prompt", prompt)
    found = list(texts.complete_each(self.model, self.tokenizer, several, options, **how))
    return found[0] if isinstance(prompt, str) else found

  @functools.cached_property
  def chat_template(self) -> chat.ChatTemplate:
    """The folder's own chat template, compiled when first used.

    Raises:
      DataError: there is none, it is no template, or the package `jinja2` is not installed.
    """
    return chat.ChatTemplate(self.tokenizer)

  def chat_prompt(
    self, messages: Sequence[Mapping[str, Any]], tools: Any = None, variables: Any = None
  ) -> str:
    """The prompt of a conversation, by the folder's own chat template.

        loaded.generate(loaded.chat_prompt([{"role": "user", "content": "Hi"}]))

    Args:
      messages: each with "role" and "content"; the last is usually of the user.
      tools: descriptions of functions, for templates that have a place for them.
      variables: further ones of the template by name, such as `{"enable_thinking": False}`.

    Raises:
      DataError: there is no template, it rejects the messages, or the package `jinja2` is not
        installed.
    """
    return self.chat_template.prompt(messages, tools, variables)

  def stream(
    self,
    prompt: str = "",
    options: SamplingOptions | None = None,
    *,
    until: Sequence[str] = (),
    special_tokens: InText = "parse",
  ) -> Iterator[str]:
    """Yields the text of `generate` in pieces.

    Args:
      options: None takes the model's own, `options()`.
      until: as in `generate`; what may be the beginning of one of the strings is held back.
      special_tokens: as in `generate`.

    Raises:
      ValueError: the model's cache cannot hold the tokens.
    """
    options = self.options() if options is None else options
    return texts.stream(
      self.model, self.tokenizer, prompt, options, until=until, special_tokens=special_tokens
    )

  score = score  # the function above, of this model

  def __repr__(self) -> str:
    model, count = self.settings["model"], count_parameters(nnx.state(self.model, nnx.Param))
    state = count_parameters(jax.eval_shape(lambda: self.model.init_state(1)))
    mixer = model["mixer"] if isinstance(model["mixer"], str) else ", ".join(model["mixer"])
    limit = self.model.max_length
    return "\n".join(
      [
        f"LoadedModel of {self.source}, step {self.step:,}",
        f"  model  {mixer}: {model['num_layers']} layers, dim {model['dim']}, vocabulary "
        f"{model['vocab_size']:,}; {count:,} parameters, {model['param_dtype']}",
        f"  state  {state:,} numbers per sequence"
        + ("" if limit is None else f", of at most {limit:,} tokens"),
        "  use    .model .settings .metrics .tokenizer .generate(text) .score(text)",
      ]
    )


def texts_of(name: str, given: str | Iterable[str]) -> list[str]:
  """The texts of an argument that is one text or several."""
  one = isinstance(given, str | bytes) or not np.iterable(given)
  several: list[Any] = [given] if one else list(given)
  for text in several:
    if not isinstance(text, str):
      raise ValueError(
        f"{name} has {text!r:.50} of type {type(text).__name__}, which is no text; give a str, or a"
        " list of them."
      )
  return several
