"""What a run hands back: metrics per round and seed, the model, tables and plots."""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_core import processes
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
      compile_seconds: how long that took.
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
            then, ``[S, T]``: "virtual_seconds", "uplink_bytes".

        Raises:
          KeyError: no such metric; the message lists those there are.
        """
        if over is not None:
            rounds, values = self.series(name)
            spent = self.series(over)[1].astype(np.float64).cumsum(1)
            return spent[:, rounds - 1], values
        if name in self.evaluations:
            return self.evaluated, self.evaluations[name]
        if name in self.train:
            return np.arange(1, self.rounds + 1), self.train[name]
        names = ", ".join(sorted({*self.evaluations, *self.train}))
        raise KeyError(f"no metric {name!r}; there are: {names}.")

    def final(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation over seeds of a metric's last value.

        The deviation is the sample's (n - 1), NaN for a single seed.
        """
        last = self.series(name)[1][:, -1]
        std = last.std(ddof=1) if len(last) > 1 else float("nan")
        return float(last.mean()), float(std)

    def total(self, name: str) -> float:
        """Sum over rounds of a metric, averaged over seeds: bytes sent, say."""
        return float(self.series(name)[1].astype(np.float64).sum(1).mean())

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
        if (at_least is None) == (at_most is None):
            raise ValueError(
                f"exactly one of at_least and at_most must be given, got "
                f"at_least={at_least!r} and at_most={at_most!r}."
            )
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
        """Draws metrics over rounds, the mean over seeds with a band of one deviation.

        Args:
          names: metrics; when left out every evaluated one, or without evaluations
            every one of training.
          over: what to draw them over instead of rounds, as in `series`: its mean.
          path: file to write; without it the figure is only returned.

        Returns:
          The matplotlib `Figure`.
        """
        from matplotlib.figure import Figure

        names = names or tuple(self.evaluations or self.train)
        figure = Figure(figsize=(5.5 * len(names), 3.6), layout="constrained")
        for axes, name in zip(
            np.ravel(figure.subplots(1, len(names))), names, strict=True
        ):
            rounds, values = self.series(name, over=over)
            rounds, mean = np.atleast_2d(rounds).mean(0), values.mean(0)
            axes.plot(rounds, mean, marker="." if len(rounds) < 40 else None)
            if len(values) > 1:
                std = values.std(0, ddof=1)
                axes.fill_between(rounds, mean - std, mean + std, alpha=0.25, lw=0)
                axes.set_title(f"mean and one deviation, {len(values)} seeds", size=9)
            xlabel = (over or "round").replace("_", " ")
            axes.set(xlabel=xlabel, ylabel=name.replace("_", " "))
            axes.grid(alpha=0.3)
        if path is not None and processes.is_first():
            figure.savefig(path, dpi=150)
        return figure

    def __repr__(self):
        lines = [f"Result: {self.rounds} rounds, {len(self.seeds)} seed(s)"]
        for name in [*self.evaluations, *self.train]:
            mean, std = self.final(name)
            spread = "" if np.isnan(std) else f" +- {std:.4g}"
            lines.append(f"  {name:<32} {mean:.6g}{spread}")
        return "\n".join(lines)
