"""Losses of a trained model before it is converted, just after, and after some more training.

    python -m experiments.conversion
    python -m experiments.conversion --only sse --steps 1000 --more 200

Trains a small Transformer, and a small GLA, on bytes of Python's standard library, and continues
them with other mixers by `models.replace_mixers` and `mixers.expand_partitions`. Each line has the
bits per byte of validation text before the conversion, just after it, and after --more steps of
training; "source" is the model that was not converted after as many more steps, "new" a model of
the target's kind that was trained --more steps from its start. Partitions of the SSE that the GLA
becomes are then doubled, with k and without.
"""

import argparse
import functools
import json
import math
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lnssm_jax.mixers import expand_partitions
from lnssm_jax.models import LanguageModel, aux_loss, replace_mixers
from lnssm_jax.models.settings import graph_of, params_of

SIZES = {
  "vocab_size": 256,
  "dim": 64,
  "num_layers": 4,
  "num_heads": 4,
  "channel_mixer": "swiglu",
  "norm": "rms",
  "embedding_norm": False,
  "dtype": "float32",
  "param_dtype": "float32",
}
OPTIONS = {
  "softmax_attention": {"max_length": 256},
  "gla": {"expand_k": 1.0},
  "gated_delta_net": {"expand_v": 1.0, "head_dim": 16},
  "kda": {},
  "sse": {"num_partitions": 4, "num_selected": 1, "output_gate": "full", "lora_rank": 16},
}
# {name: (mixer of the source, pattern of the target)}
CONVERSIONS = {
  "gla": ("softmax_attention", ("gla", "softmax_attention")),
  "gated_delta_net": ("softmax_attention", ("gated_delta_net", "softmax_attention")),
  "kda": ("softmax_attention", ("kda", "softmax_attention")),
  "sse": ("softmax_attention", ("sse", "softmax_attention")),
  "gla_to_sse": ("gla", ("sse",)),
}


def settings(pattern: tuple[str, ...]) -> dict:
  """The settings of a model with these mixers."""
  options = {name: OPTIONS[name] for name in pattern}
  alone = len(pattern) == 1
  return SIZES | {
    "mixer": pattern[0] if alone else pattern,
    "mixer_options": options[pattern[0]] if alone else options,
  }


def build(config: dict, seed: int) -> LanguageModel:
  """A newly initialized model."""
  arguments = {name: x for name, x in config.items() if not name.endswith("dtype")}
  return jax.jit(lambda: LanguageModel(**arguments, rngs=nnx.Rngs(seed)))()


def text() -> tuple[np.ndarray, np.ndarray]:
  """Bytes of the standard library: (for training, for validation)."""
  files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
  parts = [b"".join(path.read_bytes() for path in some) for some in (files[::10], files[1::10])]
  first, rest = (np.frombuffer(part, np.uint8) for part in parts)
  return rest, first


class Trainer:
  """Trains and evaluates models of one kind."""

  def __init__(self, config: dict, data, *, length: int, batch: int):
    self.data, self.shape = data, (batch, length + 1)
    self.graph = graph_of(config)
    self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3))
    self._step, self._nats = jax.jit(self._step_of), jax.jit(self._nats_of)

  def _nats_of(self, params, tokens):
    logits, _, aux = nnx.merge(self.graph, params).with_aux(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), aux_loss(aux)

  def _step_of(self, params, state, tokens):
    gradient = jax.grad(lambda p: sum(self._nats_of(p, tokens)))(params)
    updates, state = self.optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  def _rows(self, part, seed):
    text, (B, T) = self.data[part], self.shape
    begin = np.random.default_rng(seed).integers(0, len(text) - T, B)
    return jnp.asarray(text[begin[:, None] + np.arange(T)], jnp.int32)

  def train(self, params, steps: int, first: int):
    """Parameters after steps, on the batches that are numbered from `first`."""
    state = self.optimizer.init(params)
    for step in range(first, first + steps):
      params, state = self._step(params, state, self._rows(0, step))
    return params

  def bits(self, params) -> float:
    """Bits per byte of validation text."""
    nats = [self._nats(params, self._rows(1, seed))[0] for seed in range(8)]
    return float(np.mean(nats)) / math.log(2)


def measure(only, steps: int, more: int, **sizes):
  """Yields a row for each conversion."""
  data = text()

  @functools.cache
  def source(mixer):
    config = settings((mixer,))
    trainer = Trainer(config, data, **sizes)
    params = trainer.train(params_of(build(config, 0)), steps, 0)
    after = trainer.bits(trainer.train(params, more, steps))
    return config, params, trainer.bits(params), after

  for name in only:
    mixer, pattern = CONVERSIONS[name]
    config, params, before, unconverted = source(mixer)
    target = settings(pattern)
    new = build(target, 1)
    trainer = Trainer(target, data, **sizes)
    old = nnx.merge(graph_of(config), params)
    converted = params_of(replace_mixers(old, new)[0])
    row = {"conversion": name, "before": before, "just_after": trainer.bits(converted)}
    trained = trainer.train(converted, more, steps)
    row |= {"after": trainer.bits(trained), "source": unconverted}
    yield row | {"new": trainer.bits(trainer.train(params_of(new), more, steps))}
    if pattern == ("sse",):
      unconverted = trainer.bits(trainer.train(trained, more, steps + more))
      for k in (2, 1):
        expanded, options = expand_partitions(
          trained, target["mixer_options"], num_partitions=8, num_selected=k
        )
        wider = Trainer(target | {"mixer_options": options}, data, **sizes)
        just_after = wider.bits(expanded)
        yield {
          "conversion": f"SSE (4, 1) to (8, {k})",
          "before": row["after"],
          "just_after": just_after,
          "after": wider.bits(wider.train(expanded, more, steps + more)),
          "source": unconverted,
        }


def main(arguments=None) -> None:
  """Prints a line of JSON per conversion."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=CONVERSIONS, default=list(CONVERSIONS))
  parser.add_argument("--steps", type=int, default=500)
  parser.add_argument("--more", type=int, default=100)
  parser.add_argument("--length", type=int, default=128)
  parser.add_argument("--batch", type=int, default=16)
  args = parser.parse_args(arguments)
  sizes = {"length": args.length, "batch": args.batch}
  for row in measure(args.only, args.steps, args.more, **sizes):
    rounded = {name: round(x, 4) if isinstance(x, float) else x for name, x in row.items()}
    print(json.dumps(rounded), flush=True)


if __name__ == "__main__":
  main()
