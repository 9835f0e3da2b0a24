"""flash-linear-attention's models of the sizes of `benchmarks.model_step`, in their own processes.

    python -m benchmarks.model_peers gla [compile]
    python -m benchmarks.model_peers gla generate BATCH PROMPT NEW [tune]

Run it twice where nothing is tuned yet: the first run tunes for minutes, the second one times.
`generation` does: with `tune`, a process reads the prompts and draws two tokens, which are the
shapes of the second process. fla's kernels (`FLA_CACHE_RESULTS=1`, its default) keep their timings
in files `*.autotune.json` of triton's cache, `TRITON_CACHE_DIR` or ~/.triton/cache, and a process
that is ended after `LONGEST` seconds has kept those of the kernels that it finished. On another
machine of the same GPU, triton and fla these files alone, without the compiled kernels, save the
tuning. Nothing else may run on the GPU meanwhile: triton would choose other configurations.
torch and fla are imported in that process only.
"""

import importlib.util
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import turns

_SIZES = {
  "hidden_size": 1024,
  "num_hidden_layers": 24,
  "vocab_size": 32_000,
  "intermediate_size": 2816,
  "fuse_cross_entropy": True,
}
ROWS, LENGTH = 16, 2048
LONGEST = 400  # seconds of a process, the first of which tune
# fla's name of the model, and what its configuration needs beyond the common sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  "gla": ("GLA", {"num_heads": 4}),
  "delta_net": ("DeltaNet", {"num_heads": 8}),
  "retnet": ("RetNet", {"num_heads": 8, "expand_k": 1, "expand_v": 1}),
  "gated_delta_net": ("GatedDeltaNet", {"num_heads": 6, "head_dim": 128}),
  # Its channel mixer is RWKV's, of a width that gives it as many parameters as a SwiGLU of 2,816.
  "rwkv6": ("RWKV6", {"num_heads": 16, "expand_k": 1.0, "intermediate_size": 3712}),
}


def missing() -> str | None:
  """Why there is nothing to measure, or None. Imports nothing."""
  absent = [x for x in ("torch", "transformers", "fla") if not importlib.util.find_spec(x)]
  return f"{' and '.join(absent)} not installed" if absent else None


def measure(body: str) -> Iterator[dict[str, Any]]:
  """The rows of fla's model, eager and compiled; a row with a note where it cannot be measured."""
  if body not in MODELS:
    return
  if reason := missing():
    yield {"who": "fla", "note": reason}
    return
  for mode in ((), ("compile",)):
    yield _in_own_process(body, *mode)


def generation(
  body: str, batches: Sequence[int], prompt: int, new: int, *, tune: bool = True
) -> Iterator[dict[str, Any]]:
  """The rows of fla's `generate` with its cache, as `measure`.

  Args:
    tune: whether another process tunes each first; its row has its seconds.
  """
  if body not in MODELS:
    return
  if reason := missing():
    yield {"who": "fla", "note": reason}
    return
  for batch in batches:
    mode = ("generate", str(batch), str(prompt), str(new))
    if tune:
      yield {"batch": batch} | _in_own_process(body, *mode, "tune") | {"who": "fla tune"}
    yield {"batch": batch} | _in_own_process(body, *mode)


def _in_own_process(body: str, *mode: str) -> dict[str, Any]:
  command = [sys.executable, "-m", "benchmarks.model_peers", body, *mode]
  return {"who": " ".join(("fla", *mode[:1]))} | turns.alone(command, LONGEST)


def _model(body: str):
  """fla's model on the GPU, in float32."""
  import fla.models
  import torch

  warnings.filterwarnings("ignore")
  name, options = MODELS[body]
  torch.manual_seed(0)
  config = getattr(fla.models, f"{name}Config")(**_SIZES | options)
  return getattr(fla.models, f"{name}ForCausalLM")(config).cuda()


def generate(body: str, batch: int, prompt: int, new: int, *mode: str) -> dict[str, Any]:
  """Milliseconds of the prompt with one token after it, and of each of `new` tokens more.

  All parameters are bfloat16; medians of three after one. With the mode "tune", the seconds of the
  prompt with two tokens after it.
  """
  import torch

  begin = time.time()
  model = _model(body).to(torch.bfloat16).eval()
  tokens = torch.randint(0, _SIZES["vocab_size"], (batch, prompt), device="cuda")

  def milliseconds(count: int, runs: int = 4) -> list[float]:
    times = []
    for _ in range(runs):
      torch.cuda.synchronize()
      start = time.perf_counter()
      with torch.no_grad():
        out = model.generate(
          tokens,
          attention_mask=torch.ones_like(tokens),
          max_new_tokens=count,
          min_new_tokens=count,
          do_sample=False,
          use_cache=True,
          pad_token_id=0,
        )
      torch.cuda.synchronize()
      times.append(1e3 * (time.perf_counter() - start))
      if out.shape[1] != prompt + count:
        raise RuntimeError(f"asked for {count} tokens, got {out.shape[1] - prompt}.")
    return times

  if "tune" in mode:
    milliseconds(2, runs=1)
    return {"tune_s": round(time.time() - begin, 1)}
  median = lambda count: statistics.median(milliseconds(count)[1:])
  first = median(1)
  return {
    "who": "fla",
    "batch": batch,
    "prompt": prompt,
    "prefill_ms": round(first, 2),
    "decode_ms": round((median(1 + new) - first) / new, 4),
  }


def run(body: str, compiled: bool) -> dict[str, Any]:
  """The columns of one model in this process: autocast to bfloat16, fused AdamW, clipping.

  Raises:
    FloatingPointError: a loss is not finite.
  """
  import torch

  begin = time.time()
  model = _model(body).train()
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-4, fused=True, weight_decay=0.01, betas=(0.9, 0.95)
  )
  tokens = torch.randint(0, _SIZES["vocab_size"], (ROWS, LENGTH), device="cuda")
  forward = torch.compile(model) if compiled else model

  def step():
    with torch.autocast("cuda", torch.bfloat16):
      loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss

  losses = [float(step())]
  first = time.time() - begin
  losses += [float(step()) for _ in range(3)]
  seconds = []
  for _ in range(3):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
      loss = step()
    torch.cuda.synchronize()
    seconds.append((time.perf_counter() - start) / 20)
  losses.append(float(loss))
  if not all(abs(x) < float("inf") for x in losses):
    raise FloatingPointError(f"losses {losses}: a wrong result has no time.")
  median = statistics.median(seconds)
  return {
    "who": "fla + torch.compile" if compiled else "fla",
    "parameters": sum(p.numel() for p in model.parameters()),
    "step_ms": round(1e3 * median, 2),
    "tokens_per_second": round(ROWS * LENGTH / median),
    "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    "cold_s": round(first, 1),
  }


if __name__ == "__main__":
  if sys.argv[2:3] == ["generate"]:
    body, _, *sizes = sys.argv[1:6]
    print(json.dumps(generate(body, *map(int, sizes), *sys.argv[6:])))
  else:
    print(json.dumps(run(sys.argv[1], "compile" in sys.argv[2:])))
