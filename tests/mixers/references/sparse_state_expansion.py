"""Sparse state expansion and mixture of memories from their equations, one step at a time."""

import numpy as np

from tests.mixers.references.common import heads, root_mean_square_norm, sigmoid, silu, softplus

IDENTITY = lambda z: z


def sse(
  params, x, *, num_heads, num_selected=1, num_readers=None, gate="eta", inner="gla", phi=IDENTITY
):
  """As in the class's docstring: a partition that is not selected keeps its state, undecayed."""
  T, N = len(x), params["router_proj"]["kernel"].shape[1]
  readers = num_selected if num_readers is None else num_readers
  projected = lambda name: x @ params[f"{name}_proj"]["kernel"]
  low_rank = lambda name: projected(f"{name}_down") @ params[f"{name}_up_proj"]["kernel"]
  q, k, v = projected("q"), projected("k"), heads(phi(projected("v")), num_heads)
  streams = [(q, k), (q + low_rank("q"), k + low_rank("k"))]
  features = [inner_features(*(heads(z, num_heads) for z in pair), inner, phi) for pair in streams]
  shared = params.get("sparse_gates") is None
  gates = [inner_gates(params[name], x, num_heads, inner)
           for name in ("always_gates", "always_gates" if shared else "sparse_gates")]  # fmt: skip
  e = x @ params["router_proj"]["kernel"] + params["router_proj"].get("bias", 0.0)
  eta = np.exp(e) / np.exp(e).sum(-1, keepdims=True)

  _, H, K = features[0][0].shape
  y, states = np.zeros_like(v), np.zeros((N + 1, H, K, v.shape[-1]))
  for t in range(T):
    order = np.argsort(-eta[t])
    written, seen = order[:num_selected], order[:readers]
    write = {"uniform": np.full(N, 1 / num_selected), "eta": eta[t],
             "joint": eta[t] / eta[t][written].sum()}[gate]  # fmt: skip
    read = eta[t] if gate == "eta" else np.ones(N)
    for h in range(H):
      states[N, h] = step(states[N, h], features[0][1][t, h], v[t, h], gates[0], t, h, 1.0)
      y[t, h] = states[N, h].T @ features[0][0][t, h]
      for i in written:
        states[i, h] = step(states[i, h], features[1][1][t, h], v[t, h], gates[1], t, h, write[i])
      for i in seen:
        y[t, h] += read[i] * states[i, h].T @ features[1][0][t, h]
  y = root_mean_square_norm(y / np.sqrt(K), params["norm"]["scale"]).reshape(T, -1)
  if "g_proj" in params:
    y = y * silu(projected("g"))
  elif "gate_down_proj" in params:
    y = y * silu(low_rank("gate"))
  return y @ params["o_proj"]["kernel"]


def mom(params, x, *, num_heads, num_selected=2, inner="gla", shared_memory=True):
  """The memories of the routed tokens, weights renormalized, and one of all tokens."""
  T, M = len(x), params["router_proj"]["kernel"].shape[1]
  scores = x @ params["router_proj"]["kernel"]
  scores = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
  q = heads(x @ params["q_proj"]["kernel"], num_heads)

  def memory(k_kernel, v_kernel, gates):
    k, v = heads(x @ k_kernel, num_heads), heads(x @ v_kernel, num_heads)
    return *inner_features(q, k, inner, IDENTITY, softmax=False), v, gates

  blocks = [np.split(params[f"{name}_proj"]["kernel"], M, axis=1) for name in "kv"]
  memories = [memory(blocks[0][m], blocks[1][m],
                     inner_gates(params["memory_gates"], x, num_heads, inner, m, M))
              for m in range(M)]  # fmt: skip
  if shared_memory:
    kernels = (params[f"shared_{name}_proj"]["kernel"] for name in "kv")
    memories.append(memory(*kernels, inner_gates(params["shared_gates"], x, num_heads, inner)))
  H, K, V = q.shape[1], q.shape[2], memories[0][2].shape[-1]
  y, states = np.zeros((T, H, V)), np.zeros((len(memories), H, K, V))
  for t in range(T):
    chosen = np.argsort(-scores[t])[:num_selected]
    weights = dict(zip(chosen, scores[t][chosen] / scores[t][chosen].sum(), strict=True))
    for m in [*chosen, *range(M, len(memories))]:
      queries, keys, values, gates = memories[m]
      for h in range(H):
        states[m, h] = step(states[m, h], keys[t, h], values[t, h], gates, t, h, 1.0)
        y[t, h] += weights.get(m, 1.0) * states[m, h].T @ queries[t, h]
  y = root_mean_square_norm(y / np.sqrt(K), params["norm"]["scale"]).reshape(T, -1)
  return (y * silu(x @ params["g_proj"]["kernel"])) @ params["o_proj"]["kernel"]


def inner_features(q, k, inner, phi, softmax=True):
  if inner == "gla":
    return phi(q), np.exp(k) / np.exp(k).sum(-1, keepdims=True) if softmax else k
  unit = lambda z: z / np.sqrt(np.sum(z**2, axis=-1, keepdims=True) + 1e-6)
  return unit(phi(q)), unit(phi(k))


def inner_gates(params, x, num_heads, inner, m=0, memories=1):
  """(decay [T, H, K] or [T, H], rate [T, H] or None) of memory m."""
  if inner == "gla":
    ranks = np.split(x @ params["down_proj"]["kernel"], memories, axis=1)[m]
    bias = np.split(params["up_bias"], memories)[m]
    decay = sigmoid(ranks @ params["up_kernel"][m] + bias) ** (1 / 16)
    return heads(decay, num_heads), None
  step_size = softplus(x @ params["a_proj"]["kernel"] + params["a_proj"]["bias"])
  decay = np.exp(-np.exp(params["log_rate"]) * step_size)
  rate = sigmoid(x @ params["b_proj"]["kernel"])
  return tuple(np.split(z, memories, axis=1)[m] for z in (decay, rate))


def step(S, k, v, gates, t, h, weight):
  decay, rate = gates
  if rate is None:
    return decay[t, h][:, None] * S + weight * np.outer(k, v)
  rate = weight * rate[t, h]
  return decay[t, h] * (S - rate * np.outer(k, S.T @ k)) + rate * np.outer(k, v)
