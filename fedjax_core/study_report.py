"""What a study shows: tables beside printed numbers, orderings, figures, one page."""

import base64
import csv
import html
import io
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_core import command, processes
from fedjax_core.result import spread
from fedjax_core.study import Outcome, Row, summary

_EXACT = 16  # seeds whose signs are flipped in every way


class Ordering(NamedTuple):
    """A claimed ordering and what the seeds say."""

    better: str  # the method that is claimed to be
    worse: str
    setting: str
    difference: float  # by how much it is, mean over seeds; NaN where a cell failed
    p: float  # of no difference against the claim, one-sided
    verdict: str  # "held", "not held" where the opposite is significant, "undecided"


class Table(NamedTuple):
    """Text in rows under a header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def sign_flip(differences: np.ndarray) -> float:
    """The one-sided p-value of the sign-flip permutation test for paired differences.

    If the two methods are alike, each seed's difference is as likely to have the other
    sign; p is the share of all signs whose sum is at least the observed one. So p is at
    most a with a chance of at most a, exactly; with S seeds it is at least 2^-S. Of
    more than 16 seeds the signs of a fixed group are taken: 16 patterns drawn at random
    and what they combine to, 65,536, which keeps that so and p at least 2^-16.

    Args:
      differences: ``[S]``, finite.

    References:
      Fisher, "The Design of Experiments", 1935, section 21.
    """
    d = np.asarray(differences, np.float64)
    size = min(len(d), _EXACT)
    flips = np.arange(2**size)[:, None] >> np.arange(size) & 1
    if len(d) > size:  # the first 16 seeds in every way, others along with them
        along = np.random.default_rng(0).integers(0, 2, (size, len(d) - size))
        flips = np.hstack([flips, flips @ along % 2])
    sums, slack = (1 - 2 * flips) @ d, 1e-9 * np.abs(d).sum()
    return float((sums >= d.sum() - slack).mean())


def verdict_of(differences: np.ndarray, level: float = 0.05) -> str:
    """Whether an ordering is "held", "not held" or "undecided", by `sign_flip`.

    "not held" where the opposite is significant.

    Args:
      differences: by how much the better one is better, ``[S]``, by seeds.
      level: of `sign_flip`, in each direction.
    """
    d = np.asarray(differences)
    if sign_flip(d) <= level:
        return "held"
    return "not held" if sign_flip(-d) <= level else "undecided"


def orderings(outcome: Outcome) -> list[Ordering]:
    """Every claim of the study, tested by `sign_flip` in both directions."""
    study, found = outcome.study, []
    for better, worse, setting in study.claims:
        pair = [outcome.row(name, setting).values for name in (better, worse)]
        if not all(len(values) and np.isfinite(values).all() for values in pair):
            gap, p, verdict = math.nan, math.nan, "undecided"
        else:
            d = (pair[0] - pair[1]) * (1 if study.higher_is_better else -1)
            gap, p, verdict = float(d.mean()), sign_flip(d), verdict_of(d, study.level)
        found.append(Ordering(better, worse, setting, gap, p, verdict))
    return found


def records(outcome: Outcome) -> list[dict[str, Any]]:
    """A line for every cell, as in table.csv; "values" are those of the seeds."""
    lines = []
    for row in outcome.rows:
        values, best = row.values, row.best(outcome.study.higher_is_better)
        mean = float(values.mean()) if len(values) else math.nan
        top = float(best.mean()) if len(best) else math.nan
        known = outcome.study.printed.get((row.method, row.setting), math.nan)
        printed, deviation = (*np.atleast_1d(known).tolist(), math.nan)[:2]
        lines.append(
            {
                "setting": row.setting,
                "method": row.method,
                "metric": row.metric,
                "mean": mean,
                "std": float(values.std(ddof=1)) if len(values) > 1 else math.nan,
                "best": top,
                "printed": printed,
                "printed_std": deviation,
                "difference": (top if outcome.study.show_best else mean) - printed,
                "rounds": row.result.rounds if row.result else 0,
                "megabytes": _megabytes(row),
                "values": " ".join(map(repr, values.tolist())),
                "error": row.error,
            }
        )
    return lines


def _megabytes(row: Row) -> float:
    """Sent and received, mean over seeds; NaN where that is not known."""
    if row.result is None or "uplink_bytes" not in row.result.train:
        return math.nan
    return row.result.total("megabytes")


def tables(outcome: Outcome) -> list[Table]:
    """One for every setting; of claims, grids and failures, where there are any."""
    study, shown = outcome.study, []
    printed = ("printed", "printed_std")
    lines = list(zip(outcome.rows, records(outcome), strict=True))
    for setting in _settings(outcome):
        rows = [
            (
                _label(outcome, row),
                spread(row.values, ".4f") or ("unfinished", "failed")[row.finished],
                spread(row.best(study.higher_is_better), ".4f"),
                " ± ".join(filter(None, (_number(line[k]) for k in printed))),
                _number(line["difference"], "+.4f"),
                _number(line["megabytes"], ".4g"),
            )
            for row, line in lines
            if row.setting == setting
        ]
        ours = f"{study.metric}{', ours' * bool(study.printed)}"
        header = ("method", ours, "best round", "printed", "difference", "MB")
        kept = [True, True, study.show_best, *[bool(study.printed)] * 2, True]
        header, *rows = (tuple(itertools.compress(x, kept)) for x in [header, *rows])
        shown.append(Table(setting, header, rows))
    more = [
        Table(
            f"Claims ({_test(outcome)})",
            ("claim, > is better", "setting", "by", "p", "verdict"),
            [
                (f"{o.better} > {o.worse}", o.setting, _number(o.difference, "+.4f"),
                 _number(o.p, ".3g"), o.verdict)
                for o in orderings(outcome)
            ],
        ),
        Table(
            f"Grids, on validation data and seeds {list(study.tuning_seeds)}",
            ("method", "setting", "point", study.metric, ""),
            [
                (row.method, row.setting, trial.point,
                 "failed" if trial.error else _number(trial.score),
                 "taken" if trial.point == row.taken else "")
                for row in outcome.rows
                for trial in row.trials
            ],
        ),
    ]  # fmt: skip
    for title, finished in (("Failed", True), ("Unfinished", False)):
        rows = [
            (row.method, row.setting, row.error)
            for row in outcome.rows
            if row.error and row.finished == finished
        ]
        more.append(Table(title, ("method", "setting", "why"), rows))
    return shown + [table for table in more if table.rows]


def _settings(outcome: Outcome) -> list[str]:
    return list(dict.fromkeys(row.setting for row in outcome.rows))


def _label(outcome: Outcome, row: Row) -> str:
    """The method's name, with its metric where that is not the study's."""
    metric = row.metric.removeprefix("test_")
    return row.method if metric == outcome.study.metric else f"{row.method} ({metric})"


def _test(outcome: Outcome) -> str:
    seeds, level = len(outcome.study.seeds), outcome.study.level
    text = (
        f"sign-flip permutation test, paired over {seeds} seeds, one-sided, false "
        f"alarms at most {level:g} each way, for each claim by itself"
    )
    if 2.0**-seeds > level:
        text += f": so few seeds decide nothing, p >= {2.0**-seeds:.3g}"
    return text


def _number(value: float, form: str = ".4f") -> str:
    return "" if math.isnan(value) else format(value, form)


def text_of(table: Table) -> str:
    """A table in Markdown, under its title."""

    def line(cells: Iterable[str]) -> str:
        # An error may have several lines, a row has one.
        texts = (" ".join(c.replace("|", "/").split()) for c in cells)
        return f"| {' | '.join(texts)} |"

    rule = line(["---"] + ["---:"] * (len(table.header) - 1))
    body = [line(table.header), rule, *map(line, table.rows)]
    return "\n".join([f"## {table.title}", "", *body, ""])


def markdown(outcome: Outcome) -> str:
    """The tables as text; spreads are standard deviations over seeds."""
    return "\n".join(map(text_of, tables(outcome)))


def figures(outcome: Outcome, setting: str) -> dict[str, Any]:
    """Name -> matplotlib figure: the metric against what it costs, and over clients."""
    from matplotlib.figure import Figure

    runs = [
        (_label(outcome, row), row.metric, row.result)
        for row in outcome.rows
        if row.setting == setting and row.result is not None
        if row.metric in row.result.train | row.result.evaluations
    ]
    if not runs:
        return {}
    drawn: dict[str, Figure] = {}

    def axes_of(name: str) -> Any:
        drawn[name] = Figure(figsize=(5, 3.4), layout="constrained")
        return drawn[name].subplots()

    costs = {"megabytes": "uplink_bytes", "virtual seconds": "virtual_seconds"}
    # One point each over the same number of rounds shows nothing.
    if any((r.train | r.evaluations)[metric].shape[1] > 1 for _, metric, r in runs):
        costs = {"rounds": ""} | costs
    for name, measured in costs.items():
        if measured and not all(measured in run.train for _, _, run in runs):
            continue
        axes = axes_of(name)
        over = name.replace(" ", "_") if measured else None
        for label, metric, run in runs:
            run.draw(axes, metric, over=over, label=label)
        axes.set(xlabel=name, ylabel=outcome.study.metric)
    if all(metric in run.client_metrics for _, metric, run in runs):
        axes = axes_of("clients")
        axes.grid(alpha=0.3)
        for label, metric, run in runs:
            values = np.sort(run.client_metrics[metric].ravel())
            values = values[np.isfinite(values)]
            share = np.arange(1, len(values) + 1) / max(len(values), 1)
            axes.step(values, share, where="post", label=label)
        name = f"{outcome.study.metric} of a client, all seeds"
        axes.set(xlabel=name, ylabel="share of clients at or below")
    for figure in drawn.values():
        figure.axes[0].legend(fontsize=8)
    return drawn


def write(outcome: Outcome, more: Sequence[Table] = ()) -> Path:
    """Writes table.csv, table.md, figures/ and report.html; returns the last one.

    Args:
      outcome: to be shown.
      more: tables that the page begins with, also in more.csv, a line for each cell.
    """
    out, lines = outcome.out, records(outcome)
    page = out / "report.html"
    if not processes.is_first():
        return page
    with open(out / "table.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(lines)
    if more:
        with open(out / "more.csv", "w", encoding="utf-8", newline="") as file:
            cells = csv.writer(file, lineterminator="\n")
            cells.writerow(("table", "row", "column", "value"))
            for title, header, rows in more:
                for name, *row in rows:
                    columns = zip(header[1:], row, strict=True)
                    cells.writerows((title, name, *cell) for cell in columns)
    (out / "table.md").write_text(markdown(outcome), "utf-8")
    (out / "figures").mkdir(exist_ok=True)
    pictures = {}
    for setting in _settings(outcome):
        for name, figure in figures(outcome, setting).items():
            png = io.BytesIO()
            figure.savefig(png, format="png", dpi=150)
            (out / "figures" / f"{setting} {name}.png").write_bytes(png.getvalue())
            pictures[setting, name] = png.getvalue()
    page.write_text(_page(outcome, pictures, more), "utf-8")
    return page


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto;
  padding: 1rem; color: #222; background: #fff; overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right;
  overflow-wrap: normal }
th:first-child, td:first-child { text-align: left }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
summary { font-size: 1.5em; font-weight: bold; margin: 1rem 0; cursor: pointer }
img { width: 100%; height: auto }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .5rem }
"""


def _page(
    outcome: Outcome, pictures: dict[tuple[str, str], bytes], more: Sequence[Table]
) -> str:
    """One file that needs no other."""
    parts = []
    for table in (*more, *tables(outcome)):
        parts += [f"<h2>{html.escape(table.title)}</h2>", _html_table(table)]
        mine = [(k[1], png) for k, png in pictures.items() if k[0] == table.title]
        images = [
            f'<img alt="{html.escape(table.title)}: {html.escape(name)}" '
            f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            for name, png in mine
        ]
        parts += [f'<div class="figures">{"".join(images)}</div>'] if images else []
    typed = {}  # and all settings that it came to
    if command.exists(outcome.out):
        came = command.read(outcome.out)
        typed = {"command": came.command, "options": came.options}
    made = json.dumps(typed | summary(outcome), indent=2)
    parts += [
        "<details><summary>How it was made</summary>",
        f"<pre>{html.escape(made)}</pre></details>",
    ]
    title = html.escape(outcome.out.resolve().name)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>Means and standard deviations over seeds, at the end of each run.</p>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def _html_table(table: Table) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        inside = "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
        return f"<tr>{inside}</tr>"

    rows = "".join(line(row, "td") for row in table.rows)
    head = line(table.header, "th")
    return f'<div class="wide"><table>{head}{rows}</table></div>'
