"""Callbacks that pass on what a run measures, to be watched while it goes on.

Each has a writer for every seed and is given in ``callbacks`` of `simulate`. Without
its package it raises ImportError, whose message names the extra. A run's own record
needs none of them, see `fedjax_core.run_dir`.
"""

import functools
import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedjax_core import processes
from fedjax_core.driver import Report


class _Logger:
    """Opens a writer for a seed when it first has something to say."""

    def __init__(self):
        self._writers: dict[int, Any] = {}

    def __call__(self, report: Report) -> None:
        """Writes the metrics of `report`, "train/..." by round and "evaluation/..."."""
        if not processes.is_first():
            return
        count = max((v.shape[1] for v in report.train.values()), default=1)
        for s, seed in enumerate(report.seeds):
            if seed not in self._writers:
                self._writers[seed] = self._open(f"seed_{seed}")
            by_round = {
                report.round - count + 1 + k: {
                    f"train/{name}": float(v[s, k]) for name, v in report.train.items()
                }
                for k in range(count)
            }
            by_round[report.round] |= {
                f"evaluation/{name}": float(v[s])
                for name, v in report.evaluation.items()
            }
            self._write(self._writers[seed], by_round)

    def close(self) -> None:
        """Writes what is still queued and ends the seeds' runs."""
        for writer in self._writers.values():
            self._end(writer)
        self._writers = {}

    def _open(self, name: str) -> Any:
        raise NotImplementedError

    def _write(self, writer: Any, by_round: Mapping[int, dict[str, float]]) -> None:
        raise NotImplementedError

    def _end(self, writer: Any) -> None:
        writer.close()


class TensorBoard(_Logger):
    """Writes TensorBoard events (extra ``tensorboard``).

    Args:
      path: directory of the event files; seed s writes to ``path/seed_s``.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__()
        self._make = _needs("tensorboardX", "tensorboard").SummaryWriter
        self._path = Path(path)

    def _open(self, name: str) -> Any:
        # Events reach the file a second later at most, to be watched live.
        return self._make(str(self._path / name), flush_secs=1)

    def _write(self, writer: Any, by_round: Mapping[int, dict[str, float]]) -> None:
        for round, values in by_round.items():
            for name, value in values.items():
                writer.add_scalar(name, value, round)


class WeightsAndBiases(_Logger):
    """Logs to Weights & Biases (extra ``wandb``): a run for each seed, in one group.

    A run that is resumed goes on as further runs of the group.

    Args:
      project: where the runs go.
      group: their common name.
      **options: others of ``wandb.init``: ``mode="offline"`` needs neither network nor
        account and writes to `dir`, ``config=`` says what ran.
    """

    def __init__(self, project: str, group: str, **options: Any):
        super().__init__()
        given = {"project": project, "group": group, "reinit": "create_new"}
        self._init = functools.partial(_needs("wandb").init, **given | options)

    def _open(self, name: str) -> Any:
        return self._init(name=name)

    def _write(self, writer: Any, by_round: Mapping[int, dict[str, float]]) -> None:
        for round, values in by_round.items():
            writer.log(values, step=round)

    def _end(self, writer: Any) -> None:
        writer.finish()


class MLflow(_Logger):
    """Logs to an MLflow tracking store (extra ``mlflow``): a run for each seed.

    A run that is resumed goes on as further runs of the experiment.

    Args:
      store: its URI: "sqlite:///runs/mlflow.db" is a local file.
      experiment: that the runs belong to; made if it is new.
    """

    def __init__(self, store: str, experiment: str):
        super().__init__()
        self._client = _needs("mlflow").MlflowClient(store)
        self._metric = importlib.import_module("mlflow.entities").Metric
        found = self._client.get_experiment_by_name(experiment)
        new = self._client.create_experiment
        self._experiment = found.experiment_id if found else new(experiment)

    def _open(self, name: str) -> str:
        return self._client.create_run(self._experiment, run_name=name).info.run_id

    def _write(self, writer: str, by_round: Mapping[int, dict[str, float]]) -> None:
        now = int(1000 * time.time())
        metrics = [
            self._metric(name, value, now, round)
            for round, values in by_round.items()
            for name, value in values.items()
        ]
        for start in range(0, len(metrics), 1000):  # a store takes no more at once
            self._client.log_batch(writer, metrics[start : start + 1000])

    def _end(self, writer: str) -> None:
        self._client.set_terminated(writer)


def _needs(package: str, extra: str = "") -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"logging to {package} needs it: "
            f"pip install 'fedjax_core[{extra or package}]'"
        ) from error
