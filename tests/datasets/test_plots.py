"""Plots show the counts they are given."""

import numpy as np
import pytest
from matplotlib.collections import EllipseCollection, PolyCollection
from matplotlib.figure import Figure

from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets import digits, partition, plots


def population(labels):
    return FederatedData.from_lists(
        [{"y": np.asarray(y, int)} for y in labels],
        test=[{"y": np.zeros(3, int)} for _ in labels],
    )


DATA = population([[0, 0, 2], [], [1, 2, 2, 2, 2], [0]])


def test_bars_are_the_counts_stacked():
    axes = plots.label_counts(DATA).axes[0]
    (drawn,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
    boxes = [path.get_extents() for path in drawn.get_paths()]
    bars = [(round((b.x0 + b.x1) / 2), b.y0, b.y1) for b in boxes]
    # Client, bottom, top: classes 0 and 2; 1 and 2; 0.
    assert bars == [(0, 0, 2), (0, 2, 3), (2, 0, 1), (2, 1, 5), (3, 0, 1)]
    colors = [tuple(color) for color in np.asarray(drawn.get_facecolor())]
    assert colors[0] == colors[4] != colors[1] == colors[3] != colors[2]


def test_bubbles_have_areas_in_proportion_to_the_counts():
    axes = plots.label_counts(DATA, style="bubbles").axes[0]
    (drawn,) = [c for c in axes.collections if isinstance(c, EllipseCollection)]
    offsets = np.asarray(drawn.get_offsets()).tolist()
    assert sorted(offsets) == [[0, 0], [0, 2], [2, 1], [2, 2], [3, 0]]
    widths = np.asarray(drawn.get_widths()).tolist()
    areas = {(x, y): w**2 for (x, y), w in zip(offsets, widths, strict=True)}
    assert areas[2, 2] / areas[0, 0] == pytest.approx(2)
    assert areas[0, 0] / areas[3, 0] == pytest.approx(2)


def test_the_histogram_counts_every_client_once():
    axes = plots.sizes(DATA).axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == 4
    for bar in axes.patches:  # sizes 0, 1, 3, 5: bins of one size each
        middle = bar.get_x() + bar.get_width() / 2
        assert bar.get_height() == (round(middle) in (0, 1, 3, 5))
    data = partition.log_normal(digits.load(), 200, 1.0)
    axes = plots.sizes(data).axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == 200
    assert len(axes.patches) <= 31


def test_equal_sizes_and_other_splits_can_be_drawn():
    axes = plots.sizes(DATA, split="test").axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == 4
    assert "median 3" in axes.get_title()
    plots.label_counts(DATA, split="test")


@pytest.mark.parametrize("style", ["bars", "bubbles"])
def test_many_clients_and_classes_are_drawn_to_a_file(style, tmp_path):
    rng = np.random.default_rng(0)
    data = population([rng.integers(0, 40, 30) for _ in range(120)])
    path = tmp_path / "counts.png"
    figure = plots.label_counts(data, style=style, path=path)
    assert isinstance(figure, Figure)
    assert path.stat().st_size > 5000
    plots.sizes(data, path=tmp_path / "sizes.png")
    assert (tmp_path / "sizes.png").exists()


def test_a_population_without_examples_is_drawn(tmp_path):
    data = population([[], []])
    for style in ("bars", "bubbles"):
        plots.label_counts(data, style=style, path=tmp_path / "empty.png")
    plots.sizes(data, path=tmp_path / "empty.png")


def test_unknown_splits_and_styles_are_refused():
    with pytest.raises(ValueError, match="split must be one of 'train', 'test'"):
        plots.label_counts(DATA, split="dev")
    with pytest.raises(ValueError, match="split must be one of"):
        plots.sizes(DATA, split="dev")
    with pytest.raises(ValueError, match="style must be one of"):
        plots.label_counts(DATA, style="pie")  # pyright: ignore
    with pytest.raises(ValueError, match="label must be one of 'y', got 'z'"):
        plots.label_counts(DATA, label="z")
