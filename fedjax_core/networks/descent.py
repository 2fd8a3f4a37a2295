r"""Steps of gradient methods, to be run by `iterate`.

Each function makes a ``step(w, t, key) -> w`` over pytrees. On a network the leaves are
``[n, ...]`` and the learning rate may differ by node. Numbers out of the ranges given
raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Chapter 4.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from fedjax_core import check
from fedjax_core.arrays import as_float, by_row
from fedjax_core.networks.iterate import Step
from fedjax_core.reduce import select
from fedjax_core.types import Key, PyTree

# One number, one per node [n], or an optax schedule t -> one of these.
Rate = ArrayLike | Callable[[Any], Any]
Gradient = Callable[[PyTree], PyTree]
Error = Callable[[PyTree, jax.Array, Key | None], PyTree]


def gradient_step(
    grad: Gradient,
    eta: Rate,
    *,
    project: Callable[[PyTree], PyTree] | None = None,
    error: Error | None = None,
) -> Step:
    r"""A gradient step, perturbed and projected on request (Alg. 2, (87), (91)).

    .. math::

      w \leftarrow P\bigl(w - \eta_t \nabla f(w) + e_t\bigr)

    Args:
      grad: ``(w) -> gradient``, like w.
      eta: the rate: a number > 0, one per node ``[n]``, or a schedule of t.
      project: P, see `projections`.
      error: ``(w, t, key) -> e_t``, like w.

    Raises:
      ValueError: a rate that is not > 0 and finite. What a schedule gives is not
        checked, nor whether the rate is small enough: `contraction.check_rate` does.
      TypeError: in a step, parameters that are ints.
    """
    check_positive_rate(eta)

    def step(w, t, key):
        rate = rate_at(eta, t)
        new = jax.tree.map(lambda x, g: x - by_row(rate, x) * g, w, grad(w))
        if error is not None:
            new = jax.tree.map(jnp.add, new, error(w, t, key))
        return new if project is None else project(new)

    return step


def proximal_step(prox: Callable[[PyTree, Any], PyTree], eta: Rate) -> Step:
    r"""The step that keeps f instead of its linear model (93).

    .. math::

      w \leftarrow \arg\min_v f(v) + \tfrac{1}{2\eta} \lVert v - w \rVert^2
      = \mathrm{prox}_{f, 1/\eta}(w)

    `prox` is ``(v, rho) -> w`` with the penalty rho/2, as of `oracles.Losses`, and eta
    as for `gradient_step`.
    """
    check_positive_rate(eta)

    def step(w, t, key):
        del key
        return prox(w, 1 / jnp.asarray(rate_at(eta, t)))

    return step


class Backtracking(NamedTuple):
    """State of `backtracking_step`: parameters and the rate last accepted."""

    w: PyTree
    eta: jax.Array


def backtracking_step(
    value: Callable[[PyTree], jax.Array],
    grad: Gradient,
    *,
    c1: float = 0.1,
    shrink: float = 0.5,
    max_tries: int = 50,
) -> Step:
    r"""Decrease and retry: a gradient step whose rate shrinks until f falls enough.

    Accepts :math:`w - \eta g` with :math:`g = \nabla f(w)` when

    .. math::

      f(w) - f(w - \eta g) \ge c_1 \eta \lVert g \rVert^2 ,

    a share of what the linear model of f predicts, else retries with a smaller rate.
    The accepted rate is where the next step begins. Where no try is accepted, w and the
    rate stay, so f never increases. The text leaves the constants open; these are the
    usual ones. Jung, Section 4.2.

    Args:
      value: ``(w) -> []``.
      grad: its gradient.
      c1: in (0, 1).
      shrink: factor of the rate, in (0, 1).
      max_tries: rates tried per step.

    Returns:
      A step of `Backtracking`; start from ``Backtracking(w, guess)``.

    Raises:
      ValueError: a constant out of range.
    """
    check.open_interval(0, 1, c1=c1, shrink=shrink)
    check.positive_int(max_tries=max_tries)

    def step(state, t, key):
        del t, key
        now, g = value(state.w), grad(state.w)
        squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(g)]
        square = sum(squares[1:], squares[0])

        def move(eta):
            return jax.tree.map(lambda x, d: x - eta.astype(x.dtype) * d, state.w, g)

        def accepted(eta):
            return now - value(move(eta)) >= c1 * eta * square

        def retry(carry):
            eta, tries, _ = carry
            eta = shrink * eta
            return eta, tries + 1, accepted(eta)

        eta, _, ok = lax.while_loop(
            lambda carry: ~carry[2] & (carry[1] < max_tries),
            retry,
            (state.eta, jnp.int32(1), accepted(state.eta)),
        )
        return select(ok, Backtracking(move(eta), eta), state)

    return step


def surrogate_error(grad: Gradient, other: Gradient, eta: Rate) -> Error:
    r"""The perturbation with which descent on f is descent on g.

    :math:`e_t = \eta (\nabla f - \nabla g)`: what is known of quadratic f then says
    something about any smooth g. `grad` is the gradient of f, the surrogate, `other`
    that of g, eta the rate of both.
    """
    check_positive_rate(eta)

    def error(w, t, key):
        del key
        rate = rate_at(eta, t)
        return jax.tree.map(lambda a, b: by_row(rate, a) * (a - b), grad(w), other(w))

    return error


def generalised_step(
    fit: Callable[[Any, Any, Any], Any],
    predict: Callable[[Any, Any], Any],
    data: tuple[ArrayLike, ArrayLike],
    test: ArrayLike,
    eta: float,
) -> Step:
    r"""The proximal step for models without parameters (Alg. 3, (96)).

    Distance is measured by predictions on a test set of m' points:

    .. math::

      h \leftarrow \arg\min_{h'} f(h') + \frac{1}{2 \eta m'}
      \sum_r \bigl(h'(x_r) - h(x_r)\bigr)^2 .

    For the squared loss it is a weighted fit to the m training points, weight 1/m each,
    and the test points labelled by h, weight 1/(2 eta m') each. The text starts at the
    hypothesis 0.

    Args:
      fit: ``(X, y, weight) -> h``, minimises the weighted sum of squared errors. With
        one that jax can't trace, such as scikit-learn's, call the step in a loop
        instead of giving it to `iterate`.
      predict: ``(h, X) -> [rows]``.
      data: X ``[m, d]`` and y ``[m]``.
      test: ``[m', d]``, the same in all steps.
      eta: > 0.

    Raises:
      ValueError: eta <= 0, or an empty training or test set.
    """
    check.positive(eta=eta)
    X, y, test = map(as_float, (*data, test))
    for name, rows in (("data", X), ("test", test)):
        if not len(rows):
            raise ValueError(f"{name} must have at least one row.")
    shares = (len(X), 1 / len(X)), (len(test), 1 / (2 * eta * len(test)))
    weight = jnp.concatenate([jnp.full(*share, X.dtype) for share in shares])
    both = jnp.concatenate([X, test])

    def step(h, t, key):
        del t, key
        return fit(both, jnp.concatenate([y, jnp.asarray(predict(h, test))]), weight)

    return step


def check_positive_rate(eta: Rate) -> None:
    """Refuses rates that are not > 0 and finite; schedules and traced values pass.

    Raises:
      ValueError: names the rate, and the node it belongs to; or several axes.
      TypeError: no number.
    """
    if callable(eta) or isinstance(eta, Tracer):
        return
    rates = np.asarray(eta)
    if rates.dtype.kind not in "iuf" and not jnp.issubdtype(rates.dtype, jnp.floating):
        raise TypeError(
            f"eta must be a number, one per node or a schedule, got {eta!r}."
        )
    if rates.ndim > 1:
        raise ValueError(
            f"eta must be one number or one per node, got shape {rates.shape}."
        )
    wrong = ~(np.isfinite(rates) & (rates > 0))
    if wrong.any():
        where = f" for node {np.flatnonzero(wrong)[0]}" if rates.ndim else ""
        raise ValueError(
            f"eta must be > 0 and finite, got {rates[wrong].flat[0]}{where}."
        )


def rate_at(eta: Rate, t: jax.Array) -> ArrayLike:
    """The rate of step t, one number or ``[n]``."""
    return eta(t) if callable(eta) else eta
