"""Mamba-3 of mamba-ssm on a CPU: references of its own tests take the place of its kernels."""

import importlib.util
import inspect
import sys
from types import ModuleType
from unittest import mock

import torch

from tests.peers import mamba_ssm_models
from tests.peers.numbers import DIM

_KERNELS = {
  "triton.mamba3.mamba3_siso_combined": "mamba3_siso_combined",
  "triton.mamba3.mamba3_siso_fwd": "mamba3_siso_fwd",
  "triton.mamba3.mamba3_siso_step": "mamba3_siso_step",
  "triton.mamba3.mamba3_mimo_rotary_step": "apply_rotary_qk_inference_fwd",
  "tilelang.mamba3.mamba3_mimo": "mamba3_mimo",
  "cute.mamba3.mamba3_step_fn": "mamba3_step_fn",
}


def _load(file: str) -> ModuleType:
  spec = importlib.util.spec_from_file_location(
    file.replace("/", "_"), mamba_ssm_models.SOURCE / file
  )
  module = importlib.util.module_from_spec(spec)
  stubs = {f"mamba_ssm.ops.{name}": ModuleType(name) for name in _KERNELS}
  for name, attribute in _KERNELS.items():
    setattr(stubs[f"mamba_ssm.ops.{name}"], attribute, None)
  with mock.patch.dict(sys.modules, stubs | {"pytest": mock.MagicMock()}):
    spec.loader.exec_module(module)
  return module


def cases():
  module = mamba_ssm_models.imported_mamba3(_load)
  siso = _load("tests/ops/triton/test_mamba3_siso.py").mamba3_siso_fwd_ref
  mimo = _load("tests/ops/tilelang/test_mamba3_mimo.py").mamba3_MIMO_step_ref

  def siso_kernel(Input_States, return_final_states, chunk_size, **arguments):
    del chunk_size
    assert Input_States is None and not return_final_states
    return siso(**arguments)[0]

  names = inspect.signature(mimo).parameters.keys() - {"MIMO_O"}

  def mimo_kernel(MIMO_Out, MIMO_Z, Z, rotary_dim_divisor, chunk_size, **arguments):
    del rotary_dim_divisor, chunk_size
    assert not any(arguments.pop(name) for name in ("cu_seqlens", "return_state"))
    assert not arguments.pop("fuse_pregate_headwise_rms_norm")
    arguments = {name: x for name, x in arguments.items() if name in names}
    run = lambda out: mimo(**arguments, MIMO_O=out, Z=Z, MIMO_Z=MIMO_Z)[0]
    if MIMO_Out is not None:
      return run(MIMO_Out)
    each = [torch.zeros_like(arguments["MIMO_V"]) for _ in range(MIMO_Z.shape[1])]
    for rank, out in enumerate(each):
      out[:, rank] = 1
    return torch.stack([run(out) for out in each], 2)

  module.mamba3_siso_combined, module.mamba3_mimo_combined = siso_kernel, mimo_kernel
  call = lambda layer, x: layer(x)
  softplus = mock.patch.object(module, "heavy_tail_activation", torch.nn.functional.softplus)
  wide = {"ngroups": 2, "rope_fraction": 1.0, "is_outproj_norm": True, "A_floor": 0.7}
  layer = lambda **options: (module.Mamba3(DIM, d_state=8, headdim=4, **options), call)
  return {
    "mamba3": (layer()[0], softplus(call)),  # as in its release 2.3.2
    "mamba3_norm": layer(**wide),
    "mamba3_mimo": layer(is_mimo=True, mimo_rank=2),
    "mamba3_mimo_norm": layer(is_mimo=True, mimo_rank=3, fuse_pregate_headwise_norm=False, **wide),
  }
