r"""Labelled examples that a server has made: learning from them, and their worth.

Made examples come class by class, the same number of each. What they are worth is said
by the accuracy of a classifier that has seen nothing else, by the Fréchet distance of
their features to those of real examples, and by what they give away: how well the
distance to the nearest one tells training examples from others.

References:
  Heusel et al., "GANs Trained by a Two Time-Scale Update Rule Converge to a Local Nash
  Equilibrium", NeurIPS 2017.
  Chen et al., "GAN-Leaks: A Taxonomy of Membership Inference Attacks against Generative
  Models", CCS 2020, section 5.2.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from fedjax_core import check, random, server
from fedjax_core.models.generative import Classifier as Classifier
from fedjax_core.models.generative import ConditionalGAN as ConditionalGAN
from fedjax_core.models.generative import ConditionalVAE as ConditionalVAE
from fedjax_core.types import (
    Algorithm,
    Batch,
    Checked,
    Cohort,
    Key,
    LocalWork,
    LossFn,
    Metrics,
    Params,
    Positive,
    PositiveInt,
    Work,
)

Samples = Callable[[Params], jax.Array]
"""``params -> x [M, ...]``, examples of a generator, class by class."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """Hyper-parameters that methods whose server makes examples have in common.

    Attributes:
      num_classes: K.
      work: local work per client and round.
      fit_lr: step size of Adam for the server's classifier.
      fit_work: epochs, or steps, of it over what was made.
    """

    num_classes: PositiveInt = 10
    work: LocalWork = LocalWork(batch_size=64)
    fit_lr: Positive = 1e-3
    fit_work: Work = LocalWork(batch_size=10, epochs=30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing(Config):
    """Hyper-parameters of methods whose server draws examples from a generator.

    Attributes:
      client_lr: step size of clients' Adam.
      per_class: examples of each class that are drawn.
    """

    client_lr: Positive = 1e-3
    per_class: PositiveInt = 10


def balanced_labels(num_samples: int, num_classes: int) -> jax.Array:
    """``[M]`` int32, each class as often, one after the other.

    Raises:
      ValueError: M is not a positive multiple of K.
    """
    if num_samples < 1 or num_samples % num_classes:
        raise ValueError(
            f"num_samples must be a positive multiple of num_classes={num_classes}, "
            f"got {num_samples}."
        )
    labels = jnp.arange(num_classes, dtype=jnp.int32)
    return jnp.repeat(labels, num_samples // num_classes)


def cross_entropy(classifier: Classifier) -> LossFn:
    """Its loss, by example."""

    def loss(params: Params, batch: Batch, key: Key) -> jax.Array:
        logits = classifier.logits(params, batch["x"])
        return optax.losses.softmax_cross_entropy_with_integer_labels(
            logits, batch["y"]
        )

    return loss


def learner(
    config: Config, classifier: Classifier
) -> Callable[[jax.Array, jax.Array], Params]:
    """``(x [M, ...], seed []) -> params`` of a classifier trained on x alone.

    Of one seed it starts from the same parameters whatever it is given, and sees
    examples in the same order: what differs between its results is what was made.
    """
    check.instance(Classifier, classifier=classifier)

    def learn(x: jax.Array, seed: jax.Array) -> Params:
        key = random.seed_key(seed)
        examples = {"x": x, "y": balanced_labels(len(x), config.num_classes)}
        return server.fit(
            cross_entropy(classifier),
            optax.adam(config.fit_lr),
            classifier.init(random.stream(key, "init")),
            examples,
            random.stream(key, "fit"),
            config.fit_work,
        )[0]

    return learn


def fit_seed(key: Key) -> jax.Array:
    """Seed of the server's classifier after a round with this key; ``[]`` uint32."""
    return jax.random.bits(random.stream(key, "learner"), dtype=jnp.uint32)


def drawn(
    config: Drawing,
    generate: Callable[[Params, jax.Array, jax.Array], jax.Array],
    latent: int,
) -> Samples:
    """The generator's examples, of the same noise each time.

    `generate` is ``(params, z [M, latent], y [M]) -> x``.
    """

    def draw(params: Params) -> jax.Array:
        size = config.num_classes * config.per_class
        key = random.stream(random.seed_key(0), "draw")
        z = jax.random.normal(key, (size, latent))
        return generate(params, z, balanced_labels(size, config.num_classes))

    return draw


class Averaged(NamedTuple):
    """What survives a round of `averaged`."""

    params: Params
    others: Any  # the rest of FedAvg's state
    seed: jax.Array  # [] uint32, of the server's classifier


def averaged(
    algorithm: Algorithm,
    name: str,
    config: Drawing,
    draw: Samples,
    classifier: Classifier,
) -> Algorithm:
    """FedAvg of a generator, whose examples alone the evaluated classifier has seen."""
    learn = learner(config, classifier)

    def split(state: Any, seed: jax.Array) -> Averaged:
        return Averaged(state.params, state._replace(params=()), seed)

    def init(params: Params, num_clients: int) -> Averaged:
        return split(algorithm.init(params, num_clients), jnp.uint32(0))

    def round(state: Averaged, cohort: Cohort, key: Key) -> tuple[Averaged, Metrics]:
        before = state.others._replace(params=state.params)
        after, metrics = algorithm.round(before, cohort, key)
        return split(after, fit_seed(key)), metrics

    return dataclasses.replace(
        algorithm,
        name=name,
        config=config,
        init=init,
        round=round,
        model=lambda state: learn(draw(state.params), state.seed),
    )


def frechet_distance(a: ArrayLike, b: ArrayLike) -> float:
    r"""Between normal distributions with the moments of features, ``[n, H]``.

    .. math::

      \|\mu_a - \mu_b\|^2 + \mathrm{Tr}\left(\Sigma_a + \Sigma_b
        - 2 (\Sigma_a^{1/2} \Sigma_b \Sigma_a^{1/2})^{1/2}\right)

    The root's trace is that of the roots of eigenvalues, which few examples of many
    features make 0, not negative. In float64, on the host; n is 2 at least in both.
    """
    first, second = (np.asarray(x, np.float64) for x in (a, b))
    for name, x in (("a", first), ("b", second)):
        if x.ndim != 2 or len(x) < 2 or x.shape[1] != first.shape[1]:
            raise ValueError(
                f"{name} must hold two or more rows of {first.shape[-1]} features, got "
                f"shape {x.shape}."
            )
    means = [x.mean(0) for x in (first, second)]
    one, other = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (first, second))
    values, vectors = np.linalg.eigh(one)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    both = np.linalg.eigvalsh(root @ other @ root)
    overlap = np.sqrt(np.maximum(both, 0)).sum()
    return float(
        np.sum((means[0] - means[1]) ** 2) + np.trace(one + other) - 2 * overlap
    )


def membership_auroc(made: ArrayLike, members: ArrayLike, others: ArrayLike) -> float:
    """How well the distance to the nearest made example tells members from others.

    The area under the ROC curve of minus that distance: 1/2 where it tells nothing. All
    are examples ``[n, ...]``: what the server gives away, what that was trained on, and
    what it was not.
    """
    from sklearn.metrics import pairwise_distances_argmin_min, roc_auc_score

    arrays = [np.asarray(x) for x in (made, members, others)]
    flat = [x.reshape(len(x), -1) for x in arrays]
    scores = [-pairwise_distances_argmin_min(x, flat[0])[1] for x in flat[1:]]
    labels = np.repeat([1, 0], [len(x) for x in scores])
    return float(roc_auc_score(labels, np.concatenate(scores)))
