"""Networks that make examples of a class: classifiers as energies, GANs, VAEs.

Small ones for small images, in the manner of DCGAN, for images ``[H, W, C]`` in [0, 1]
whose sides 4 divides. All are sets of plain functions: others can be brought.

References:
  Radford et al., "Unsupervised Representation Learning with Deep Convolutional
  Generative Adversarial Networks", ICLR 2016.
  Odena et al., "Conditional Image Synthesis with Auxiliary Classifier GANs", ICML 2017.
  Sohn et al., "Learning Structured Output Representation using Deep Conditional
  Generative Models", NeurIPS 2015.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.models.layers import Conv, Dense
from fedjax_core.types import Key, Params


class Classifier(NamedTuple):
    """A classifier by its logits as they are, not up to a constant.

    Attributes:
      init: ``key -> params``.
      logits: ``(params, x [B, ...]) -> [B, K]``; rows don't mix.
    """

    init: Callable[[Key], Params]
    logits: Callable[[Params, jax.Array], jax.Array]


class ConditionalGAN(NamedTuple):
    """A generator and a discriminator that also classifies.

    Attributes:
      init: ``key -> {"generator", "discriminator"}``, the params of both.
      latent: length of z.
      generate: ``(params, z [B, latent], y [B]) -> x [B, ...]``, by the generator.
      judge: ``(params, x) -> ([B], [B, K])``, by the discriminator: the logit of being
        real, and those of classes; rows don't mix.
    """

    init: Callable[[Key], Params]
    latent: int
    generate: Callable[[Params, jax.Array, jax.Array], jax.Array]
    judge: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]


class ConditionalVAE(NamedTuple):
    """An encoder and a decoder that are both told the class.

    Attributes:
      init: ``key -> params`` of both.
      latent: length of z.
      encode: ``(params, x [B, ...], y [B]) -> ([B, latent], [B, latent])``, the mean of
        z and the logarithm of its variances.
      decode: ``(params, z, y) -> x``.
    """

    init: Callable[[Key], Params]
    latent: int
    encode: Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    decode: Callable[[Params, jax.Array, jax.Array], jax.Array]


def as_classifier(module: nn.Module, image: Sequence[int]) -> Classifier:
    """A flax (linen) module without running statistics, ``[B, *image]`` to logits."""
    x = jnp.zeros((1, *image))
    asks = "train" in inspect.signature(type(module).__call__).parameters
    told: dict[str, Any] = {"train": True} if asks else {}
    return Classifier(
        lambda key: module.init(key, x, **told)["params"],
        lambda params, x: module.apply({"params": params}, x, **told),  # type: ignore[arg-type]
    )


_CONV = partial(Conv, padding="SAME")


class _Features(nn.Module):
    """Two convolutions that stride by 2, as a vector."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.leaky_relu(_CONV(self.width, stride=2)(x), 0.2)
        x = nn.leaky_relu(_CONV(2 * self.width, stride=2)(x), 0.2)
        return x.reshape(x.shape[0], -1)


class _Judge(nn.Module):
    num_classes: int
    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _Features(self.width)(x)
        return Dense(1)(x)[:, 0], Dense(self.num_classes)(x)


class _Draw(nn.Module):
    """A dense layer, then twice: enlarge by 2 and convolve."""

    num_classes: int
    width: int
    image: Sequence[int]

    @nn.compact
    def __call__(self, z: jax.Array, y: jax.Array) -> jax.Array:
        height, width, channels = self.image
        x = jnp.concatenate([z, jax.nn.one_hot(y, self.num_classes, dtype=z.dtype)], 1)
        start = (height // 4, width // 4, 2 * self.width)
        x = nn.Dense(start[0] * start[1] * start[2])(x).reshape(-1, *start)
        for features in (self.width, channels):
            x = nn.GroupNorm(1)(x)
            x = nn.relu(x).repeat(2, 1).repeat(2, 2)
            x = _CONV(features)(x)
        return nn.sigmoid(x)


class _Encode(nn.Module):
    num_classes: int
    width: int
    latent: int

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _Features(self.width)(x)
        of = jax.nn.one_hot(y, self.num_classes, dtype=x.dtype)
        x = nn.Dense(2 * self.latent)(jnp.concatenate([x, of], 1))
        return x[:, : self.latent], x[:, self.latent :]


def conditional_gan(
    image: Sequence[int], num_classes: int = 10, *, latent: int = 64, width: int = 16
) -> ConditionalGAN:
    """A small AC-GAN; `width` is the channels of its wider images."""
    x, y, z = _example(image, num_classes=num_classes, latent=latent, width=width)
    draw, judge = _Draw(num_classes, width, tuple(image)), _Judge(num_classes, width)
    init = _init(generator=(draw, z, y), discriminator=(judge, x))
    generate, judged = _part(draw, "generator"), _part(judge, "discriminator")
    return ConditionalGAN(init, latent, generate, judged)


def conditional_vae(
    image: Sequence[int], num_classes: int = 10, *, latent: int = 128, width: int = 16
) -> ConditionalVAE:
    """A small conditional VAE; `width` is the channels of its wider images."""
    x, y, z = _example(image, num_classes=num_classes, latent=latent, width=width)
    draw = _Draw(num_classes, width, tuple(image))
    encode = _Encode(num_classes, width, latent)
    init = _init(encoder=(encode, x, y), decoder=(draw, z, y))
    encoded, decoded = _part(encode, "encoder"), _part(draw, "decoder")
    return ConditionalVAE(init, latent, encoded, decoded)


def _init(**parts: tuple[Any, ...]) -> Callable[[Key], Params]:
    """``key -> params`` by name of networks, each with inputs of its."""

    def init(key: Key) -> Params:
        keys = jax.random.split(key, len(parts))
        return {
            name: module.init(k, *inputs)["params"]
            for k, (name, (module, *inputs)) in zip(keys, parts.items(), strict=True)
        }

    return init


def _part(module: nn.Module, name: str) -> Callable[..., Any]:
    """A network as a function of the params that hold its own under a name."""
    return lambda params, *inputs: module.apply({"params": params[name]}, *inputs)


def _example(image: Sequence[int], latent: int, **sizes: int) -> tuple[jax.Array, ...]:
    """An example, its class and its z."""
    check.positive_int(latent=latent, **sizes)
    if len(image) != 3 or image[0] % 4 or image[1] % 4:
        raise ValueError(
            f"image must be (height, width, channels) with sides that 4 divides, got "
            f"{tuple(image)}."
        )
    return jnp.zeros((1, *image)), jnp.zeros(1, jnp.int32), jnp.zeros((1, latent))
