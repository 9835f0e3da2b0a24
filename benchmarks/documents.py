"""Times of the kernels with packed documents, in units of those with one document per row.

    python -m benchmarks.documents --out docs/documents.csv
    python -m benchmarks.documents --only "delta_rule gated" channel-step --sizes B=1,T=8192

Documents have about 500 tokens. Softmax attention, where they save work, is in
`benchmarks.scan_kernels`. A time is printed only next to errors within the limit, as there.
"""

import argparse
from pathlib import Path
from typing import Any

import jax

from benchmarks import csv_rows, kernel_cases, scan_kernels, tune
from benchmarks.scan_kernels import Case

FIELDS = (
  "case", "sizes", "forward_ms", "both_ms", "documents_forward_ms", "documents_both_ms",
  "forward_x", "both_x", "error_out", "error_gradient", "note",
)  # fmt: skip
_STARTED = {name for name, case in kernel_cases.CASES.items() if case.initial_state}
CASES = {
  name: case
  for name, case in (tune.CASES["linear_attention"] | scan_kernels.CASES).items()
  if name not in _STARTED and name != "attention" and "documents" not in name
}


def with_documents(case: Case) -> Case:
  """The case with `segment_ids`."""
  steps = next(name for name, axes in case.axes.items() if axes.startswith("BT"))

  def call(*, implementation, **arrays):
    ids = scan_kernels.document_ids(*arrays[steps].shape[:2])
    return case.call(**arrays, segment_ids=ids, implementation=implementation)

  return case._replace(call=call)


def row_of(name: str, sizes: scan_kernels.Sizes, who: str, options: dict[str, int]) -> dict:
  """The columns of one case."""
  row: dict[str, Any] = {"case": name, "sizes": " ".join(f"{a}{n}" for a, n in sizes.items())}
  for prefix, case in (("", CASES[name]), ("documents_", with_documents(CASES[name]))):
    sets = [scan_kernels.make_inputs(case, sizes, seed) for seed in range(scan_kernels.SETS)]
    arrays = {n: x for n, x in sets[0].items() if n != "cotangent"}
    want = scan_kernels.reference(case, arrays, sets[0]["cotangent"])
    found = scan_kernels.measure(case, sets, want, who, **options)
    row |= {f"{prefix}{time}": found[time] for time in ("forward_ms", "both_ms")}
  row |= {name: found[name] for name in ("error_out", "error_gradient")}  # with documents
  for time in ("forward", "both"):
    alone, packed = row[f"{time}_ms"], row[f"documents_{time}_ms"]
    if isinstance(alone, float) and isinstance(packed, float):
      row[f"{time}_x"] = f"{packed / alone:.3f}"
  return {n: f"{x:.4f}" if isinstance(x, float) else x for n, x in row.items()}


def main(arguments=None) -> list[dict[str, Any]]:
  """Measures, printing rows as they come; returns them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
  parser.add_argument("--sizes", type=scan_kernels.parse_sizes, default={}, metavar="B=1,T=8192",
                      help="other sizes of these axes")  # fmt: skip
  parser.add_argument("--implementation", default="pallas")
  parser.add_argument("--calls", type=int, default=20, help="calls in a timed group")
  parser.add_argument("--groups", type=int, default=7)
  parser.add_argument("--out", type=Path, help="a CSV file")
  args = parser.parse_args(arguments)
  print(f"device: {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
  rows: list[dict[str, Any]] = []
  for name in args.only:
    sizes = {axis: args.sizes.get(axis, size) for axis, size in CASES[name].sizes.items()}
    try:
      options = {"calls": args.calls, "groups": args.groups}
      row = row_of(name, sizes, args.implementation, options)
    except Exception as reason:  # out of memory, a compiler's error: the other rows go on
      row = {"case": name, "note": " ".join(f"{type(reason).__name__}: {reason}".split())[:300]}
    csv_rows.add(rows, {field: row.get(field, "") for field in FIELDS}, FIELDS, args.out)
  return rows


if __name__ == "__main__":
  main()
