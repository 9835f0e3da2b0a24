"""Runs the layers of other projects in float64 and writes what ours are compared with.

    make test-peers

It has an environment of its own (requirements.txt), without jax. A case is a layer with parameters
from `numbers`; its file keeps the parameters' names and shapes, the outputs and all gradients.
"""

from collections.abc import Callable

import numpy as np
import torch

# Their casts to float32 must not round: before anything of theirs is imported.
torch.set_default_dtype(torch.float64)
torch.float32 = torch.float = torch.float64
torch.complex64 = torch.cfloat = torch.complex128
torch.Tensor.float = torch.Tensor.double

import transformers.utils  # noqa: E402

# The package xlstm is there for its own layer: with its large models, which need kernels that are
# not, transformers would replace its layers of that name.
transformers.utils.is_xlstm_available = lambda: False

from tests.peers import golden_files  # noqa: E402
from tests.peers.numbers import cotangent, inputs, parameter  # noqa: E402

Call = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def record(case: str, module: torch.nn.Module, call: Call) -> dict[str, np.ndarray]:
  """Outputs and gradients of one layer: "out", "x", and each parameter by its name."""
  module.train(False).double()
  with torch.no_grad():
    for name, value in module.named_parameters():
      value.copy_(torch.as_tensor(parameter(case, name, value.shape)))
  x = torch.from_numpy(inputs(case)).requires_grad_()
  out = call(module, x)
  assert out.dtype == torch.float64, case
  (out * torch.from_numpy(cotangent(case))).sum().backward()
  results = {"out": out.detach(), "x": x.grad}
  # A parameter without gradient takes no part in the output, and ours has none like it.
  results |= {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
  return {name: value.numpy() for name, value in results.items()}


def write(file: str, cases: dict[str, tuple[torch.nn.Module, Call]]) -> None:
  """Records the cases in golden/FILE.npz."""
  golden_files.write(file, {case: record(case, *layer) for case, layer in cases.items()})


def main() -> None:
  from tests.peers import (
    author_layers,
    fla_layers,
    fla_models,
    log_linear_layers,
    mamba3_layers,
    record_models,
    record_published,
    torchscale_layers,
    transformers_layers,
    transformers_models,
    xlstm_layers,
  )

  # Before mamba_ssm is there, whose kernels transformers would take.
  models = transformers_models.cases()
  write("transformers", transformers_layers.cases())
  write("fla", fla_layers.cases())
  write("torchscale", torchscale_layers.cases())
  write("authors", author_layers.cases())
  write("mamba_ssm", mamba3_layers.cases())
  write("xlstm", xlstm_layers.cases())
  write("fla_log_linear", log_linear_layers.cases())
  for case, (model, decode) in (models | fla_models.cases()).items():
    record_models.record(case, model, decode)
  record_published.main()


if __name__ == "__main__":
  main()
