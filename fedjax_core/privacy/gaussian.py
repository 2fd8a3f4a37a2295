"""Noise on the aggregate: central differential privacy."""

import math

import jax
import jax.numpy as jnp

from fedjax_core import check
from fedjax_core.reduce import Cast, Reduction, total
from fedjax_core.types import PyTree


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
        if not math.isfinite(cast.norm_bound):
            raise ValueError(
                "gaussian_mean needs updates of bounded norm, got a bound of "
                f"{cast.norm_bound}; pass transform=clip(clip_norm) or put clip after "
                "transforms that keep a residual."
            )
        leaves, treedef = jax.tree.flatten(plain.finish(acc, cast))
        keys = jax.random.split(cast.key, len(leaves))
        std = noise_multiplier * cast.norm_bound
        noisy = [
            (x + std * jax.random.normal(k, x.shape, x.dtype)) / expected_cohort_size
            for x, k in zip(leaves, keys, strict=True)
        ]
        return treedef.unflatten(jax.tree.map(jnp.asarray, noisy))

    name = f"gaussian_mean({noise_multiplier}, {expected_cohort_size})"
    return plain._replace(finish=finish, name=name, noisy=True)
