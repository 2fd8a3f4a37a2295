"""A callback that writes TensorBoard events (extra ``tensorboard``)."""

import os
from pathlib import Path
from typing import Any

from fedjax_core import processes
from fedjax_core.driver import Report


class TensorBoard:
    """Writes every metric of every seed; pass it in ``callbacks`` of `simulate`.

    Args:
      path: directory of the event files; seed s writes to ``path/seed_s``.

    Raises:
      ImportError: tensorboardX is not installed; the message names the extra.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs tensorboardX: pip install 'fedjax_core[tensorboard]'"
            ) from error
        self._path, self._make = Path(path), tensorboardX.SummaryWriter
        self._writers: dict[int, Any] = {}

    def __call__(self, report: Report) -> None:
        """Writes what `report` holds, round by round."""
        if not processes.is_first():
            return
        for s, seed in enumerate(report.seeds):
            if seed not in self._writers:
                # Events reach the file a second later at most, to be watched live.
                where = str(self._path / f"seed_{seed}")
                self._writers[seed] = self._make(where, flush_secs=1)
            writer = self._writers[seed]
            for name, values in report.train.items():
                first = report.round - values.shape[1] + 1
                for k, value in enumerate(values[s]):
                    writer.add_scalar(f"train/{name}", float(value), first + k)
            for name, value in report.evaluation.items():
                writer.add_scalar(f"evaluation/{name}", float(value[s]), report.round)

    def close(self) -> None:
        """Writes what is still queued; happens by itself when Python exits."""
        for writer in self._writers.values():
            writer.close()
