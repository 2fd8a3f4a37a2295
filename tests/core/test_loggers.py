"""Loggers pass on every metric of every seed, round by round."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_core import Report, loggers

TRAIN = {"train_loss": np.array([[1.0, 0.5], [2.0, 1.5]])}
EVALUATION = {"test_accuracy": np.array([0.25, 0.75])}
REPORTS = (
    Report(2, (3, 5), TRAIN, EVALUATION, None),
    Report(3, (3, 5), {"train_loss": np.array([[0.25], [1.0]])}, {}, None),
)
# What seed 5 has measured.
LOSSES = [(1, 2.0), (2, 1.5), (3, 1.0)]


def write(logger) -> None:
    for report in REPORTS:
        assert logger(report) is None  # True would end the run
    logger.close()


def test_tensorboard_has_the_events_of_every_seed(tmp_path):
    write(loggers.TensorBoard(tmp_path))
    for seed in (3, 5):
        (events,) = (tmp_path / f"seed_{seed}").iterdir()
        text = events.read_bytes()
        assert b"train/train_loss" in text
        assert b"evaluation/test_accuracy" in text


class FakeRun:
    """What stands in for a run of wandb."""

    def __init__(self, **options):
        self.options, self.rows, self.finished = options, [], False

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


def test_weights_and_biases_has_a_run_for_every_seed(monkeypatch):
    runs = []

    def init(**options):
        runs.append(FakeRun(**options))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    write(loggers.WeightsAndBiases("p", "digits", mode="offline"))
    assert [run.options["name"] for run in runs] == ["seed_3", "seed_5"]
    for run in runs:
        # The second run must not end or replace the first.
        expected = {"project": "p", "group": "digits", "reinit": "create_new"}
        assert expected.items() <= run.options.items()
        assert run.options["mode"] == "offline"
        assert run.finished
    rows = runs[1].rows
    assert [(step, row["train/train_loss"]) for step, row in rows] == LOSSES
    assert ["evaluation/test_accuracy" in row for _, row in rows] == [
        False,
        True,
        False,
    ]


class FakeStore:
    """What stands in for a client of MLflow and its store."""

    def __init__(self, uri):
        self.uri, self.experiments, self.runs, self.ended = uri, {}, {}, []

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return found and SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        self.experiments[name] = "7"
        return "7"

    def create_run(self, experiment_id, run_name):
        assert experiment_id == "7"
        self.runs[run_name] = []
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_batch(self, run_id, metrics):
        assert len(metrics) <= 1000
        self.runs[run_id] += metrics

    def set_terminated(self, run_id):
        self.ended.append(run_id)


def test_mlflow_has_a_run_for_every_seed(monkeypatch):
    def metric(key, value, timestamp, step):
        return key, step, value

    store = FakeStore("sqlite:///m.db")
    client = SimpleNamespace(MlflowClient=lambda uri: store)
    monkeypatch.setitem(sys.modules, "mlflow", client)
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=metric))
    write(loggers.MLflow("sqlite:///m.db", "digits"))
    assert store.ended == ["seed_3", "seed_5"]
    found = [m[1:] for m in store.runs["seed_5"] if m[0] == "train/train_loss"]
    assert found == LOSSES
    assert ("evaluation/test_accuracy", 2, 0.75) in store.runs["seed_5"]
    again = loggers.MLflow("sqlite:///m.db", "digits")  # in the same experiment
    many = np.zeros((1, 2500))
    again(Report(2500, (3,), {"train_loss": many}, {}, None))
    assert len(store.runs["seed_3"]) == 2500


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [
        (lambda: loggers.TensorBoard("x"), "tensorboardX", "tensorboard"),
        (lambda: loggers.WeightsAndBiases("p", "g"), "wandb", "wandb"),
        (lambda: loggers.MLflow("sqlite:///m.db", "e"), "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(make, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package} .*'fedjax_core\[{extra}\]'"):
        make()


def test_weights_and_biases_itself_works_offline(tmp_path):
    pytest.importorskip("wandb")
    write(loggers.WeightsAndBiases("p", "g", mode="offline", dir=tmp_path))
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2


@pytest.mark.filterwarnings("ignore")  # of mlflow's own dependencies
def test_mlflow_itself_works_with_a_local_file(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    store = f"sqlite:///{tmp_path}/m.db"
    write(loggers.MLflow(store, "digits"))
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("digits")
    runs = client.search_runs([experiment.experiment_id])
    (run,) = [run for run in runs if run.info.run_name == "seed_5"]
    history = client.get_metric_history(run.info.run_id, "train/train_loss")
    assert [(m.step, m.value) for m in history] == LOSSES
    assert run.info.status == "FINISHED"
