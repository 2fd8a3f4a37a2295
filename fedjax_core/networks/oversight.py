"""Human oversight: validation errors per node, uncertainty, and a log of a run.

References:
  Jung, "Federated Learning: From Theory to Practice", Sections 8.1 and 8.4.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fedjax_core.networks.graph import Graph
from fedjax_core.types import PyTree


def validation_error(W: jax.Array, X: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of linear models W ``[n, d]`` on data ``[n, m, d]``.

    Returns:
      ``[n]``; to watch in every round, and a measure of uncertainty to tell users.
    """
    return ((y - jnp.einsum("nmd,nd->nm", X, W)) ** 2).mean(1)


def residual_variance(W: jax.Array, X: jax.Array, y: jax.Array) -> jax.Array:
    """Estimates the variance of a label given its features; ``[n]``.

    The variance of y - w'x on data the model was not fit to: the error of a
    model that is right but for a constant.
    """
    return jnp.var(y - jnp.einsum("nmd,nd->nm", X, W), axis=1, ddof=1)


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
      config: what identifies the run; must be fit for JSON.
      graph: the network.
      errors: ``[T, n]``, see `validation_error`.
      gradients_per_round: of all nodes together; by default one each.
      time: gives the time stamp of a line, which is left out by default since it makes
        the lines of two runs differ.

    Raises:
      ValueError: `errors` has another number of rounds than `history`.
    """
    leaves = [np.asarray(x) for x in jax.tree.leaves(history)]
    rounds = leaves[0].shape[0]
    errors = None if errors is None else np.asarray(errors)
    if errors is not None and errors.shape != (rounds, graph.num_nodes):
        raise ValueError(
            f"errors must have shape ({rounds}, {graph.num_nodes}), got {errors.shape}."
        )
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
            line["validation_error"] = errors[t].tolist()
        if time is not None:
            line["time"] = time()
        lines.append(json.dumps(line, sort_keys=True))
    return lines
