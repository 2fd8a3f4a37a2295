"""The bar shows where a run is, in a terminal, a log and a notebook, and harms none."""

import io
import sys

import pytest
import rich.console

from fedjax_core.progress import RoundsBar


def run(rounds=3, enabled=True, name="loss"):
    with RoundsBar(0, rounds, enabled) as bar:
        for k in range(1, rounds + 1):
            bar.update(k, 2.5, {name: [1 / k, 3 / k]})


def test_a_log_gets_one_line(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    run()
    (line,) = log.getvalue().splitlines()
    assert "3/3" in line
    assert "2.5 rounds/s" in line
    assert "loss 0.6667" in line  # the mean of 1/3 and 3/3


def test_a_notebook_gets_one_output_that_changes(monkeypatch, capsys):
    import IPython.display

    outputs = []

    class Handle:
        def update(self, data, raw):
            outputs[-1] = data

    def display(data, raw, display_id):
        outputs.append(data)
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    run()
    ((picture),) = outputs
    assert picture.keys() == {"text/plain"}
    assert "3/3 2.5 rounds/s" in picture["text/plain"]
    run(enabled=False)
    assert len(outputs) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["ascii", "cp932", "gbk", "cp1251"])
def test_no_encoding_ends_a_run(encoding, monkeypatch):
    strict = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stderr", strict)
    run(name="größe ² °C 字 é")
    run()
    strict.flush()
    assert "3/3" in strict.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_no_closed_output_ends_a_run(stream, monkeypatch):
    if stream:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    run()
