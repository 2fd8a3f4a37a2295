"""Bits of messages: closed forms, and the codes that they are the lengths of."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_core import models
from fedjax_core.compress import coders, golomb, theory
from fedjax_core.compress.quantisers import digit_bits

# Sattler's section on Golomb coding: p, b, bits of a position, entropy of one.
TABLE = [
    (1 / 2, 0, 2.00000, 2.00000),
    (1 / 4, 1, 3.28571, 3.24511),
    (1 / 10, 3, 4.75583, 4.68996),
    (1 / 25, 4, 6.08508, 6.05730),
    (1 / 100, 6, 8.10791, 8.07931),
    (1 / 400, 8, 10.11358, 10.08475),
    (1 / 1000, 9, 11.49465, 11.40776),
]
RNG = np.random.default_rng(0)


def f32(values):
    return np.array(values, np.float32)


def entropy(p):
    """Bits per position if each of the coordinates is sent with chance p."""
    return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p


@pytest.mark.parametrize(("p", "b", "bits", "least"), TABLE)
def test_bits_of_a_position(p, b, bits, least):
    assert golomb.parameter(p) == b
    assert abs(golomb.expected_bits(p) - bits) < 1e-5
    assert abs(entropy(p) - least) < 1e-5


def test_no_other_parameter_is_shorter():
    for p in np.exp(RNG.uniform(math.log(1e-6), math.log(0.999), 2000)).tolist():
        lengths = [golomb.expected_bits(p, b) for b in range(41)]
        assert golomb.expected_bits(p) <= min(lengths) * (1 + 1e-12)


def test_codes_are_close_to_the_entropy():
    for p in np.linspace(1e-4, 0.6, 5000).tolist():
        assert -1e-12 <= golomb.expected_bits(p) - entropy(p) <= 0.1201
    assert golomb.expected_bits(0.5) == entropy(0.5)
    assert abs(golomb.expected_bits(0.95) - entropy(0.95) - 0.75) < 0.01


def test_worked_codes():
    positions = np.array([3, 4, 9, 16]) - 1
    assert golomb.encode(positions, 16, 1) == "10000110011100"
    assert golomb.encode(positions, 16, 2) == "01000010001010"


def test_codes_have_the_length_that_rounds_count():
    count, of_mask = (
        jax.jit(golomb.position_bits, static_argnums=1),
        jax.jit(golomb.mask_bits),
    )
    for d, k in [(300, 1), (300, 3), (300, 40), (300, 150), (300, 299), (300, 300)]:
        positions = np.sort(RNG.choice(d, k, replace=False))
        bits = count(jnp.asarray(positions, jnp.int32), d)
        mask = np.isin(np.arange(d), positions)
        assert of_mask(mask) == bits
        if k == d:
            assert bits == 0
            continue
        code = golomb.encode(positions, d, golomb.parameter(k / d))
        assert bits == len(code)
        for b in range(10):
            found, _ = golomb.decode(golomb.encode(positions, d, b), d, b)
            np.testing.assert_array_equal(found, positions)
    assert of_mask(np.zeros(300, bool)) == 0


@pytest.mark.parametrize(("p", "bits"), [(0.01, 8.108), (0.0025, 10.114)])
def test_random_positions_take_the_expected_bits(p, bits):
    d = 4_000_000
    # Of exactly k positions the mean's deviation is below 0.004: chance below 1e-6.
    positions = RNG.choice(d, int(p * d), replace=False, shuffle=False)
    positions = np.sort(positions).astype(np.int32)
    b = golomb.parameter(p)
    steps = np.diff(positions, prepend=-1) - 1
    assert abs(1 + b + (steps >> b).mean() - bits) < 0.02
    counted = golomb.position_bits(jnp.asarray(positions), d)
    assert abs(float(counted) / len(positions) - bits) < 0.02


def test_broken_codes_are_refused():
    for positions in ([3, 3], [5, 2], [-1, 2], [2, 16], [0.5, 1.5]):
        with pytest.raises(ValueError, match="positions must be ints that increase in"):
            golomb.encode(np.array(positions), 16, 1)
    code = golomb.encode(np.array([2, 3, 8, 15]), 16, 1)
    with pytest.raises(ValueError, match="must end with a whole position"):
        golomb.decode(code[:-1], 16, 1)
    with pytest.raises(ValueError, match="must end with a whole position"):
        golomb.decode(code + "1", 16, 1)
    with pytest.raises(ValueError, match=r"must lie in 0..15, got 16"):
        golomb.decode(code + "00", 16, 1)
    for rate in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="rate must be"):
            golomb.parameter(rate)


@pytest.mark.parametrize(
    ("d", "base"), [(7, 2), (100, 3), (64, 16), (301, 5), (40, 21)]
)
def test_digits(d, base):
    digits = RNG.integers(0, base, d)
    code = coders.encode_digits(digits, base)
    assert len(code) == digit_bits(d, base) == math.ceil(d * math.log2(base))
    content = coders.to_bytes(code)
    assert len(content) == -(-len(code) // 8)
    assert coders.from_bytes(content, len(code)) == code
    np.testing.assert_array_equal(coders.decode_digits(code, d, base), digits)
    with pytest.raises(ValueError, match=f"must lie in 0..{base - 1}"):
        coders.encode_digits(np.array([base]), base)
    with pytest.raises(ValueError, match="code must have"):
        coders.decode_digits(code + "0", d, base)
    with pytest.raises(ValueError, match=r"base must be in \[2, inf\], got 1"):
        coders.encode_digits(digits * 0, 1)


def test_floats():
    values = f32([0.0, -1.5, 3e38, 1e-40, np.pi])
    code = coders.encode_floats(values)
    assert len(code) == 32 * 5
    np.testing.assert_array_equal(coders.decode_floats(code), values)
    with pytest.raises(ValueError, match="code must have 32 bits, got 33"):
        coders.decode_floats(code[:33])


def test_what_is_no_sparse_message_is_refused():
    with pytest.raises(ValueError, match="at most k=1 values, got 2"):
        coders.encode_sparse(f32([1, 0, 1]), 1, "mean")
    with pytest.raises(ValueError, match="must hold one magnitude"):
        coders.encode_sparse(f32([1, 0, 2]), 2, "signs")
    with pytest.raises(ValueError, match="must hold one magnitude"):
        coders.encode_sparse(f32([1, 0, -1]), 2, "mean")
    with pytest.raises(ValueError, match="no 0 where positions are not sent"):
        coders.encode_sparse(f32([1, 0, -1]), 3, "signs")
    with pytest.raises(ValueError, match="bits must fill 2 bytes"):
        coders.from_bytes(b"ab", 8)


def test_corrupt_codes_are_read_or_refused():
    v = np.zeros(40, np.float32)
    v[RNG.choice(40, 5, replace=False)] = 2.5
    decoders = {
        coders.encode_digits(np.arange(7), 21): lambda c: coders.decode_digits(c, 7, 21)
    }
    for values in ("each", "signs", "mean"):
        decoders[coders.encode_sparse(v, 5, values)] = lambda c, values=values: (
            coders.decode_sparse(c, 40, 5, values)
        )
    read = 0
    for code, decode in decoders.items():
        with pytest.raises(ValueError, match="code must"):
            decode("2" + code[1:])
        for _ in range(200):
            bits = np.array(list(code))[: RNG.integers(len(code) + 1)]
            at = RNG.integers(len(bits) or 1)
            bits[at : at + 1] = "1"
            # Any other error is a fault.
            with contextlib.suppress(ValueError):
                decode("".join(bits))
                read += 1
    assert 0 < read < 100
    with pytest.raises(ValueError, match="7 digits in base 21, got a larger one"):
        coders.decode_digits("1" * digit_bits(7, 21), 7, 21)
    with pytest.raises(ValueError, match="at most k=1 values, got 2"):
        coders.decode_sparse("0" * 32 + "0" * 18, 400, 1, "mean")
    with pytest.raises(ValueError, match=r"k must be in \[1, 4\], got 5"):
        coders.decode_sparse("", 4, 5, "mean")


def test_printed_ratios():
    ratio, table = theory.compression_ratio, "seed_table"
    assert round(ratio("sbc", 0.001, 1, table), 1) == 2371.3
    assert round(ratio("sbc", 0.01, 10, table), 1) == 3165.8
    assert round(ratio("sbc", 0.01, 100, table), 1) == 31658.4
    assert round(ratio("top_k", 0.001, 1, table), 1) == 719.2
    assert round(ratio("stc", 1 / 400, 1, table), 1) == 1056.7
    for p, sbc, stc in [(1 / 4, 38.96, 29.87), (1 / 400, 1265.62, 1151.74)]:
        assert abs(ratio("sbc", p) - sbc) < 0.01
        assert abs(ratio("stc", p) - stc) < 0.01


def test_printed_megabytes_are_rounds_of_one_client():
    def size(model):
        params = jax.eval_shape(model.init, jax.random.key(0))
        return sum(x.size for x in jax.tree.leaves(params))

    vgg, lstm = size(models.vgg11_small()), 216330  # with PyTorch's second bias
    for rounds, d, megabytes in [
        (10600, vgg, 36696.4),
        (464, vgg, 1606.3),
        (1480, size(models.kws_cnn()), 5191.5),
        (2800, lstm, 2422.9),
    ]:
        assert abs(rounds * 4 * d / 1e6 - megabytes) < 0.06
    assert round(14600 * digit_bits(vgg, 2) / 8 / 1e6, 1) == 1579.5  # signSGD


def test_downloads_of_the_tables():
    assert round(theory.download_ratio(0.1, "signsgd"), 4) == 4.3923
    assert theory.download_ratio(0.1, "stc") == 10
    assert abs(1579.5 * theory.download_ratio(0.1, "signsgd") - 6937.67) < 0.05
    assert abs(123.3 * theory.download_ratio(0.1, "signsgd") - 541.57) < 0.05


def test_an_information_budget_is_that_of_its_messages():
    d, n, steps = 10**6, 10, 1000
    budget = theory.information_budget("stc", 0.01, n, steps, d)
    assert budget.total == pytest.approx(steps / n * 10**4 * (8.10791 + 1), 1e-5)
    assert budget.entropy == pytest.approx(steps / n * 10**4 * (8.07931 + 1), 1e-5)
    assert budget.overhead == budget.total - budget.entropy
    dense = 32 * d * steps
    assert dense / budget.total == pytest.approx(
        theory.compression_ratio("stc", 0.01, n)
    )
