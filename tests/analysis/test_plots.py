"""Figures have what they show, and ask for matplotlib where it is missing."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from lnssm_jax import analysis

plots = analysis.plots


@pytest.fixture
def axes(monkeypatch):
  pytest.importorskip("matplotlib", reason="the extra `train` is not installed")
  monkeypatch.setenv("MPLBACKEND", "Agg")
  from matplotlib.figure import Figure

  return Figure().add_subplot()


def test_half_lives_are_drawn_sorted(axes):
  plots.half_lives([jnp.asarray([[3.0, 1], [jnp.inf, 2]]), None, jnp.ones((1, 2))], axes)
  lines = axes.get_lines()
  assert [line.get_label() for line in lines] == ["layer 0", "layer 2"]
  np.testing.assert_array_equal(lines[0].get_ydata(), [1, 2, 3, 1e6])
  axes.clear()
  plots.half_lives([jnp.array([16.5, 19.0])], axes)  # less than a decade
  axes.figure.draw_without_rendering()
  low, high = axes.get_ylim()
  shown = [x.get_text() for x in axes.get_yticklabels() if low <= x.get_position()[1] <= high]
  assert shown in (["17", "18", "19"], ["16.5", "17", "17.5", "18", "18.5", "19"])


def test_scores_are_drawn_where_they_are_visible(axes):
  visible = jnp.tril(jnp.ones((1, 1, 3, 3), bool))
  value = jnp.where(visible, 2.0, 0.0)
  scores = analysis.Scores(value, jnp.log(value), visible)
  plots.score_map(scores, axes=axes)
  drawn = axes.get_images()[0].get_array()
  np.testing.assert_array_equal(np.isnan(np.asarray(drawn.filled(np.nan))), ~visible[0, 0])
  np.testing.assert_allclose(drawn[2], np.log10(1 / 3), rtol=1e-5)


def test_other_figures_have_a_line_or_cell_for_each_layer(axes):
  norms = [{"always": jnp.ones((4, 1, 2)), "sparse": jnp.ones((4, 1, 2))}, {}]
  plots.state_norms(norms, every=8, axes=axes)
  labels = [line.get_label() for line in axes.get_lines()]
  assert labels == ["layer 0, always", "layer 0, sparse"]
  np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), [8, 16, 24, 32])
  axes.clear()
  plots.boundary_influence(analysis.Influence(jnp.ones((2, 3, 5)), jnp.ones((2, 3))), axes)
  assert len(axes.get_lines()) == 2
  axes.clear()
  shares = jnp.asarray([0.5, 0.5, 1.0])
  one = analysis.Routing(shares, shares[None], shares == 0, shares[0], shares[0])
  plots.routing([None, one], axes)
  assert [text.get_text() for text in axes.get_yticklabels()] == ["1"]
  np.testing.assert_array_equal(axes.get_images()[0].get_array(), shares[None])
  axes.clear()
  plots.row_cosines(jnp.eye(3), axes)
  np.testing.assert_array_equal(axes.get_images()[0].get_array(), np.eye(3))


def test_histogram_has_the_normal_law_of_the_scores(axes):
  log = jnp.asarray(np.random.default_rng(0).normal(2, 3, (1, 1, 40, 40)), jnp.float32)
  visible = jnp.ones((1, 1, 40, 40), bool)
  plots.score_histogram(analysis.Scores(jnp.exp(log), log, visible), axes=axes)
  (line,) = axes.get_lines()
  top = line.get_xdata()[np.argmax(line.get_ydata())]
  assert abs(top - 2) < 0.3
  np.testing.assert_allclose(max(line.get_ydata()), 1 / (3 * np.sqrt(2 * np.pi)), rtol=0.05)


def test_missing_matplotlib_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  with pytest.raises(ImportError, match="plots needs matplotlib: pip install matplotlib"):
    plots.half_lives([jnp.ones((1, 1))])
