"""Saves tiny models of other projects and records what they compute, in float64.

Part of `make test-peers`. A case is a model and its config; its parameters are those of `numbers`.
tests/pretrained/golden/CASE.npz keeps config.json as the project writes it, the names and shapes of
the tensors in its safetensors file, the hidden states, the logits, and those of its cached decoding
where that runs on a CPU.
"""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.peers.numbers import parameter

FOLDER = Path(__file__).parents[1] / "pretrained" / "golden"
# Row 0 continues row 1's beginning, and has its tokens in another order.
TOKENS = np.array([[1, 7, 3, 3, 10, 0, 5], [1, 7, 2, 9, 4, 8, 6]])

Decode = Callable[[Any, torch.Tensor], np.ndarray]


def cached_steps(model: Any, tokens: torch.Tensor) -> np.ndarray:
  """Logits [B, T, vocab] of one token at a time, by the model's own cache."""
  cache, logits, name = None, [], "cache_params" if _is_mamba(model) else "past_key_values"
  for t in range(tokens.shape[1]):
    positions = {"cache_params": {}, "past_key_values": {"position_ids": torch.tensor([[t]])}}[name]
    out = model(tokens[:, t : t + 1], use_cache=True, **{name: cache}, **positions)
    cache = out[name]
    logits.append(out.logits[:, -1])
  return torch.stack(logits, 1).detach().numpy()


def rwkv_steps(model: Any, tokens: torch.Tensor) -> np.ndarray:
  """As `cached_steps`, row by row: with more, the token shift of transformers 5.23 is wrong."""
  rows = []
  for row in tokens:
    state, logits = None, []
    for token in row:
      out = model(token[None, None], use_cache=True, state=state)
      state = out.state
      logits.append(out.logits[0, -1])
    rows.append(torch.stack(logits))
  return torch.stack(rows).detach().numpy()


def hidden_states(model: Any, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
  """(the input of each layer and of the head [L + 1, B, T, D], logits)."""
  inputs: list[torch.Tensor] = []
  seen = lambda _module, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"])
  # Of a model of text and images its text model.
  text = getattr(getattr(model, "model", model), "language_model", model)
  layers = next(m for m in text.modules() if isinstance(m, torch.nn.ModuleList))
  handles = [layer.register_forward_pre_hook(seen, with_kwargs=True) for layer in layers]
  handles.append(model.get_output_embeddings().register_forward_pre_hook(seen, with_kwargs=True))
  logits = model(tokens, use_cache=False).logits
  for handle in handles:
    handle.remove()
  states = torch.stack([x if x.dim() == 3 else x[None] for x in inputs])
  return states.detach().numpy(), logits.detach().numpy()


def with_published_tensors(case: str, model: Any) -> tuple[Any, str, dict[str, list[int]]]:
  """(the model with the parameters of `numbers`, its config.json, the tensors of its file)."""
  model = model.double().eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      value.copy_(torch.from_numpy(parameter(case, name, value.shape)))
    with tempfile.TemporaryDirectory() as folder:
      # Of Qwen3.5 several experts are one tensor, as in the model.
      original = model.config.model_type != "qwen3_5_moe"
      model.save_pretrained(folder, save_original_format=original and "qwen3_5_moe" not in case)
      config, saved = (Path(folder) / "config.json").read_text(), _shapes(folder)
      shapes = _as_published(saved)
      if (
        shapes.keys() - dict(model.named_parameters()).keys()
      ):  # it saves other tensors than it has
        arrays = {name: parameter(case, name, shape) for name, shape in shapes.items()}
        save_file(arrays, Path(folder) / "model.safetensors", {"format": "pt"})
        model = _opened(model, folder)
        if shapes == saved:
          model.save_pretrained(folder)
      with safe_open(Path(folder) / "model.safetensors", "np") as file:
        for name, shape in shapes.items():
          np.testing.assert_array_equal(file.get_tensor(name), parameter(case, name, shape))
  return model, config, shapes


def record(case: str, model: Any, decode: Decode | None) -> None:
  """Writes golden/CASE.npz."""
  model, config, shapes = with_published_tensors(case, model)
  with torch.no_grad():
    tokens = torch.from_numpy(TOKENS)
    hidden, logits = hidden_states(model, tokens)
    assert hidden.dtype == logits.dtype == np.float64, case
    arrays = {"tokens": TOKENS, "hidden": hidden, "logits": logits}
    if decode is not None:
      arrays["steps"] = decode(model, tokens)
      np.testing.assert_allclose(arrays["steps"], logits, atol=1e-9, err_msg=case)
  FOLDER.mkdir(exist_ok=True)
  text = lambda value: np.frombuffer(value.encode(), np.uint8)
  index = {"config": text(config), "shapes": text(json.dumps(shapes))}
  np.savez_compressed(FOLDER / f"{case}.npz", **index, **arrays)
  print(f"golden/{case}.npz", "with steps" if decode else "")


def _shapes(folder: str) -> dict[str, list[int]]:
  with safe_open(Path(folder) / "model.safetensors", "np") as file:
    return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _as_published(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
  """The tensors of a file as its authors publish it, which transformers 5.23 reads.

  It saves the norm after attention of Olmo-Hybrid by another name, and its convolution in three
  parts of equal size; the dense layers of Kimi Linear by the names of those with experts; W_o of
  KDA in Ling by the name of attention's.
  """
  published = {}
  for name, shape in shapes.items():
    layer, convolution, _ = name.partition("_conv1d.weight")
    if convolution and f"{layer}_proj.weight" in shapes:
      shape = [shapes[f"{layer}_proj.weight"][0], *shape[1:]]
    layer, norm, rest = name.partition("feedforward_layer_norm")
    if norm and f"{layer}self_attn.q_norm.weight" in shapes:
      name = f"{layer}post_attention_layernorm{rest}"
    name = re.sub(r"block_sparse_moe\.(\w+_proj\.)", r"mlp.\1", name)
    if name.replace("dense.weight", "A_log") in shapes:
      name = name.replace("dense.weight", "o_proj.weight")
    published[name] = shape
  return published


def _opened(model: Any, folder: str) -> Any:
  options = {"attn_implementation": "eager", "experts_implementation": "eager"}
  return type(model).from_pretrained(folder, dtype=torch.float64, **options).eval()


def _is_mamba(model: Any) -> bool:
  return "mamba" in model.config.model_type
