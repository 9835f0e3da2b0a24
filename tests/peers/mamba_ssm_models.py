"""Models of mamba-ssm on a CPU, with its own reference functions in place of its kernels."""

import importlib
import inspect
import sys
import types
from typing import Any

from tests.peers.golden_files import AUTHORS

SOURCE = AUTHORS / "mamba"


def _imported() -> tuple[types.ModuleType, ...]:
  """Its modules, without the package's `__init__`, which imports kernels that are not here."""
  if "mamba_ssm" not in sys.modules:
    package = types.ModuleType("mamba_ssm")
    package.__path__ = [str(SOURCE / "mamba_ssm")]
    sys.modules["mamba_ssm"] = package
    sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
    third = types.ModuleType("mamba_ssm.modules.mamba3")  # imports a compiler of kernels
    third.Mamba3 = None
    sys.modules["mamba_ssm.modules.mamba3"] = third
  names = ("models.mixer_seq_simple", "models.config_mamba", "modules.mamba_simple")
  names += ("modules.mamba2", "modules.block", "ops.triton.layer_norm")
  names += ("ops.triton.layernorm_gated", "ops.triton.ssd_combined", "ops.selective_scan_interface")
  return tuple(importlib.import_module(f"mamba_ssm.{name}") for name in names)


def imported_mamba3(load) -> types.ModuleType:
  """The module of Mamba-3, with its norm's reference; `load` imports a file of theirs."""
  gated = _imported()[6]
  _patch_gated_norm(gated)
  return load("mamba_ssm/modules/mamba3.py")


def _patch_gated_norm(gated):
  gated.RMSNorm.forward = lambda self, x, z=None: gated.rms_norm_ref(
    x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate
  )


def model(config: dict[str, Any]) -> Any:
  """The model of a config.json."""
  models, configs, first, second, block, norms, gated, combined, scans = _imported()
  first.selective_scan_fn = scans.selective_scan_fn = scans.selective_scan_ref
  norms.layer_norm_fn = block.layer_norm_fn = models.layer_norm_fn = _norm(norms)
  norms.rms_norm_fn = models.rms_norm_fn = norms.rms_norm_ref
  _patch_gated_norm(gated)
  second.mamba_chunk_scan_combined = lambda x, dt, A, B, C, *, D, z, dt_bias, dt_softplus, **_: (
    combined.ssd_selective_scan(x, dt, A, B, C, D, z, dt_bias, dt_softplus)
  )
  found = models.MambaLMHeadModel(configs.MambaConfig(**config))
  for layer in found.backbone.layers:
    layer.mixer.use_fast_path = layer.mixer.use_mem_eff_path = False
  return found


def _norm(norms):
  def norm(x, weight, bias, residual=None, eps=1e-6, prenorm=False, is_rms_norm=False, **_):
    reference = norms.rms_norm_ref if is_rms_norm else norms.layer_norm_ref
    return reference(x, weight, bias, residual=residual, eps=eps, prenorm=prenorm)

  return norm


def defaults() -> dict[str, dict[str, Any]]:
  """{class: defaults of its arguments}, of the configuration and of both layers."""
  _, configs, first, second, *_ = _imported()
  given = lambda cls: {
    name: argument.default
    for name, argument in inspect.signature(cls.__init__).parameters.items()
    if argument.default is not inspect.Parameter.empty
  }
  return {
    "model": vars(configs.MambaConfig()),
    "Mamba1": given(first.Mamba),
    "Mamba2": given(second.Mamba2),
  }
