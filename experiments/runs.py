"""Runs on disk, wherever they are: found, joined, compared, drawn, reported."""

import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedjax_core import Result, RunDirError, read_result, study
from fedjax_core.experiments.report import show, tabulate
from fedjax_core.result import plot, spread
from fedjax_core.run_dir import SavedRun, read_json

OVER = {"rounds": None, "bytes": "megabytes", "virtual_seconds": "virtual_seconds"}
_USUAL = ("test_accuracy", "test_loss")
# In which runs of the same method may differ.
_PER_RUN = {"rounds", "seeds", "seed", "num_seeds", "eval_every"}


def find(directory: Path) -> list[Path]:
    """The run directories at and below a directory, but for those of grids.

    Raises:
      RunDirError: there is none.
    """
    if (directory / "config.json").exists():
        return [directory]
    below = sorted(path.parent for path in directory.rglob("config.json"))
    grids = {path.with_name("tuning") for path in directory.rglob("study.json")}
    found = [path for path in below if not grids & set(path.parents)]
    if not found:
        raise RunDirError(f"{directory} holds no run, since it has no config.json.")
    return found


def gather(directories: Sequence[Path]) -> dict[str, Result]:
    """Label -> what was measured; runs that differ in seeds alone are one result.

    Raises:
      RunDirError: a directory holds no run, or nothing has been measured there yet.
    """
    groups: dict[str, dict[Path, Result]] = {}
    for directory in directories:
        paths = find(directory)
        results = {path: read_result(path) for path in paths}
        results = {path: result for path, result in results.items() if result.rounds}
        if not results:
            raise RunDirError(f"{directory} holds no checkpoint yet.")
        for path, result in results.items():
            key = _method(path)
            seen = groups.get(key, {}).values()
            if any(set(result.seeds) & set(other.seeds) for other in seen):
                key = str(path)  # the same run twice is no error bar
            groups.setdefault(key, {})[path] = result
    everything = [path.absolute() for group in groups.values() for path in group]
    root = os.path.commonpath(everything) if len(everything) > 1 else ""
    out = {}
    for group in groups.values():
        labels = [os.path.relpath(path, root) if root else str(path) for path in group]
        label = labels[0] if len(labels) == 1 else f"{labels[0]} ... {labels[-1]}"
        out[label] = _joined(list(group.values()))
    return out


def _method(path: Path) -> str:
    """What decides the numbers of a run but for its seeds and length, as text."""

    def kept(config: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in config.items() if name not in _PER_RUN}

    config = kept(SavedRun(path).config)
    if isinstance(config.get("record"), dict):
        config["record"] = kept(config["record"])
    return json.dumps(config, sort_keys=True)


def _joined(results: Sequence[Result]) -> Result:
    """Several runs as one, up to where all of them are."""
    if len(results) == 1:
        return results[0]
    rounds = min(result.rounds for result in results)
    evaluated = functools.reduce(np.intersect1d, [r.evaluated for r in results])

    def of_all(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
        names = _common(parts)
        return {name: np.concatenate([part[name] for part in parts]) for name in names}

    train = [{k: v[:, :rounds] for k, v in r.train.items()} for r in results]
    evaluations = [
        {k: v[:, np.isin(r.evaluated, evaluated)] for k, v in r.evaluations.items()}
        for r in results
    ]
    return Result(
        seeds=sum((result.seeds for result in results), ()),
        rounds=rounds,
        train=of_all(train),
        evaluated=evaluated,
        evaluations=of_all(evaluations),
        client_metrics={},
        state=None,
        excluded=[e for result in results for e in result.excluded],
    )


def _common(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names that are in all, in the order of the first."""
    first, *others = parts
    return [name for name in first if all(name in other for other in others)]


def _metrics(results: Mapping[str, Result], wanted: Sequence[str]) -> list[str]:
    """Names of metrics that all runs have.

    Raises:
      RunDirError: one of those wanted is not among them.
    """
    known = _common([r.evaluations | r.train for r in results.values()])
    if not wanted:
        evaluated = _common([result.evaluations for result in results.values()])
        usual = [name for name in _USUAL if name in evaluated]
        return usual or evaluated[:2] or known[:2]
    found = []
    for name in wanted:
        names = [n for n in (name, f"test_{name}") if n in known]
        if not names:
            raise RunDirError(
                f"no metric {name!r} that all runs have; there are: {', '.join(known)}."
            )
        found.append(names[0])
    return found


def compare(directories: Sequence[Path]) -> None:
    """Prints the last evaluations of runs side by side, or what rounds reported."""
    results = gather(directories)
    shown = [result.evaluations or result.train for result in results.values()]
    rows = [("rounds", *(str(result.rounds) for result in results.values()))]
    for name in dict.fromkeys(name for metrics in shown for name in metrics):
        last = [metrics.get(name, np.zeros((0, 1)))[:, -1] for metrics in shown]
        rows.append((name, *map(spread, last)))
    caption = "mean ± standard deviation over seeds"
    table = tabulate(("", *results), rows, caption=caption)
    table.columns[0].no_wrap = True
    Console().print(table)


def draw(
    directories: Sequence[Path], metrics: Sequence[str], over: str, out: Path
) -> None:
    """Draws curves of runs into one picture and says where it is."""
    results = gather(directories)
    names = _metrics(results, metrics)
    try:
        plot(results, names, over=OVER[over], path=out)
    except KeyError as error:
        raise RunDirError(f"--over {over}: {error.args[0]}") from None
    Console().print(f"plot: {out}", highlight=False, soft_wrap=True)


def report(directories: Sequence[Path], metric: str | None, out: Path | None) -> None:
    """Writes pages of what is on disk: one for each study, one for all other runs."""
    studies = [path for path in directories if (path / "study.json").exists()]
    for path in studies:
        show(study.read(path))
    others = [path for path in directories if path not in studies]
    if not others:
        return
    results = gather(others)
    (name,) = _metrics(results, [metric] if metric else [])[:1]
    rows = [
        study.Row(label, "runs", None, name, result, "")
        for label, result in results.items()
    ]
    runs = {
        str(path): SavedRun(path).config | {"versions": _versions(path)}
        for directory in others
        for path in find(directory)
    }
    design = study.Design(
        seeds=sorted({seed for result in results.values() for seed in result.seeds}),
        tuning_seeds=(),
        metric=name.removeprefix("test_"),
    )
    out = out or (others[0] if len(others) == 1 else Path("report"))
    out.mkdir(parents=True, exist_ok=True)
    show(study.Outcome(design, out, rows, {"runs": runs}))


def _versions(path: Path) -> Any:
    return read_json(path / "versions.json", list, "put it back from a copy")[-1:]
