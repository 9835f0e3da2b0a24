"""Tries the wheel with several versions of Python and jax: a small test of each kind of part.

    python scripts/versions.py                             # 3.12 to 3.14; jax 0.11.2 and the newest
    python scripts/versions.py --python 3.13 --jax 0.11.2 0.12.0.1 newest

Each pair gets a virtual environment of its own, with the wheel and its extra `train` from the index
of pip. A Python is found as pythonX.Y, by pyenv, or by uv, which may download it; one that is not
found is reported, and makes the exit code 1, as a test that fails does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import release

PYTHONS = ("3.12", "3.13", "3.14")
JAXES = ("0.11.2", "newest")
SMOKE = """
import platform
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
import lnssm_jax, train
from lnssm_jax import mixers, ops
from train import config

q, k, v = jax.random.uniform(jax.random.key(0), (3, 1, 20, 2, 8))
out, state = ops.linear_attention(q, k, v, log_decay=jnp.full((2,), -0.1))
same, _ = ops.linear_attention(q, k, v, log_decay=jnp.full((2,), -0.1), implementation="reference")
np.testing.assert_allclose(out, same, rtol=1e-4, atol=1e-5)

layer = mixers.GLA(16, num_heads=2, rngs=nnx.Rngs(0))
y, state = layer(jnp.ones((1, 10, 16)))
assert y.shape == (1, 10, 16) and bool(jnp.isfinite(y).all())

open("a.txt", "w").write("the quick river moves over the stone " * 50)
result = train.fit(config.Train(
  model=config.Model(dim=16, num_layers=1, num_heads=2, vocab_size=257, mixer="lrn"),
  optimizer=config.Optimizer(peak_lr=1e-3, final_lr=1e-4),
  data=config.Data(folder="d", tokenizer="bytes", train=("a",), sources={"a": "a.txt"}),
  mesh=config.Mesh(data=1),
  run_dir="run", seq_len=16, global_batch=2, steps=1, eval_every=1, checkpoint_every=1,
  sample=config.Sample(tokens=0),
))
assert result.step == 1
print("tried", platform.python_version(), "jax", jax.__version__)
"""


def interpreter(wanted: str) -> str | None:
  """Path of a Python of this version; None if there is none."""
  uv = shutil.which("uv")
  candidates = [[f"python{wanted}"]]
  pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
  candidates += [[str(path)] for path in sorted(pyenv.glob(f"{wanted}.*/bin/python"))]
  if uv:
    candidates.append([uv, "run", "--no-project", "--python", wanted, "python"])
  code = "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2])"
  for command in candidates:
    try:
      done = subprocess.run([*command, "-c", code], capture_output=True, text=True)
    except OSError:
      continue
    path, _, found = done.stdout.strip().rpartition(" ")
    if done.returncode == 0 and found == wanted:
      return path
  return None


def attempt(python: str, jax: str, wheel: Path, folder: Path) -> tuple[bool, str]:
  """Runs SMOKE in a new environment in `folder`; whether it passes, and the end of the output."""
  steps = [[python, "-m", "venv", folder / "venv"]]
  inside = folder / "venv" / "bin" / "python"
  pin = ["--upgrade", "jax"] if jax == "newest" else [f"jax=={jax}"]
  install = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
  steps.append([*install, f"lnssm_jax[train] @ {wheel.resolve().as_uri()}", *pin])
  steps.append([folder / "venv" / "bin" / "lnssm-train", "--version"])
  steps.append([inside, "-c", SMOKE])
  environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
  environment["JAX_PLATFORMS"] = "cpu"
  last = ""
  for step in steps:
    done = subprocess.run(step, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
      return False, (done.stdout + done.stderr)[-2000:]
    last = done.stdout.strip().rpartition("\n")[2]
  return True, last


def main() -> int:
  """Tries every pair; returns 1 if one failed or was not tried."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y")
  parser.add_argument("--jax", nargs="+", default=JAXES, metavar="VERSION", help="or newest")
  options = parser.parse_args()
  failed = False
  with tempfile.TemporaryDirectory() as folder:
    wheel = release.build(Path(folder) / "dist", None)[1]
    for number, wanted in enumerate(options.python):
      python = interpreter(wanted)
      for jax in options.jax:
        place = Path(folder) / f"{number}-{jax}"
        place.mkdir()
        missing = False, "this Python is not here"
        works, text = attempt(python, jax, wheel, place) if python else missing
        print(f"{'works ' if works else 'FAILED'}  Python {wanted}, jax {jax}: {text}", flush=True)
        failed |= not works
        shutil.rmtree(place)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
