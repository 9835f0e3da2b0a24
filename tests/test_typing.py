"""Types that checkers and editors see: exports, models, Linen faces."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

PROGRAM = """
from typing import assert_type

import jax
import jax.numpy as jnp
from flax import nnx

import lnssm_jax
from lnssm_jax.models.layers import LayerStates
from lnssm_jax.ops import LinearAttentionState

x, tokens = jnp.zeros((1, 2, 8)), jnp.zeros((1, 2), int)
out, state = lnssm_jax.ops.linear_attention(x[None], x[None], x[None])
assert_type(out, jax.Array)
assert_type(state, LinearAttentionState)

mixer = lnssm_jax.mixers.HGRN2(8, num_heads=2, rngs=nnx.Rngs(0))
assert_type(mixer(x), tuple[jax.Array, LinearAttentionState])
assert_type(mixer.init_state(2), LinearAttentionState)

model = lnssm_jax.models.LanguageModel(vocab_size=5, dim=8, num_layers=1, rngs=nnx.Rngs(0))
assert_type(model(tokens), tuple[jax.Array, LayerStates])
assert_type(model.hidden(tokens), tuple[jax.Array, LayerStates])
assert_type(model.init_state(2), LayerStates)
assert_type(model.logits(x), jax.Array)

face = lnssm_jax.linen.HGRN2(8, num_heads=2, lower_bound="none", name="layer")
assert_type(face.num_heads, int)
assert_type(face.init_state(2), LinearAttentionState)
assert_type(face(x, None), tuple[jax.Array, LinearAttentionState])
"""
WRONG = {
  "lnssm_jax.linen.GLA(8, heads=2)": "unexpected-keyword",
  "lnssm_jax.linen.GLA(8)": "missing-argument",
  "lnssm_jax.linen.Mamba9(8)": "missing-attribute",
  "lnssm_jax.opps": "missing-attribute",
  "model('text')": "bad-argument-type",
}


def check(path: Path, source: str) -> str:
  path.write_text(source)
  (path.parent / "pyrefly.toml").touch()  # the default settings
  command = [sys.executable, "-m", "pyrefly", "check", str(path), "--search-path", str(ROOT)]
  command += ["--python-interpreter-path", sys.executable]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=path.parent)
  return done.stdout + done.stderr


def test_types_of_the_library_are_visible(tmp_path):
  assert "0 errors" in (output := check(tmp_path / "right.py", PROGRAM)), output


def test_wrong_calls_are_type_errors(tmp_path):
  output = check(tmp_path / "wrong.py", PROGRAM + "\n".join(WRONG))
  lines = {int(line) for line in re.findall(r"wrong\.py:(\d+):", output)}
  first = len(PROGRAM.splitlines()) + 1
  assert lines == set(range(first, first + len(WRONG))), output
  assert {kind for kind in WRONG.values() if f"[{kind}]" not in output} == set(), output


def test_stub_of_linen_is_up_to_date():
  want = runpy.run_path(str(ROOT / "scripts" / "linen_stub.py"))["stub"]()
  hint = "run: python scripts/linen_stub.py > lnssm_jax/linen.pyi"
  assert (ROOT / "lnssm_jax" / "linen.pyi").read_text() == want, hint
