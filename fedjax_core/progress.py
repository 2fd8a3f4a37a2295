"""A progress bar with rounds per second and the metrics of the moment."""

import contextlib
import io
import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fedjax_core import processes

_SECONDS = 0.1  # between two pictures of the bar
_HARMLESS = contextlib.suppress(OSError, ValueError)  # UnicodeEncodeError is one


class RoundsBar:
    """Context manager; `update` moves the bar to a round and shows metrics.

    Nothing that goes wrong in showing it (a closed pipe, a sign that the encoding of
    the output lacks) reaches the run.
    """

    def __init__(self, start: int, rounds: int, enabled: bool, what: str = "rounds"):
        enabled = enabled and processes.is_first()
        self._cell = _Cell() if enabled and Console().is_jupyter else None
        self._bar = Progress(
            TextColumn(what),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            # Results may be piped from stdout, whose encoding may lack the bar's signs.
            console=Console(stderr=True, force_jupyter=False),
            auto_refresh=False,  # a thread's error could not be caught here
            disable=not enabled or self._cell is not None,
        )
        self._task = self._bar.add_task(
            what, completed=start, total=rounds, speed="compiling", metrics=""
        )
        self._shown: dict[str, float] = {}
        self._next = 0.0

    def update(
        self, round: float, rounds_per_second: float, metrics: Mapping[str, Any]
    ) -> None:
        """Shows `round` rounds done; each metric is averaged over its array."""
        self._shown |= {k: float(np.mean(v)) for k, v in metrics.items()}
        text = "  ".join(f"{k} {v:.4g}" for k, v in self._shown.items())
        speed = f"{rounds_per_second:.3g} rounds/s" if rounds_per_second > 0 else ""
        self._bar.update(self._task, completed=round, speed=speed, metrics=text)
        if time.monotonic() >= self._next:
            self._draw()

    def _draw(self) -> None:
        with _HARMLESS:
            self._bar.refresh()
            if self._cell:
                self._cell.show(self._bar)
        self._next = time.monotonic() + _SECONDS

    def __enter__(self) -> Self:
        with _HARMLESS:
            self._bar.start()
        self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._draw()
        with _HARMLESS:
            self._bar.stop()


class CellsBar(RoundsBar):
    """A bar over so many `cells`, runs, to which those that go on count in part."""

    def __init__(self, cells: int, enabled: bool):
        super().__init__(0, cells, enabled, "runs")
        self.cells, self.finished, self._before = cells, 0, 0

    def add(self, cells: int) -> None:
        """Counts runs that have ended."""
        self.finished += cells
        self._before = self.finished
        super().update(self.finished, 0, {})

    def part(self, cells: int, rounds: int) -> Self:
        """The bar from now on for some runs that begin, of so many rounds."""
        self._began, self._before = self._before, self._before + cells
        self._runs_per_round = cells / rounds
        return self

    def update(
        self, round: float, rounds_per_second: float, metrics: Mapping[str, Any]
    ) -> None:
        """Moves the bar by the rounds of the runs that began last."""
        done = self._began + round * self._runs_per_round
        super().update(done, rounds_per_second, metrics)


class _Cell:
    """One output of a notebook, replaced in place; needs no widgets."""

    def __init__(self):
        from IPython.display import display

        self._display, self._handle = display, None

    def show(self, bar: Progress) -> None:
        out = io.StringIO()
        console = Console(file=out, force_jupyter=False, width=100, color_system=None)
        console.print(bar.get_renderable())
        picture = {"text/plain": out.getvalue().rstrip()}
        if self._handle is None:
            self._handle = self._display(picture, raw=True, display_id=True)
        else:
            self._handle.update(picture, raw=True)
