"""The model zoo: the networks of federated-learning benchmarks.

Every constructor returns a `Model` for softmax cross-entropy. Unless it says otherwise
kernels start from Glorot's uniform distribution, biases from 0, embeddings and
recurrent layers like those of the Keras code most of these benchmarks were published
with. Residual networks are in `residual`, the transformer is in `transformer`.

References:
  McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
  Data", AISTATS 2017.
  Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
  Sattler et al., "Robust and Communication-Efficient Federated Learning from Non-IID
  Data", TNNLS 2020.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.models.adapters import classifier, language_model
from fedjax_core.models.layers import Conv, Dense, Lowering, Padding, max_pool
from fedjax_core.models.model import Ids, Model
from fedjax_core.models.recurrent import LSTM

_GLOROT = nn.initializers.glorot_uniform()


def _small(key: jax.Array, shape: Sequence[int], dtype: jnp.dtype) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -0.05, 0.05)


class MLP(nn.Module):
    """Dense layers with ReLU between them; with no hidden layer it is linear."""

    num_classes: int
    hidden: Sequence[int] = ()  # widths

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, num_features] to logits [B, num_classes]."""
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, kernel_init=_GLOROT)(x))
        return Dense(self.num_classes)(x)


class CNN(nn.Module):
    """Convolutions with pooling, then dense layers, all followed by a ReLU."""

    num_classes: int
    blocks: Sequence[Sequence[int]] = ((32, 64),)  # channels up to every 2x2 pooling
    hidden: Sequence[int] = (128,)  # widths of dense layers
    kernel_size: tuple[int, int] = (3, 3)
    padding: Padding = "VALID"
    kernel_init: nn.initializers.Initializer = _GLOROT  # of the convolutions
    lowering: Lowering = "auto"  # see `layers`

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images [B, H, W, C] to logits [B, num_classes]."""
        for block in self.blocks:
            for i, channels in enumerate(block, start=1):
                x = Conv(
                    channels,
                    self.kernel_size,
                    padding=self.padding,
                    lowering=self.lowering,
                    kernel_init=self.kernel_init,
                )(x)
                # ReLU is monotone, so pooling first gives the same on a quarter of the
                # values.
                x = max_pool(x, lowering=self.lowering) if i == len(block) else x
                x = nn.relu(x)
        x = x.reshape(x.shape[0], -1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, kernel_init=_GLOROT)(x))
        return Dense(self.num_classes)(x)


class CharLSTM(nn.Module):
    """An embedding, recurrent layers and a dense layer, for the next token."""

    num_ids: int  # tokens, and logits
    embedding: int = 8  # width
    hidden: Sequence[int] = (256, 256)  # widths of the LSTM layers
    every_position: bool = True  # predict after every token, or after the last alone

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps [B, T] to logits, [B, T, num_ids] or [B, num_ids]."""
        shape = (self.num_ids, self.embedding)
        table = self.param("embedding", _small, shape, jnp.float32)
        x = table[ids.T]  # time first: what recurrent layers walk along
        for width in self.hidden:
            x = LSTM(width)(x)
        dense = Dense(self.num_ids)
        if not self.every_position:
            return dense(x[-1])
        logits = dense(x.reshape(-1, x.shape[-1]))
        return logits.reshape(*ids.T.shape, self.num_ids).transpose(1, 0, 2)


def logistic_regression(num_features: int, num_classes: int) -> Model:
    """Multinomial logistic regression: (num_features + 1) * num_classes parameters."""
    return mlp(num_features, num_classes, hidden=())


def mlp(
    num_features: int, num_classes: int, hidden: Sequence[int] = (200, 200)
) -> Model:
    """A multilayer perceptron; by default the 2NN of McMahan et al. (2017), Section 3.

    The 2NN ("TwoNN") on MNIST, 784 features and 10 classes, has 199,210 parameters.

    Args:
      num_features: `x` is [B, num_features].
      num_classes: number of labels.
      hidden: widths of the hidden layers, all followed by a ReLU.
    """
    _check_sizes(hidden, num_classes=num_classes)
    return classifier(MLP(num_classes, tuple(hidden)), (num_features,))


def emnist_cnn(num_classes: int = 62, *, lowering: Lowering = "auto") -> Model:
    """The CNN for EMNIST of Reddi et al. (2021), without its dropout.

    1,206,590 parameters for images [B, 28, 28, 1] of 62 classes (10 for digits alone).
    `lowering` is as in `layers`.
    """
    check.positive_int(num_classes=num_classes)
    return classifier(CNN(num_classes, lowering=lowering), (28, 28, 1))


def cifar_cnn(num_classes: int = 10, *, lowering: Lowering = "auto") -> Model:
    """The `simple_cnn` of pfl-research's CIFAR-10 benchmark: 1,626,442 parameters.

    Without its dropout (0.25 after the pooling, 0.5 before the last layer), of images
    [B, 32, 32, 3]. `lowering` is as in `layers`.

    References:
      Granqvist et al., "pfl-research: simulation framework for accelerating research
      in Private Federated Learning", NeurIPS 2024, benchmarks/model/tf2/cnn.py.
    """
    check.positive_int(num_classes=num_classes)
    return classifier(CNN(num_classes, lowering=lowering), (32, 32, 3))


def two_cnn(
    num_classes: int = 10,
    image: Sequence[int] = (28, 28, 1),
    *,
    lowering: Lowering = "auto",
) -> Model:
    """The CNN of McMahan et al. (2017), Section 3, "TwoCNN" in later papers.

    Two 5x5 convolutions (32 and 64 channels) with padding and pooling, a hidden layer
    of 512: 1,663,370 parameters on MNIST, 2,156,490 on CIFAR-10.

    Args:
      num_classes: number of labels.
      image: height, width and channels of an example.
      lowering: as in `layers`.
    """
    check.positive_int(num_classes=num_classes)
    module = CNN(num_classes, ((32,), (64,)), (512,), (5, 5), "SAME", lowering=lowering)
    return classifier(module, tuple(image))


def kws_cnn(num_classes: int = 10, *, lowering: Lowering = "auto") -> Model:
    """Sattler et al.'s CNN for keyword spotting (2020): 876,938 parameters.

    `two_cnn` without padding, for mel spectrograms [B, 32, 32, 1] of a second of
    speech. `lowering` is as in `layers`.
    """
    check.positive_int(num_classes=num_classes)
    module = CNN(num_classes, ((32,), (64,)), (512,), (5, 5), lowering=lowering)
    return classifier(module, (32, 32, 1))


def vgg11_small(num_classes: int = 10, *, lowering: Lowering = "auto") -> Model:
    """VGG11*, the reduced VGG11 of Sattler et al. (2020): 865,482 parameters.

    For images [B, 32, 32, 3]; it has no batch normalisation, which suffers from the
    small batches of clients that see few classes, and no dropout. As in the authors'
    code kernels of convolutions start from He's normal distribution by their outputs
    (by their inputs activations would grow with every pooling). `lowering` is as in
    `layers`.
    """
    check.positive_int(num_classes=num_classes)
    blocks = ((32,), (64,), (128, 128), (128, 128), (128, 128))
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    module = CNN(
        num_classes, blocks, (128, 128), (3, 3), "SAME", init, lowering=lowering
    )
    return classifier(module, (32, 32, 3))


def char_lstm(
    num_ids: int = 90,
    length: int = 80,
    embedding: int = 8,
    hidden: Sequence[int] = (256, 256),
    *,
    every_position: bool = True,
) -> Model:
    """The character LSTM for Shakespeare: 820,522 parameters.

    Embedding 720, LSTM layers 271,360 and 525,312, dense layer 23,130. PyTorch's LSTM
    has a second bias in each layer, which makes it 822,570. The architecture is that of
    McMahan et al. (2017), Section 3, and Reddi et al. (2021).

    Args:
      num_ids: ids are 0 to num_ids - 1: 90 for those of `datasets.characters`, 81 for
        those of `datasets.leaf`.
      length: ids of an example, `x` [B, length], int32.
      embedding: width of the embedding.
      hidden: widths of the LSTM layers.
      every_position: True: `y` [B, length] holds the id after each of `x`, 0 is
        padding and not scored; see `language_model`. False: `y` [B] is the one id
        that follows `x`, the task of LEAF (Caldas et al., arXiv:1812.01097).
    """
    _check_sizes(hidden, num_ids=num_ids, length=length, embedding=embedding)
    module = CharLSTM(num_ids, embedding, tuple(hidden), every_position)
    if every_position:
        model = language_model(module, length)
    else:
        model = classifier(module, (length,), jnp.int32)
    return model._replace(ids={"x": Ids(num_ids), **model.ids})


def _check_sizes(hidden: Sequence[int], **sizes: int) -> None:
    check.positive_int(**sizes)
    for width in hidden:
        check.positive_int(hidden=width)
