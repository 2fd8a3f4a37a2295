"""Personal models on digits of which each client sees two kinds: all methods at once.

Every method's models are tested on examples like the client's own. FedAvg's shared
model and local training are the baselines; all have the same rates and rounds, so the
table shows the methods as they come, not tuned.
"""

import dataclasses
from pathlib import Path
from typing import Any

from fedjax_core import LocalWork, check, models, study
from fedjax_core.algorithms import (
    apfl,
    ditto,
    fedavg,
    fedper,
    fedrep,
    fine_tuning,
    lg_fedavg,
    local_only,
    pfedme,
)
from fedjax_core.datasets import digits, partition
from fedjax_core.experiments import report
from fedjax_core.types import Checked, Positive, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment(Checked):
    """Everything that decides the numbers.

    Attributes:
      num_clients: clients that share the images.
      shards: pieces of the images in order of labels that a client gets, mostly of as
        many classes.
      cohort_size: clients per round.
      rounds: rounds of every run.
      num_seeds: independent runs of each method.
      client_lr: step size of all that clients train.
      hidden: width of the two hidden layers.
      out: directory of the study; it goes on with what is there.
    """

    num_clients: PositiveInt = 50
    shards: PositiveInt = 2
    cohort_size: PositiveInt = 10
    rounds: PositiveInt = 100
    num_seeds: PositiveInt = 5
    client_lr: Positive = 0.1
    hidden: PositiveInt = 50
    out: Path = Path("runs/personalization")

    def __post_init__(self):
        super().__post_init__()
        check.in_range(1, self.num_clients, cohort_size=self.cohort_size)


PRESETS = {
    "default": Experiment(),
    "smoke": Experiment(num_clients=20, rounds=3, num_seeds=2, hidden=12),
}


def make_study(experiment: Experiment) -> study.Study:
    """The methods, all with the same work and rate."""
    data = partition.pathological(
        digits.load(),
        num_clients=experiment.num_clients,
        shards_per_client=experiment.shards,
    )
    common: dict[str, Any] = {
        "work": LocalWork(batch_size=10, epochs=2),
        "client_lr": experiment.client_lr,
    }
    head, rest = ("Dense_2",), ("Dense_1", "Dense_2")
    methods = {
        "FedAvg": study.Method.of(fedavg, **common),
        "local only": study.Method.of(local_only, metric="local_accuracy", **common),
    }
    common["metric"] = "personal_accuracy"
    others: tuple[tuple[str, Any, dict[str, Any]], ...] = (
        ("fine-tuning", fine_tuning, {}),
        ("FedPer", fedper, {"personal": head}),
        ("FedRep", fedrep, {"personal": head, "head": 1}),
        ("LG-FedAvg", lg_fedavg, {"shared": rest}),
        ("APFL", apfl, {"adaptive": True}),
        ("pFedMe", pfedme, {}),
        ("Ditto", ditto, {"personal_lr": experiment.client_lr}),
    )
    for name, module, extra in others:
        methods[name] = study.Method.of(module, **common, **extra)
    name = f"{experiment.shards} shards a client"
    setting = study.Setting(
        data=data,
        model=models.mlp(64, 10, hidden=(experiment.hidden,) * 2),
        rounds=experiment.rounds,
        options={"cohort_size": experiment.cohort_size},
    )
    personal = [m for m, method in methods.items() if method.metric]
    return study.Study(
        methods=methods,
        settings={name: setting},
        seeds=range(experiment.num_seeds),
        claims=[(better, "FedAvg", name) for better in personal],
    )


def main(experiment: Experiment) -> None:
    """Runs the study, prints its tables and says where the page is."""
    report.show(study.run(make_study(experiment), experiment.out))
