"""The quick half of `make records`: some values and one program of each family of kernels."""

import jax
import numpy as np
import pytest

from lnssm_jax.mixers import MIXERS
from tests.oracle import command, programs, values

QUICK_MIXERS = ["gla", "rg_lru"]
QUICK_PROGRAMS = [
  "cross_entropy/pallas",
  "norms/layer/pallas",
  "forward/linear_attention",
  *(f"forward/{case}" for case in programs.FORWARD),
]


@pytest.fixture(scope="module")
def records():
  return command.read()


@pytest.mark.parametrize(
  ("kind", "name"),
  [
    *(("mixers", name) for name in QUICK_MIXERS),
    *(("programs", name) for name in QUICK_PROGRAMS),
  ],
)
def test_results_are_those_recorded(records, kind, name):
  lines, notes = command.compare(kind, [name], records)
  assert lines == [], notes


def test_records_have_every_result(records):
  for kind, makers in command.KINDS.items():
    assert set(records[kind]["values"]) == set(makers()), kind
  assert set(records["mixers"]["values"]) == set(MIXERS)


def test_entry_shows_the_last_bit_and_where_bits_differ_by_kind_the_size_of_a_change():
  x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
  y = x.copy()
  y[2, 4] = np.nextafter(y[2, 4], np.float32(9))
  same, other = values.entry(x), values.entry(y)
  assert command.differences("x", same, values.entry(x.copy()), True) == []
  assert len(command.differences("x", same, other, True)) == 1
  assert command.differences("x", same, other, False) == []
  y[2, 4] += 0.1
  assert len(command.differences("x", same, values.entry(y), False)) == 1
  assert len(command.differences("x", same, values.entry(x[::-1]), False)) == 1
  assert len(command.differences("x", {"a": same, "b": same}, {"a": same}, True)) == 1
  assert command.differences("x", ["0x1p+0"], ["0x1.0001p+0"], False) == []
  assert len(command.differences("x", ["0x1p+0"], ["0x1.1p+0"], False)) == 1


def test_records_of_another_jax_or_cpu_are_compared_within_a_bound_or_not_at_all(monkeypatch):
  here = command.environment()
  records = {
    kind: {"commit": "1234567", "environment": here | change, "values": {"a": want}}
    for kind, change, want in [
      ("losses", {"python": "2.7"}, ["0x1p+0"]),
      ("mixers", {"cpu": "another"}, {"out": ["0" * 12, 2.0, 0.5]}),
      ("programs", {"jax": "0.1"}, "0" * 16),
    ]
  }
  makers = {"losses": ["0x1p+9"], "mixers": {"out": ["1" * 12, 2.0001, 0.5]}, "programs": "1" * 16}
  for kind, got in makers.items():
    monkeypatch.setitem(command.KINDS, kind, lambda got=got: {"a": lambda: got})
    lines, notes = command.compare(kind, ["a"], records)
    assert lines == []
    assert {"losses": "not compared", "programs": "not compared"}.get(kind, "within") in notes[0]
  records["mixers"]["environment"] = here
  assert len(command.compare("mixers", ["a"], records)[0]) == 1
  records["programs"]["environment"] = here
  assert len(command.compare("programs", ["a"], records)[0]) == 1


def test_program_hash_ignores_names_and_sees_operations():
  def one(first, second):
    return jax.jit(lambda y: y * 2)(first) + second

  def two(a, b):
    return jax.jit(lambda value: value * 2)(a) + b

  def three(a, b):
    return jax.jit(lambda value: value * 2)(a) - b

  shape = jax.ShapeDtypeStruct((3,), np.float32)
  of = lambda function: programs.hashes(programs.lowered(function, "chunked", shape, shape))
  assert of(one) == of(two) != of(three)
