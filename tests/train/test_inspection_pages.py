"""Texts, pages and plots of `lnssm-train inspect`."""

import re

import numpy as np
import pytest

from train.inspection import half_lives, page, text, ticks

ROW = {"dtype": "float32", "largest": 0.5, "norm": 1.5, "rms": 0.25, "near_zero": 0.125}


FOUND = {
  "folder": "runs/a",
  "kind": "run",
  "step": 1200,
  "settings": {
    "model": {"dim": 16, "tie": False, "mixer": ["gla", "lrn"], "remat": None},
    "optimizer": {f"setting_{n}": n / 3 for n in range(9)},
    "seed": 0,
    "watch": [],
  },
  "data": {"t": {"documents": 3, "tokens": 4000, "bytes": None}, "u": None},
  "steps": [{"step": 1000, "state": "complete"}, {"step": 1200, "state": "DAMAGED: a"}],
  "metrics": [{"kind": "train", "loss": 0.123456789}],
  "curves": {
    "loss": [[n, 3 - n / 50] for n in range(101)],
    "validation": {"v": [[50, 1.5], [80, 1.25], [100, 1.75]]},
  },
  "total": 1234,
  "parameters": [
    ROW | {"name": "a<b>.kernel", "shape": [2, 3], "size": 6, "non_finite": 0},
    ROW | {"name": "c", "shape": [], "size": 1, "rms": 0.125, "non_finite": 2000},
  ],
  "half_lives": [
    {"layer": n, "mixer": "GLA", "channels": 4, "shortest": 0.5, "median": 12.5, "longest": None,
     "slowest_head": 1, "quantiles": [[0, 0.5], [50, 12.5], [100, 1e6]]}
    for n in range(25)
  ] + [{"layer": 25, "mixer": "Attention", "channels": 0}
       | dict.fromkeys(("shortest", "median", "longest", "slowest_head"))],
  "difference": {
    "to": {"folder": "runs/b", "kind": "run", "step": 7},
    "settings": {"model.dim": [16, 32]},
    "parameters": [
      {"name": "c", "norm": 2.0, "relative": 0.25, "largest": 0.75, "changed": 0.5},
      {"name": "d", "norm": 0.0, "relative": None, "largest": 0.0, "changed": 0.0},
    ],
    "other_shape": ["e", "f"],
    "only_here": [],
    "only_there": ["g"],
  },
}  # fmt: skip


def test_text_says_what_the_report_says():
  found = list(text.lines(FOUND))
  assert max(map(len, found)) <= 100
  assert found[:2] == ["run  runs/a, step 1,200", "model        dim=16 tie=False mixer=gla,lrn"]
  assert found[4:11] == [
    "run          seed=0",
    "data         t: 3 documents, 4,000 tokens",
    "data         u: its files are elsewhere",
    "checkpoint   1,000: complete",
    "checkpoint   1,200: DAMAGED: a",
    "metrics      kind train, loss 0.123457",
    "",
  ]
  words = " ".join(found[2:4]).split()
  assert words == ["optimizer", *(f"setting_{n}={n / 3:.6g}" for n in range(9))]
  start = found.index("validation   v: 1.7500 at step 100, best 1.2500")
  assert found[start + 1 : start + 9] == [
    "",
    "parameter    dtype     shape       norm        rms    largest  near zero",
    "a<b>.kernel  float32   2 x 3        1.5       0.25        0.5     12.5 %",
    "c            float32   1            1.5      0.125        0.5     12.5 %  2,000 NOT FINITE",
    "1,234 numbers in 2 parameters",
    "",
    "half-lives of the state, tokens",
    "layer  mixer       shortest     median    longest  slowest head",
  ]
  assert "    0  GLA              0.5       12.5    forever             1" in found
  assert "   25  Attention  no decay" in found
  assert found[found.index("difference to run runs/b, step 7") :] == [
    "difference to run runs/b, step 7",
    "setting      model.dim: 16 here, 32 there",
    "other shape  e, f",
    "only there   g",
    "parameter       norm   relative    largest    changed",
    "c                  2       0.25       0.75     50.0 %",
    "d                  0          -          0      0.0 %",
  ]


def test_page_says_what_the_report_says():
  whole = page.page(FOUND)
  rows = re.findall("<tr>(.*?)</tr>", whole)
  cells = [re.sub("<[^>]*>", "", row.replace("</td>", "|").replace("</th>", "|")) for row in rows]
  assert {
    "run|seed=0|",
    "1,000|complete|",
    "1,200|DAMAGED: a|",
    "t|3|4,000|0|",
    "kind train, loss 0.123457|",
    "a&lt;b&gt;.kernel|float32|2 × 3|1.5|0.25 |0.5|12.5 %|0|",
    "c|float32|1|1.5|0.125 |0.5|12.5 %|2,000|",
    "24|GLA|0.5|12.5|forever|1|",
    "25|Attention|no decay||||",
    "c|2|0.25|0.75|50.0 %|",
    "d|0|-|0|0.0 %|",
  } <= set(cells)
  assert re.findall("width:(.*?)px'", whole) == ["80.0", "40.0"]  # in proportion to the rms
  for line in ("model.dim: 16 here, 32 there", "other shape: e, f", "only there: g"):
    assert f"<p>{line}</p>" in whole
  assert "only here" not in whole and "Difference to runs/b, step 7" in whole
  layers = [int(n) for n in re.findall("layer ([0-9]+)</text>", whole)]
  assert layers == [*range(0, 25, 3)]  # evenly, of at most 12


def test_page_draws_lines_from_low_to_high():
  places = lambda svg: [
    [tuple(map(float, pair.split(","))) for pair in points.split()]
    for points in re.findall("points='(.*?)'", svg)
  ]
  falling, rising = places(page.lines({"a": FOUND["curves"]["loss"], "b": [[0, 1.5], [100, 2]]}))
  assert falling[0] == (64, 10) and falling[-1] == (730, 226)  # the corners; y goes down
  assert rising[0][1] > rising[1][1] and [x for x, _ in rising] == [64, 730]
  svg = page.lines({"a": [[0, 1.0], [50, 10.0], [100, 100.0]]}, log=True)
  ((_, low), (_, middle), (_, high)) = places(svg)[0]
  assert low - middle == middle - high == pytest.approx(108)
  labels = re.findall(">([^<>]+)</text>", svg)
  assert labels[:7] == ["1", "2", "5", "10", "20", "50", "100"]
  assert labels[7:13] == ["0", "20", "40", "60", "80", "100"]
  # A short run: its first losses are its largest.
  ((first, second, last),) = places(page.lines({"a": [[5, 5.21], [10, 4.93], [15, 4.9]]}, log=True))
  assert first == (64, 10) and second[1] > 200 and last == (730, 226)


@pytest.mark.parametrize(
  "low, high, log, found",
  [
    (4.9, 5.21, False, [4.9, 5.0, 5.1, 5.2]),
    (4.9, 5.21, True, [4.9, 5.0, 5.1, 5.2]),
    (14, 31, False, [15, 20, 25, 30]),
    (-0.3, 0.7, False, [-0.2, 0.0, 0.2, 0.4, 0.6]),
    (3, 4000, True, [10, 100, 1000]),
    (1e-6, 1e6, True, [1e-6, 1e-4, 1e-2, 1, 100, 1e4, 1e6]),
    (2.0, 2.0, True, [2.0]),
  ],
)
def test_ticks_are_round_and_inside(low, high, log, found):
  assert ticks.round_numbers(low, high, log=log) == pytest.approx(found)


def test_plot_draws_a_line_from_high_to_low():
  *rows, below = text.plot([[x, 10 - x] for x in range(11)], width=4, height=2)
  assert below.endswith("step 0 to 10")
  dots = [[ord(c) - 0x2800 for c in row.split("┤")[1]] for row in rows]
  assert dots[0][0] & 0x01 and dots[1][-1] & 0x80  # top left and bottom right
  assert not any(dots[1][:1])
  *rows, _ = text.plot([[5, 5.21], [10, 4.93], [15, 4.9]], width=3, height=4)
  assert rows[0] == "       5.2 ┤⠁" and rows[3].startswith("       4.9 ┤")
  assert list(text.plot([[5, 1.0]]))  # one point has no range


def test_half_lives_without_end_are_none_and_a_large_number_in_quantiles():
  row = half_lives._row(3, "X", np.array([[[2.0, 8.0, np.inf]], [[16.0, 32.0, 32.0]]]))
  assert (row["layer"], row["mixer"], row["channels"], row["slowest_head"]) == (3, "X", 6, 1)
  assert (row["shortest"], row["median"], row["longest"]) == (2, 24, None)
  assert row["quantiles"][10] == [50, 24]
  assert row["quantiles"][0] == [0, 2] and row["quantiles"][-1] == [100, 1e6]
  assert [share for share, _ in row["quantiles"]] == [*range(0, 101, 5)]
