"""The quasi-LSTM and its modified form written out from their equations, for x [T, D]."""

import numpy as np
from scipy.special import erf

from tests.mixers.references.common import convolution, sigmoid


def qlstm_printed(params, u):
  x = np.tanh(u @ params["in_proj"]["kernel"])
  f, i, o = np.split(u @ params["x_proj"]["kernel"] + params["x_proj"]["bias"], 3, axis=1)
  decay = sigmoid(-f) ** max(params["alpha"][0], 0) if "alpha" in params else sigmoid(f)
  h, y = 0.0, []
  for t in range(len(u)):
    h = decay[t] * h + sigmoid(i[t]) * x[t]
    y.append(sigmoid(o[t]) * np.tanh(h))
  return np.stack(y)


def qlstm(params, u):
  g, x = np.split(u @ params["in_proj"]["kernel"], 2, axis=1)
  x = convolution(params["conv"], x)
  f, i, o = np.split(x @ params["x_proj"]["kernel"] + params["x_proj"]["bias"], 3, axis=1)
  decay = sigmoid(-f) ** max(params["alpha"][0], 0) if "alpha" in params else sigmoid(f)
  h, y = 0.0, []
  for t in range(len(u)):
    h = decay[t] * h + sigmoid(i[t]) * x[t]
    y.append(0.5 * g[t] * (1 + erf(g[t] / 2**0.5)) * sigmoid(o[t]) * h)
  return np.stack(y) @ params["o_proj"]["kernel"]
