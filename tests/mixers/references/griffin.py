"""Griffin's recurrent block written out from its equations, one step at a time, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import convolution, sigmoid, softplus


def rg_lru(params, u):
  x = convolution(params["conv"], u @ params["x_proj"]["kernel"])

  def gate(name, x):
    blocks = params[name]["kernel"]
    pieces = np.split(x, len(blocks))
    y = np.concatenate([piece @ block for piece, block in zip(pieces, blocks, strict=True)])
    return sigmoid(y + params[name]["bias"])

  y, h = u @ params["y_proj"]["kernel"], None
  out = np.zeros_like(x)
  for t in range(len(u)):
    r, i = gate("decay_gate", x[t]), gate("input_gate", x[t])
    a = np.exp(-8 * r * softplus(params["decay_rate"]))
    h = i * x[t] if h is None else a * h + np.sqrt(1 - a**2) * (i * x[t])
    out[t] = gelu(y[t]) * h
  return out @ params["o_proj"]["kernel"]


def gelu(x):
  return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2
