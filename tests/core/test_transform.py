"""Transforms of updates, and the reductions that rely on them."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedjax_core import (
    ClientProgram,
    Execution,
    LocalWork,
    Packed,
    chain,
    client_mesh,
    clip,
    gaussian_mean,
    map_clients,
    mean,
    plan_round,
    stack,
    top_k,
    trimmed_mean,
    with_transform,
)
from fedjax_core.algorithms import fedavg
from fedjax_core.compress.residual import Feedback
from fedjax_core.reduce import Cast
from fedjax_core.transform import (
    Message,
    Transform,
    dense_bits,
    flat_norm,
    identity,
    stateless,
)

KEY = jax.random.key(0)


def f32(values):
    return np.array(values, np.float32)


def send(transform, update, state=None):
    """What is sent, its bits, and the state: as one program, not by operations."""

    @jax.jit
    def run(update, state):
        state = transform.init(update) if state is None else state
        message, state = transform.apply(Message(update, jnp.float32(-1)), state, KEY)
        return message.update, message.bits, state

    return run(update, state)


def norm64(tree):
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves))


# Clipping.


@functools.cache
def clipped():
    @jax.jit
    def run(update, clip_norm):
        norm = flat_norm(update)
        return send(clip(clip_norm), update)[0], norm

    return run


# Sign and exponent, so that tiny and huge numbers meet in one update.
numbers = st.just(0.0) | st.builds(
    lambda sign, e: sign * 10.0**e, st.sampled_from([-1, 1]), st.floats(-30, 30)
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(numbers, min_size=7, max_size=7), st.floats(-7, 7))
def test_clip_bounds_the_norm_and_keeps_the_direction(values, exponent):
    clip_norm = np.float32(10.0**exponent)
    update = {
        "w": jnp.float32(values[:4]).reshape(2, 2),
        "h": jnp.array(values[4:6], jnp.bfloat16),
        "s": jnp.float32(values[6]),
    }
    out, norm = clipped()(update, clip_norm)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, update)
    before = norm64(update)
    np.testing.assert_allclose(norm, before, rtol=1e-5)
    assert norm64(out) <= clip_norm
    scale = min(1.0, float(clip_norm) / before) if before else 1.0
    for name, rtol in (("w", 1e-5), ("s", 1e-5), ("h", 2**-6)):
        # Numbers below float32's smallest normal one become zero.
        expected = np.asarray(update[name], np.float64) * scale
        np.testing.assert_allclose(
            np.asarray(out[name], np.float64), expected, rtol=rtol, atol=2.4e-38
        )


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.float16, jnp.bfloat16, jnp.float32]
)
@pytest.mark.parametrize("clip_norm", [1e-6, 0.01, 1.0])
@pytest.mark.parametrize("size", [7, 300_000])
def test_the_bound_holds_in_every_dtype(dtype, clip_norm, size):
    # Equal coordinates are rounded the same way, and here below float16's normal ones.
    rng = np.random.default_rng(0)
    for update in (np.full(size, 0.3, np.float32), f32(rng.standard_normal(size))):
        update = update.astype(dtype)
        out, _ = clipped()(update, jnp.float32(clip_norm))
        assert out.dtype == dtype
        assert norm64(out) <= np.float32(clip_norm)
        limits = jnp.finfo(dtype)
        lost = 2 * float(limits.eps) + 1e-5
        lost += size**0.5 * float(limits.smallest_subnormal)
        assert norm64(out) >= min(clip_norm - lost, norm64(update))


def test_double_precision_is_clipped_and_kept_in_it(x64):
    update = jnp.array([3.0, 4.0, 1e-300])
    out, norm = send(clip(0.5), update)[0], flat_norm(update)
    assert norm == 5
    np.testing.assert_allclose(out, update / 10, rtol=1e-13)
    assert norm64(out) <= 0.5
    chex.assert_trees_all_equal(send(clip(6.0), update)[0], update)


def test_clip_leaves_small_and_zero_updates_alone():
    # 0.3 and 0.4 themselves are more than 0.5 long in float32.
    for update in (jnp.zeros(3), jnp.float32([0.3, 0, 0.39999]), jnp.float32(1e-30)):
        chex.assert_trees_all_equal(send(clip(0.5), update)[0], update)


def test_the_slope_of_a_clipped_update_is_finite_at_zero():
    slope = jax.jit(jax.jacobian(lambda u: send(clip(0.5), u)[0]))
    np.testing.assert_array_equal(slope(jnp.zeros(2)), np.eye(2))
    u = jnp.float32([3, 4])  # C (I - u u' / |u|^2) / |u|
    expected = 0.5 / 5 * (np.eye(2) - np.outer(u, u) / 25)
    np.testing.assert_allclose(slope(u), expected, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.inf, math.nan])
def test_clip_norm_must_be_positive(clip_norm):
    with pytest.raises(ValueError, match="clip_norm must be > 0 and finite, got"):
        clip(clip_norm)


# Chains.


def add(number, bound=0.0) -> Transform:
    return stateless(
        lambda message, key: message._replace(update=message.update + number),
        lambda b: b + bound,
    )


def count() -> Transform:
    return Transform(
        lambda update: jnp.int32(0),
        lambda message, state, key: (
            Message(message.update, message.bits + 1),
            state + 1,
        ),
        lambda bound: bound,
    )


def test_chain_applies_from_left_to_right():
    u = jnp.float32([3, 4])
    one = chain(add(1.0), clip(0.5), count(), count())
    sent, bits, state = send(one, u)
    v = np.array([4, 5])
    np.testing.assert_allclose(sent, 0.5 * v / np.linalg.norm(v), rtol=1e-5)
    assert bits == 1
    assert state == ((), (), 1, 1)
    other, _, _ = send(chain(clip(0.5), add(1.0)), u)
    np.testing.assert_allclose(other, [1.3, 1.4], rtol=1e-5)


def test_a_chain_of_nothing_sends_the_update_as_it_is():
    u = jnp.float32([3, 4])
    for transform in (chain(), identity(), chain(identity(), identity())):
        chex.assert_trees_all_equal(send(transform, u)[0], u)
        assert transform.norm_bound(3.0) == 3.0


def test_norm_bounds_compose_in_order():
    assert clip(0.5).norm_bound(math.inf) == 0.5
    assert clip(0.5).norm_bound(0.2) == 0.2
    assert chain(clip(2.0), clip(0.5)).norm_bound(math.inf) == 0.5
    assert chain(clip(0.5), clip(2.0)).norm_bound(math.inf) == 0.5
    assert chain(clip(0.5), add(1.0, 1.0)).norm_bound(math.inf) == 1.5
    assert chain(add(1.0, 1.0), clip(0.5)).norm_bound(math.inf) == 0.5
    assert chain(clip(0.5), top_k(0.1, residual=False)).norm_bound(math.inf) == 0.5
    assert chain(clip(0.5), top_k(0.1)).norm_bound(math.inf) == math.inf
    assert chain(top_k(0.1), clip(0.5)).norm_bound(math.inf) == 0.5


def test_the_parts_of_a_chain_draw_different_numbers():
    noisy = stateless(
        lambda message, key: message._replace(
            update=message.update + jax.random.normal(key, message.update.shape)
        )
    )
    once, _, _ = send(chain(noisy), jnp.zeros(4))
    twice, _, _ = send(chain(noisy, noisy), jnp.zeros(4))
    assert not np.any(np.isclose(twice, 2 * once))


# Inside a round: the update of a client is the sum of its examples.


def add_up(norm_bound=math.inf) -> ClientProgram:
    def step(shared, carry, batch, key):
        x = jnp.where(batch["example_mask"][:, None], batch["x"], 0)
        return carry + x.sum(0)

    return ClientProgram(
        lambda shared, state, key: jnp.zeros(4),
        step,
        lambda shared, carry, state, key: (carry, state + 1, {}),
        norm_bound,
    )


SIZES = [2, 1, 0, 3]
TRAIN = Packed(
    {"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)},
    np.array([0, 2, 3, 3, 6]),
)
UPDATES = np.array([TRAIN.client(i)["x"].astype(np.float64).sum(0) for i in range(4)])
WORK = LocalWork(batch_size=2)


def test_with_transform_sends_the_transformed_update_and_counts_it(run):
    program = with_transform(add_up(), clip(0.5))
    assert program.norm_bound == 0.5
    assert with_transform(add_up(0.1), clip(0.5)).norm_bound == 0.1
    cohort = plan_round([3, 0, 2], TRAIN, WORK, seed=0, round=0)
    got = run(
        lambda c: map_clients(
            program, (), c, KEY, reduce=stack(), client_state=(jnp.zeros(4), ())
        )
    )(cohort)
    norms = np.linalg.norm(UPDATES, axis=1, keepdims=True)
    expected = UPDATES * np.minimum(1, 0.5 / np.where(norms > 0, norms, 1))
    np.testing.assert_allclose(got.update, expected[[3, 0, 2]], rtol=1e-5, atol=1e-7)
    # Four float32 each from the two that had something to send.
    assert got.metrics["uplink_bytes"] == 32
    np.testing.assert_array_equal(got.client_metrics["uplink_bytes"], [16, 16, 0])
    np.testing.assert_array_equal(got.client_state[0], [1, 0, 0, 1])


def test_dense_bits_count_every_leaf_in_its_dtype():
    update = {
        "w": jnp.zeros((3, 5)),
        "h": jnp.zeros(7, jnp.bfloat16),
        "s": jnp.float32(0),
        "i": jnp.zeros(2, jnp.int8),
    }
    assert dense_bits(update) == 15 * 32 + 7 * 16 + 32 + 2 * 8


# Top-k.


def reference_top_k(v, k):
    keep = np.argsort(-np.abs(v), kind="stable")[:k]  # stable: first come first
    out = np.zeros_like(v)
    out[keep] = v[keep]
    return out


@pytest.mark.parametrize("rate", [0.01, 0.25, 1.0])
def test_top_k_sends_the_largest_coordinates_of_all_leaves(rate):
    rng = np.random.default_rng(3)
    update = {
        "b": jnp.float32(rng.normal()),
        "w": jnp.float32(rng.normal(size=(3, 5)) * 2),
        "z": jnp.float32(rng.normal(size=4)),
    }
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(update)])
    k = max(1, int(rate * 20))
    for residual in (False, True):
        sent, bits, state = send(top_k(rate, residual=residual), update)
        got = np.concatenate([np.ravel(x) for x in jax.tree.leaves(sent)])
        np.testing.assert_array_equal(got, reference_top_k(flat, k))
        assert bits == k * (32 + (5 if k < 20 else 0))
        chex.assert_trees_all_equal_shapes_and_dtypes(sent, update)
        if residual:
            rest = np.concatenate(
                [np.ravel(x) for x in jax.tree.leaves(state.residual)]
            )
            np.testing.assert_array_equal(rest, flat - got)
        else:
            assert state == ()


def test_a_tie_goes_to_the_coordinate_that_comes_first():
    sent, _, _ = send(top_k(0.5, residual=False), jnp.float32([1, -2, 2, 2, -1, 1]))
    np.testing.assert_array_equal(sent, [0, -2, 2, 2, 0, 0])
    sent, _, _ = send(top_k(0.5, residual=False), jnp.zeros(4))
    np.testing.assert_array_equal(sent, np.zeros(4))


@pytest.mark.parametrize(
    ("rate", "d", "k"),
    [
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        (0.29, 99, 28),
        (1e-9, 3, 1),
        (0.3, 10, 3),
        (1.0, 1, 1),
        (0.5, 2, 1),
        (1.0, 4, 4),
    ],
)
def test_bits_of_a_message(rate, d, k):
    sent, bits, _ = send(top_k(rate, residual=False), jnp.arange(1.0, d + 1))
    assert np.count_nonzero(sent) == k
    assert bits == k * (32 + (math.ceil(math.log2(d)) if k < d else 0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_was_sent_plus_the_residual_is_the_sum_of_the_updates(dtype):
    rng = np.random.default_rng(1)
    transform, d = top_k(0.2), 15
    sent_so_far, total = np.zeros(d), np.zeros(d)
    residual = transform.init(jnp.zeros(d, dtype))
    assert residual.residual.dtype == jnp.float32
    expected = np.zeros(d, np.float32)
    step = jax.jit(lambda u, r: send(transform, u, r))
    for _ in range(20):
        update = jnp.asarray(rng.normal(size=d), dtype)
        sent, _, residual = step(update, residual)
        assert sent.dtype == dtype
        assert np.count_nonzero(sent) == 3
        v = np.asarray(update, np.float32) + expected
        expected = v - np.asarray(sent, np.float32)
        np.testing.assert_allclose(
            np.asarray(sent, np.float32), reference_top_k(v, 3), rtol=2**-8
        )
        np.testing.assert_array_equal(residual.residual, expected)
        sent_so_far += np.asarray(sent, np.float64)
        total += np.asarray(update, np.float64)
    np.testing.assert_allclose(sent_so_far + residual.residual, total, atol=1e-5)


def test_residuals_belong_to_clients_in_a_round():
    program = with_transform(add_up(), top_k(0.25))
    round = jax.jit(
        lambda c, s: map_clients(program, (), c, KEY, reduce=stack(), client_state=s)
    )
    state = (jnp.zeros(4), Feedback(jnp.zeros((4, 4)), ()))
    sent, total = np.zeros((4, 4)), np.zeros((4, 4))
    for t, ids in enumerate([[0, 3, 2], [3, 1, 0], [1, 2, 0], [3, 0, 1]]):
        cohort = plan_round(ids, TRAIN, WORK, seed=0, round=t)
        got = round(cohort, state)
        untouched = [i for i in range(4) if i not in ids or i == 2]
        np.testing.assert_array_equal(
            got.client_state[1].residual[jnp.array(untouched)],
            state[1].residual[jnp.array(untouched)],
        )
        sent[ids] += got.update
        total[ids] += UPDATES[ids]
        state = got.client_state
        assert got.metrics["uplink_bytes"] == (len(ids) - (2 in ids)) * (32 + 2) / 8
    np.testing.assert_allclose(sent + state[1].residual, total, atol=1e-5)


@pytest.mark.parametrize("residual", [True, False])
def test_full_rate_is_no_compression(residual):
    u = jnp.float32(np.random.default_rng(0).normal(size=9))
    sent, bits, state = send(top_k(1.0, residual=residual), u)
    np.testing.assert_array_equal(sent, u)
    assert bits == 9 * 32
    for rest in jax.tree.leaves(state):
        np.testing.assert_array_equal(rest, np.zeros(9))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.01, math.nan])
def test_rate_must_be_a_share(rate):
    with pytest.raises(ValueError, match=r"rate must be .*, got"):
        top_k(rate)


# Trimmed mean.


@functools.partial(jax.jit, static_argnums=2)
def trim(updates, valid, fraction):
    updates = jax.tree.map(
        lambda u: jnp.where(valid.reshape(-1, *[1] * (u.ndim - 1)), u, 0), updates
    )
    cohort = plan_round([], TRAIN, WORK, seed=0, round=0)
    return trimmed_mean(fraction).finish(updates, Cast(KEY, valid, cohort, math.inf))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from([0.0, 0.1, 0.2, 0.29, 0.3, 1 / 3, 0.45, 0.499]),
    st.lists(st.booleans(), min_size=10, max_size=10),
    st.integers(0, 2**16),
)
def test_trimmed_mean_equals_scipy(fraction, valid, seed):
    rng = np.random.default_rng(seed)
    # A few values only, so that there are ties.
    updates = rng.integers(-3, 4, (10, 2, 2)).astype(np.float32)
    scalars = rng.normal(size=10).astype(np.float32)
    valid = np.array(valid)
    got = trim((updates, scalars), valid, fraction)
    n = valid.sum()
    # SciPy truncates fraction * n, which falls short of a whole number by rounding.
    exact = math.floor(round(fraction * n, 9)) / max(n, 1) + 1e-9
    for out, x in zip(got, (updates, scalars), strict=True):
        x = x[valid].astype(np.float64)
        expected = stats.trim_mean(x, exact) if n else np.zeros(x.shape[1:])
        if (n and fraction and math.floor(round(fraction * n, 9)) == 0) or n in (1, 2):
            expected = np.where(fraction, np.nan, expected)  # nobody to drop
        np.testing.assert_allclose(out, expected, atol=1e-6)


def test_rounding_neither_adds_nor_loses_a_trimmed_client():
    x = np.append(np.arange(99.0), 1e4)
    x[0] = -1e5
    everyone = np.ones(100, bool)
    # 0.29 * 100 is 28.999999999999996.
    np.testing.assert_allclose(
        trim(x, everyone, 0.29), np.sort(x)[29:-29].mean(), rtol=1e-6
    )
    three = f32([0, 1, 5])
    assert trim(three, everyone[:3], 1 / 3) == 1
    # As much as there is: the middle stays.
    assert trim(three, everyone[:3], 0.5 - 1e-16) == 1


def test_a_share_that_trims_nobody_is_an_error_or_not_a_number():
    updates = f32([0, 1, 2, 1e6, 5])
    # Four of five are valid, and a fifth of four is less than one client.
    four = np.arange(5) < 4
    assert np.isnan(trim(updates, four, 0.2))
    assert trim(updates, four, 0.25) == 1.5
    assert trim(updates, np.ones(5, bool), 0.2) == 8 / 3
    assert trim(updates, np.zeros(5, bool), 0.2) == 0, "nobody is not too few"
    # Where no cohort of this size can have enough. A third with five digits is less.
    for slots, share in ((4, 0.2), (3, 0.33333), (2, 0.499), (1, 0.499)):
        with pytest.raises(ValueError, match=f"trim_fraction must .* {slots}.*{share}"):
            trim(updates[:slots], four[:slots], share)


@pytest.mark.parametrize("outlier", [1e30, -3e38])
@pytest.mark.parametrize("devices", [1, 4])
def test_one_outlier_is_trimmed_away_in_a_round(outlier, devices):
    x = f32([[0, 0], [1, 5], [2, 4], [3, 3], [outlier, outlier], [np.nan, 0]])
    train = Packed({"x": np.pad(x, ((0, 0), (0, 2)))}, np.arange(7))
    how = Execution(mesh=client_mesh(jax.devices()[:devices]))
    cohort = plan_round(
        range(6), train, WORK, seed=0, round=0, execution=how, cohort_size=9
    )
    got = jax.jit(
        lambda c: map_clients(
            add_up(), (), c, KEY, reduce=trimmed_mean(0.2), client_state=jnp.zeros(6)
        )
    )(cohort)
    # Five are valid; the lowest and the highest of each coordinate go.
    five = np.sort(x[:5].astype(np.float64), axis=0)[1:-1].mean(0)
    np.testing.assert_allclose(got.update[:2], five, rtol=1e-6)
    assert got.metrics["excluded_clients"] == 1


def test_trimming_nothing_is_the_uniform_mean():
    cohort = plan_round([0, 1, 2, 3], TRAIN, WORK, seed=0, round=0, cohort_size=5)

    def twice(*args):
        update, state, metrics = add_up().finish(*args)
        return [update, update], state, metrics

    both = add_up()._replace(finish=twice)
    trimmed, plain = jax.jit(
        lambda c: (
            map_clients(
                both,
                (),
                c,
                KEY,
                reduce=[trimmed_mean(0.0), mean("uniform")],
                client_state=jnp.zeros(4),
            ).update
        )
    )(cohort)
    np.testing.assert_allclose(trimmed, plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fraction", [0.5, -0.1, math.nan])
def test_trim_fraction_must_leave_someone(fraction):
    with pytest.raises(ValueError, match=r"trim_fraction must be in \[0, 0.5\), got"):
        trimmed_mean(fraction)


# Gaussian noise. Tests of a standard deviation repeat a round 2,000 times: the sample's
# is off by 3 % with probability 3e-8 over nine coordinates, one coordinate's by 5 sigma
# = 8 % with 6e-7; of 36 correlations one exceeds 0.1 with 3e-4. The key is fixed.

REPEATS = 2000


def zero_loss(params, batch, key):
    del key
    flat = sum(jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params))
    return 0 * flat * batch["x"][:, 0]


@pytest.mark.parametrize("case", ["one device", "three devices", "nobody"])
def test_row_21_noise_in_the_returned_model(case):
    z, bound, m = 0.7, 0.3, 4
    params = {
        "h": jnp.zeros((3,), jnp.bfloat16),
        "s": jnp.float32(0),
        "w": jnp.zeros((5,)),
    }
    algorithm = fedavg.make(
        fedavg.Config(work=LocalWork(batch_size=2)),
        zero_loss,
        transform=clip(bound),
        reduce=gaussian_mean(z, m),
    )
    how = Execution(mesh=client_mesh(jax.devices()[: 3 if "three" in case else 1]))
    ids = [] if case == "nobody" else [0, 1, 3]
    cohort = plan_round(ids, TRAIN, WORK, seed=0, round=0, execution=how, cohort_size=3)
    state = algorithm.init(params, 4)

    @jax.jit
    def repeat(keys):
        return jax.vmap(lambda k: algorithm.round(state, cohort, k)[0].params)(keys)

    new = repeat(jax.random.split(KEY, REPEATS))
    assert new["h"].dtype == jnp.bfloat16
    leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(new)]
    draws = np.concatenate([x.reshape(REPEATS, -1) for x in leaves], axis=1)
    assert draws.shape == (REPEATS, 9)
    std = z * bound / m
    np.testing.assert_allclose(np.sqrt(np.mean(draws**2)), std, rtol=0.03)
    np.testing.assert_allclose(draws.std(0), std, rtol=0.08)
    assert np.abs(draws.mean(0)).max() < 5 * std / REPEATS**0.5
    correlation = np.corrcoef(draws.T) - np.eye(9)
    assert np.abs(correlation).max() < 0.1
    # Normal, not only of the right width.
    assert stats.kstest(draws[:, 4] / std, "norm").pvalue > 1e-4


@functools.partial(jax.jit, static_argnums=0)
def run_noisy(bound, cohort, z, m, key):
    program = with_transform(add_up(bound), clip(0.5) if bound > 100 else identity())
    state = (jnp.zeros(4), ())
    return map_clients(
        program, (), cohort, key, reduce=gaussian_mean(z, m), client_state=state
    ).update


def noisy(z, m, *, bound=math.inf, key=KEY, how=None):
    cohort = plan_round([0, 1, 3], TRAIN, WORK, seed=0, round=0, execution=how)
    return run_noisy(bound, cohort, z, m, key)


def test_noise_is_added_to_the_sum_once_whatever_the_devices():
    updates = UPDATES[[0, 1, 3]]
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    exact = (updates * np.minimum(1, 0.5 / norms)).sum(0)
    np.testing.assert_allclose(noisy(0.0, 3.0), exact / 3, rtol=1e-5)
    np.testing.assert_allclose(noisy(0.0, 7.5), exact / 7.5, rtol=1e-5)
    here = noisy(1.0, 3.0)
    how = Execution(block_size=2, mesh=client_mesh(jax.devices()[:2]))
    there = noisy(1.0, 3.0, how=how)
    np.testing.assert_allclose(here, there, rtol=1e-5)
    # The same key gives the same noise, in proportion to z; another key other noise.
    double = noisy(2.0, 3.0)
    np.testing.assert_allclose(double - here, here - exact / 3, rtol=1e-4, atol=1e-6)
    other = noisy(1.0, 3.0, key=jax.random.key(1))
    assert not np.any(np.isclose(other, here))


def test_noise_needs_a_bound():
    for transform in (identity(), top_k(0.5), chain(clip(1.0), top_k(0.5))):
        program = with_transform(add_up(), transform)
        state = (jnp.zeros(4), jax.vmap(transform.init)(jnp.zeros((4, 4))))
        cohort = plan_round([0], TRAIN, WORK, seed=0, round=0)
        with pytest.raises(ValueError, match="needs updates of bounded norm, got a"):
            jax.eval_shape(
                lambda c, s, program=program: map_clients(
                    program, (), c, KEY, reduce=gaussian_mean(1.0, 1), client_state=s
                ),
                cohort,
                state,
            )


def test_noise_takes_the_bound_that_a_program_declares():
    # Same key, nothing clipped: the noise is in proportion to the declared bound.
    at_0 = noisy(0.0, 1.0, bound=10.0)
    at = {bound: noisy(1.0, 1.0, bound=bound) for bound in (10.0, 20.0)}
    np.testing.assert_allclose(at[20.0] - at_0, 2 * (at[10.0] - at_0), rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-0.1, 10), "noise_multiplier must be >= 0 and finite, got -0.1"),
        ((math.nan, 10), "noise_multiplier must be >= 0 and finite, got nan"),
        ((1.0, 0), "expected_cohort_size must be > 0 and finite, got 0"),
    ],
)
def test_impossible_noise_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_mean(*arguments)


def test_no_noise_and_a_wide_clip_is_plain_fedavg():
    config = fedavg.Config(
        work=LocalWork(batch_size=2), client_lr=0.1, weights="uniform"
    )

    def loss(w, batch, key):
        return jnp.square(batch["x"] - w[None]).sum(1)

    private = fedavg.make(config, loss, transform=clip(1e6), reduce=gaussian_mean(0, 3))
    plain = fedavg.make(config, loss)
    cohort = plan_round([0, 1, 3], TRAIN, WORK, seed=0, round=0)
    a, b = (
        jax.jit(algorithm.round)(algorithm.init(jnp.ones(4), 4), cohort, KEY)[0].params
        for algorithm in (private, plain)
    )
    np.testing.assert_allclose(a, b, rtol=1e-6)
