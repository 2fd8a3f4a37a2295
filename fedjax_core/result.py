"""What a run hands back: metrics per round and seed, the model, tables and plots."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_core import check, processes
from fedjax_core.types import Params


class Exclusion(NamedTuple):
    """A client whose update was left out of a round because it was not finite."""

    round: int  # counted from 1
    seed: int
    client_id: str
    stage: str  # "local update" or "transform"


@dataclasses.dataclass(eq=False, repr=False)
class Result:
    """A finished (or interrupted) simulation of S seeds.

    Attributes:
      seeds: ``[S]``.
      rounds: rounds completed.
      train: name -> ``[S, rounds]``, what every round reported.
      evaluated: ``[E]``, rounds after which the model was evaluated.
      evaluations: name -> ``[S, E]``: "test_accuracy" pooled over examples,
        "test_accuracy_client_mean" and "test_accuracy_client_p10" over clients.
      client_metrics: name -> ``[S, N]``, the last evaluation per client.
      state: the algorithm's last state, leaves ``[S, ...]``.
      excluded: clients whose update was not finite.
      seconds: wall time of this call's rounds, without compilation and evaluation.
      timed_rounds: rounds that `seconds` covers.
      compilations: how often the round was compiled.
      compile_seconds: how long that took; of a network, with what draws its world.
      run_dir: where the run was recorded, or None.
      execution: how the rounds ran, or None where nothing ran.
    """

    seeds: tuple[int, ...]
    rounds: int
    train: dict[str, np.ndarray]
    evaluated: np.ndarray
    evaluations: dict[str, np.ndarray]
    client_metrics: dict[str, np.ndarray]
    state: Any
    excluded: list[Exclusion]
    seconds: float = 0.0
    timed_rounds: int = 0
    compilations: int = 0
    compile_seconds: float = 0.0
    run_dir: Path | None = None
    execution: Any = None

    @property
    def params(self) -> Params:
        """The models, leaves ``[S, ...]``."""
        return self.state.params

    @property
    def rounds_per_second(self) -> float:
        """Rounds per second of all seeds together, NaN if nothing was timed."""
        return self.timed_rounds / self.seconds if self.seconds else float("nan")

    def series(
        self, name: str, *, over: str | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rounds ``[T]`` and values ``[S, T]`` of a metric.

        Args:
          name: of the metric.
          over: in the place of rounds, what another metric of training adds up to by
            then, ``[S, T]``: "virtual_seconds", "uplink_bytes"; or "megabytes", sent
            and received together.

        Raises:
          KeyError: no such metric; the message lists those there are.
        """
        if over is not None:
            rounds, values = self.series(name)
            return self._each_round(over).cumsum(1)[:, rounds - 1], values
        if name in self.evaluations:
            return self.evaluated, self.evaluations[name]
        if name in self.train:
            return np.arange(1, self.rounds + 1), self.train[name]
        names = ", ".join(sorted({*self.evaluations, *self.train}))
        raise KeyError(f"no metric {name!r}; there are: {names}.")

    def _each_round(self, name: str) -> np.ndarray:
        """What each round costs, ``[S, rounds]``."""
        if name == "megabytes":
            up, down = map(self._each_round, ("uplink_bytes", "downlink_bytes"))
            return (up + down) / 1e6
        return self.series(name)[1].astype(np.float64)

    def final(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of a metric's last value.

        The deviation is the sample's (n - 1), NaN for a single seed.
        """
        last = self.series(name)[1][:, -1]
        std = last.std(ddof=1) if len(last) > 1 else float("nan")
        return float(last.mean()), float(std)

    def best(self, name: str, *, lowest: bool = False) -> np.ndarray:
        """The best of a metric up to each of its rounds, ``[S, T]``, as in `series`.

        The last column is what papers print as the maximum within a budget of rounds. A
        maximum over test data is optimistic: nobody could have stopped there.

        Args:
          name: of the metric; a NaN stays until the end.
          lowest: whether the smallest is the best, as of a loss.
        """
        best = np.minimum if lowest else np.maximum
        return best.accumulate(self.series(name)[1], axis=1)

    def total(self, name: str) -> float:
        """Sum over rounds of a metric, averaged over seeds: "megabytes", say."""
        return float(np.mean([math.fsum(row) for row in self._each_round(name)]))

    def total_bits(self, name: str) -> tuple[int, ...]:
        """Bits of all rounds, ``[S]``, exact, of "uplink_bytes" or "downlink_bytes"."""
        rows = self.series(name)[1]
        return tuple(sum(int(8 * value) for value in row) for row in rows.tolist())

    def time_to(
        self,
        name: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        over: str | None = None,
    ) -> np.ndarray:
        """When a metric first reaches a goal, ``[S]``; NaN where it does not.

        Args:
          name: of the metric, looked at where it is known: after evaluations.
          at_least: the goal from below.
          at_most: the goal from above.
          over: what is counted until then, as in `series`; by default rounds.
        """
        check.one_given(at_least=at_least, at_most=at_most)
        spent, values = self.series(name, over=over)
        there = values >= at_least if at_most is None else values <= at_most
        when = np.broadcast_to(spent, values.shape)
        first = np.take_along_axis(when, there.argmax(1)[:, None], axis=1)[:, 0]
        return np.where(there.any(1), first, np.nan)

    def plot(
        self,
        *names: str,
        over: str | None = None,
        path: str | os.PathLike | None = None,
    ) -> Any:
        """A matplotlib `Figure` of metrics, mean over seeds in a band of one deviation.

        Args:
          names: metrics; when left out every evaluated one, or without evaluations
            every one of training.
          over: what to draw them over instead of rounds, as in `series`: its mean.
          path: file to write; without it the figure is only returned.
        """
        names = names or tuple(self.evaluations or self.train)
        note = f"mean and one deviation, {len(self.seeds)} seeds"
        title = note if len(self.seeds) > 1 else ""
        return plot({"": self}, names, over=over, path=path, title=title)

    def draw(
        self, axes: Any, name: str, *, over: str | None = None, label: str = ""
    ) -> None:
        """Adds a metric to axes of matplotlib, as `plot` draws it."""
        spent, values = self.series(name, over=over)
        x, mean = np.atleast_2d(spent).mean(0), values.mean(0)
        (line,) = axes.plot(x, mean, marker="." if len(x) < 40 else None, label=label)
        if len(values) > 1:
            std, color = values.std(0, ddof=1), line.get_color()
            axes.fill_between(x, mean - std, mean + std, color=color, alpha=0.25, lw=0)
        xlabel = (over or "round").replace("_", " ")
        axes.set(xlabel=xlabel, ylabel=name.replace("_", " "))
        axes.grid(alpha=0.3)

    def __repr__(self):
        lines = [f"Result: {self.rounds} rounds, {len(self.seeds)} seed(s)"]
        for name in [*self.evaluations, *self.train]:
            last = spread(self.series(name)[1][:, -1]).replace("±", "+-")
            lines.append(f"  {name:<32} {last}")
        return "\n".join(lines)


def spread(values: Any, form: str = ".4g") -> str:
    """Numbers of all seeds as text, "mean ± deviation"; nothing of no numbers.

    The deviation is the sample's (n - 1), left out for a single number.
    """
    values = np.asarray(values, np.float64)
    if not len(values):
        return ""
    std = f" ± {values.std(ddof=1):{form}}" if len(values) > 1 else ""
    return f"{values.mean():{form}}{std}"


def plot(
    results: Mapping[str, Result],
    names: Sequence[str],
    *,
    over: str | None = None,
    path: str | os.PathLike | None = None,
    title: str = "",
) -> Any:
    """Draws metrics of several results into one figure, a panel for every metric.

    The legend has the keys of `results`, every panel the title; the rest is as in
    `Result.plot`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(names), 3.6), layout="constrained")
    panels = np.ravel(figure.subplots(1, len(names)))
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(title, size=9)
        for label, result in results.items():
            result.draw(axes, name, over=over, label=label)
        if any(results):  # something has a name
            axes.legend(fontsize=8)
    if path is not None and processes.is_first():
        figure.savefig(path, dpi=150)
    return figure
