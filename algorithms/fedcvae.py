r"""FedCVAE: FedAvg of a conditional variational auto-encoder.

Clients minimise, by example and with :math:`\mu, \sigma` from the encoder,

.. math::

  \|x - \hat x(z, y)\|^2 + \mathrm{KL}(\mathcal N(\mu, \sigma^2) \| \mathcal N(0, I)),
  \qquad z = \mu + \sigma \epsilon,

and the server draws the same number of examples of each class from the decoder.

References:
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, section 4.3, of the conditional VAE of Sohn et al., NeurIPS 2015.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_core import check, generated
from fedjax_core.algorithms import fedavg
from fedjax_core.generated import Classifier, ConditionalVAE
from fedjax_core.parts import check_parts
from fedjax_core.types import Algorithm, LossFn, NonNegative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(generated.Drawing):
    """Hyper-parameters of FedCVAE, with those of `fedjax_core.generated.Drawing`.

    Attributes:
      kl: weight of the divergence.
    """

    kl: NonNegative = 1.0


def vae_loss(networks: ConditionalVAE, kl: float = 1.0) -> LossFn:
    """The loss by example, of squared errors added up over pixels."""

    def loss(params, batch, key):
        x, y = batch["x"], batch["y"]
        mean, log_var = networks.encode(params, x, y)
        draw = jax.random.normal(key, mean.shape, mean.dtype)
        made = networks.decode(params, mean + jnp.exp(log_var / 2) * draw, y)
        error = jnp.square(x - made).reshape(len(x), -1).sum(1)
        divergence = jnp.square(mean) + jnp.exp(log_var) - log_var - 1
        return error + kl * divergence.sum(1) / 2

    return loss


def make(config: Config, networks: ConditionalVAE, classifier: Classifier) -> Algorithm:
    """Builds FedCVAE; initial params are ``networks.init(key)``.

    What is evaluated is a classifier trained on what the decoder draws, alone.

    Args:
      config: hyper-parameters.
      networks: encoder and decoder.
      classifier: of the server.
    """
    check.instance(ConditionalVAE, networks=networks)
    check_parts(Config, config, networks.decode)
    algorithm = fedavg.make(
        fedavg.Config(work=config.work),
        vae_loss(networks, config.kl),
        client_optimizer=optax.adam(config.client_lr),
    )
    draw = generated.drawn(config, networks.decode, networks.latent)
    return generated.averaged(algorithm, "fedcvae", config, draw, classifier)
