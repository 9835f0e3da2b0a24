"""LCSM written out from its code, one token at a time, with the state [k, D], for x [T, D]."""

import numpy as np

from tests.mixers.references.common import sigmoid
from tests.mixers.references.positional_attention import layer_norm

elu = lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
ACTIVATIONS = (
  lambda x: x,
  lambda x: np.maximum(x, 0),
  sigmoid,
  lambda x: 1 + elu(x),
  lambda x: x * sigmoid(x),
  elu,
  lambda x: np.maximum(x, 0) ** 2,
  lambda x: x**2,
)
EXCHANGED = {"2": "5", "3": "4", "4": "3", "5": "2"}


def slopes(n):
  """ALiBi's, of n heads."""
  power = 2 ** int(np.floor(np.log2(n)))
  of = lambda n: [2 ** (-8 * (h + 1) / n) for h in range(n)]
  return np.array(of(power) + of(2 * power)[::2][: n - power])


def lcsm(params, x, *, code="1-1-1-4", tau=16, learned=True, coloring="source"):
  e, o, s, a = ("1", "ssm", "1", "0") if code == "0" else code.split("-")
  o = EXCHANGED.get(o, o) if coloring == "exchanged" else o
  act, W = ACTIVATIONS[int(a)], lambda name: params[f"{name}_proj"]["kernel"]
  gate = lambda u: sigmoid(u) ** (1 / tau)
  D = x.shape[1]
  k = (W("e") if e == "1" else params["e_weight"].T).shape[1]
  constant = lambda *shape: (
    gate(params["decay_weight" if len(shape) == 2 else "decay_logit"])
    if learned
    else np.exp(-slopes(np.prod(shape)).reshape(shape))
  )
  theta = params["theta"] if "theta" in params else 10000 ** (-2 * np.arange(k) / D)
  unit = lambda z: z / np.sqrt(z @ z + 1e-6)

  def oscillation(u, e_t):
    return {
      "0": lambda: constant(k, D),
      "1": lambda: np.outer(gate(u @ W("a")), gate(u @ W("c"))),
      "2": lambda: gate(u @ W("c"))[None],
      "3": lambda: gate(u @ W("a"))[:, None],
      "4": lambda: constant(k)[:, None],
      "5": lambda: constant(D)[None],
      "6": lambda: gate((u @ W("a"))[:, None] * params["decay_weight"]),
      "7": lambda: gate((u @ W("c"))[None] * params["decay_weight"]),
      "8": lambda: gate(np.outer(params["decay_logit"], u @ W("c"))),
      "9": lambda: gate(np.outer(u @ W("a"), params["decay_logit"])),
      "10": lambda: 1,
      "11": lambda: np.exp(1j * theta)[:, None],
      "m3": lambda: 1 - e_t,
    }[o]()

  m, ys = np.zeros((k, D), complex), []
  for u in x:
    e_t = act(u @ W("e"))[:, None] if e == "1" else act(params["e_weight"])
    s_t = act(u @ W("s"))[:, None] if s == "1" else act(params["s_weight"])
    i_t = u @ W("i")
    if o in ("m1", "m2"):
      e_t = unit(e_t[:, 0])[:, None]
      erase = e_t[:, 0] if o == "m1" else unit(act(u @ W("f")))
      m = m - e_t * (erase @ m)
    elif o == "ssm":
      step = np.log1p(np.exp(u @ W("rate") @ W("dt")))
      m, i_t = np.exp(-step * np.exp(params["a_log"]).T) * m, step * i_t
    else:
      m = oscillation(u, e_t) * m
    m = m + e_t * i_t
    ys.append((s_t * m.real).sum(0))
  return layer_norm(params, np.stack(ys)) @ W("o")
