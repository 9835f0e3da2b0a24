"""Expansion of the state of a trained `SSE`: more partitions, the same function."""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from lnssm_jax.mixers.common.checks import check_positive
from lnssm_jax.mixers.common.routing import check_selected
from lnssm_jax.ops.core.checks import is_number

# The values of the constructor that the expansion reads.
DEFAULTS: dict[str, Any] = {
  "num_partitions": 4,
  "num_selected": 1,
  "num_readers": None,
  "gate": "eta",
  "eta_scale": 1.0,
  "inner": "gla",
  "balance": 0.01,
  "router_bias": False,
}


_MOST_PARTITIONS = 2**20


def expand_partitions(
  params: Any,
  options: Mapping[str, Any],
  *,
  num_partitions: int,
  num_selected: int | None = None,
  margin: float = 2.0,
) -> tuple[Any, dict[str, Any]]:
  r"""Parameters and options of an `SSE` with (N, k) as one with (N', k'), which has its losses.

      params, options = expand_partitions(params, {"num_partitions": 4}, num_partitions=8)

  k' = m k, and N' >= m N. Each partition becomes m copies, which have its column of the router and
  so are selected together. The other N' - m N are its children, c_i of partition i, as evenly as
  possible: they have its column and a lower bias, e_child = e_i - margin - log(c_i / c), where c is
  the least positive c_i. They are empty at first and start to be used where training, the balance
  loss among it, raises their logits. k' = k is m = 1: the old partitions and children.

  With epsilon = exp(-margin), the softmax has the denominator Z d, with d = m + c epsilon, where it
  was Z. What follows:

    gate "uniform", "joint": each copy is written with 1 / m of the weight, and their sum is what
      their partition was. d cancels.
    gate "eta": w and r are 1 / d of what they were, and m copies give m / d^2 of the product:
      `eta_scale` is multiplied by d / sqrt(m).
    balance loss: p_i is 1 / d of what it was, the f_i of copies are what they were, those of
      children 0; (N' / k') sum p_i f_i is N' / (d N) times what it was, and `balance` is multiplied
      by the inverse. So the loss does not jump, and its gradient with respect to the other
      parameters stays; the coefficient of the options before, given again, pulls harder.

  These are equalities, up to rounding, where a token that selects and reads one partition (k = 1,
  one reader) is expanded to N' = m N, or to N' >= (m + 1) N. Else:

    k or num_readers = S > 1: a child displaces another partition at the tokens where some selected
      partition leads the S-th by more than `margin`; the others are computed as before. A margin
      above the largest e_(1) - e_(S) displaces none.
    m N < N' < (m + 1) N, gate "eta" or the balance loss: only some partitions have a child, and d
      depends on the token, between m and m + epsilon. The mean over partitions is taken; the sum
      over the partitions then is wrong by a factor between (1 + epsilon / m)^(-2) and
      (1 + epsilon / m)^2, 0.78 and 1.29 for the default and m = 1. Other gates are exact.

  A small margin lets children be selected sooner. Copies stay equal until something tells them
  apart: add a little noise to the router's kernels; the loss then changes by as little.

  Args:
    params: a nested dictionary of the parameters of a mixer, or of a model with such mixers, whose
      leaves may have a leading axis of layers: the router of every SSE is expanded.
    options: those of the mixer, as given to its constructor (`mixer_options` of a model).
    num_partitions: N'.
    num_selected: k'; None means k. `num_readers` is multiplied by m too.
    margin: by how much the logit of an only child is below that of its partition, above 0.

  Returns:
    (new parameters, new options). With children, `router_bias` is set.

  Raises:
    ValueError: k' is not a multiple of k, N' is less than m N, `margin` is not positive, there is
      no router of N columns in `params`, or the recurrence inside is the delta rule, which is not
      linear in its rate, and m > 1.
  """
  new = DEFAULTS | dict(options)
  N, k = new["num_partitions"], new["num_selected"]
  check_selected("num_selected", k, "num_partitions", N)
  more, chosen = check_positive("num_partitions", num_partitions), num_selected
  chosen = k if chosen is None else check_positive("num_selected", chosen)
  if more > _MOST_PARTITIONS:
    raise ValueError(f"num_partitions={more:,} must be at most {_MOST_PARTITIONS:,}.")
  times = chosen // k
  if chosen % k or more < times * N:
    few = ", ".join(f"({m * N} or more, {m * k})" for m in (1, 2, 3))
    raise ValueError(
      f"num_partitions={more}, num_selected={chosen}: only a multiple m k of the k={k} partitions "
      f"that a token selects, of at least m N, keeps the function; from (N, k) = ({N}, {k}) use "
      f"{few}, ..."
    )
  if not is_number(margin) or not 0 < margin < math.inf:
    raise ValueError(
      f"margin={margin!r} must be a positive number, such as 2: with 0 a new partition would take "
      "tokens from its own."
    )
  if times > 1 and new["inner"] != "gla":
    raise ValueError(
      f"inner={new['inner']!r}: copies that are each written at a lower rate are not what one "
      f"partition of the delta rule is; use num_selected={k}, or inner='gla'."
    )
  children, shifts = _children(N, more - times * N, float(margin))
  columns = [i for i in range(N) for _ in range(times)] + children
  shift = jnp.asarray([0.0] * (times * N) + shifts)
  params = _expanded(params, N, columns, shift if children or new["router_bias"] else None)

  mean = min(len(children) / N, max(len(children) // N, 1))  # c, or the mean of c_i that are 0 or 1
  d = times + mean * math.exp(-margin)
  new |= {"num_partitions": more, "num_selected": chosen}
  new["router_bias"] = new["router_bias"] or bool(children)
  new["balance"] *= d * N / more
  if new["num_readers"] is not None:
    new["num_readers"] *= times
  if new["gate"] == "eta":
    new["eta_scale"] *= d / math.sqrt(times)
  return params, new


def _children(N: int, count: int, margin: float) -> tuple[list[int], list[float]]:
  """(the partition that each child copies, by how much its bias is changed)."""
  of = [child % N for child in range(count)]
  least = max(count // N, 1)
  return of, [-margin - math.log(of.count(i) / least) for i in of]


def _expanded(params: Any, N: int, columns: list[int], shift: Any) -> Any:
  """Parameters with the routers' chosen columns, and with a bias unless `shift` is None."""
  found = []

  def walk(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
      return tree
    tree = {name: walk(branch) for name, branch in tree.items()}
    if "router_proj" in tree and "always_gates" in tree:  # not those of other mixers
      router = dict(tree["router_proj"])
      kernel = router["kernel"]
      if kernel.shape[-1] != N:
        raise ValueError(
          f"the router has a kernel of shape {kernel.shape}, but the options num_partitions={N}; "
          "give the options that the mixer was constructed with."
        )
      found.append(router)
      router["kernel"] = kernel[..., jnp.asarray(columns)]
      if shift is not None:
        bias = router.get("bias", jnp.zeros_like(kernel[..., 0, :]))
        router["bias"] = bias[..., jnp.asarray(columns)] + shift.astype(bias.dtype)
      tree["router_proj"] = router
    return tree

  params = walk(params)
  if not found:
    raise ValueError("params have no router_proj of an SSE; give those of one, or of a model.")
  return params
