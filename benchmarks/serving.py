"""Tokens per second of `lnssm-train serve` next to `generate` with the same batch.

    python -m benchmarks.serving
    python -m benchmarks.serving --slots 64 --clients 64 96 128
    python -m benchmarks.serving --sizes dim=64,num_layers=2,vocab_size=300 --slots 8 --clients 8 12

A model of `benchmarks.model_step` with random parameters, and clients each of which sends prompts
of about `--prompt` tokens, one after another over one connection. With as many clients as slots a
slot is empty from the end of a text until its client has asked again; with more of them texts wait.
The server is a process of its own, asked over the loopback.

First four layers of it in float32, with exact products: the clients get the texts that `generate`
draws for all prompts at once with the same seeds, but for one of 32 at most, where two tokens are
as likely as each other, or there is no time (`--no-check` leaves this out). Then all in bfloat16:
from the first request to the last answer, and `generate` with as many prompts as slots at once;
both read them. Medians of three after two that compile. Prints a line of JSON for each number of
clients.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lnssm_jax
from benchmarks.model_step import BODIES, Sizes, settings
from lnssm_jax.pretrained import texts
from train.step.model import build_model

HOW = {"temperature": 1.0, "top_p": 1.0}
_COMPILING, _TIMED = 2, 3  # passes
_BEGIN = time.monotonic()
_COMPARED_LAYERS, _COMPARED_TOKENS = 4, 32


def main(arguments=None) -> list[dict[str, Any]]:
  """Prints and returns a row for each number of clients."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--body", choices=list(BODIES), default="gla")
  parser.add_argument("--sizes", default="", metavar="dim=64,num_layers=2")
  parser.add_argument("--slots", type=int, default=64, help="also the batch of generate")
  parser.add_argument("--clients", type=int, nargs="+", default=[64])
  parser.add_argument("--rounds", type=int, default=4, help="requests of each client, in turn")
  parser.add_argument("--prompt", type=int, default=256, help="tokens, at most a quarter fewer")
  parser.add_argument("--new", type=int, default=256, help="tokens per request")
  parser.add_argument("--no-check", action="store_true", help="compare no texts")
  args = parser.parse_args(arguments)
  cfg = settings(BODIES[args.body], Sizes.parse(args.sizes) if args.sizes else None).model
  row: dict[str, Any] = {"body": args.body, "device": jax.devices()[0].device_kind}
  row |= {name: getattr(args, name) for name in ("slots", "rounds", "prompt", "new")}
  batch = lambda number: _prompts(cfg, args, number, args.slots)
  if not args.no_check:
    row["equal"] = _equal(cfg, args, batch(0))
    _say(f"{row['equal']} of {args.slots} texts are those of generate")
  rows = []
  with _saved(cfg, "bfloat16") as loaded, _server(loaded.source, args) as port:
    asks = _ask_all(port, batch(1), args.new)
    passes = range(_COMPILING + _TIMED)
    _generated(loaded, batch(1), args.new)
    _say("generate is compiled")
    for ask in asks:
      ask.result()
    _say("the server is compiled")
    rates = [_rate(lambda n=n: _generated(loaded, batch(n), args.new)) for n in passes]
    row["generate"] = round(statistics.median(rates[_COMPILING:]))
    _say(f"generate: {rates}")
    for clients in args.clients:
      numbers = [range(10 + args.rounds * n, 10 + args.rounds * (n + 1)) for n in passes]
      asked = [[_prompts(cfg, args, number, clients) for number in each] for each in numbers]
      rates = [_rate(lambda each=each: _rounds(port, each, args.new)) for each in asked]
      serve = round(statistics.median(rates[_COMPILING:]))
      more = {"clients": clients, "serve": serve, "passes": [round(x) for x in rates]}
      rows.append(row | more | {"ratio": round(serve / row["generate"], 3)})
      print(json.dumps(rows[-1]), flush=True)
  return rows


def _equal(cfg, args, prompts: list[str]) -> int:
  """How many texts of a server are those of `generate`, of a model of few layers."""
  few = dataclasses.replace(cfg, num_layers=min(_COMPARED_LAYERS, cfg.num_layers))
  new = min(_COMPARED_TOKENS, args.new)
  with (
    jax.default_matmul_precision("highest"),
    _saved(few, "float32") as loaded,
    _server(loaded.source, args, JAX_DEFAULT_MATMUL_PRECISION="highest") as port,
  ):
    asks = _ask_all(port, prompts, new)
    want, _ = _generated(loaded, prompts, new)  # compiles next to the server
    got = [ask.result()[0] for ask in asks]
  equal = sum(a == b for a, b in zip(got, want, strict=True))
  if equal < args.slots - args.slots // 32:
    raise SystemExit(f"{equal} of {args.slots} texts are those of generate: no time.")
  return equal


def _say(line: str) -> None:
  print(f"{time.monotonic() - _BEGIN:.0f} s: {line}", file=sys.stderr, flush=True)


def _rate(run) -> float:
  """Tokens per second; `run` returns their number last."""
  begin = time.perf_counter()
  *_, tokens = run()
  return tokens / (time.perf_counter() - begin)


def _prompts(cfg, args, number: int, count: int) -> list[str]:
  """Texts of other words for each number, whose tokens they are."""
  rng = np.random.default_rng(number)
  lengths = rng.integers(3 * args.prompt // 4 + 1, args.prompt + 1, count)
  return [" ".join(f"w{i}" for i in rng.integers(1, cfg.vocab_size, n)) for n in lengths]


@contextlib.contextmanager
def _saved(cfg, dtype: str) -> Iterator[Any]:
  """A random model as a user loads it, from a folder with a tokenizer of one token per word."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  words = {"<|endoftext|>": 0} | {f"w{n}": n for n in range(1, cfg.vocab_size)}
  tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens(["<|endoftext|>"])
  cfg = dataclasses.replace(cfg, dtype=dtype, param_dtype=dtype)
  with tempfile.TemporaryDirectory() as folder:
    path = f"{folder}/model"
    lnssm_jax.save_model(path, build_model(cfg, jax.random.key(0)), tokenizer)
    yield lnssm_jax.load_model(path)


@contextlib.contextmanager
def _server(folder: Path, args, **environment: str) -> Iterator[int]:
  """The port of a server process."""
  command = [sys.executable, "-m", "train", "serve", str(folder), "--port", "0"]
  command += ["--slots", str(args.slots), "--queue", str(max(args.slots, *args.clients))]
  env = os.environ | environment
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
    try:
      line = process.stdout.readline()  # pyrefly: ignore
      yield int(line.partition("/v1")[0].rpartition(":")[2])
    finally:
      process.terminate()


def _generated(loaded, prompts: list[str], new: int) -> tuple[list[str], int]:
  """Texts of one batch, row n with seed n, and the number of their tokens."""
  options = loaded.options(max_tokens=new, seed=0, **HOW)
  options = dataclasses.replace(options, seed=tuple(range(len(prompts))))
  found = texts.complete(loaded.model, loaded.tokenizer, prompts, options)
  return found, sum(len(text.split()) for text in found)


def _ask_all(port: int, prompts: list[str], new: int) -> list[Future[list[str]]]:
  """The answers of as many clients at once, client n with seed n."""
  pool = ThreadPoolExecutor(len(prompts))
  asks = [pool.submit(_ask, port, [prompt], n, new) for n, prompt in enumerate(prompts)]
  pool.shutdown(wait=False)
  return asks


def _rounds(port: int, rounds: list[list[str]], new: int) -> tuple[int]:
  """The number of tokens that clients get who ask once in each round, each by itself."""

  def client(n: int) -> int:
    return sum(len(text.split()) for text in _ask(port, [prompts[n] for prompts in rounds], n, new))

  with ThreadPoolExecutor(len(rounds[0])) as pool:
    return (sum(pool.map(client, range(len(rounds[0])))),)


def _ask(port: int, prompts: list[str], seed: int, new: int) -> list[str]:
  """The texts that a client gets for one prompt after another."""
  texts = []
  with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
    for prompt in prompts:
      body = {"prompt": prompt, "seed": seed, "max_tokens": new, **HOW}
      connection.request("POST", "/v1/completions", json.dumps(body))
      texts.append(json.load(connection.getresponse())["choices"][0]["text"])
  return texts


if __name__ == "__main__":
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share the GPU
  main()
