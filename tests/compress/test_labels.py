"""Codes for soft labels against brute force, counts and a real coder."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core.compress import arithmetic
from fedjax_core.compress.labels import (
    break_even_agreement,
    coded_bits,
    delta_decode,
    delta_encode,
    delta_entropy,
    fit_power_law,
    num_label_vectors,
    quantise_probabilities,
    soft_labels,
)
from fedjax_core.metrics import Bits
from fedjax_core.transform import Message

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
QUANTISE = jax.jit(quantise_probabilities, static_argnums=1)
MB = 8e6


def entropy_bits(symbols, num_symbols):
    """The empirical entropy, bits a symbol."""
    return float(coded_bits(symbols, num_symbols)) / 2**24 / symbols.size


def grid(bits, classes):
    """Every vector that may be sent."""
    levels = 2**bits - 1
    whole = itertools.product(range(levels + 1), repeat=classes)
    return np.array([v for v in whole if sum(v) == levels]) / levels


@pytest.mark.parametrize(("bits", "classes"), [(1, 4), (2, 3), (3, 4), (3, 2)])
def test_no_vector_that_may_be_sent_is_nearer(bits, classes):
    p = RNG.dirichlet(np.ones(classes), 200).astype(np.float32)
    p[:20] = np.round(p[:20] * 2) / 2
    p[:20] /= p[:20].sum(1, keepdims=True)  # with ties
    q, everything = np.asarray(QUANTISE(p, bits, KEY)), grid(bits, classes)
    assert len(everything) == num_label_vectors(bits, classes)
    best = np.abs(p[:, None] - everything).sum(-1).min(1)
    np.testing.assert_allclose(np.abs(q - p).sum(1), best, atol=1e-5)
    levels = 2**bits - 1
    np.testing.assert_allclose(levels * q, np.round(levels * q), atol=1e-5)
    np.testing.assert_allclose(q.sum(1), 1, atol=1e-6)
    assert (q >= 0).all()
    assert np.abs(q - p).max() < 1 / levels + 1e-6
    np.testing.assert_array_equal(QUANTISE(q, bits, jax.random.key(1)), q)
    if bits == 1:
        clear = np.sort(p, 1)[:, -1] > np.sort(p, 1)[:, -2]
        np.testing.assert_array_equal(q.argmax(1)[clear], p.argmax(1)[clear])


def test_vectors_of_the_specification():
    third = QUANTISE(jnp.array([0.5, 0.3, 0.2]), 2, KEY)
    np.testing.assert_allclose(third, np.ones(3) / 3, rtol=1e-6)
    sizes = [math.log2(num_label_vectors(b, 10)) for b in (1, 2, 3, 4)]
    np.testing.assert_allclose(sizes, [3.322, 7.781, 13.482, 20.318], atol=5e-4)
    with pytest.raises(ValueError, match=r"bits must be in \[1, 16\], got 17"):
        quantise_probabilities(jnp.ones(2) / 2, 17, KEY)
    with pytest.raises(ValueError, match="p must be of at least 2 classes"):
        quantise_probabilities(jnp.ones(1), 1, KEY)


@pytest.mark.parametrize("bits", [8, 16])
def test_many_levels_still_add_up(bits):
    p = RNG.dirichlet(np.ones(10) / 3, 500).astype(np.float32)
    q = QUANTISE(p, bits, KEY)
    levels = 2**bits - 1
    np.testing.assert_array_equal(np.round(levels * np.asarray(q)).sum(1), levels)
    assert np.abs(q - p).max() < 1.01 / levels
    np.testing.assert_array_equal(QUANTISE(q, bits, KEY), q)


def test_many_classes_that_almost_count_as_whole_still_add_up():
    p = np.full(1000, 64.99 / 65535)
    p[-1] = 1 - p[:-1].sum()
    q = QUANTISE(p.astype(np.float32), 16, KEY)
    assert np.round(65535 * np.asarray(q)).sum() == 65535
    assert np.abs(q - p).max() < 1.1 / 65535


@pytest.mark.parametrize("bits", [1, 2])
def test_what_is_no_probability_vector_is_no_silent_one(bits):
    wrong = np.array([[np.nan, 0.3, 0.7], [-0.5, 0.8, 0.7], [5, 3, 2]], np.float32)
    assert np.isnan(QUANTISE(wrong, bits, KEY)).any(-1).all()


def test_ties_fall_to_each_class_alike():
    votes = QUANTISE(jnp.ones((3000, 3)) / 3, 1, KEY).sum(0)
    # Each count is within 4.5 standard deviations: false alarms below 1 in 40000.
    assert np.abs(votes - 1000).max() < 4.5 * math.sqrt(3000 * 2 / 9)


def test_entropy_is_between_none_and_uniform():
    assert entropy_bits(jnp.full(50, 3), 10) == 0
    np.testing.assert_allclose(
        entropy_bits(jnp.arange(60) % 10, 10), math.log2(10), rtol=1e-6
    )
    y = RNG.integers(1, 11, 500)
    counts = np.bincount(y) / 500
    expected = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum()
    np.testing.assert_allclose(entropy_bits(jnp.asarray(y), 11), expected, rtol=1e-5)
    delta = delta_encode(jnp.asarray(y), jnp.asarray(RNG.permutation(y)))
    assert 0 < entropy_bits(delta, 11) <= math.log2(11)


def test_delta_coding_goes_round_trip_with_clients_that_skip_rounds():
    sender = receiver = np.zeros((3, 40), np.int8)
    for _ in range(6):
        here = RNG.random(3) < 0.6  # who takes part
        labels = np.where(RNG.random((3, 40)) < 0.3, RNG.integers(1, 11, (3, 40)), 5)
        message = delta_encode(jnp.int8(labels), jnp.asarray(sender))
        read = delta_decode(message, jnp.asarray(receiver))
        np.testing.assert_array_equal(np.asarray(read)[here], labels[here])
        sender = np.where(here[:, None], labels, sender).astype(np.int8)
        receiver = np.where(here[:, None], read, receiver).astype(np.int8)


def test_the_cost_of_delta_coding_is_the_model_of_agreement():
    n, classes = 200_000, 10
    for agreement in (0.239, 0.6, 0.95):
        old = RNG.integers(1, classes + 1, n)
        new = RNG.integers(1, classes + 1, n)
        # A new label equals the old one by chance once in K: to stay is the rest.
        stay = RNG.random(n) < (agreement - 1 / classes) / (1 - 1 / classes)
        new = np.where(stay, old, new)
        got = entropy_bits(delta_encode(jnp.asarray(new), jnp.asarray(old)), 11)
        # The standard error of an entropy over n is below 3 / sqrt(n) bits; 5 of them.
        assert abs(float(got) - delta_entropy(agreement, classes)) < 15 / math.sqrt(n)


def test_break_even_values_of_the_specification():
    for classes, agreement in ((2, 0.773), (4, 0.5), (5, 0.423), (10, 0.239)):
        assert break_even_agreement(classes) == pytest.approx(agreement, abs=5e-4)
    assert break_even_agreement(100) == pytest.approx(0.027, abs=5e-4)
    independent = [delta_entropy(1 / k, k) for k in (2, 4, 10)]
    np.testing.assert_allclose(independent, [1.5, 2.311, 3.459], atol=1e-3)
    assert delta_entropy(1.0, 10) == 0


def test_a_power_law_is_recovered():
    t = np.arange(1, 40)
    c, d = fit_power_law(t, 2.5 * t**-0.4)
    assert c == pytest.approx(2.5)
    assert d == pytest.approx(0.4)


def test_messages_of_the_tables():
    # Labels that are spread evenly cost the upper bounds: in MB, 1e6 bytes.
    for n, classes, dense, raw, coded in (
        (80_000, 10, 3.2, 0.0332193, 0.0345943),
        (60_000, 4, 0.96, 0.015, 0.0174145),
    ):
        assert 32 * n * classes / MB == dense
        even = np.eye(classes, dtype=np.float32)[np.arange(n) % classes]
        for delta in (False, True):
            code = soft_labels(1, delta=delta)
            state = code.init(jnp.asarray(even))
            message, state = code.apply(Message(even, Bits.of(0)), state, KEY)
            assert float(message.bits) / MB == pytest.approx(raw, rel=1e-5), (
                "the first is raw"
            )
        assert n * math.log2(classes + 1) / MB == pytest.approx(coded, rel=1e-5)
        # One symbol in K + 1 stays.
        stays = np.arange(n) % (classes + 1) == 0
        message, _ = code.apply(
            Message(even, Bits.of(0)),
            jnp.where(stays, state, state % classes + 1).astype(jnp.int8),
            KEY,
        )
        assert float(message.bits) / MB == pytest.approx(coded, rel=1e-4)


def test_vectors_are_coded_against_vectors():
    p = RNG.dirichlet(np.ones(4), 60).astype(np.float32)
    code, number = soft_labels(3, delta=True), math.log2(num_label_vectors(3, 4))
    state = code.init(p)
    message, state = code.apply(Message(p, Bits.of(0)), state, KEY)
    assert message.bits == math.ceil(60 * number)
    assert state.dtype == jnp.int8
    np.testing.assert_allclose(state / 7, message.update, atol=1e-6)
    other = np.concatenate([message.update[:45], np.roll(message.update[45:], 1, 1)])
    changed = (np.asarray(message.update) != other).any(1).mean()
    assert 0 < changed <= 0.25
    message, _ = code.apply(Message(other, Bits.of(0)), state, KEY)
    coin = -changed * math.log2(changed) - (1 - changed) * math.log2(1 - changed)
    assert message.bits == math.ceil(60 * (coin + changed * number))


def test_messages_beyond_the_whole_numbers_of_float32_are_exact():
    # As many bits as symbols, a number between two float32 that are 4 apart.
    n = 2**25 + 2
    assert int(np.float32(n)) != n
    labels = np.arange(n, dtype=np.uint8) % 2
    assert coded_bits(jnp.asarray(labels), 2) >> 24 == n
    n, number = 200_003, math.log2(num_label_vectors(16, 10))
    p = np.tile(np.array([0.5, 0.25, 0.25, *[0] * 7], np.float32), (n, 1))
    message, _ = soft_labels(16).apply(Message(p, Bits.of(0)), (), KEY)
    expected = math.ceil(n * number)
    assert expected > 2**24
    assert int(np.float32(expected)) != expected
    assert message.bits == expected


@pytest.mark.parametrize(("n", "classes"), [(3000, 10), (400, 2), (7, 3)])
def test_a_real_coder_reaches_the_entropy_and_is_decoded(n, classes):
    y = np.minimum(RNG.geometric(0.5, n) - 1, classes - 1)
    bits = arithmetic.encode(y, classes)
    np.testing.assert_array_equal(arithmetic.decode(bits, n, classes), y)
    # What counting from one costs is known in closed form; the coder adds two bits.
    counts = np.bincount(y, minlength=classes)
    ideal = math.lgamma(n + classes) - math.lgamma(classes)
    ideal = (ideal - sum(math.lgamma(c + 1) for c in counts)) / math.log(2)
    assert ideal - 1e-6 <= len(bits) <= ideal + 2.1
    with pytest.raises(ValueError, match=f"bits must be the {len(bits)} of a code"):
        arithmetic.decode([*bits, 0], n, classes)
    if n > 7:  # what is left of fewer may be the code of others
        with pytest.raises(ValueError, match=r"bits must be the .* of a code"):
            arithmetic.decode(bits[: len(bits) // 2], n, classes)
    with pytest.raises(ValueError, match=r"bits must be in \[0, 1\], got 2"):
        arithmetic.decode([2, *bits[1:]], n, classes)
    with pytest.raises(ValueError, match=f"symbol must be .* got {classes}"):
        arithmetic.encode([classes], classes)
    entropy = n * float(entropy_bits(jnp.asarray(y), classes))
    assert entropy <= len(bits) <= entropy + (classes - 1) * math.log2(n + 1) + 2.1
