"""Server optimisers of Reddi et al. (2021) on skewed digits: FedAvg and four others.

Each method's rates are chosen by a grid on validation data and another seed; the page
shows the grids. The paper's claim is that adaptive servers do at least as well as
FedAvg; on a small net for small images that need not be so.
"""

import dataclasses
from pathlib import Path
from typing import Any

from fedjax_core import LocalWork, check, models, split_examples, study
from fedjax_core.algorithms import fedavg, fedopt
from fedjax_core.datasets import digits, partition
from fedjax_core.experiments import report
from fedjax_core.types import Checked, Positive, PositiveInt

RULES = {"FedAvgM": "avgm", "FedAdagrad": "adagrad", "FedAdam": "adam"}
RULES["FedYogi"] = "yogi"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_clients: clients that share the training images.
      alpha: concentration of the Dirichlet split; small means skewed labels.
      cohort_size: clients per round.
      rounds: rounds of every run.
      num_seeds: independent runs of each method.
      client_lrs: rates of clients that are tried.
      server_lrs: rates of adaptive servers that are tried.
      hidden: width of the model's hidden layer.
      out: directory of the study; it goes on with what is there.
    """

    num_clients: PositiveInt = 100
    alpha: Positive = 0.1
    cohort_size: PositiveInt = 10
    rounds: PositiveInt = 100
    num_seeds: PositiveInt = 5
    client_lrs: tuple[float, ...] = (0.03, 0.1, 0.3)
    server_lrs: tuple[float, ...] = (0.01, 0.03, 0.1)
    hidden: PositiveInt = 50
    out: Path = Path("runs/server_optimizers")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(1, self.num_clients, cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(
        rounds=4, num_seeds=2, client_lrs=(0.1,), server_lrs=(0.03,), hidden=16
    ),
}


def make_study(experiment: Experiment) -> study.Study:
    """Methods, their grids and the claims."""
    data = partition.dirichlet(
        digits.load(), num_clients=experiment.num_clients, alpha=experiment.alpha
    )
    setting = study.Setting(
        data=split_examples(data, test_fraction=0, validation_fraction=0.2),
        model=models.mlp(64, 10, hidden=(experiment.hidden,)),
        rounds=experiment.rounds,
        options={"cohort_size": experiment.cohort_size},
    )
    work = LocalWork(batch_size=10)
    grid = {"client_lr": experiment.client_lrs}
    methods = {"FedAvg": study.Method.of(fedavg, grid=grid, work=work)}
    for name, rule in RULES.items():
        rates = (0.3, 1.0) if rule == "avgm" else experiment.server_lrs
        both = grid | {"server_lr": rates}
        decay: dict[str, Any] = {"beta1": 0.0} if rule == "adagrad" else {}
        methods[name] = study.Method.of(
            fedopt, grid=both, rule=rule, work=work, **decay
        )
    name = f"Dirichlet({experiment.alpha:g})"
    return study.Study(
        methods=methods,
        settings={name: setting},
        seeds=range(experiment.num_seeds),
        claims=[(better, "FedAvg", name) for better in RULES],
    )


def main(experiment: Experiment) -> None:
    """Runs the study, prints its tables and says where the page is."""
    report.show(study.run(make_study(experiment), experiment.out))
