r"""Classifiers as energies, Langevin chains on them, and mixtures of them.

A classifier f is an energy model :math:`p(x, y) \propto e^{-E(x, y)}`:

.. math::

  E(x, y) = -f(x)_y, \qquad E(x) = -\log \sum_y e^{f(x)_y}, \qquad
  \mathrm{softmax}(f(x))_y = e^{E(x) - E(x, y)} .

References:
  Grathwohl et al., "Your Classifier is Secretly an Energy Based Model and You Should
  Treat It Like One", ICLR 2020.
  Welling and Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML
  2011.
  Hahn, "Algorithms for Collaborative Machine Learning under Statistical Heterogeneity",
  UNIST 2024, chapter IV.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from fedjax_core.arrays import along_rows, wide
from fedjax_core.models.generative import Classifier
from fedjax_core.reduce import Reduction, monoid
from fedjax_core.types import (
    Batch,
    Checked,
    Key,
    LossFn,
    NonNegative,
    Params,
    PositiveInt,
)

Range: TypeAlias = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chains(Checked):
    r"""Hyper-parameters of energies, of clients' chains and of the server's.

    Attributes:
      chain_steps: of a client's chain in a local step.
      chain_step_size: :math:`\gamma` of it.
      chain_noise: :math:`\sigma` of it.
      rounds: T, of the schedule of :math:`\beta_t`; later ones are like the last.
      first_step: :math:`\beta_0` of the server's chain.
      last_step: :math:`\beta_{T-1}`.
      schedule: form of :math:`\beta_t`, see `step_sizes`.
      noise: :math:`\delta` of the server's chain.
      kind: energy of sample and label, "joint", or of the sample alone, "marginal".
      within: range that samples are clipped to, by clients and by the server.
      gradient_within: range of the entries of energies' gradients.
    """

    chain_steps: PositiveInt = 1
    chain_step_size: NonNegative = 1.0
    chain_noise: NonNegative = 0.01
    rounds: PositiveInt = 500
    first_step: NonNegative = 10.0
    last_step: NonNegative = 0.01
    schedule: Literal["ddpm", "half"] = "ddpm"
    noise: NonNegative = 0.01
    kind: Literal["joint", "marginal"] = "joint"
    within: Range | None = None
    gradient_within: Range | None = None

    def __post_init__(self):
        super().__post_init__()
        for name in ("within", "gradient_within"):
            bounds = getattr(self, name)
            if bounds is not None and not bounds[0] < bounds[1]:
                raise ValueError(f"{name} must be (low, high), got {bounds}.")


def energy(
    logits: jax.Array, y: jax.Array, kind: Literal["joint", "marginal"] = "joint"
) -> jax.Array:
    """Of logits ``[B, K]`` with labels ``[B]``, which the marginal one ignores."""
    if kind == "marginal":
        return -jax.nn.logsumexp(logits, axis=-1)
    return -jnp.take_along_axis(logits, y[:, None], axis=-1)[:, 0]


def langevin(
    gradient: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    key: Key,
    *,
    step_size: ArrayLike,
    noise: ArrayLike,
    num_steps: int = 1,
    within: Range | None = None,
) -> jax.Array:
    r"""A chain :math:`x \leftarrow x - \gamma \nabla E(x) + \sigma \epsilon`.

    Step and noise are constants of their own: the chain samples from
    :math:`e^{-E / T}` for :math:`\sigma^2 = 2 \gamma T` and small steps.

    Args:
      gradient: of the energy, of as many samples as it is given.
      x: ``[B, ...]``, where it starts.
      key: of the noise.
      step_size: :math:`\gamma`.
      noise: :math:`\sigma`; 0 is gradient descent.
      num_steps: steps.
      within: what x is clipped to after every step.
    """

    def step(t, x):
        draw = jax.random.normal(jax.random.fold_in(key, t), x.shape, x.dtype)
        move = jnp.asarray(noise, x.dtype) * draw
        move -= (jnp.asarray(step_size) * gradient(x)).astype(x.dtype)
        return clipped(x + move, within)

    return jax.lax.fori_loop(0, num_steps, step, x)


def clipped(x: jax.Array, within: Range | None) -> jax.Array:
    """`x` inside a range, or as it is."""
    return x if within is None else jnp.clip(x, *within)


class Says(NamedTuple):
    """What a client says of samples: the update that `mixture` reduces."""

    log_weight: jax.Array  # [M], -E or its sign
    gradient: jax.Array  # [M, ...], of E


def says(
    chains: Chains, classifier: Classifier, params: Params, x: jax.Array, y: jax.Array
) -> Says:
    """Minus the energies of samples ``[M, ...]`` with labels, and clipped gradients."""

    def total(x):
        of_each = energy(classifier.logits(params, x), y, chains.kind)
        return of_each.sum(), of_each

    gradient, of_each = jax.grad(total, has_aux=True)(x)
    return Says(-of_each, clipped(gradient, chains.gradient_within))


def contrast(
    kind: Literal["joint", "marginal"],
    classifier: Classifier,
    chain: jax.Array,
    replayed: jax.Array,
    y: jax.Array,
    replay: ArrayLike,
) -> LossFn:
    r"""Contrastive divergence and cross-entropy, by real example.

    .. math::

      E(x, y) - E(\check x, y') + H(f(x), y) + \lambda H(f(x'), y'),


    Args:
      kind: of the energy E.
      classifier: f.
      chain: :math:`\check x`, ``[B, ...]``, where a chain has brought samples.
      replayed: x', as many.
      y: their labels, ``[B]``.
      replay: :math:`\lambda`.
    """
    cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels

    def loss(params: Params, batch: Batch, key: Key) -> jax.Array:
        many = len(batch["x"])
        x = jnp.concatenate([batch["x"], chain, replayed])  # one pass, not three
        of_all = classifier.logits(params, x)
        of_real, of_chain, again = jnp.split(of_all, [many, many + len(chain)])
        real = energy(of_real, batch["y"], kind) + cross_entropy(of_real, batch["y"])
        made = energy(of_chain, y, kind).mean()
        return real - made + replay * cross_entropy(again, y).mean()

    return loss


class _Sum(NamedTuple):
    largest: jax.Array  # [M], what exponents are relative to
    weight: jax.Array  # [M]
    gradient: jax.Array  # [M, ...]


def mixture() -> Reduction:
    r"""The gradient of a mixture of energies, ``[M, ...]`` of updates that are `Says`.

    With :math:`w_i = n_i / n` and log-weights :math:`-E_i` it is that of
    :math:`-\log \sum_i w_i e^{-E_i}`, if all have the same normaliser:

    .. math::

      \frac{\sum_i w_i e^{-E_i} \nabla E_i}{\sum_j w_j e^{-E_j}} .

    A convex combination in any case, of at least float32, and 0 where no client counts.
    Clients are added as they come: two arrays of samples, however many clients.
    """

    def lift(update, arrival):
        gradient = wide(update.gradient)
        size = jnp.log(jnp.maximum(arrival.num_examples, 1).astype(gradient.dtype))
        one = size + update.log_weight.astype(gradient.dtype)
        return _Sum(one, jnp.ones_like(one), gradient)

    def combine(a, b):
        largest = jnp.maximum(a.largest, b.largest)
        # Of two that are nothing the exponents would be -inf - -inf.
        known = jnp.where(jnp.isfinite(largest), largest, 0)
        of_a, of_b = jnp.exp(a.largest - known), jnp.exp(b.largest - known)
        weight = of_a * a.weight + of_b * b.weight
        gradient = along_rows(of_a, a.gradient) * a.gradient
        gradient += along_rows(of_b, b.gradient) * b.gradient
        return _Sum(largest, weight, gradient)

    def identity(update):
        x = wide(jnp.zeros(update.gradient.shape, update.gradient.dtype))
        one = jnp.zeros(x.shape[:1], x.dtype)
        return _Sum(one - jnp.inf, one, x)

    def finish(total, cast):
        weight = jnp.where(total.weight > 0, total.weight, 1)
        return total.gradient / along_rows(weight, total.gradient)

    return monoid(lift, combine, identity, finish)._replace(name="mixture")


def step_sizes(
    first: float, last: float, rounds: int, form: Literal["ddpm", "half"]
) -> optax.Schedule:
    r"""Step sizes of the server's chain by round, from `first` to `last`, falling.

    "half" is half a cosine. "ddpm" reads "cosine schedule" as the noise schedule of
    diffusion models: :math:`\beta_t = \beta_0 + b_t (\beta_{T-1} - \beta_0)` with
    :math:`b_t = 1 - \bar\alpha_{t+1} / \bar\alpha_t`, which stays near `first` until
    the last 5 % of rounds.

    References:
      Nichol and Dhariwal, "Improved Denoising Diffusion Probabilistic Models", ICML
      2021, equation 17.
    """

    def kept(t):
        return jnp.square(jnp.cos((t / rounds + 0.008) / 1.008 * jnp.pi / 2))

    def schedule(round):
        t = jnp.clip(round, 0, rounds - 1)
        if form == "half":
            way = (1 - jnp.cos(jnp.pi * t / max(rounds - 1, 1))) / 2
        else:
            way = 1 - kept(t + 1) / kept(t)
        return first + way * (last - first)

    return schedule
