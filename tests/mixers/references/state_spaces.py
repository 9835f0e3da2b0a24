"""S4, S4D, DSS and S5 written out as recurrences, one step at a time, for u [T, D]."""

import numpy as np
from scipy.special import erf

from tests.mixers.references.common import sigmoid


def gelu(x):
  return 0.5 * x * (1 + erf(x / 2**0.5))


def gated_linear(params, y):
  a, g = np.split(gelu(y) @ params["o_proj"]["kernel"] + params["o_proj"]["bias"], 2, axis=1)
  return a * sigmoid(g)


def held(pole, step):
  """exp(dt A), and the contribution of an input held for one step.

  `step` may be two, of the real and of the imaginary part.
  """
  real, imag = np.broadcast_to(step, (2,))
  exponent = real * pole.real + 1j * imag * pole.imag
  return np.exp(exponent), (np.exp(exponent) - 1) / pole


def single_input(params, u, poles, factor):
  """y [T, D], each channel's state by itself; `poles` [D, N]."""
  y = np.zeros_like(u)
  weight = params["c_real"] + 1j * params["c_imag"]
  for i in range(u.shape[1]):
    decay, gain = held(poles[i], np.exp(params["log_dt"][i]))
    h = np.zeros(len(decay), complex)
    for t in range(len(u)):
      h = decay * h + gain * u[t, i]
      y[t, i] = factor * np.sum(weight[i] * h).real + params["skip"][i] * u[t, i]
  return y


def s4d(params, u):
  poles = -np.exp(params["a_log"]) + 1j * params["a_imag"]
  return gated_linear(params, single_input(params, u, poles, 2))


def dss(params, u):
  poles = -np.exp(params["pole_log"]) + 1j * params["pole_imag"]
  return gated_linear(params, single_input(params, u, np.tile(poles, (u.shape[1], 1)), 1))


def dss_softmax(params, u, *, length):
  """The kernel as rows of a softmax over `length` lags, then the sum over all lags."""
  poles = -np.exp(params["pole_log"]) + 1j * params["pole_imag"]
  weight = params["c_real"] + 1j * params["c_imag"]
  lags = np.arange(max(length, len(u)))
  y = np.zeros_like(u)
  for i in range(u.shape[1]):
    rows = np.exp(np.exp(params["log_dt"][i]) * np.outer(poles, lags))  # [N, lags]
    total = rows[:, :length].sum(1)
    # 1 / (A total) with an epsilon in |A (exp(L dt A) - 1)|^2, which total is a multiple of.
    z = poles * (total * (np.exp(np.exp(params["log_dt"][i]) * poles) - 1))
    kept = abs(z) ** 2 / (abs(z) ** 2 + 1e-7)
    kernel = ((weight[i] * kept / (poles * total)) @ rows).real
    for t in range(len(u)):
      y[t, i] = kernel[: t + 1][::-1] @ u[: t + 1, i] + params["skip"][i] * u[t, i]
  return gated_linear(params, y)


def s5(params, u):
  poles = -np.exp(params["pole_log"]) + 1j * params["pole_imag"]
  n = len(poles)
  B = params["b_proj"]["kernel"][:, :n] + 1j * params["b_proj"]["kernel"][:, n:]
  C = params["c_proj"]["kernel"][:n] - 1j * params["c_proj"]["kernel"][n:]
  step = np.exp(params["log_dt"])
  decay, gain = np.exp(step * poles), (np.exp(step * poles) - 1) / poles
  h, y = np.zeros(n, complex), []
  for t in range(len(u)):
    h = decay * h + gain * (u[t] @ B)
    y.append(2 * (h @ C).real + params["skip"] * u[t])
  z = gelu(np.stack(y))
  return z * sigmoid(z @ params["g_proj"]["kernel"] + params["g_proj"]["bias"])


def s4(params, u):
  """With all N numbers, conjugates too, and matrices as the paper has them."""
  both = lambda z: np.concatenate([z, z.conj()])
  whole = lambda name: both(params[f"{name}_real"] + 1j * params[f"{name}_imag"])
  poles, p, b = both(-np.exp(params["pole_log"]) + 1j * params["pole_imag"]), whole("p"), whole("b")
  A, one = np.diag(poles) - np.outer(p, p.conj()), np.eye(len(poles))
  y = np.zeros_like(u)
  for i in range(u.shape[1]):
    dt, c = np.exp(params["log_dt"][i]), both(params["c_real"][i] + 1j * params["c_imag"][i])
    inverse = np.linalg.inv(one - dt / 2 * A)
    A_bar, b_bar = inverse @ (one + dt / 2 * A), dt * inverse @ b
    h = np.zeros(len(poles), complex)
    for t in range(len(u)):
      h = A_bar @ h + b_bar * u[t, i]
      y[t, i] = (c @ h).real + params["skip"][i] * u[t, i]
  return gated_linear(params, y)
