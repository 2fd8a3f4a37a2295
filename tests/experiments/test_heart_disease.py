"""Four hospitals, trained together and apart, on files the test writes."""

import dataclasses

import numpy as np
import pytest

from fedjax_core.datasets import heart_disease as hospitals
from fedjax_core.experiments import heart_disease


@pytest.fixture
def experiment(tmp_path):
    """Older patients are ill, in every hospital but va, where the young are."""
    for k, hospital in enumerate(hospitals.HOSPITALS):
        lines = []
        for i in range(40 + k):
            old = (i + k) % 2
            ill = old if hospital != "va" else 1 - old
            lines.append(
                f"{30 + 40 * old + i / 9:.1f},1,4,120,200,0,0,150,0,1,?,?,?,{ill}\n"
            )
        (tmp_path / f"processed.{hospital}.data").write_text("".join(lines))
    smoke = heart_disease.PRESETS["smoke"]
    return dataclasses.replace(smoke, path=tmp_path, out=tmp_path / "out", rounds=20)


def test_it_compares_training_together_apart_and_pooled(experiment, capsys):
    heart_disease.main(experiment)
    out = capsys.readouterr().out
    for name in ("FedAvg", "all pooled", *hospitals.HOSPITALS):
        assert name in out
    assert (experiment.out / "test_accuracy.png").stat().st_size > 10_000

    # Finished runs come back from their records.
    results = heart_disease.run(experiment, hospitals.load(experiment.path))
    assert all(result.timed_rounds == 0 for result in results.values())
    majority, alone = [1, 1, 1, 0], [0, 0, 0, 1]
    for name, expected in (
        ("FedAvg", majority),
        ("all pooled", majority),
        ("cleveland", majority),
        ("va", alone),
    ):
        mean, spread = heart_disease.accuracy(results[name])
        np.testing.assert_array_equal(mean, expected)
        np.testing.assert_array_equal(spread, 0)


def test_without_the_files_it_says_what_to_fetch(experiment, tmp_path):
    absent = dataclasses.replace(experiment, path=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"processed\.cleveland\.data.*uci"):
        heart_disease.main(absent)


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        heart_disease.Experiment(rounds=0)
    with pytest.raises(ValueError, match="num_seeds must be >= 1"):
        heart_disease.Experiment(num_seeds=0)
