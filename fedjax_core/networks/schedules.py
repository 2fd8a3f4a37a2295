r"""Decaying learning rates, as optax schedules.

Constant, piecewise and exponential rates are in `optax.schedules`; what is missing
there are powers of t, the ones with which noisy gradients still converge.
"""

import jax.numpy as jnp
import optax

from fedjax_core import check


def power_decay(
    scale: float = 1.0, power: float = 1.0, shift: float = 1.0
) -> optax.Schedule:
    r"""The schedule :math:`\eta_t = s\,(t + c)^{-p}`, t = 0, 1, ...

    It has :math:`\eta_t \to 0`, :math:`\sum \eta_t = \infty` and
    :math:`\sum \eta_t^2 < \infty` if and only if 1/2 < p <= 1, see `check_decay`.
    The sequence 1/t of t = 1, 2, ... is the default, 1/(t + 5) is ``shift=6``, and
    :math:`\eta_0 / (1 + t / t_0)` is ``scale=eta0 * t0, shift=t0``.

    s and c are > 0, p >= 0, and 0 is a constant.

    References:
      Jung, "Federated Learning: From Theory to Practice", Section 4.2, Exercises 4.1
      to 4.3.
    """
    check.positive(scale=scale, shift=shift)
    check.non_negative(power=power)

    def schedule(count):
        t = jnp.asarray(count)
        return scale * (t.astype(jnp.result_type(float)) + shift) ** -power

    return schedule


def check_decay(power: float) -> None:
    r"""Refuses powers :math:`t^{-p}` with which convergence is not guaranteed.

    The guarantee also needs bounded iterates and gradients: from w = 2 the rate 1/t
    diverges on :math:`w^4`.

    Raises:
      ValueError: not 1/2 < power <= 1.
    """
    if not 0.5 < power <= 1:
        raise ValueError(
            "power must be in (1/2, 1], where the rates sum to infinity and their "
            f"squares do not, got {power}."
        )
