"""Linear generators of three features and three classes."""

import jax
import jax.numpy as jnp
from tests.reference import softmax_problem

from fedjax_core import models

D, K, LATENT = 3, 3, 2
_, _, PARAMS = softmax_problem([1])
SOFTMAX = models.Classifier(
    lambda key: jax.tree.map(jnp.asarray, PARAMS),
    lambda params, x: x @ params["w"] + params["b"][None],
)


def _normal(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / 3
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _made(params, z, y):
    return z @ params["z"] + params["y"][y]


def linear_gan() -> models.ConditionalGAN:
    """X' = z A + B_y, and a linear discriminator of the source and of the class."""

    def init(key):
        first, second = jax.random.split(key)
        return {
            "generator": _normal(first, z=(LATENT, D), y=(K, D)),
            "discriminator": _normal(second, source=(D,), kind=(D, K)),
        }

    def generate(params, z, y):
        return _made(params["generator"], z, y)

    def judge(params, x):
        params = params["discriminator"]
        return x @ params["source"], x @ params["kind"]

    return models.ConditionalGAN(init, LATENT, generate, judge)


def linear_vae() -> models.ConditionalVAE:
    """Means x M + N_y, one variance for all of z, and x' = z A + B_y."""

    def init(key):
        encoder = {"mean": (D, LATENT), "of": (K, LATENT), "log_var": (LATENT,)}
        return _normal(key, z=(LATENT, D), y=(K, D), **encoder)

    def encode(params, x, y):
        mean = x @ params["mean"] + params["of"][y]
        return mean, jnp.broadcast_to(params["log_var"], mean.shape)

    return models.ConditionalVAE(init, LATENT, encode, _made)
