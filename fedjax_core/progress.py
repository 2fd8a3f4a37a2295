"""A progress bar with rounds per second and the metrics of the moment."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)


class RoundsBar:
    """Context manager; `update` moves the bar to a round and shows metrics."""

    def __init__(self, start: int, rounds: int, enabled: bool):
        self._bar = Progress(
            TextColumn("rounds"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            # Results may be piped from stdout, whose encoding may lack the bar's signs.
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task = self._bar.add_task(
            "rounds", completed=start, total=rounds, speed="compiling", metrics=""
        )
        self._shown: dict[str, float] = {}

    def update(
        self, round: int, rounds_per_second: float, metrics: Mapping[str, Any]
    ) -> None:
        """Shows `round` rounds done; each metric is averaged over its array."""
        self._shown |= {k: float(np.mean(v)) for k, v in metrics.items()}
        text = "  ".join(f"{k} {v:.4g}" for k, v in self._shown.items())
        speed = f"{rounds_per_second:.3g} rounds/s" if rounds_per_second > 0 else ""
        self._bar.update(self._task, completed=round, speed=speed, metrics=text)

    def __enter__(self) -> "RoundsBar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
