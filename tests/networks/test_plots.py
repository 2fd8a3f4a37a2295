"""Pictures of networks show the edges, bounds and copies they are given."""

from typing import Any

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure

from fedjax_core.networks import builders, plots
from fedjax_core.networks.asynchronous import Schedule, synchronous
from fedjax_core.networks.graph import Graph


def axes() -> Any:
    return Figure().subplots()


def segments(drawn: Any) -> list[Any]:
    return [np.asarray(s).tolist() for s in drawn.get_segments()]


def of_kind(panel: Any, kind: type) -> list[Any]:
    return [c for c in panel.collections if type(c) is kind]


def test_a_layout_has_the_distances_of_hops():
    place = plots.layout(builders.chain(6))
    apart = np.linalg.norm(place[:, None] - place[None], axis=2)
    hops = np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    np.testing.assert_allclose(apart, hops, atol=0.15)
    place = plots.layout(builders.cycle(8))
    place = place - place.mean(0)
    np.testing.assert_allclose(
        np.linalg.norm(place, axis=1), np.linalg.norm(place[0]), rtol=1e-3
    )


def test_a_layout_without_steps_is_the_eigenvectors():
    place = plots.layout(builders.chain(7), steps=0)
    along = np.cos(np.pi * (np.arange(7) + 0.5) / 7)
    assert abs(np.corrcoef(place[:, 0], along)[0, 1]) == pytest.approx(1, abs=1e-5)


def test_clusters_lie_apart():
    graph = builders.stochastic_block((12, 12), 0.8, 0.02, seed=1)
    a, b = np.split(plots.layout(graph), 2)
    spread = max(np.linalg.norm(x - x.mean(0), axis=1).max() for x in (a, b))
    assert np.linalg.norm(a.mean(0) - b.mean(0)) > spread


@pytest.mark.parametrize(
    "graph",
    [
        Graph.from_edges(np.zeros((0, 2), int), num_nodes=1),
        builders.chain(2),
        Graph.from_edges(np.zeros((0, 2), int), num_nodes=4),
        Graph.from_edges([[0, 1], [2, 3]], [1.0, 0.0], 5),
        builders.star(30),
    ],
)
def test_every_network_has_a_layout(graph):
    place = plots.layout(graph)
    assert place.shape == (graph.num_nodes, 2)
    assert np.isfinite(place).all()
    apart = np.linalg.norm(place[:, None] - place[None], axis=2)
    assert (apart + np.eye(len(place)) > 0.1).all()
    plots.network(axes(), graph)


def test_a_network_shows_its_edges_and_nodes():
    graph = Graph.from_edges([[0, 1], [1, 2], [0, 2]], [1.0, 0.0, 2.0])
    place = np.array([[0.0, 0], [1, 0], [0, 1]])
    panel = axes()
    nodes = plots.network(panel, graph, [3.0, 1.0, 2.0], place, vmin=0, vmax=4)
    (lines,) = of_kind(panel, LineCollection)
    assert segments(lines) == [[[0, 0], [1, 0]], [[0, 0], [0, 1]]]  # weights 1 and 2
    ink = np.asarray(lines.get_colors())[:, 3]
    assert ink[0] < ink[1]
    np.testing.assert_array_equal(nodes.get_offsets(), place)
    np.testing.assert_array_equal(nodes.get_array(), [3, 1, 2])
    assert nodes.get_clim() == (0, 4)
    with pytest.raises(ValueError, match=r"place must have shape \(3, 2\)"):
        plots.network(panel, graph, place=place[:2])


def test_theory_is_drawn_beside_the_errors():
    panel = axes()
    curve = 2 * 0.4 ** np.arange(5)
    limit = np.linspace(5, 1, 4)
    plots.convergence(
        panel, {"a": curve, "b": [1.0, 0.5, 0.0, 0.0]}, {"a": 0.5, "b": limit}
    )
    a, a_bound, b, b_bound = [np.asarray(x.get_ydata()) for x in panel.lines[:4]]
    np.testing.assert_allclose(a, curve)
    np.testing.assert_allclose(a_bound, 2 * 0.5 ** np.arange(5))
    np.testing.assert_allclose(b, [1, 0.5, 0, 0])
    np.testing.assert_allclose(b_bound, limit)
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels == ["a", "b", "at most, by theory"]
    assert panel.get_yscale() == "log"
    plots.convergence(axes(), {"a": curve})
    with pytest.raises(ValueError, match="bounds must belong to curves"):
        plots.convergence(panel, {"a": curve}, {"c": 0.5})


def test_a_timeline_leads_from_copies_to_those_who_read_them():
    graph = builders.chain(3)  # directed edges 1->0, 0->1, 2->1, 1->2
    active = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 0]], bool)
    delay = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [2, 1, 0, 0]])
    schedule = Schedule(active, delay, 2)
    panel = axes()
    lines = plots.timeline(panel, graph, schedule)
    drawn = sorted(
        zip(segments(lines), np.asarray(lines.get_array()).tolist(), strict=True)
    )
    assert drawn == sorted(
        [
            ([[0, 1], [0, 0]], 0),  # event 0: node 0 and 2 read node 1
            ([[0, 1], [0, 2]], 0),
            ([[0, 0], [1, 1]], 1),  # event 1: node 1 reads node 0 as it was before
            ([[1, 2], [1, 1]], 0),
            ([[0, 1], [2, 0]], 2),  # event 2
            ([[1, 0], [2, 1]], 1),
            ([[2, 2], [2, 1]], 0),
        ]
    )
    dots = of_kind(panel, PathCollection)
    sizes = {len(np.asarray(d.get_offsets())) for d in dots}
    assert sizes == {5, 4}  # acting and not

    part = plots.timeline(axes(), graph, schedule, nodes=[2, 1], events=2)
    assert sorted(segments(part)) == [[[0, 1], [0, 0]], [[1, 0], [1, 1]]]

    with pytest.raises(ValueError, match="schedule must be for 4 nodes"):
        plots.timeline(axes(), builders.chain(4), schedule)
    with pytest.raises(ValueError, match=r"nodes must be in \[0, 2\]"):
        plots.timeline(axes(), graph, schedule, nodes=[3])


def test_a_timeline_without_delays_or_waiting_can_be_drawn():
    graph = builders.cycle(4)
    figure = Figure()
    lines = plots.timeline(figure.subplots(), graph, synchronous(graph, 5))
    figure.colorbar(lines, ax=figure.axes[0])
    figure.canvas.draw()
