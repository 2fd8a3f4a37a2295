"""Noise on the aggregate, or on what every client sends."""

import math
from typing import Literal, get_args

import jax

from fedjax_core import check
from fedjax_core.arrays import is_known
from fedjax_core.privacy.mechanisms import add_gaussian, add_laplace, noise_by_leaf
from fedjax_core.reduce import Cast, Reduction, total
from fedjax_core.transform import Message, Transform, stateless
from fedjax_core.types import Key, PyTree

Law = Literal["normal", "laplace"]


def add_noise(key: Key, tree: PyTree, sigma: jax.Array | float, law: Law) -> PyTree:
    """Adds noise of mean 0 and standard deviation sigma >= 0 to every entry."""
    if is_known(sigma) and sigma == 0:
        return tree
    if law == "normal":
        return add_gaussian(key, tree, sigma)
    # exp(-|x|/b) has the standard deviation sqrt(2) b.
    return add_laplace(key, tree, sigma / 2**0.5)


def noisy(sigma: jax.Array | float, law: Law = "normal") -> Transform:
    """Every client adds noise of its own, of standard deviation sigma >= 0.

    Updates are of float32 or float64.
    """
    check.non_negative(sigma=sigma)
    check.one_of(get_args(Law), law=law)

    def apply(message: Message, key: Key) -> Message:
        return message._replace(update=add_noise(key, message.update, sigma, law))

    return stateless(apply, name=f"noisy({sigma}, {law})")


def gaussian_mean(noise_multiplier: float, expected_cohort_size: float) -> Reduction:
    r"""The mean with Gaussian noise on the sum (DP-FedAvg).

    .. math::

      \frac1m \Bigl(\sum_i u_i + z C\, \mathcal{N}(0, I)\Bigr)

    C is the bound that the clients' program declares for one update, set by
    `transform.clip`. Clients count equally, as the bound on the sum requires, and the
    noise is drawn in float32 once per round, also when no client took part or, under
    `Poisson` participation, none that did has an example. m is a
    constant, since the number of clients that took part is itself private under Poisson
    participation; pass ``participation.expected_cohort_size(num_clients)``. What a run
    spends is `privacy.epsilon` of the same participation and noise multiplier.

    Args:
      noise_multiplier: z, standard deviation of the noise on the sum over C, >= 0.
      expected_cohort_size: m > 0.

    Raises:
      ValueError: an argument is out of range or, when a round is traced, nothing bounds
        the norm of an update.

    References:
      McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR
      2018, Algorithm 1.
    """
    check.non_negative(noise_multiplier=noise_multiplier)
    check.positive(expected_cohort_size=expected_cohort_size)
    plain = total("uniform")

    def finish(acc: PyTree, cast: Cast) -> PyTree:
        if is_known(cast.norm_bound) and not math.isfinite(cast.norm_bound):
            raise ValueError(
                "gaussian_mean needs updates of bounded norm, got a bound of "
                f"{cast.norm_bound}; pass transform=clip(clip_norm) or put clip after "
                "transforms that keep a residual."
            )
        std, exact = noise_multiplier * cast.norm_bound, plain.finish(acc, cast)
        noisy_sum = noise_by_leaf(cast.key, exact, std, jax.random.normal)
        return jax.tree.map(lambda x: x / expected_cohort_size, noisy_sum)

    return plain._replace(
        finish=finish,
        name=f"gaussian_mean({noise_multiplier}, {expected_cohort_size})",
        noisy=True,
        expected_cohort_size=expected_cohort_size,
    )
