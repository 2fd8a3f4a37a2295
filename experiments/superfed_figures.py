"""Figures 2.4 and 2.5 of Hahn's dissertation: valleys of the loss, all mixtures."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from fedjax_core import simulate, study
from fedjax_core.algorithms.superfed import LAMBDAS
from fedjax_core.experiments.report import band, claims_table, panels, save
from fedjax_core.experiments.superfed_printed import OURS
from fedjax_core.landscape import barrier, dip, landscape, plane, width
from fedjax_core.result import spread
from fedjax_core.study_report import Table
from fedjax_core.types import Params


def profiles(experiment: Any, outcome: study.Outcome, console: Console) -> list[Table]:
    """Figure 2.5: accuracy at every mixture, and how far it dips between the ends."""
    figure, axes = panels(5, 3.4, 1, 1)
    rows, dips = [], {}
    for i, row in enumerate(r for r in outcome.rows if r.method in (*OURS, "APFL")):
        if row.result is None:
            continue

        def on_grid(metric, result=row.result):
            names = [f"test_personal_{lam:g}_{metric}_client_mean" for lam in LAMBDAS]
            return np.stack([result.series(n)[1][:, -1] for n in names], -1)

        values, losses = on_grid("accuracy"), on_grid("loss")
        mean, std = values.mean(0), values.std(0)
        band(axes, LAMBDAS, mean, mean - std, mean + std, f"C{i}", row.method)
        dips[row.method] = dip(values)
        cells = [row.method, *(f"{100 * mean[k]:.1f}" for k in (0, 5, 10))]
        cells.append(spread(100 * dips[row.method], ".2f"))
        rows.append((*cells, spread(barrier(LAMBDAS, losses), ".3f")))
    axes.set(xlabel="lambda", ylabel="accuracy, mean over clients")
    axes.legend()
    setting = outcome.rows[0].setting
    save(figure, experiment.out / f"figure 2.5 {setting}.png", console)
    header = ("accuracy in %", "lambda 0", "0.5", "1", "dip below the better end")
    header += ("barrier of the loss",)
    found = [Table(f"Figure 2.5: {setting}", header, rows)]
    if "APFL" in dips:
        flat = {f"{m} is flatter than APFL": dips[m] for m in OURS if m in dips}
        rows = [(what, setting, mine - dips["APFL"]) for what, mine in flat.items()]
        found.append(claims_table("Claims of figure 2.5", rows))
    return found


def _trained_by(
    experiment: Any, setting: study.Setting
) -> Callable[[Params], list[Params]]:
    """Where the two clients that hold the most examples would train a model to."""
    data, loss = setting.data.train, setting.model.loss

    @jax.jit
    def descend(params, batch):
        def down(_, p):
            slope = jax.grad(lambda p: loss(p, batch, jax.random.key(0)).mean())(p)
            return jax.tree.map(lambda w, g: w - experiment.client_lr * g, p, slope)

        return jax.lax.fori_loop(0, 20, down, params)

    largest = [data.client(int(i)) for i in np.argsort(-data.sizes)[:2]]
    return lambda params: [descend(params, batch) for batch in largest]


def landscapes(
    experiment: Any,
    outcome: study.Outcome,
    setting: study.Setting,
    console: Console,
    within: float = 0.1,
) -> list[Table]:
    """Figure 2.4: the test loss around the server's models, and how wide the valley.

    On planes through a model and those that two clients would train it to.
    """
    e, widths, drawn = experiment, {}, {}
    data, model = setting.data, setting.model
    assert data.test is not None
    batch = {k: jnp.asarray(v) for k, v in data.test.examples.items()}
    corners_of, radius = _trained_by(e, setting), 0.0

    def loss(params):
        return model.loss(params, batch, jax.random.key(0)).mean()

    asked = outcome.study
    assert isinstance(asked, study.Study)
    where = outcome.rows[0].setting
    there = {row.method for row in outcome.rows if row.result}
    for name in (name for name in ("FedAvg", *OURS) if name in there):
        method = asked.methods[name]
        result = simulate(  # what is there, read again with its models
            method.make(method.config, model.loss),
            data,
            model,
            rounds=e.rounds,
            seeds=asked.seeds,
            eval_splits=asked.eval_splits,
            run_dir=outcome.out / "runs" / where / name,
            resume=True,
            progress=False,
            cohort_size=e.cohort_size,
        )
        for s in range(e.num_seeds):
            params = jax.tree.map(lambda x: x[s], result.params)  # noqa: B023
            over = plane(params, *corners_of(params))
            # As far for all methods.
            radius = radius or 3 * float(np.abs(over.corners).max())
            side = np.linspace(-radius, radius, e.points)
            values, cell = landscape(over, loss, side, side), side[1] - side[0]
            widths.setdefault(name, []).append(width(values, cell**2, within))
            drawn.setdefault(name, values)
    if not drawn:
        return []
    figure, axes = panels(3 * len(drawn), 3, 1, len(drawn), squeeze=False)
    top = max(np.quantile(values, 0.8) for values in drawn.values())
    for place, (name, values) in zip(axes[0], drawn.items(), strict=True):
        place.contourf(np.minimum(values, top), 20, extent=[-radius, radius] * 2)
        place.set_title(name, size=9)
    save(figure, e.out / f"figure 2.4 {where}.png", console)
    rows = [(name, spread(np.array(w), ".3g")) for name, w in widths.items()]
    title = f"{where}, area where the loss is at most {within:g} above its least"
    areas = Table(f"Figure 2.4: {title}", ("model of the server", "area"), rows)
    pairs = [("SuPerFed-LM", "SuPerFed-MM"), ("SuPerFed-MM", "FedAvg")]
    wider = [
        (f"{a} is wider than {b}", where, np.subtract(widths[a], widths[b]))
        for a, b in pairs
        if {a, b} <= widths.keys()
    ]
    return [areas, claims_table("Claims of figure 2.4", wider)]
