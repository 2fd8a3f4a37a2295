"""Human oversight: validation errors per node, uncertainty, and a log of a run.

Arrays of other shapes and arguments out of the ranges given raise ValueError.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 8.1 and 8.4.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core.arrays import as_mask
from fedjax_core.networks.graph import Graph
from fedjax_core.types import PyTree


def validation_error(
    W: jax.Array, X: jax.Array, y: jax.Array, mask: ArrayLike | None = None
) -> jax.Array:
    """The mean squared error of linear models.

    Args:
      W: ``[n, d]``.
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Returns:
      ``[n]``; to watch in every round, and a measure of uncertainty to tell users. NaN
      for a node without rows.
    """
    errors, rows = _residuals(W, X, y, mask)
    return jnp.mean(errors**2, axis=1, where=rows)


def residual_variance(
    W: jax.Array, X: jax.Array, y: jax.Array, mask: ArrayLike | None = None
) -> jax.Array:
    """Estimates the variance of a label given its features.

    The variance of y - w'x on data the model was not fit to: the error of a
    model that is right but for a constant.

    Args:
      W: ``[n, d]``.
      X: ``[n, m, d]``.
      y: ``[n, m]``.
      mask: ``[n, m]`` bool, the rows that exist; by default all.

    Returns:
      ``[n]``; NaN for a node with fewer than two rows.
    """
    errors, rows = _residuals(W, X, y, mask)
    return jnp.var(errors, axis=1, ddof=1, where=rows)


def log_lines(
    history: PyTree,
    config: Mapping[str, Any],
    *,
    graph: Graph,
    errors: ArrayLike | None = None,
    gradients_per_round: int | None = None,
    time: Callable[[], str] | None = None,
) -> list[str]:
    """The log of a run, one line of JSON per round.

    A line has the round, the SHA-256 of all parameters, the config, the validation
    errors, and what was spent so far: messages (two per edge of positive weight and
    round) and local gradients. Two runs with the same key give the same lines.

    Args:
      history: parameters after every round, leaves ``[T, n, ...]``, as `iterate`
        records them.
      config: what identifies the run; must be fit for JSON, which has no NaN.
      graph: the network.
      errors: ``[T, n]``, see `validation_error`; null where one is not finite.
      gradients_per_round: of all nodes together; by default one each.
      time: gives the time stamp of a line, which is left out by default since it makes
        the lines of two runs differ.

    Raises:
      ValueError: `errors` has another number of rounds than `history`, or a number in
        `config` is not finite.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(history)]
    rounds = leaves[0].shape[0]
    errors = None if errors is None else np.asarray(errors)
    if errors is not None and errors.shape != (rounds, graph.num_nodes):
        raise ValueError(
            f"errors must have shape ({rounds}, {graph.num_nodes}), got {errors.shape}."
        )
    try:
        json.dumps(dict(config), allow_nan=False)
    except ValueError as error:
        raise ValueError(f"config must be fit for JSON, got {config!r}.") from error
    messages = 2 * int((np.asarray(graph.weight) > 0).sum())
    gradients = graph.num_nodes if gradients_per_round is None else gradients_per_round
    lines = []
    for t in range(rounds):
        digest = hashlib.sha256()
        for x in leaves:
            digest.update(f"{x.dtype} {x.shape[1:]}".encode())
            digest.update(np.ascontiguousarray(x[t]).tobytes())
        line = {
            "round": t + 1,
            "parameters": digest.hexdigest(),
            "config": dict(config),
            "messages": messages * (t + 1),
            "gradients": gradients * (t + 1),
        }
        if errors is not None:
            line["validation_error"] = [
                e if math.isfinite(e) else None for e in errors[t].tolist()
            ]
        if time is not None:
            line["time"] = time()
        lines.append(json.dumps(line, sort_keys=True, allow_nan=False))
    return lines


def _residuals(
    W: jax.Array, X: jax.Array, y: jax.Array, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Labels minus predictions, and which rows exist; each ``[n, m]``."""
    rows = existing_rows(X, y, mask)
    if X.ndim != 3 or W.shape != (len(X), X.shape[2]):
        raise ValueError(
            "W, X and y must have shapes (n, d), (n, m, d) and (n, m), got "
            f"{W.shape}, {X.shape} and {y.shape}."
        )
    # Not only the result: the slope of what is NaN would be NaN.
    X = jnp.where(rows[..., None], X, 0)
    return jnp.where(rows, y, 0) - jnp.einsum("nmd,nd->nm", X, W), rows


def existing_rows(
    X: jax.Array,
    y: jax.Array,
    mask: ArrayLike | None,
    names: tuple[str, str, str] = ("X", "y", "mask"),
) -> jax.Array:
    """Which rows of X ``[..., d]`` exist, bool like y ``[...]``; by default all.

    Raises:
      ValueError: other shapes, of what the caller calls by `names`.
    """
    if y.shape != X.shape[:-1]:
        raise ValueError(
            f"{names[1]} must have the shape of {names[0]} without d, "
            f"{X.shape[:-1]}, got {y.shape}."
        )
    return as_mask(names[2], mask, y.shape)
