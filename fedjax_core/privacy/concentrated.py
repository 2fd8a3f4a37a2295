r"""Zero-concentrated differential privacy: budgets that change from message to message.

A mechanism is :math:`\varphi`-zCDP if the Rényi divergences of its outputs on
neighbours are :math:`D_a \le \varphi a` for all orders a > 1. Budgets of messages add
up, also of adaptive ones. Normal noise of standard deviation :math:`\sigma` on a
sensitivity :math:`\Delta` has exactly :math:`\varphi = \Delta^2 / (2 \sigma^2)`.

`DynamicBudget` and `SplitBudget` say what noise a message needs and what it spends;
`spend` adds it up where a message was sent. Arguments and attributes out of the ranges
given raise ValueError.

References:
  Gauthier, "On Enabling Scalable, Personalized, and Private Federated Learning", NTNU
  2024:92, Sections 2.3 and 3.3; Bun and Steinke, "Concentrated Differential Privacy",
  TCC 2016.
"""

import dataclasses
import functools
import math
import sys
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import is_known
from fedjax_core.privacy.calibration import gaussian_sigma_classical
from fedjax_core.types import Checked, Positive, PositiveInt

Schedule = Literal["budget", "variance"]


def gaussian_budget(sigma: ArrayLike, sensitivity: ArrayLike = 1.0) -> jax.Array:
    """What a message with normal noise spends, sensitivity^2 / (2 sigma^2).

    sigma > 0 is of the noise on every entry, the sensitivity, >= 0, Euclidean.
    """
    _check_each(sigma=sigma)
    check.each_non_negative("message", sensitivity=sensitivity)
    return (jnp.asarray(sensitivity) / jnp.asarray(sigma)) ** 2 / 2


def budget_epsilon(budget: float, delta: float) -> float:
    r"""Epsilon such that a budget >= 0 implies (epsilon, delta)-DP, delta in (0, 1).

    :math:`\varphi + 2 \sqrt{\varphi \ln(1 / \delta)}`; Gauthier, the corollary of
    Theorem I. It is one bound for all mechanisms: for messages with normal noise alone
    `privacy.gaussian_delta` of all together is exact.
    """
    check.non_negative(budget=budget)
    check.open_interval(0, 1, delta=delta)
    return budget + 2 * math.sqrt(budget * math.log(1 / delta))


def minimiser_sensitivity(
    gradient_bound: Any, num_examples: Any, curvature: Any
) -> Any:
    r"""Most that one example moves a minimiser: :math:`2 C / (N \mu)`.

    Of an objective with a mean over N examples that is :math:`\mu`-strongly convex;
    neighbours differ in one example, whose gradients are at most C in the Euclidean
    norm. With the curvature of the linearised step, 2 rho deg + 1 / eta, it is
    Gauthier's Lemma I; with 2 rho deg that of exact ADMM; with 1 / eta that of a step
    of gradient descent. All are > 0, each a float or, one entry per node, ``[n]``.
    """
    _check_each(
        gradient_bound=gradient_bound, curvature=curvature, num_examples=num_examples
    )
    return 2 * gradient_bound / (num_examples * curvature)


def spend(spent: jax.Array, budget: ArrayLike, sent: ArrayLike) -> jax.Array:
    """Adds the budget of a message for those who sent one.

    Args:
      spent: ``[n]``, before.
      budget: ``[n]`` or one number.
      sent: ``[n]`` bool. Who says nothing gives nothing away.
    """
    return spent + jnp.where(sent, jnp.asarray(budget, spent.dtype), 0)


@dataclasses.dataclass(frozen=True)
class DynamicBudget(Checked):
    r"""Budgets that grow from message to message, as noise may fall near the end.

    With "budget", message n = 1, 2, ... spends :math:`\varphi_1 \zeta^{-(n - 1)}`. With
    "variance" the variance of the noise is :math:`\zeta^{n - 1}` times the first one's.
    They are one where the sensitivity stays; where it falls, "variance" spends less.

    Attributes:
      first: phi_1 > 0, what the first message spends.
      decay: zeta in (0, 1]; 1 spends the same on every message.
      schedule: which of the two is geometric.
    """

    first: Positive
    decay: Annotated[Positive, functools.partial(check.in_range, 0, 1)] = 1.0
    schedule: Schedule = "budget"

    def message(
        self, t: ArrayLike, sensitivity: ArrayLike, first_sensitivity: ArrayLike
    ) -> tuple[jax.Array, jax.Array]:
        """Standard deviation of the noise of message t = 0, 1, ... and what it spends.

        Both are like this message's sensitivity; `first_sensitivity` is message 0's.
        """
        sensitivity = jnp.asarray(sensitivity)
        # Of the budget: what it grows by alone may be out of range.
        log = math.log(self.first) - math.log(self.decay) * jnp.asarray(t)
        if self.schedule == "variance":
            log += 2 * jnp.log(sensitivity / jnp.asarray(first_sensitivity))
        budget = jnp.broadcast_to(jnp.exp(log), sensitivity.shape)
        return sensitivity * jnp.exp(-log / 2) / 2**0.5, budget

    def total(self, messages: int) -> float:
        r"""What `messages` >= 1 spend at a sensitivity that stays.

        :math:`\varphi_1 (1 - \zeta^T) / (\zeta^{T - 1} - \zeta^T)`, with "budget" at
        any sensitivity; Gauthier, the corollary of Theorem I. Raises ValueError where
        it is out of range.
        """
        check.positive_int(messages=messages)
        growth = -math.log(self.decay)
        units: float = messages  # of the last message, which is the largest
        if growth:
            units = math.expm1(-messages * growth) / math.expm1(-growth)
        log = math.log(self.first) + (messages - 1) * growth + math.log(units)
        if log >= math.log(sys.float_info.max):
            raise ValueError(
                f"messages must be so few that their budgets have a finite sum, got "
                f"{messages} with first={self.first} and decay={self.decay}: "
                f"exp({log:.4g})."
            )
        return math.exp(log)


@dataclasses.dataclass(frozen=True)
class SplitBudget(Checked):
    """An (epsilon, delta) in equal parts for a number of messages: the naive way.

    Every message is (epsilon / T, delta / T)-DP by the classical formula, at any
    epsilon, as the text does; it is proved only where epsilon / T < 1, and more noise
    than necessary there.

    Attributes:
      epsilon: of all messages together, > 0.
      delta: in (0, 1).
      messages: T >= 1; a run of more rounds is refused.
    """

    epsilon: Positive
    delta: Annotated[float, functools.partial(check.open_interval, 0, 1)]
    messages: PositiveInt

    @classmethod
    def matching(cls, budget: DynamicBudget, delta: float, messages: int) -> Self:
        """The same total (epsilon, delta) as `budget` has after `messages`."""
        return cls(budget_epsilon(budget.total(messages), delta), delta, messages)

    def message(
        self, t: ArrayLike, sensitivity: ArrayLike, first_sensitivity: ArrayLike
    ) -> tuple[jax.Array, jax.Array]:
        """As for `DynamicBudget`: every message has the same noise."""
        del t, first_sensitivity
        each = self.epsilon / self.messages, self.delta / self.messages
        unit = gaussian_sigma_classical(*each, allow_large_epsilon=True)
        sigma = unit * jnp.asarray(sensitivity)
        return sigma, gaussian_budget(sigma, sensitivity)


Budget = DynamicBudget | SplitBudget


def _check_each(**values: Any) -> None:
    """Raises ValueError unless every known entry is > 0 and finite; names one."""
    for name, value in values.items():
        known = np.asarray(value if is_known(value) else 1)
        wrong = known[~(np.isfinite(known) & (known > 0))]
        if wrong.size:
            raise ValueError(f"{name} must be > 0 and finite, got {wrong[0]}.")
