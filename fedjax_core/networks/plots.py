"""Pictures of a network: its nodes, how a method converges, who acts when.

Every function draws on matplotlib axes that it is given.

References:
  Jung, "Federated Learning: From Theory to Practice", Figures 3.1, 5.5 and 5.6.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse.csgraph import shortest_path

from fedjax_core import check
from fedjax_core.networks.asynchronous import Schedule, check_schedule
from fedjax_core.networks.graph import Graph, check_shapes
from fedjax_core.networks.spectrum import adjacency

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2")
"""Of curves and clusters."""

_INK = "#444444"
_PALE = "#9a9a9a"


def layout(graph: Graph, steps: int = 100) -> np.ndarray:
    """Places on a plane whose distances are the numbers of hops, nearly; ``[n, 2]``.

    Starts from the eigenvectors of the Laplacian that vary least along edges and then
    lowers the stress by so many steps of majorisation, where every pair counts by its
    distance to the power -2. Components lie side by side; weights only say which edges
    there are. For up to a thousand nodes or so: dense.

    References:
      Gansner, Koren and North, "Graph Drawing by Stress Majorization", GD 2004.
    """
    check.non_negative(steps=steps)
    n = graph.num_nodes
    if n < 3:
        return np.array([[0.0, 0.0], [1.0, 0.0]])[:n]
    A = adjacency(graph).toarray() > 0
    place = np.linalg.eigh(np.diag(A.sum(1)) - 1.0 * A)[1][:, 1:3]
    hops = shortest_path(A, directed=False, unweighted=True)
    apart = hops[np.isfinite(hops)].max(initial=0) + 1
    hops = np.where(np.isfinite(hops), hops, apart)
    place = place * apart / np.ptp(place)

    np.fill_diagonal(hops, 1)
    pull = hops**-2.0
    np.fill_diagonal(pull, 0)
    inverse = np.linalg.pinv(np.diag(pull.sum(1)) - pull, hermitian=True)
    for _ in range(steps):
        gap = np.linalg.norm(place[:, None] - place[None], axis=2)
        ratio = pull * hops / np.maximum(gap, 1e-9)
        place = inverse @ (ratio.sum(1)[:, None] * place - ratio @ place)
    return place


def network(
    axes: Any,
    graph: Graph,
    value: ArrayLike | None = None,
    place: ArrayLike | None = None,
    **dots: Any,
) -> Any:
    """Draws edges, the heavier the darker, and nodes with colours.

    Args:
      axes: to draw on; its scale is made equal and its frame removed.
      graph: the network; edges of weight 0 are not there.
      value: ``[n]``, shown as colours of a map, or colours; by default one for all.
      place: ``[n, 2]``; by default `layout`.
      **dots: of ``axes.scatter``: cmap, vmin, vmax, s, ...

    Returns:
      The nodes, for a colour bar.

    Raises:
      ValueError: a place for another number of nodes.
    """
    from matplotlib.collections import LineCollection

    place = layout(graph) if place is None else np.asarray(place)
    check_shapes(f"({graph.num_nodes}, 2)", place=place)
    ends, weight = np.stack([graph.head, graph.tail], 1), np.asarray(graph.weight)
    drawn = weight > 0
    strength = weight[drawn] / weight.max(initial=1e-30)
    ink = np.tile([0.35, 0.35, 0.38, 0.0], (len(strength), 1))
    ink[:, 3] = 0.15 + 0.3 * strength
    lines = LineCollection(list(place[ends[drawn]]), colors=ink, linewidths=0.8)
    axes.add_collection(lines)
    size = np.clip(4000 / graph.num_nodes, 8, 160)
    look = {"s": size, "edgecolors": "white", "linewidths": 0.7, "zorder": 2} | dots
    nodes = axes.scatter(*place.T, c=COLORS[0] if value is None else value, **look)
    axes.set(aspect="equal")
    axes.margins(0.06)
    axes.set_axis_off()
    return nodes


def convergence(
    axes: Any,
    curves: Mapping[str, ArrayLike],
    bounds: Mapping[str, ArrayLike] | None = None,
) -> None:
    """Draws errors over rounds, with what theory allows as dashes.

    Args:
      axes: to draw on.
      curves: by name, the errors ``[T + 1]`` from before the first round on.
      bounds: under the same names, contraction factors per round, from which the
        error can be at most ``curve[0] * factor**t``; or bounds ``[T + 1]``.

    Raises:
      ValueError: a bound without a curve.
    """
    bounds = dict(bounds or {})
    if bounds.keys() - curves.keys():
        raise ValueError(
            f"bounds must belong to curves {sorted(curves)}, got {sorted(bounds)}."
        )
    lowest = np.inf
    for k, (name, curve) in enumerate(curves.items()):
        curve = np.asarray(curve)
        t = np.arange(len(curve))
        color = COLORS[k % len(COLORS)]
        axes.plot(t, curve, color=color, label=name, linewidth=1.8)
        if name in bounds:
            bound = np.asarray(bounds[name])
            bound = bound if bound.ndim else curve[0] * bound**t
            axes.plot(t, bound, color=color, linestyle=(0, (4, 2)), linewidth=1.1)
        lowest = min(lowest, curve[curve > 0].min(initial=np.inf))
    if bounds:
        axes.plot([], [], color=_INK, linestyle=(0, (4, 2)), label="at most, by theory")
    axes.set(yscale="log", xlabel="round")
    axes.set_xlim(left=0)
    if np.isfinite(lowest):
        axes.set_ylim(bottom=lowest / 2)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def timeline(
    axes: Any,
    graph: Graph,
    schedule: Schedule,
    nodes: Sequence[int] | None = None,
    events: int | None = None,
) -> Any:
    """Draws who acts at which event, and on copies of what age.

    A line leads from where and when a copy was made to the node and event that read it;
    nodes that act are dots. Colours are ages, t - t_ij.

    Args:
      axes: to draw on.
      graph: who hears whom.
      schedule: for that graph.
      nodes: to draw, from top to bottom; by default all.
      events: to draw, from the first on; by default all.

    Returns:
      The lines, for a colour bar.

    Raises:
      ValueError: a schedule for another graph, or a node that does not exist.
    """
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.ticker import MaxNLocator

    check_schedule(schedule, graph)
    shown = np.arange(graph.num_nodes) if nodes is None else np.asarray(nodes)
    for i in shown.tolist():
        check.in_range(0, graph.num_nodes - 1, nodes=i)
    active = np.asarray(schedule.active)[:events]
    delay = np.asarray(schedule.delay)[:events]
    row = np.full(graph.num_nodes, -1)
    row[shown] = np.arange(len(shown))
    source, target = (row[np.asarray(x)] for x in (graph.source, graph.target))
    by_target = active[:, np.asarray(graph.target)]
    t, e = np.nonzero(by_target & (source >= 0) & (target >= 0))
    age = delay[t, e]
    start = np.stack([t - age, source[e]], 1)
    stop = np.stack([t, target[e]], 1)

    ages = schedule.max_delay + 1
    colors = ListedColormap(colormaps["plasma"](np.linspace(0.82, 0.05, ages)))
    lines = LineCollection(
        list(np.stack([start, stop], 1)),
        array=age,
        cmap=colors,
        norm=BoundaryNorm(np.arange(-0.5, ages), ages),
        linewidths=1.1,
        alpha=0.75,
        zorder=1,
    )
    axes.hlines(np.arange(len(shown)), -0.5, len(active) - 0.5, "#e6e6e6", zorder=0)
    axes.add_collection(lines)
    event, acting = np.nonzero(active[:, shown])
    axes.scatter(event, acting, s=42, color=_INK, edgecolors="white", zorder=2)
    idle, waiting = np.nonzero(~active[:, shown])
    axes.scatter(idle, waiting, s=7, color=_PALE, zorder=0.5)
    axes.set(
        xlim=(-0.7, len(active) - 0.3),
        ylim=(len(shown) - 0.5, -0.5),
        xlabel="event t",
        ylabel="node",
    )
    axes.set_yticks(range(len(shown)), [str(i) for i in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return lines
