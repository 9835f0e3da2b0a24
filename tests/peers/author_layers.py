"""Layers of authors' repositories that no package index has, from the checkouts of authors.txt."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

from tests.peers import fla_layers
from tests.peers.golden_files import AUTHORS
from tests.peers.numbers import DIM, numbers

LOWER_BOUND = torch.from_numpy(0.4 + 0.1 * numbers("lower_bound", (DIM,)))


def _load(file: str) -> ModuleType:
  spec = importlib.util.spec_from_file_location(Path(file).stem, AUTHORS / file)
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
  _constant(layer.filter_fn.pos_emb, "z")  # learned there, at a rate of 1e-5
  return layer


def _constant(module, name):
  value = getattr(module, name).detach()
  delattr(module, name)
  module.register_buffer(name, value)


def _rwkv5():
  config = SimpleNamespace(n_embd=DIM, n_head=2, n_layer=3, bias=False, dropout=0.0)
  return _load("nanoRWKV/model.py").RWKV_TimeMix_x051a(config, 1)


def _rwkv():
  """A time mixer and the channel mixers of two versions, without the training program around."""
  names = ("pytorch_lightning", "pytorch_lightning.utilities", "pytorch_lightning.strategies")
  lightning, utilities, strategies = map(ModuleType, names)
  lightning.LightningModule = strategies.DeepSpeedStrategy = object
  utilities.rank_zero_info = utilities.rank_zero_only = lambda function: function
  sys.modules |= dict(zip(names, (lightning, utilities, strategies), strict=True))
  os.environ |= {"RWKV_JIT_ON": "0", "RWKV_HEAD_SIZE_A": str(DIM // 2), "RWKV_MY_TESTING": "-"}
  module = _load("RWKV-LM/RWKV-v5/src/model.py")

  def run(B, T, C, H, r, k, v, w, u):
    heads = lambda z: z.view(B, T, H, C // H).transpose(1, 2)
    log_decay = -w.exp()[:, None].expand(B, H, T, C // H)
    y = naive_recurrent_rwkv6(heads(r), heads(k), heads(v), log_decay, u, scale=1.0)[0]
    return y.transpose(1, 2).reshape(B, T, C)

  module.RUN_CUDA_RWKV5 = run
  sizes = {"n_embd": DIM, "dim_att": DIM, "dim_ffn": 12, "n_layer": 3}
  args = SimpleNamespace(head_size_a=DIM // 2, head_size_divisor=8, **sizes)
  names = {"rwkv5_authors": "Tmix_x052", "rwkv5_mlp": "CMix_x052", "rwkv6_mlp": "CMix_x060"}
  return {name: getattr(module, f"RWKV_{layer}")(args, 1) for name, layer in names.items()}


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


def _time_first(*args):
  """A call of a layer whose inputs are [T, B, D]."""
  return lambda module, x: module(x.transpose(0, 1), *args).transpose(0, 1)


def _hgrn():
  """Without its kernels, in whose place it has a loop of its own."""
  sys.modules["hgru_cuda"] = sys.modules["hgru_real_cuda"] = ModuleType("cuda")
  sys.path.insert(0, str(AUTHORS / "hgru-pytorch"))
  from hgru import Hgru1d

  layer = Hgru1d(DIM)
  layer.forward = layer.forward_naive
  return layer, _time_first(LOWER_BOUND)


def _hgrn2():
  sys.path.insert(0, str(AUTHORS / "hgru2-pytorch"))
  from hgru2_pytorch import Hgru2_1d

  layer = Hgru2_1d(DIM, expand_ratio=4)
  layer.scan = lambda x, decay: _scan(decay.movedim(0, -1), x.movedim(0, -1)).movedim(-1, 0)
  return layer, _time_first(LOWER_BOUND)


def _transnormer():
  """A first layer of three; the epsilon of its norm is not where TransNormerLLM has it."""
  sys.path.insert(0, str(AUTHORS / "nanoTransNormer"))
  from transnormer.model import NormLinearAttention, TransNormer, TransNormerConfig

  sizes = {"vocab_size": 2, "n_layer": 3, "n_head": 2, "n_embd": DIM, "use_triton": False}
  model = TransNormer(TransNormerConfig(**sizes))
  layer = NormLinearAttention(model.config)
  layer.norm.eps = 1e-20
  slopes = model.slopes * (1 + 1e-5)

  def call(module, x):
    mask = model._prepare_attn_mask(x[..., 0])
    return module(x, attn_mask=mask, slope_rate=slopes)[0]

  return layer, call


def _sse():
  """A layer for a copy of fla; a loop takes the place of its kernel."""
  fla_layers.patch()
  copy = "SpikingBrain2.0/flash-linear-attention_dev/fla"
  sys.modules["fla.ops.sse"] = _load(f"{copy}/ops/sse/index.py")
  sys.modules["fla.ops.sse"].softmax_and_mask = None  # of its other implementation
  module = _load(f"{copy}/layers/sse.py")

  def of_segments(q, k, v, gk, cu_seqlens, **_):
    rows = [part.split(cu_seqlens.diff().tolist(), 1) for part in (q, k, v, gk)]
    return torch.cat([naive_recurrent_gla(*row)[0] for row in zip(*rows, strict=True)], 1), None

  module.fused_recurrent_gla = of_segments
  sizes = {"head_dim": 4, "num_heads": 2, "gate_low_rank_dim": 3}
  return module.SSEGLA(DIM, **sizes, num_writer=2, num_reader=2)


def _scan(decay, x):
  """h_t = decay_t h_{t-1} + x_t along the last axis."""
  h, out = torch.zeros_like(x[..., 0]), []
  for a, b in zip(decay.unbind(-1), x.unbind(-1), strict=True):
    h = a * h + b
    out.append(h)
  return torch.stack(out, -1)


def _dsf():
  """The layers of the dynamical-systems framework's experiments, and Zoology's among them."""
  # Packages for GPUs: of layers that are not run, and one whose place a loop takes.
  sys.modules["causal_conv1d"] = SimpleNamespace(causal_conv1d_fn=None)
  sys.modules["selective_scan_cuda"] = sys.modules["causal_conv1d_cuda"] = ModuleType("cuda")
  sys.modules["torchvision"] = ModuleType("torchvision")
  sys.modules["torchvision.ops"] = SimpleNamespace(StochasticDepth=None)
  norms = SimpleNamespace(RMSNorm=None, layer_norm_fn=None, rms_norm_fn=None)
  sys.modules["zoology.mixers.mamba_ssm.triton.layernorm"] = norms
  sys.modules["accelerated_scan"] = ModuleType("accelerated_scan")
  sys.modules["accelerated_scan.warp"] = SimpleNamespace(scan=_scan)
  sys.path.insert(0, str(AUTHORS / "dsf-mqar"))
  from zoology.mixers import mamba
  from zoology.mixers.attention import MHA, MHNA
  from zoology.mixers.base_conv import BaseConv
  from zoology.mixers.lstm import qLSTM
  from zoology.mixers.mamba_ssm.selective_scan_interface import selective_scan_ref

  mamba.selective_scan_fn = selective_scan_ref
  ssd = mamba.S6_2(DIM, d_state=3)
  _constant(ssd, "Id")
  sizes = {"num_heads": 2, "d_qk": 12}
  long = BaseConv(DIM, l_max=8, kernel_size=-1)
  _constant(long.conv.pos_emb, "z")
  return {
    "linear_attention_dsf": MHA(DIM, **sizes),
    "softmax_attention_dsf": MHA(DIM, **sizes, lin_att=False, bias=False),
    "normalized_attention_dsf": MHNA(DIM, **sizes),
    "qlstm_dsf": qLSTM(DIM, reversed=False),
    "qlstm_reversed_dsf": qLSTM(DIM),
    "s6_dsf": mamba.S6(DIM, d_state=3, dt_rank="auto"),
    "ssd_dsf": ssd,
    "base_conv_zoology": BaseConv(DIM, l_max=8),
    "base_conv_zoology_long": long,
  }


def _tnn():
  sys.path.insert(0, str(AUTHORS / "tnn-pytorch"))
  from tnn_pytorch import Gtu

  sizes = {"expand_ratio": 2, "rpe_embedding": 4, "rpe_layers": 2, "gamma": 0.875}
  layer = Gtu(DIM, 1, causal=True, use_decay=True, **sizes)
  _constant(layer.toep, "gamma")
  return layer


def _cosformer():
  return _load("cosFormer/cosformer.py").CosformerAttention(DIM, 2, causal=True), _time_first()


def cases():
  first = lambda out: out[0] if isinstance(out, tuple) else out
  call = lambda module, x: first(module(x))
  layers = {"tnl_lightning": _tnl(), "hyena_safari": _hyena(), "rwkv5_x051a": _rwkv5()}
  other = {"cosformer": _cosformer(), "tnl_transnormerllm": _transnormer()}
  other |= {"hgrn_authors": _hgrn(), "hgrn2_authors": _hgrn2()}
  layers |= _rwkv() | {"sse_authors": _sse()}
  layers["hyena_safari_order"] = _hyena(order=3)
  layers["hyena_safari_filter"] = _hyena(num_inner_mlps=1)
  _stubs()
  layers["dss_authors"] = _dss(version="exp")
  layers["dss_authors_softmax"] = _dss_softmax()
  layers["s4d"] = _load("s4/models/s4/s4d.py").S4D(DIM, d_state=6, transposed=False)
  layers["s4"] = _s4()
  layers |= _dsf() | {"tnn_authors": _tnn()}
  assert torch.get_default_dtype() == torch.float64
  return {name: (layer, call) for name, layer in layers.items()} | other
