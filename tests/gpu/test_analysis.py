"""Answers of `analysis` on a Hopper GPU and on a CPU, of models in float32: `make test-gpu`.

Kernels multiply bfloat16 only, so both run in XLA. The same file, run as a program, writes the
CPU's answers.
"""

import os
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lnssm_jax import analysis
from lnssm_jax.models import LanguageModel

pytestmark = pytest.mark.gpu

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 192))
LIMIT = 2e-3  # of relative errors


def model(mixer, **options):
  """Its start, moved by noise: an LNSSM starts with equal scores."""
  sizes = {"vocab_size": 64, "dim": 128, "num_layers": 2, "num_heads": 2}
  built = LanguageModel(**sizes, mixer=mixer, **options, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(built, nnx.Param)
  random = np.random.default_rng(1)
  moved = jax.tree.map(lambda p: p + jnp.float32(0.02 * random.normal(size=p.shape)), params)
  return nnx.merge(graphdef, moved)


def answers():
  """All that has numbers, by name. Of receptive fields, the mean: a count may differ by one."""
  lnssm, gla, sse = model("lnssm"), model("gla"), model("sse", mixer_options={"num_partitions": 4})
  documents = [TOKENS[0], TOKENS[1, :70]]
  states = analysis.document_states(gla, documents)
  scores = analysis.scores(lnssm, TOKENS, layer=1)
  found = {
    "half_lives": analysis.half_lives(gla, TOKENS),
    "decays": analysis.decays(sse, TOKENS),
    "fields": [jnp.mean(field) for field in analysis.receptive_fields(gla, TOKENS)],
    "states": states,
    "entropy": [analysis.singular_value_entropy(S["recurrent"]) for S in states],
    "rank": [analysis.effective_rank(S["recurrent"]) for S in states],
    "cosine": [analysis.row_cosine(S["recurrent"]) for S in states],
    "norms": analysis.state_norms(gla, TOKENS, every=64),
    "influence": analysis.boundary_influence(
      gla, TOKENS[:, :90], TOKENS[:, 90:], reset=False
    )._asdict(),
    "scores": scores.log[:, :, -1],
    "laws": [law._asdict() for law in analysis.score_laws(scores)],
    "histogram": analysis.histogram(scores.weights(), jnp.logspace(-4, 0, 9), scores.visible).sum(
      -2
    ),
    "routing": [layer._asdict() for layer in analysis.routing(sse, TOKENS)],
    "recall": analysis.recall(lnssm, TOKENS, TOKENS),
  }
  return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(found)}


def test_answers_are_those_of_a_cpu():
  with tempfile.NamedTemporaryFile(suffix=".npz") as file:
    command = [sys.executable, "-m", "tests.gpu.test_analysis", file.name]
    cpu = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    with cpu, jax.default_matmul_precision("highest"):
      got = answers()
    assert cpu.returncode == 0
    want = np.load(file.name)
  assert got.keys() == set(want.files)
  errors = {}
  for name, leaf in got.items():
    a, b = np.float64(leaf), np.float64(want[name])
    errors[name] = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6)
  assert max(errors.values()) < LIMIT, sorted(errors.items(), key=lambda item: -item[1])[:5]


def test_document_that_was_reset_leaves_nothing():
  influence = analysis.boundary_influence(model("gla"), TOKENS[:, :90], TOKENS[:, 90:], reset=True)
  assert not np.any(influence.output)
  assert not np.any(influence.state)


if __name__ == "__main__":
  with jax.default_matmul_precision("highest"):
    np.savez(sys.argv[1], **{name: np.asarray(leaf) for name, leaf in answers().items()})
