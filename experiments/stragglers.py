"""Slow devices: FedAvg that waits, FedAvg that drops them, FedBuff that does neither.

Devices differ in speed by a log-normal factor; in one row some of them also fail. All
methods train the same model on the same clients with as many updates, where none
fails; the table says when each first reached a test accuracy, in virtual seconds and in
bytes sent.
"""

import dataclasses
from pathlib import Path

import numpy as np

from fedjax_core import (
    Failing,
    LocalWork,
    Result,
    Uniform,
    check,
    models,
    study_report,
)
from fedjax_core.algorithms import fedavg, fedbuff
from fedjax_core.datasets import digits, partition
from fedjax_core.experiments import report
from fedjax_core.plan import num_steps
from fedjax_core.result import spread
from fedjax_core.types import Checked, Fraction, NonNegative, Positive, PositiveInt
from fedjax_core.virtual_time import Asynchronous, Devices, Synchronous


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_clients: clients that share the training images.
      alpha: concentration of the Dirichlet split.
      cohort_size: clients whose updates a round of FedAvg averages.
      select: clients that are selected where the slow are dropped.
      buffer_size: updates of a round of FedBuff.
      rounds: rounds of FedAvg; FedBuff has as many updates.
      spread: standard deviation of the logarithm of a device's speed.
      failures: share of the clients that fail in a round, where some do.
      goal: test accuracy to reach.
      num_seeds: independent runs of each method.
      hidden: width of the model's hidden layer.
      out: directory of records and page.
    """

    num_clients: PositiveInt = 100
    alpha: Positive = 0.5
    cohort_size: PositiveInt = 10
    select: PositiveInt = 15
    buffer_size: PositiveInt = 5
    rounds: PositiveInt = 150
    spread: NonNegative = 1.0
    failures: Fraction = 0.3
    goal: float = 0.85
    num_seeds: PositiveInt = 5
    hidden: PositiveInt = 50
    out: Path = Path("runs/stragglers")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(1, self.num_clients, cohort_size=self.cohort_size)
        check.in_range(self.cohort_size, self.num_clients, select=self.select)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(rounds=6, num_seeds=2, goal=0.2, hidden=12),
}


def run(experiment: Experiment) -> dict[str, Result]:
    """A result for each method, recorded under its name."""
    data = partition.dirichlet(
        digits.load(), num_clients=experiment.num_clients, alpha=experiment.alpha
    )
    model = models.mlp(64, 10, hidden=(experiment.hidden,))
    work = LocalWork(batch_size=10, epochs=2)
    devices = Devices(step_seconds=0.1, spread=experiment.spread)
    # Somebody without examples answers as soon as somebody with one step.
    seconds = devices.seconds(np.maximum(num_steps(data.train.sizes, work), 1))
    average = fedavg.make(fedavg.Config(work=work), model.loss)
    buffered = fedbuff.make(fedbuff.Config(work=work), model.loss)
    cohort, select = experiment.cohort_size, experiment.select
    steps = experiment.rounds * cohort // experiment.buffer_size
    drawn, many = Uniform(cohort_size=cohort), Uniform(cohort_size=select)
    answer = Failing(participation=drawn, rate=experiment.failures)
    waits, some, drops = (
        Synchronous(participation=who, seconds=seconds, wait_for=until)
        for who, until in ((drawn, None), (answer, None), (many, cohort))
    )
    never = Asynchronous(
        concurrency=cohort, buffer_size=experiment.buffer_size, seconds=seconds
    )
    methods = {
        "FedAvg waits": (average, waits, experiment.rounds),
        "FedAvg, some fail": (average, some, experiment.rounds),
        "FedAvg drops the slow": (average, drops, experiment.rounds),
        "FedBuff": (buffered, never, steps),
    }
    return {
        name: report.recorded(
            experiment,
            name,
            algorithm,
            data,
            model,
            rounds=rounds,
            participation=participation,
            eval_every=max(1, rounds // 30),
            record={k: v for k, v in vars(experiment).items() if k != "out"},
        )
        for name, (algorithm, participation, rounds) in methods.items()
    }


def main(experiment: Experiment) -> None:
    """Runs the methods, says when they reached the goal and draws them over time."""
    results = run(experiment)

    def reached(result: Result, over: str, unit: float) -> str:
        when = result.time_to("test_accuracy", at_least=experiment.goal, over=over)
        when = when[~np.isnan(when)] / unit
        if len(when) < len(result.seeds):
            return f"{len(when)} of {len(result.seeds)} seeds did"
        return spread(when)

    rows = []
    for name, result in results.items():
        when = reached(result, "virtual_seconds", 1.0)
        sent = reached(result, "uplink_bytes", 1e6)
        total = f"{result.total('virtual_seconds'):.4g}"
        worst = f"{result.final('test_accuracy_client_p10')[0]:.3f}"
        rows.append((name, when, sent, total, worst))
    columns = ("", f"seconds to {experiment.goal:g}", "MB up to it", "seconds in all")
    title = f"{experiment.num_seeds} seeds, mean ± one deviation"
    times = study_report.Table(title, (*columns, "worst tenth"), rows)
    cells = {(name, "digits"): result for name, result in results.items()}
    report.show(report.outcome_of(experiment, cells), [times])
