"""The code of the how-to guides runs as it stands."""

import re
from pathlib import Path

import pytest

GUIDES = Path(__file__).resolve().parent.parent / "docs" / "how-to"


def run_guide(name: str) -> dict:
    """The names that a guide's blocks define, run in order."""
    text = (GUIDES / name).read_text("utf-8")
    names: dict = {"__name__": name}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(block, name, "exec"), names)
    return names


def test_bring_a_model(capsys: pytest.CaptureFixture) -> None:
    names = run_guide("bring-a-model.md")
    assert names["result"].final("test_accuracy")[0] > 0.5
    assert capsys.readouterr().out
    for model in (names["other"], names["regression"]):
        jax_params = model.init(names["jax"].random.key(0))
        assert names["jax"].tree.leaves(jax_params)


def test_virtual_time(capsys: pytest.CaptureFixture) -> None:
    names = run_guide("virtual-time.md")
    assert capsys.readouterr().out
    for result in (names["waiting"], names["dropping"], names["buffered"]):
        assert result.final("test_accuracy")[0] > 0.5
    assert names["dropping"].total("virtual_seconds") < names["waiting"].total(
        "virtual_seconds"
    )
    assert names["buffered"].train["staleness"].max() > 0


def test_compare_with_baselines(capsys: pytest.CaptureFixture) -> None:
    names = run_guide("compare-with-baselines.md")
    assert capsys.readouterr().out
    alone, together = names["alone"], names["together"]
    untrained = alone.final("test_accuracy")[0]
    assert untrained < alone.final("test_local_accuracy")[0]
    assert names["federated"].final("test_accuracy")[0] > 0.7
    assert together.final("test_accuracy")[0] > 0.9


def test_use_auxiliary_data(capsys: pytest.CaptureFixture) -> None:
    results = run_guide("use-auxiliary-data.md")["results"]
    assert capsys.readouterr().out
    ours, plain = (results[k].final("test_accuracy")[0] for k in ("FedAUX", "FedDF+P"))
    assert ours > plain + 0.1


def test_run_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_guide("run-a-study.md")
    outcome, again = names["outcome"], names["again"]
    assert not [row.error for row in outcome.rows if row.error]
    assert names["page"].exists()
    assert len(outcome.row("FedAvg", "alpha 0.1").trials) == 3
    clipped = outcome.row("clipped at 0.1", "alpha 0.1")
    assert again.timed_rounds == 0
    assert again.series("test_accuracy")[1][:, -1].tolist() == clipped.values.tolist()


def test_compress_updates(capsys: pytest.CaptureFixture) -> None:
    names = run_guide("compress-updates.md")
    assert "sbc(0.01, per_tensor, golomb)" in capsys.readouterr().out
    (up,), (down,) = (
        names["both"].total_bits(f"{way}link_bytes") for way in ("up", "down")
    )
    assert 0 < up < 4 * 4 * 32 * 1510 / 40  # a share of 1 / 20 at 14 bits or less
    assert 0 < down < 4 * 4 * 32 * 1510 / 40
    assert names["result"].total("downlink_bytes") > 0


def test_distil_models(capsys: pytest.CaptureFixture) -> None:
    names = run_guide("distil-models.md")
    assert capsys.readouterr().out
    result = names["result"]
    assert result.final("test_accuracy")[0] > 0.4
    # Far below 32 bits for each of 10 classes.
    each = result.train["uplink_bytes"] / result.train["valid_clients"]
    assert each.max() < 4 * 500 / 8
    assert result.train["downlink_bytes"][0, 0] == 0
