"""Ctrl-C waits until what a run has done is saved."""

import signal

import numpy as np
import pytest
from tests.core.test_sweep import DATA, MODEL, RUN, WORK

from fedjax_core import read_result, simulate
from fedjax_core.algorithms import fedavg
from fedjax_core.interrupt import HeldInterrupt


@pytest.fixture(autouse=True)
def _default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*_):
    signal.raise_signal(signal.SIGINT)


def run(path, **changes):
    options = RUN | {"run_dir": path, "checkpoint_every": 4, "progress": False}
    algorithm = fedavg.make(fedavg.Config(work=WORK), MODEL.loss)
    return simulate(algorithm, DATA, MODEL, **options | changes)


def test_an_interrupted_run_is_saved_and_goes_on_to_the_same_bits(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):  # and when it is in its last rounds
        run(tmp_path / "whole", callbacks=[lambda r: r.round == 4 and interrupt()])
    assert read_result(tmp_path / "stopped").rounds == 2
    assert read_result(tmp_path / "whole").rounds == 4
    resumed = run(tmp_path / "stopped", resume=True)
    whole = run(tmp_path / "whole", resume=True)
    assert (resumed.timed_rounds, whole.timed_rounds) == (2, 0)
    for name, values in whole.train.items():
        np.testing.assert_array_equal(resumed.train[name], values)
    for a, b in zip(resumed.params.values(), whole.params.values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_first_is_held_and_the_second_is_not():
    held, steps = HeldInterrupt(True), []

    def twice():
        with held:
            for _ in range(2):
                interrupt()
                steps.append(held.came)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert steps == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_other_errors_come_first():
    def both():
        with HeldInterrupt(True):
            interrupt()
            raise ValueError("other")

    with pytest.raises(ValueError, match="other"):
        both()


def test_nothing_is_held_where_nothing_is_saved_or_another_handler_is_in_charge():
    with HeldInterrupt(False) as held, pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not held.came
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    with HeldInterrupt(True) as held:
        interrupt()
    assert seen == [1]
    assert not held.came
