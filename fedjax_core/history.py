"""Collects what a run measures, in memory and in its run directory."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_core.map import STAGES
from fedjax_core.result import Exclusion, Result
from fedjax_core.run_dir import RunDir, RunDirError, SavedRun


def read_result(run_dir: str | os.PathLike) -> Result:
    """What a run has measured up to its latest checkpoint, without its state.

    Its directory may have been moved, and the run may still be going on.

    Raises:
      RunDirError: it is no run directory, or damaged.
    """
    run = SavedRun(run_dir)
    seeds = run.config.get("seeds")
    rows = run.rows("metrics")
    there = list(dict.fromkeys(int(row["seed"]) for row in rows))
    if not seeds or not isinstance(seeds, list) or (rows and seeds != there):
        raise RunDirError(
            f"{run.path / 'config.json'} must name the seeds of its tables, "
            f"{there}, got {seeds!r}; put it back from a copy."
        )
    history = History(seeds, ())
    history.load(run)
    return history.result(None, run_dir=run.path)


class _Table:
    """Rows of metrics per round and seed; float64, which holds any float32 exactly."""

    def __init__(self, seeds: Sequence[int]):
        self.seeds = seeds
        self.rounds: list[int] = []
        self.rows: list[dict[str, np.ndarray]] = []  # [S] each
        self._saved = 0

    def add(self, round: int, metrics: Mapping[str, Any]) -> None:
        self.rounds.append(round)
        self.rows.append({k: np.asarray(v, np.float64) for k, v in metrics.items()})

    def unsaved(self) -> list[dict[str, Any]]:
        """What came since the last call, a line for each round and seed."""
        new = slice(self._saved, len(self.rows))
        self._saved = new.stop
        return [
            {"round": round, "seed": seed, **{k: v[s].item() for k, v in row.items()}}
            for round, row in zip(self.rounds[new], self.rows[new], strict=True)
            for s, seed in enumerate(self.seeds)
        ]

    def load(self, rows: list[dict[str, str]]) -> None:
        for start in range(0, len(rows), len(self.seeds)):
            group = rows[start : start + len(self.seeds)]
            names = [name for name in group[0] if name not in ("round", "seed")]
            columns = {name: [float(row[name]) for row in group] for name in names}
            self.add(int(group[0]["round"]), columns)
        self._saved = len(self.rows)

    def columns(self) -> dict[str, np.ndarray]:
        names = self.rows[0] if self.rows else ()
        return {n: np.stack([row[n] for row in self.rows], axis=1) for n in names}


class History:
    """Metrics of every round and seed so far, and clients excluded, by name."""

    def __init__(self, seeds: Sequence[int], client_ids: tuple[str, ...]):
        self.seeds, self._client_ids = tuple(seeds), client_ids
        self.excluded: list[Exclusion] = []
        self.client_metrics: dict[str, np.ndarray] = {}
        self._train, self._evaluations = _Table(self.seeds), _Table(self.seeds)
        self._excluded_saved = 0

    @property
    def rounds(self) -> int:
        """Rounds completed."""
        return len(self._train.rounds)

    def add_rounds(
        self,
        metrics: Mapping[str, np.ndarray],
        cohorts: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> list[Exclusion]:
        """Takes in the rounds after those so far; returns the clients they excluded.

        Metrics are ``[rounds, S]``. Arrays of other ranks are left out, but for
        "failure", ``[rounds, S, C]`` int, at which of `fedjax_core.map.STAGES` a
        client's update stopped being finite, 0 if it did not. Cohorts, ``[rounds][S]``
        of int ``[C]``, are rows of the population in the order of "failure"; by default
        every round is the whole population in order.
        """
        before = self.rounds
        scalars = {name: v for name, v in metrics.items() if v.ndim == 2}
        for k in range(len(next(iter(scalars.values())))):
            self._train.add(before + k + 1, {name: v[k] for name, v in scalars.items()})
        failure = metrics.get("failure", np.zeros((0, 0, 0)))
        excluded = [
            Exclusion(
                before + k + 1,
                self.seeds[s],
                self._client_ids[c if cohorts is None else cohorts[k][s][c]],
                STAGES[int(failure[k, s, c])],
            )
            for k, s, c in np.argwhere(failure > 0).tolist()
        ]
        self.excluded += excluded
        return excluded

    def add_evaluation(
        self,
        metrics: Mapping[str, np.ndarray],
        client_metrics: dict[str, np.ndarray],
    ) -> None:
        """Takes in an evaluation after the last round: ``[S]`` and ``[S, N]`` each."""
        self._evaluations.add(self.rounds, metrics)
        self.client_metrics = client_metrics

    def save(self, run_dir: RunDir) -> None:
        """Appends what is new to the run directory."""
        run_dir.append("metrics", self._train.unsaved())
        evaluations = self._evaluations.unsaved()
        run_dir.append("evaluations", evaluations)
        new = self.excluded[self._excluded_saved :]
        run_dir.append("excluded", [e._asdict() for e in new])
        self._excluded_saved = len(self.excluded)
        if evaluations:
            run_dir.write_arrays("client_metrics", self.client_metrics)

    def load(self, run_dir: SavedRun) -> None:
        """Reads back what `run_dir` recorded up to its latest checkpoint."""
        self._train.load(run_dir.rows("metrics"))
        self._evaluations.load(run_dir.rows("evaluations"))
        self.excluded = [
            Exclusion(int(r["round"]), int(r["seed"]), r["client_id"], r["stage"])
            for r in run_dir.rows("excluded")
        ]
        self.client_metrics = run_dir.arrays("client_metrics")
        self._excluded_saved = len(self.excluded)

    def result(self, state: Any, **extra: Any) -> Result:
        """The run so far."""
        return Result(
            seeds=self.seeds,
            rounds=self.rounds,
            train=self._train.columns(),
            evaluated=np.array(self._evaluations.rounds, int),
            evaluations=self._evaluations.columns(),
            client_metrics=self.client_metrics,
            state=state,
            excluded=list(self.excluded),
            **extra,
        )
