"""Pictures of a population: who holds which classes, and how many examples."""

import os
from typing import Any, Literal

import numpy as np

from fedjax_core import check
from fedjax_core.data.packed import FederatedData

# Ten classes that can be told apart, calmer than matplotlib's own.
_TEN = [
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1"),  # blue to purple
    *("#edc948", "#76b7b2", "#ff9da7", "#9c755f", "#8c8c8c"),  # yellow to grey
]


def label_counts(
    data: FederatedData,
    split: str = "train",
    label: str = "y",
    style: Literal["bars", "bubbles"] = "bars",
    path: str | os.PathLike | None = None,
) -> Any:
    """Draws how many examples of every class each client holds.

    Args:
      data: the population.
      split: which of its splits.
      label: name of the labels, [n] ints, bools or text.
      style: a stacked bar per client, which shows sizes too, or a bubble per client and
        class, its area in proportion to the count.
      path: file to write; without it the figure is only returned.

    Returns:
      The matplotlib `Figure`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    check.one_of(("bars", "bubbles"), style=style)
    names, counts = data.label_values(label), data.label_counts(label, split)
    width = min(4 + 0.12 * data.num_clients, 16)
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    axes = figure.subplots()
    if style == "bars":
        bars(axes, counts)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="client", ylabel="examples")
        if len(names) <= 20:
            figure.legend(
                handles=swatches(names), loc="outside right upper", frameon=False
            )
    else:
        bubbles(axes, counts)
        axes.set(xlabel="client", ylabel="class")
        if len(names) <= 20:
            axes.set_yticks(range(len(names)), [str(name) for name in names])
    return _written(figure, path)


def sizes(
    data: FederatedData, split: str = "train", path: str | os.PathLike | None = None
) -> Any:
    """Draws a histogram of the clients' numbers of examples, the median marked.

    Arguments and result as those of `label_counts`.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    check.one_of(data.splits, split=split)
    values = data.splits[split].sizes
    # Whole numbers of examples per bin: otherwise bins that hold one possible size
    # stand next to bins that hold two.
    step = max(1, -(-int(np.ptp(values) + 1) // 30))
    edges = np.arange(values.min(), values.max() + step + 1, step) - 0.5
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.hist(values, edges, color="#4477aa", edgecolor="white", linewidth=0.5)
    median = float(np.median(values))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.axvline(median, color="#222222", linestyle="--", linewidth=1)
    axes.set(
        xlabel="examples",
        ylabel="clients",
        title=f"{len(values)} clients, median {median:g}",
    )
    return _written(figure, path)


def bars(axes: Any, counts: np.ndarray) -> None:
    """Stacks the classes of each client, counts [N, K] ints, on matplotlib axes."""
    from matplotlib.collections import PolyCollection

    num_clients, num_classes = counts.shape
    clients, classes = np.nonzero(counts)
    top = np.cumsum(counts, axis=1)[clients, classes]
    bottom = top - counts[clients, classes]
    # The gap between bars would swallow bars of less than a pixel.
    half = 0.43 if num_clients <= 100 else 0.5
    left, right = clients - half, clients + half
    corners = [(left, bottom), (right, bottom), (right, top), (left, top)]
    # One collection: a patch for each of 60,000 bars would take a minute.
    axes.add_collection(
        PolyCollection(
            list(np.moveaxis(np.array(corners), 2, 0)),  # [bars, corners, xy]
            facecolors=np.asarray(_colors(num_classes))[classes],
            edgecolors="none",
        )
    )
    highest = max(int(counts.sum(axis=1).max()), 1)
    axes.set(xlim=(-0.7, num_clients - 0.3), ylim=(0, 1.05 * highest))


def bubbles(
    axes: Any,
    counts: np.ndarray,
    kinds: np.ndarray | None = None,
    full: float | None = None,
) -> None:
    """Draws a bubble per client and class on matplotlib axes, areas as counts [N, K].

    The scale is made equal, so that bubbles are round. `kinds`, [N, K] ints in 0..K-1,
    are the colours of the bubbles, by default their classes; `full` is the count whose
    bubble fills its cell, by default the largest.
    """
    from matplotlib.collections import EllipseCollection

    num_clients, num_classes = counts.shape
    clients, classes = np.nonzero(counts)
    area = counts[clients, classes] / (full or max(counts.max(), 1))
    diameter = 0.95 * np.sqrt(area)
    colors = np.asarray(_colors(num_classes))
    # In units of the axes: cells, not points, bound the bubbles at any size of figure.
    axes.add_collection(
        EllipseCollection(
            diameter,
            diameter,
            np.zeros(len(diameter)),
            units="xy",
            offsets=np.column_stack([clients, classes]),
            offset_transform=axes.transData,
            facecolors=colors[classes if kinds is None else kinds[clients, classes]],
            edgecolors="none",
        )
    )
    axes.set(
        xlim=(-0.7, num_clients - 0.3), ylim=(-0.7, num_classes - 0.3), aspect="equal"
    )


def swatches(names: np.ndarray) -> list[Any]:
    """Legend handles, one for each of the classes [K], top of the stack first."""
    from matplotlib.patches import Patch

    pairs = zip(names, _colors(len(names)), strict=True)
    return [Patch(color=color, label=str(name)) for name, color in pairs][::-1]


def _colors(num_classes: int) -> list[Any]:
    """One colour per class, [K] rgba."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba

    if num_classes <= len(_TEN):
        return [to_rgba(color) for color in _TEN[:num_classes]]
    return list(colormaps["turbo"](np.linspace(0.05, 0.95, num_classes)))


def _written(figure: Any, path: str | os.PathLike | None) -> Any:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
