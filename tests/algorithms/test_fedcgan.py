"""The losses of a linear conditional GAN in NumPy, and whose gradient is whose."""

from typing import Any

import jax
import numpy as np
import pytest
from tests.algorithms.generators import LATENT, SOFTMAX, K, linear_gan
from tests.algorithms.softmax_rounds import COHORTS, EXAMPLES, rounds
from tests.algorithms.softmax_rounds import KEY as ROUND_KEY

from fedjax_core import LocalWork, models
from fedjax_core.algorithms import fedcgan
from fedjax_core.generated import drawn, fit_seed

GAN, KEY = linear_gan(), jax.random.key(4)
PARAMS = GAN.init(KEY)
BATCH: Any = {k: v[:8] for k, v in EXAMPLES.items()}
CONFIG = fedcgan.Config(num_classes=K, per_class=2, work=LocalWork(batch_size=4))


def cross_entropy(logits, y):
    return np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]


def in_numpy(generator, discriminator):
    """The losses of both networks by example, with the draws of the key."""
    of_z, of_y = jax.random.split(KEY)
    z = np.asarray(jax.random.normal(of_z, (8, LATENT)), np.float64)
    y = np.asarray(jax.random.randint(of_y, (8,), 0, K))
    made = z @ generator["z"] + generator["y"][y]
    source, kind = discriminator["source"], discriminator["kind"]

    def soft(x):
        return np.log1p(np.exp(x))

    real = soft(-BATCH["x"] @ source) + cross_entropy(BATCH["x"] @ kind, BATCH["y"])
    classes = cross_entropy(made @ kind, y)
    return real + soft(made @ source) + classes, soft(-made @ source) + classes


def wide(params):
    return {k: np.asarray(v, np.float64) for k, v in params.items()}


def test_a_step_is_a_step_of_each_network_on_its_own_loss():
    loss = fedcgan.gan_loss(GAN, K)
    values, gradient = jax.jit(
        lambda params: (
            loss(params, BATCH, KEY),
            jax.grad(lambda p: loss(p, BATCH, KEY).mean())(params),
        )
    )(PARAMS)
    start = {name: wide(part) for name, part in PARAMS.items()}
    np.testing.assert_allclose(values, sum(in_numpy(**start)), rtol=1e-5)
    h = 1e-6
    for network, which in (("discriminator", 0), ("generator", 1)):
        for name, x in start[network].items():
            for at in np.ndindex(x.shape):
                ends = []
                for sign in (1, -1):
                    moved = x.copy()
                    moved[at] += sign * h
                    there = start | {network: start[network] | {name: moved}}
                    ends.append(in_numpy(**there)[which].mean())
                slope = (ends[0] - ends[1]) / (2 * h)
                got = gradient[network][name][at]
                np.testing.assert_allclose(got, slope, rtol=1e-3, atol=1e-5)


def test_both_networks_are_averaged_and_samples_are_drawn_by_class():
    algorithm = fedcgan.make(CONFIG, GAN, SOFTMAX)
    size = sum(x.size for x in jax.tree.leaves(PARAMS))
    ((state, metrics, _),) = rounds(algorithm, COHORTS[:1], params=PARAMS)
    assert metrics["uplink_bytes"] == 4 * size * len(COHORTS[0])
    draw = drawn(CONFIG, GAN.generate, LATENT)
    x = draw(state.params)
    assert x.shape == (K * 2, 3)
    # The generator is linear: with the same noise, classes differ by their vectors.
    still = jax.tree.map(np.zeros_like, state.params["generator"])
    only = draw({"generator": {**still, "y": state.params["generator"]["y"]}})
    np.testing.assert_allclose(only, state.params["generator"]["y"].repeat(2, 0))
    assert state.seed == fit_seed(ROUND_KEY) != 0
    learnt = jax.jit(algorithm.model)(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learnt))


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"beta1 must be in \[0, 1\), got 1.5"):
        fedcgan.Config(beta1=1.5)
    with pytest.raises(ValueError, match="per_class must be >= 1, got 0"):
        fedcgan.Config(per_class=0)
    with pytest.raises(ValueError, match=r"image must be .* 4 divides, got \(10, 8, 1"):
        models.conditional_gan((10, 8, 1))
