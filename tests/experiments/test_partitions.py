"""The figure of all partitioners: its numbers by hand, and what it leaves behind."""

import dataclasses

import numpy as np
import pytest

from fedjax_core.data.packed import FederatedData
from fedjax_core.datasets import partition
from fedjax_core.experiments import partitions


def test_numbers_of_a_population_are_those_computed_by_hand():
    labels = [[0, 0, 0, 0], [1, 1], [], [0, 1]]
    data = FederatedData.from_lists([{"y": np.array(y, int)} for y in labels])
    summary = partitions.summarise(partitions.Split("", "", data))
    # Pooled labels are 5/8 and 3/8: distances 3/8, 5/8 and 1/8.
    assert summary == (0, 2.0, 4, pytest.approx(4 / 3), pytest.approx(3 / 8))


def test_every_partitioner_has_a_panel():
    splits = partitions.run(partitions.PRESETS["smoke"])
    # One adds examples to what another one splits.
    functions = {name for name in partition.__all__ if name.islower()} - {"shared"}
    assert {split.name for split in splits} == functions
    for split in splits:
        assert split.data.num_clients == 12
        assert sum(s.num_examples for s in split.data.splits.values()) == 1797
    summary = {s.name: partitions.summarise(s) for s in splits}
    assert summary["classes_per_client"].num_classes == 2
    assert summary["iid"].distance < 0.2 < 0.4 < summary["dirichlet"].distance
    assert summary["label_swap"].distance < 0.2
    assert summary["log_normal"].largest > 2 * summary["log_normal"].median / 1.5
    figure = partitions.plot(splits)
    titles = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert functions <= titles


def test_the_run_prints_its_table_and_writes_its_figure(tmp_path, capsys):
    smoke = partitions.PRESETS["smoke"]
    partitions.main(dataclasses.replace(smoke, out=tmp_path / "new" / "folder"))
    out = capsys.readouterr().out
    assert "alternating_dirichlet" in out
    assert "balancedness" in out
    assert (tmp_path / "new" / "folder" / "partitions.png").stat().st_size > 50_000


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_clients": 4}, r"num_clients must be in \[5, 50\]"),
        ({"num_clusters": 5}, r"num_clusters must be in \[1, 4\]"),
        ({"num_classes": 11}, r"num_classes must be in \[1, 10\]"),
        ({"alpha": 0.0}, "alpha must be > 0"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\]"),
        ({"sigma": -1.0}, "sigma must be >= 0"),
    ],
)
def test_impossible_settings_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        partitions.Experiment(**changed)


@pytest.mark.parametrize(("num_clients", "num_classes"), [(10, 1), (50, 10), (5, 2)])
def test_the_bounds_of_the_settings_can_be_run(num_clients, num_classes):
    settings = partitions.Experiment(num_clients=num_clients, num_classes=num_classes)
    splits = partitions.run(settings)
    assert max(split.data.num_clients for split in splits) == num_clients
    partitions.plot(splits)
