"""Layers of authors' repositories that no package index has, from the checkouts of authors.txt."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from tests.peers.numbers import DIM

FOLDER = Path(__file__).parents[2] / ".venv-peers" / "authors"


def _load(file: str) -> ModuleType:
  spec = importlib.util.spec_from_file_location(Path(file).stem, FOLDER / file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _tnl():
  """Its kernel needs a GPU: their own torch function takes its place."""
  plain = _load("lightning-attention/lightning_attn/ops/torch/linear_attention.py").linear_attn
  sys.modules["lightning_attn"] = ModuleType("lightning_attn")
  sys.modules["lightning_attn.ops"] = SimpleNamespace(lightning_attn_func=plain)
  sys.modules["lightning_attn.utils"] = _load("lightning-attention/lightning_attn/utils/utils.py")
  layer = _load("lightning-attention/examples/module/tnl_attn.py").TnlAttention
  return layer(DIM, 2, layer_idx=1, num_layers=3)


def _hyena(order=2):
  operator = _load("safari/standalone_hyena.py").HyenaOperator
  layer = operator(DIM, l_max=8, order=order, filter_order=4)
  # Learned there, at a rate of 1e-5.
  positions = layer.filter_fn.pos_emb
  z = positions.z.detach()
  del positions.z
  positions.register_buffer("z", z)
  return layer


def _rwkv5():
  config = SimpleNamespace(n_embd=DIM, n_head=2, n_layer=3, bias=False, dropout=0.0)
  return _load("nanoRWKV/model.py").RWKV_TimeMix_x051a(config, 1)


def _dss():
  """It logs and reads settings by packages of which the layer needs no more than this."""
  names = ("pytorch_lightning", "pytorch_lightning.utilities", "opt_einsum", "omegaconf")
  lightning, utilities, einsum, settings = stubs = [ModuleType(name) for name in names]
  utilities.rank_zero_only = lambda function: function
  lightning.utilities = utilities
  einsum.contract, einsum.contract_expression = torch.einsum, None
  settings.DictConfig = lambda values: SimpleNamespace(update=None, **values)
  sys.modules |= dict(zip(names, stubs, strict=True))
  dss = _load("dss/src/models/sequence/ss/standalone/dss.py").DSS
  return dss(DIM, d_state=3, version="exp", postact="glu", transposed=False)


def cases():
  first = lambda out: out[0] if isinstance(out, tuple) else out
  call = lambda module, x: first(module(x))
  layers = {"tnl_lightning": _tnl(), "hyena_safari": _hyena(), "rwkv5_x051a": _rwkv5()}
  layers |= {"dss_authors": _dss(), "hyena_safari_order": _hyena(order=3)}
  assert torch.get_default_dtype() == torch.float64
  return {name: (layer, call) for name, layer in layers.items()}
