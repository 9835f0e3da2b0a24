"""Golden references: values and gradients in float64 of the contract's checks, kept in files.

    make goldens

Computing them takes as long as all that they are compared with. An entry belongs to the source of
the op's reference, without comments, and to the numbers of its inputs: where one of them changes
the reference is computed again, and a test fails until the files are updated.

Numbers are rounded to float32, which adds 3e-8 to errors of which the contract allows 2e-6 or more;
for checks of narrow dtypes to its upper three bytes, which adds 8e-6 to errors of which it allows
1.5e-2. Files have them byte by byte, first the upper bytes of all, which compresses better.
"""

import ast
import functools
import hashlib
import io
import json
from pathlib import Path

import numpy as np

from lnssm_jax.ops import cases
from tests.ops import contract
from tests.ops.cases import SCANS
from tests.ops.checked import Check

FOLDER = Path(__file__).parent / "golden"
LONGEST = 130  # the files of longer cases would be large
# Of these the reference of long cases takes a minute, compiled as the tests compile.
LONG_CASES_KEPT = {"long_convolution"}


def code_of(name: str) -> str:
  """The reference of an op as Python understands it: no comments, docstrings and imports."""
  folder = Path(cases.__file__).parent / name
  file = folder / "reference.py"
  others = {"__init__.py", "api.py", "cases.py", "facts.py", "types.py"}
  forms = sorted(path for path in folder.glob("*.py") if path.name not in others)
  sources = [file] if file.exists() else forms
  trees = [ast.parse(path.read_text()) for path in sources]
  for node in (node for tree in trees for node in ast.walk(tree)):
    if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
      text = lambda x: isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)
      node.body = [x for x in node.body if not isinstance(x, ast.Import | ast.ImportFrom)]
      node.body = [x for x in node.body if not text(x)]
  return "\n".join(map(ast.dump, trees))


@functools.cache
def code_digest(name: str) -> bytes:
  return hashlib.sha256(code_of(name).encode()).digest()


def key_of(name: str, case, inputs: dict[str, np.ndarray]) -> str:
  """The digest of all that the reference's numbers depend on."""
  case = contract.reference_case(name, case)
  digest = hashlib.sha256(code_digest(name) + str(case).encode())
  for path in sorted(inputs):
    digest.update(f"{path}{inputs[path].shape}".encode() + inputs[path].tobytes())
  return digest.hexdigest()[:16]


def is_kept(name: str, check: Check) -> bool:
  return check.case.T <= LONGEST or name in LONG_CASES_KEPT


def rounding(check: Check) -> float:
  """Largest relative error of the numbers that are kept for a check."""
  return 2.0**-24 if np.dtype(check.dtype).itemsize >= 4 else 2.0**-16


def rounded(x: np.ndarray, check: Check) -> np.ndarray:
  """float32 numbers for the file, flat."""
  x = x.astype(np.float32).reshape(-1)
  if rounding(check) > 2.0**-24:
    x = ((x.view(np.uint32) + 0x80) & 0xFFFFFF00).view(np.float32)
  return x


def kept_checks(name: str) -> list[Check]:
  return [check for check in SCANS[name].checks if is_kept(name, check)]


@functools.cache
def entries(name: str) -> tuple[dict[str, list], np.ndarray]:
  """Contents of the file of an op: the arrays of each entry, and all their numbers."""
  path = FOLDER / f"{name}.npz"
  if not path.exists():
    return {}, np.zeros(0, np.float32)
  with np.load(path) as file:
    numbers = np.ascontiguousarray(file["bytes"].T).view(">f4")[:, 0]
    return json.loads(file["index"].tobytes()), numbers


def reference_of(name: str, case, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """`contract.reference_of`, from the file if it has it."""
  found = kept(name, key_of(name, case, inputs))
  return contract.reference_of(name, case, inputs) if found is None else found


def kept(name: str, key: str) -> dict[str, np.ndarray] | None:
  index, numbers = entries(name)
  if key not in index:
    return None
  start, arrays = index[key]
  found = {}
  for path, shape in arrays:
    size = int(np.prod(shape))
    found[path] = numbers[start : start + size].reshape(shape).astype(np.float64)
    start += size
  return found


def write(name: str) -> Path:
  """Computes and writes the file of an op."""
  index, numbers, start = {}, [], 0
  for check in kept_checks(name):
    inputs, _ = contract.inputs_of(name, check)
    key = key_of(name, check.case, inputs)
    if key in index:
      continue
    want = contract.reference_of(name, check.case, inputs)
    index[key] = start, [(path, x.shape) for path, x in want.items()]
    numbers += [rounded(x, check) for x in want.values()]
    start += sum(x.size for x in want.values())
  FOLDER.mkdir(exist_ok=True)
  text = np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8)
  buffer = io.BytesIO()
  bytes_of_each = np.concatenate(numbers).astype(">f4").view(np.uint8).reshape(-1, 4)
  np.savez_compressed(buffer, index=text, bytes=np.ascontiguousarray(bytes_of_each.T))
  path = FOLDER / f"{name}.npz"
  path.write_bytes(buffer.getvalue())
  return path


def main() -> None:
  for name in SCANS:
    path = write(name)
    print(f"{path.relative_to(FOLDER.parents[2])}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
  main()
