"""Maps from the parameters of each recorded layer, by its names, to those of ours.

They are affine: their linear parts take gradients to gradients.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.peers.numbers import DIM

Arrays = Mapping[str, np.ndarray]  # theirs, by name


def linear(theirs: Arrays, name: str) -> dict[str, np.ndarray]:
  ours = {"kernel": theirs[f"{name}.weight"].T}
  bias = theirs.get(f"{name}.bias")
  return ours if bias is None else ours | {"bias": bias}


def conv(theirs: Arrays, name: str) -> dict[str, np.ndarray]:
  ours = {"kernel": theirs[f"{name}.weight"][:, 0].T}
  bias = theirs.get(f"{name}.bias")
  return ours if bias is None else ours | {"bias": bias}


def named(theirs: Arrays, convert=linear, **names: str) -> dict[str, Any]:
  """Those of ours=theirs that they have."""
  return {ours: convert(theirs, name) for ours, name in names.items() if f"{name}.weight" in theirs}


def scale(theirs: Arrays, **names: str) -> dict[str, Any]:
  return named(theirs, lambda theirs, name: {"scale": theirs[f"{name}.weight"]}, **names)


QKVO = {f"{x}_proj": f"{x}_proj" for x in "qkvo"}
DOWN_UP = ((0, "down"), (1, "up"))
GATES = {"decay": "f_proj", "gate": "g_proj"}
CONVOLUTIONS = {f"{x}_conv": f"{x}_conv1d" for x in "qkv"}


def attention(theirs: Arrays) -> dict[str, Any]:
  return named(theirs, **QKVO) | scale(theirs, q_norm="q_norm", k_norm="k_norm")


def latent_attention(theirs: Arrays) -> dict[str, Any]:
  """Their rotated channels are last, in neighboring pairs; two heads, 4 rotated and 3 others."""
  H, shared, rest = 2, 4, 3
  turned = np.array([0, 2, 1, 3])

  def queries(name):
    rows = theirs[f"{name}.weight"].reshape(H, rest + shared, -1)
    rows = np.concatenate([rows[:, rest:][:, turned], rows[:, :rest]], axis=1)
    return {"kernel": rows.reshape(H * (rest + shared), -1).T}

  down = linear(theirs, "kv_a_proj_with_mqa")
  rank = down["kernel"].shape[1] - shared
  order = np.concatenate([rank + turned, np.arange(rank)])
  up = theirs["kv_b_proj.weight"].reshape(H, -1, rank)
  kernel = lambda rows: {"kernel": rows.reshape(-1, rank).T}
  inner = {"kv_down_proj": {name: x[..., order] for name, x in down.items()}}
  inner |= {"k_up_proj": kernel(up[:, :rest]), "v_up_proj": kernel(up[:, rest:])}
  inner |= scale(theirs, kv_norm="kv_a_layernorm", q_norm="q_a_layernorm")
  ours = named(theirs, o_proj="o_proj")
  if "q_proj.weight" in theirs:
    return ours | {"latents": inner, "q_proj": queries("q_proj")}
  inner |= named(theirs, q_down_proj="q_a_proj") | {"q_up_proj": queries("q_b_proj")}
  return ours | {"latents": inner}


def mlp(theirs: Arrays) -> dict[str, Any]:
  return named(theirs, gate="gate_proj", up="up_proj", down="down_proj")


def gpt2_mlp(theirs: Arrays) -> dict[str, Any]:
  """Their kernels are [inputs, outputs], as ours."""
  names = {"up": "c_fc", "down": "c_proj"}
  return {
    ours: {"kernel": theirs[f"{name}.weight"], "bias": theirs[f"{name}.bias"]}
    for ours, name in names.items()
  }


def mamba(theirs: Arrays) -> dict[str, Any]:
  norms = scale(theirs, r_norm="dt_layernorm", b_norm="b_layernorm", c_norm="c_layernorm")
  projections = {name: name for name in ("in_proj", "x_proj", "dt_proj")} | {"o_proj": "out_proj"}
  vectors = {"a_log": theirs["A_log"], "skip": theirs["D"], "conv": conv(theirs, "conv1d")}
  return named(theirs, **projections) | norms | vectors


def mamba2(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, in_proj="in_proj", o_proj="out_proj") | scale(theirs, norm="norm")
  ours |= {"dt_bias": theirs["dt_bias"], "log_rate": theirs["A_log"], "skip": theirs["D"]}
  return ours | {"conv": conv(theirs, "conv1d")}


def short_conv(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, in_proj="in_proj", o_proj="out_proj")
  return ours | {"conv": conv(theirs, "conv")}


def log_linear(theirs: Arrays) -> dict[str, Any]:
  return mamba2(theirs) | {"level_weight": theirs["L"]}


def mamba3(theirs: Arrays) -> dict[str, Any]:
  """Their pairs of channels are neighbors; biases of b and c have the number of heads and R."""
  H, R, N = theirs["B_bias"].shape
  P = theirs["out_proj.weight"].shape[1] // H
  rows = theirs["in_proj.weight"].shape[0] - 2 * H * P - 3 * H
  # G groups and A angles: 2 R G N + A rows remain, and A is N / 4 or N / 2.
  angles = rows % (2 * R * N)
  order = np.arange(N)
  pairs = order[: 2 * angles].reshape(-1, 2)
  order[: 2 * angles] = np.concatenate([pairs[:, 0], pairs[:, 1]])
  z_and_v, bc, rest = np.split(theirs["in_proj.weight"], [2 * H * P, 2 * H * P + rows - angles])
  bc = bc.reshape(-1, N, DIM)[:, order].reshape(-1, DIM)
  ours = {"in_proj": {"kernel": np.concatenate([z_and_v, bc, rest]).T}}
  for name in "bc":
    ours[f"{name}_norm"] = {"scale": theirs[f"{name.upper()}_norm.weight"][order]}
    ours[f"{name}_offset"] = theirs[f"{name.upper()}_bias"][..., order]
  mimo = {"mimo_v": "mimo_x", "mimo_z": "mimo_z", "mimo_o": "mimo_o"}
  ours |= {name: theirs[source] for name, source in mimo.items() if source in theirs}
  ours |= {"dt_bias": theirs["dt_bias"], "skip": theirs["D"]} | scale(theirs, norm="norm")
  return ours | named(theirs, o_proj="out_proj")


def mlstm(theirs: Arrays) -> dict[str, Any]:
  gates = {"g_proj": "ogate_preact", "i_proj": "igate_preact", "f_proj": "fgate_preact"}
  ours = named(theirs, q_proj="q", k_proj="k", v_proj="v", o_proj="out_proj", **gates)
  norm = {"scale": theirs["multihead_norm.weight"]}
  bias = theirs.get("multihead_norm.bias")
  return ours | {"norm": norm if bias is None else norm | {"bias": bias}}


def mlstm_block(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, in_proj="proj_up", o_proj="proj_down")
  ours |= named(theirs, i_proj="mlstm_cell.igate", f_proj="mlstm_cell.fgate")
  for name in "qkv":
    ours[f"{name}_blocks"] = {"kernel": theirs[f"{name}_proj.weight"].swapaxes(1, 2)}
  ours |= named(theirs, conv, conv="conv1d.conv") | {"skip": theirs["learnable_skip"]}
  return ours | {"norm": {"scale": 1 + theirs["mlstm_cell.outnorm.weight"]}}


def griffin(theirs: Arrays) -> dict[str, Any]:
  gate = lambda name: {
    "kernel": theirs[f"rg_lru.{name}_gate_weight"],
    "bias": theirs[f"rg_lru.{name}_gate_bias"].ravel(),
  }
  ours = named(theirs, x_proj="linear_x", y_proj="linear_y", o_proj="linear_out")
  ours |= {"decay_gate": gate("recurrent"), "input_gate": gate("input")}
  return ours | {"decay_rate": theirs["rg_lru.recurrent_param"], "conv": conv(theirs, "conv_1d")}


def rwkv4(theirs: Arrays) -> dict[str, Any]:
  mu = {f"mu_{name[0]}": theirs[f"time_mix_{name}"].ravel() for name in ("key", "value")}
  mu |= {"mu_r": theirs["time_mix_receptance"].ravel()}
  projections = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
  return named(theirs, **projections) | mu | {"w": theirs["time_decay"], "u": theirs["time_first"]}


def qwen3_next(theirs: Arrays) -> dict[str, Any]:
  """Their fused kernels have the rows of one key head after another."""
  heads, K, values, V = 2, 4, 4, 3
  own = values // heads * V

  def parts(name, widths):
    rows = theirs[f"{name}.weight"].reshape(heads, sum(widths), DIM)
    pieces = np.split(rows, np.cumsum(widths)[:-1], axis=1)
    return [{"kernel": piece.reshape(-1, DIM).T} for piece in pieces]

  q, k, v, g = parts("in_proj_qkvz", [K, K, own, own])
  b, a = parts("in_proj_ba", [values // heads] * 2)
  kernels = np.split(conv(theirs, "conv1d")["kernel"], [heads * K, 2 * heads * K], axis=1)
  ours = {"q_proj": q, "k_proj": k, "v_proj": v, "g_proj": g, "b_proj": b}
  ours |= {f"{x}_conv": {"kernel": kernel} for x, kernel in zip("qkv", kernels, strict=True)}
  ours |= {"a_proj": a | {"bias": theirs["dt_bias"]}, "log_rate": theirs["A_log"]}
  return ours | named(theirs, o_proj="out_proj") | scale(theirs, norm="norm")


def gla(theirs: Arrays) -> dict[str, Any]:
  gates = {"decay_down_proj": "gk_proj.0", "decay_up_proj": "gk_proj.1", "g_proj": "g_proj"}
  norm = scale(theirs, norm="g_norm_swish_gate")
  return named(theirs, **QKVO, **gates) | named(theirs, conv, **CONVOLUTIONS) | norm


def sse(theirs: Arrays) -> dict[str, Any]:
  pairs = {"q_": "lora_q_proj", "k_": "lora_k_proj", "gate_": "g_proj"}
  names = {f"{ours}{x}_proj": f"{source}.{i}" for ours, source in pairs.items() for i, x in DOWN_UP}
  ours = named(theirs, **QKVO, **names, router_proj="e_proj") | scale(theirs, norm="o_norm")
  for i, name in enumerate(("always_gates", "sparse_gates")):
    up = linear(theirs, f"gk_proj.{i}.1")
    ours[name] = {"down_proj": linear(theirs, f"gk_proj.{i}.0"), "up_bias": up["bias"]}
    ours[name]["up_kernel"] = up["kernel"][None]
  return ours


def delta_net(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, **QKVO, b_proj="b_proj", g_proj="g_proj")
  ours |= named(theirs, conv, **CONVOLUTIONS) | scale(theirs, norm="o_norm")
  if "A_log" not in theirs:
    return ours
  a = linear(theirs, "a_proj") | {"bias": theirs["dt_bias"]}
  return ours | {"a_proj": a, "log_rate": theirs["A_log"]}


def channel_delta(theirs: Arrays) -> dict[str, Any]:
  """Those of KDA and Gated DeltaNet-2: gates of low rank."""
  gates = {"b_proj": "b_proj"}
  if "w_proj.weight" in theirs:
    gates = {"erase_proj": "b_proj", "write_proj": "w_proj"}
  gates |= {f"{ours}_{x}_proj": f"{name}.{i}" for ours, name in GATES.items() for i, x in DOWN_UP}
  ours = named(theirs, **QKVO, **gates) | named(theirs, conv, **CONVOLUTIONS)
  ours["decay_up_proj"] |= {"bias": theirs["dt_bias"]}
  return ours | scale(theirs, norm="o_norm") | {"log_rate": theirs["A_log"]}


def comba(theirs: Arrays) -> dict[str, Any]:
  gains = {"inner_gain": "decay", "correction_gain": "D"}
  return delta_net(theirs) | {ours: theirs[name] for ours, name in gains.items() if name in theirs}


def rwkv7(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, **{f"{name}_proj": f"{name}_proj" for name in "rkvo"})
  ours |= {f"mu_{name}": theirs[f"x_{name}"].ravel() for name in "rwkvag"}
  ranks = {"decay": "w_lora", "rate": "a_lora", "gate": "g_lora"}
  ranks |= {"value": "v_lora"} if "v_lora.lora.0.weight" in theirs else {}
  for name, source in ranks.items():
    ours[f"{name}_down_proj"] = linear(theirs, f"{source}.lora.0")
    ours[f"{name}_up_proj"] = linear(theirs, f"{source}.lora.2")
  gains = {"erase_gain": "k_k", "rate_gain": "k_a", "bonus_gain": "r_k"}
  ours |= {name: theirs[source].ravel() for name, source in gains.items()}
  return ours | {"norm": {"scale": theirs["g_norm.weight"], "bias": theirs["g_norm.bias"]}}


def gsa(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, **QKVO, f_proj="f_proj") | scale(theirs, norm="g_norm")
  return ours | named(theirs, conv, **CONVOLUTIONS)


def retnet(theirs: Arrays) -> dict[str, Any]:
  return named(theirs, **QKVO, g_proj="g_proj") | scale(theirs, norm="g_norm_swish_gate")


def torchscale(theirs: Arrays) -> dict[str, Any]:
  """Their pairs of channels are neighbors, ours the halves of a head."""
  ours = named(theirs, **QKVO | {"o_proj": "out_proj"}, g_proj="g_proj")
  for name in ("q_proj", "k_proj"):
    pairs = ours[name]["kernel"].reshape(DIM, 2, DIM // 4, 2)
    ours[name] = {"kernel": pairs.swapaxes(2, 3).reshape(DIM, DIM)}
  return ours


def hgrn_authors(theirs: Arrays) -> dict[str, Any]:
  """Real and imaginary parts of their inputs are neighbors."""
  ours = named(theirs, c_proj="input_proj", f_proj="lambda_proj", g_proj="gate", o_proj="out_proj")
  for name, value in ours["c_proj"].items():
    ours["c_proj"][name] = np.concatenate([value[..., ::2], value[..., 1::2]], -1)
  norm = {"scale": theirs["norm.weight"], "bias": theirs["norm.bias"]}
  return ours | {"norm": norm, "theta": theirs["theta"].ravel()}


def _rows(theirs: Arrays, name: str, *ours: str) -> dict[str, Any]:
  """Projections whose kernels are the rows of one of theirs, in equal parts."""
  names = [n for n in (f"{name}.weight", f"{name}.bias") if n in theirs]
  parts = zip(*(np.split(theirs[n], len(ours)) for n in names), strict=True)
  parts = (linear(dict(zip(names, part, strict=True)), name) for part in parts)
  return dict(zip(ours, parts, strict=True))


def hgrn2_authors(theirs: Arrays) -> dict[str, Any]:
  norm = {"scale": theirs["norm.weight"], "bias": theirs["norm.bias"]}
  projections = _rows(theirs, "in_proj", "v_proj", "q_proj", "f_proj")
  return projections | named(theirs, o_proj="out_proj") | {"norm": norm}


def hgrn2(theirs: Arrays) -> dict[str, Any]:
  projections = {"q_proj": "q_proj", "f_proj": "f_proj", "v_proj": "i_proj", "o_proj": "o_proj"}
  return named(theirs, **projections) | scale(theirs, norm="g_norm")


def rwkv6(theirs: Arrays) -> dict[str, Any]:
  """Their streams are r, w, k, v, g; ours w, k, v, r, g."""
  order = [1, 2, 3, 0, 4]
  down = theirs["x_proj.0.linear.weight"].reshape(5, -1, DIM)[order]
  up = theirs["x_proj.2.weight"].reshape(DIM, 5, -1)[:, order]
  ours = {f"mu_{name}": theirs["x_bias"][i] for i, name in enumerate("rwkvg")}
  ours |= {"mu_x": theirs["x_proj.0.mu"], "mix_down_proj": {"kernel": down.reshape(-1, DIM).T}}
  ours |= {"mix_up": up.transpose(1, 2, 0), "u": theirs["bonus"].ravel()}
  ours |= named(theirs, **{f"{name}_proj": f"{name}_proj.linear" for name in "rkvg"})
  ours |= {"w": theirs["w_proj.linear.lora.2.bias"]}
  for name, index in (("decay_down_proj", 0), ("decay_up_proj", 2)):
    ours[name] = {"kernel": theirs[f"w_proj.linear.lora.{index}.weight"].T}
  norm = {"scale": theirs["g_norm.weight"], "bias": theirs["g_norm.bias"]}
  return ours | named(theirs, o_proj="o_proj") | {"norm": norm}


def tnl(theirs: Arrays) -> dict[str, Any]:
  gates = {"gate_down_proj": "output_gate.0", "gate_up_proj": "output_gate.1"}
  norm = {"scale": theirs["norm.weight"], "bias": theirs["norm.bias"]}
  return named(theirs, **QKVO, **gates) | {"norm": norm}


def transnormer(theirs: Arrays) -> dict[str, Any]:
  projections = _rows(theirs, "qkvu_proj", "q_proj", "k_proj", "v_proj", "g_proj")
  return projections | named(theirs, o_proj="out_proj") | {"theta": theirs["lrpe.theta"].ravel()}


def hyena(theirs: Arrays) -> dict[str, Any]:
  """Their gates are in the order opposite to ours, the output's first."""

  def swapped(x):
    *gates, value = np.split(x, x.shape[-1] // DIM, -1)
    return np.concatenate([*gates[::-1], value], -1)

  ours = named(theirs, o_proj="out_proj")
  for name, convert, source in (("in_proj", linear, "in_proj"), ("conv", conv, "short_filter")):
    ours[name] = {key: swapped(value) for key, value in convert(theirs, source).items()}
  network = {f"layer{i}": f"filter_fn.implicit_filter.{2 * i}" for i in range(4)}
  ours |= {"filter": named(theirs, **network), "skip": theirs["filter_fn.bias"]}
  return ours | {"sine_gain": theirs["filter_fn.implicit_filter.1.freq"].ravel()}


def dss(theirs: Arrays) -> dict[str, Any]:
  weights = theirs["kernel.W"][0]
  ours = {"c_real": weights[..., 0], "c_imag": weights[..., 1], "skip": theirs["D"][0]}
  ours |= {"pole_log": theirs["kernel.Lambda_log_neg_re"], "pole_imag": theirs["kernel.Lambda_im"]}
  return ours | {"log_dt": theirs["kernel.log_dt"]} | named(theirs, o_proj="output_linear.0")


def _parts(name, theirs):
  """Real and imaginary parts, on the last axis there."""
  return {f"{name}_real": theirs[..., 0], f"{name}_imag": theirs[..., 1]}


def s4d(theirs: Arrays) -> dict[str, Any]:
  ours = _parts("c", theirs["kernel.C"]) | {"skip": theirs["D"], "log_dt": theirs["kernel.log_dt"]}
  ours |= {"a_log": theirs["kernel.log_A_real"], "a_imag": theirs["kernel.A_imag"]}
  output = {"kernel": theirs["output_linear.0.weight"][..., 0].T}
  return ours | {"o_proj": output | {"bias": theirs["output_linear.0.bias"]}}


def s4(theirs: Arrays) -> dict[str, Any]:
  kernel = lambda name: theirs[f"layer.kernel.{name}"]
  ours = {"skip": theirs["layer.D"][0], "log_dt": kernel("inv_dt")[:, 0]}
  ours |= {"pole_log": kernel("A_real")[0], "pole_imag": -kernel("A_imag")[0]}
  ours |= _parts("b", kernel("B")[0, 0]) | _parts("p", kernel("P")[0, 0])
  return ours | _parts("c", kernel("C")[0]) | named(theirs, o_proj="output_linear.0")


def s5(theirs: Arrays) -> dict[str, Any]:
  b, c = theirs["B"], theirs["C"]
  ours = {"b_proj": {"kernel": np.concatenate([b[..., 0], b[..., 1]]).T}}
  ours |= {"c_proj": {"kernel": np.concatenate([c[..., 0], -c[..., 1]], 1).T}}
  ours |= {"g_proj": {"kernel": theirs["out2.kernel"], "bias": theirs["out2.bias"]}}
  ours |= {"pole_log": theirs["Lambda_log"], "pole_imag": theirs["Lambda_im"]}
  return ours | {"log_dt": theirs["log_step"][:, 0], "skip": theirs["D"]}


def dsf_attention(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, v_proj="Wv", eta_proj="Wn", o_proj="out_proj")
  return ours | _rows(theirs, "Wqk", "q_proj", "k_proj")


def s6(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, x_proj="x_proj", o_proj="out_proj") | {"skip": theirs["D"]}
  if "dt_proj.weight" in theirs:
    return ours | named(theirs, dt_proj="dt_proj") | {"a_log": theirs["A_log"]}
  return ours | {"dt_bias": theirs["dt_proj.bias"], "log_rate": theirs["A_log"]}


def qlstm(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, in_proj="input", x_proj="gates", o_proj="output")
  alpha = {"alpha": theirs["alpha"].reshape(1)} if "alpha" in theirs else {}
  return ours | {"conv": conv(theirs, "conv")} | alpha


def base_conv(theirs: Arrays) -> dict[str, Any]:
  ours = named(theirs, g_proj="projection") | named(theirs, conv, conv="conv.conv")
  network = named(theirs, layer0="conv.mlp.0", layer1="conv.mlp.2")
  return ours | ({"filter": network} if network else {})


def tnn(theirs: Arrays) -> dict[str, Any]:
  rpe = {"layer0": "pos_proj", "layer1": "layers.0.2", "layer2": "layers.1.2", "layer3": "out.2"}
  network = named(theirs, **{ours: f"toep.rpe.{name}" for ours, name in rpe.items()})
  return named(theirs, u_proj="u_proj", v_proj="v_proj", o_proj="o") | {"filter": network}


def cosformer(theirs: Arrays) -> dict[str, Any]:
  return named(theirs, **QKVO | {"o_proj": "out_proj"})


def rwkv5(theirs: Arrays) -> dict[str, Any]:
  """Their weights of shifts are those of the previous token, or of the present one."""
  ours = {f"mu_{x}": 1 - theirs[n].ravel() for x in "rkvg" if (n := f"time_maa_{x}") in theirs}
  ours |= {f"mu_{x}": theirs[n].ravel() for x in "rkvg" if (n := f"time_mix_{x}") in theirs}
  ours |= {"w": theirs["time_decay"].ravel(), "u": theirs["time_faaaa"].ravel()}
  projections = {"r": "receptance", "k": "key", "v": "value", "g": "gate", "o": "output"}
  ours |= {f"{name}_proj": linear(theirs, source) for name, source in projections.items()}
  return ours | {"norm": {"scale": theirs["ln_x.weight"], "bias": theirs["ln_x.bias"]}}


def rwkv_mlp(theirs: Arrays) -> dict[str, Any]:
  weights = {f"mu_{x}": theirs[n].ravel() for x in "kr" for n in theirs if n.endswith(f"_{x}")}
  return named(theirs, up="key", gate="receptance", down="value") | weights
