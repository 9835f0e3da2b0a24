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


def _hyena(**options):
  operator = _load("safari/standalone_hyena.py").HyenaOperator
  layer = operator(DIM, l_max=8, filter_order=4, **options)
  # Learned there, at a rate of 1e-5.
  positions = layer.filter_fn.pos_emb
  z = positions.z.detach()
  del positions.z
  positions.register_buffer("z", z)
  return layer


def _rwkv5():
  config = SimpleNamespace(n_embd=DIM, n_head=2, n_layer=3, bias=False, dropout=0.0)
  return _load("nanoRWKV/model.py").RWKV_TimeMix_x051a(config, 1)


def _stubs():
  """Packages for logs and settings, of which the layers of state spaces need no more than this."""
  names = ("pytorch_lightning", "pytorch_lightning.utilities", "opt_einsum", "omegaconf")
  names += ("scipy", "src", "src.models", "src.models.nn")
  stubs = [ModuleType(name) for name in names]
  lightning, utilities, einsum, settings, scipy, *_, layers = stubs
  utilities.rank_zero_only = lambda function: function
  lightning.utilities = utilities
  einsum.contract, einsum.contract_expression = torch.einsum, None
  settings.DictConfig = lambda values: SimpleNamespace(update=None, **values)
  scipy.special = layers.DropoutNd = None
  sys.modules |= dict(zip(names, stubs, strict=True))


def _dss(**options):
  dss = _load("dss/src/models/sequence/ss/standalone/dss.py").DSS
  return dss(DIM, d_state=3, postact="glu", transposed=False, **options)


def _dss_softmax():
  """With poles by the logarithm of minus their real part, as in the other version and in ours."""
  layer = _dss(version="softmax", sep_dt_re_im=False)
  kernel = layer.kernel
  del kernel.Lambda
  kernel.Lambda_log_neg_re, kernel.Lambda_im = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
  kernel._Lambda = lambda: -kernel.Lambda_log_neg_re.exp() + 1j * kernel.Lambda_im
  return layer


def _s4():
  """C is the state's readout where the kernel is computed for many more tokens than it forgets."""
  block = _load("s4/models/s4/s4.py").S4Block
  layer = block(DIM, transposed=False, mode="s4", d_state=6, n_ssm=1, init="legs", backend="naive")
  layer.layer.kernel.l_kernel = torch.tensor(4096)
  return layer


def _cosformer():
  layer = _load("cosFormer/cosformer.py").CosformerAttention(DIM, 2, causal=True)
  return layer, lambda module, x: module(x.transpose(0, 1)).transpose(0, 1)


def cases():
  first = lambda out: out[0] if isinstance(out, tuple) else out
  call = lambda module, x: first(module(x))
  layers = {"tnl_lightning": _tnl(), "hyena_safari": _hyena(), "rwkv5_x051a": _rwkv5()}
  layers["hyena_safari_order"] = _hyena(order=3)
  layers["hyena_safari_filter"] = _hyena(num_inner_mlps=1)
  _stubs()
  layers["dss_authors"] = _dss(version="exp")
  layers["dss_authors_softmax"] = _dss_softmax()
  layers["s4d"] = _load("s4/models/s4/s4d.py").S4D(DIM, d_state=6, transposed=False)
  layers["s4"] = _s4()
  assert torch.get_default_dtype() == torch.float64
  return {name: (layer, call) for name, layer in layers.items()} | {"cosformer": _cosformer()}
