"""Residual networks for small images, with batch or with group normalisation.

Batch normalisation mixes the examples of a batch and keeps running statistics, which
small and skewed batches of clients bend (Hsieh et al.); its models have `Stateful`
params. Group normalisation looks at one example alone, here with two groups of
channels as in Reddi et al.; its models are plain. Both have the same parameters.
Convolutions have no bias and start from He's normal distribution. Where one of 3x3
strides over an even image, zeros lie after it alone, as `layers.conv` has it (PyTorch
would put one on both sides).

References:
  He et al., "Deep Residual Learning for Image Recognition", CVPR 2016.
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical
  Heterogeneity", UNIST 2024.
  Hsieh et al., "The Non-IID Data Quagmire of Decentralized Machine Learning",
  ICML 2020.
  Miyato et al., "Spectral Normalization for Generative Adversarial Networks",
  ICLR 2018.
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
  Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018.
  Sattler et al., "FedAUX: Leveraging Unlabeled Auxiliary Data in Federated Learning",
  TNNLS 2021.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.models.adapters import classifier
from fedjax_core.models.layers import Conv, Dense, DepthwiseConv, Lowering
from fedjax_core.models.model import Model

Norm: TypeAlias = Literal["batch", "group"]

_HE = nn.initializers.he_normal()
_CONV = partial(Conv, padding="SAME", kernel_init=_HE, use_bias=False)
_GROUPS, _MOMENTUM = 2, 0.9


class _Norm(nn.Module):
    kind: Norm

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if self.kind == "group":
            return nn.GroupNorm(_GROUPS, epsilon=1e-5)(x)
        return nn.BatchNorm(use_running_average=not train, momentum=_MOMENTUM)(x)


class SpectralDense(nn.Module):
    """An affine map whose kernel [F, C] is divided by its largest singular value.

    That is found by power iteration from a fixed vector at every call, on the smaller
    [F, F], and nothing is kept between calls. As in Miyato et al., the singular vectors
    are constants of the gradient, which makes it exact.
    """

    features: int
    doublings: int = 5  # power iteration takes 2 to this many steps

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, C] to [B, F]."""
        shape = (self.features, x.shape[-1])
        glorot = nn.initializers.glorot_uniform(in_axis=-1, out_axis=-2)
        kernel = self.param("kernel", glorot, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        fixed = jax.lax.stop_gradient(kernel)
        power = fixed @ fixed.T
        for _ in range(self.doublings):
            power = power / jnp.trace(power)
            power = power @ power
        v = power.sum(0) @ fixed
        v = v / jnp.linalg.norm(v)
        u = fixed @ v
        norm = u @ kernel @ v / jnp.linalg.norm(u)
        return x @ (kernel / norm).T + bias[None]


class ResNet(nn.Module):
    """A 3x3 convolution, stages of basic blocks, and the mean over the image.

    A stage has twice the channels of the one before, and its first block strides by 2.
    """

    num_classes: int
    blocks: Sequence[int]  # of every stage
    norm: Norm
    channels: int = 64  # of the first stage
    lowering: Lowering = "auto"  # see `layers`
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    spectral: bool = False  # whether the last layer is a `SpectralDense`

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps images [B, H, W, C] to logits [B, num_classes]."""
        conv = partial(_CONV, lowering=self.lowering)
        norm, act = partial(_Norm, self.norm), self.activation
        x = act(norm()(conv(self.channels)(x), train))
        for stage, blocks in enumerate(self.blocks):
            features = self.channels * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                y = act(norm()(conv(features, stride=stride)(x), train))
                y = norm()(conv(features)(y), train)
                if x.shape != y.shape:
                    x = norm()(conv(features, (1, 1), stride=stride)(x), train)
                x = act(x + y)
        last = SpectralDense if self.spectral else Dense
        return last(self.num_classes)(x.mean((1, 2)))


class MobileNetV2(nn.Module):
    """Inverted residual blocks: widen, convolve every channel alone, narrow."""

    num_classes: int
    norm: Norm
    shrink: int = 1  # channels of the blocks and of the last layer are divided by it
    # Expansion, channels of the output, blocks, stride of the first (Sandler et al.,
    # Table 2, but that the second row strides by 1).
    rows: Sequence[tuple[int, int, int, int]] = (
        (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
        (6, 160, 3, 2), (6, 320, 1, 1),
    )  # fmt: skip
    lowering: Lowering = "auto"  # see `layers`

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps images [B, H, W, C] to logits [B, num_classes]."""
        conv = partial(_CONV, lowering=self.lowering)
        depthwise = partial(DepthwiseConv, lowering=self.lowering, kernel_init=_HE)
        norm = partial(_Norm, self.norm)
        x = nn.relu(norm()(conv(32)(x), train))
        for expansion, channels, blocks, stride in self.rows:
            for block in range(blocks):
                strided = stride > 1 and block == 0
                y = conv(expansion * x.shape[-1], (1, 1))(x)
                y = nn.relu(norm()(y, train))
                y = depthwise(stride=stride if strided else 1)(y)
                y = nn.relu(norm()(y, train))
                y = norm()(conv(channels // self.shrink, (1, 1))(y), train)
                if strided:
                    x = y
                    continue
                if x.shape != y.shape:
                    x = norm()(conv(y.shape[-1], (1, 1))(x), train)
                x = x + y
        x = nn.relu(norm()(conv(1280 // self.shrink, (1, 1))(x), train))
        return Dense(self.num_classes)(x.mean((1, 2)))


def resnet8(
    num_classes: int = 10,
    *,
    norm: Norm = "batch",
    image: Sequence[int] = (32, 32, 3),
    lowering: Lowering = "auto",
) -> Model:
    """The ResNet-8 of FedAUX (Sattler et al.): one block in each of four stages.

    4,903,242 parameters for 10 classes, 4,949,412 for 100.

    Args:
      num_classes: number of labels.
      norm: "batch", as published, or "group".
      image: height, width and channels of an example.
      lowering: as in `layers`.
    """
    return _images(ResNet(num_classes, (1, 1, 1, 1), norm, lowering=lowering), image)


def resnet10(
    num_classes: int = 10, *, channels: int = 64, lowering: Lowering = "auto"
) -> ResNet:
    """The ResNet-10 of Hahn, a network for `generative.as_classifier`.

    ResNet-8 of FedAUX by another count of layers, with Swish in the place of ReLU,
    group normalisation and a last layer of spectral norm 1: 4,903,242 parameters for
    colour images of 10 classes.

    Args:
      num_classes: number of labels.
      channels: of the first stage, fewer for a narrow one.
      lowering: as in `layers`.
    """
    check.positive_int(num_classes=num_classes, channels=channels)
    return ResNet(
        num_classes, (1, 1, 1, 1), "group", channels, lowering, nn.swish, True
    )


def resnet18(
    num_classes: int = 100,
    *,
    norm: Norm = "group",
    image: Sequence[int] = (32, 32, 3),
    lowering: Lowering = "auto",
) -> Model:
    """ResNet-18 for small images: 11,220,132 parameters, 11,173,962 for 10 classes.

    The blocks are those of He et al. behind a 3x3 convolution without pooling. (The
    code of Reddi et al. has blocks with the normalisation first, behind ImageNet's
    7x7 convolution of stride 2 and a pooling.)

    Args:
      num_classes: number of labels.
      norm: "group", as Hsieh et al. and Reddi et al. have it, or "batch".
      image: height, width and channels of an example: (24, 24, 3) for the crops of
        Reddi et al.
      lowering: as in `layers`.
    """
    return _images(ResNet(num_classes, (2, 2, 2, 2), norm, lowering=lowering), image)


def mobilenet_v2(
    num_classes: int = 10,
    *,
    norm: Norm = "batch",
    shrink: int = 1,
    image: Sequence[int] = (32, 32, 3),
    lowering: Lowering = "auto",
) -> Model:
    """MobileNetV2 for small images: 2,296,922 parameters for 10 classes.

    As FedAUX (Sattler et al.) has it, which takes it from a well-known port to
    CIFAR-10: it strides three times in all, has ReLU where Sandler et al. have ReLU6,
    and a convolution on shortcuts between different channels, where they have none.

    Args:
      num_classes: number of labels.
      norm: "batch", as published, or "group".
      shrink: divides all widths but the first; FedAUX uses 2.
      image: height, width and channels of an example.
      lowering: as in `layers`.
    """
    check.positive_int(shrink=shrink)
    return _images(MobileNetV2(num_classes, norm, shrink, lowering=lowering), image)


def _images(module: ResNet | MobileNetV2, image: Sequence[int]) -> Model:
    check.positive_int(num_classes=module.num_classes)
    check.one_of(("batch", "group"), norm=module.norm)
    return classifier(module, tuple(image))
