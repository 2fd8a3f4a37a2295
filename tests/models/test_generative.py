"""Networks of generators and energies: sizes, shapes, ranges, spectral norms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.models.test_zoo import conv, dense, resnet

from fedjax_core import models
from fedjax_core.models.residual import SpectralDense

KEY = jax.random.key(0)


def sizes(init):
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, KEY)))


def test_a_spectral_layer_has_norm_one_and_the_gradient_of_its_quotient():
    layer: Any = SpectralDense(4)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)), float)
    params = layer.init(KEY, x)["params"]
    # Far from a tie, so that power iteration has long converged.
    kernel = params["kernel"] + jnp.ones((4, 7))

    def output(kernel):
        return layer.apply({"params": {**params, "kernel": kernel}}, x)

    def exact(kernel):
        return x @ (kernel / jnp.linalg.norm(kernel, 2)).T

    np.testing.assert_allclose(output(kernel), exact(kernel), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(output(7 * kernel), exact(kernel), rtol=1e-4, atol=1e-5)
    got, expected = (
        jax.grad(lambda k, f=f: jnp.square(f(k))[:, 0].sum())(kernel)
        for f in (output, exact)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_a_resnet10_is_a_classifier_whose_rows_do_not_mix():
    whole = models.as_classifier(models.resnet10(), (32, 32, 3))
    assert sizes(whole.init) == resnet(1, 10) == 4_903_242
    small = models.as_classifier(models.resnet10(3, channels=2), (8, 8, 1))
    params = jax.jit(small.init)(KEY)
    x = jax.random.normal(KEY, (4, 8, 8, 1))
    run = jax.jit(
        lambda x: (
            small.logits(params, x),
            jax.grad(lambda x: small.logits(params, x)[:, 0].sum())(x),
        )
    )
    (logits, slope), (other, _) = run(x), run(x.at[1:].set(0))
    assert logits.shape == (4, 3)
    np.testing.assert_allclose(logits[0], other[0], rtol=1e-5, atol=1e-6)
    # Swish has a slope everywhere: so have energies.
    assert (slope != 0).mean() > 0.99


def test_generators_make_images_of_their_range_from_noise_and_class():
    image, k = (8, 12, 3), 5
    y, z = jnp.array([0, 4, 2]), jax.random.normal(KEY, (3, 6))
    gan = models.conditional_gan(image, k, latent=6, width=4)
    vae = models.conditional_vae(image, k, latent=6, width=4)
    params, own = jax.jit(gan.init)(KEY), jax.jit(vae.init)(KEY)
    draw = jax.jit(gan.generate)
    x = draw(params, z, y)
    for made in (x, jax.jit(vae.decode)(own, z, y)):
        assert made.shape == (3, *image)
        assert ((made > 0) & (made < 1)).all()
    assert not np.allclose(draw(params, z, y[::-1])[0], x[0])
    source, kind = jax.eval_shape(gan.judge, params, x)
    assert (source.shape, kind.shape) == ((3,), (3, k))
    mean, log_var = jax.eval_shape(vae.encode, own, x, y)
    assert mean.shape == log_var.shape == (3, 6)
    # Two convolutions that quarter the image, before one dense layer or two.
    features, flat = conv(3, 3, 4) + conv(3, 4, 8), 2 * 3 * 8
    for part, last in (
        (params["discriminator"], dense(flat, 1 + k)),
        (own["encoder"], dense(flat + k, 12)),
    ):
        assert sum(v.size for v in jax.tree.leaves(part)) == features + last
