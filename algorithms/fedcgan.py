r"""FedCGAN: FedAvg of a conditional GAN, generator and discriminator alike.

The discriminator says whether an example is real, and of which class it is (AC-GAN).
With its logits s and c, an example (x, y), and one made of noise and a random class,
(x', y'), clients let it minimise

.. math::

  \log(1 + e^{-s(x)}) + \log(1 + e^{s(x')}) + H(c(x), y) + H(c(x'), y')

and the generator :math:`\log(1 + e^{-s(x')}) + H(c(x'), y')`, both in the same step.
The server draws the same number of examples of each class from the mean generator.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, section 4.3.
  Odena et al., "Conditional Image Synthesis with Auxiliary Classifier GANs", ICML 2017.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, generated
from fedjax_core.algorithms import fedavg
from fedjax_core.generated import Classifier, ConditionalGAN
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, Fraction, LossFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(generated.Drawing):
    """Hyper-parameters of FedCGAN, with those of `fedjax_core.generated.Drawing`.

    Attributes:
      beta1: of clients' Adam, 0.5 in DCGAN.
    """

    beta1: Fraction = 0.5


def gan_loss(networks: ConditionalGAN, num_classes: int) -> LossFn:
    """The sum of both losses by example, each a constant of the other's parameters.

    So one step on it is a step of both networks on their own loss.
    """
    classify = optax.losses.softmax_cross_entropy_with_integer_labels

    def loss(params, batch, key):
        x, y = batch["x"], batch["y"]
        of_z, of_y = jax.random.split(key)
        z = jax.random.normal(of_z, (len(x), networks.latent), x.dtype)
        wanted = jax.random.randint(of_y, y.shape, 0, num_classes)
        made = networks.generate(params, z, wanted)
        fixed = jax.lax.stop_gradient(made)
        source, kind = networks.judge(params, jnp.concatenate([x, fixed]))
        (real, seen), (real_kind, seen_kind) = jnp.split(source, 2), jnp.split(kind, 2)
        fooled, fooled_kind = networks.judge(jax.lax.stop_gradient(params), made)
        told = jax.nn.softplus(-real) + jax.nn.softplus(seen)
        told += classify(real_kind, y) + classify(seen_kind, wanted)
        return told + jax.nn.softplus(-fooled) + classify(fooled_kind, wanted)

    return loss


def make(config: Config, networks: ConditionalGAN, classifier: Classifier) -> Algorithm:
    """Builds FedCGAN; initial params are ``networks.init(key)``.

    What is evaluated is a classifier trained on what the generator draws, alone.

    Args:
      config: hyper-parameters.
      networks: generator and discriminator.
      classifier: of the server.
    """
    check.instance(ConditionalGAN, networks=networks)
    check_parts(Config, config, networks.generate)
    algorithm = fedavg.make(
        fedavg.Config(work=config.work),
        gan_loss(networks, config.num_classes),
        client_optimizer=optax.adam(config.client_lr, b1=config.beta1),
    )
    draw = generated.drawn(config, networks.generate, networks.latent)
    return generated.averaged(algorithm, "fedcgan", config, draw, classifier)
