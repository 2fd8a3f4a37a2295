"""A callback that writes TensorBoard events (extra ``tensorboard``)."""

import os
from pathlib import Path
from typing import Any

from fedjax_core.simulate import Report


class TensorBoard:
    """Writes every metric of every seed; pass it in ``callbacks`` of `simulate`.

    Args:
      path: directory of the event files; seed s writes to ``path/seed_s``.
      seeds: the seeds of the run, as given to `simulate`.

    Raises:
      ImportError: tensorboardX is not installed; the message names the extra.
    """

    def __init__(self, path: str | os.PathLike, seeds: Any = (0,)):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "TensorBoard needs tensorboardX: pip install 'fedjax_core[tensorboard]'"
            ) from error
        seeds = (seeds,) if isinstance(seeds, int) else tuple(seeds)
        # Events reach the file a second later at most, to be watched live.
        self._writers = [
            SummaryWriter(str(Path(path) / f"seed_{s}"), flush_secs=1) for s in seeds
        ]

    def __call__(self, report: Report) -> None:
        """Writes what `report` holds, round by round."""
        for s, writer in enumerate(self._writers):
            for name, values in report.train.items():
                first = report.round - values.shape[1] + 1
                for k, value in enumerate(values[s]):
                    writer.add_scalar(f"train/{name}", float(value), first + k)
            for name, value in report.evaluation.items():
                writer.add_scalar(f"evaluation/{name}", float(value[s]), report.round)

    def close(self) -> None:
        """Writes what is still queued; happens by itself when Python exits."""
        for writer in self._writers:
            writer.close()
