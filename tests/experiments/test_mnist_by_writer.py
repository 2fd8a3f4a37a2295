"""The experiment on MNIST by writer, in small, where its files are."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedjax_core.experiments import mnist_by_writer

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "mnist_by_writer"


def test_absent_files_are_named_with_their_source(tmp_path):
    experiment = mnist_by_writer.Experiment(path=tmp_path, out=tmp_path / "out")
    with pytest.raises(FileNotFoundError) as raised:
        mnist_by_writer.main(experiment)
    message = str(raised.value)
    assert str(tmp_path / "train-images-idx3-ubyte.gz") in message
    assert "fetch it from https://" in message
    assert "\n" not in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "lstm"}, "model must be one of 'mlp', 'cnn'"),
        ({"test_fraction": 0.0}, "test_fraction must be in"),
        ({"rounds": 0}, "rounds must be >= 1"),
        ({"cohort_size": 540}, r"cohort_size must be in \[1, 539\], got 540"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        mnist_by_writer.Experiment(**options)


def test_a_few_rounds(tmp_path, capsys):
    if not DATA.is_dir():
        pytest.skip("shared/data/mnist_by_writer is absent")
    experiment = dataclasses.replace(
        mnist_by_writer.PRESETS["smoke"], path=DATA, rounds=3, out=tmp_path
    )
    mnist_by_writer.main(experiment)
    printed = capsys.readouterr().out
    for words in ("training writers", "new writers", "students", "± ", "mean client"):
        assert words in printed
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000

    result, accuracies = mnist_by_writer.run(experiment)  # from the record
    old, new = accuracies["training writers"], accuracies["new writers"]
    assert old.values.shape == (2, 539)
    assert new.values.shape == (2, 297)
    assert (old.sizes.sum(), new.sizes.sum()) == (11_993, 10_000)
    assert (old.is_student.sum(), new.is_student.sum()) == (250, 249)
    # Added up by client here, and by the engine.
    pooled = old.values @ old.sizes / old.sizes.sum()
    assert pooled.mean() == pytest.approx(result.final("test_accuracy")[0], rel=1e-5)
    p10 = np.percentile(old.values, 10, axis=1).mean()
    expected = result.final("test_accuracy_client_p10")[0]
    assert p10 == pytest.approx(expected, rel=1e-5)
    # Three rounds are enough to be far from guessing on both populations.
    assert new.values.mean() > 0.3
    assert old.values.mean() > 0.3
