r"""How certain a client is about public examples, released with differential privacy.

A client with features :math:`D_i` is set against features :math:`D^-` that everybody
knows, by logistic regression without intercept:

.. math::

  J(w) = \frac1N \Bigl( \sum_{h \in D_i} \log(1 + e^{-w^\top h})
  + \sum_{h \in D^-} \log(1 + e^{w^\top h}) \Bigr) + \frac\lambda2 \lVert w \rVert^2,
  \qquad N = |D_i| + |D^-|, \quad \lVert h \rVert \le 1 .

Replacing one example of :math:`D_i` moves the minimum by at most
:math:`2 / (\lambda N)`, so that normal noise on it hides any one of them. Scores
:math:`s(h) = 1 / (1 + e^{-w^\top h}) + 10^{-8}` of public examples look at the data no
more, however many there are.

The bound on norms must not depend on private data. Sattler et al. divide by the largest
norm of a client's own features: an example with a large norm then moves all others, and
the theorem does not hold. That normaliser is "own_max" here, without noise alone.

References:
  Sattler, "Concepts for Efficient, Adaptive and Robust Deep Learning from Distributed
  Data", TU Berlin, 2021, chapter 7, equations 7.5 to 7.13 (whose l(z) has its labels
  the wrong way round), theorem 4; Sattler et al., "FedAUX", TNNLS 2021.
  Chaudhuri, Monteleoni and Sarwate, "Differentially Private Empirical Risk
  Minimization", JMLR 2011, on output perturbation.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import norms
from fedjax_core.privacy.calibration import gaussian_sigma, gaussian_sigma_classical
from fedjax_core.privacy.concentrated import minimiser_sensitivity
from fedjax_core.privacy.mechanisms import add_gaussian
from fedjax_core.scorers import check_features
from fedjax_core.types import Checked, Key, Positive, Share

GRADIENT_NORM = 1e-9  # at which the minimum counts as found
_MOST_STEPS = 1000
_XI = 1e-8  # keeps scores above 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertaintyConfig(Checked):
    r"""How certainties are found and what they may give away.

    Attributes:
      regularisation: :math:`\lambda > 0`.
      epsilon: of the (epsilon, delta)-DP of what each client releases, under the
        exchange of one of its examples; None releases the minimum itself.
      delta: in (0, 1).
      mechanism: "exact" adds the least noise that is enough, "classical" that of the
        textbook and of the paper, for epsilon < 1.
      normaliser: what features are divided by. "public" is a quantile of the norms of
        public features, to which longer ones are clipped; "own_max" the largest norm
        among the client's own and the negatives, as published, which is not private.
      quantile: in [0, 1], of "public"; 1 is the largest norm.
    """

    regularisation: Positive = 0.1
    epsilon: float | None = 0.1
    delta: float = 1e-5
    mechanism: Literal["exact", "classical"] = "exact"
    normaliser: Literal["public", "own_max"] = "public"
    quantile: Share = 0.5

    def __post_init__(self):
        super().__post_init__()
        check.open_interval(0, 1, delta=self.delta)
        if self.epsilon is None:
            return
        sigma(self, 1)  # raises where epsilon is out of range
        if self.normaliser == "own_max":
            raise ValueError(
                f"normaliser must be 'public' for a release with epsilon="
                f"{self.epsilon}, got 'own_max': there one example moves all others, "
                f"and no noise is known to be enough; use epsilon=None without privacy."
            )


class Certainty(NamedTuple):
    """What clients release, and what follows from it.

    Attributes:
      scores: ``[N, n]`` float32 in (0, 1], of public examples by client.
      weights: ``[N, H]`` float64, w with its noise.
      sigma: ``[N]`` standard deviation of that noise, 0 without.
    """

    scores: np.ndarray
    weights: np.ndarray
    sigma: np.ndarray


def sensitivity(
    regularisation: float, num_examples: float, gradient_norm: float = 0.0
) -> float:
    r"""Most that w moves, :math:`2 / (\lambda N)`, if one example is exchanged.

    Sattler, theorem 4, of :math:`\lambda > 0` and N >= 1 examples, the client's and the
    negatives together. Where the solver stops at a gradient of norm g >= 0, whatever
    the data, strong convexity leaves w within :math:`g / \lambda` of the minimum, which
    adds twice that.
    """
    check.positive(regularisation=regularisation)
    check.in_range(1, float("inf"), num_examples=num_examples)
    check.non_negative(gradient_norm=gradient_norm)
    exact = minimiser_sensitivity(1.0, num_examples, regularisation)
    return exact + 2 * gradient_norm / regularisation


def sigma(config: CertaintyConfig, num_examples: int) -> float:
    """Standard deviation of the noise on every entry of w, 0 where there is none."""
    if config.epsilon is None:
        return 0.0
    most = sensitivity(config.regularisation, num_examples, GRADIENT_NORM)
    exact = config.mechanism == "exact"
    calibrated = gaussian_sigma if exact else gaussian_sigma_classical
    return calibrated(config.epsilon, config.delta, most)


def minimise(
    own: ArrayLike, sizes: ArrayLike, negatives: ArrayLike, regularisation: ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """The minimum of J of every client, by L-BFGS in float64.

    Args:
      own: ``[N, m, H]`` features of the clients; rows of zeros, which have no gradient,
        pad the smaller ones.
      sizes: ``[N]`` how many there are of each.
      negatives: ``[n, H]``, the same for all.
      regularisation: of J, for all or ``[N]``.

    Returns:
      w, ``[N, H]`` float64, and the norms of the gradients there, ``[N]``.
    """
    with jax.enable_x64(True):
        own, sizes, negatives, regularisation = (
            jnp.asarray(x, jnp.float64) for x in (own, sizes, negatives, regularisation)
        )
        regularisation = jnp.broadcast_to(regularisation, sizes.shape)
        return jax.device_get(_minimise(own, sizes, negatives, regularisation))


@jax.jit
def _minimise(own, sizes, negatives, regularisation):
    optimizer = optax.lbfgs()

    def one(own, size, regularisation):
        def objective(w):
            losses = jax.nn.softplus(-own @ w).sum()
            losses = losses + jax.nn.softplus(negatives @ w).sum()
            return losses / (size + len(negatives)) + regularisation / 2 * w @ w

        value_and_grad = optax.value_and_grad_from_state(objective)

        def step(carry):
            w, state, _, t = carry
            value, gradient = value_and_grad(w, state=state)
            update, state = optimizer.update(
                gradient, state, w, value=value, grad=gradient, value_fn=objective
            )
            w = optax.apply_updates(w, update)
            return w, state, norms(optax.tree.get(state, "grad")), t + 1

        def going(carry):
            return (carry[2] > GRADIENT_NORM) & (carry[3] < _MOST_STEPS)

        start = jnp.zeros(negatives.shape[1:], negatives.dtype)
        carry = start, optimizer.init(start), jnp.inf, 0
        w, _, norm, _ = jax.lax.while_loop(going, step, carry)
        return w, norm

    return jax.vmap(one)(own, sizes, regularisation)


def certainty(
    config: CertaintyConfig,
    key: Key,
    own: ArrayLike,
    mask: ArrayLike,
    negatives: ArrayLike,
    queries: ArrayLike,
) -> Certainty:
    """Releases w of every client and scores public examples with it.

    Args:
      config: of the release.
      key: of the noise; a client's is that of its place.
      own: ``[N, m, H]`` features of the clients' examples.
      mask: ``[N, m]`` bool, which there are.
      negatives: ``[n, H]`` public features.
      queries: ``[q, H]`` public features to score.

    Raises:
      ValueError: shapes that do not fit, features that are not finite, no negatives.
      ArithmeticError: a minimum that is not found.
    """
    own, mask, negatives, queries = check_features(own, mask, negatives, queries)
    sizes = mask.sum(1)
    scale = jnp.ones(len(sizes))
    with jax.enable_x64(True):
        own = jnp.where(mask[..., None], jnp.asarray(own, jnp.float64), 0)
        negatives, queries = (jnp.asarray(x, jnp.float64) for x in (negatives, queries))
        if config.normaliser == "own_max":
            scale = jnp.maximum(norms(own).max(1, initial=0), norms(negatives).max())
            scale = jnp.where(scale > 0, scale, 1)
        else:
            public = norms(jnp.concatenate([negatives, queries]))
            bound = jnp.quantile(public, config.quantile)

            def within(h: jax.Array) -> jax.Array:  # norms of at most 1
                unit = jnp.maximum(norms(h), bound)[..., None]
                return h / jnp.where(unit > 0, unit, 1)

            own, negatives, queries = map(within, (own, negatives, queries))
        # Regularised by c, w of h / g is g times w of h regularised by c g^2.
        regularisation = config.regularisation * scale**2
        weights, gradient = minimise(own, sizes, negatives, regularisation)
        if not (gradient <= GRADIENT_NORM).all():
            raise ArithmeticError(
                f"the gradient must come down to {GRADIENT_NORM} for every client, got "
                f"{gradient.max()}."
            )
        weights = scale[:, None] * weights
        noise = np.array([sigma(config, int(n) + len(negatives)) for n in sizes])
        if config.epsilon is not None:
            fold_in = jax.vmap(jax.random.fold_in, (None, 0))
            keys = fold_in(key, jnp.arange(len(sizes)))
            weights = jax.vmap(add_gaussian)(keys, weights, jnp.asarray(noise))
        scores = jax.nn.sigmoid(weights / scale[:, None] @ queries.T) + _XI
    return Certainty(np.asarray(scores, np.float32), np.asarray(weights), noise)
