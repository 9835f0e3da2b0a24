"""Hyena, BaseConv and TNN written out from their equations, lag by lag, for x [T, D]."""

import numpy as np

from tests.mixers.references.common import convolution, silu


def network(layers, features, activation):
  y = features
  for i in range(len(layers)):
    y = (activation(y) if i else y) @ layers[f"layer{i}"]["kernel"]
    y = y + layers[f"layer{i}"].get("bias", 0)
  return y


def features(length):
  lag = np.arange(length)
  angle = 1e-4 * 2 * np.pi * lag / length
  return np.stack([lag / (length - 1), np.cos(angle), -np.sin(angle)], axis=1)


def long_convolution(kernel, x):
  y = np.zeros_like(x)
  for t in range(len(x)):
    for lag in range(t + 1):
      y[t] += kernel[lag] * x[t - lag]
  return y


def hyena(params, u, *, max_length, order=2):
  inner = u @ params["in_proj"]["kernel"] + params["in_proj"].get("bias", 0)
  *gates, v = np.split(convolution(params["conv"], inner), order + 1, axis=1)
  lags = features(max_length)
  kernel = network(params["filter"], lags, lambda z: np.sin(params["sine_gain"] * z))
  rates = abs(np.linspace(np.log(0.01) / 1.5, np.log(0.01) / 0.3, kernel.shape[1]))
  kernels = np.split(kernel * np.exp(-lags[:, :1] * rates), order - 1, axis=1)
  skips = np.split(params["skip"], order - 1)
  for gate, kernel, skip in zip(gates, kernels, skips, strict=False):
    v = v * gate
    v = long_convolution(kernel, v) + skip * v
  return (v * gates[-1]) @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def base_conv(params, u, *, max_length=None):
  if max_length is None:
    y = convolution(params["conv"], u)
  else:
    kernel = network(params["filter"], features(max_length), lambda z: np.maximum(z, 0))
    y = long_convolution(kernel, u) + u
  return y * (u @ params["g_proj"]["kernel"] + params["g_proj"]["bias"]) + u


def short_conv(params, x):
  b, c, u = np.split(x @ params["in_proj"]["kernel"] + params["in_proj"].get("bias", 0), 3, axis=1)
  y = c * convolution(params["conv"], b * u)
  return y @ params["o_proj"]["kernel"] + params["o_proj"].get("bias", 0)


def tnn(params, x, *, max_length, decay):
  def act(z):
    return np.maximum(z / np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + 1e-5), 0)

  u, v = (
    silu(x @ params[f"{name}_proj"]["kernel"] + params[f"{name}_proj"]["bias"]) for name in "uv"
  )
  lag = np.arange(max_length)[:, None]
  kernel = decay**lag * network(params["filter"], lag, act)
  return (u * long_convolution(kernel, v)) @ params["o_proj"]["kernel"] + params["o_proj"]["bias"]
