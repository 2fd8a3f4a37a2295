"""Metrics that are not means, and summaries over clients, against closed forms."""

import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from fedjax_core import metrics
from fedjax_core.metrics import (
    AUROC,
    Bits,
    Bytes,
    CalibrationError,
    MaximumCalibrationError,
    Mean,
    Sum,
)

EXAMPLES = 200


@jax.jit
def calibration(confidence, correct):
    """ECE and MCE with 15 bins."""
    return [
        metrics.total({"v": kind.per_example(confidence, correct)})["v"].value
        for kind in (CalibrationError, MaximumCalibrationError)
    ]


@jax.jit
def auroc(scores, labels):
    return metrics.total({"v": AUROC.per_example(scores, labels)})["v"]


summaries = jax.jit(
    lambda values, counts: {
        "mean": metrics.client_mean(values, counts),
        "p10": metrics.client_p10(values, counts),
        "gini": metrics.gini(values, counts),
        "lowest": metrics.lowest_decile(values, counts),
        "highest": metrics.highest_decile(values, counts),
        "gap": metrics.parity_gap(values, counts),
        "weighted": metrics.weighted_mean(values, counts),
    }
)


def over_clients(values, counts=None, slots=48):
    """Summaries with clients without an example strewn in, as NumPy scalars."""
    values = np.asarray(values, np.float32)
    counts = np.ones(len(values)) if counts is None else np.asarray(counts)
    where = np.random.default_rng(0).permutation(slots)[: len(values)]
    all_values, all_counts = np.full(slots, np.nan, np.float32), np.zeros(slots)
    all_values[where], all_counts[where] = values, counts
    out = summaries(all_values, all_counts.astype(np.float32))
    return {name: np.asarray(value) for name, value in out.items()}


def test_calibration_errors_of_a_published_example():
    confidence = jnp.array([0.95, 0.95, 0.65, 0.65])
    correct = jnp.array([True, False, True, True])
    ece, mce = (
        metrics.total({"v": kind.per_example(confidence, correct, bins=10)})["v"].value
        for kind in (CalibrationError, MaximumCalibrationError)
    )
    np.testing.assert_allclose([ece, mce], [0.40, 0.45], rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_errors_are_those_of_numpy(seed):
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(size=EXAMPLES) ** (1 + seed)
    confidence[:2] = 0, 1
    correct = rng.uniform(size=EXAMPLES) < confidence**2
    gaps, shares = [], []
    for b in range(15):
        # Closed on the right; nothing else falls on an edge, and 0 joins the first.
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        inside |= (b == 0) & (confidence == 0)
        if inside.any():
            gaps.append(abs(correct[inside].mean() - confidence[inside].mean()))
            shares.append(inside.mean())
    ece, mce = calibration(confidence.astype(np.float32), correct)
    np.testing.assert_allclose(ece, np.dot(gaps, shares), rtol=1e-4)
    np.testing.assert_allclose(mce, max(gaps), rtol=1e-4)
    assert 0 <= ece <= mce <= 1


def test_errors_of_tens_are_large_whatever_the_classifier():
    """Calibrated, with confidences uniform on [0.3, 1]: 0.29 and 0.63 of tens."""
    rng, n = np.random.default_rng(0), 20_004
    confidence = rng.uniform(0.3, 1, n).astype(np.float32)
    correct = rng.uniform(size=n) < confidence
    whole = calibration(confidence, correct)
    assert max(whole) < 0.03  # of the whole they are 0.004 and 0.009 in the mean
    # One small batch after the other; rows past `n - 3` are padding.
    mask = np.arange(n) < n - 3
    for kind, expected in ((CalibrationError, 0.29), (MaximumCalibrationError, 0.63)):
        mean = kind.per_batch(*map(jnp.asarray, (confidence, correct, mask)), size=10)
        got = np.asarray(mean.total)
        for start in (0, 500, 20_000):
            rows = slice(start, min(start + 10, n - 3))
            one = kind.per_example(
                jnp.asarray(confidence[rows]), jnp.asarray(correct[rows])
            )
            alone = metrics.total({"v": one})["v"].value
            np.testing.assert_allclose(got[rows], alone, rtol=1e-5)
        assert not got[~mask].any()
        # The standard error over 2,000 tens is below 0.004.
        assert abs(got[mask].mean() - expected) < 0.02


def test_calibration_errors_at_the_ends():
    ones = np.ones(EXAMPLES, np.float32)
    np.testing.assert_array_equal(calibration(ones, ones > 0), [0, 0])
    np.testing.assert_array_equal(calibration(ones, ones < 0), [1, 1])
    diverged = calibration(np.where(np.arange(EXAMPLES), ones, np.nan), ones > 0)
    assert np.isnan(diverged).all()
    for kind in (CalibrationError, MaximumCalibrationError):
        assert np.isnan(kind(jnp.zeros(15), jnp.zeros(15)).value)


@pytest.mark.parametrize("positives", [0.5, 0.03])
def test_area_under_the_curve_is_that_of_scikit_learn(positives):
    rng = np.random.default_rng(5)
    labels = (rng.uniform(size=EXAMPLES) < positives).astype(np.int32)
    # Logits in the middle of bins, with ties, and some beyond the last bin.
    scores = np.round(rng.normal(labels - 2, 2, EXAMPLES) * 8) / 8 + 1 / 16
    scores[:3] = -20, -16, 15.9
    area = auroc(scores.astype(np.float32), labels)
    expected = roc_auc_score(labels, np.clip(scores, -16, 16))
    np.testing.assert_allclose(area.value, expected, rtol=1e-6)
    assert area.count == EXAMPLES

    # In between, at most half the pairs in the same bin are on the wrong side.
    scores = rng.normal(labels - 2, 2, EXAMPLES)
    area = auroc(scores.astype(np.float32), labels)
    n = labels.sum()
    tied = (area.positives * area.negatives).sum() / (n * (EXAMPLES - n))
    assert abs(area.value - roc_auc_score(labels, scores)) <= tied / 2 + 1e-6


def test_area_under_the_curve_leaves_out_what_is_not_known():
    rng = np.random.default_rng(6)
    scores = rng.normal(size=EXAMPLES).astype(np.float32)
    labels = rng.integers(-1, 2, EXAMPLES)
    area, known = auroc(scores, labels), labels >= 0
    bins = np.floor((scores + 16) * 8)
    expected = roc_auc_score(labels[known], bins[known])
    np.testing.assert_allclose(area.value, expected, rtol=1e-6)
    assert area.count == known.sum()
    for only in (0, 1):  # a client with one kind only has no area
        area = auroc(scores, np.full(EXAMPLES, only))
        assert np.isnan(area.value)
        assert area.count == 0
    scores[known.argmax()] = np.nan
    area = auroc(scores, labels)
    assert np.isnan(area.value)
    assert area.count != 0  # so the client is not passed over


@pytest.mark.parametrize("clients", [1, 2, 3, 10, 11, 21, 40])
def test_client_summaries_are_those_of_numpy(clients):
    rng = np.random.default_rng(clients)
    values = (rng.permutation(clients).astype(np.float32) + 1) ** 2
    counts = rng.integers(1, 9, clients)
    out = over_clients(values, counts)
    order = np.argsort(values)
    low, high = order[: max(1, clients // 10)], order[-max(1, clients // 10) :]
    differences = np.abs(values[:, None] - values).sum()
    expected = {
        "mean": values.mean(),
        "p10": np.quantile(values, 0.1),
        "gini": differences / (2 * clients**2 * values.mean()),
        "lowest": np.average(values[low], weights=counts[low]),
        "highest": np.average(values[high], weights=counts[high]),
        "weighted": np.average(values, weights=counts),
    }
    expected["gap"] = expected["highest"] - expected["lowest"]
    for name, value in expected.items():
        np.testing.assert_allclose(out[name], value, 1e-5, 1e-6, err_msg=name)


def test_gini_of_equal_values_one_owner_and_nobody():
    np.testing.assert_allclose(over_clients([3] * 20)["gini"], 0, atol=1e-7)
    one = [0] * 19 + [5]
    np.testing.assert_allclose(over_clients(one)["gini"], 19 / 20, rtol=1e-6)
    values = np.random.default_rng(0).uniform(size=30)
    scaled = over_clients(7 * values)["gini"]
    np.testing.assert_allclose(scaled, over_clients(values)["gini"], rtol=1e-5)
    assert np.isnan(over_clients([0] * 20)["gini"])


def test_client_summaries_show_what_diverged_and_say_nothing_of_nobody():
    for out in (over_clients([1, np.nan, 2, *[3] * 30]), over_clients([])):
        for name, value in out.items():
            assert np.isnan(value), name
    infinite = over_clients([1, 2, np.inf])
    assert infinite["lowest"] == 1
    assert infinite["highest"] == np.inf


def test_values_of_summands_and_bare_arrays():
    entries = {"mean": Mean(jnp.arange(3.0), jnp.ones(3)), "sum": Sum(jnp.ones(3))}
    values = metrics.values(metrics.total(entries) | {"bare": jnp.float32(7)})
    assert {k: float(v) for k, v in values.items()} == {"mean": 1, "sum": 3, "bare": 7}
    assert np.isnan(Mean.zero().value)


def test_means_of_wide_floats_stay_wide(x64):
    ones = jnp.ones(2)
    mean = Mean.of(jnp.array([2.0**53, 1.0]), ones > 0) + Mean(ones[0], ones[0])
    assert mean.total.dtype == jnp.float64
    assert Mean.of(ones.astype(jnp.float16), ones > 0).total.dtype == jnp.float32


def test_the_how_to_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "measure-a-run.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    told: dict = {}
    exec("\n".join(code).replace("rounds=20", "rounds=2"), told)
    names = set(told["result"].evaluations)
    assert {"test_served_ece_gini", "test_halved_mce_worst", "test_auroc_0"} <= names


HUGE = 32 * 10**9 + 1  # a dense message of 10^9 parameters, and a bit


@jax.jit
def arithmetic(a, b, times):
    return a + b, a * times, a.minimum(b), b.minimum(a), a >> 1, a >> 31


@pytest.mark.parametrize("kind", [Bits, Bytes])
def test_bits_are_exact_integers(kind):
    rng = random.Random(0)
    sizes = [0, 1, 2**32 - 1, 2**32, HUGE, 2**53 - 1]
    sizes += [rng.getrandbits(rng.randrange(1, 50)) for _ in range(20)]
    for a in sizes:
        b, times = rng.choice(sizes), rng.choice([0, 1, 3, 2**9, 1000])
        out = arithmetic(*(Bits.of(x) for x in (a, b)), times)
        smaller = min(a, b)
        exact = [a + b, a * times, smaller, smaller, a >> 1, a >> 31]
        whole = np.array(exact, np.uint64)
        for got, expected in zip(out, whole, strict=True):
            read = got if kind is Bits else got.as_bytes()
            assert read == (expected if kind is Bits else expected / 8)
            assert read.unit * float(read) == float(expected)
    assert kind.of(np.int64(2**40)) == 5 + kind.of(2**40 - 5) == 2**40
    with pytest.raises(ValueError, match="number must be in"):
        kind.of(-1)
    traced = jax.jit(kind.of)(jnp.int32(2**31 - 1))
    assert kind.of(2**31 - 1) == traced == 2**31 - 1
    # NumPy's integers are ints, and factors up to 2^32 are taken.
    assert kind.of(np.int64(2**33)) == kind.of(0) + np.uint64(2**33) == 2**33
    for times in (2**31, 2**32 - 1, np.int64(2**32 - 1)):
        assert kind.of(3) * times == 3 * int(times)
    with pytest.raises(OverflowError):
        _ = kind.of(3) * np.int64(2**32)


def test_sums_of_bits_carry():
    sizes = [2**32 - 1] * 300 + [HUGE, 5]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(Bits.of, sizes))
    together = jax.jit(lambda m: metrics.total(m)["sent"])({"sent": stacked})
    assert together == np.uint64(sum(sizes))
    assert together.as_bytes() < sum(sizes)
    assert not together.as_bytes() > sum(sizes) / 8
