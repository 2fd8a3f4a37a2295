"""Every partitioner on the handwritten digits: who gets how many images of which class.

The scikit-learn digits (1,797 images of 8 x 8) are split in every way there is. Prints
a table, draws one panel per partitioner.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fedjax_core import check
from fedjax_core.data.packed import Dataset, FederatedData
from fedjax_core.datasets import digits, partition, plots
from fedjax_core.experiments import report
from fedjax_core.types import Checked, NonNegative, Positive, PositiveInt, Seed, Share

_INK, _PAPER = "#5a5a5a", "#f5f5f2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_clients: clients of every split; at least 10 / num_classes, at most 50.
      alpha: concentration of the Dirichlet splits; small means skewed labels.
      num_classes: classes per client, and shards per client.
      sigma: standard deviation of the logarithm of sizes.
      gamma: the balancedness G of Sattler, in (0, 1].
      num_clusters: clusters of the label swaps and permutations, and domains, 1 to 4.
      seed: of the splits.
      out: directory for the figure.
    """

    num_clients: PositiveInt = 20
    alpha: Positive = 0.3
    num_classes: PositiveInt = 2
    sigma: NonNegative = 1.0
    gamma: Annotated[Share, check.positive] = 0.9
    num_clusters: PositiveInt = 4
    seed: Seed = 0
    out: Path = Path("runs/partitions")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(1, 10, num_classes=self.num_classes)
        # Every digit needs a client; with more than 50, bubbles are too small to see.
        fewest = -(-10 // self.num_classes)
        check.in_range(fewest, 50, num_clients=self.num_clients)
        # There are four ways to turn an image by a right angle.
        check.in_range(1, min(self.num_clients, 4), num_clusters=self.num_clusters)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(num_clients=12),
}


class Split(NamedTuple):
    """One way of splitting, done.

    Attributes:
      name: the partitioner.
      setting: its parameters, in words.
      data: the clients.
      cluster: [N] the cluster of each, where there are clusters.
    """

    name: str
    setting: str
    data: FederatedData
    cluster: np.ndarray | None = None


class Summary(NamedTuple):
    """Numbers of one split, over the clients that have train examples.

    Attributes:
      smallest: examples of the smallest client; here clients without examples count.
      median: likewise.
      largest: likewise.
      num_classes: mean number of classes per client.
      distance: mean total variation distance between the labels of a client and the
        pooled ones, 0 (alike) to 1 (disjoint).
    """

    smallest: int
    median: float
    largest: int
    num_classes: float
    distance: float


def run(experiment: Experiment) -> list[Split]:
    """Splits the digits in every way."""
    e, dataset = experiment, digits.load()
    # What the image shows, where clusters rename the labels.
    dataset = Dataset(
        **{name: {**a, "digit": a["y"]} for name, a in dataset.splits.items()}
    )
    n, seed, k, clusters = e.num_clients, e.seed, e.num_classes, e.num_clusters
    ways: list[tuple[str, str, tuple[Any, ...]]] = [
        ("iid", "", ()),
        *(
            (name, f"alpha = {e.alpha:g}", (e.alpha,))
            for name in ("dirichlet", "dirichlet_by_client", "alternating_dirichlet")
        ),
        ("pathological", f"{k} shards each", (k,)),
        ("classes_per_client", f"exactly {k}", (k,)),
        ("log_normal", f"sigma = {e.sigma:g}", (e.sigma,)),
        ("balancedness", f"G = {e.gamma:g}", (e.gamma, None)),
        ("balancedness", f"G = {e.gamma:g}, {k} classes", (e.gamma, k)),
        ("label_swap", f"{clusters} clusters", (clusters,)),
        ("label_permutation", f"{clusters} clusters", (clusters,)),
    ]
    splits = []
    for name, setting, numbers in ways:
        made: Any = getattr(partition, name)(dataset, n, *numbers, seed)
        own = made if isinstance(made, tuple) else (made,)  # with clusters, or without
        splits.append(Split(name, setting, *own))
    turned = partition.domains(_turned(dataset, clusters), n // clusters, seed)
    return [
        *splits,
        Split("domains", f"{clusters} rotations", *turned),
        Split("natural", "by ink", partition.natural(_inked(dataset, n), "ink")),
        Split("contiguous", "as in the file", partition.contiguous(dataset, n)),
    ]


def _turned(dataset: Dataset, num_domains: int) -> dict[str, Dataset]:
    """The images dealt to domains, which turn them by multiples of 90 degrees."""
    parts = partition.iid(dataset, num_domains)

    def turn(part, i):
        x = np.rot90(part["x"].reshape(-1, 8, 8), i, axes=(1, 2)).reshape(-1, 64)
        return {**part, "x": x}

    return {
        f"{90 * i} degrees": Dataset(
            **{name: turn(split.client(i), i) for name, split in parts.splits.items()}
        )
        for i in range(num_domains)
    }


def _inked(dataset: Dataset, num_groups: int) -> Dataset:
    """Adds the array "ink", the group of an image, from little ink to much."""
    ink = dataset.train["x"].sum(axis=1)
    edges = np.quantile(ink, np.arange(1, num_groups) / num_groups)
    return Dataset(
        **{
            name: {**arrays, "ink": np.searchsorted(edges, arrays["x"].sum(axis=1))}
            for name, arrays in dataset.splits.items()
        }
    )


def summarise(split: Split) -> Summary:
    """The numbers of one split."""
    counts, sizes = split.data.label_counts(), split.data.train.sizes
    own = counts[sizes > 0] / sizes[sizes > 0, None]
    pooled = counts.sum(axis=0) / sizes.sum()
    return Summary(
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        num_classes=float((own > 0).sum(axis=1).mean()),
        distance=float(np.abs(own - pooled).sum(axis=1).mean() / 2),
    )


def table(splits: list[Split]) -> Table:
    """The numbers, one row per split."""
    out = Table(
        title="train images per client, classes, and distance of labels",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    out.add_column("partition", no_wrap=True)
    out.add_column("", style="dim", no_wrap=True)
    for column in ("min", "median", "max", "classes", "distance"):
        out.add_column(column, justify="right", no_wrap=True)
    for split in splits:
        numbers = zip(summarise(split), ("", "g", "", ".1f", ".2f"), strict=True)
        shown = (format(number, form) for number, form in numbers)
        out.add_row(split.name, split.setting, *shown)
    return out


def plot(splits: list[Split], path: Path | None = None) -> Any:
    """Draws one panel per split of digits, with the array "digit" besides labels "y".

    Returns the matplotlib `Figure`, written to a file if there is a path.
    """
    from matplotlib.figure import Figure

    counts = [s.data.label_counts() for s in splits]
    # Half the largest count fills its cell: large bubbles may overlap, small ones show.
    full = max(int(of_split.max()) for of_split in counts) / 2
    longest = max(int(of_split.sum(axis=1).max()) for of_split in counts)
    columns = 4
    rows = -(-(len(splits) + 1) // columns)  # one more for the key
    # All in inches: round bubbles give a panel its shape, which no layout may change.
    width, bars, head, gap = 3.5, 0.45, 0.5, 0.45
    num_clients = max(s.data.num_clients for s in splits)
    height = width * (10 + 0.4) / (num_clients + 0.4)
    cell_width, cell_height = width + gap, height + bars + head + gap
    size = columns * cell_width + 0.25, rows * cell_height + 0.1
    figure = Figure(figsize=size)

    def place(i: int, bottom: float, tall: float) -> Any:
        left = 0.4 + i % columns * cell_width
        base = size[1] - (i // columns + 1) * cell_height + gap - 0.1 + bottom
        return figure.add_axes(
            (left / size[0], base / size[1], width / size[0], tall / size[1])
        )

    for i, (split, of_split) in enumerate(zip(splits, counts, strict=True)):
        panel, strip = place(i, 0, height), place(i, height + 0.04, bars)
        plots.bubbles(panel, of_split, _digits(split), full)
        panel.set_xlim(-0.7, num_clients - 0.3)
        strip.bar(np.arange(len(of_split)), of_split.sum(axis=1), 0.8, color=_INK)
        strip.set(xlim=panel.get_xlim(), ylim=(0, longest))
        strip.set_axis_off()
        panel.set(facecolor=_PAPER, yticks=range(10), xticks=range(0, num_clients, 5))
        panel.tick_params(length=0, labelsize=7, labelcolor=_INK)
        panel.spines[:].set_visible(False)
        if split.cluster is not None:
            for edge in np.flatnonzero(np.diff(split.cluster)):
                panel.axvline(edge + 0.5, color=_INK, linewidth=0.8, linestyle=":")
        _head(strip, split, bars)
    _key(place(len(splits), 0, height), num_clients, full)
    if path is not None:
        report.write(figure, path, dpi=130)
    return figure


def _digits(split: Split) -> np.ndarray:
    """The digit that client i calls c, [N, 10] ints; 0 where it has none."""
    train = split.data.train
    clients = np.repeat(np.arange(train.num_clients), train.sizes)
    digit = np.zeros((train.num_clients, 10), np.int64)
    digit[clients, train.examples["y"]] = train.examples["digit"]
    return digit


def _head(strip: Any, split: Split, bars: float) -> None:
    """Writes name, setting and numbers above the bars."""
    s = summarise(split)
    numbers = f"{s.num_classes:.1f} classes, distance {s.distance:.2f}"
    for x, y, align, text, style in (
        (0, 0.22, "left", split.name, {"size": 10.5, "weight": "bold"}),
        (0, 0.06, "left", split.setting, {"size": 8.5, "color": _INK}),
        (1, 0.06, "right", numbers, {"size": 8.5, "color": _INK}),
    ):
        style |= {"ha": align, "va": "bottom", "transform": strip.transAxes}
        strip.text(x, 1 + y / bars, text, **style)


def _key(axes: Any, num_clients: int, full: float) -> None:
    """Says how to read a panel, and shows bubbles of three sizes."""
    counts = np.zeros((num_clients, 10), np.int64)
    for y, count in ((9, 80), (7, 20), (5, 5)):
        counts[0, y] = count
        axes.text(0.9, y, str(count), va="center", size=9, color=_INK)
    plots.bubbles(axes, counts, np.full_like(counts, 9), full)
    axes.set_axis_off()
    axes.annotate(
        "images of a client (across) under a label (up)\n"
        "colours: what digit the image shows\n"
        "bars: images of a client, all labels\n"
        "dotted lines: between clusters of clients\n"
        "classes: mean number per client\n"
        "distance: total variation between a client's\n"
        "labels and the pooled ones, mean over clients",
        (0.9, -0.5),
        (32, 0),  # points, to the right of the numbers
        textcoords="offset points",
        va="bottom",
        size=9,
        color=_INK,
        linespacing=1.45,
    )


def main(experiment: Experiment) -> None:
    """Splits, prints the table and says where the figure is."""
    console = Console()
    splits = run(experiment)
    console.print(table(splits))
    path = experiment.out / "partitions.png"
    plot(splits, path)
    console.print(f"figure: {path}", highlight=False)
